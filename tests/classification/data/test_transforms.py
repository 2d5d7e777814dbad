"""Transforms as INPUT configures them; crops and resizing beside torchvision and Pillow."""

import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms as tv

from lambda_det.classification.data import transforms
from lambda_det.classification.data.randaugment import RandAugment

SHAPES = [(1, 1), (1, 40), (50, 1), (31, 47), (64, 64), (200, 150)]


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8)


def torchvision_box(height: int, width: int, min_area: float) -> tuple[int, int, int, int]:
    image = torch.zeros(1, height, width)
    return tv.RandomResizedCrop.get_params(image, [min_area, 1], [3 / 4, 4 / 3])


@pytest.mark.parametrize(
    ("height", "width", "min_area"), [(375, 500, 0.08), (600, 240, 0.08), (333, 333, 0.5)]
)
def test_boxes_are_distributed_as_torchvisions(height, width, min_area):
    from scipy import stats  # takes most of a second, in each process that collects tests

    def figures(draw):
        """The area, the aspect ratio, and the place from top and left, of many boxes."""
        top, left, h, w = np.array([draw() for _ in range(2000)]).T
        assert min(top.min(), left.min()) >= 0
        assert (top + h <= height).all() and (left + w <= width).all()
        return h * w, w / h, (top + 0.5) / (height - h + 1), (left + 0.5) / (width - w + 1)

    rng = np.random.default_rng(0)
    ours = figures(lambda: transforms.random_box(height, width, min_area, rng))
    theirs = figures(lambda: torchvision_box(height, width, min_area))
    assert ours[0].min() > 0.9 * min_area * height * width
    for one, other in zip(ours, theirs, strict=True):
        assert stats.ks_2samp(one, other).pvalue > 0.001


@pytest.mark.parametrize(
    ("height", "width"), [(7, 300), (300, 7), (1, 1), (1, 9), (9, 1), (100, 201)]
)
def test_where_no_box_fits_it_is_torchvisions_centre(height, width):
    """Nearly all of a thin image's area, at a ratio near 1, cannot lie in it."""
    rng = np.random.default_rng(0)
    expected = torchvision_box(height, width, 1.0)
    for _ in range(20):
        assert transforms.random_box(height, width, 1.0, rng) == expected


@pytest.mark.parametrize("size", [1, 33, 64])
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


def test_a_padded_crop_is_the_image_moved_over_black():
    image = noise(8, 8).clip(1)
    rng = np.random.default_rng(0)
    padded = np.pad(image, ((3, 3), (3, 3), (0, 0)))
    moved = {padded[y : y + 8, x : x + 8].tobytes() for y in range(7) for x in range(7)}
    crops = [transforms.padded_crop(image, 8, 3, rng) for _ in range(2000)]
    assert {crop.tobytes() for crop in crops} == moved and len(moved) == 49
    assert all(crop.flags.c_contiguous for crop in crops)


@pytest.mark.parametrize("crop", ["resized", "padded"])
def test_training_is_crop_flip_and_randaugment_in_this_order(cfg, crop):
    cfg.INPUT.RANDAUGMENT.LAYERS, cfg.INPUT.RANDAUGMENT.MAGNITUDE = 2, 15
    cfg.INPUT.CROP, cfg.INPUT.MIN_AREA, cfg.INPUT.PADDING = crop, 0.3, 2
    transform = pickle.loads(pickle.dumps(transforms.TrainTransform(cfg)))
    image = noise(40, 60)
    samples = set()
    for seed in range(20):
        rng = np.random.default_rng(seed)
        if crop == "resized":
            top, left, height, width = transforms.random_box(40, 60, 0.3, rng)
            expected = transforms.resize(image[top : top + height, left : left + width], 16)
        else:
            expected = transforms.padded_crop(transforms.resize(image, 16), 16, 2, rng)
        expected = expected[:, ::-1] if rng.random() < 0.5 else expected
        expected = RandAugment(2, 15)(np.ascontiguousarray(expected), rng)
        result = transform(image, np.random.default_rng(seed))
        np.testing.assert_array_equal(result, expected)
        samples.add(result.tobytes())
    assert len(samples) > 10


@pytest.mark.parametrize(
    ("size", "test_size", "share", "resized"),
    [
        (224, 0, 0.875, 256),
        (160, 0, 0.875, 183),
        (16, 20, 1.0, 20),
        (1, 0, 1.0, 1),
        (33, 0, 33 / 40, 40),
        (17, 0, 17 / 64, 64),
    ],
)
@pytest.mark.parametrize("shape", SHAPES)
def test_evaluation_takes_torchvisions_centre_by_pillow(
    cfg, shape, size, test_size, share, resized
):
    cfg.INPUT.SIZE, cfg.INPUT.TEST_SIZE, cfg.INPUT.TEST_CROP = size, test_size, share
    image = noise(*shape)
    centre = transforms.TestTransform(cfg)(image)
    resize = tv.Resize(resized, interpolation=tv.InterpolationMode.BICUBIC)
    expected = tv.CenterCrop(test_size or size)(resize(Image.fromarray(image)))
    assert centre.flags.c_contiguous and centre.flags.writeable
    np.testing.assert_array_equal(centre, np.asarray(expected))
