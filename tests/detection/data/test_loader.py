"""Batches of training, byte for byte, whatever loads them and wherever they begin; evaluation."""

import itertools
import pickle
import random
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import numpy as np
import pytest
import torch
from detectron2.data.datasets import register_coco_instances
from torch.utils.data import Dataset, IterableDataset

from lambda_det.detection.components import of_yaml
from lambda_det.detection.data import (
    build_test_loader,
    build_train_loader,
    check_detector_data,
    tile_pixels,
    tolerant_test_loader,
    tolerant_train_loader,
)
from lambda_det.detection.data.loader import training_records
from lambda_det.detection.data.predictions import Detector
from lambda_det.detection.evaluation import number_of_images
from lambda_det.detection.tiles import Tiling
from lambda_det.errors import ConfigError, DataError
from tests.coco import annotation, coco_content


@pytest.fixture
def four(cfg, content, write):
    """A config over a registered data set of four images, and their folder."""
    json_file, images = write(content)
    register_coco_instances("loader_test", {}, json_file, images)
    cfg.DATASETS.TRAIN = cfg.DATASETS.TEST = ("loader_test",)
    return cfg, Path(images)


@pytest.fixture
def eleven(cfg, write):
    """A config over a registered data set of eleven small images, four of them upright."""
    boxes = [annotation(i + 1, i, [4, 5, 20, 12 + i]) for i in range(11)]
    names = {i: f"{i}.png" for i in range(11)}
    content = coco_content(names, boxes, {1: "apple", 5: "pear"}, size=(36, 30))
    for upright in (2, 3, 5, 9):
        content["images"][upright]["height"] = 48
    register_coco_instances("stream_test", {}, *write(content))
    cfg.DATASETS.TRAIN = cfg.DATASETS.TEST = ("stream_test",)
    cfg.INPUT.LSJ.SIZE = 32
    cfg.INPUT.MIN_SIZE_TRAIN = (24, 28, 32)
    return cfg


def plain(image):
    """A training image as values that can be compared."""
    instances = image["instances"]
    masks = getattr(instances.gt_masks, "polygons", ())
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


def ids(loader, count):
    return [image["image_id"] for batch in itertools.islice(loader, count) for image in batch]


# ---------------------------------------------------------------------------- batches of training


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "jitter"), [(0, False), (1, True), (3, False)])
def test_workers_and_the_place_change_nothing(eleven, workers, jitter):
    """Nothing changes: with jitter, or with other augmentations and grouped by orientation."""
    eleven.INPUT.LSJ.ENABLED = jitter
    eleven.INPUT.COLOR = 0.4 if jitter else 0.0
    expected = batches(build_train_loader(eleven, 2), 16)
    eleven.DATALOADER.NUM_WORKERS = workers
    loader = build_train_loader(eleven, 2)
    if workers:
        assert batches(loader, 16) == expected
    assert batches(loader, 4, first=11) == expected[11:15]
    assert batches(loader, 2, first=0) == expected[:2]
    assert batches(loader, 2, seed=4) != expected[:2]
    assert len({image[2] for batch in expected for image in batch}) > 25  # of 32 of 11 images


@pytest.mark.parametrize("jitter", [True, False])
def test_no_global_random_numbers_are_drawn(eleven, jitter):
    eleven.INPUT.LSJ.ENABLED = jitter

    def states():
        return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()

    loader, before = build_train_loader(eleven, 2), states()
    batches(loader, 4)
    assert before == states()


def test_two_iterators_and_a_new_beginning(eleven):
    """A new beginning is that of the next iterator; those that run go on."""
    loader = build_train_loader(eleven, 2)
    expected = batches(loader, 8)
    loader.begin(3, 0)
    first, second = iter(loader), iter(loader)
    read = [plain(image) for image in next(first)]
    loader.begin(3, 5)
    third = iter(loader)
    assert read == expected[0]
    assert [plain(image) for image in next(first)] == expected[1]
    assert [plain(image) for image in next(third)] == expected[5]
    assert [plain(image) for image in next(second)] == expected[5]  # requested only now
    assert [plain(image) for image in next(first)] == expected[2]


def test_without_a_beginning_each_loader_has_its_own_order(eleven):
    loaders = [build_train_loader(eleven, 11) for _ in range(2)]
    orders = [ids(loader, 1) for loader in loaders]
    assert orders[0] != orders[1] and orders[0] == ids(loaders[0], 1)


@pytest.mark.parametrize(("is_filtered", "images"), [(True, 3), (False, 4)])
def test_images_without_an_object_are_left_out_as_the_config_says(
    cfg, content, write, is_filtered, images, caplog
):
    """A line of the log says so, with the key that keeps them."""
    caplog.set_level("INFO")
    content["annotations"] = [a for a in content["annotations"] if a["image_id"] != 30]
    register_coco_instances("loader_test", {}, *write(content))
    cfg.DATASETS.TRAIN = ("loader_test",)
    cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS = is_filtered
    assert len(training_records(cfg)) == images
    cfg.MODEL.ROI_HEADS.NUM_CLASSES = len(content["categories"])
    check_detector_data(Detector.from_config(cfg), train=cfg.DATASETS.TRAIN, test=None)
    said = "1 of 4 images hold no object" in caplog.text
    assert said is ("DATALOADER.FILTER_EMPTY_ANNOTATIONS False" in caplog.text) is is_filtered


# ------------------------------------------------------------------------------ unreadable images


@pytest.mark.parametrize(("workers", "jitter"), [(0, True), (0, False), (2, False)])
def test_unreadable_images_are_named_and_replaced_up_to_a_limit(four, caplog, workers, jitter):
    cfg, images = four
    cfg.DATALOADER.NUM_WORKERS = workers
    cfg.DATALOADER.MAX_UNREADABLE_IMAGES = 2
    cfg.INPUT.LSJ.ENABLED = jitter  # without, the images are grouped by their aspect ratio
    cfg.INPUT.MIN_SIZE_TRAIN = (48,)
    (images / "20.png").write_bytes(b"")
    (images / "30.png").unlink()
    found = ids(build_train_loader(cfg, 2), 6)
    assert set(found) == {10, 40} and len(found) == 12
    for name in ("20.png", "30.png") if workers == 0 else ():  # others log in their own process
        # once, however often it is drawn
        assert sum(name in record.getMessage() for record in caplog.records) == 1
    cfg.DATALOADER.MAX_UNREADABLE_IMAGES = 1
    with pytest.raises(DataError, match=r"2 unreadable .*MAX_UNREADABLE_IMAGES is 1") as raised:
        ids(build_train_loader(cfg, 2), 12)
    assert ".png" in str(raised.value) and "\n" not in str(raised.value)


def test_an_image_in_place_of_another_is_the_same_whoever_met_the_broken_one(eleven, tmp_path):
    """A loader that tries the broken file again, and one that knows of it."""
    (tmp_path / "set" / "4.png").write_bytes(b"broken")
    loader = build_train_loader(eleven, 2)
    expected = batches(loader, 12)
    assert batches(loader, 12) == expected
    assert batches(build_train_loader(eleven, 2), 6, first=6) == expected[6:]
    assert {image[0] for batch in expected for image in batch} == set(range(11)) - {4}


# ------------------------------------------------------------------------------------------- tiles


@pytest.fixture
def tiles(eleven, monkeypatch):
    """The config, whose images are cut into four tiles, and do not all fit into memory."""
    eleven.INPUT.TILE.SIZE = 32
    eleven.INPUT.TILE.OVERLAP = 6
    eleven.INPUT.TILE.EMPTY = 0.2
    monkeypatch.setattr(tile_pixels, "KEPT", 3 * 3 * 36 * 48)
    return eleven


@pytest.mark.parametrize("workers", [0, 2])
def test_tiles_are_drawn_from_any_place(tiles, workers):
    expected = batches(build_train_loader(tiles, 2), 40)
    tiles.DATALOADER.NUM_WORKERS = workers
    loader = build_train_loader(tiles, 2)
    assert batches(loader, 6, first=30) == expected[30:36]
    assert batches(loader, 3) == expected[:3]


def test_an_unreadable_image_of_many_tiles_counts_once(tiles, tmp_path, caplog):
    tiles.DATALOADER.MAX_UNREADABLE_IMAGES = 1
    (tmp_path / "set" / "4.png").write_bytes(b"broken")
    found = batches(build_train_loader(tiles, 2), 60)
    assert {image[0] for batch in found for image in batch} == set(range(11)) - {4}
    assert sum("4.png" in record.getMessage() for record in caplog.records) == 1


def test_losses_and_costs_of_an_evaluation_are_of_tiles(tiles):
    found = [sample for (sample,) in build_test_loader(tiles, "stream_test", with_truth=True)]
    assert len(found) == len(training_records(tiles)) > 11
    assert all(sample["instances"].has("gt_boxes") for sample in found)
    assert {(sample["height"], sample["width"]) for sample in found} == {(30, 32), (32, 32)}
    tiling = Tiling.from_config(tiles)
    cuts = [len(tiling.tiles(height, 36)) for height in [30] * 7 + [48] * 4]
    assert number_of_images(["stream_test"], tiling) == sum(cuts)
    assert number_of_images(["stream_test"]) == 11


def test_losses_of_an_evaluation_are_of_its_pixels(eleven):
    """And not of those that training changes, such as their colours."""
    eleven.INPUT.COLOR = 0.4
    seen, with_truth = (
        [sample["image"] for (sample,) in build_test_loader(eleven, "stream_test", **options)]
        for options in ({}, {"with_truth": True})
    )
    assert len(seen) == 11 and all(map(torch.equal, seen, with_truth))


def test_classes_are_balanced_by_tiles(tiles):
    tiles.DATALOADER.SAMPLER_TRAIN = "RepeatFactorTrainingSampler"
    tiles.DATALOADER.REPEAT_THRESHOLD = 0.5
    assert len(batches(build_train_loader(tiles, 2), 60)) == 60
    tiles.DATALOADER.SAMPLER_TRAIN = "WeightedTrainingSampler"
    with pytest.raises(ConfigError, match="SAMPLER_TRAIN WeightedTrainingSampler"):
        build_train_loader(tiles, 2)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("MODEL.KEYPOINT_ON", True),
        ("MODEL.META_ARCHITECTURE", "PanopticFPN"),
        ("MODEL.META_ARCHITECTURE", "SemanticSegmentor"),
        ("MODEL.LOAD_PROPOSALS", True),
        ("TEST.AUG.ENABLED", True),
        ("INPUT.TILE.OVERLAP", 16),
    ],
)
def test_what_cannot_be_cut_is_refused(tiles, key, value):
    tiles.merge_from_list([key, value])
    with pytest.raises(ConfigError, match=key):
        of_yaml(tiles)


# ------------------------------------------------------------------------------- state and options


def test_other_data_on_a_resume_are_said(eleven, caplog):
    loader = build_train_loader(eleven, 4)
    caplog.clear()
    loader.load_state_dict({"records": 11, "group_size": 4})
    assert caplog.text == ""
    loader.load_state_dict({"records": 12, "group_size": 4})
    assert "12 images" in caplog.text and "11" in caplog.text


def test_a_collate_function_and_options_of_the_loader():
    loader = tolerant_train_loader(
        [{"file_name": f"{i}.jpg", "width": 4, "height": 3} for i in range(6)],
        mapper=lambda record: record["file_name"],
        total_batch_size=3,
        collate_fn="".join,
        num_workers=1,
        persistent_workers=True,
        prefetch_factor=1,
        drop_last=True,
    )
    assert len(next(iter(loader))) == 15


class Items(Dataset):
    """A data set by index that is no list."""

    def __init__(self, items):
        self.items, self.asked = items, []

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        self.asked.append(index)
        return self.items[index]


@pytest.mark.parametrize("sizes", [{"width": 3, "height": 2}, {}])
def test_a_data_set_of_the_user(sizes):
    """Its items say how large they are, and then a batch is of one orientation, or not."""
    turned = dict(zip(sizes, reversed(sizes.values()), strict=True))
    data = Items([{"n": i, **(turned if i % 2 else sizes)} for i in range(32)])
    loader = tolerant_train_loader(data, mapper=lambda item: item["n"], total_batch_size=2)
    loader.begin(0, 0)
    found = list(itertools.islice(loader, 16))
    assert sorted(itertools.chain(*found)) == list(range(32))
    assert all(a % 2 == b % 2 for a, b in found) == bool(sizes)
    assert len(data.asked) <= 64  # once for its size, once for itself


class Stream(IterableDataset):
    def __iter__(self):
        return iter([{}])


@pytest.mark.parametrize(
    ("build", "data", "options", "named"),
    [
        (tolerant_test_loader, Stream(), {}, "Stream can only be iterated"),
        (tolerant_train_loader, Stream(), {"total_batch_size": 2}, "Stream can only be iterated"),
        (tolerant_train_loader, [{}], {"total_batch_size": 0}, r"SOLVER\.IMS_PER_BATCH"),
        (tolerant_train_loader, [{}], {"total_batch_size": 3}, r"SOLVER\.IMS_PER_BATCH"),
    ],
)
def test_data_and_batches_that_are_refused(monkeypatch, build, data, options, named):
    """In each of two processes."""
    monkeypatch.setattr("detectron2.utils.comm.get_world_size", lambda: 2)
    with pytest.raises(ConfigError, match=named):
        build(data, mapper=dict, **options)


def test_everything_can_be_sent_to_a_spawned_worker(eleven):
    """Where processes are not forked, as on macOS, and from Python 3.14 on."""
    eleven.DATALOADER.NUM_WORKERS = 1
    loader = build_train_loader(eleven, 2)
    [expected] = batches(loader, 1)
    dataset = pickle.loads(ForkingPickler.dumps(loader.dataset))
    (keys,) = itertools.islice(loader.keys(), 1)
    assert [plain(dataset[key]) for key in keys] == expected
    for sent in (loader.collate_fn, loader.worker_init_fn):
        pickle.loads(ForkingPickler.dumps(sent))


# ------------------------------------------------------------------------------------- evaluation


@pytest.mark.parametrize("workers", [0, 1])
def test_evaluation_sees_each_image_once_unjittered_and_stops_at_an_unreadable_one(four, workers):
    cfg, images = four
    cfg.DATALOADER.NUM_WORKERS = workers
    cfg.INPUT.MIN_SIZE_TEST = 96
    loader = build_test_loader(cfg, "loader_test")
    found = list(loader)
    assert len(loader) == 4
    assert [image["image_id"] for (image,) in found] == [10, 20, 30, 40]
    assert all(image["image"].shape == (3, 96, 128) for (image,) in found)
    (images / "30.png").write_bytes(b"broken")
    with pytest.raises(DataError) as raised:
        list(build_test_loader(cfg, "loader_test"))
    assert str(images / "30.png") in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(("size", "expected"), [(1, [1] * 11), (3, [1, 1, 3, 3, 3])])
def test_evaluation_takes_images_of_one_size_together(eleven, size, expected):
    """Four upright images and seven others."""
    eleven.TEST.IMS_PER_BATCH = size
    batches = list(build_test_loader(eleven, "stream_test"))
    assert sorted(image["image_id"] for batch in batches for image in batch) == list(range(11))
    assert all(len({image["image"].shape for image in batch}) == 1 for batch in batches)
    assert sorted(map(len, batches)) == expected
