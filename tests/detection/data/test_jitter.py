import numpy as np
import pytest
import torch
from detectron2.data import DatasetMapper, detection_utils
from detectron2.data import transforms as T

from lambda_det.detection.components import of_yaml
from lambda_det.detection.data import TolerantMapper, build_augmentation, large_scale_jitter
from lambda_det.detection.data.jitter import ColorJitter
from lambda_det.errors import ConfigError


def augment(augmentations, image):
    inputs = T.AugInput(image)
    transforms = T.AugmentationList(augmentations)(inputs)
    return inputs.image, transforms


def test_scale_fits_the_longer_side_to_the_drawn_share_of_the_square():
    widths = []
    for _ in range(300):
        augmentations = large_scale_jitter(0.5, 2.0, 100, pad=False)
        image, transforms = augment(augmentations, np.ones((50, 100, 3), np.uint8))
        resize = transforms.transforms[0]
        assert abs(resize.new_w - 2 * resize.new_h) <= 1  # the aspect ratio stays
        assert image.shape[:2] == (min(resize.new_h, 100), min(resize.new_w, 100))
        assert (image == 1).all()  # nor is a pixel invented
        widths.append(resize.new_w)
    assert min(widths) >= 50 and max(widths) <= 200
    # Even between the limits: the mean of 300 draws is within 4 standard errors.
    assert abs(np.mean(widths) - 125) < 4 * 43.3 / np.sqrt(300)


@pytest.mark.parametrize("shape", [(3, 1500), (1500, 3), (48, 64), (1, 1)])
def test_sides_are_those_of_detectron2_but_never_0(cfg, shape):
    cfg.INPUT.LSJ.ENABLED, image = False, np.ones((*shape, 3), np.uint8)
    cfg.INPUT.MIN_SIZE_TRAIN, cfg.INPUT.MIN_SIZE_TEST = (128,), 128
    cfg.INPUT.MAX_SIZE_TRAIN = cfg.INPUT.MAX_SIZE_TEST = 128
    expected = detection_utils.build_augmentation(cfg, False)[0].get_transform(image)
    for is_train in (True, False):
        ours, _ = augment(build_augmentation(cfg, is_train)[:1], image)
        assert ours.shape[:2] == (max(expected.new_h, 1), max(expected.new_w, 1))
    for pad in (True, False):
        jittered, _ = augment(large_scale_jitter(0.1, 0.1, 1024, pad), image)
        assert min(jittered.shape[:2]) >= 1


REFUSED = [
    (["INPUT.LSJ.MIN_SCALE", 2.5], "INPUT.LSJ.MIN_SCALE"),  # over the largest
    (["INPUT.LSJ.MIN_SCALE", 0.0], "INPUT.LSJ.MIN_SCALE"),
    (["INPUT.LSJ.MAX_SCALE", float("nan")], "INPUT.LSJ.MAX_SCALE"),
    (["INPUT.LSJ.SIZE", 0], "INPUT.LSJ.SIZE"),
    (["INPUT.RANDOM_FLIP", "diagonal"], "INPUT.RANDOM_FLIP"),
    (["INPUT.CROP.ENABLED", True], "INPUT.CROP.ENABLED"),
    (["INPUT.COLOR", 1.5], r"INPUT\.COLOR is 1\.5"),
    (["INPUT.COLOR", -0.5], r"INPUT\.COLOR is -0\.5"),
    (["INPUT.COLOR", 0.5, "INPUT.FORMAT", "L"], r"INPUT\.FORMAT is L"),
]


@pytest.mark.parametrize(("pairs", "named"), REFUSED)
def test_values_are_refused_by_key(cfg, pairs, named):
    cfg.merge_from_list(pairs)
    with pytest.raises(ConfigError, match=named):
        of_yaml(cfg)
        TolerantMapper(cfg, is_train=True)


@pytest.mark.parametrize("given", [{"size": 0}, {"min_scale": -1.0}, {"max_scale": float("inf")}])
def test_a_script_gets_no_jitter_that_leaves_nothing_of_an_image(given):
    """It has no table of keys."""
    with pytest.raises(ConfigError, match=str(*given.values())):
        large_scale_jitter(**given)


@pytest.mark.parametrize(
    ("crop", "flip", "is_train"),
    [(True, "horizontal", True), (False, "vertical", True), (True, "none", False)],
)
def test_without_jitter_the_augmentations_are_detectron2s(cfg, crop, flip, is_train):
    cfg.INPUT.LSJ.ENABLED, cfg.INPUT.CROP.ENABLED, cfg.INPUT.RANDOM_FLIP = False, crop, flip
    theirs = DatasetMapper(cfg, is_train).augmentations.augs
    ours = build_augmentation(cfg, is_train)
    assert [repr(a).replace("AtLeastOnePixel", "") for a in ours] == list(map(repr, theirs))


def test_colour_is_that_of_the_image_whatever_the_order_of_its_channels():
    pixels = torch.randint(0, 256, (3, 20, 30), dtype=torch.uint8)
    torch.manual_seed(4)
    rgb = ColorJitter(0.4, "RGB")(pixels)
    torch.manual_seed(4)
    bgr = ColorJitter(0.4, "BGR")(pixels.flip(0))
    assert bgr.flip(0).equal(rgb) and rgb.dtype == torch.uint8
    assert 2 < (rgb.float() - pixels).abs().mean() < 100


def test_a_mapper_of_another_format_is_refused(cfg):
    """A LazyConfig gives both formats."""
    options = TolerantMapper.from_config(cfg, is_train=True)
    options["pixel_augmentations"] = [ColorJitter(0.4, "RGB")]
    with pytest.raises(ConfigError, match=r"RGB.*BGR"):
        TolerantMapper(**options)
