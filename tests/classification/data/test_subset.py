import numpy as np
import pytest

from lambda_det.classification.data.subset import (
    Subset,
    split_held_out,
    take_fraction,
)
from tests.classification.data.toy import ToySource

# 1, 2, 10 and 51 images of four classes, mixed
LABELS = np.random.default_rng(0).permutation([0] + [1] * 2 + [2] * 10 + [3] * 51).tolist()


def per_class(indices):
    return np.bincount(np.array(LABELS)[indices], minlength=4).tolist()


@pytest.mark.parametrize(
    ("fraction", "held", "taken"),
    [
        (0.001, [0, 1, 1, 1], [1, 1, 1, 1]),
        (0.3, [0, 1, 3, 15], [1, 1, 3, 15]),
        (0.99, [0, 1, 9, 50], [1, 2, 10, 50]),
        (1.0, None, [1, 2, 10, 51]),
    ],
)
def test_each_class_gives_its_share(fraction, held, taken):
    """Of what is held out at least one image, never all; counted by hand."""
    indices = take_fraction(ToySource(LABELS), fraction, seed=0)
    assert per_class(indices) == taken and (np.diff(indices) > 0).all()
    if held:
        train, held_out = split_held_out(ToySource(LABELS), fraction, seed=0)
        assert per_class(held_out) == held
        assert sorted([*train, *held_out]) == list(range(64))
        assert (np.diff(train) > 0).all() and (np.diff(held_out) > 0).all()


@pytest.mark.parametrize("choose", [take_fraction, lambda *a: split_held_out(*a)[1]])
def test_the_choice_is_random_and_that_of_the_seed(choose):
    empty = ToySource([0, 0, 2, 2])  # of class 1
    assert empty.labels[choose(empty, 0.5, 0)].tolist() == [0, 2]
    source = ToySource(LABELS)
    first, again, other = (choose(source, 0.3, seed).tolist() for seed in (0, 0, 1))
    assert first == again != other
    # Not the first ones of a class: those of a folder are often frames of one film.
    of_class = np.flatnonzero(np.array(LABELS) == 3)
    chosen = [index for index in first if LABELS[index] == 3]
    assert chosen != of_class[: len(chosen)].tolist()


def test_a_subset_is_the_images_of_its_indices():
    source = ToySource(LABELS)
    subset = Subset(Subset(source, np.array([7, 3, 40])), np.array([2, 0]))
    assert len(subset) == 2 and subset.classes == source.classes
    assert subset.labels.tolist() == [LABELS[40], LABELS[7]]
    assert [subset.name(index) for index in range(2)] == ["image 40", "image 7"]
    assert [int(subset.load(index)[0, 0, 0]) for index in range(2)] == [40, 7]
