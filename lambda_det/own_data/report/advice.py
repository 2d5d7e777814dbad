"""What would bring most: AP50 without each kind of error, and what to change.

The kinds of errors, and the repair of one kind at a time, are those of TIDE (Bolya et al., ECCV
2020, sections 2.2 and 2.3). The package tidecv is not used: it knows no sizes and no images.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
from pycocotools.coco import COCO

from lambda_det.own_data.input_size import LARGEST_SCALE
from lambda_det.own_data.report.matching import FALSE, IGNORED, LEAST_IOU, assign, overlaps

__all__ = ["Change", "advise", "ap50", "sort_errors"]

SMALL = 32  # side in pixels of the network's input: a larger input would help with smaller objects
CONFIDENT = 0.8  # score of predictions whose annotation may be missing
# Scale from which a larger input shows nothing new: the recipes' largest, which they round down to
# whole strides of the backbone
_ENLARGED = 0.9 * LARGEST_SCALE
_FEW = 100  # objects of a class in training, below which more examples are advised in any case
_CLASSES = 5  # number of classes that are named, those with the most missed objects
_YOUNG = 0.1  # share of AP50 by which the AP50 of a young run rises in the last third of its steps
_LEAST_RISE = 1.0  # of others: evaluations of runs that learned no more differed by up to 1 point
_CASCADE = (
    " Three box heads in a row (MODEL.ROI_HEADS.NAME CascadeROIHeads) place boxes better than one."
)
_NEAR = 0.1  # IoU from which a prediction is assigned to an object
# Two shares differ if objects that are alike would show such a difference in one of so many data
# sets. Statistics often take 0.05; but the objects of one image are missed together.
_BY_CHANCE = 0.01


class Change(NamedTuple):
    """What to change, the most by which AP50 would rise, and the evidence."""

    change: str
    gain: float
    evidence: str


class JudgedPrediction(NamedTuple):
    """A prediction, and its error.

    Attributes:
        image, category: ids; the category is the predicted one.
        score: of the prediction.
        verdict: "right"; "class": a good box of another class; "place": the box lies badly;
            "twice": the object was found already; "nothing": no object is near; "both": class and
            place are wrong.
        meant: id of the annotation to which it is assigned, None for "nothing".
    """

    image: Any
    category: int
    score: float
    verdict: str
    meant: int | None


def sort_errors(
    ground_truth: COCO, entries: Sequence[Mapping[str, Any]], iou_type: str
) -> tuple[list[JudgedPrediction], set[int]]:
    """The error of each prediction outside of crowds, and the objects without any prediction.

    Args:
        ground_truth: with ``iscrowd`` in every annotation.
        entries: predictions in COCO's format.
        iou_type: "bbox" or "segm".
    """
    key = {"bbox": "bbox", "segm": "segmentation"}[iou_type]
    of_image = defaultdict(list)
    for entry in entries:
        of_image[entry["image_id"]].append(entry)
    predictions, missed = [], set()
    for image in ground_truth.getImgIds():
        objects = ground_truth.loadAnns(ground_truth.getAnnIds(imgIds=[image]))
        found = sorted(of_image[image], key=lambda entry: -entry["score"])
        shapes = [o["bbox"] if iou_type == "bbox" else ground_truth.annToRLE(o) for o in objects]
        crowds = np.array([bool(o["iscrowd"]) for o in objects], bool)
        iou = overlaps([entry[key] for entry in found], shapes, crowds.tolist())
        classes = np.array([o["category_id"] for o in objects], int)
        same = np.array([e["category_id"] for e in found], int)[:, None] == classes[None]
        chosen = assign(iou, crowds.tolist(), same)
        iou = np.where(crowds[None], 0.0, iou)
        meant = set()
        for row, (entry, index) in enumerate(zip(found, chosen, strict=True)):
            if index == IGNORED:
                continue
            verdict, index = ("right", index) if index != FALSE else _wrong(iou[row], same[row])
            if verdict in ("right", "class", "place"):
                meant.add(index)
            annotation = None if index is None else objects[index]["id"]
            predictions.append(
                JudgedPrediction(image, entry["category_id"], entry["score"], verdict, annotation)
            )
        missed |= {o["id"] for i, o in enumerate(objects) if not crowds[i] and i not in meant}
    return predictions, missed


def _wrong(iou: np.ndarray, same: np.ndarray) -> tuple[str, int | None]:
    """The error of a false prediction, and the index of the object to which it is assigned."""
    own, other = np.where(same, iou, 0.0), np.where(same, 0.0, iou)
    if max(iou, default=0.0) < _NEAR:
        return "nothing", None
    if own.max() >= LEAST_IOU:
        return "twice", int(own.argmax())
    if other.max() >= LEAST_IOU:
        return "class", int(other.argmax())
    if own.max() >= _NEAR:
        return "place", int(own.argmax())
    return "both", int(other.argmax())


def ap50(predictions: Sequence[JudgedPrediction], objects: Mapping[int, int]) -> float:
    """Mean AP at an IoU of 0.5 in percent, as COCO's evaluation computes it.

    Args:
        predictions: of :func:`sort_errors`.
        objects: number of objects of each category, without crowds.
    """
    category = np.array([p.category for p in predictions], int)
    order = np.lexsort(([-p.score for p in predictions], category))
    category = category[order]
    right = np.array([p.verdict == "right" for p in predictions], bool)[order]
    values = []
    for own, number in objects.items():
        hits = np.cumsum(right[slice(*np.searchsorted(category, (own, own + 1)))])
        precision = hits / np.arange(1, len(hits) + 1)
        precision = np.maximum.accumulate(precision[::-1])[::-1]
        place = np.searchsorted(hits / number, np.linspace(0, 1, 101), side="left")
        values.append(np.append(precision, 0.0)[np.minimum(place, len(hits))].mean())
    return 100 * float(np.mean(values)) if values else float("nan")


def repaired(
    predictions: Sequence[JudgedPrediction], wrong: Set[int], classes: Mapping[int, int]
) -> list[JudgedPrediction]:
    """The predictions after the repair of some, by their places in the list.

    A prediction becomes right if it is the only one of its object; it is left out if another has
    found the object, or if it has none.

    Args:
        predictions: of :func:`sort_errors`.
        wrong: places of those to repair.
        classes: category by the id of the annotation.
    """
    taken = {p.meant for p in predictions if p.verdict == "right"}
    result = [p for place, p in enumerate(predictions) if place not in wrong]
    for prediction in sorted((predictions[place] for place in wrong), key=lambda p: -p.score):
        meant = prediction.meant
        if prediction.verdict in ("class", "place") and meant not in taken:
            taken.add(meant)
            result.append(prediction._replace(verdict="right", category=classes[meant]))
    return result


def differs(some: int, of: int, others: int, of_others: int) -> bool:
    """Whether a share ``some / of`` is larger than another one by more than chance may make it.

    This is Fisher's exact test, of one side, which is also right for a few objects: if the same
    number of all objects were drawn without regard to their group, so many or more would be of the
    first group with a probability of less than ``_BY_CHANCE``.

    Args:
        some, of: objects of the first group with a property, and all of its objects.
        others, of_others: those of the second group.
    """
    drawn, total = some + others, of + of_others

    def probability(number: int) -> float:
        return math.exp(
            _log_choices(of, number)
            + _log_choices(of_others, drawn - number)
            - _log_choices(total, drawn)
        )

    return sum(map(probability, range(some, min(of, drawn) + 1))) < _BY_CHANCE


def _log_choices(number: int, chosen: int) -> float:
    """Logarithm of the number of ways to choose some of a number of objects."""
    return math.lgamma(number + 1) - math.lgamma(chosen + 1) - math.lgamma(number - chosen + 1)


def advise(
    ground_truth: COCO,
    entries: Sequence[Mapping[str, Any]],
    iou_type: str,
    records: Sequence[Mapping[str, float]],
    trained: Mapping[str, int],
    *,
    scale: float = 1.0,
    is_cascade: bool = False,
) -> list[Change]:
    """The possible changes, with the one that would bring most first.

    The gains are bounds: the AP50 if all errors of a kind were gone. They overlap. What blames the
    size or the class of objects is only advised where more of them are missed than of the others,
    as :func:`differs` says. If AP50 was still rising by much, a longer training comes first,
    because its errors will be different.

    Args:
        ground_truth, entries, iou_type: as for :func:`sort_errors`.
        records: of the run's metrics.json, for its curves.
        trained: number of objects of each class in training, by its name; empty if unknown.
        scale: sides of the network's input as a share of those of the images.
        is_cascade: whether the detector has several box heads in a row already.
    """
    predictions, missed = sort_errors(ground_truth, entries, iou_type)
    annotations = ground_truth.anns
    classes = {i: a["category_id"] for i, a in annotations.items()}
    objects = Counter(a["category_id"] for a in annotations.values() if not a["iscrowd"])
    names = {i: category["name"] for i, category in ground_truth.cats.items()}
    small = {i for i, a in annotations.items() if scale * a["area"] ** 0.5 < SMALL}
    counted = {i for i, a in annotations.items() if not a["iscrowd"]}
    now = ap50(predictions, objects)

    def gain(wrong: Set[int], unseen: Set[int] = frozenset()) -> float:
        left = objects - Counter(classes[i] for i in unseen)
        return ap50(repaired(predictions, wrong, classes), left) - now

    def places(verdict: str, of: Callable[[JudgedPrediction], bool] = lambda p: True) -> set[int]:
        return {i for i, p in enumerate(predictions) if p.verdict == verdict and of(p)}

    def training(*categories: int) -> str:
        counts = (
            f"{names[c]} {trained.get(names[c], 0):,}" for c in sorted(categories, key=names.get)
        )
        return f"; objects in training: {', '.join(counts)}." if trained else "."

    changes = []
    if sure := places("nothing", lambda p: p.score >= CONFIDENT):
        images = Counter(predictions[i].image for i in sure).most_common(3)
        files = [ground_truth.imgs[image].get("file_name", str(image)) for image, _ in images]
        changes += [
            Change(
                f"Look at the annotations, first of {', '.join(files)}; those of the training "
                "images may lack the same.",
                gain(sure),
                f"Predictions of a score of {CONFIDENT} or more where nothing is annotated: "
                f"{len(sure)}.",
            )
        ]
    if unsure := places("nothing") - sure:
        changes += [
            Change(
                "Add images of what is mistaken for an object; without objects they need no "
                "annotations.",
                gain(unsure),
                f"Predictions of lower scores where nothing is annotated: {len(unsure)}.",
            )
        ]
    mixed = places("class")
    pair_of = {
        i: frozenset((predictions[i].category, classes[predictions[i].meant])) for i in mixed
    }
    for pair, number in Counter(pair_of.values()).most_common(1):
        one, other = sorted(names[category] for category in pair)
        changes += [
            Change(
                f"Add examples of {one} and {other}, or make one class of both.",
                gain({i for i in mixed if pair_of[i] == pair}),
                f"Boxes of one with the name of the other: {number}{training(*pair)}",
            )
        ]
    bad = missed | {predictions[i].meant for i in places("place")}
    of_small, of_large = small & counted, counted - small
    bad_small, bad_large = len(bad & of_small), len(bad & of_large)
    is_worse = differs(bad_small, len(of_small), bad_large, len(of_large))
    blamed = small if is_worse and scale < _ENLARGED else set()  # their size is the reason
    if blamed:
        changes += [
            Change(
                "Train at a larger size (--size of lambda-det train), or on tiles of large images "
                "(--tile auto).",
                gain(places("place", lambda p: p.meant in small), missed & small),
                f"Missed or boxed badly of {len(of_small)} objects smaller than {SMALL} pixels in "
                f"the network's input: {bad_small / len(of_small):.0%}; of {len(of_large)} larger "
                f"ones: {bad_large / len(of_large):.0%}.",
            )
        ]
    if loose := places("place", lambda p: p.meant not in blamed):
        which = f"an object of {SMALL} pixels or more" if blamed else "an object"
        changes += [
            Change(
                "Look at how tightly the annotations fit." + ("" if is_cascade else _CASCADE),
                gain(loose),
                f"Predictions with an IoU of {_NEAR} to {LEAST_IOU} with {which}: {len(loose)}.",
            )
        ]
    if again := places("twice"):
        changes += [
            Change(
                "Lower the IoU from which of two predictions one is dropped (NMS_THRESH_TEST).",
                gain(again),
                f"Predictions of an object that another one has found: {len(again)}.",
            )
        ]
    unseen = {c: {i for i in missed if classes[i] == c} for c in objects}
    # of classes with more objects than a few, the half with fewer, if they are missed more often
    half = np.median([trained.get(names[c], 0) for c in objects]) if objects else 0

    def is_rare(category: int) -> bool:
        count, own = trained.get(names[category], 0), len(unseen[category])
        others = len(missed) - own, objects.total() - objects[category]
        return count < _FEW or (count <= half and differs(own, objects[category], *others))

    rare = (c for c in objects if trained and unseen[c] and is_rare(c))
    for category in sorted(rare, key=lambda c: -len(unseen[c]) / objects[c])[:_CLASSES]:
        changes += [
            Change(
                f"Add examples of {names[category]}.",
                gain(set(), unseen[category]),
                f"Missed of the class: {len(unseen[category])} of {objects[category]}"
                f"{training(category)}",
            )
        ]
    changes.sort(key=lambda change: -change.gain)
    longer, is_young = _longer(records, iou_type)
    if longer is not None and is_young:
        return [longer, *changes]
    return sorted([*changes, longer], key=lambda change: -change.gain) if longer else changes


def _longer(records: Sequence[Mapping[str, float]], iou_type: str) -> tuple[Change | None, bool]:
    """A longer training, where AP50 was best at the end, and whether the run is young.

    All evaluations in the last third of the steps must be better than all before, and the last one
    must be the best. If AP50 no longer rises, and five evaluations differ by chance alone, this is
    so in one case of twenty.

    AP50 of a young run still rises by much. In other runs the loss of the test set must not rise.
    In young runs it does: the more boxes find an object, the more of them count in the loss.
    """
    names = (f"{iou_type}_EMA/AP50", f"{iou_type}/AP50")
    name = next((n for n in names if any(n in record for record in records)), "")
    # Detectron2 writes NaN for an evaluation without any prediction
    points = [
        (record["iteration"], 0.0 if math.isnan(record[name]) else record[name])
        for record in records
        if name in record
    ]
    losses = [r["validation/total_loss"] for r in records if "validation/total_loss" in r]
    if len(points) < 3:
        return None, False
    last, value = points[-1]
    early = [ap for step, ap in points if step <= last * 2 / 3]
    late = [ap for step, ap in points if step > last * 2 / 3]
    if not early or min(late) <= max(early) or value < max(late):
        return None, False
    before = max(early)
    rise = value - before
    is_young = rise >= _YOUNG * value
    forgets = bool(losses) and min(losses) < 0.98 * losses[-1]
    if not is_young and (rise < _LEAST_RISE or forgets):
        return None, False
    change = Change(
        "Train longer, such as twice as many --epochs.",
        min(rise, 100 - value),
        f"AP50 was best at the end; in the last third of the steps it rose from {before:.1f} "
        f"to {value:.1f}.",
    )
    return change, is_young
