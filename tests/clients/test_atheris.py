"""A short run of the guided fuzz (`tests.fuzz.guided`): it finds new branches, and no crash."""

from collections.abc import Callable

from tests.clients.conftest import SOURCES


def test_guided_fuzz(run_client: Callable[..., str]) -> None:
    said = run_client(
        "atheris",
        "python",
        "-m",
        "tests.fuzz.guided",
        "-max_total_time=30",
        "-max_len=4000",
        "-len_control=0",
        PYTHONPATH=SOURCES,
    )
    assert "NEW" in said
    assert "Done" in said
