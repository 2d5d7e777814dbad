"""What would bring most: what to change, and by how much AP50 would rise at most.

To add a piece of advice, write a function from :class:`Evidence` to the changes that it advises,
and name it in ``_RULES`` or ``_OF_USABLE``.
"""

from __future__ import annotations

import math
import shlex
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pycocotools.coco import COCO

from lambda_det.detection.first_batch import FILE as FIRST_BATCH
from lambda_det.errors import counted, listed
from lambda_det.modeling.specs import STRIDE
from lambda_det.own_data.fit_input import LARGEST_SCALE
from lambda_det.own_data.report.error_types import (
    LEAST_IOU,
    NEAR,
    JudgedPrediction,
    ap50,
    repaired,
    sort_errors,
)
from lambda_det.own_data.report.reading import evaluations_of, label_of

# Below this AP50 a detector has not learned the task, and its errors prove nothing about its data:
# with an AP50 of 0.03, 791 predictions had scores of 0.8 or more. It is a guess between that and
# the lowest AP50 of finished runs, which is some 40.
USABLE_AP50 = 20
SMALL = 32  # side in pixels of the network's input: a larger input would help with smaller objects
# Side in pixels of the network's input of objects that are hardly seen: four strides of the finest
# level of usual feature pyramids, which is the side of its anchors
TINY = 16
CONFIDENT = 0.8  # score of predictions whose annotation may be missing, or of the wrong class
# Scale from which a larger input shows nothing new: the recipes' largest, which they round down to
# whole strides of the backbone
_ENLARGED = 0.9 * LARGEST_SCALE
_STEP = 1.5  # guess: by which a larger input is advised
_ALL = 0.9  # share of the objects that counts as all of them, since a few may be annotated loosely
_FEW = 100  # objects of a class in training, below which more examples are advised
_NAMED = 5  # classes, or pairs of classes, that are named
_LEAST_RISE = 1.0  # of AP50: evaluations of runs that learned no more differed by up to 1 point
_LEAST_FALL = 3.0  # of AP50 below the best of several such evaluations; a guess
_SHORT = 0.5  # share of the rule's epochs, below which a run is short
_IN_SHORT_RUNS = "Train longer first, which brings tighter shapes and tells classes apart."
# Two shares differ if objects that are alike would show such a difference in one of so many data
# sets. Statistics often take 0.05; but the objects of one image are missed together.
_BY_CHANCE = 0.01
_DRAWS = 100_000  # such data sets, by which that share is known to 0.03 %
# Where a sure prediction contradicts the annotations, by its error, and what else to think of
_DOUBTS = {
    "background": (
        "where nothing is annotated",
        "the training images may lack the same annotations",
    ),
    "class": (
        "on an object of another class",
        "where they are right, add examples of the classes that are confused there",
    ),
}


class Change(NamedTuple):
    """What to change.

    Attributes:
        error: the kind of error that it concerns: "background", "class", "localisation",
            "missed"; "training" for all of them.
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
    """The epochs of a training, and how many the recipe's rule has for its images.

    Attributes:
        steps: of the training, where ``SOLVER.MAX_ITER`` sets them; 0 where ``--epochs`` does.
    """

    trained: float
    rule: float
    steps: int = 0

    def __str__(self) -> str:
        return f"{self.trained:.3g} of {self.rule:.3g} epochs"


def advise(run: Evidence) -> list[Change]:
    """The possible changes, with the one that would bring most first.

    The gains are bounds: the AP50 if all errors of a kind were gone. They overlap. Below
    ``USABLE_AP50`` nothing is said about annotations.
    """
    if not run.counted:
        return []  # there is nothing to find
    rules = (*_OF_USABLE, *_RULES) if run.is_usable else _RULES
    changes = [change for rule in rules for change in rule(run)]
    return sorted(changes, key=lambda c: (not c.comes_first, np.nan_to_num(-c.gain)))


# ------------------------------------------------------------------------------- what the rules use
@dataclass
class Evidence:
    """What is known of a run.

    Attributes:
        truth, entries, iou_type: as for :func:`sort_errors`.
        metrics: of the run's metrics.json, for its curves, also on the page of an evaluation.
        trained: number of objects of each class in training, by its name; empty if unknown.
        scale: sides of the network's input as a share of the sides of the images or tiles.
        tile: side of the tiles in pixels of the images; 0 where they are whole.
        epochs: of the training; None if unknown.
        folder: of the run, for commands.
        score: from which on the matrix of confusion counts predictions.
        predictions, missed: of :func:`sort_errors`.
        found: the annotations with a right prediction.
        classes, names: the category of each annotation, and the name of each category.
        counted: the annotations that are no crowds, by their ids.
        sides: of each in pixels of the network's input: the root of its area.
        objects: the number of objects of each category.
    """

    truth: COCO
    entries: Sequence[Mapping[str, Any]]
    iou_type: str
    metrics: Sequence[Mapping[str, float]]
    trained: Mapping[str, int]
    scale: float = 1.0
    tile: int = 0
    epochs: Epochs | None = None
    folder: str = "RUN"
    score: float = 0.0

    def __post_init__(self) -> None:
        self.predictions, self.missed = sort_errors(self.truth, self.entries, self.iou_type)
        self.found = {p.matched for p in self.predictions if p.verdict == "right"}
        annotations = self.truth.anns
        self.classes = {i: one["category_id"] for i, one in annotations.items()}
        self.counted = {i for i, one in annotations.items() if not one["iscrowd"]}
        self.sides = {i: self.scale * annotations[i]["area"] ** 0.5 for i in self.counted}
        self.names = {i: category["name"] for i, category in self.truth.cats.items()}
        self.objects = Counter(self.classes[i] for i in self.counted)
        self.ap50 = ap50(self.predictions, self.objects)

    def points(self, metric: str = "AP50") -> list[tuple[float, float]]:
        """The step and a result, such as the AP50, of each evaluation."""
        name = label_of(f"{self.iou_type}/{metric}")
        # Detectron2 writes NaN for an evaluation without any prediction
        return [
            (row["step"], np.nan_to_num(row[name]))
            for row in evaluations_of(self.metrics)
            if name in row
        ]

    @property
    def is_usable(self) -> bool:
        """Whether the detector is good enough for its errors to tell something about the data."""
        return self.ap50 >= USABLE_AP50

    def has_less_than(self, share: float) -> bool:
        """Whether the training had less than a share of the rule's epochs."""
        return self.epochs is not None and self.epochs.trained < share * self.epochs.rule

    def gain(self, wrong: Sequence[JudgedPrediction], unseen: Set[int] = frozenset()) -> float:
        """The rise of AP50 if wrong predictions were repaired and missed objects not there."""
        left = self.objects - Counter(self.classes[i] for i in unseen)
        return ap50(repaired(self.predictions, wrong, self.classes), left) - self.ap50

    def wrong(self, verdict: str, score: float = 0.0) -> list[JudgedPrediction]:
        """The predictions with an error, from a score on."""
        return [p for p in self.predictions if p.verdict == verdict and p.score >= score]

    def resting_on(self, wrong: Sequence[JudgedPrediction]) -> str:
        """On how many objects the gain of a repair rests: of few, each is worth many points."""
        objects = {p.matched for p in wrong}
        return (
            f"Of the {counted(len(objects), 'object')} in question {len(objects - self.found)} "
            "have no right prediction; others have one that may score less."
        )


def differs(some: int, of: int, others: int, of_others: int) -> bool:
    """Whether a share ``some / of`` is larger than another one by more than chance may make it.

    This is Fisher's exact test, of one side, by drawing, which is also right for a few objects: if
    the same number of all objects were drawn without regard to their group, so many or more would
    be of the first group with a probability of less than ``_BY_CHANCE``.

    Args:
        some, of: objects of the first group with a property, and all of its objects.
        others, of_others: the same of the second group.
    """
    random = np.random.default_rng(0)
    drawn = random.hypergeometric(of, of_others, some + others, _DRAWS)
    return bool(np.mean(drawn >= some) < _BY_CHANCE)


# ---------------------------------------------------------------------------------------- the rules
def _doubtful(run: Evidence) -> Iterator[Change]:
    """Sure predictions that contradict the annotations."""
    for error, (where, otherwise) in _DOUBTS.items():
        # an object that is found as what it is called is only confused
        if sure := [p for p in run.wrong(error, CONFIDENT) if p.matched not in run.found]:
            images = Counter(p.image for p in sure).most_common(3)
            files = [Path(run.truth.imgs[image]["file_name"]).name for image, _ in images]
            yield Change(
                error,
                f"Look at the annotations, first of {', '.join(files)}; {otherwise}.",
                run.gain(sure),
                f"Predictions of a score of {CONFIDENT} or more {where}: {len(sure)}.",
            )


def _background(run: Evidence) -> Iterator[Change]:
    if unsure := [p for p in run.wrong("background") if p.score < CONFIDENT]:
        yield Change(
            "background",
            "Where all objects are annotated, add images of what is mistaken for one; those "
            "without an object are trained on with an empty label file of YOLO, else by "
            "DATALOADER.FILTER_EMPTY_ANNOTATIONS False.",
            run.gain(unsure),
            f"Predictions of lower scores where nothing is annotated: {len(unsure)}.",
        )


def _confused(run: Evidence) -> Iterator[Change]:
    """Classes that are taken for each other, on objects whose annotations are not doubted."""
    doubted = {p.matched for p in run.wrong("class", CONFIDENT)} - run.found
    wrong = [p for p in run.wrong("class") if p.matched not in doubted]
    found = [p for p in wrong if p.score >= run.score]
    pairs = Counter(
        " and ".join(sorted((run.names[p.category], run.names[run.classes[p.matched]])))
        for p in found
    )
    if found:
        yield Change(
            "class",
            _IN_SHORT_RUNS
            if run.has_less_than(_SHORT)
            else "Add examples of classes that are taken for each other, or make one class of "
            f"those that look alike: {listed([pair for pair, _ in pairs.most_common()], _NAMED)}.",
            run.gain(wrong),
            f"Predictions with the name of another class: {len(found)} of a score of "
            f"{run.score:.3g} or more, {len(wrong)} of any, but for those on doubted "
            f"annotations. {run.resting_on(wrong)}",
        )


def _loose(run: Evidence) -> Iterator[Change]:
    if loose := run.wrong("localisation"):
        yield Change(
            "localisation",
            _IN_SHORT_RUNS
            if run.has_less_than(_SHORT)
            else "Look at how tightly the annotations fit.",
            run.gain(loose),
            f"Predictions of any score with an IoU of {NEAR} to {LEAST_IOU} with an object: "
            f"{len(loose)}. {run.resting_on(loose)}",
        )


def _too_small(run: Evidence) -> Iterator[Change]:
    """Small objects that are found less often than others, or all objects where all are tiny."""
    small = {i for i, side in run.sides.items() if side < SMALL}
    large, badly = run.counted - small, run.wrong("localisation")
    if run.scale >= _ENLARGED or not small:
        return
    bad = run.missed | {p.matched for p in badly} - run.found
    share = f"Missed at any score or fitted badly of {len(small)} objects smaller than {SMALL} "
    share += f"pixels in the network's input: {len(bad & small) / len(small):.0%}"
    half = statistics.median(run.sides.values())
    is_blamed = differs(len(bad & small), len(small), len(bad & large), len(large))
    if is_blamed:
        evidence = f"{share}; of {len(large)} larger ones: {len(bad & large) / len(large):.0%}."
    elif len(small) >= _ALL * len(run.counted) and half < TINY:
        evidence = f"Half of all objects have a side of {half:.0f} pixels or less there. {share}."
    else:
        return
    yield Change(
        "missed",
        f"Train {_larger(run)}: the objects are too small in the network's input.",
        run.gain([p for p in badly if p.matched in small], run.missed & small),
        evidence,
        # what is hardly seen is not learned by a longer training either
        comes_first=not (is_blamed or run.is_usable),
    )


def _larger(run: Evidence) -> str:
    """How the network would see objects larger than in this run."""
    if run.tile:
        return f"on smaller tiles, such as --tile {run.tile // 2}"
    side = statistics.median(min(i["height"], i["width"]) for i in run.truth.imgs.values())
    size = int(min(_STEP * run.scale, LARGEST_SCALE) * side) // STRIDE * STRIDE
    # smaller ones than the images' own pixels are reached by tiles alone
    tiles = ", or on tiles, by --tile auto" if _STEP * run.scale < 1 else ""
    return f"at a larger size, such as --size {size}{tiles}"


def _rare_classes(run: Evidence) -> Iterator[Change]:
    """Classes with few examples, unless the run is short: it misses nearly all of them."""
    if not run.trained or run.has_less_than(_SHORT):
        return
    missed = Counter(run.classes[i] for i in run.missed)
    rare = [c for c in missed if run.trained.get(run.names[c], 0) < _FEW]
    rare.sort(key=lambda c: -missed[c] / run.objects[c])
    if rare:
        words = [
            f"{run.names[c]} {missed[c]} of {run.objects[c]} ({run.trained.get(run.names[c], 0)} "
            "objects in training)"
            for c in rare
        ]
        yield Change(
            "missed",
            f"Add examples of {listed([run.names[c] for c in rare], _NAMED)}.",
            run.gain([], {i for i in run.missed if run.classes[i] in rare}),
            f"Missed at any score: {listed(words, _NAMED)}.",
        )


def _training(run: Evidence) -> Iterator[Change]:
    """A longer training or other images, by AP50 over the steps and by the losses."""
    # For a longer training all evaluations in the last third of the steps must be better than all
    # before, and the last one must be the best. If AP50 no longer rises, and five evaluations
    # differ by chance alone, this is so in one case of twenty.
    longer = "Train longer, with --resume and twice as many --epochs."
    if run.epochs:
        until = run.epochs.rule if run.has_less_than(1) else 2 * run.epochs.trained
        steps = math.ceil(until / run.epochs.trained * run.epochs.steps)
        length = f"SOLVER.MAX_ITER {steps}" if steps else f"--epochs {math.ceil(until)}"
        command = f"lambda-det train --output {shlex.quote(run.folder)} --resume {length}"
        longer = f"Train longer: {command}"
    is_short = run.has_less_than(_SHORT)
    points = run.points()
    last, value = points[-1] if points else (0, 0.0)
    early = [(one, step) for step, one in points if step <= last * 2 / 3]
    late = [one for step, one in points if step > last * 2 / 3]
    # by which the best checkpoint is chosen, and which may rise while AP50 falls
    ap = [one for _, one in run.points("AP")]
    before, since = max(early, default=(value, last))
    best = max(before, value, *late)
    rises = value == best and min(late, default=0.0) > before and len(points) > 2
    rise = min(value - before, 100 - value) if rises else 0.0
    if rise >= _LEAST_RISE:
        yield Change(
            "training",
            longer,
            math.nan,
            f"AP50 was best at the end; since step {since} it rose from {before:.1f} to "
            f"{value:.1f}.",
            comes_first=True,
        )
    elif best - value >= _LEAST_FALL and ap[-1:] != [max(ap, default=0.0)]:
        yield Change(
            "training",
            "Add images to the training, and do not train longer. The best checkpoint is the one "
            "that is used.",
            math.nan,
            f"AP50 was {best:.1f} before, and is {value:.1f} at the end.",
            comes_first=True,
        )
    elif is_short:
        yield Change("training", longer, math.nan, f"The run had {run.epochs}.", comes_first=True)
    # on other data a detector may find little though it has learned its own
    elif run.metrics and not run.is_usable and value < USABLE_AP50:
        yield Change(
            "training",
            f"Look at {FIRST_BATCH}, whether each object has its box and its class, and at the "
            "curves, whether AP rises; then train longer or at another learning rate.",
            math.nan,
            f"AP50 is {run.ap50:.1f}: below {USABLE_AP50} the errors of a detector tell nothing "
            "about its data.",
            comes_first=True,
        )


_OF_USABLE = (_doubtful, _background, _confused, _loose)  # what errors of a usable detector tell
_RULES = (_too_small, _rare_classes, _training)
