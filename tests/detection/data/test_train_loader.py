"""Batches of training, byte for byte, whatever loads them and wherever they begin."""

from __future__ import annotations

import itertools
import pickle
import random
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
from detectron2.data.datasets import register_coco_instances
from torch.utils.data import Dataset, IterableDataset

from lambda_det.detection.data import build_train_loader, tolerant_train_loader
from lambda_det.detection.data.loader import SkippingDataset
from lambda_det.errors import ConfigError, DataError
from tests.detection.data.conftest import annotation


@pytest.fixture
def ready(cfg, write):
    """A config over a registered data set of eleven small images, four of them upright."""
    upright = (2, 3, 5, 9)
    images = [
        {"id": i, "file_name": f"{i}.png", "width": 36, "height": 48 if i in upright else 30}
        for i in range(11)
    ]
    boxes = [annotation(i + 1, i, [4, 5, 20, 12 + i]) for i in range(11)]
    categories = [{"id": 1, "name": "apple"}, {"id": 5, "name": "pear"}]
    content = {"images": images, "annotations": boxes, "categories": categories}
    json_file, folder = write(content)
    register_coco_instances("stream_test", {}, json_file, folder)
    cfg.DATASETS.TRAIN = ("stream_test",)
    cfg.INPUT.LSJ.SIZE = 32
    cfg.INPUT.MIN_SIZE_TRAIN = (24, 28, 32)
    return cfg


def as_process(monkeypatch, rank, world_size):
    monkeypatch.setattr("detectron2.utils.comm.get_rank", lambda: rank)
    monkeypatch.setattr("detectron2.utils.comm.get_world_size", lambda: world_size)
    monkeypatch.setattr("detectron2.utils.comm.shared_random_seed", lambda: 99)


def plain(image):
    instances = image["instances"]
    masks = getattr(instances.gt_masks, "polygons", None)
    return (
        image["image_id"],
        tuple(image["image"].shape),
        image["image"].numpy().tobytes(),
        instances.gt_boxes.tensor.tolist(),
        [[p.tolist() for p in polygons] for polygons in masks],
    )


def batches(loader, count, *, seed=3, first=0):
    loader.begin(seed, first)
    return [[plain(image) for image in batch] for batch in itertools.islice(loader, count)]


@pytest.mark.parametrize("jitter", [True, False])
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_workers_and_the_place_change_nothing(ready, workers, jitter):
    """Not a bit: with jitter, or with other augmentations and in groups by orientation."""
    ready.INPUT.LSJ.ENABLED = jitter
    expected = batches(build_train_loader(ready, 2), 16)
    ready.DATALOADER.NUM_WORKERS = workers
    loader = build_train_loader(ready, 2)
    assert batches(loader, 16) == expected
    assert batches(loader, 4, first=11) == expected[11:15]
    assert batches(loader, 2, first=0) == expected[:2]
    assert batches(loader, 2, seed=4) != expected[:2]
    assert len({image[2] for batch in expected for image in batch}) > 25  # of 32 of 11 images


@pytest.mark.parametrize("jitter", [True, False])
def test_a_step_is_the_same_with_any_number_of_processes(ready, monkeypatch, jitter):
    """Steps of 8 images: by one process in 4 batches, two in 2, four in 1."""
    ready.INPUT.LSJ.ENABLED = jitter
    steps = {}
    for world_size, accumulate in ((1, 4), (2, 2), (4, 1)):
        found = []
        for rank in range(world_size):
            as_process(monkeypatch, rank, world_size)
            loader = build_train_loader(ready, 8 // accumulate)
            found.append(batches(loader, 3 * accumulate))
        steps[world_size] = [
            [
                found[rank][step * accumulate + i]
                for i in range(accumulate)
                for rank in range(world_size)
            ]
            for step in range(3)
        ]
    assert steps[1] == steps[2] == steps[4]


@pytest.mark.parametrize("jitter", [True, False])
def test_no_global_random_numbers_are_drawn(ready, jitter):
    ready.INPUT.LSJ.ENABLED = jitter
    loader = build_train_loader(ready, 2)
    before = random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()
    batches(loader, 4)
    after = random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()
    assert before == after


def test_workers_draw_no_global_random_numbers_for_their_seeds(ready):
    ready.DATALOADER.NUM_WORKERS = 1
    loader = build_train_loader(ready, 2)
    before = torch.get_rng_state().tolist()
    batches(loader, 2)
    assert torch.get_rng_state().tolist() == before


def test_what_was_drawn_before_changes_nothing(ready):
    expected = batches(build_train_loader(ready, 2), 4)
    for generator in (random.seed, np.random.seed, torch.manual_seed):
        generator(77)
    assert batches(build_train_loader(ready, 2), 4) == expected


def test_two_iterators_and_a_new_beginning(ready):
    """A new beginning is that of the next iterator; those that run go on."""
    loader = build_train_loader(ready, 2)
    expected = batches(loader, 8)
    loader.begin(3, 0)
    first, second = iter(loader), iter(loader)
    read = [plain(image) for image in next(first)]
    loader.begin(3, 5)
    third = iter(loader)
    assert read == expected[0]
    assert [plain(image) for image in next(first)] == expected[1]
    assert [plain(image) for image in next(third)] == expected[5]
    assert [plain(image) for image in next(second)] == expected[5]  # asked for only now
    assert [plain(image) for image in next(first)] == expected[2]


def test_without_a_beginning_each_loader_has_its_own_order(ready):
    loaders = [build_train_loader(ready, 11) for _ in range(2)]
    orders = [[image["image_id"] for image in next(iter(loader))] for loader in loaders]
    again = [image["image_id"] for image in next(iter(loaders[0]))]
    assert orders[0] != orders[1] and orders[0] == again


def test_an_image_in_place_of_another_is_the_same_whoever_met_the_broken_one(ready, tmp_path):
    """A loader that tries the broken file again, and one that knows of it."""
    (tmp_path / "set" / "4.png").write_bytes(b"broken")
    loader = build_train_loader(ready, 2)
    expected = batches(loader, 12)
    assert batches(loader, 12) == expected
    assert batches(build_train_loader(ready, 2), 6, first=6) == expected[6:]
    assert {image[0] for batch in expected for image in batch} == set(range(11)) - {4}


def test_the_state_is_of_plain_values(ready):
    ready.INPUT.LSJ.ENABLED = False
    state = build_train_loader(ready, 4).state_dict()
    assert state == {"records": 11, "group_size": 4}


def test_other_data_on_a_resume_are_said(ready, caplog):
    loader = build_train_loader(ready, 4)
    loader.load_state_dict({})  # of a checkpoint from before
    loader.load_state_dict({"records": 11, "group_size": 4})
    assert "when the run began" not in caplog.text
    loader.load_state_dict({"records": 12, "group_size": 4})
    assert "had 12 images when the run began and have 11" in caplog.text


class Draws(SkippingDataset):
    """Images of which each is what a mapper would draw for its scale and its flip."""

    def __init__(self):
        super().__init__(range(10), lambda _: (np.random.rand(), random.random()), 0)


def test_augmentations_of_neighbours_are_independent_and_uniform():
    draws = np.array([Draws()[0, position, 0] for position in range(4000)])
    assert np.abs(np.histogram(draws[:, 0], bins=10, range=(0, 1))[0] - 400).max() < 80  # 4 sigma
    assert abs((draws[:, 0] < 0.5).mean() - 0.5) < 0.03
    for lag in (1, 2, 8):
        assert abs(np.corrcoef(draws[:-lag, 0], draws[lag:, 0])[0, 1]) < 0.06
    assert abs(np.corrcoef(draws.T)[0, 1]) < 0.06  # numpy's and Python's
    assert len(np.unique(draws)) == draws.size


def test_places_beyond_32_bits_have_draws_of_their_own():
    places = [0, 1, 2**32, 2**32 + 1, 2**33, 2**40]
    assert len({Draws()[0, place, 0] for place in places}) == len(places)


def records(count):
    return [{"file_name": f"{i}.jpg", "width": 4, "height": 3} for i in range(count)]


def test_a_collate_function_and_options_of_the_loader():
    loader = tolerant_train_loader(
        records(6),
        mapper=lambda record: record["file_name"],
        total_batch_size=3,
        collate_fn="".join,
        num_workers=1,
        persistent_workers=True,
        prefetch_factor=1,
        drop_last=True,
        pin_memory=False,
    )
    assert len(next(iter(loader))) == 15


class Items(Dataset):
    """A data set by index that is no list; its items say how large they are, or not."""

    def __init__(self, items):
        self.items, self.asked = items, []

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        self.asked.append(index)
        return self.items[index]


@pytest.mark.parametrize("sizes", [True, False])
def test_a_data_set_of_the_user(sizes):
    items = [{"n": i, "width": 3, "height": 2 + 2 * (i % 2)} for i in range(32)]
    if not sizes:
        items = [{"n": item["n"]} for item in items]
    data = Items(items)
    loader = tolerant_train_loader(data, mapper=lambda item: item["n"], total_batch_size=2)
    loader.begin(0, 0)
    found = list(itertools.islice(loader, 16))
    assert sorted(itertools.chain(*found)) == list(range(32))
    alike = [a % 2 == b % 2 for a, b in found]
    assert all(alike) if sizes else not all(alike)
    assert len(data.asked) <= 64  # once for its size, once for itself


class Stream(IterableDataset):
    def __iter__(self):
        return iter(records(3))


def test_data_that_can_only_be_iterated():
    with pytest.raises(ConfigError, match=r"Stream, can only be iterated"):
        tolerant_train_loader(Stream(), mapper=dict, total_batch_size=1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_workers": -1}, r"DATALOADER\.NUM_WORKERS is -1"),
        ({"timeout": -1}, r"DATALOADER\.TIMEOUT is -1"),
        ({"total_batch_size": 0}, r"batch of 0 images"),
    ],
)
def test_options_that_cannot_work(options, words):
    arguments = {"mapper": dict, "total_batch_size": 1, **options}
    with pytest.raises(ConfigError, match=words):
        tolerant_train_loader(records(3), **arguments)


def test_everything_can_be_sent_to_a_spawned_worker(ready):
    """Where processes are not forked, as on macOS, and from Python 3.14 on."""
    ready.DATALOADER.NUM_WORKERS = 1
    loader = build_train_loader(ready, 2)
    [expected] = batches(loader, 1)
    inner = loader._loader._loader
    dataset = pickle.loads(ForkingPickler.dumps(inner.dataset))
    (keys,) = itertools.islice(loader.keys(), 1)
    assert [plain(dataset[key]) for key in keys] == expected
    for sent in (inner.collate_fn, inner.worker_init_fn):
        pickle.loads(ForkingPickler.dumps(sent))


def test_a_failure_among_the_images_is_the_batch():
    def read(record):
        raise DataError(f"{record['file_name']} is broken")

    loader = tolerant_train_loader(records(4), mapper=read, total_batch_size=2, max_unreadable=1)
    with pytest.raises(DataError, match=r"Training stops after 2 unreadable .*jpg is broken"):
        next(iter(loader))
