"""Whether images are cut into tiles, and into which."""

import pytest

from lambda_det.detection.config_files import get_config
from lambda_det.errors import ConfigError
from lambda_det.own_data.tile_choice import choose_tiles

LIGHT = "finetune/light_lambdaresnet26.yaml"  # its input has 384 pixels


@pytest.fixture
def cfg():
    return get_config(LIGHT)


def squares(sides, size=(3000, 3000)):
    """An image with square objects."""
    image = {"id": 1, "width": size[0], "height": size[1]}
    objects = [
        {"image_id": 1, "category_id": 1, "iscrowd": 0, "bbox": [5, 5, side, side]}
        for side in sides
    ]
    return [image], objects


def choose(cfg, labels, tile=None):
    return choose_tiles(cfg, *labels, tile, cfg)


def test_images_are_cut_where_most_objects_are_too_small(cfg):
    # 3000 pixels become 384: 93 pixels become 11.9, and 95 become 12.2
    small, large = squares([93] * 51 + [95] * 49), squares([93] * 49 + [95] * 51)
    assert choose(cfg, small).tiling and not choose(cfg, large).tiling
    assert "51%" in choose(cfg, small).rows[0][2]
    assert not choose(cfg, small, tile=0).tiling
    assert choose(cfg, large, tile="auto").tiling
    assert not choose(cfg, squares([9] * 49)).tiling  # too few to know


def test_objects_keep_their_pixels_unless_they_have_more_than_enough(cfg):
    """A tile is as large as the input, or larger where the smallest tenth has pixels to spare."""
    few = choose(cfg, squares([20] * 99))
    assert few.tiling.size == 384 and few.tiling.overlap == 48
    image = few.images[0]
    assert (image["id"], image["width"], image["height"]) == (1, 384, 384)
    # an anchor needs 32 pixels on the finest map of the recipe
    assert choose(cfg, squares([64] * 99)).tiling.size == 768
    assert choose(cfg, squares([20] * 20 + [64] * 79)).tiling.size == 384


def test_most_objects_are_whole_in_the_overlap(cfg):
    tiling = choose(cfg, squares([20] * 50 + list(range(150, 200))), "auto").tiling
    assert tiling.overlap >= 189 and 2 * tiling.overlap < tiling.size
    assert tiling.size % 32 == 0 and tiling.size < 512
    given = choose(cfg, squares([200] * 99), tile=300)
    assert given.tiling.overlap == 120  # as far as that is below half a tile
    assert given.rows[1][2].startswith("0%")
    cfg.INPUT.TILE.OVERLAP = 17
    assert choose(cfg, squares([20] * 99)).tiling.overlap == 17


@pytest.mark.parametrize("size", [(3000, 300), (301, 10)])
def test_a_side_that_is_not_cut_keeps_its_length(cfg, size):
    image = choose(cfg, squares([5] * 99, size), tile=300).images[0]
    assert (image["width"], image["height"]) == (300, size[1])


def test_no_image_is_larger_than_a_tile(cfg):
    chosen = choose(cfg, squares([5] * 99), tile=3000)
    assert chosen.tiling is None and chosen.keys == {"INPUT.TILE.SIZE": 0}
    assert len(chosen.rows) == 1 and "3000" in chosen.rows[0][2]
    assert choose(cfg, squares([5] * 99), tile=2999).tiling


def test_what_cannot_be_cut_is_refused_or_left_whole(cfg):
    cfg.MODEL.KEYPOINT_ON = True
    chosen = choose(cfg, squares([20] * 99))
    assert chosen.tiling is None and "MODEL.KEYPOINT_ON" in chosen.rows[0][2]
    with pytest.raises(ConfigError, match=r"--tile .*MODEL.KEYPOINT_ON"):
        choose(cfg, squares([20] * 99), tile=500)
    with pytest.raises(ConfigError, match=r"INPUT\.TILE\.SIZE is 8"):
        choose(get_config(LIGHT), squares([20] * 99), tile=8)


def test_crowds_do_not_count(cfg):
    images, objects = squares([20] * 99 + [500] * 200)
    for one in objects[99:]:
        one["iscrowd"] = 1
    assert choose(cfg, (images, objects)).tiling.size == 384
