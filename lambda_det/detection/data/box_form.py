"""The form in which a file writes its boxes: corners, centres or shares of 1 in place of its own.

One box can be wrong by itself. Where many lie outside of their images, or not around their
polygons, and nearly all would in another form, all boxes of the file have that form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lambda_det.detection.data.truth import around, is_polygon

_SAMPLED = 2000  # annotations that are looked at, at most
_MOST = 0.95  # share of the boxes that must speak for another form
_FEW = 0.1  # share of the boxes that may be wrong in another way
_ENOUGH = 10  # boxes without an outline that are no slips, however many outlines there are
# Each makes x, y, width and height of the four numbers that are written
_SHAPES = {
    "[x, y, width, height]": np.eye(4),
    "corners": np.array([[1, 0, 0, 0], [0, 1, 0, 0], [-1, 0, 1, 0], [0, -1, 0, 1]]),
    "centre and size": np.array([[1, 0, -0.5, 0], [0, 1, 0, -0.5], [0, 0, 1, 0], [0, 0, 0, 1]]),
    "[x, y, height, width]": np.eye(4)[[0, 1, 3, 2]],
}
_PIXELS, _SHARES = "", "shares of 1 of "
# How formats of labels write boxes, by the names that their table has: the unit and the shape
BOX_FORMS = {
    "sides in pixels": (_PIXELS, "[x, y, width, height]"),
    "corners in pixels": (_PIXELS, "corners"),
    "centre and size in shares of 1": (_SHARES, "centre and size"),
}
SIDES = "sides in pixels"  # COCO's own
# COCO's form of the numbers of another one
_CONVERTED = {
    "corners": "[x0, y0, x1 - x0, y1 - y0]",
    "centre and size": "[x - width / 2, y - height / 2, width, height]",
    "shares of 1": "the first and third times the image's width, the others times its height",
}


def other_form(
    annotations: Sequence[Mapping[str, Any]], images: Mapping[int, Mapping[str, Any]], written: str
) -> tuple[str, Mapping[str, Any]] | None:
    """The words and the first case of a finding, if the boxes of a file have another form.

    Args:
        annotations: of the file, with boxes in COCO's form, if they are as their format has them.
        images: with "width" and "height", by id.
        written: how their format writes boxes, of ``BOX_FORMS``.
    """
    sampled = annotations[:: len(annotations) // _SAMPLED + 1]
    some = [
        one
        for one in sampled
        if is_box(one.get("bbox"))
        and one["image_id"] in images
        and not one.get("iscrowd")
        # in other formats the boxes were made from the outlines
        and (written == SIDES or not one.get("segmentation"))
    ]
    if not some or len(some) < min(_ENOUGH, _FEW * len(sampled)):
        return None
    boxes = np.array([one["bbox"] for one in some], float)
    owners = [images[one["image_id"]] for one in some]
    sizes = np.array([[owner["width"], owner["height"]] for owner in owners], float)
    outlines = np.array([_outline(one) for one in some])
    unit, shape = BOX_FORMS[written]
    scales = {_PIXELS: np.ones(4), _SHARES: np.tile(sizes, 2)}
    numbers = boxes / scales[unit] @ np.linalg.inv(_SHAPES[shape]).T  # as they are written
    wrong = ~_in_place(boxes, sizes, outlines)
    are_shares = (abs(numbers - 0.5) <= 0.5 + 1e-6).all(1) & (numbers[:, 2:] > 0).all(1)
    are_shares = (are_shares & (sizes.max(1) > 2)).mean() >= _MOST
    if are_shares and unit == _PIXELS:
        wrong[:], likely = True, ["shares of 1"]
    elif wrong.mean() < _FEW:
        return None
    else:
        other_unit, likely = _SHARES if are_shares else _PIXELS, []
        for other, matrix in _SHAPES.items():
            moved = numbers @ matrix.T * scales[other_unit]
            if _in_place(moved, sizes, outlines).mean() >= _MOST:
                likely.append(other_unit + other)
        if not likely:
            return None
        if written == "corners in pixels":  # a reversed box ends before it starts
            likely[-1] += ", or like corners that are reversed in some boxes"
    place = wrong.argmax()  # the first
    box = ", ".join(f"{n:.6g}" for n in numbers[place])
    made = [_CONVERTED[form] for form in likely if written == SIDES and form in _CONVERTED]
    return (
        f"box {box}; the boxes of these labels look like {' or '.join(likely)}; write them as "
        f"{unit}{shape}{'' if unit else ' in pixels'}"
        f"{': ' if made else ''}{', or as '.join(made)}",
        some[place],
    )


def is_box(box: Any) -> bool:
    """Whether it is a list of four finite numbers."""
    return (
        isinstance(box, (list, tuple))
        and len(box) == 4
        and all(isinstance(value, (int, float)) and abs(value) < 1e9 for value in box)
    )


def _outline(annotation: Mapping[str, Any]) -> tuple[float, ...]:
    """The corners around the polygons of an annotation; not numbers where it has none."""
    polygons = annotation.get("segmentation")
    if polygons and isinstance(polygons, list) and all(map(is_polygon, polygons)):
        return around(polygons)
    return (np.nan,) * 4


def _in_place(boxes: np.ndarray, sizes: np.ndarray, outlines: np.ndarray) -> np.ndarray:
    """Which boxes [N, 4] lie in their images and around their outlines [N, 4], but for pixels."""
    corners = boxes.copy()
    corners[:, 2:] += boxes[:, :2]
    slack = np.maximum(5, 0.02 * sizes.max(1, keepdims=True))
    is_inside = (corners[:, :2] >= -slack) & (corners[:, 2:] <= sizes + slack)
    slack = 2 + 0.1 * np.tile(boxes[:, 2:], 2)
    is_around = (abs(corners - outlines) <= slack) | np.isnan(outlines)
    return ((boxes[:, 2:] > 0) & is_inside).all(1) & is_around.all(1)
