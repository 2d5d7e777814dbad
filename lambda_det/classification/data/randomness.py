"""Random numbers that depend on what they are for, and on nothing that was drawn before."""

from __future__ import annotations

from enum import IntEnum

import numpy as np


class Purpose(IntEnum):
    """What random numbers are drawn for; two purposes never share a stream."""

    SAMPLE = 0
    ORDER = 1
    FRACTION = 2
    HELD_OUT = 3


def generator(purpose: Purpose, seed: int, *where: int) -> np.random.Generator:
    """A generator of its own for one purpose at one place.

    Args:
        purpose: with ``SAMPLE`` this is ``default_rng((seed, *where))``.
        seed: the run's, from 0.
        where: up to two numbers below 2**32, such as epoch and index.
    """
    # numpy pads entropy with zeros, so (seed, 3) is (seed, 3, 0) is (seed, 3, 0, 0): the purpose
    # takes the fourth place.
    first, second = (*where, 0, 0)[:2]
    return np.random.default_rng((seed, first, second, int(purpose)))
