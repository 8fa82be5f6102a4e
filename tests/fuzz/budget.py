"""How much is fuzzed: all with `--hypothesis-profile=long`, a two-hundredth in the daily tests.

`--hypothesis-seed` repeats a run.
"""

from hypothesis import HealthCheck, Phase, settings

FUZZ = settings(
    max_examples=1000 if settings.get_current_profile_name() == "long" else 5,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    phases=[Phase.generate, Phase.shrink],
)
