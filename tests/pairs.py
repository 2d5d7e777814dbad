"""Combinations for tests with several parameters, where a full product says no more."""

from collections.abc import Iterable
from itertools import combinations, product
from typing import Any


def pairs(*values: Iterable[Any]) -> list[tuple[Any, ...]]:
    """A few combinations in which each two values of different parameters meet.

    Each next one is the combination with the most pairs that have not met.

    Args:
        values: of each parameter; three or more, since of two it is the full product.
    """
    lists = [list(one) for one in values]
    places = [[(which, n) for n in range(len(one))] for which, one in enumerate(lists)]
    every = list(product(*places))
    left = {pair for one in every for pair in combinations(one, 2)}
    chosen = []
    while left:
        best = max(every, key=lambda one: len(left.intersection(combinations(one, 2))))
        left.difference_update(combinations(best, 2))
        chosen.append(tuple(lists[which][n] for which, n in best))
    return chosen
