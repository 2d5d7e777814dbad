"""What holds for every augmentation of the tables: labels follow the pixels, and nothing else is
learnt at a border.
"""

import json
from collections import defaultdict

import cv2
import numpy as np
import pycocotools.mask
import pytest
import torch
from detectron2.data import transforms as T
from detectron2.structures import BoxMode

from lambda_det.detection.data.jitter import (
    AUGMENTATIONS,
    PIXEL_AUGMENTATIONS,
    build_augmentation,
    changes_outlines,
)
from lambda_det.detection.data.mapper import TolerantMapper

HEIGHT, WIDTH = 72, 96
SIZE = 64  # of the jitter's square
BACKGROUND, GREY = 60, 128  # of the scene, and of padding
POLYGONS, RUNS = 0, 1  # the classes of objects by the form of their masks
# Pixels by which labels may lie beside their objects on average. Single ones may differ by more,
# because masks have whole pixels.
SHIFT = 0.25

PLAIN = ["INPUT.LSJ.ENABLED", False, "INPUT.RANDOM_FLIP", "none"]
# In these sizes edges lie at many places in their pixels, and seldom in the middle
PLAIN += ["INPUT.MIN_SIZE_TRAIN", (59, 61, 67, 70), "INPUT.MAX_SIZE_TRAIN", 96]
JITTER = ["INPUT.LSJ.ENABLED", True, "INPUT.LSJ.SIZE", SIZE, "INPUT.LSJ.MIN_SCALE", 0.8]

# Keys that switch each augmentation of the tables on
SWITCHES = {
    "crop": ["INPUT.CROP.ENABLED", True, "INPUT.CROP.SIZE", [0.6, 0.7]],
    "resize": ["INPUT.MIN_SIZE_TRAIN", (61, 67, 86, 89), "INPUT.MAX_SIZE_TRAIN", 120],
    "square": JITTER,
    "flip": ["INPUT.RANDOM_FLIP", "vertical"],
    "color": ["INPUT.COLOR", 0.4],
}
# What a project may add to the table: height and width are exchanged
TURN = "a quarter turn"
SWITCHES[TURN] = []
# "crop" is refused beside the jitter, which crops
CASES = [(name, PLAIN) for name in AUGMENTATIONS] + [
    (name, JITTER) for name in AUGMENTATIONS if name != "crop"
]
CASES.append((TURN, PLAIN))
# One that is not convex, one that reaches two borders, and one that crosses itself
OBJECTS = [
    [[10, 8, 40, 8, 40, 16, 20, 16, 20, 40, 10, 40]],
    [[60, 40, 95.5, 30, 95.5, 71.5, 70, 71.5]],
    [[55, 6, 85, 26, 85, 6, 55, 26]],
]


def place_of(mask):
    """The mean x and y of the pixels of a mask, and the corners x0, y0, x1, y1 around them."""
    rows, columns = np.nonzero(mask)
    corners = columns.min(), rows.min(), columns.max() + 1, rows.max() + 1
    return np.array([columns.mean(), rows.mean()]), np.array(corners, float)


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    """A record of white objects on a dark ground, each with polygons and again with run lengths."""
    folder = tmp_path_factory.mktemp("scene")
    annotations, union = [], np.zeros((HEIGHT, WIDTH), np.uint8)
    for parts in OBJECTS:
        runs = pycocotools.mask.merge(pycocotools.mask.frPyObjects(parts, HEIGHT, WIDTH))
        mask = pycocotools.mask.decode(runs)
        union |= mask
        # two pixels of the object, in its middle and at its end
        pixels = np.argwhere(mask)[[int(mask.sum()) // 2, -1], ::-1] + 0.5
        common = {
            "bbox": place_of(mask)[1].tolist(),
            "bbox_mode": BoxMode.XYXY_ABS,
            "keypoints": [number for x, y in pixels for number in (x, y, 2)],
        }
        annotations += [
            {**common, "category_id": POLYGONS, "segmentation": parts},
            {**common, "category_id": RUNS, "segmentation": runs},
        ]
    cv2.imwrite(str(folder / "scene.png"), cv2.merge([np.where(union, 255, BACKGROUND)] * 3))
    cv2.imwrite(str(folder / "labels.png"), union)
    return {
        "file_name": str(folder / "scene.png"),
        "sem_seg_file_name": str(folder / "labels.png"),
        "height": HEIGHT,
        "width": WIDTH,
        "image_id": 1,
        "annotations": annotations,
    }


def mapped(cfg, keys, scene, seed, first=(), **options):
    cfg = cfg.clone()
    cfg.merge_from_list(json.loads(json.dumps(keys)))
    augmentations = [*first, *build_augmentation(cfg, is_train=True)]
    mapper = TolerantMapper(
        is_train=True,
        augmentations=augmentations,
        image_format="BGR",
        use_instance_mask=True,
        use_keypoint=True,
        keypoint_hflip_indices=np.array([0, 1]),
        instance_mask_format="bitmask",
        recompute_boxes=changes_outlines(augmentations),
        semantic_classes=2,
        **options,
    )
    np.random.seed(seed)
    return mapper(scene)


def overlap(one, other):
    union = (one | other).sum()
    return 1.0 if union == 0 else (one & other).sum() / union


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_each_row_changes_something(name, cfg, scene):
    def images(keys):
        return [mapped(cfg, keys, scene, seed)["image"] for seed in range(4)]

    pairs = zip(images(PLAIN), images([*PLAIN, *SWITCHES[name]]), strict=True)
    assert not all(before.equal(after) for before, after in pairs)


@pytest.mark.parametrize("name", PIXEL_AUGMENTATIONS)
def test_each_row_of_pixels_changes_the_image_alone(name, cfg, scene):
    """In training, also an image of 1 pixel."""
    cfg.INPUT.MASK_FORMAT = "bitmask"
    samples = []
    for keys in ([], SWITCHES[name]):
        cfg.merge_from_list(keys)
        np.random.seed(0)
        torch.manual_seed(0)
        samples.append(TolerantMapper(cfg, is_train=True)(scene))
    (plain, truth), (changed, same) = ((one["image"], one["instances"]) for one in samples)
    assert changed.shape == plain.shape and changed.dtype == torch.uint8
    assert (changed.float() - plain.float()).abs().mean() > 1
    assert same.gt_boxes.tensor.equal(truth.gt_boxes.tensor)
    assert same.gt_masks.tensor.equal(truth.gt_masks.tensor)
    (one,) = PIXEL_AUGMENTATIONS[name](cfg)
    assert one(torch.full((3, 1, 1), 7, dtype=torch.uint8)).shape == (3, 1, 1)
    assert TolerantMapper(cfg, is_train=False).pixel_augmentations == []


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(("name", "base"), CASES, ids=str)
def test_labels_follow_the_pixels(name, base, exact, cfg, scene):
    shifts, keys = defaultdict(list), [*base, *SWITCHES[name]]
    first = [T.RandomRotation([90, 90])] if name == TURN else []
    for seed in range(12):
        sample = mapped(cfg, keys, scene, seed, first, exact_pixels=exact)
        image, labels = sample["image"].numpy()[0], sample["sem_seg"].numpy()
        is_white = image > (BACKGROUND + 255) / 2
        assert set(np.unique(labels)) <= {0, 1, 255}
        assert (image[labels == 255] == GREY).all() and image.min() >= BACKGROUND - 2
        assert overlap(labels == 1, is_white) > 0.8
        instances = sample["instances"]
        shifts["semantic masks"].append(place_of(labels == 1)[0] - place_of(is_white)[0])
        masks = instances.gt_masks.tensor.numpy()
        assert overlap(masks.any(0) & (labels != 255), is_white) > 0.8
        # an object with polygons and the same with run lengths; slivers may be left of only one
        large = masks.sum((1, 2)) > 40
        for form, mask, box, points in zip(
            instances.gt_classes[large].tolist(),
            masks[large],
            instances.gt_boxes.tensor.numpy()[large],
            instances.gt_keypoints.tensor.numpy()[large],
            strict=True,
        ):
            assert not mask[labels == 255].any()
            is_near = cv2.dilate(mask.astype(np.uint8), np.ones((7, 7))) > 0
            (middle, around), (seen, seen_around) = place_of(mask), place_of(is_white & is_near)
            shifts["masks of class", form].append(middle - seen)
            shifts["boxes of class", form].append((box - seen_around).reshape(2, 2).mean(0))
            assert box == pytest.approx(around, abs=1)
            assert max(overlap(mask, other) for other in masks if other is not mask) > 0.8
            near = cv2.dilate(mask.astype(np.uint8), np.ones((3, 3)))
            for x, y, visibility in points.astype(int):
                assert not visibility or near[y, x]
    for what, values in shifts.items():
        assert np.abs(values).mean(0).max() < SHIFT, what


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_an_image_may_have_one_channel(name, cfg, scene):
    cfg.INPUT.FORMAT = "L"
    cfg.merge_from_list([*PLAIN, *SWITCHES[name]])
    cfg.MODEL.META_ARCHITECTURE = "PanopticFPN"
    assert TolerantMapper(cfg, is_train=True)(scene)["image"].shape[0] == 1


@pytest.mark.parametrize("exact", [False, True])
def test_padding_has_the_label_that_is_ignored(exact, cfg, scene):
    keys = [*JITTER, "INPUT.LSJ.MAX_SCALE", 0.9]
    sample = mapped(cfg, keys, scene, 0, exact_pixels=exact, ignored_label=254)
    assert sample["sem_seg"].unique().tolist() == [0, 1, 254]
