"""Models and what transformers says of them, made once for all system tests."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from pagefleet.manifest import TOKENIZER_FILE, Manifest
from tests.models import VOCAB_SIZE
from tests.system.oracle import Oracle
from tests.system.serving import Serving, pagefleet_serve
from tests.system.torch_cell import LoadedModel

TEXT = (
    "In the beginning every process owned all of the memory, and there was never enough of it. "
    "Then somebody cut it into pages of equal size, kept a table of where each one was, and let "
    "programs believe that what they had was whole. A page that two of them could share was kept "
    "once, and copied only when one of them wrote. When the pages ran out, the oldest went to the "
    "disk. 1, 1, 2, 3, 5, 8, 13, 21: def fibonacci(n):\n    return n if n < 2 else"
)

SMOLLM2 = "smollm2"


@dataclass(frozen=True)
class Case:
    """A model, in Pagefleet and in transformers, and text in its tokens."""

    model: LoadedModel
    make_oracle: Callable[[], Oracle]
    corpus: list[int]

    @cached_property
    def oracle(self) -> Oracle:
        """Takes seconds to load."""
        return self.make_oracle()

    def prompts(self, count: int, longest: int = 60) -> list[list[int]]:
        """Prompts of mixed lengths, from one token on; half of them begin alike.

        The first and the last are the longest, and the same.
        """
        prompts = [self.corpus[:longest]]
        for number in range(1, count - 1):
            length = random.randint(1, longest)
            start = random.randrange(len(self.corpus) - length) if number % 2 else 0
            prompts.append(self.corpus[start : start + length])
        prompts.append(self.corpus[:longest])
        return prompts


@pytest.fixture(scope="package")
def case(
    small_model: Callable[[str], Path],
    prepared_model: Callable[[str], Path],
    request: pytest.FixtureRequest,
) -> Callable[[str], Case]:
    """The case of a variant of `tests.models`, or of the default model."""

    @cache
    def make(name: str) -> Case:
        if name == SMOLLM2:
            folder: Path = request.getfixturevalue("smollm2")
            weights = Path(Manifest.load(folder).weights.paths[0])
            corpus = Tokenizer.from_file(str(folder / TOKENIZER_FILE)).encode(TEXT).ids
            oracle = partial(Oracle, weights.parent, weights.name)
            return Case(LoadedModel(folder), oracle, corpus)
        corpus = random.choices(range(VOCAB_SIZE), k=200)
        oracle = partial(Oracle, small_model(name))
        return Case(LoadedModel(prepared_model(name)), oracle, corpus)

    return make


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Iterator[Serving]:
    """`pagefleet serve` with the default model; every invariant is checked at every step."""
    with pagefleet_serve(tmp_path_factory.mktemp("serve"), "--check", "--dtype=float32") as serving:
        yield serving
