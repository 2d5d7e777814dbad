"""Detections of overlapping tiles as detections of their image, with numpy alone.

``docs/detect.py`` holds this file from the first line below the imports on, so that it needs
no package of ours; ``.ci/detect.py`` writes it there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

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
