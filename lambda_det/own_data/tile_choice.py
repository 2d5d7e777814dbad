"""Whether the images of a training are cut into tiles, and into which, by their objects.

Where most objects would have less than ``SMALL`` pixels in the network's input, whole images
teach little. A tile by the rule is as large as the recipe's input, so that objects keep their own
pixels. It is larger where most objects would not fit into the overlap of two tiles, or where even
the smallest tenth of them can be reduced. The limits are guesses.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from detectron2.config import CfgNode

from lambda_det.detection.tiles import Tiling, why_not_cut
from lambda_det.errors import ConfigError
from lambda_det.modeling.specs import STRIDE
from lambda_det.own_data.input_size import FEW_SMALL, objects_in_input
from lambda_det.own_data.recipe import LEAST_BOXES, MOST, SMALL, STRIDES_PER_ANCHOR, map_strides

__all__ = ["OF_TILES", "TILES", "ChosenTiles", "choose_tiles"]

TILES = ("INPUT.TILE.SIZE", "INPUT.TILE.OVERLAP")
_LONGEST = 0.9  # share of the objects that are not longer than the overlap
# Shares of the side of a tile: the largest overlap by the rule, and the least, because an object at
# the border lacks its surroundings
_LARGEST_OVERLAP, _LEAST_OVERLAP = 0.4, 0.125
# A row of the table, where sizes are given beside tiles
OF_TILES = "", "given sizes", "the sizes of the input are of tiles"


class ChosenTiles(NamedTuple):
    """How images are cut.

    Attributes:
        tiling: None for whole images.
        images: in COCO's format, with the sizes of their tiles in place of their own.
        rows: for the table: what, the choice, and why.
    """

    tiling: Tiling | None
    images: Collection[Mapping[str, Any]]
    rows: list[tuple[str, str, str]]

    @property
    def keys(self) -> dict[str, Any]:
        """Keys of the configuration, with their values."""
        if self.tiling is None:
            return {"INPUT.TILE.SIZE": 0}
        return {"INPUT.TILE.SIZE": self.tiling.size, "INPUT.TILE.OVERLAP": self.tiling.overlap}


def choose_tiles(
    cfg: CfgNode,
    images: Collection[Mapping[str, Any]],
    annotations: Iterable[Mapping[str, Any]],
    tile: int | str | None,
    whole: CfgNode,
) -> ChosenTiles:
    """
    Args:
        cfg: the configuration, with the given keys.
        images: with id, width and height, as in COCO's format.
        annotations: as in COCO's format, with everything decided.
        tile: the given side in pixels, 0 for none, or "auto"; None for tiles where most objects are
            too small without.
        whole: with the sizes of the input that whole images would have.

    Raises:
        ConfigError: the given tiles cannot be.
    """
    objects = [one for one in annotations if not one["iscrowd"]]
    if tile == 0 or not objects:
        return ChosenTiles(None, images, [])
    small = objects_in_input(whole, images, objects).below(SMALL)
    why = f"{small:.0%} of the objects have less than {SMALL} pixels in the input of whole images"
    if tile is None and (small <= MOST or len(objects) < LEAST_BOXES):
        return ChosenTiles(None, images, [])
    longest = sorted(max(one["bbox"][2:]) for one in objects)
    long = longest[math.ceil(_LONGEST * len(longest)) - 1]
    size = tile if isinstance(tile, int) else _side(cfg, objects, long)
    if refusal := why_not_cut(cfg):
        if tile is not None:
            raise ConfigError(f"--tile is {tile}, and {refusal}; leave it out.")
        return ChosenTiles(None, images, [("tiles", "none", f"{why}, but {refusal}")])
    if size >= max(max(image["width"], image["height"]) for image in images):
        rows = [("tiles", "none", f"no image is larger than a tile of {size} pixels")]
        return ChosenTiles(None, images, rows)
    overlap = cfg.INPUT.TILE.OVERLAP
    if overlap < 0:
        overlap = round(max(_LEAST_OVERLAP * size, min(long, _LARGEST_OVERLAP * size)))
    tiling = Tiling(size, overlap)
    fit = np.mean([length <= overlap for length in longest])
    return ChosenTiles(
        tiling,
        [_as_tile(tiling, image) for image in images],
        [
            ("tiles", f"{size} pixels", "given" if isinstance(tile, int) else why),
            ("", f"overlap {overlap}", f"{fit:.0%} of the objects are not longer"),
            ("", "--tile 0", "trains on whole images"),
        ],
    )


def _as_tile(tiling: Tiling, image: Mapping[str, Any]) -> dict[str, Any]:
    height, width = tiling.size_of(image["height"], image["width"])
    return {**image, "height": height, "width": width}


def _side(cfg: CfgNode, objects: Sequence[Mapping[str, Any]], long: float) -> int:
    """The side of a tile by the rule, in pixels.

    Args:
        long: the length of an object that the overlap should have.
    """
    least = STRIDES_PER_ANCHOR * min(map_strides(cfg) or [STRIDE // STRIDES_PER_ANCHOR])
    sides = [math.sqrt(one["bbox"][2] * one["bbox"][3]) for one in objects] or [0.0]
    spare = max(1.0, float(np.quantile(sides, FEW_SMALL)) / least)
    side = max(cfg.INPUT.MIN_SIZE_TEST * spare, long / _LARGEST_OVERLAP)
    return STRIDE * math.ceil(side / STRIDE)
