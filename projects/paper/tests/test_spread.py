"""The statistics of a study against textbooks' figures, and against draws of known spread."""

from __future__ import annotations

import random
import statistics

import pytest

from lambda_paper import spread as of

# F = 42 / (68 / 15), p = 0.0024: the example of the article on the F-test in Wikipedia
EXAMPLE = [[6, 8, 4, 5, 3, 4], [8, 12, 9, 11, 6, 8], [13, 9, 11, 8, 7, 12]]


def test_the_textbook_s_variances():
    found, within = of.spread(EXAMPLE), 68 / 15
    assert found.ratio == pytest.approx(42 / within)
    assert found.seeds == pytest.approx(within**0.5)
    assert found.rows == pytest.approx(((42 - within) / 6) ** 0.5)
    assert found.share == pytest.approx((42 - within) / (42 + 5 * within))
    assert of.chance(EXAMPLE) == pytest.approx(0.0024, abs=0.003)


def test_rows_that_do_not_differ():
    rows = [[1.0, 2.0, 3.0], [3.0, 1.0, 2.0]]
    assert of.spread(rows)[1:] == (0, 0, 0) and of.chance(rows) == 1
    assert of.spread([[1.0, 1.0], [2.0, 2.0]])[2:] == (1, float("inf"))


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.706), (2, 4.303), (5, 2.571), (10, 2.228), (30, 2.042)]
)
def test_student_s_quantiles(freedom, quantile):
    assert of.t_quantile(freedom) == pytest.approx(quantile, abs=0.004)


def test_an_interval_holds_the_mean_in_95_of_100_studies():
    draw, held = random.Random(1), 0
    for _ in range(1000):
        rows = [[draw.gauss(mean, 2) for _ in range(3)] for mean in (0, 5, 9)]
        held += abs(statistics.fmean(rows[1]) - 5) < of.half_interval(rows)
    assert 930 <= held <= 970


def test_so_many_seeds_show_a_difference():
    assert of.seeds_for(0.4, 0.8) == 31 and of.seeds_for(9, 0.1) == 2  # 2 (1.96 x 0.8 / 0.4)^2


def test_spearman_and_its_interval():
    published = [1.0, 2.0, 2.0, 4.0]
    assert of.rank_correlation(published, [1, 5, 5, 6]) == pytest.approx(1)
    assert of.rank_correlation(published, [3, 3, 3, 3]) is None
    apart = [[10.0, 10.1], [20.0, 20.1], [20.0, 20.1], [30.0, 30.1]]
    low, high = of.rank_interval(published, apart)
    assert low == high == pytest.approx(0.949, abs=0.001)  # equal ones are drawn apart
    low, high = of.rank_interval(published, [[0.0, 9.0], [9.0, 0.0], [1.0, 8.0], [8.0, 1.0]])
    assert low < -0.7 and high > 0.7


def test_pairs_are_told_apart_by_more_than_seeds_give():
    rows = [[9.0, 11.0], [19.0, 21.0], [14.0, 16.0], [20.0, 20.0]]
    # s^2 = (2 + 2 + 2 + 0) / 4, t = 2.776 with 4 degrees of freedom
    assert of.least_difference(rows) == pytest.approx(2.776 * 1.5**0.5, abs=0.001)
    assert of.agreement([1.0, 2.0, 3.0, 1.0], rows, 4.0) == (2, 2)
    assert of.agreement([1.0, 2.0, 3.0, 1.0], rows, 5.0) == (1, 0)
