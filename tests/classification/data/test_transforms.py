"""Transforms as INPUT configures them; crops and resizing beside torchvision and Pillow."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats
from torchvision import transforms as tv

from lambda_det.classification.data import transforms
from lambda_det.classification.data.randaugment import RandAugment
from lambda_det.errors import ConfigError

SHAPES = [(1, 1), (1, 40), (50, 1), (2, 3), (31, 47), (64, 64), (90, 61), (200, 150)]


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8)


def torchvision_box(height: int, width: int, min_area: float) -> tuple[int, int, int, int]:
    image = torch.zeros(1, height, width)
    return tv.RandomResizedCrop.get_params(image, [min_area, 1], [3 / 4, 4 / 3])


@pytest.mark.parametrize(
    ("height", "width", "min_area"), [(375, 500, 0.08), (600, 240, 0.08), (333, 333, 0.5)]
)
def test_boxes_are_distributed_as_torchvisions(height, width, min_area):
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    draws = 2000
    ours = [transforms.random_box(height, width, min_area, rng) for _ in range(draws)]
    theirs = [torchvision_box(height, width, min_area) for _ in range(draws)]

    def figures(boxes: list[tuple[int, int, int, int]]) -> dict[str, np.ndarray]:
        top, left, h, w = np.array(boxes).T
        assert (top >= 0).all() and (left >= 0).all()
        assert (top + h <= height).all() and (left + w <= width).all()
        return {
            "area": h * w / (height * width),
            "ratio": w / h,
            "top": (top + 0.5) / (height - h + 1),
            "left": (left + 0.5) / (width - w + 1),
        }

    ours, theirs = figures(ours), figures(theirs)
    assert ours["area"].min() > 0.9 * min_area
    for name in ours:
        assert stats.ks_2samp(ours[name], theirs[name]).pvalue > 0.001, name


def test_boxes_lie_everywhere():
    rng = np.random.default_rng(0)
    boxes = [transforms.random_box(5, 6, 0.3, rng) for _ in range(8000)]
    common = 0
    for height, width in {box[2:] for box in boxes}:
        places = [box[:2] for box in boxes if box[2:] == (height, width)]
        if len(places) > 300:
            common += 1
            assert set(places) == {(y, x) for y in range(6 - height) for x in range(7 - width)}
    assert common > 3


@pytest.mark.parametrize(
    ("height", "width"), [(7, 300), (300, 7), (1, 1), (1, 9), (9, 1), (100, 201)]
)
def test_where_no_box_fits_it_is_torchvisions_centre(height, width):
    """Nearly all of a thin image's area, at a ratio near 1, cannot lie in it."""
    rng = np.random.default_rng(0)
    expected = torchvision_box(height, width, 1.0)
    for _ in range(20):
        assert transforms.random_box(height, width, 1.0, rng) == expected


def test_each_box_is_a_function_of_its_generator():
    boxes = [transforms.random_box(300, 400, 0.08, np.random.default_rng(s)) for s in (1, 2, 1)]
    assert boxes[0] == boxes[2] != boxes[1]
    assert all(type(value) is int for box in boxes for value in box)


def test_a_resized_crop_is_its_box_resized():
    image = noise(120, 160)
    crop = transforms.random_resized_crop(image, 48, 0.3, np.random.default_rng(5))
    top, left, height, width = transforms.random_box(120, 160, 0.3, np.random.default_rng(5))
    np.testing.assert_array_equal(
        crop, transforms.resize(image[top : top + height, left : left + width], 48)
    )


@pytest.mark.parametrize("size", [1, 2, 33, 64])
@pytest.mark.parametrize("shape", [*SHAPES, (500, 375)])
def test_resizing_is_pillows_bicubic(shape, size):
    # Of values whose overshoots stay within 0 to 255: where they are clipped, between the axes, it
    # matters which axis comes first.
    part = (64 + noise(shape[0] + 5, shape[1] + 3) // 2)[2:-3, 1:-2]  # no copy, as a crop is none
    resized = transforms.resize(part, size)
    assert resized.dtype == np.uint8 and resized.shape == (size, size, 3)
    assert resized.flags.c_contiguous and not np.shares_memory(resized, part)
    expected = Image.fromarray(part).resize((size, size), Image.Resampling.BICUBIC)
    difference = np.abs(resized - np.asarray(expected, int))
    assert difference.max() <= 2 and difference.mean() < 0.35


def test_resizing_is_pillows_bicubic_where_it_overshoots():
    image = noise(200, 150)
    resized = transforms.resize(image, 128)
    expected = Image.fromarray(image).resize((128, 128), Image.Resampling.BICUBIC)
    difference = np.abs(resized - np.asarray(expected, int))
    assert (difference > 2).mean() < 0.05 and difference.mean() < 1


def test_a_padded_crop_is_the_image_moved_over_black():
    image = noise(8, 8).clip(1)
    rng = np.random.default_rng(0)
    padded = np.pad(image, ((3, 3), (3, 3), (0, 0)))
    seen = set()
    for _ in range(2000):
        crop = transforms.padded_crop(image, 8, 3, rng)
        assert crop.flags.c_contiguous
        found = [
            (top, left)
            for top in range(7)
            for left in range(7)
            if np.array_equal(crop, padded[top : top + 8, left : left + 8])
        ]
        assert len(found) == 1
        seen.update(found)
    assert len(seen) == 49


def test_a_padded_crop_of_another_size():
    image = noise(20, 30)
    for padding in (0, 2):
        crop = transforms.padded_crop(image, 8, padding, np.random.default_rng(0))
        assert crop.shape == (8, 8, 3)
    np.testing.assert_array_equal(
        transforms.padded_crop(image, 8, 0, np.random.default_rng(0)), transforms.resize(image, 8)
    )


def test_half_of_the_images_are_flipped():
    image = noise(5, 7)
    rng = np.random.default_rng(0)
    flipped = 0
    for _ in range(1000):
        result = transforms.random_flip(image, rng)
        is_flipped = not np.array_equal(result, image)
        if is_flipped:
            np.testing.assert_array_equal(result, image[:, ::-1])
        flipped += is_flipped
    assert abs(flipped - 500) < 4 * np.sqrt(250)


@pytest.mark.parametrize(
    ("size", "resized"), [(1, 1), (28, 32), (33, 33), (33, 40), (64, 73), (17, 64)]
)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_centre_is_torchvisions_by_pillow(shape, size, resized):
    image = noise(*shape)
    centre = transforms.centre_crop(image, size, resized)
    expected = tv.Compose(
        [
            tv.Resize(resized, interpolation=tv.InterpolationMode.BICUBIC),
            tv.CenterCrop(size),
        ]
    )(Image.fromarray(image))
    assert centre.flags.c_contiguous and centre.flags.writeable
    np.testing.assert_array_equal(centre, np.asarray(expected))


@pytest.fixture
def augmented(cfg):
    cfg.INPUT.RANDAUGMENT.LAYERS = 2
    cfg.INPUT.RANDAUGMENT.MAGNITUDE = 15
    return cfg


@pytest.mark.parametrize("crop", ["resized", "padded"])
def test_training_is_crop_flip_and_randaugment_in_this_order(augmented, crop):
    augmented.INPUT.CROP = crop
    augmented.INPUT.MIN_AREA, augmented.INPUT.PADDING = 0.3, 2
    transform = transforms.TrainTransform(augmented)
    for seed in range(20):
        rng = np.random.default_rng(seed)
        if crop == "resized":
            expected = transforms.random_resized_crop(noise(40, 60), 16, 0.3, rng)
        else:
            expected = transforms.padded_crop(noise(40, 60), 16, 2, rng)
        expected = RandAugment(2, 15)(transforms.random_flip(expected, rng), rng)
        result = transform(noise(40, 60), np.random.default_rng(seed))
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("crop", ["resized", "padded"])
@pytest.mark.parametrize("shape", [(1, 1), (1, 50), (16, 16), (300, 200)])
def test_training_samples_are_squares_of_their_own(augmented, crop, shape):
    augmented.INPUT.CROP = crop
    augmented.INPUT.PADDING = 0
    transform = transforms.TrainTransform(augmented)
    image = noise(*shape)
    for seed in range(40):
        result = transform(image, np.random.default_rng(seed))
        assert result.shape == (16, 16, 3) and result.dtype == np.uint8
        assert result.flags.c_contiguous and not np.shares_memory(result, image)
    np.testing.assert_array_equal(image, noise(*shape))


def test_a_sample_depends_on_its_generator_alone(augmented):
    transform = transforms.TrainTransform(augmented)
    first = [transform(noise(40, 60), np.random.default_rng(seed)) for seed in range(8)]
    np.random.seed(3)
    again = [transform(noise(40, 60), np.random.default_rng(seed)) for seed in reversed(range(8))]
    np.testing.assert_array_equal(first, again[::-1])
    assert len({sample.tobytes() for sample in first}) > 6


def test_without_flip_and_randaugment_a_crop_is_left(cfg):
    cfg.INPUT.FLIP = False
    cfg.INPUT.CROP = "padded"
    cfg.INPUT.PADDING = 0
    image = noise(16, 16)
    for seed in range(10):
        result = transforms.TrainTransform(cfg)(image, np.random.default_rng(seed))
        np.testing.assert_array_equal(result, image)


@pytest.mark.parametrize(
    ("size", "test_size", "share", "expected"),
    [(224, 0, 0.875, (224, 256)), (160, 0, 0.875, (160, 183)), (16, 20, 1.0, (20, 20))],
)
def test_evaluation_takes_a_share_from_the_centre(cfg, size, test_size, share, expected):
    cfg.INPUT.SIZE, cfg.INPUT.TEST_SIZE, cfg.INPUT.TEST_CROP = size, test_size, share
    result = transforms.TestTransform(cfg)(noise(40, 60))
    assert result.flags.c_contiguous and result.dtype == np.uint8
    np.testing.assert_array_equal(result, transforms.centre_crop(noise(40, 60), *expected))


def test_transforms_travel_to_workers(augmented):
    train, test = transforms.TrainTransform(augmented), transforms.TestTransform(augmented)
    train_there, test_there = pickle.loads(pickle.dumps((train, test)))
    expected = train(noise(40, 60), np.random.default_rng(1))
    np.testing.assert_array_equal(train_there(noise(40, 60), np.random.default_rng(1)), expected)
    np.testing.assert_array_equal(test_there(noise(40, 60)), test(noise(40, 60)))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("INPUT.CROP", "random"),
        ("INPUT.RANDAUGMENT.LAYERS", -1),
        ("INPUT.RANDAUGMENT.MAGNITUDE", 31),
    ],
)
def test_training_refuses_by_key(cfg, key, value):
    cfg.merge_from_list([key, value])
    with pytest.raises(ConfigError, match=rf"^{key} is .*{value}"):
        transforms.TrainTransform(cfg)
