"""What was found in a data set, and whether it may be trained and evaluated on."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from lambda_det.errors import printable

# What is made of each kind of finding. REFUSED: loading, training or evaluation would break or be
# wrong. BAD_BOX: left out of training or cut at the border, and refused when there are many.
# NOTED: allowed; training and evaluation put something in its place.
REFUSED, BAD_BOX, NOTED = "refused", "bad box", "noted"
KINDS = {
    "image id used twice": REFUSED,
    "annotation id used twice": REFUSED,
    "category id used twice": REFUSED,
    "image whose width or height is not above 0": REFUSED,
    "image of more pixels than can be read": REFUSED,
    "annotation of an image that is not listed": REFUSED,
    "annotation of a category that is not listed": REFUSED,
    "bbox that is not a list of four numbers": REFUSED,
    "segmentation that is neither a list of polygons nor a run-length mask": REFUSED,
    "run-length mask that does not fit its image": REFUSED,
    "keypoints that are not a list of finite numbers": REFUSED,
    "iscrowd that is neither 0 nor 1": REFUSED,
    "ignore flag, which Detectron2 does not know": REFUSED,
    "image file missing": REFUSED,
    "image file unreadable or of another size": REFUSED,
    "box with NaN or infinite numbers": BAD_BOX,
    "box of zero or negative size": BAD_BOX,
    "box outside its image": BAD_BOX,
    "polygon of fewer than three points, an odd count or no numbers": BAD_BOX,
    "annotation without segmentation": NOTED,
    "annotation without area": NOTED,
    "area that is negative or not a finite number": NOTED,
    "annotation without iscrowd": NOTED,
    "image without annotations": NOTED,
}

# COCO train2017 itself has one box of zero height among its 860 001.
MAX_BAD_BOX_SHARE = 0.01

_FIRST_OFFENDERS = 3
_LONGEST = 600  # letters of one in a report


@dataclass
class Problem:
    """One kind of finding: how often it occurs, and its first occurrences in words."""

    count: int = 0
    first: list[str] = field(default_factory=list)


@dataclass
class Report:
    """What a COCO-format data set holds, and what is wrong with it."""

    json_file: str
    image_root: str
    images: int
    annotations: int
    crowds: int
    usable: int  # annotations that are no crowds and have a box to train on
    categories: dict[int, str]  # names by id, in the order of the ids
    per_category: dict[str, int]  # annotations by category name, crowds included
    sizes: dict[str, int]  # annotations by COCO's sizes: small, medium, large
    problems: dict[str, Problem]  # by the kinds of KINDS, only those that occur
    files: list[dict[str, Any]] = field(repr=False)  # file_name, width and height of each image

    def add(self, kind: str, offenders: Iterable[str], count: int) -> None:
        """Record ``count`` more findings of a kind; only the first ``offenders`` are taken."""
        if count:
            problem = self.problems.setdefault(kind, Problem())
            problem.count += count
            room = _FIRST_OFFENDERS - len(problem.first)
            first = itertools.islice(offenders, room)
            problem.first.extend(printable(text)[:_LONGEST] for text in first)

    def of(self, severity: str) -> dict[str, Problem]:
        """The problems of one severity: ``REFUSED``, ``BAD_BOX`` or ``NOTED``."""
        return {k: p for k, p in self.problems.items() if KINDS[k] == severity}

    def has_all(self, kind: str) -> bool:
        """Whether every annotation is of that kind."""
        return kind in self.problems and self.problems[kind].count == self.annotations

    def refusal(self) -> str | None:
        """Why nothing should be trained or evaluated on this, in one sentence, or None."""
        advice = f"correct the file (tools/check_dataset.py {self.json_file} lists all kinds)"
        for kind, problem in self.of(REFUSED).items():
            found = f"{problem.count} x {kind}, the first: {problem.first[0]}"
            return f"{self.json_file}: {found}; {advice}."
        bad = self.of(BAD_BOX)
        count = sum(problem.count for problem in bad.values())
        if count > MAX_BAD_BOX_SHARE * self.annotations:
            kind, problem = next(iter(bad.items()))
            return (
                f"{self.json_file}: {count} of {self.annotations} boxes or polygons are bad, more "
                f"than {MAX_BAD_BOX_SHARE:.0%}, the first a {kind}: {problem.first[0]}; {advice}."
            )
        return None
