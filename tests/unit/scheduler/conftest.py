"""Fixtures for tests of the scheduler core."""

import pytest

from tests.unit.scheduler.core_cell import Cell


@pytest.fixture
def cell() -> Cell:
    """A scheduler that nobody has joined."""
    return Cell()
