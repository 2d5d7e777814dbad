"""The size of the input follows from the sizes of the objects."""

import numpy as np
import pytest

from lambda_det.detection.config_files import get_config
from lambda_det.errors import ConfigError
from lambda_det.own_data.fit_input import SIZES, TILES, Asked, fit_input, sizes_by_shape
from tests.own_data.parts import record


@pytest.fixture
def cfg():
    """A recipe without a GPU: 384 pixels, and a finest map of eight pixels."""
    return get_config("finetune/light_mobilenet_v2.yaml")


def labels(sides, size=(640, 640), classes=(0,)):
    """The record of one image with squares of these sides."""
    return [record([(side, side) for side in sides], size, classes)]


def fitted(cfg, records, given=(), size=None, tile=None, classes=(), others=()):
    """What follows for a recipe that was chosen."""
    asked = Asked(given, size, tile, is_chosen=True)
    return fit_input(cfg, records, asked, classes=classes, others=others)


def values(found):
    return {key: value for key, value, _ in found.choices}


@pytest.mark.parametrize("small", [0, 33])
def test_few_small_objects_change_nothing(cfg, small):
    # 50 of 640 pixels are 30 of 384, below four strides of eight
    found = fitted(cfg, labels([50] * small + [60] * (100 - small)))
    assert not found.choices
    ((_, said, _),) = found.rows
    assert said == f"{small}% below 32 pixels at 384"


def test_small_objects_enlarge_the_input(cfg):
    """A tenth may be below four strides of the finest map, of eight pixels; not more."""
    sides = np.linspace(44, 70, 200)
    found = fitted(cfg, labels(sides))
    keys = values(found)
    assert keys.keys() == set(SIZES)
    side = keys["INPUT.MIN_SIZE_TRAIN"][-1]
    assert np.mean(sides * side / 640 < 32) <= 0.1 < np.mean(sides * (side - 32) / 640 < 32)
    assert keys["INPUT.MIN_SIZE_TEST"] == side
    before, after = (said for _, said, _ in found.rows)
    assert before == f"{np.mean(sides * 384 / 640 < 32):.0%} below 32 pixels at 384"
    assert after == f"{np.mean(sides * side / 640 < 32):.0%} below 32 pixels at {side}"


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("ANCHOR_GENERATOR", "NAME", "RotatedAnchorGenerator"),
        ("PROPOSAL_GENERATOR", "NAME", "PrecomputedProposals"),
        ("RPN", "IN_FEATURES", ["stride4", "stride8"]),
    ],
)
def test_other_anchors_say_nothing_of_small_objects(cfg, section, key, value):
    cfg.MODEL[section][key] = value
    found = fitted(cfg, labels([20] * 99))
    assert not found.choices and not found.rows


@pytest.mark.parametrize(
    # A step of twice the time: 0.3 + 0.7 * 1.558**2, or twice the pixels of the image
    ("size", "side"),
    [((2000, 2000), 576), ((650, 650), 576), ((400, 600), 576), ((200, 200), 384)],
)
def test_the_input_grows_within_limits(cfg, size, side):
    found = fitted(cfg, labels([4] * 99, size), tile=0)
    assert values(found).get("INPUT.MIN_SIZE_TRAIN", [384])[-1] == side
    assert values(found).get("INPUT.MIN_SIZE_TEST", 384) == side
    said, why = found.rows[1][1:]
    assert said == f"100% below 32 pixels at {side}" and "enlarged 2 times" in why


def labels_of_classes(*sides_of_class, size=(640, 640)):
    """As :func:`labels`, with the sides of each class."""
    sides = [side for sides in sides_of_class for side in sides]
    return labels(sides, size, [n for n, sides in enumerate(sides_of_class) for _ in sides])


@pytest.mark.parametrize("count", [50, 99, 100, 3000])
def test_each_class_counts_alike(cfg, count):
    """AP is a mean over the classes: all windows of facades are no more than their cars."""
    small = [20] * count
    found = fitted(cfg, labels_of_classes(small, [400] * 10))
    assert found.rows[0][1] == "50% below 32 pixels at 384"
    # 12 of 384 pixels become 18 of 576, as if there were no other class
    assert values(found) == values(fitted(cfg, labels(small)))
    found = fitted(cfg, labels_of_classes(small, [400] * 10, [400] * 11))
    assert found.rows[0][1] == "33% below 32 pixels at 384" and not found.choices


def test_a_rare_class_says_nothing(cfg):
    found = fitted(cfg, labels_of_classes([400] * 99, [5] * 9))
    assert found.rows[0][1] == "0% below 32 pixels at 384" and not found.choices
    all_rare = labels_of_classes(*([[20] * 9] * 6))
    assert values(fitted(cfg, all_rare)) == values(fitted(cfg, labels([20] * 99)))


def test_small_images_count_at_the_size_that_they_get(cfg):
    """Objects of 20 pixels have 40 in an input of twice the 100 pixels, and 77 in one of 384."""
    found = fitted(cfg, labels([20] * 99, (100, 100)))
    assert values(found)["INPUT.MIN_SIZE_TEST"] == 200
    assert found.rows[0][1] == "0% below 32 pixels at 200"


def test_what_is_given_is_not_changed(cfg):
    small = labels([20] * 99)
    for key in SIZES:
        found = fitted(cfg, small, {key})
        assert not found.choices and "given" in found.rows[-1][2]
    assert values(fitted(cfg, small, {"SEED"}, size=640)).keys() == set(SIZES)
    assert values(fitted(cfg, small, size=1280)).keys() == set(SIZES)  # 40 pixels there


@pytest.mark.parametrize(
    ("sizes", "changes"),
    [
        ([(640, 480), (3000, 3000)], False),
        ([(400, 8000)], True),
        ([(8000, 400), (5000, 500)], True),
        # one strip among photographs would pad its batches
        ([(640, 480)] * 9 + [(8000, 400)], False),
    ],
)
def test_strips_get_the_pixels_of_photographs(cfg, sizes, changes):
    """The shorter side grows; as many pixels as before are resized to, on average."""
    keys = sizes_by_shape(cfg, np.array(sizes, float))
    assert bool(keys) == changes
    if changes:
        short, longest = np.sort(sizes).T
        limits = keys["INPUT.MIN_SIZE_TEST"] / short, keys["INPUT.MAX_SIZE_TEST"] / longest
        scales, pixels = np.minimum(*limits), short * longest
        budget = cfg.INPUT.MIN_SIZE_TEST * cfg.INPUT.MAX_SIZE_TEST
        assert (scales > 2 * cfg.INPUT.MAX_SIZE_TEST / longest).all()
        assert 0.8 * budget < (scales**2 * pixels).mean() <= 1.02 * budget
        assert (scales**2 * pixels).max() <= 1.52 * budget


def test_strips_are_tested_at_the_size_of_the_training(cfg):
    keys = values(fitted(cfg, labels([20] * 99, (8000, 400)), tile=0))
    assert keys["INPUT.MIN_SIZE_TEST"] == max(keys["INPUT.MIN_SIZE_TRAIN"]) < 320
    assert keys["INPUT.MAX_SIZE_TEST"] == keys["INPUT.MAX_SIZE_TRAIN"]


def test_a_given_size_of_strips_is_their_shorter_side(cfg):
    found = fitted(cfg, labels([20] * 99, (8000, 400)), size=320)
    keys = values(found)
    assert keys["INPUT.MIN_SIZE_TEST"] == 320
    assert keys["INPUT.MAX_SIZE_TEST"] >= 320 * 20
    assert found.rows[0][:2] == ("shapes of images", "up to 20:1")


@pytest.mark.parametrize("size", [320, 384, 1000])
def test_a_given_size_is_not_exceeded(cfg, size):
    """Whatever the objects ask for: these have 14 of 1200 pixels."""
    keys = values(fitted(cfg, labels([14] * 99, (1600, 1200)), size=size))
    assert keys["INPUT.MIN_SIZE_TEST"] == max(keys["INPUT.MIN_SIZE_TRAIN"]) == size


def test_a_recipe_whose_memory_was_counted_keeps_its_size():
    """It has the map of four pixels already; the table says what a larger input would cost."""
    cfg = get_config("finetune/mask_rcnn_resnetrs50_se.yaml")
    found = fitted(cfg, labels([5] * 99))
    assert not found.choices and "--size" in found.rows[-1][2]


def test_crowds_and_few_objects_say_nothing(cfg):
    records = labels([5] * 60 + [200] * 60)
    for entry in records[0]["annotations"][:60]:
        entry["iscrowd"] = 1
    assert not fitted(cfg, records).choices
    few = labels([5] * 49 + [0] * 9)  # too few to say anything, as an empty box is none
    assert fitted(cfg, few) == ([], [], [])
    records = squares([20] * 99 + [500] * 200)
    for entry in records[0]["annotations"][99:]:
        entry["iscrowd"] = 1
    assert tiles(fitted(cfg, records))[0] == 384


# ------------------------------------------------------------------------------------------- tiles
@pytest.fixture
def light():
    """Its input has 384 pixels."""
    return get_config("finetune/light_lambdaresnet26.yaml")


def squares(sides, size=(3000, 3000)):
    return labels(sides, size)


def tiles(found):
    """The side of the tiles and their overlap; None for whole images."""
    keys = values(found)
    return (keys[TILES[0]], keys[TILES[1]]) if keys.get(TILES[0]) else None


def row(found):
    """What the table says of tiles: the choice, and why."""
    (said,) = (row[1:] for row in found.rows if row[0] == "tiles")
    return said


def test_images_are_cut_where_most_objects_are_too_small(light):
    # 3000 pixels become 384: 93 pixels become 11.9, and 95 become 12.2
    small, large = squares([93] * 51 + [95] * 49), squares([93] * 49 + [95] * 51)
    assert tiles(fitted(light, small)) and not tiles(fitted(light, large))
    assert "51%" in row(fitted(light, small))[1]
    assert tiles(fitted(light, large, tile="auto"))
    assert not tiles(fitted(light, squares([9] * 49)))  # too few to know
    whole = fitted(light, small, tile=0)
    assert not tiles(whole) and "51%" in whole.warnings[0] and "--tile auto" in whole.warnings[0]
    assert not fitted(light, large).warnings


@pytest.mark.parametrize(
    ("classes", "is_cut"),
    [
        (([20] * 1604, [200] * 50), True),  # of all objects
        (([20] * 50, [20] * 10, [200] * 100), True),  # of two classes of three
        (([20] * 50, [200] * 1604), False),
    ],
)
def test_neither_a_rare_large_class_nor_a_common_one_hides_what_is_small(light, classes, is_cut):
    records = labels_of_classes(*classes, size=(1280, 720))
    found = fitted(light, records, classes=["ibis", "swan", "egret"][: len(classes)])
    assert bool(tiles(found)) is is_cut
    if is_cut:
        assert "100% of ibis" in row(found)[1]


def test_one_number_of_pixels_at_one_size(light):
    """Whether the recipe was chosen or named, and whatever is enlarged after this."""
    records = squares([18] * 99, (1100, 800))
    chosen, named = (
        fitted(light, records),
        fit_input(light, records, Asked(), classes=(), others=()),
    )
    words = "100% of the objects have less than 12 pixels in an input of 384"
    assert row(chosen) == ("384 pixels, overlap 48", words) and not chosen.warnings
    assert named.warnings[0].startswith(words) and not named.choices
    assert fitted(light, records, tile=0).warnings[0].startswith(words)
    assert "an input of 512" in fitted(light, records, size=512).warnings[0]
    assert not tiles(fitted(light, records, {"INPUT.MIN_SIZE_TEST"}))


def test_objects_keep_their_pixels_unless_they_have_more_than_enough(light):
    """A tile is as large as the input, or larger where the smallest tenth has pixels to spare."""
    assert tiles(fitted(light, squares([20] * 99))) == (384, 48)
    # an anchor needs 32 pixels on the finest map of the recipe
    assert tiles(fitted(light, squares([64] * 99)))[0] == 768
    assert tiles(fitted(light, squares([20] * 20 + [64] * 79)))[0] == 384


def test_most_objects_are_whole_in_the_overlap(light):
    side, overlap = tiles(fitted(light, squares([20] * 50 + [*range(150, 200)]), tile="auto"))
    assert overlap >= 189 and 2 * overlap < side
    assert side % 32 == 0 and side < 512
    given = fitted(light, squares([200] * 99), tile=300)
    assert tiles(given) == (300, 120)  # as far as that is below half a tile
    light.INPUT.TILE.OVERLAP = 17
    assert tiles(fitted(light, squares([20] * 99)))[1] == 17


def test_a_tile_that_is_given_keeps_its_pixels(light):
    """Also where one side of the images is not longer."""
    keys = values(fitted(light, squares([40] * 99, (3000, 300)), tile=320))
    assert keys["INPUT.MIN_SIZE_TEST"] == 320
    assert "INPUT.MIN_SIZE_TEST" not in values(
        fitted(light, squares([40] * 99), {"INPUT.MIN_SIZE_TEST"}, tile=320)
    )


def test_no_image_is_larger_than_a_tile(light):
    found = fitted(light, squares([5] * 99), tile=3000)
    assert tiles(found) is None and "3000" in row(found)[1]
    assert tiles(fitted(light, squares([5] * 99), tile=2999))


def test_what_cannot_be_cut_is_refused_or_left_whole(light):
    light.MODEL.KEYPOINT_ON = True
    found = fitted(light, squares([20] * 99))
    assert tiles(found) is None and "MODEL.KEYPOINT_ON" in row(found)[1]
    assert "--tile" not in found.warnings[0]
    found = fitted(light, CROPS, others=labels([20] * 99, (1100, 800)))
    assert row(found)[1].startswith("the images to train on are such tiles") and not tiles(found)
    assert "MODEL.KEYPOINT_ON" in found.warnings[0] and "--tile" not in found.warnings[0]
    with pytest.raises(ConfigError, match=r"--tile .*MODEL.KEYPOINT_ON"):
        fitted(light, squares([20] * 99), tile=500)


CROPS = labels([20] * 20, (192, 192)) * 9


@pytest.mark.parametrize(
    ("train", "others", "side"),
    [
        (CROPS, labels([20] * 99, (1100, 800)), 192),
        (CROPS, labels([90] * 99, (1100, 800)), None),  # images with five times the pixels
        (CROPS, labels([20] * 99, (250, 250)), None),
        (CROPS, [], None),
        (labels([20] * 20, (192, 150)) * 9 + CROPS[:5], labels([20] * 99, (1100, 800)), 192),
    ],
)
def test_images_that_are_tiles_beside_whole_ones_are_recognised(light, train, others, side):
    """Both get one scale; a recipe that is named is told what to type."""
    found = fitted(light, train, others=others)
    assert (tiles(found) or [None])[0] == side
    named = fit_input(light, train, Asked(), classes=(), others=others)
    assert not named.choices and any("--tile 192" in w for w in named.warnings) is bool(side)
    # where they are given, those of the other part are cut
    assert bool(tiles(fitted(light, train, tile=192, others=others))) is bool(others)
