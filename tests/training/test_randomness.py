import random

import numpy as np
import pytest
import torch

from lambda_det.training.randomness import Purpose, generator, seed_all, seeded


def _drawn() -> tuple:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def _of(*place: int) -> tuple:
    seed_all(*place)
    return _drawn()


def test_a_place_has_its_own_numbers_whatever_was_drawn_before():
    first = _of(Purpose.STEP, 7, 3, 1)
    _drawn()
    assert _of(Purpose.STEP, 7, 3, 1) == first
    others = [
        _of(*place)
        for place in (
            (Purpose.GROUPS, 7, 3, 1),
            (Purpose.STEP, 8, 3, 1),
            (Purpose.STEP, 7, 4, 1),
            (Purpose.STEP, 7, 3, 2),
            (Purpose.STEP, 7, 1, 3),
        )
    ]
    for number in range(3):
        values = [first[number], *(other[number] for other in others)]
        assert len(set(values)) == len(values)


def test_seeded_leaves_the_generators_as_they_were():
    """After an error, too."""
    seed_all(Purpose.STEP, 1)
    expected = _drawn(), _drawn()
    seed_all(Purpose.STEP, 1)
    before = _drawn()
    with pytest.raises(KeyError), seeded(Purpose.SAMPLE, 5, 2):
        inside = _drawn()
        raise KeyError
    assert (before, _drawn()) == expected
    assert inside == _of(Purpose.SAMPLE, 5, 2)


def test_purposes_of_a_generator_differ():
    numbers = {generator(purpose, 0).integers(2**62) for purpose in Purpose}
    assert len(numbers) == len(Purpose)
    assert generator(Purpose.SAMPLE, 4, 2).random() == np.random.default_rng((4, 2)).random()
