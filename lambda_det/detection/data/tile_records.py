"""Records of tiles, made of records of images: what a training draws where images are cut."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pycocotools.mask as mask_util
from detectron2.data.transforms import CropTransform
from detectron2.structures import BoxMode
from detectron2.utils.logger import log_first_n

from lambda_det.detection.data.transforming import cropped
from lambda_det.detection.data.truth import Decided, around, corners, runs_of
from lambda_det.detection.tiles import Tile, Tiling
from lambda_det.errors import ConfigError, printable

# An object is learnt in each tile that shows at least this share of what the best tile shows of its
# box. A box that overlaps an object by an IoU of less than this counts as background in Detectron2
# (MODEL.RPN.IOU_THRESHOLDS).
LEAST_LEFT = 0.3
_MANY_CUT = 0.1  # share of objects that no tile shows whole, above which a tile seems too small


def tile_records(
    records: Sequence[Mapping[str, Any]], tiling: Tiling, empty: float
) -> list[Mapping[str, Any]]:
    """The records of the tiles to train on.

    Boxes and masks are clipped at the border of a tile. A piece of an object of which another tile
    shows much more (:data:`LEAST_LEFT`) is neither learnt nor background: its pixels are painted
    over when the tile is read. Crowds stay crowds.

    Args:
        records: of images, with checked and repaired annotations.
        tiling: how they are cut.
        empty: the largest number of tiles without an object, as a multiple of those with objects.
            They are spread evenly at random over all of them, always in the same way.

    Returns:
        The record of a tile has its height, width and annotations, the "tile" in the image, the
        "image_size", height and width, and the boxes "ignored", x0, y0, x1, y1, in its pixels.
        An image that is not larger than a tile keeps its record. Where this holds for all, the
        result has all records.

    Raises:
        ConfigError: the share of empty tiles is invalid, or objects have turned boxes.
    """
    if not 0 <= empty < float("inf"):
        raise ConfigError(f"INPUT.TILE.EMPTY is {empty}; it must be a number from 0.")
    result: list[Mapping[str, Any]] = []
    cut = 0
    for record in records:
        tiles = tiling.tiles(record["height"], record["width"])
        if len(tiles) == 1:
            result.append(record)
            continue
        parts, cut_here = _in_tiles(record, tiles)
        cut += cut_here
        result += parts
    if len(result) == len(records):
        return list(records)
    is_full = np.array([_number_of_objects(record) > 0 for record in result])
    full, bare = np.flatnonzero(is_full), np.flatnonzero(~is_full)
    drawn = np.random.default_rng(0).permutation(bare)[: round(empty * max(len(full), 1))]
    _say(
        logging.INFO,
        f"{len(full) + len(drawn)} tiles of {tiling.size} pixels, with an overlap of "
        f"{tiling.overlap}, of {len(records)} images: {len(full)} with objects, and {len(drawn)} "
        f"of the {len(bare)} without (INPUT.TILE.EMPTY)",
    )
    objects = sum(map(_number_of_objects, records))
    if cut > _MANY_CUT * objects:
        _say(
            logging.WARNING,
            f"{cut} of {objects} objects ({cut / objects:.0%}) are whole in no tile, because they "
            f"are longer than the {tiling.overlap} pixels of INPUT.TILE.OVERLAP, or than "
            f"INPUT.TILE.SIZE {tiling.size}: --tile {2 * tiling.size} shows more of them whole.",
        )
    return [result[place] for place in sorted([*full, *drawn])]


def number_of_whole_images(records: Iterable[Mapping[str, Any]]) -> int:
    """The number of images that records of tiles, and of whole images, are of."""
    return len({record["file_name"] for record in records})


def tiles_to_test(record: Mapping[str, Any], tiling: Tiling) -> list[Mapping[str, Any]]:
    """The records of all tiles of an image to test on, row by row, without objects.

    They have the keys of :func:`tile_records`.
    """
    tiles = tiling.tiles(record["height"], record["width"])
    return [_record_of(record, tile) for tile in tiles] if tiles[1:] else [record]


def _number_of_objects(record: Mapping[str, Any]) -> int:
    """The number of annotations that are no crowds."""
    return sum(not one.get("iscrowd", 0) for one in record.get("annotations", ()))


def _say(level: int, text: str) -> None:
    """Log a text once: the recipe, the loader and the statistics of batch norm make records."""
    log_first_n(level, text, key="message", name=__name__)


def _record_of(record: Mapping[str, Any], tile: Tile) -> dict[str, Any]:
    """The record of a tile of an image, without objects."""
    result = {
        **record,
        "height": tile.y1 - tile.y0,
        "width": tile.x1 - tile.x0,
        "tile": tile,
        "image_size": (record["height"], record["width"]),
        "annotations": Decided(),
        "ignored": [],
    }
    result.pop("sem_seg_file_name", None)
    return result


# ------------------------------------------------------------------------------------- the objects
def _in_tiles(record: Mapping[str, Any], tiles: Sequence[Tile]) -> tuple[list[dict[str, Any]], int]:
    """The records of all tiles of an image, and the number of its objects that every tile cuts."""
    result = [_record_of(record, tile) for tile in tiles]
    cut = 0
    edges = np.array(tiles, float)
    border = [record["width"], record["height"]] * 2
    for annotation in record.get("annotations", ()):
        if annotation["bbox_mode"] not in (BoxMode.XYWH_ABS, BoxMode.XYXY_ABS):
            raise ConfigError(
                f"{printable(record['file_name'])}: INPUT.TILE.SIZE cannot cut turned boxes "
                "(BoxMode.XYWHA_ABS); set it to 0."
            )
        is_crowd = annotation.get("iscrowd", 0)
        box = np.array(corners(annotation)).clip(0, border)
        shown = []
        for place in np.flatnonzero(((edges[:, 2:] > box[:2]) & (edges[:, :2] < box[2:])).all(1)):
            if clipped := seen_in(annotation, tiles[place]):
                x0, y0, x1, y1 = clipped["bbox"]
                shown.append((result[place], clipped, (x1 - x0) * (y1 - y0)))
        most = max((area for *_, area in shown), default=0.0)
        for part, clipped, area in shown:
            if is_crowd or area >= LEAST_LEFT * most:
                part["annotations"].append(clipped)
            else:
                part["ignored"].append(clipped["bbox"])
        is_whole = ((edges[:, :2] <= box[:2]) & (edges[:, 2:] >= box[2:])).all(1).any()
        cut += not is_crowd and not is_whole
    return result, cut


def seen_in(annotation: Mapping[str, Any], tile: Tile) -> dict[str, Any] | None:
    """What a tile shows of an annotation, in its pixels; None where it shows nothing.

    Args:
        annotation: of a Detectron2 dataset dict, with a box that is not turned.
        tile: of its image.
    """
    whole = np.array(corners(annotation))
    box = _within(whole, tile)
    if not (box[2:] > box[:2]).all():
        return None
    result = {
        "category_id": annotation["category_id"],
        "iscrowd": annotation.get("iscrowd", 0),
        "bbox": (box - np.tile(tile[:2], 2)).tolist(),
        "bbox_mode": BoxMode.XYXY_ABS,
    }
    mask = annotation.get("segmentation")
    if not mask:
        return result
    clipped = _clipped_runs(mask, tile) if isinstance(mask, dict) else _clipped_outline(mask, tile)
    if not clipped:
        return None
    result["segmentation"] = clipped
    if (box != whole).any():  # what is left of the mask may be less than of its box
        outline = _within(around(clipped), result["bbox"])
        if not (outline[2:] > outline[:2]).all():
            return None
        result["bbox"] = outline.tolist()
    return result


def _within(box: Sequence[float], border: Sequence[float]) -> np.ndarray:
    """A box x0, y0, x1, y1 cut at the sides of another one; it has no area where it is outside."""
    return np.clip(box, np.tile(border[:2], 2), np.tile(border[2:], 2))


def _clipped_outline(polygons: Sequence[Sequence[float]], tile: Tile) -> list[list[float]]:
    """The polygons of an object within a tile, in its pixels."""
    crop = CropTransform(tile.x0, tile.y0, tile.x1 - tile.x0, tile.y1 - tile.y0)
    points = (np.array(polygon, float).reshape(-1, 2) for polygon in polygons)
    pieces = [piece for polygon in points for piece in cropped(crop, polygon)]
    return [piece.reshape(-1).tolist() for piece in pieces if len(piece) >= 3]


def _clipped_runs(mask: Mapping[str, Any], tile: Tile) -> dict[str, Any] | None:
    """A run-length mask within a tile; None if it is empty. The image is not decoded."""
    # the runs go down the columns, so only the columns of the tile that the object has are made
    height = mask["size"][0]
    left, _, right, _ = map(int, around(mask))
    first, last = max(left, tile.x0), min(right, tile.x1)
    if first >= last:
        return None
    ends = np.cumsum(runs_of(mask["counts"])).clip(first * height, last * height)
    size, counts = [height, last - first], np.diff(ends, prepend=first * height).tolist()
    runs = mask_util.frPyObjects({"size": size, "counts": counts}, *size)
    columns = mask_util.decode(runs)[tile.y0 : tile.y1]
    if not columns.any():
        return None
    pixels = np.zeros((tile.y1 - tile.y0, tile.x1 - tile.x0), np.uint8, order="F")
    pixels[:, first - tile.x0 : last - tile.x0] = columns
    return mask_util.encode(pixels)
