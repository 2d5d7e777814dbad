"""The form in which a file writes its boxes: corners, centres or shares of 1 in place of COCO's.

One box can be wrong by itself. Polygons, areas or the borders of the images show that all boxes
of a file have another form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lambda_det.detection.data.report import FORM, MEANT, Kind
from lambda_det.detection.data.truth import around, is_area, is_polygon, written_polygons

__all__ = ["BOX_FORMS", "SIDES", "Form", "form_of_boxes", "is_box"]

_SAMPLED = 2000  # annotations that are looked at
_MOST = 0.95  # share of the boxes that must speak for another form
_FEW = 0.1  # share of the boxes that may be wrong in another way
_ENOUGH = 10  # boxes without an outline that are no slips, however many outlines there are


class Form(NamedTuple):
    """A form in which boxes may be written.

    Attributes:
        text: its name.
        sides: [x, y, width, height] of boxes [N, 4] and the sizes [N, 2] of their images.
    """

    text: str
    sides: Callable[[np.ndarray, np.ndarray], np.ndarray]


def _as_they_are(boxes: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    return boxes


def _from_corners(boxes: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    return np.concatenate([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], axis=1)


def _from_centres(boxes: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    return np.concatenate([boxes[:, :2] - boxes[:, 2:] / 2, boxes[:, 2:]], axis=1)


def _from_shares(boxes: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    return boxes * np.concatenate([sizes, sizes], axis=1)


def _from_shares_of_corners(boxes: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    return _from_corners(_from_shares(boxes, sizes), sizes)


def _from_shares_of_centres(boxes: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    return _from_centres(_from_shares(boxes, sizes), sizes)


def _from_hundredths_of_centres(boxes: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    return _from_shares_of_centres(boxes / 100, sizes)


def _to_corners(boxes: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    return np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1)


def _to_centres(boxes: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    return np.concatenate([boxes[:, :2] + boxes[:, 2:] / 2, boxes[:, 2:]], axis=1)


def _to_shares_of_centres(boxes: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    return _to_centres(boxes, sizes) / np.concatenate([sizes, sizes], axis=1)


SIDES = Form("[x, y, width, height]", _as_they_are)  # COCO's own
_OTHERS = (
    Form("corners [x0, y0, x1, y1]", _from_corners),
    Form("centre and size [x, y, width, height]", _from_centres),
)
_SHARES = (
    Form("shares of 1 of [x, y, width, height]", _from_shares),
    Form("shares of 1 of corners [x0, y0, x1, y1]", _from_shares_of_corners),
    Form("shares of 1 of centre and size", _from_shares_of_centres),
)
_PERCENT = Form("hundredths of centre and size", _from_hundredths_of_centres)


class Written(NamedTuple):
    """How labels of a format write their boxes.

    Attributes:
        text: what they are.
        numbers: the written numbers, from boxes [N, 4] in COCO's form and the sizes [N, 2] of their
            images.
    """

    text: str
    numbers: Callable[[np.ndarray, np.ndarray], np.ndarray]


# The forms that a format of labels may have, by their names in the table of formats
BOX_FORMS = {
    "sides in pixels": Written("[x, y, width, height] in pixels", _as_they_are),
    "corners in pixels": Written("corners in pixels", _to_corners),
    "centre and size in shares of 1": Written(
        "centre and size in shares of 1", _to_shares_of_centres
    ),
}
_SIDES = BOX_FORMS["sides in pixels"]


def form_of_boxes(
    annotations: Sequence[dict[str, Any]],
    images: Mapping[int, Mapping[str, Any]],
    written: str | None = None,
) -> tuple[Form, tuple[Kind, str, dict[str, Any]] | None]:
    """The form of all boxes of a file.

    Args:
        annotations: of the file.
        images: with "width" and "height", by id.
        written: how the labels of another format that they were made of write boxes, of
            ``BOX_FORMS``; None for a file of COCO's own.

    Returns:
        COCO's own form, or another one where polygons or areas prove it; and, if the form is
        another one, kind, words and first case of a finding. The kind is refused where only the
        borders of the images speak for the other form, or where height comes before width.
    """
    sampled = annotations[:: -(-len(annotations) // _SAMPLED) or 1]
    some = [
        annotation
        for annotation in sampled
        if is_box(annotation.get("bbox"))
        and annotation["image_id"] in images
        and not annotation.get("iscrowd")
        # in other formats the boxes were made from the outlines
        and not (written and annotation.get("segmentation"))
    ]
    if not some or (written and len(some) < min(_ENOUGH, _FEW * len(sampled))):
        return SIDES, None
    boxes = np.array([annotation["bbox"] for annotation in some], float)
    owners = [images[annotation["image_id"]] for annotation in some]
    sizes = np.array([[owner["width"], owner["height"]] for owner in owners])
    if written:
        return SIDES, _other_than_written(BOX_FORMS[written], some, boxes, sizes)
    if _are_turned(some, boxes):
        return SIDES, (FORM, _words("[x, y, height, width]", boxes[0], _SIDES), some[0])
    others = _SHARES if _are_shares(boxes, sizes) else _OTHERS
    sides = {form: form.sides(boxes, sizes) for form in (SIDES, *others)}
    for witness, judge in (("polygons", _agree_with_polygons), ("areas", _agree_with_areas)):
        shares = {form: judge(some, moved) for form, moved in sides.items()}
        fitting = [form for form, share in shares.items() if share is not None and share >= _MOST]
        # areas, and polygons of tiny objects, do not tell sides from centres
        if fitting == [SIDES] and others is not _SHARES:  # polygons may also be shares
            return SIDES, None
        if len(fitting) == 1 and fitting[0] is not SIDES and shares[SIDES] < 0.5:
            (form,) = fitting
            words = f"all boxes are {form.text}, as their {witness} show"
            return form, (MEANT, words, some[0])
    if others is _SHARES:
        return SIDES, (FORM, _words("shares of 1", boxes[0], _SIDES), some[0])
    return SIDES, _other_at_borders(others, _SIDES, some, boxes, sizes)


def _are_shares(numbers: np.ndarray, sizes: np.ndarray) -> bool:
    """Whether most of the boxes, as the numbers [N, 4] that are written, are shares of 1."""
    are_shares = (numbers >= 0).all(1) & (numbers <= 1).all(1) & (numbers[:, 2:] > 0).all(1)
    return (are_shares & (sizes.max(1) > 2)).mean() >= _MOST


def _are_turned(annotations: Sequence[dict[str, Any]], boxes: np.ndarray) -> bool:
    """Whether polygons show that boxes [N, 4] have height before width.

    Such boxes hold most of their objects, unless these are twice as long as wide, so that nothing
    else would be seen.
    """
    turned = boxes[:, [0, 1, 3, 2]]
    as_written, share = (_agree_with_polygons(annotations, one) for one in (boxes, turned))
    return share is not None and share >= _MOST and as_written < 0.5


def _other_at_borders(
    others: Iterable[Form],
    written: Written,
    some: Sequence[dict[str, Any]],
    boxes: np.ndarray,
    sizes: np.ndarray,
) -> tuple[Kind, str, dict[str, Any]] | None:
    """A finding, if boxes lie outside of their images but would not in another form."""
    wrong = ~_inside(boxes, sizes)
    if wrong.mean() < _FEW:
        return None
    numbers = written.numbers(boxes, sizes)
    likely = [form for form in others if _inside(form.sides(numbers, sizes), sizes).mean() >= _MOST]
    if not likely:
        return None
    place = int(np.flatnonzero(wrong)[0])
    text = " or ".join(form.text for form in likely)
    if written is BOX_FORMS["corners in pixels"]:  # a reversed box ends before it starts
        text += ", or like corners that are reversed in some boxes"
    return FORM, _words(text, numbers[place], written), some[place]


def _other_than_written(
    written: Written, some: Sequence[dict[str, Any]], boxes: np.ndarray, sizes: np.ndarray
) -> tuple[Kind, str, dict[str, Any]] | None:
    """A finding, if the boxes of labels of another format are not as that format writes them."""
    numbers = written.numbers(boxes, sizes)
    if not _are_shares(numbers, sizes):
        others = (SIDES, *_OTHERS, _PERCENT)
    elif written is BOX_FORMS["centre and size in shares of 1"]:
        others = _SHARES
    else:
        return FORM, _words("shares of 1", numbers[0], written), some[0]
    return _other_at_borders(others, written, some, boxes, sizes)


def _words(form: str, numbers: np.ndarray, written: Written) -> str:
    box = ", ".join(f"{number:.6g}" for number in numbers)
    return f"box {box}; the boxes of these labels look like {form}; write them as {written.text}"


def is_box(box: Any) -> bool:
    """Whether it is a list of four finite numbers."""
    return (
        isinstance(box, (list, tuple))
        and len(box) == 4
        and all(isinstance(value, (int, float)) and abs(value) < 1e9 for value in box)
    )


def _inside(boxes: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Which boxes [N, 4] have an area and lie in their images, except for some pixels."""
    slack = np.maximum(5, 0.02 * sizes.max(1, keepdims=True))
    ends = boxes[:, :2] + boxes[:, 2:]
    return ((boxes[:, 2:] > 0) & (boxes[:, :2] >= -slack) & (ends <= sizes + slack)).all(1)


def _agree_with_polygons(annotations: Sequence[dict[str, Any]], boxes: np.ndarray) -> float | None:
    """The share of boxes [N, 4] that are around their polygons; None where there are none."""
    places, outlines = [], []
    for place, annotation in enumerate(annotations):
        mask = written_polygons(annotation.get("segmentation"))
        if isinstance(mask, list) and mask and all(map(is_polygon, mask)):
            places.append(place)
            outlines.append(around(mask))
    if not places:
        return None
    outlines, boxes = np.array(outlines), boxes[places]
    corners = np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1)
    extent = (outlines[:, 2:] - outlines[:, :2]).max(1, keepdims=True)
    return float((np.abs(corners - outlines) <= np.maximum(2, 0.1 * extent)).all(1).mean())


def _agree_with_areas(annotations: Sequence[dict[str, Any]], boxes: np.ndarray) -> float | None:
    """The share of boxes [N, 4] with the area of their entry; None where most have none."""
    areas = [a["area"] if is_area(a.get("area")) else 0 for a in annotations]
    known = np.array(areas, float) > 4  # square pixels: smaller boxes are rounded too much
    if known.mean() < 0.5:
        return None
    areas, boxes = np.array(areas, float)[known], boxes[known]
    products = boxes[:, 2] * boxes[:, 3]
    is_positive = (boxes[:, 2:] > 0).all(1)
    return float((is_positive & (np.abs(products - areas) <= 0.02 * areas)).mean())
