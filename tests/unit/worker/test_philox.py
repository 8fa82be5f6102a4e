from pagefleet_worker.sampling.philox import draw_bits, philox4x32, uniform

# Random123, tests/kat_vectors: philox4x32 with 10 rounds (counter, key, result).
VECTORS = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF,) * 2,
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)


def test_agrees_with_random123() -> None:
    for counter, key, result in VECTORS:
        assert philox4x32(counter, key) == result


def test_a_draw_takes_the_upper_bits_of_the_first_word() -> None:
    seed = 0x299F31D0A4093822
    word = philox4x32((7, 3, 0, 0), (0xA4093822, 0x299F31D0))[0]
    assert draw_bits(seed, choice=3, position=7) == word >> 8
    assert uniform(seed, choice=3, position=7) == (word >> 8) / 2**24
