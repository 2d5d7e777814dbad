"""The report on a data set: its content, and what was decided about it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lambda_det.errors import printable

# The consequence of a finding.
# REFUSED: the data can be neither trained nor evaluated on.
# UNUSABLE: an object or a part of it is not used; more than MAX_UNUSABLE_SHARE of them are refused.
# REPAIRED: training and evaluation use the intended value, however often it occurs. DOUBTFUL: it is
# used as it is, but a person should look at it.
# NOTED: for information.
REFUSED, UNUSABLE, REPAIRED, DOUBTFUL, NOTED = (
    "refused",
    "unusable",
    "repaired",
    "doubtful",
    "noted",
)

# COCO train2017 itself has one box of zero height among its 860 001.
MAX_UNUSABLE_SHARE = 0.01

_FIRST_CASES = 3
_LONGEST = 600  # the longest text of one case in a report


class Kind(NamedTuple):
    """A kind of finding: its consequence, and its text."""

    severity: str
    text: str


ID = Kind(REFUSED, "id that is not listed, or is used twice")
IMAGE = Kind(REFUSED, "image that is missing or has another size")
BROKEN = Kind(
    DOUBTFUL,
    "image that cannot be read: a training takes the next one in its place, and is refused before "
    "it begins where the image is one to evaluate on",
)
FORM = Kind(REFUSED, "box in another form than its format has")
BOX = Kind(UNUSABLE, "object without a usable box, which is left out")
OUTSIDE = Kind(UNUSABLE, "box far over the border of its image, where it is cut")
MASK = Kind(UNUSABLE, "mask that cannot be used; its usable part, or the box, replaces it")
VALUE = Kind(DOUBTFUL, "value of an annotation that cannot be used, and counts as absent")
BORDER = Kind(REPAIRED, "box a few pixels over the border of its image, where it is cut")
MEANT = Kind(REPAIRED, "entry that is read as it was meant")
CLASS = Kind(DOUBTFUL, "classes whose names are the same, or differ by blanks or letter case alone")
SLIP = Kind(DOUBTFUL, "object of a class that has nearly the name of another one, and few objects")
TURNED = Kind(DOUBTFUL, "image that its EXIF data turn; its labels must fit the turned image")
TWICE = Kind(
    DOUBTFUL, "object that is in its image twice, to a pixel or two: AP counts one as missed"
)
FILLED = Kind(DOUBTFUL, "mask of less area than its polygons: a hole in it is filled")
NO_MASK = Kind(
    DOUBTFUL, "object without a mask, while others have one: where masks are learnt, its box is one"
)
EMPTY = Kind(
    NOTED,
    "image without an object: evaluated, and left out of training, unless it is background by "
    "YOLO's empty label files or by DATALOADER.FILTER_EMPTY_ANNOTATIONS False",
)
# Each of Roboflow's files in COCO's format has one, so it is no reason for a warning
ROOT = Kind(NOTED, "category above all others that has no object, which is no class")


@dataclass
class Finding:
    """How often a kind of finding occurs, and its first cases: file, image, id."""

    count: int = 0
    first: list[str] = field(default_factory=list)


@dataclass
class Report:
    """The content of a data set, and what was decided about it.

    Attributes:
        json_file: the annotation file, or the labels that it was converted from.
        image_root: the folder of its images.
        images, annotations, crowds: their numbers; crowds also count as annotations.
        faulty: annotations of which something cannot be used; each counts once here, and in each
            of its findings.
        empty: images without annotations, or with crowds alone.
        usable: annotations to train on: they are no crowds, and have a box.
        masks: annotations with a mask.
        most: number of objects of the image with the most objects.
        categories: names by id, in the order of the ids.
        keypoints: names of an object's keypoints, of the first category that has any.
        counts: annotations by category id, crowds included.
        findings: that occur, by kind.
        files: for each image "file_name" (the whole path), "name" (in the labels), "width",
            "height", and "own_size": whether these are the image's, because the labels have none.
    """

    json_file: str
    image_root: str = ""
    images: int = 0
    annotations: int = 0
    crowds: int = 0
    faulty: int = 0
    empty: int = 0
    usable: int = 0
    masks: int = 0
    most: int = 0
    categories: dict[int, str] = field(default_factory=dict)
    keypoints: list[str] = field(default_factory=list)
    counts: dict[int, int] = field(default_factory=dict)
    findings: dict[Kind, Finding] = field(default_factory=dict)
    files: list[dict[str, Any]] = field(default_factory=list, repr=False)

    def add(self, kind: Kind, case: str, count: int = 1) -> None:
        """Record a finding, or several that show one case."""
        finding = self.findings.setdefault(kind, Finding())
        finding.count += count
        if len(finding.first) < _FIRST_CASES:
            finding.first.append(printable(case)[:_LONGEST])

    @property
    def classes(self) -> list[str]:
        """Names by the numbers that a detector has for them: the order of the ids."""
        return list(self.categories.values())

    @property
    def places(self) -> dict[int, int]:
        """These numbers by the ids."""
        return {number: place for place, number in enumerate(self.categories)}

    @property
    def paths(self) -> list[str]:
        """The whole paths of its images."""
        return [file["file_name"] for file in self.files]

    def of(self, *severities: str) -> dict[Kind, Finding]:
        """The findings of these severities."""
        return {
            kind: finding for kind, finding in self.findings.items() if kind.severity in severities
        }

    def refusal(self) -> str | None:
        """The reason why this data set is refused, in one sentence, or None."""
        command = "lambda-det check"
        if os.path.exists(self.json_file):  # and is no part of a folder
            command = f"{command} {self.json_file} {self.image_root}".rstrip()
        advice = f"correct the labels ({command} lists all kinds)"
        for kind, finding in self.of(REFUSED).items():
            return (
                f"{self.json_file}: {finding.count} x {kind.text}, the first: {finding.first[0]}; "
                f"{advice}."
            )
        if self.faulty > MAX_UNUSABLE_SHARE * self.annotations:
            kind, finding = next(iter(self.of(UNUSABLE).items()))
            return (
                f"{self.json_file}: {self.faulty} of {self.annotations} annotations have something "
                f"that cannot be used, more than {MAX_UNUSABLE_SHARE:.0%}; the first is "
                f"{finding.first[0]} ({kind.text}); {advice}."
            )
        return None
