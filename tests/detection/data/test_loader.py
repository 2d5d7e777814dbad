from __future__ import annotations

import itertools
import logging
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from detectron2.data import DatasetCatalog
from detectron2.data.datasets import register_coco_instances

from lambda_det.detection.data import build_test_loader, build_train_loader
from lambda_det.detection.data.loader import SkippingDataset
from lambda_det.errors import ConfigError, DataError


@pytest.fixture
def ready(cfg, content, write):
    """A config over a registered data set of four images, and the folder of these."""
    json_file, images = write(content)
    register_coco_instances("loader_test", {}, json_file, images)
    cfg.DATASETS.TRAIN = cfg.DATASETS.TEST = ("loader_test",)
    np.random.seed(0)
    torch.manual_seed(0)
    return cfg, Path(images)


def first_batches(cfg, images_per_batch, count):
    return list(itertools.islice(build_train_loader(cfg, images_per_batch), count))


def test_batches_have_the_size_and_cover_the_data(ready):
    cfg, _ = ready
    batches = first_batches(cfg, 2, 4)
    assert [len(batch) for batch in batches] == [2] * 4
    ids = [image["image_id"] for batch in batches for image in batch]
    assert sorted(ids[:4]) == sorted(ids[4:]) == [10, 20, 30, 40]  # two epochs
    for image in batches[0]:
        assert image["image"].shape == (3, 64, 64) and image["instances"].has("gt_masks")


def test_images_without_annotations_are_left_out_as_the_config_says(ready, content):
    cfg, _ = ready
    DatasetCatalog.remove("loader_test")
    content["annotations"] = [a for a in content["annotations"] if a["image_id"] != 30]
    records = [
        {
            "file_name": str(ready[1] / image["file_name"]),
            "height": 48,
            "width": 64,
            "image_id": image["id"],
            "annotations": [
                {"bbox": a["bbox"], "bbox_mode": 1, "category_id": 0}
                for a in content["annotations"]
                if a["image_id"] == image["id"]
            ],
        }
        for image in content["images"]
    ]
    DatasetCatalog.register("loader_test", lambda: records)
    for keep, expected in ((True, {10, 20, 40}), (False, {10, 20, 30, 40})):
        cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS = keep
        batches = first_batches(cfg, 4, 3)
        assert {i["image_id"] for batch in batches for i in batch} == expected


@pytest.mark.parametrize("grouping", [True, False])
@pytest.mark.parametrize("jitter", [True, False])
@pytest.mark.parametrize("workers", [0, 2])
def test_unreadable_images_are_named_and_replaced(ready, caplog, workers, jitter, grouping):
    cfg, images = ready
    cfg.DATALOADER.NUM_WORKERS = workers
    cfg.DATALOADER.ASPECT_RATIO_GROUPING = grouping
    cfg.DATALOADER.MAX_UNREADABLE_IMAGES = 2
    cfg.INPUT.LSJ.ENABLED = jitter
    cfg.INPUT.MIN_SIZE_TRAIN = (48,)
    (images / "20.png").write_bytes(b"")
    (images / "30.png").unlink()
    with caplog.at_level(logging.WARNING, logger="lambda_det"):
        batches = first_batches(cfg, 2, 6)
    ids = [image["image_id"] for batch in batches for image in batch]
    assert set(ids) == {10, 40} and len(ids) == 12
    if workers == 0:  # the log of a worker process is not captured
        messages = [r.getMessage() for r in caplog.records if "Unreadable" in r.getMessage()]
        assert len(messages) == 2  # each once, however often it is drawn
        assert sum("20.png" in m for m in messages) == sum("30.png" in m for m in messages) == 1


@pytest.mark.parametrize("jitter", [True, False])
@pytest.mark.parametrize("workers", [0, 2])
def test_training_stops_past_the_limit_with_one_sentence(ready, workers, jitter):
    cfg, images = ready
    cfg.INPUT.LSJ.ENABLED = jitter  # without, the images are grouped by their aspect ratio
    cfg.INPUT.MIN_SIZE_TRAIN = (48,)
    cfg.DATALOADER.NUM_WORKERS = workers
    cfg.DATALOADER.MAX_UNREADABLE_IMAGES = 1
    for name in ("10.png", "20.png", "40.png"):
        (images / name).write_bytes(b"broken")
    with pytest.raises(DataError) as raised:
        first_batches(cfg, 2, 12)
    message = str(raised.value)
    # Two workers may each meet one at the same time.
    assert message.startswith(("Training stops after 2 ", "Training stops after 3 "))
    assert "MAX_UNREADABLE_IMAGES is 1" in message and ".png" in message
    assert "\n" not in message and "Traceback" not in message


def raising_read(bad):
    def read(record):
        if record in bad:
            raise DataError(f"image {record} is broken")
        return {"image": record}

    return read


def test_the_count_is_shared_by_the_workers():
    """Each worker process meets one bad image only; together they are past the limit of one."""
    dataset = SkippingDataset(list(range(8)), raising_read({0, 3}), max_unreadable=1)
    worker = torch.multiprocessing.get_context("fork").Process(
        target=dataset.__getitem__, args=((0, 0, 0),)
    )
    worker.start()
    worker.join()
    failure = dataset[0, 1, 3]
    assert isinstance(failure, DataError)
    assert "after 2 unreadable" in str(failure) and "image 3 is broken" in str(failure)


def test_the_next_image_is_taken_round_the_end():
    dataset = SkippingDataset(list(range(4)), raising_read({2, 3}), max_unreadable=2)
    assert [dataset[0, 9, index]["image"] for index in (1, 2, 3, 0)] == [1, 0, 0, 0]


def test_all_images_unreadable():
    dataset = SkippingDataset([0, 1, 2], raising_read({0, 1, 2}), max_unreadable=20)
    assert re.match(r"No image .* image 0 is broken", str(dataset[0, 0, 1]))


@pytest.mark.parametrize("images_per_batch", [0, 3])
def test_a_batch_that_does_not_divide_by_the_workers(ready, monkeypatch, images_per_batch):
    monkeypatch.setattr("detectron2.utils.comm.get_world_size", lambda: 2)
    with pytest.raises(ConfigError, match=r"SOLVER\.IMS_PER_BATCH"):
        build_train_loader(ready[0], images_per_batch)


@pytest.mark.parametrize("workers", [0, 1])
def test_evaluation_sees_each_image_once_unjittered(ready, workers):
    cfg, _ = ready
    cfg.DATALOADER.NUM_WORKERS = workers
    cfg.INPUT.MIN_SIZE_TEST = 96
    loader = build_test_loader(cfg, "loader_test")
    batches = list(loader)
    assert len(loader) == 4
    assert [image["image_id"] for (image,) in batches] == [10, 20, 30, 40]
    assert all(image["image"].shape == (3, 96, 128) for (image,) in batches)


@pytest.mark.parametrize("workers", [0, 1])
def test_evaluation_stops_at_an_unreadable_image(ready, workers):
    cfg, images = ready
    cfg.DATALOADER.NUM_WORKERS = workers
    (images / "30.png").write_bytes(b"broken")
    with pytest.raises(DataError) as raised:
        list(build_test_loader(cfg, "loader_test"))
    assert str(raised.value).startswith(f"The image {images / '30.png'} cannot be read")
