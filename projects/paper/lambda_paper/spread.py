"""How far the seeds of a study decide its order: intervals, and shares of variance.

A study is here a list of rows with the results of their seeds, as many in each row. Seeds are taken
to spread equally in all rows, so that three of each are enough to know by how much.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from itertools import chain, combinations
from statistics import NormalDist, fmean
from typing import NamedTuple

Rows = Sequence[Sequence[float]]
DRAWS = 2000


class Spread(NamedTuple):
    """Of the results of a study (analysis of variance, one way).

    Attributes:
        seeds: standard deviation of results of one row.
        rows: standard deviation of the rows, without what seeds add to that of their means.
        share: of the variance of a result, that of its row (intraclass correlation): 0 where seeds
            alone decide, 1 where they do not matter.
        ratio: F, variance of the rows' means over what seeds alone would give them, 1 on average.
    """

    seeds: float
    rows: float
    share: float
    ratio: float


def spread(rows: Rows) -> Spread:
    """The spread of at least two rows of at least two seeds."""
    number = len(rows[0])
    within = fmean(map(statistics.variance, rows))
    between = number * statistics.variance(list(map(fmean, rows)))
    of_rows = max(between - within, 0.0) / number
    share = of_rows / (of_rows + within) if of_rows else 0.0
    return Spread(within**0.5, of_rows**0.5, share, between / within if within else float("inf"))


def chance(rows: Rows) -> float:
    """The share of random deals of the results to the rows whose F is at least the found one."""
    found, number = spread(rows).ratio, len(rows[0])
    dealt, generator, as_high = list(chain(*rows)), random.Random(0), 0
    for _ in range(DRAWS):
        generator.shuffle(dealt)
        dealt_rows = [dealt[i : i + number] for i in range(0, len(dealt), number)]
        as_high += spread(dealt_rows).ratio >= found
    return as_high / DRAWS


def half_interval(rows: Rows) -> float:
    """A mean of a row plus and minus this is its 95 % interval (Student's t)."""
    number = len(rows[0])
    return t_quantile(len(rows) * (number - 1)) * (spread(rows).seeds / number**0.5)


def least_difference(rows: Rows) -> float:
    """What two rows must differ by at least, for seeds alone to give it in 5 of 100 studies."""
    return half_interval(rows) * 2**0.5


def agreement(published: Sequence[float], rows: Rows, least: float) -> tuple[int, int]:
    """Of the pairs of rows that differ by more than ``least``: in the published order, and not."""
    pairs = combinations(zip(published, map(fmean, rows), strict=True), 2)
    order = [(p - q) * (x - y) for (p, x), (q, y) in pairs if abs(x - y) > least]
    return sum(sign > 0 for sign in order), sum(sign < 0 for sign in order)


def t_quantile(freedom: int) -> float:
    """What Student's t exceeds with a probability of 2.5 %, by degrees of freedom from 1."""
    if freedom <= 4:
        return (12.706, 4.303, 3.182, 2.776)[freedom - 1]
    z = NormalDist().inv_cdf(0.975)  # Abramowitz and Stegun, 26.7.5
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return sum(term / freedom**i for i, term in enumerate(terms))


def seeds_for(difference: float, seeds: float) -> int:
    """How many seeds of each of two rows show a difference, by their standard deviation."""
    return max(2, -int(-2 * (NormalDist().inv_cdf(0.975) * seeds / difference) ** 2 // 1))


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Spearman's; None where all values of one are equal."""
    if min(len(set(one)), len(set(other))) < 2:
        return None
    return statistics.correlation(ranks(one), ranks(other))


def ranks(values: Sequence[float]) -> list[float]:
    """Of each value the number of lower ones, and half of that of equal ones."""
    return [
        sum(v < value for v in values) + sum(v == value for v in values) / 2 for value in values
    ]


def rank_interval(published: Sequence[float], rows: Rows) -> tuple[float, float]:
    """The 95 % interval of the rank correlation: means drawn anew with the seeds' spread."""
    error, generator = spread(rows).seeds / len(rows[0]) ** 0.5, random.Random(0)
    means = list(map(fmean, rows))
    drawn = sorted(
        rank_correlation(published, [generator.gauss(mean, error) for mean in means]) or 0.0
        for _ in range(DRAWS)
    )
    return drawn[DRAWS // 40], drawn[-DRAWS // 40]
