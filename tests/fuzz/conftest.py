"""How much is fuzzed: a fiftieth of it in the daily tests, all with `--hypothesis-profile=long`.

`--hypothesis-seed` repeats a run.
"""

from hypothesis import HealthCheck, Phase, settings

for name, examples in (("default", 20), ("long", 1000)):
    settings.register_profile(
        name,
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        phases=[Phase.generate, Phase.shrink],
    )
