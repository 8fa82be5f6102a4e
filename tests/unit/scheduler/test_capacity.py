"""What workers can hold, one by one and all of them."""

import random

from pagefleet_scheduler.capacity import Capacity
from pagefleet_scheduler.sequence import Needs


def capacity(draw: random.Random, block_size: int) -> Capacity:
    return Capacity(
        max_model_len=draw.randint(20, 60),
        blocks=draw.randint(4, 20),
        block_size=block_size,
        slots=draw.randint(1, 4),
        caching=draw.random() < 0.5,
        numerics=draw.randrange(3),
    )


def test_what_fits_the_least_fits_all() -> None:
    """And of workers that are alike, nothing else does."""
    draw, fitting = random.Random(seed := random.randrange(2**32)), 0
    for _ in range(2000):
        sizes = draw.choice([(4,), (4, 8)])
        several = [capacity(draw, draw.choice(sizes)) for _ in range(draw.randint(1, 4))]
        needs = Needs(draw.randint(1, 40), draw.randint(0, 30), draw.randint(1, 4))
        fits_all = all(each.fits(needs) for each in several)
        fits_least = Capacity.least(several).fits(needs)
        assert fits_all or not fits_least, seed
        assert Capacity.least(several[:1] * 3).fits(needs) == several[0].fits(needs), seed
        fitting += fits_least
    assert 100 < fitting < 1900


def test_without_workers_nothing_fits() -> None:
    assert not Capacity.least([]).fits(Needs(1, 0, 1))
