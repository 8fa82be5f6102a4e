"""How much is fuzzed: all with `--hypothesis-profile=long`, a two-hundredth in the daily tests.

`--hypothesis-seed` repeats a run.
"""

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests.fuzz.served import fuzzed_cell

for name, examples in (("default", 5), ("long", 1000)):
    settings.register_profile(
        name,
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        phases=[Phase.generate, Phase.shrink],
    )


@pytest.fixture(scope="session")
def cell(tmp_path_factory):
    """The cell that all tests share, and that none of them hurts."""
    with fuzzed_cell(tmp_path_factory.mktemp("fuzz")) as cell:
        yield cell
