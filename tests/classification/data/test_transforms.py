"""The transforms of training and evaluation, as INPUT configures them."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from lambda_det.classification.data import crops, transforms
from lambda_det.classification.data.randaugment import RandAugment
from lambda_det.errors import ConfigError


def noise(height: int = 40, width: int = 60) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


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
            expected = crops.random_resized_crop(noise(), 16, 0.3, rng)
        else:
            expected = crops.padded_crop(noise(), 16, 2, rng)
        expected = RandAugment(2, 15)(crops.random_flip(expected, rng), rng)
        result = transform(noise(), np.random.default_rng(seed))
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
    first = [transform(noise(), np.random.default_rng(seed)) for seed in range(8)]
    np.random.seed(3)
    again = [transform(noise(), np.random.default_rng(seed)) for seed in reversed(range(8))]
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
    result = transforms.TestTransform(cfg)(noise())
    assert result.flags.c_contiguous and result.dtype == np.uint8
    np.testing.assert_array_equal(result, crops.centre_crop(noise(), *expected))


def test_transforms_travel_to_workers(augmented):
    train, test = transforms.TrainTransform(augmented), transforms.TestTransform(augmented)
    train_there, test_there = pickle.loads(pickle.dumps((train, test)))
    expected = train(noise(), np.random.default_rng(1))
    np.testing.assert_array_equal(train_there(noise(), np.random.default_rng(1)), expected)
    np.testing.assert_array_equal(test_there(noise()), test(noise()))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("INPUT.SIZE", 0),
        ("INPUT.CROP", "random"),
        ("INPUT.MIN_AREA", 0.0),
        ("INPUT.MIN_AREA", 1.5),
        ("INPUT.MIN_AREA", float("nan")),
        ("INPUT.PADDING", -1),
        ("INPUT.RANDAUGMENT.LAYERS", -1),
        ("INPUT.RANDAUGMENT.MAGNITUDE", 31),
    ],
)
def test_training_refuses_by_key(cfg, key, value):
    cfg.merge_from_list([key, value])
    with pytest.raises(ConfigError, match=rf"^{key} is .*{value}"):
        transforms.TrainTransform(cfg)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("INPUT.SIZE", 0),
        ("INPUT.TEST_SIZE", -1),
        ("INPUT.TEST_CROP", 0.0),
        ("INPUT.TEST_CROP", 2.0),
    ],
)
def test_evaluation_refuses_by_key(cfg, key, value):
    cfg.merge_from_list([key, value])
    with pytest.raises(ConfigError, match=rf"^{key} is {value}"):
        transforms.TestTransform(cfg)
