"""Sizes that are taken for the same where something is learnt for each."""


def size_class(size: int) -> int:
    """A number that sizes share if they differ by a quarter at most: the three leading bits."""
    below = max(size.bit_length() - 3, 0)
    return size >> below << below
