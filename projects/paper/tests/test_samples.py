from __future__ import annotations

from typing import ClassVar

import cv2
import numpy as np
import pytest
import torch
from detectron2.data.catalog import Metadata
from detectron2.structures import BitMasks, Boxes, Instances, Keypoints, PolygonMasks

from lambda_det.errors import ConfigError, DataError
from lambda_paper.album import Album
from lambda_paper.samples import draw_sample, draw_samples
from tests.shapes import make_shapes
from tests.training.tiny_detector import tiny_config

GREY = 128


@pytest.fixture
def cfg(tmp_path):
    """A small detector on a few shapes, with large-scale jitter to 96x96."""
    make_shapes(tmp_path, num_train=6, num_val=1, size=64)
    folder = tmp_path / "shapes"
    cfg = tiny_config()
    cfg.DATASETS.TRAIN_JSON = str(folder / "annotations" / "instances_train.json")
    cfg.DATASETS.TRAIN_IMAGES = str(folder / "train")
    cfg.INPUT.LSJ.ENABLED = True
    cfg.INPUT.LSJ.SIZE = 96
    return cfg


def read(album):
    return [cv2.imread(str(path)) for path in album.written]


def test_the_same_seed_gives_the_same_pictures(cfg, tmp_path):
    drawn = []
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        album = Album(tmp_path / name)
        draw_samples(cfg, album, limit=3, seed=seed)
        assert [p.name for p in album.written] == [f"sample_00{i}.png" for i in range(3)]
        drawn.append(read(album))
    assert all(map(np.array_equal, drawn[0], drawn[1]))
    assert not any(map(np.array_equal, drawn[0], drawn[2]))
    assert not cfg.DATASETS.TRAIN  # as it was


def test_nothing_is_drawn_over_pictures_that_are_there(cfg, tmp_path):
    (tmp_path / "sample_001.png").write_text("kept")
    with pytest.raises(ConfigError, match="--overwrite"):
        draw_samples(cfg, Album(tmp_path), limit=2)
    assert (tmp_path / "sample_001.png").read_text() == "kept"
    assert not (tmp_path / "sample_000.png").exists()


def test_data_that_cannot_be_trained_on_are_refused(cfg, tmp_path):
    with pytest.raises(ConfigError, match="0"):
        draw_samples(cfg, Album(tmp_path / "out"), limit=0)
    cfg.DATASETS.TRAIN_JSON = str(tmp_path / "none.json")
    with pytest.raises(DataError, match=r"none\.json"):
        draw_samples(cfg, Album(tmp_path / "out"), limit=1)
    assert not (tmp_path / "out").exists()


def sample(image_format="BGR", **more):
    """A 640x640 image that is pure red."""
    image = torch.zeros(3, 640, 640, dtype=torch.uint8)
    image[2 if image_format == "BGR" else 0] = 255
    return {"image": image, "height": 320, "width": 320, "file_name": "some/red.png", **more}


def inside(picture):
    """Without the caption."""
    return picture[-640:]


@pytest.mark.parametrize("image_format", ["BGR", "RGB"])
def test_the_image_is_turned_back_from_the_format_of_the_model(image_format):
    picture = inside(draw_sample(sample(image_format), image_format, Metadata()))
    assert np.array_equal(np.unique(picture.reshape(-1, 3), axis=0), [[255, 0, 0]])


def test_other_formats_are_turned_back(tmp_path):
    grey = {"image": torch.full((1, 640, 640), 77, dtype=torch.uint8)}
    assert np.all(inside(draw_sample(grey, "L", Metadata())) == 77)
    # Detectron2's YUV of pure red
    yuv = torch.tensor([0.299, -0.14714119, 0.61497538])[:, None, None].expand(3, 640, 640)
    picture = inside(draw_sample({"image": yuv}, "YUV-BT.601", Metadata()))
    assert np.abs(picture.astype(int) - [255, 0, 0]).max() <= 2


def instances(masks):
    made = Instances((640, 640))
    made.gt_boxes = Boxes(torch.tensor([[100.0, 100.0, 300.0, 300.0]]))
    made.gt_classes = torch.tensor([1])
    if masks == "polygon":
        made.gt_masks = PolygonMasks([[np.array([100.0, 100, 300, 100, 300, 300, 100, 300])]])
    elif masks == "bitmask":
        mask = torch.zeros(1, 640, 640, dtype=torch.bool)
        mask[:, 100:300, 100:300] = True
        made.gt_masks = BitMasks(mask)
    return made


@pytest.mark.parametrize("masks", ["polygon", "bitmask"])
def test_masks_cover_their_object(masks):
    metadata = Metadata(thing_classes=["apple", "pear"])
    picture = inside(draw_sample(sample(instances=instances(masks)), "BGR", metadata))
    changed = (picture != [255, 0, 0]).any(2)
    assert changed[150:290, 150:290].all() and not changed[320:].any()


def test_boxes_alone_are_outlined():
    picture = inside(draw_sample(sample(instances=instances(None)), "BGR", Metadata()))
    changed = (picture != [255, 0, 0]).any(2)
    assert changed[150:290, 100].all() and not changed[150:290, 150:290].any()


def test_keypoints_are_drawn_and_joined():
    made = instances(None)
    points = torch.tensor([[[150.0, 200, 2], [250, 200, 2], [200, 280, 0]]])
    made.gt_keypoints = Keypoints(points)
    metadata = Metadata(
        keypoint_names=["a", "b", "c"],
        keypoint_connection_rules=[("a", "b", (0, 255, 0)), ("b", "c", (0, 255, 0))],
    )
    picture = inside(draw_sample(sample(instances=made), "BGR", metadata))
    changed = (picture != [255, 0, 0]).any(2)
    assert changed[200, 160:240].all()  # the line from a to b
    assert not changed[225:295, 150:290].any()  # c is not visible


def test_classes_of_pixels_are_drawn_where_they_are_not_ignored():
    classes = torch.full((640, 640), 255)
    classes[400:, :] = 1
    metadata = Metadata(stuff_classes=["sky", "grass"], stuff_colors=[(0, 0, 255), (0, 255, 0)])
    picture = inside(draw_sample(sample(sem_seg=classes), "BGR", metadata))
    assert (picture[:390] == [255, 0, 0]).all()
    below = picture[450:600, 20:100].reshape(-1, 3)
    assert (below[:, 1] > 80).all() and (below[:, 2] < 30).all()
    nameless = inside(draw_sample(sample(sem_seg=classes), "BGR", Metadata()))
    assert (nameless[450:600, 20:100] != [255, 0, 0]).any(2).all()


class PaddingBackbone(torch.nn.Module):
    size_divisibility = 512
    padding_constraints: ClassVar[dict] = {}


def test_padding_by_the_model_is_hatched():
    made = sample(instances=instances("bitmask"), sem_seg=torch.full((640, 640), 255))
    picture = draw_sample(made, "BGR", Metadata(), PaddingBackbone())[-1024:]
    assert picture.shape == (1024, 1024, 3)
    for part in (picture[645:, :], picture[:, 645:]):
        colours = {tuple(c) for c in np.unique(part.reshape(-1, 3), axis=0).tolist()}
        assert colours == {(GREY,) * 3, (255, 0, 255)}
    assert (picture[400:630, 10:630] == [255, 0, 0]).all()
