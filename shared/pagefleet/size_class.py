"""Classes of sizes, for what is learnt about sizes and need not be learnt for each."""


def size_class(size: int) -> int:
    """The size with all but its three leading bits cleared: sizes in a class differ by a quarter
    at most.
    """
    below = max(size.bit_length() - 3, 0)
    return size >> below << below
