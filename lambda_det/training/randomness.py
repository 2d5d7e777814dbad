"""Random numbers that depend on what they are for, and on nothing that was drawn before.

So a resumed run draws what it would have drawn, without a record of any generator's state, and
neither the number of loader workers nor an evaluation in between changes what training sees.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

import numpy as np
import torch

__all__ = ["Purpose", "generator", "seed_all", "seeded"]


class Purpose(IntEnum):
    """What random numbers are drawn for; two purposes never share a stream."""

    SAMPLE = 0
    ORDER = 1
    FRACTION = 2
    HELD_OUT = 3
    STEP = 4
    SAMPLERS = 5
    GROUPS = 6


def generator(purpose: Purpose, seed: int, *where: int) -> np.random.Generator:
    """A generator of its own for one purpose at one place.

    Args:
        purpose: with ``SAMPLE`` this is ``default_rng((seed, *where))``.
        seed: the run's, from 0.
        where: up to two numbers below 2**32, such as epoch and index.
    """
    return np.random.default_rng(_entropy(purpose, seed, where))


def seed_all(purpose: Purpose, seed: int, *where: int, device: str = "cpu") -> None:
    """Set the global generators of Python, NumPy and torch for one purpose at one place.

    For code of others that draws from them, as Detectron2's models and augmentations do.

    Args:
        purpose, seed, where: as in :func:`generator`.
        device: "cuda" sets the generator of the current GPU as well.
    """
    words = np.random.SeedSequence(_entropy(purpose, seed, where)).generate_state(8)
    number = int.from_bytes(words[:2].tobytes(), "little")
    random.seed(number)
    np.random.seed(words)
    # Not torch.manual_seed, which without a GPU keeps a stack trace for CUDA at every call
    torch.default_generator.manual_seed(number)
    if torch.device(device).type == "cuda":
        torch.cuda.manual_seed(number)


@contextmanager
def seeded(purpose: Purpose, seed: int, *where: int) -> Iterator[None]:
    """``seed_all`` for what is done inside; afterwards the generators go on as if nothing were.

    The CPU's generators only: loaders do not draw on GPUs.
    """
    states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    seed_all(purpose, seed, *where)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.default_generator.set_state(states[2])


def _entropy(purpose: Purpose, seed: int, where: tuple[int, ...]) -> tuple[int, ...]:
    # numpy pads entropy with zeros, so (seed, 3) is (seed, 3, 0) is (seed, 3, 0, 0): the purpose
    # takes the fourth place.
    first, second = (*where, 0, 0)[:2]
    return (seed, first, second, int(purpose))
