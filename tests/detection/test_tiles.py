"""Where tiles lie."""

import random

import pytest
from detectron2.config import get_cfg

from lambda_det.config import add_lambda_config
from lambda_det.detection.components import of_yaml
from lambda_det.detection.tiles import Tile, Tiling
from lambda_det.errors import ConfigError


def test_the_last_tiles_end_at_the_border():
    tiles = Tiling(size=50, overlap=10).tiles(height=40, width=120)
    assert tiles == [Tile(0, 0, 50, 40), Tile(40, 0, 90, 40), Tile(70, 0, 120, 40)]


def test_what_is_not_longer_than_the_overlap_lies_whole_in_one_tile():
    drawn = random.Random(0)
    for _ in range(200):
        size = drawn.randint(32, 90)
        tiling = Tiling(size, drawn.randint(0, (size - 1) // 2))
        width, height = drawn.randint(1, 400), drawn.randint(1, 400)
        tiles = tiling.tiles(height, width)
        assert tiles == sorted(set(tiles), key=lambda tile: (tile.y0, tile.x0))
        for length, ends in (
            (width, {(tile.x0, tile.x1) for tile in tiles}),
            (height, {(tile.y0, tile.y1) for tile in tiles}),
        ):
            assert all(end - start == min(size, length) for start, end in ends)
            assert all(start >= 0 and end <= length for start, end in ends)
            longest = max(tiling.overlap, 1)  # with no overlap each pixel is in a tile
            for start in range(max(length - longest, 0) + 1):
                end = min(start + longest, length)
                assert any(first <= start and end <= last for first, last in ends)


@pytest.mark.parametrize(
    ("size", "overlap", "key"), [(31, 0, "SIZE"), (100, 50, "OVERLAP"), (100, -2, "OVERLAP")]
)
def test_impossible_tiles_are_refused(size, overlap, key):
    with pytest.raises(ConfigError, match=rf"INPUT\.TILE\.{key}"):
        Tiling(size, overlap)


def test_the_scale_of_an_evaluation_is_that_of_its_tiles():
    cfg = get_cfg()
    add_lambda_config(cfg)
    cfg.INPUT.MIN_SIZE_TEST, cfg.INPUT.MAX_SIZE_TEST = 300, 400
    sizes = [(1000, 3000), (200, 1000), (100, 150)]
    assert of_yaml(cfg).test_scale(sizes) == 0.4  # of 1000
    cfg.INPUT.TILE.SIZE = 200
    assert of_yaml(cfg).test_scale(sizes) == 1.5
