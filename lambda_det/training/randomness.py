"""Random numbers by place: they depend on their purpose and position, not on earlier draws.

A resumed run draws the same numbers without a record of any generator's state. Neither the number
of loader workers nor an evaluation in between changes what training sees.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

import numpy as np
import torch


class Purpose(IntEnum):
    """What random numbers are drawn for. Two purposes never share a stream."""

    SAMPLE = 0
    ORDER = 1
    FRACTION = 2
    HELD_OUT = 3
    STEP = 4
    SAMPLERS = 5
    GROUPS = 6
    VALIDATION = 8
    SOURCES = 10


def generator(purpose: Purpose, seed: int, *where: int) -> np.random.Generator:
    """The generator of one purpose at one place.

    Args:
        purpose: ``SAMPLE`` gives ``default_rng((seed, *where))``.
        seed: the run's, from 0.
        where: up to two numbers below 2**32, such as epoch and index.
    """
    return np.random.default_rng(_entropy(purpose, seed, where))


def seed_all(purpose: Purpose, seed: int, *where: int, device: str = "cpu") -> None:
    """Set the global generators of Python, NumPy and torch for one purpose at one place.

    Detectron2's models and augmentations draw from these.

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
    """:func:`seed_all` inside the block; the generators have their old states after it.

    Only the CPU's generators are set, because loaders do not draw on GPUs.
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
    # numpy pads entropy with zeros: (seed, 3), (seed, 3, 0) and (seed, 3, 0, 0) are equal. So the
    # purpose has the fourth place.
    first, second = (*where, 0, 0)[:2]
    return (seed, first, second, int(purpose))
