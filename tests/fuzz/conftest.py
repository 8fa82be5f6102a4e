"""The cell that is fuzzed."""

import pytest

from tests.fuzz.served import fuzzed_cell


@pytest.fixture(scope="package")
def cell(tmp_path_factory):
    """The cell that all tests share, and that none of them hurts."""
    with fuzzed_cell(tmp_path_factory.mktemp("fuzz")) as cell:
        yield cell
