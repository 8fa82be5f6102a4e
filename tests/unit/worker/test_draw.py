"""What bad words rule out, against their definition, and what it takes to look for them."""

import random
from array import array

from pagefleet.params import SamplingParams
from pagefleet_worker.sampling.draw import Draw


def draw_of(words: list[list[int]], history: "array[int]") -> Draw:
    params = SamplingParams(max_tokens=1, seed=1, bad_words=tuple(map(tuple, words)))
    return Draw(0, params, history, 0, 0, 0)


def test_the_last_token_of_a_bad_word_may_not_follow_the_others() -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(300):
        words = [rng.choices(range(3), k=rng.randint(1, 5)) for _ in range(rng.randint(0, 20))]
        history = rng.choices(range(3), k=rng.randint(0, 8))
        expected = {
            word[-1]
            for word in words
            if history[max(len(history) + 1 - len(word), 0) :] == word[:-1]
        }
        assert draw_of(words, array("i", history)).forbidden() == expected


def test_as_many_looks_are_taken_as_there_are_lengths_of_bad_words() -> None:
    """1,800 words in each of 256 rows of a step made tokens of all streams wait."""

    class Watched(array):  # type: ignore[type-arg]
        looks = 0

        def __getitem__(self, key: object) -> object:
            type(self).looks += 1
            return super().__getitem__(key)  # type: ignore[index]

    words = [[number, number % 7, 5][: 1 + number % 3] for number in range(1800)]
    draw = draw_of(words, Watched("i", range(100)))
    assert draw.forbidden() == set(range(0, 1800, 3))
    assert Watched.looks <= 3
