"""Where the tests of this folder run: on a GPU, or on one that is not there (`pretended`)."""

import random
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def device() -> Iterator[torch.device]:
    if torch.cuda.is_available():
        yield torch.device("cuda")
    else:
        from tests.gpu.pretended import pretended_gpu

        with pretended_gpu():
            yield torch.device("cuda")


@pytest.fixture
def generator() -> random.Random:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return random.Random(seed)
