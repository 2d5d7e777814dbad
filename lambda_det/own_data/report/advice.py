"""What would bring most: what to change, and by how much AP50 would rise at most.

To add a piece of advice, write a function from :class:`_Evidence` to the changes that it advises,
and name it in ``_RULES``.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pycocotools.coco import COCO

from lambda_det.detection.first_batch import FILE as FIRST_BATCH
from lambda_det.errors import listed
from lambda_det.own_data.input_size import LARGEST_SCALE
from lambda_det.own_data.report.error_types import (
    NEAR,
    JudgedPrediction,
    ap50,
    repaired,
    sort_errors,
)
from lambda_det.own_data.report.matching import LEAST_IOU
from lambda_det.own_data.report.reading import evaluations_of, label_of

__all__ = ["USABLE_AP50", "Change", "Epochs", "advise"]

# Below this AP50 a detector has not learned the task, and its errors prove nothing about its data:
# with an AP50 of 0.03, 791 predictions had scores of 0.8 or more. It is a guess between that and
# the lowest AP50 of finished runs, which is some 40.
USABLE_AP50 = 20
SMALL = 32  # side in pixels of the network's input: a larger input would help with smaller objects
# Side in pixels of the network's input of objects that are hardly seen: four strides of the finest
# level of usual feature pyramids, which is the side of its anchors
TINY = 16
CONFIDENT = 0.8  # score of predictions whose annotation may be missing
# Scale from which a larger input shows nothing new: the recipes' largest, which they round down to
# whole strides of the backbone
_ENLARGED = 0.9 * LARGEST_SCALE
_ALL = 0.9  # share of the objects that counts as all of them, since a few may be annotated loosely
_FEW = 100  # objects of a class in training, below which more examples are advised in any case
_CLASSES = 5  # number of classes that are named, those with the most missed objects
_PAIRS = 3  # pairs of classes that are named, those that are confused most often
_YOUNG = 0.1  # share of AP50 by which the AP50 of a young run rises in the last third of its steps
_LEAST_RISE = 1.0  # of others: evaluations of runs that learned no more differed by up to 1 point
# Loss of the test images over the loss of training images, from which these are not alike, or few.
# Nine runs on six sets had 0.8 to 1.5 at their ends, and one of 2.1 had 130 images for 30 epochs.
# The detector of `make demo` has 0.9, and on the same images 2.2 at a quarter of their brightness,
# 2.1 in yellow light and 1.0 at half of the brightness, which it stands.
_APART = 2.0
_SHORT = 0.5  # share of the rule's epochs, below which a run is short
_BEGUN = 1 / 3  # share of the rule's epochs, below which all classes are missed
# Two shares differ if objects that are alike would show such a difference in one of so many data
# sets. Statistics often take 0.05; but the objects of one image are missed together.
_BY_CHANCE = 0.01


_TEST_LOSS = "validation/total_loss"


class Change(NamedTuple):
    """What to change.

    Attributes:
        error: the kind of error that it concerns: "background", "class", "localisation",
            "duplicate", "missed"; "training" for all of them.
        change: what to do.
        gain: the most by which AP50 would rise; NaN where that is unknown.
        evidence: what shows it.
        comes_first: whether it stands before changes with a larger gain, because it makes the
            errors different.
    """

    error: str
    change: str
    gain: float
    evidence: str
    comes_first: bool = False


class Epochs(NamedTuple):
    """The epochs of a training, and how many the recipe's rule has for its images."""

    trained: float
    rule: float

    @property
    def are_fewer(self) -> bool:
        """Whether they are fewer in a reader's eyes; steps are rounded."""
        return round(self.trained) < round(self.rule)

    def __str__(self) -> str:
        trained, rule = (f"{n:.0f}" if n >= 10 else f"{n:.2g}" for n in self)
        return f"{trained} of {rule} epochs"


def advise(
    ground_truth: COCO,
    entries: Sequence[Mapping[str, Any]],
    iou_type: str,
    metrics: Sequence[Mapping[str, float]],
    trained: Mapping[str, int],
    *,
    scale: float = 1.0,
    is_cascade: bool = False,
    is_tiled: bool = False,
    epochs: Epochs | None = None,
) -> list[Change]:
    """The possible changes, with the one that would bring most first.

    The gains are bounds: the AP50 if all errors of a kind were gone. They overlap. What blames the
    size or the class of objects is only advised where more of them are missed than of the others,
    as :func:`differs` says. If AP50 was still rising by much, a longer training comes first,
    because its errors will be different. Below ``USABLE_AP50`` nothing is said about annotations.

    Args:
        ground_truth, entries, iou_type: as for :func:`sort_errors`.
        metrics: of the run's metrics.json, for its curves.
        trained: number of objects of each class in training, by its name; empty if unknown.
        scale: sides of the network's input as a share of the sides of the images or tiles.
        is_cascade: whether the detector has several box heads in a row already.
        is_tiled: whether images are cut into tiles already.
        epochs: of the training; None if unknown.
    """
    if all(one.get("iscrowd") for one in ground_truth.anns.values()):
        return []  # there is nothing to find
    predictions, missed = sort_errors(ground_truth, entries, iou_type)
    evidence = _Evidence(
        ground_truth,
        entries,
        predictions,
        missed,
        iou_type,
        metrics,
        trained,
        scale,
        is_cascade,
        is_tiled,
        epochs,
    )
    changes = [
        change
        for rule in _RULES
        if evidence.is_usable or not rule.needs_usable
        for change in rule.advice(evidence)
    ]
    return sorted(
        changes,
        key=lambda c: (not c.comes_first, 0.0 if math.isnan(c.gain) else -c.gain),
    )


# ------------------------------------------------------------------------------- what the rules use
@dataclass(frozen=True)
class _Evidence:
    """What is known of a run.

    Attributes:
        predictions, missed: of :func:`sort_errors`.
        others: as for :func:`advise`.
    """

    truth: COCO
    entries: Sequence[Mapping[str, Any]]
    predictions: Sequence[JudgedPrediction]
    missed: Set[int]
    iou_type: str
    metrics: Sequence[Mapping[str, float]]
    trained: Mapping[str, int]
    scale: float
    is_cascade: bool
    is_tiled: bool
    epochs: Epochs | None

    @cached_property
    def classes(self) -> dict[int, int]:
        """The category by the id of the annotation."""
        return {i: a["category_id"] for i, a in self.truth.anns.items()}

    @cached_property
    def counted(self) -> set[int]:
        """The ids of the annotations that are no crowds."""
        return {i for i, a in self.truth.anns.items() if not a["iscrowd"]}

    @cached_property
    def objects(self) -> Counter[int]:
        """The number of objects of each category."""
        return Counter(self.classes[i] for i in self.counted)

    @cached_property
    def names(self) -> dict[int, str]:
        """The name of each category."""
        return {i: category["name"] for i, category in self.truth.cats.items()}

    @cached_property
    def sides(self) -> dict[int, float]:
        """The side of each object in pixels of the network's input: the root of its area."""
        return {i: self.scale * self.truth.anns[i]["area"] ** 0.5 for i in self.counted}

    @cached_property
    def size_is_blamed(self) -> bool:
        """Whether small objects are missed because they are small."""
        bad, of_bad, other, of_other = self.bad_by_size
        return self.scale < _ENLARGED and differs(bad, of_bad, other, of_other)

    @cached_property
    def small(self) -> set[int]:
        """The ids of the small objects."""
        return {i for i, side in self.sides.items() if side < SMALL}

    @cached_property
    def bad_by_size(self) -> tuple[int, int, int, int]:
        """How many of the small objects are missed or boxed badly, and of how many; of others."""
        bad = self.missed | {self.predictions[i].matched for i in self.places("localisation")}
        large = self.counted - self.small
        return len(bad & self.small), len(self.small), len(bad & large), len(large)

    @cached_property
    def ap50(self) -> float:
        return ap50(self.predictions, self.objects)

    @cached_property
    def boxes_are_loose(self) -> bool:
        """Whether boxes lie badly about as often as masks do, where there are masks."""
        if self.iou_type == "bbox" or not all("bbox" in entry for entry in self.entries):
            return True
        boxes, _ = sort_errors(self.truth, self.entries, "bbox")
        loose = sum(prediction.verdict == "localisation" for prediction in boxes)
        return 2 * loose >= len(self.places("localisation"))

    @cached_property
    def points(self) -> list[tuple[float, float]]:
        """The step and the AP50 of each evaluation."""
        return _points(self.metrics, self.iou_type)

    @cached_property
    def losses(self) -> tuple[float, float] | None:
        """The loss of the training images, as the median of the last third of the steps, and that
        of the test images at the last evaluation; None if one of them is unknown.
        """
        tested = [line for line in self.metrics if _TEST_LOSS in line]
        if not tested:
            return None
        last = tested[-1]["iteration"]
        trained = [
            line["total_loss"]
            for line in self.metrics
            if "total_loss" in line and last * 2 / 3 < line["iteration"] <= last
        ]
        return (statistics.median(trained), tested[-1][_TEST_LOSS]) if trained else None

    @property
    def is_apart(self) -> bool:
        """Whether the detector does much better on what it was trained on.

        At first the loss rises, while more and more boxes find an object, so a short run that is
        not usable yet tells nothing.
        """
        is_begun = self.is_usable or not self.is_short
        return is_begun and self.losses is not None and self.losses[1] >= _APART * self.losses[0]

    @property
    def is_short(self) -> bool:
        """Whether the training had much fewer epochs than its rule."""
        return self.epochs is not None and self.epochs.trained < _SHORT * self.epochs.rule

    @property
    def is_hardly_begun(self) -> bool:
        """Whether the training was too short for the classes it misses to tell something."""
        return self.epochs is not None and self.epochs.trained < _BEGUN * self.epochs.rule

    @property
    def is_usable(self) -> bool:
        """Whether the detector is good enough for its errors to tell something about the data."""
        return self.ap50 >= USABLE_AP50

    def gain(self, wrong: Set[int], unseen: Set[int] = frozenset()) -> float:
        """The rise of AP50 if wrong predictions were repaired and missed objects not there."""
        left = self.objects - Counter(self.classes[i] for i in unseen)
        return ap50(repaired(self.predictions, wrong, self.classes), left) - self.ap50

    def places(
        self, verdict: str, of: Callable[[JudgedPrediction], bool] = lambda p: True
    ) -> set[int]:
        """The places of the predictions with an error."""
        return {i for i, p in enumerate(self.predictions) if p.verdict == verdict and of(p)}

    def training(self, *categories: int) -> str:
        """The end of a sentence: how many objects of some categories were trained on."""
        if not self.trained:
            return "."
        named = sorted(self.names[c] for c in categories)
        counts = (f"{name} {self.trained.get(name, 0):,}" for name in named)
        return f"; objects in training: {', '.join(counts)}."


def differs(some: int, of: int, others: int, of_others: int) -> bool:
    """Whether a share ``some / of`` is larger than another one by more than chance may make it.

    This is Fisher's exact test, of one side, which is also right for a few objects: if the same
    number of all objects were drawn without regard to their group, so many or more would be of the
    first group with a probability of less than ``_BY_CHANCE``.

    Args:
        some, of: objects of the first group with a property, and all of its objects.
        others, of_others: the same of the second group.
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


# ---------------------------------------------------------------------------------------- the rules
def _unannotated(run: _Evidence) -> Iterator[Change]:
    sure = run.places("background", lambda p: p.score >= CONFIDENT)
    if not sure:
        return
    images = Counter(run.predictions[i].image for i in sure).most_common(3)
    files = [Path(run.truth.imgs[image].get("file_name", str(image))).name for image, _ in images]
    yield Change(
        "background",
        f"Look at the annotations, first of {', '.join(files)}; the training images may lack "
        "the same annotations.",
        run.gain(sure),
        f"Predictions of a score of {CONFIDENT} or more where nothing is annotated: {len(sure)}.",
    )


def _mistaken(run: _Evidence) -> Iterator[Change]:
    if unsure := run.places("background", lambda p: p.score < CONFIDENT):
        yield Change(
            "background",
            "Add images of what is mistaken for an object; without objects they need no "
            "annotations.",
            run.gain(unsure),
            f"Predictions of lower scores where nothing is annotated: {len(unsure)}.",
        )


def _confused(run: _Evidence) -> Iterator[Change]:
    pair_of = {
        i: frozenset((run.predictions[i].category, run.classes[run.predictions[i].matched]))
        for i in run.places("class")
    }
    pairs = Counter(pair_of.values()).most_common()
    if not pairs:
        return
    named = [" and ".join(sorted(run.names[category] for category in pair)) for pair, _ in pairs]
    (pair, number), one_pair = pairs[0], named[0]
    if 2 * number >= len(pair_of):
        yield Change(
            "class",
            f"Add examples of {one_pair}, or make one class of both.",
            run.gain({i for i in pair_of if pair_of[i] == pair}),
            f"Boxes of one with the name of the other: {number}{run.training(*pair)}",
        )
        return
    yield Change(
        "class",
        "Add examples of classes that are taken for each other, or make one class of those that "
        f"look alike: {listed(named, _PAIRS)}.",
        run.gain(set(pair_of)),
        f"Boxes with the name of another class: {len(pair_of)}, in {len(pairs)} pairs of classes.",
    )


def _too_small(run: _Evidence) -> Iterator[Change]:
    """Small objects that are found less often than others, or all objects where all are tiny."""
    if run.scale >= _ENLARGED or not run.small:
        return
    bad, small, other_bad, others = run.bad_by_size
    share = f"Missed or boxed badly of {small} objects smaller than {SMALL} pixels in the "
    share += f"network's input: {bad / small:.0%}"
    half = float(np.median(list(run.sides.values())))
    if run.size_is_blamed:
        evidence = f"{share}; of {others} larger ones: {other_bad / others:.0%}."
    elif small >= _ALL * len(run.counted) and half < TINY:
        evidence = f"Half of all objects have a side of {half:.0f} pixels or less there. {share}."
    else:
        return
    how = "on tiles of large images (--tile auto), or at a larger size (--size)"
    if run.is_tiled:
        # in tiles of a given side objects keep their pixels; a size beside it enlarges them
        how = "on smaller tiles (--tile)" if run.scale < 1 else "on enlarged tiles (--tile, --size)"
    small_boxes = run.places("localisation", lambda p: p.matched in run.small)
    yield Change(
        "missed",
        f"Train {how}: the objects are too small in the network's input.",
        run.gain(small_boxes, run.missed & run.small),
        evidence,
        # what is hardly seen is not learned by a longer training either
        comes_first=not (run.size_is_blamed or run.is_usable),
    )


def _loose(run: _Evidence) -> Iterator[Change]:
    blamed = run.small if run.size_is_blamed else frozenset()  # their size is the reason
    loose = run.places("localisation", lambda p: p.matched not in blamed)
    if not loose:
        return
    which = f"an object of {SMALL} pixels or more" if blamed else "an object"
    change = "Look at how tightly the annotations fit."
    if not run.boxes_are_loose:
        change = "Look at how tightly the outlines of the annotations fit: the boxes lie well."
    elif not run.is_cascade:
        change += (
            " Three box heads in a row (MODEL.ROI_HEADS.NAME CascadeROIHeads) place boxes better "
            "than one."
        )
    yield Change(
        "localisation",
        change,
        run.gain(loose),
        f"Predictions with an IoU of {NEAR} to {LEAST_IOU} with {which}: {len(loose)}.",
    )


def _duplicates(run: _Evidence) -> Iterator[Change]:
    if again := run.places("duplicate"):
        yield Change(
            "duplicate",
            "Lower MODEL.ROI_HEADS.NMS_THRESH_TEST (of a RetinaNet MODEL.RETINANET."
            "NMS_THRESH_TEST): of two predictions of a class whose IoU is above it, the one with "
            "the lower score is dropped.",
            run.gain(again),
            f"Predictions of an object that another one has found: {len(again)}.",
        )


def _rare_classes(run: _Evidence) -> Iterator[Change]:
    """Classes with few examples; of classes with more, the half with fewer, if they are missed more
    often. A run that has hardly begun misses nearly all of them.
    """
    if run.is_hardly_begun or not run.trained or not run.objects:
        return
    unseen = {c: {i for i in run.missed if run.classes[i] == c} for c in run.objects}
    half = np.median([run.trained.get(run.names[c], 0) for c in run.objects])

    def is_rare(category: int) -> bool:
        count, own = run.trained.get(run.names[category], 0), len(unseen[category])
        others = len(run.missed) - own, run.objects.total() - run.objects[category]
        return count < _FEW or (count <= half and differs(own, run.objects[category], *others))

    rare = [c for c in run.objects if unseen[c] and is_rare(c)]
    rare.sort(key=lambda c: -len(unseen[c]) / run.objects[c])
    if rare:
        missed = [f"{run.names[c]} {len(unseen[c])} of {run.objects[c]}" for c in rare]
        yield Change(
            "missed",
            f"Add examples of {listed([run.names[c] for c in rare], _CLASSES)}.",
            run.gain(set(), set().union(*(unseen[c] for c in rare))),
            f"Missed: {listed(missed, _CLASSES)}{run.training(*rare[:_CLASSES])}",
        )


def _unlike_training(run: _Evidence) -> Iterator[Change]:
    """Advice to add images like the test images, where the detector does much better on its
    training images, or where it has become worse on the test set.
    """
    best_step, best = max(run.points, key=lambda point: point[1], default=(0, 0.0))
    fallen = best - run.points[-1][1] if run.points else 0.0
    losses = run.losses and (
        f"The loss is {run.losses[1]:.2g} on the test images, and {run.losses[0]:.2g} on those of "
        "the training."
    )
    if fallen >= _LEAST_RISE and _forgets(run.metrics, run.points):
        yield Change(
            "training",
            "Add images to the training, and do not train longer. The best checkpoint is the one "
            "that is used; this page shows the last evaluation.",
            fallen,
            f"AP50 was best after step {best_step + 1:,.0f}, with {best:.1f}, and is "
            f"{run.points[-1][1]:.1f} at the end, while the loss of the test images rises. "
            f"{losses or ''}".rstrip(),
            comes_first=True,
        )
    elif run.is_apart:
        blamed = run.small if run.size_is_blamed else frozenset()
        yield Change(
            "training",
            "Add images to the training that are like the test images: of the same places, "
            "light and camera. Longer training teaches the detector more of its own images only.",
            run.gain(set(), run.missed - blamed),
            f"{losses} Of {len(run.counted)} objects {len(run.missed)} are missed.",
            comes_first=not run.is_usable,
        )


def _longer(run: _Evidence) -> Iterator[Change]:
    """A longer training, where AP50 was best at the end, or where a short one is not usable yet.

    All evaluations in the last third of the steps must be better than all before, and the last one
    must be the best. If AP50 no longer rises, and five evaluations differ by chance alone, this is
    so in one case of twenty.

    AP50 of a young run still rises by much. In other runs the loss of the test set must not rise.
    In young runs it does: the more boxes find an object, the more of them count in the loss. So it
    counts from the first third of the steps on, and where AP50 is usable.
    """
    points = run.points
    said = f" The run had {run.epochs}." if run.epochs and run.epochs.are_fewer else ""
    until = f"--epochs {run.epochs.rule:.0f}" if said else "twice as many --epochs"
    change = f"Train longer, with {until}."
    rise, before, value = _rise(points)
    is_young = rise >= _YOUNG * value > 0
    if rise > 0 and (is_young or (rise >= _LEAST_RISE and not _forgets(run.metrics, points))):
        yield Change(
            "training",
            change,
            min(rise, 100 - value),
            f"AP50 was best at the end; in the last third of the steps it rose from {before:.1f} "
            f"to {value:.1f}.{said}",
            comes_first=is_young or run.is_short,
        )
    elif run.is_short and (len(points) < 3 or not run.is_usable):
        yield Change("training", change, math.nan, f"The run had {run.epochs}.", comes_first=True)
    # without metrics it is the page of an evaluation
    elif run.metrics and not run.is_usable and not run.is_apart:
        yield Change(
            "training",
            f"Look at {FIRST_BATCH}, whether each object has its box and its class, and at the "
            "curves, whether the losses fall; then train longer or at another learning rate.",
            math.nan,
            f"AP50 is {run.ap50:.1f}: below {USABLE_AP50} the errors of a detector tell nothing "
            f"about its data.{said}",
            comes_first=True,
        )


def _points(metrics: Sequence[Mapping[str, float]], iou_type: str) -> list[tuple[float, float]]:
    """The step and the AP50 of each evaluation."""
    name = label_of(f"{iou_type}/AP50")
    # Detectron2 writes NaN for an evaluation without any prediction
    return [
        (row["step"] - 1, 0.0 if math.isnan(row[name]) else row[name])
        for row in evaluations_of(metrics)
        if name in row
    ]


def _rise(points: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """The rise of AP50 in the last third of the steps, the best before, and the last; zeros where
    it was not best at the end, or there are fewer than three evaluations.
    """
    if len(points) < 3:
        return 0.0, 0.0, 0.0
    last, value = points[-1]
    early = [ap for step, ap in points if step <= last * 2 / 3]
    late = [ap for step, ap in points if step > last * 2 / 3]
    if not early or min(late) <= max(early) or value < max(late):
        return 0.0, 0.0, 0.0
    return value - max(early), max(early), value


def _forgets(metrics: Sequence[Mapping[str, float]], points: Sequence[tuple[float, float]]) -> bool:
    """Whether the loss of the test set rises."""
    start = next((step for step, ap in points if ap >= USABLE_AP50), math.inf)
    start = max(start, points[-1][0] / 3)
    losses = [
        line[_TEST_LOSS] for line in metrics if _TEST_LOSS in line and line["iteration"] >= start
    ]
    return bool(losses) and min(losses) < 0.98 * losses[-1]


class _Rule(NamedTuple):
    """A piece of advice, and whether it needs a usable detector."""

    advice: Callable[[_Evidence], Iterator[Change]]
    needs_usable: bool


_RULES = (
    _Rule(_unannotated, needs_usable=True),
    _Rule(_mistaken, needs_usable=True),
    _Rule(_confused, needs_usable=True),
    _Rule(_too_small, needs_usable=False),
    _Rule(_loose, needs_usable=True),
    _Rule(_duplicates, needs_usable=True),
    _Rule(_rare_classes, needs_usable=False),
    _Rule(_unlike_training, needs_usable=False),
    _Rule(_longer, needs_usable=False),
)
