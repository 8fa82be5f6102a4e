"""Sizes that are taken for the same."""

from pagefleet.size_class import size_class


def test_sizes_of_a_class_differ_by_a_quarter_at_most() -> None:
    for size in range(1, 5000):
        same = [each for each in range(size, 2 * size) if size_class(each) == size_class(size)]
        assert max(same) <= 1.25 * size
