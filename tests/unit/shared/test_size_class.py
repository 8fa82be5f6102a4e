"""Sizes that are taken for the same."""

from collections import defaultdict

from pagefleet.size_class import size_class


def test_sizes_of_a_class_differ_by_a_quarter_at_most() -> None:
    classes = defaultdict(list)
    for size in range(1, 10_000):
        classes[size_class(size)].append(size)
    assert all(max(same) <= 1.25 * min(same) for same in classes.values())
