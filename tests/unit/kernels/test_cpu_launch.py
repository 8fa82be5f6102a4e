"""What compiled kernels leave on disk."""

import os

from pagefleet_kernels import cpu_launch


def test_compiled_kernels_of_old_versions_are_removed(tmp_path):
    versions = [tmp_path / str(number) for number in range(12)]
    for age, version in enumerate(versions):
        version.mkdir()
        (version / "kernel.nbc").touch()
        os.utime(version, (1e9 - age, 1e9 - age))
    cpu_launch._forget_old_versions(versions[11])
    assert {*tmp_path.iterdir()} == {*versions[:7], versions[11]}
