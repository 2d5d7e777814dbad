"""The size of the input and the finest map follow from the sizes of the objects."""

import numpy as np
import pytest

from lambda_det.detection.config_files import get_config
from lambda_det.own_data.input_size import SIZES, fit_input, sizes_by_shape
from tests.coco import annotation, coco_content

MAPS = ["MODEL.FPN.IN_FEATURES", "MODEL.RPN.IN_FEATURES", "MODEL.ROI_HEADS.IN_FEATURES"]


@pytest.fixture
def cfg():
    """A recipe without a GPU: 384 pixels, and a finest map of eight pixels."""
    return get_config("finetune/light_mobilenet_v2.yaml")


def labels(sides, size=(640, 640)):
    """One image with squares of these sides, in the order in which ``fit_input`` takes it."""
    boxes = [annotation(i, 0, [1, 1, side, side]) for i, side in enumerate(sides)]
    content = coco_content({0: "a.png"}, boxes, {1: "bolt"}, size)
    return content["images"], content["annotations"]


def values(fitted):
    return {key: value for key, (value, _) in fitted.keys.items()}


@pytest.mark.parametrize("small", [0, 33])
def test_few_small_objects_change_nothing(cfg, small):
    # 50 of 640 pixels are 30 of 384, below four strides of eight
    fitted = fit_input(cfg, *labels([50] * small + [60] * (100 - small)), {})
    assert not fitted.keys
    ((_, said, _),) = fitted.rows
    assert said == f"{small}% below 32 pixels at 384"


def test_small_objects_get_a_finer_map_and_then_pixels(cfg):
    """A tenth may be below four strides of the finer map, of four pixels; not more."""
    sides = np.linspace(21, 60, 200)
    fitted = fit_input(cfg, *labels(sides), {})
    keys = values(fitted)
    assert [keys[key][0] for key in MAPS] == ["res2", "p2", "p2"]
    for key in MAPS:
        section, name = key.split(".")[1:]
        assert keys[key][1:] == cfg.MODEL[section][name]
    assert keys["MODEL.ANCHOR_GENERATOR.SIZES"] == [[16], *cfg.MODEL.ANCHOR_GENERATOR.SIZES]
    side = keys["INPUT.MIN_SIZE_TRAIN"][-1]
    assert np.mean(sides * side / 640 < 16) <= 0.1 < np.mean(sides * (side - 32) / 640 < 16)
    # A quarter more in the test, in whole strides of the backbone
    assert keys["INPUT.MIN_SIZE_TEST"] == 1.25 * side // 32 * 32 <= 640
    before, after, in_test = (said for _, said, _ in fitted.rows)
    assert in_test.startswith(f"{keys['INPUT.MIN_SIZE_TEST']} pixels")
    assert before == f"{np.mean(sides * 384 / 640 < 32):.0%} below 32 pixels at 384"
    assert after == f"{np.mean(sides * side / 640 < 16):.0%} below 16 pixels at {side}"
    # The finer map alone is enough where the objects are all of 18 pixels
    keys = values(fit_input(cfg, *labels([30] * 99), {}))
    assert keys["MODEL.RPN.IN_FEATURES"][0] == "p2" and "INPUT.MIN_SIZE_TRAIN" not in keys


@pytest.mark.parametrize(
    # A step of twice the time: 0.3 + 0.8 * 1.458**2, or twice the pixels of the image
    ("size", "side", "in_test", "limit"),
    [
        ((2000, 2000), 544, 672, "more than 2 times"),
        ((600, 600), 544, 576, "more than 2 times"),  # no more than the image has itself
        ((400, 600), 544, 544, "more than 2 times"),
        ((200, 200), 384, 384, "enlarged 2 times at most"),
    ],
)
def test_the_input_grows_within_limits(cfg, size, side, in_test, limit):
    fitted = fit_input(cfg, *labels([4] * 99, size), {})
    assert values(fitted).get("INPUT.MIN_SIZE_TRAIN", [384])[-1] == side
    assert values(fitted).get("INPUT.MIN_SIZE_TEST", 384) == in_test
    said, why = fitted.rows[1][1:]
    assert said == f"100% below 16 pixels at {side}" and limit in why


def labels_of_classes(*sides_of_class):
    """As :func:`labels`, with the sides of each class."""
    images, boxes = labels([side for sides in sides_of_class for side in sides])
    numbers = [n for n, sides in enumerate(sides_of_class, 1) for _ in sides]
    for entry, number in zip(boxes, numbers, strict=True):
        entry["category_id"] = number
    return images, boxes


@pytest.mark.parametrize("count", [50, 99, 100, 3000])
def test_each_class_counts_alike(cfg, count):
    """AP is a mean over the classes: all windows of facades are no more than their cars."""
    small = [20] * count
    fitted = fit_input(cfg, *labels_of_classes(small, [400] * 10), {})
    assert fitted.rows[0][1] == "50% below 32 pixels at 384" and " 2 classes" in fitted.rows[0][2]
    # 12 of 384 pixels become 17 of 544, as if there were no other class
    assert values(fitted) == values(fit_input(cfg, *labels(small), {}))
    fitted = fit_input(cfg, *labels_of_classes(small, [400] * 10, [400] * 11), {})
    assert fitted.rows[0][1] == "33% below 32 pixels at 384" and not fitted.keys


def test_a_tenth_of_the_objects_is_that_of_the_classes(cfg):
    """The finer map leaves 15 % of one class below 16 pixels, and 7 % of both."""
    sides = np.linspace(21, 60, 200)
    assert "INPUT.MIN_SIZE_TRAIN" in values(fit_input(cfg, *labels(sides), {}))
    keys = values(fit_input(cfg, *labels_of_classes(sides, [400] * 10), {}))
    assert keys["MODEL.RPN.IN_FEATURES"][0] == "p2" and "INPUT.MIN_SIZE_TRAIN" not in keys


def test_a_rare_class_says_nothing(cfg):
    fitted = fit_input(cfg, *labels_of_classes([400] * 99, [5] * 9), {})
    assert fitted.rows[0][1] == "0% below 32 pixels at 384" and not fitted.keys
    all_rare = labels_of_classes(*([[20] * 9] * 6))
    assert values(fit_input(cfg, *all_rare, {})) == values(fit_input(cfg, *labels([20] * 99), {}))


def test_small_images_count_at_the_size_that_they_get(cfg):
    """Objects of 20 pixels have 40 in an input of twice the 100 pixels, and 77 in one of 384."""
    fitted = fit_input(cfg, *labels([20] * 99, (100, 100)), {})
    assert values(fitted)["INPUT.MIN_SIZE_TEST"] == 200
    assert fitted.rows[0][1] == "0% below 32 pixels at 200"


def test_what_is_given_is_not_changed(cfg):
    """And the rest follows from it: the map from a given size, the size from given maps."""
    small = labels([20] * 99)
    maps = {*MAPS, "MODEL.ANCHOR_GENERATOR.SIZES"}
    for key in maps:
        keys = values(fit_input(cfg, *small, {key}))
        assert keys and not maps & keys.keys()
    for key in SIZES:
        fitted = fit_input(cfg, *small, {key})
        assert values(fitted).keys() == maps and "given" in fitted.rows[-1][2]
    assert values(fit_input(cfg, *small, {"SEED"}, size=640)).keys() == {*maps, *SIZES}
    assert values(fit_input(cfg, *small, {}, size=1280)).keys() == set(SIZES)  # 40 pixels there


@pytest.mark.parametrize("name", ["light_mobilenet_v2", "mask_rcnn_resnetrs50_se"])
@pytest.mark.parametrize(
    ("sizes", "changes"),
    [
        ([(640, 480)], False),
        ([(3000, 3000)], False),
        ([(8000, 400)], True),
        ([(400, 8000)], True),
        ([(8000, 400), (5000, 500)], True),
        # one strip among photographs would pad its batches
        ([(640, 480)] * 9 + [(8000, 400)], False),
    ],
)
def test_strips_get_the_pixels_of_photographs(name, sizes, changes):
    """The shorter side grows; as many pixels as before are resized to, on average."""
    cfg = get_config(f"finetune/{name}.yaml")
    images = [{"width": width, "height": height} for width, height in sizes]
    keys = sizes_by_shape(cfg, images)
    assert bool(keys) == changes
    if changes:
        budget = cfg.INPUT.MIN_SIZE_TEST * cfg.INPUT.MAX_SIZE_TEST
        short, longest = keys["INPUT.MIN_SIZE_TEST"], keys["INPUT.MAX_SIZE_TEST"]
        pixels = []
        for width, height in sizes:
            scale = min(short / min(width, height), longest / max(width, height))
            pixels.append(scale**2 * width * height)
            before = cfg.INPUT.MAX_SIZE_TEST / max(width, height)
            assert scale > 2 * before
        assert 0.8 * budget < np.mean(pixels) <= 1.02 * budget
        assert max(pixels) <= 1.52 * budget


def test_strips_are_tested_at_the_size_of_the_training(cfg):
    keys = values(fit_input(cfg, *labels([20] * 99, (8000, 400)), {}))
    assert keys["INPUT.MIN_SIZE_TEST"] == max(keys["INPUT.MIN_SIZE_TRAIN"]) < 320
    assert keys["INPUT.MAX_SIZE_TEST"] == keys["INPUT.MAX_SIZE_TRAIN"]


def test_a_given_size_of_strips_is_their_shorter_side(cfg):
    fitted = fit_input(cfg, *labels([20] * 99, (8000, 400)), {}, size=320)
    keys = values(fitted)
    assert keys["INPUT.MIN_SIZE_TEST"] == 320
    assert keys["INPUT.MAX_SIZE_TEST"] >= 320 * 20
    assert fitted.rows[0][:2] == ("shapes of images", "up to 20:1")


@pytest.mark.parametrize("size", [320, 384, 1000])
def test_a_given_size_is_not_exceeded(cfg, size):
    """Whatever the objects ask for: these have 14 of 1200 pixels."""
    keys = values(fit_input(cfg, *labels([14] * 99, (1600, 1200)), {}, size=size))
    assert keys["INPUT.MIN_SIZE_TEST"] == max(keys["INPUT.MIN_SIZE_TRAIN"]) == size


def test_a_recipe_whose_memory_was_counted_keeps_its_size():
    """It has the map of four pixels already; the table says what a larger input would cost."""
    cfg = get_config("finetune/mask_rcnn_resnetrs50_se.yaml")
    fitted = fit_input(cfg, *labels([5] * 99), {})
    assert not fitted.keys and "--size" in fitted.rows[-1][2]


def test_crowds_and_few_objects_say_nothing(cfg):
    images, boxes = labels([5] * 60 + [200] * 60)
    for entry in boxes[:60]:
        entry["iscrowd"] = 1
    assert not fit_input(cfg, images, boxes, {}).keys
    few = labels([5] * 49)  # too few to say anything
    assert fit_input(cfg, *few, {}) == ({}, [])
