"""Predict with an .onnx of lambda-det export: python detect.py detector.onnx PHOTO.jpg ..."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import onnxruntime
from PIL import Image, ImageOps

# ---- lambda_det/detection/merging.py, which .ci/detect.py writes here
MERGE = 1  # the number of this rule, which files name; another rule gets another number
SAME = 0.5  # two detections are one object above this, as in a detector's own NMS
NEAR = 2.0  # a box ends at a border of its tile if it is this near to it, in pixels,
NEAR_SHARE = 0.1  # or nearer than this share of its own side


class Detections(NamedTuple):
    """The detections of a tile or of an image, in pixels of the image.

    Attributes:
        boxes: [N, 4]: x0, y0, x1, y1.
        scores, classes: [N].
        masks: N arrays of runs [R, 3]: a column, its first row, and the row behind the last; None
            for a detector without masks.
    """

    boxes: np.ndarray
    scores: np.ndarray
    classes: np.ndarray
    masks: list[np.ndarray] | None


def cuts(length: int, size: int, overlap: int) -> list[tuple[int, int]]:
    """The begin and end of each tile along a side of an image.

    The last one ends at the border of the image, so that it has the full size and a larger
    overlap. A side that is not longer than a tile is not cut.
    """
    starts = [*range(0, max(length - size, 0), size - overlap), max(length - size, 0)]
    return [(start, min(start + size, length)) for start in starts]


def merge(tiles: Sequence[tuple[Sequence[int], Detections]], height: int, width: int) -> Detections:
    """Join what two tiles find of the same object, class by class.

    Two detections of overlapping tiles are one object by what both tiles see. Where each of the
    tiles sees the whole object, their IoU must be above ``SAME``. Where the border of one tile cuts
    the object, most of the cut detection must lie within the other one. Where each tile cuts it,
    both are clipped to the overlap, and most of the smaller piece must lie within the other piece.
    The best pairs are joined first, and of one tile no two detections are joined: the detector took
    them for two objects. Objects over several tiles become one along such pairs.

    Of joined detections, the one with the highest score is kept among those that no border cuts.
    Where all are cut, box and mask are the union. The score is the highest of all. The result does
    not depend on the order of the tiles, and the detections of a single tile stay as they are.

    Args:
        tiles: the corners x0, y0, x1, y1 of each tile, and its detections, the best first.
        height, width: of the image.

    Returns:
        The detections of the image, the highest scores first.
    """
    tiles = sorted(tiles, key=lambda entry: tuple(entry[0][1::-1]))
    corners = np.array([tile for tile, _ in tiles], np.int64)
    found = [detections for _, detections in tiles]
    starts = np.cumsum([0, *(len(one.scores) for one in found)])
    boxes, scores, classes = (
        np.concatenate([getattr(one, name) for one in found])
        for name in ("boxes", "scores", "classes")
    )
    has_masks = found[0].masks is not None
    masks = [mask for one in found for mask in one.masks] if has_masks else None

    groups = [[number] for number in range(len(scores))]  # of joined detections, by each of them
    tile_of = np.repeat(np.arange(len(found)), np.diff(starts))
    for _, a, b in _best_first(corners, found, starts):
        if groups[a] is not groups[b] and not {*tile_of[groups[a]]} & {*tile_of[groups[b]]}:
            groups[a] += groups[b]
            for number in groups[b]:
                groups[number] = groups[a]

    image = np.array([0, 0, width, height])
    of_tiles = zip(found, corners, strict=True)
    is_cut = np.concatenate([_ends_at(one.boxes, tile, tile != image) for one, tile in of_tiles])
    kept = []
    for number, members in enumerate(map(sorted, groups)):
        if number != members[0]:
            continue
        whole = [member for member in members if not is_cut[member]]
        best = max(whole or members, key=lambda member: scores[member])
        if not whole and len(members) > 1:
            low, high = boxes[members, :2].min(0), boxes[members, 2:].max(0)
            boxes[best] = np.concatenate([low, high])
            if masks is not None:
                masks[best] = union([masks[member] for member in members])
        scores[best] = scores[members].max()
        kept.append(best)
    kept = np.array(kept, np.int64)
    kept = kept[np.argsort(-scores[kept], kind="stable")]
    masks = None if masks is None else [masks[number] for number in kept]
    return Detections(boxes[kept], scores[kept], classes[kept], masks)


def _best_first(
    corners: np.ndarray, found: Sequence[Detections], starts: np.ndarray
) -> list[tuple[float, int, int]]:
    """Negative IoU and numbers of detections of two tiles that are one object, the best first."""
    pairs = []
    for a, one in enumerate(found):
        shared = _common(corners[a], corners[a + 1 :])
        for b in np.flatnonzero((shared[:, :2] < shared[:, 2:]).all(1)) + a + 1:
            for similarity, i, j in _pairs(corners[a], one, corners[b], found[b]):
                pairs.append((-similarity, starts[a] + i, starts[b] + j))
    return sorted(pairs)


def _pairs(
    tile_a: np.ndarray, a: Detections, tile_b: np.ndarray, b: Detections
) -> Iterator[tuple[float, int, int]]:
    """IoU and numbers of the detections in two overlapping tiles that are one object."""
    shared = _common(tile_a, tile_b)
    a_cut = _ends_at(a.boxes, tile_a, _borders_inside(tile_a, tile_b))
    b_cut = _ends_at(b.boxes, tile_b, _borders_inside(tile_b, tile_a))
    meet = _common(_common(a.boxes[:, None], b.boxes), shared)
    meet = (meet[..., 2:] > meet[..., :2]).all(2) & (a.classes[:, None] == b.classes)
    for i, j in np.argwhere(meet):
        limits = shared if a_cut[i] and b_cut[j] else None
        area_a, area_b, both = _areas(a, i, b, j, limits)
        of_both = area_a + area_b - both
        areas = (area_a, a_cut[i]), (area_b, b_cut[j])
        cut_areas = [size for size, is_cut in areas if is_cut]
        if both > SAME * min(cut_areas, default=of_both):
            yield both / of_both, i, j


def _areas(
    a: Detections, i: int, b: Detections, j: int, limits: np.ndarray | None
) -> tuple[float, float, float]:
    """Two areas and the common one within limits, of boxes where a mask is missing or empty."""
    if a.masks is not None and len(a.masks[i]) and len(b.masks[j]):
        one, other = a.masks[i], b.masks[j]
        if limits is not None:
            one, other = clipped(one, limits), clipped(other, limits)
        areas = area(one), area(other)
        return *areas, sum(areas) - area(union([one, other]))
    one, other = a.boxes[i].astype(float), b.boxes[j].astype(float)
    if limits is not None:
        one, other = _common(one, limits), _common(other, limits)
    return tuple(
        float((box[2:] - box[:2]).clip(min=0).prod()) for box in (one, other, _common(one, other))
    )


def _common(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The rectangle [.., 4] that two rectangles share; without one it ends before it begins."""
    low = np.maximum(a[..., :2], b[..., :2])
    return np.concatenate([low, np.minimum(a[..., 2:], b[..., 2:])], -1)


def _borders_inside(tile: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Which borders x0, y0, x1, y1 of a tile lie inside of another one: bool [4]."""
    low, high = np.tile(other[:2], 2), np.tile(other[2:], 2)
    return (low < tile) & (tile < high)


def _ends_at(boxes: np.ndarray, tile: np.ndarray, borders: np.ndarray) -> np.ndarray:
    """Which boxes [N, 4] end at one of the given borders of their tile: bool [N]."""
    near = np.maximum(NEAR_SHARE * (boxes[:, 2:] - boxes[:, :2]), NEAR)
    distances = np.concatenate([boxes[:, :2] - tile[:2], tile[2:] - boxes[:, 2:]], 1)
    return ((distances <= np.tile(near, 2)) & borders).any(1)


def runs(mask: np.ndarray, x0: int, y0: int) -> np.ndarray:
    """The runs [R, 3] of a mask [h, w] whose first pixel is x0, y0 of the image."""
    padded = np.pad(mask.T.astype(bool), ((0, 0), (1, 1)))
    # one pass over all columns: a change follows the background that begins and ends each of them
    columns, rows = np.divmod(np.flatnonzero(np.diff(padded.ravel())), padded.shape[1])
    return np.stack([columns[::2] + x0, rows[::2] + y0, rows[1::2] + y0], 1).astype(np.int32)


def area(mask: np.ndarray) -> int:
    """The number of pixels of runs."""
    return int((mask[:, 2] - mask[:, 1]).sum())


def clipped(mask: np.ndarray, limits: Sequence[int]) -> np.ndarray:
    """The runs within a rectangle x0, y0, x1, y1."""
    x0, y0, x1, y1 = limits
    inside = mask[(mask[:, 0] >= x0) & (mask[:, 0] < x1)]
    rows = inside[:, 1:].clip(y0, y1)
    return np.concatenate([inside[:, :1], rows], 1)[rows[:, 0] < rows[:, 1]]


def union(masks: Sequence[np.ndarray]) -> np.ndarray:
    """The runs of all masks together, column by column."""
    every = np.concatenate(masks).astype(np.int64)
    column = int(every[:, 2].max(initial=0)) + 1  # so the runs of two columns never touch
    begins, ends = every[:, 0] * column + every[:, 1], every[:, 0] * column + every[:, 2]
    order = np.argsort(begins, kind="stable")
    begins, ends = begins[order], np.maximum.accumulate(ends[order])
    is_first = np.append(True, begins[1:] > ends[:-1])[: len(begins)]
    begins, ends = begins[is_first], ends[np.append(is_first[1:], True)[: len(ends)]]
    return np.stack([begins // column, begins % column, ends % column], 1).astype(np.int32)


# ---- the program


def read(path):
    """The photo, upright as its EXIF data say, of three channels of 8 bits."""
    try:
        photo = Image.open(path)
        if photo.mode.startswith(("I", "F")):  # Pillow would cut its values at 255
            sys.exit(f"{path} has more than 8 bits a channel (mode {photo.mode}); convert it to 8.")
        return ImageOps.exif_transpose(photo).convert("RGB")
    except Exception as error:  # Pillow has errors of many types
        sys.exit(f"{path} cannot be read as an image: {error}")


def one_class_per_place(found):
    """The numbers of the detections that no better one of any class covers, the best first."""
    kept = []
    for i in np.argsort(-found.scores, kind="stable"):
        if not any(iou(found.boxes[i], found.boxes[j]) > SAME for j in kept):
            kept.append(i)
    return kept


def iou(a, b):
    """The area that two boxes share, by that which either covers."""
    areas = [np.prod((box[2:] - box[:2]).clip(min=0)) for box in (a, b, _common(a, b))]
    return areas[2] / (areas[0] + areas[1] - areas[2])


def resized(image, shortest, longest, fixed):
    """The image as in the evaluation of the run, and smaller where it would not fit."""
    width, height = image.size
    scale = min(shortest / min(width, height) if shortest else 1, longest / max(width, height))
    if fixed:
        scale = min(scale, fixed[0] / height, fixed[1] / width)
    sides = (max(int(side * scale + 0.5), 1) for side in (width, height))
    return np.asarray(image.resize(tuple(sides), Image.Resampling.BILINEAR))


def paste(mask, box, height, width):
    """Paste a mask [side, side] within its box into the image: bool [height, width]."""
    x0, y0, x1, y1 = box
    cells = np.arange(len(mask))
    y = (np.arange(height)[:, None] + 0.5 - y0) / (y1 - y0) * len(cells) - 0.5
    x = (np.arange(width)[:, None] + 0.5 - x0) / (x1 - x0) * len(cells) - 0.5
    rows, columns = (np.maximum(0, 1 - np.abs(places - cells)) for places in (y, x))  # bilinear
    return rows @ mask @ columns.T >= 0.5


def detect(session, photo, tile):
    """The detections in a tile x0, y0, x1, y1 of the photo, in pixels of the photo."""
    about = session.get_modelmeta().custom_metadata_map
    shortest, longest, fixed, stride, batch = (
        json.loads(about[key])
        for key in ("min_size_test", "max_size_test", "fixed", "stride", "batch")
    )
    part = photo.crop(tile)
    image = resized(part, shortest, longest, fixed)
    height, width = image.shape[:2]
    canvas = fixed or (height + -height % stride, width + -width % stride)
    images = np.zeros((batch or 1, *canvas, 3), np.uint8)
    sizes = np.ones((batch or 1, 2), np.int32)
    images[0, :height, :width], sizes[0] = image, (height, width)
    outputs = [output.name for output in session.get_outputs()]
    values = session.run(None, {"images": images, "sizes": sizes})
    result = {name: value[0] for name, value in zip(outputs, values, strict=True)}
    result = {name: value[: result["count"]] for name, value in result.items() if name != "count"}
    boxes = result["boxes"] * np.float32([part.width / width, part.height / height] * 2)
    masks = None
    if "masks" in result:
        pasted = (
            paste(mask[0], box, part.height, part.width)
            for mask, box in zip(result["masks"], boxes, strict=True)
        )
        masks = [runs(mask, *tile[:2]) for mask in pasted]
    boxes += np.float32([*tile[:2], *tile[:2]])
    return Detections(boxes, result["scores"], result["classes"], masks)


def detect_all(session, photo):
    """The detections in a photo of any size, which a detector of tiles takes tile by tile."""
    about = session.get_modelmeta().custom_metadata_map
    whole = {"size": max(photo.size), "overlap": 0, "merge": MERGE}
    tile = json.loads(about.get("tile", "null")) or whole
    if tile["merge"] != MERGE:
        sys.exit("The file is of another version: take the detect.py of that, or export it again.")
    rows, columns = (cuts(side, tile["size"], tile["overlap"]) for side in photo.size[::-1])
    tiles = [(x0, y0, x1, y1) for y0, y1 in rows for x0, x1 in columns]
    found = [(corners, detect(session, photo, corners)) for corners in tiles]
    return merge(found, photo.height, photo.width)


parser = argparse.ArgumentParser(description="Print what a detector finds in photos.")
parser.add_argument("detector", help="an .onnx that lambda-det export wrote")
parser.add_argument("photos", nargs="+", help="of any format that Pillow reads")
parser.add_argument("--score-threshold", type=float, help="default: the best one of the file")
parser.add_argument("--agnostic-nms", action="store_true", help="keep one class per place")
args = parser.parse_args()
try:
    session = onnxruntime.InferenceSession(args.detector)
except Exception as error:  # ONNX Runtime has its own
    sys.exit(f"{args.detector} cannot be loaded ({error}); give an .onnx of lambda-det export.")
about = session.get_modelmeta().custom_metadata_map
if "classes" not in about:
    sys.exit(f"{args.detector} is no detector of lambda-det export.")
names = json.loads(about["classes"])
# Those below about["score_threshold"] are left out in the file
known = (args.score_threshold, json.loads(about.get("best_score", "null")), 0.5)
least = next(score for score in known if score is not None)
for path in args.photos:
    found = detect_all(session, read(path))
    if len(args.photos) > 1:
        print(f"{path}:")
    if not (found.scores >= least).any():
        print(f"{path}: nothing has a score of {least:.3g} or more", file=sys.stderr)
    for i in one_class_per_place(found) if args.agnostic_nms else range(len(found.scores)):
        if (score := found.scores[i]) >= least:
            number = found.classes[i]
            print(names[number] if names else number, f"{score:.2f}", *found.boxes[i].round(1))
            if found.masks is not None:
                print("   a mask of", area(found.masks[i]), "pixels")
