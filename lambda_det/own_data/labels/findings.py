"""What readers of labels repair, leave out or doubt; it goes with the content that they make."""

from __future__ import annotations

from typing import Any, NamedTuple

from lambda_det.errors import printable

_FIRST, _LONGEST = 3, 600  # cases of a kind that are kept, letters of one


class Kind(NamedTuple):
    """A kind of finding: what follows from it, as in ``report.py``, and what it is."""

    severity: str
    text: str


NO_PICTURE = Kind("doubtful", "labels without a picture that can be read, which are left out")
ELSEWHERE = Kind("noted", "picture that is in another folder than its labels name")
NO_AREA = Kind("noted", "shape without an area, such as a point or a line, which is left out")
NO_CLASS = Kind("noted", "shape called __ignore__, which is left out")
DIFFICULT = Kind("noted", "object marked as difficult, which is an object like the others")
EMPTY_MASK = Kind("repaired", "empty mask, whose rectangle stands for it")
SIZE = Kind("repaired", "labels whose size is too small for their boxes; the picture's counts")
RENAMED = Kind("repaired", "labels that name another picture (imagePath) than they are of")
OTHER_NAME = Kind("refused", "labels that name another picture than the one that has their name")
OTHER_COPY = Kind("refused", "labels whose imageData shows another picture than they name")


class Findings(dict[Kind, list[str]]):
    """All cases of each kind: the file, and what in it."""

    def add(self, kind: Kind, case: str) -> None:
        """Record a case."""
        self.setdefault(kind, []).append(case)

    def plain(self) -> list[dict[str, Any]]:
        """As a file can hold them: of each kind the number of cases and the first ones."""
        return [
            {
                "severity": kind.severity,
                "text": kind.text,
                "count": len(cases),
                "first": [printable(case)[:_LONGEST] for case in cases[:_FIRST]],
            }
            for kind, cases in self.items()
        ]
