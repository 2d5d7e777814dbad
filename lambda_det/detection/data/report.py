"""The report on a data set: what it holds, and whether it may be trained and evaluated on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lambda_det.errors import printable

# The severity of a finding.
# REFUSED: loading, training or evaluation would fail or be wrong.
# BAD_BOX: left out of training, cut at the border, or a box as mask; many of them are refused.
# NOTED: allowed; training and evaluation use something in its place.
REFUSED, BAD_BOX, NOTED = "refused", "bad box", "noted"

# COCO's limits of area, in pixels
SIZES = {"small": 32**2, "medium": 96**2, "large": float("inf")}

# COCO train2017 itself has one box of zero height among its 860 001.
MAX_BAD_BOX_SHARE = 0.01

_FIRST_OFFENDERS = 3
_LONGEST = 600  # letters of one offender in a report


@dataclass
class Problem:
    """One kind of finding.

    Attributes:
        severity: ``REFUSED``, ``BAD_BOX`` or ``NOTED``.
        count: how often it occurs.
        first: its first occurrences, described.
    """

    severity: str
    count: int = 0
    first: list[str] = field(default_factory=list)


@dataclass
class Report:
    """What a COCO-format data set holds, and what is wrong with it.

    Attributes:
        json_file: the annotation file.
        image_root: the folder of its images.
        images, annotations, crowds: how many there are; crowds are annotations, too.
        empty: images without an annotation that is no crowd.
        usable: annotations that are not crowds and have a box to train on.
        categories: names by id, in the order of the ids.
        per_category: annotations by category name, crowds included.
        sizes: annotations by COCO's sizes: small, medium, large.
        problems: by kind, only those that occur.
        files: file_name, width and height of each image.
    """

    json_file: str
    images: int
    annotations: int
    categories: dict[int, str]
    per_category: dict[str, int]
    files: list[dict[str, Any]] = field(repr=False)
    image_root: str = ""
    crowds: int = 0
    empty: int = 0
    usable: int = 0
    sizes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SIZES, 0))
    problems: dict[str, Problem] = field(default_factory=dict)

    def add(self, kind: str, severity: str, offender: str) -> None:
        """Record a finding."""
        problem = self.problems.setdefault(kind, Problem(severity))
        problem.count += 1
        if len(problem.first) < _FIRST_OFFENDERS:
            problem.first.append(printable(offender)[:_LONGEST])

    def of(self, severity: str) -> dict[str, Problem]:
        """The problems of one severity."""
        return {k: problem for k, problem in self.problems.items() if problem.severity == severity}

    def refusal(self) -> str | None:
        """Why this data set is not to be trained or evaluated on, in one sentence, or None."""
        advice = f"correct the file (lambda-det check {self.json_file} lists all kinds)"
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
