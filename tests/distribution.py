"""What one of several processes of tests runs in a row: a file, or a folder that is a package.

So tests that share a cell or a model share one. The tests of faults wait most of the time: beside
them the other process computes, where two that waited would leave the cores idle.
"""

from pathlib import Path

from xdist.scheduler import LoadFileScheduling


class PackageScheduling(LoadFileScheduling):
    """xdist's `--dist loadfile`, with packages in place of their files."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        folder = str(Path(file).parent)
        is_package = (self.config.rootpath / folder / "__init__.py").exists()
        return folder if is_package else file
