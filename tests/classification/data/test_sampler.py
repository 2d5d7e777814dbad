from __future__ import annotations

import itertools

import numpy as np
import pytest

from lambda_det.classification.data.sampler import EpochBatches
from lambda_det.training.randomness import Purpose, generator


def batches(count, size=10, seed=0, start=0, batch=5, rank=0, world_size=1):
    sampler = EpochBatches(size, seed, start, batch, rank, world_size)
    return list(itertools.islice(sampler, count))


def stream(count, size=10, seed=0, start=0):
    return [pair for (pair,) in batches(count, size, seed, start, batch=1)]


def test_every_epoch_is_a_permutation_and_another_one():
    pairs = stream(50)
    assert [epoch for epoch, _ in pairs] == [e for e in range(5) for _ in range(10)]
    orders = [[i for _, i in pairs[e * 10 : e * 10 + 10]] for e in range(5)]
    assert all(sorted(order) == list(range(10)) for order in orders)
    assert len({tuple(order) for order in orders}) == 5
    assert list(range(10)) not in orders


def test_the_order_is_that_of_the_seed():
    """In a stream of its own: the plain (seed, epoch) is that of the first sample."""
    assert [i for _, i in stream(30, seed=5)[10:20]] == list(
        np.random.default_rng((5, 1, 0, 1)).permutation(10)
    )
    assert stream(30) == stream(30)
    assert stream(30) != stream(30, seed=1)
    assert all(type(number) is int for pair in stream(3) for number in pair)


@pytest.mark.parametrize("size", [1, 3, 10, 16])
@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("batch", [1, 4, 12])
@pytest.mark.parametrize("start", [0, 12, 25])
def test_the_processes_take_turns_with_the_single_stream(size, world_size, batch, start):
    """Also where an epoch has fewer images than there are processes, or than a batch has."""
    single = stream(3 * batch * world_size, size, start=start)
    shares = [batches(3, size, 0, start, batch, rank, world_size) for rank in range(world_size)]
    turns = [pair for step in range(3) for share in shares for pair in share[step]]
    assert turns == single


@pytest.mark.parametrize("start", [1, 4, 9, 10, 11, 37])
def test_resuming_gives_the_tail(start):
    assert stream(40, start=start) == stream(40 + start)[start:]


def test_batches_can_be_read_again():
    sampler = EpochBatches(10, 0, 3, 4, 0, 1)
    first, second = iter(sampler), iter(sampler)
    assert list(itertools.islice(first, 5)) == list(itertools.islice(second, 5))


def test_samples_and_orders_have_streams_of_their_own():
    """numpy pads entropy with zeros: the plain (seed, epoch) is also that of the first sample."""
    sample = generator(Purpose.SAMPLE, 5, 3, 7).integers(2**63, size=4)
    np.testing.assert_array_equal(sample, np.random.default_rng((5, 3, 7)).integers(2**63, size=4))
    draws = {int(generator(purpose, 5, 3).integers(2**63)) for purpose in Purpose}
    draws |= {int(generator(Purpose.SAMPLE, 5, 3, index).integers(2**63)) for index in range(1, 5)}
    assert len(draws) == len(Purpose) + 4
