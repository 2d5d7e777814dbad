import copy
import os

import numpy as np
import pycocotools.mask as mask_util
import pytest
from detectron2.data import transforms as T
from detectron2.structures import BitMasks, BoxMode, PolygonMasks
from PIL import Image

from lambda_det.detection.data import TolerantMapper, jitter
from lambda_det.detection.data.jitter import ResizeScaleAtLeastOnePixel
from lambda_det.detection.data.truth import decided
from lambda_det.errors import DataError
from tests.coco import annotation
from tests.detection.data.fuzz import limits

WIDTH, HEIGHT = 64, 48


@pytest.fixture
def record(noise):
    return noise(HEIGHT, WIDTH)


def thing(box=(8, 6, 30, 20), **changes):
    return annotation(1, 1, list(box), bbox_mode=BoxMode.XYWH_ABS, category_id=0, **changes)


def runs():
    return mask_util.frPyObjects(thing()["segmentation"], HEIGHT, WIDTH)[0]


def mapped(cfg, record, annotations, **changes):
    mapper = TolerantMapper(cfg, is_train=True)
    for name, value in changes.items():
        setattr(mapper, name, value)
    given, _ = decided({**record, "annotations": annotations})
    before = copy.deepcopy(given)
    output = mapper(given)
    assert repr(given) == repr(before)  # the caller's dict is left alone
    return output["instances"]


NO_CHANGE = {"augmentations": T.AugmentationList([])}


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"annotations": []},
        {"annotations": [thing(iscrowd=1, segmentation=runs())]},
        {"annotations": [thing(box=(-50, -50, 20, 20))]},
    ],
    ids=["no key", "none", "a crowd", "outside"],
)
@pytest.mark.parametrize("mask_format", ["polygon", "bitmask"])
def test_an_image_without_a_usable_annotation_trains_as_empty(cfg, record, given, mask_format):
    cfg.INPUT.MASK_FORMAT = mask_format
    instances = TolerantMapper(cfg, is_train=True)(record | given)["instances"]
    assert len(instances) == 0
    assert len(instances.gt_boxes) == len(instances.gt_classes) == len(instances.gt_masks) == 0


def test_mixed_forms_become_bitmaps_of_the_same_pixels(cfg, record):
    annotations = [thing(), thing(segmentation=runs())]
    for order in (annotations, annotations[::-1]):
        instances = mapped(cfg, record, order, **NO_CHANGE)
        assert isinstance(instances.gt_masks, BitMasks)
        first, second = instances.gt_masks.tensor
        assert (first == second).all() and first.sum() == 600
        assert instances.gt_boxes.tensor.tolist() == [[8, 6, 38, 26]] * 2


def test_boxes_are_tight_around_what_the_crop_leaves(cfg, record):
    triangle = thing((0, 0, 20, 20), segmentation=[[0, 0, 20, 0, 0, 20]])
    crop = T.AugmentationList([T.CropTransform(10, 0, 30, 30)])
    instances = mapped(cfg, record, [triangle], augmentations=crop)
    assert instances.gt_boxes.tensor.tolist() == [[0, 0, 10, 10]]


def test_boxes_stay_inside_an_image_without_padding(cfg, record):
    cfg.MODEL.LAMBDA_RESNET.MASK_PADDING = True
    cfg.INPUT.LSJ.MIN_SCALE = cfg.INPUT.LSJ.MAX_SCALE = 0.5
    record["annotations"] = [thing((50, 30, 20, 25))]  # sticks out by 6 and 7 pixels
    output = TolerantMapper(cfg, is_train=True)(record)
    assert output["image"].shape == (3, 24, 32)
    x0, y0, x1, y1 = output["instances"].gt_boxes.tensor[0].tolist()
    assert 0 <= x0 < x1 <= 32 and 0 <= y0 < y1 <= 24


def test_a_missing_mask_becomes_the_box(cfg, record):
    annotations = [thing(segmentation=None), thing((1, 1, 9, 9))]
    instances = mapped(cfg, record, annotations, **NO_CHANGE)
    assert instances.gt_masks.area().tolist() == [600, 81]
    assert isinstance(instances.gt_masks, PolygonMasks)


@pytest.mark.parametrize(
    ("dtype", "kind"), [("uint16", "PNG"), ("int32", "TIFF"), ("float32", "TIFF")]
)
def test_images_that_would_become_white_or_black_are_refused(cfg, record, tmp_path, dtype, kind):
    path = tmp_path / "deep.jpg"  # whatever its name says
    pixels = np.linspace(0, 1 if dtype == "float32" else 65535, HEIGHT * WIDTH)
    Image.fromarray(pixels.astype(dtype).reshape(HEIGHT, WIDTH)).save(path, kind)
    with pytest.raises(DataError, match=r"deep\.jpg .*8 bits"):
        TolerantMapper(cfg, is_train=False)({**record, "file_name": str(path)})


@pytest.mark.parametrize(("mode", "is_refused"), [("P", 1), ("RGB", 1), ("I;16", 1), ("L", 0)])
def test_semantic_masks_whose_labels_would_be_others_are_refused(
    cfg, record, tmp_path, mode, is_refused
):
    """A palette's colours are no labels."""
    labels = Image.fromarray(np.ones((HEIGHT, WIDTH), np.uint8))
    if mode == "P":
        labels.putpalette([0, 0, 0, 128, 0, 0])
    else:
        labels = labels.convert(mode)
    record["sem_seg_file_name"] = str(tmp_path / "labels.png")
    labels.save(record["sem_seg_file_name"])
    if is_refused:
        with pytest.raises(DataError, match=r"labels\.png .*mode"):
            TolerantMapper(cfg, is_train=True)(record)
    else:
        assert 1 in TolerantMapper(cfg, is_train=True)(record)["sem_seg"]


def test_the_size_of_a_record_is_that_of_the_turned_image(cfg, record):
    """How an image is turned is tested in test_records.py."""
    exif = Image.Exif()
    exif[274] = 6
    Image.open(record["file_name"]).save(record["file_name"], exif=exif)
    with pytest.raises(DataError, match=r"image\.png .*48x64.* 64x48"):
        TolerantMapper(cfg, is_train=False)(record)


def test_one_more_augmentation_leaves_the_others(cfg, monkeypatch, caplog):
    row = {"a quarter turn": lambda cfg: [T.RandomRotation([90, 90])]}
    monkeypatch.setattr(jitter, "AUGMENTATIONS", row | jitter.AUGMENTATIONS)
    with caplog.at_level("INFO"):
        mapper = TolerantMapper(cfg, is_train=True)
    made = [type(augmentation) for augmentation in mapper.augmentations.augs]
    assert made == [T.RandomRotation, ResizeScaleAtLeastOnePixel, T.FixedSizeCrop, T.RandomFlip]
    assert mapper.recompute_boxes
    assert "read whole" in caplog.text
    assert T.RandomRotation not in map(type, TolerantMapper(cfg, is_train=False).augmentations.augs)


@pytest.mark.posix
@pytest.mark.parametrize("make", ["mkdir", "mkfifo"])  # to open a pipe would wait for ever
def test_what_is_no_file_is_not_opened(cfg, record, make):
    os.unlink(record["file_name"])
    getattr(os, make)(record["file_name"])
    with pytest.raises(DataError, match="is not a file"), limits():
        TolerantMapper(cfg, is_train=True)(record)


def test_a_fault_of_the_program_is_not_blamed_on_the_file(cfg, record):
    class Broken(T.Augmentation):
        def get_transform(self, image):
            raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        mapped(cfg, record, [], augmentations=T.AugmentationList([Broken()]))


def test_labels_without_a_class_are_named_with_their_mask(cfg, record, tmp_path):
    cfg.MODEL.META_ARCHITECTURE = "SemanticSegmentor"
    cfg.MODEL.SEM_SEG_HEAD.NUM_CLASSES = 4
    labels = np.full((HEIGHT, WIDTH), 3, np.uint8)
    labels[:5] = cfg.MODEL.SEM_SEG_HEAD.IGNORE_VALUE
    record["sem_seg_file_name"] = str(tmp_path / "mask.png")
    Image.fromarray(labels).save(tmp_path / "mask.png")
    for _ in range(3):  # the padding of the jitter is no fault either
        assert TolerantMapper(cfg, is_train=True)(record)["sem_seg"].unique().tolist() == [3, 255]
    labels[10:] = 4
    Image.fromarray(labels).save(tmp_path / "mask.png")
    with pytest.raises(DataError, match=r"mask\.png .*label 4.* 4 classes"):
        for _ in range(9):  # of which some show the label
            TolerantMapper(cfg, is_train=True)(record)
