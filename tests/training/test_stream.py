"""The order of images, against plain loops over Detectron2's samplers."""

import itertools

import numpy as np
import pytest
import torch
from detectron2.data.samplers import (
    RandomSubsetTrainingSampler,
    RepeatFactorTrainingSampler,
    TrainingSampler,
)
from torch.utils.data import Sampler

from lambda_det.training.randomness import Purpose, generator
from lambda_det.training.stream import Sources, Stream, orientations

SIZE = 37
# Two in five are higher than wide
WIDE = [index % 5 not in (1, 3) for index in range(SIZE)]
FACTORS = torch.linspace(0.3, 2.7, SIZE)
SAMPLERS = {
    "shuffled": lambda **seed: TrainingSampler(SIZE, **seed),
    "in order": lambda **seed: TrainingSampler(SIZE, shuffle=False, **seed),
    "repeated": lambda **seed: RepeatFactorTrainingSampler(FACTORS, **seed),
    "repeated in order": lambda **seed: RepeatFactorTrainingSampler(FACTORS, shuffle=False, **seed),
    "subset": lambda seed=None, subset=None: RandomSubsetTrainingSampler(
        SIZE, 0.6, seed_shuffle=seed, seed_subset=subset
    ),
}


def as_process(monkeypatch, rank, world_size):
    monkeypatch.setattr("detectron2.utils.comm.get_rank", lambda: rank)
    monkeypatch.setattr("detectron2.utils.comm.get_world_size", lambda: world_size)
    monkeypatch.setattr("detectron2.utils.comm.shared_random_seed", lambda: 99)


def sampler_of(name, seed):
    """The sampler that Detectron2 builds with the seeds of the run."""
    order, subset = generator(Purpose.SAMPLERS, seed).integers(2**31, size=2).tolist()
    extra = {"subset": subset} if name == "subset" else {}
    return SAMPLERS[name](seed=order, **extra)


def reference(name, seed, count, group=1):
    """The first images of the stream of all processes, in plain loops."""
    ungrouped = iter(sampler_of(name, seed))
    if group == 1:
        return [next(ungrouped) for _ in range(count)]
    result = []
    for window in itertools.count():
        if len(result) >= count:
            return result[:count]
        images = [next(ungrouped) for _ in range(16 * group)]
        images.sort(key=lambda index: not WIDE[index])  # a stable sort
        groups = [images[k * group : (k + 1) * group] for k in range(16)]
        for k in np.random.default_rng((seed, window, 0, 6)).permutation(16):
            result += groups[k]


def batches(stream, count, seed=5, first=0):
    return list(itertools.islice(stream.batches(seed, first), count))


def make(name, images, *, grouped=False, **options):
    is_wide = WIDE.__getitem__ if grouped else None
    return Stream(SAMPLERS[name](), images, is_wide=is_wide, **options)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("name", SAMPLERS)
def test_the_order_is_detectron2s_and_can_be_begun_anywhere(name, grouped):
    """Over several epochs, and for any seed that the sampler drew when it was made."""
    for seed in (5, 6):
        found = batches(make(name, 4, grouped=grouped), 100, seed)
        indices = [index for batch in found for _, _, index in batch]
        assert indices == reference(name, seed, 400, group=4 if grouped else 1)
        assert [key[:2] for batch in found for key in batch] == [(seed, p) for p in range(400)]
        assert all(type(number) is int for key in found[0] for number in key)
        for first in (1, 15, 16, 17, 64):
            stream = make(name, 4, grouped=grouped)
            assert batches(stream, 20, seed, first) == found[first : first + 20]


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(("world_size", "accumulate"), [(1, 4), (2, 2), (4, 1)])
def test_a_step_has_the_same_images_with_any_number_of_processes(
    monkeypatch, world_size, accumulate, grouped
):
    """Batch i of process r of R is part number i * R + r of a step of 12 images."""
    expected = reference("repeated", 5, 50 * 12, group=3 if grouped else 1)
    for rank in range(world_size):
        as_process(monkeypatch, rank, world_size)
        found = batches(make("repeated", 12 // accumulate, grouped=grouped), 50 * accumulate)
        for number, batch in enumerate(found):
            step, i = divmod(number, accumulate)
            start = step * 12 + (i * world_size + rank) * 3
            assert [position for _, position, _ in batch] == [start, start + 1, start + 2]
            assert [index for _, _, index in batch] == expected[start : start + 3]


@pytest.mark.parametrize("grouped", [False, True])
def test_a_resume_with_other_numbers_keeps_the_order(monkeypatch, grouped):
    """Begun by one process with batches of 8; taken up by four, each with one image."""
    began = make("shuffled", 8, grouped=grouped)
    whole = [key for batch in batches(began, 40) for key in batch]
    state = began.state_dict()
    rest = []
    for rank in range(4):
        as_process(monkeypatch, rank, 4)
        stream = make("shuffled", 4, grouped=grouped)
        stream.load_state_dict(state)
        assert stream.state_dict() == state
        rest += [key for batch in batches(stream, 60, first=20) for key in batch]
    assert sorted(rest, key=lambda key: key[1]) == whole[80:320]


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_of_the_user_keeps_its_seeds(name):
    """Also seeds that the sampler drew itself, over a resume."""
    extra = {"subset": 8} if name == "subset" else {}
    stream = Stream(SAMPLERS[name](seed=7, **extra), 6, own_seeds=True)
    own = iter(SAMPLERS[name](seed=7, **extra))
    found = batches(stream, 30, seed=1)
    assert [i for batch in found for *_, i in batch] == [next(own) for _ in range(180)]
    drawn = make(name, 6, own_seeds=True)
    resumed = make(name, 6, own_seeds=True)
    resumed.load_state_dict(drawn.state_dict())
    assert batches(resumed, 10, first=3) == batches(drawn, 13)[3:]


class Countdown(Sampler):
    """A sampler of one process whose indices end."""

    def __init__(self, count):
        self._count = count

    def __iter__(self):
        return iter(range(self._count - 1, -1, -1))


class EvenFirst(TrainingSampler):
    """A subclass whose order is not the one that ``_infinite_indices`` gives."""

    def __iter__(self):
        return itertools.cycle([*range(0, SIZE, 2), *range(1, SIZE, 2)])


def test_a_foreign_sampler_is_taken_as_it_is(monkeypatch, caplog):
    as_process(monkeypatch, 1, 2)
    found = batches(Stream(Countdown(SIZE), 10), 99)
    assert [[i for *_, i in batch] for batch in found] == [
        list(range(SIZE - 1 - start, SIZE - 6 - start, -1)) for start in range(0, 35, 5)
    ]
    assert [p for _, p, _ in found[1]] == [15, 16, 17, 18, 19]  # this process's, of all
    assert not caplog.records
    stream = Stream(EvenFirst(SIZE), 10)
    stream.load_state_dict(stream.state_dict())
    assert [i for *_, i in batches(stream, 4, first=3)[0]] == [30, 32, 34, 36, 1]
    (record,) = caplog.records
    assert "EvenFirst" in record.getMessage()
    assert [i for *_, i in batches(Stream([4, 2, 0, 1], 4), 9)[0]] == [4, 2]


def test_the_last_window_of_a_finite_sampler():
    wide = [index < 20 for index in range(SIZE)]
    found = batches(Stream(Countdown(SIZE), 2, is_wide=wide.__getitem__), 99)
    indices = [i for batch in found for *_, i in batch]
    assert sorted(indices[:32]) == list(range(5, 37))  # of the first window; one is left over
    assert len(set(indices)) == len(indices) == 36


def test_orientations():
    sizes = ({"width": 3, "height": 2}, {"width": 2, "height": 3}, {"width": 2, "height": 2})
    unknown = ({"file_name": "of unknown size"}, "not a dict")
    assert orientations([*sizes, *unknown]).tolist() == [True, False, True, True, True]


# ----------------------------------------------------------------- records that share a large file
FILE_OF = np.arange(SIZE) * 3 % 5  # of each record
FILE_SIZES = np.array([4, 5, 6, 7, 3])


@pytest.mark.parametrize("name", SAMPLERS)
def test_files_that_do_not_all_fit_are_drawn_together(name):
    """Windows of as many images as there are have the images of the sampler, and read few files."""
    sources = Sources(FILE_OF, FILE_SIZES, kept=12)
    count = 4 * SIZE
    found = [index for ((_, _, index),) in batches(make(name, 1, sources=sources), count)]
    plain = reference(name, 5, count)
    assert found != plain
    orders = set()
    for start in range(0, count, SIZE):
        window = found[start : start + SIZE]
        assert sorted(window) == sorted(plain[start : start + SIZE])
        files = FILE_OF[window]
        orders.add(tuple(files))
        kept, reads = [], 0
        for file in files:
            if file not in kept:
                reads += 1
                while kept and FILE_SIZES[[*kept, file]].sum() > 12:
                    kept.pop(0)
            kept = [one for one in kept if one != file] + [file]
        assert reads == len(set(files))
        assert len(set(files[: SIZE // 5])) > 1  # several files are mixed
    assert len(orders) == 4
    again = batches(make(name, 1, sources=sources), 30, first=SIZE + 7)
    assert [index for ((_, _, index),) in again] == found[SIZE + 7 : SIZE + 37]


def test_files_that_fit_leave_the_order():
    sources = Sources(FILE_OF, FILE_SIZES, kept=25)
    assert batches(make("shuffled", 4, sources=sources), 30) == batches(make("shuffled", 4), 30)


def test_an_order_by_files_is_the_same_for_all_processes(monkeypatch):
    sources = Sources(FILE_OF, FILE_SIZES, kept=12)
    whole = batches(make("repeated", 4, sources=sources), 40)
    for rank in range(2):
        as_process(monkeypatch, rank, 2)
        share = batches(make("repeated", 4, sources=sources), 40)
        assert share == [batch[2 * rank : 2 * rank + 2] for batch in whole]
