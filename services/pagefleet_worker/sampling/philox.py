"""Philox4x32-10: random bits that are a function of a counter, not of a generator's state.

The n-th token of a choice is drawn with bits that depend on the request's seed, the choice and n
alone. So a stream is the same in any batch, after a preemption, and on another worker.

Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011),
section 3.3; the words are laid out as in their Random123 library.
"""

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
WORD = 0xFFFFFFFF

DRAW_BITS = 24
"""Random bits a draw has: as many as a float32 in [0, 1) can hold."""


def philox4x32(
    counter: tuple[int, int, int, int], key: tuple[int, int]
) -> tuple[int, int, int, int]:
    """Four random words of 32 bits for a counter of four words and a key of two."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        first, second = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            second >> 32 ^ c1 ^ k0,
            second & WORD,
            first >> 32 ^ c3 ^ k1,
            first & WORD,
        )
        k0, k1 = k0 + KEY_STEPS[0] & WORD, k1 + KEY_STEPS[1] & WORD
    return c0, c1, c2, c3


def draw_bits(seed: int, choice: int, position: int) -> int:
    """The `DRAW_BITS` random bits for one token; `position` is 0 for the first that is generated.

    The counter is (position, choice, 0, 0), the key the low and the high word of the seed; taken
    are the upper bits of the first word.
    """
    word = philox4x32((position, choice, 0, 0), (seed & WORD, seed >> 32))[0]
    return word >> 32 - DRAW_BITS


def uniform(seed: int, choice: int, position: int) -> float:
    """`draw_bits` as a number in [0, 1)."""
    return draw_bits(seed, choice, position) * 2.0**-DRAW_BITS
