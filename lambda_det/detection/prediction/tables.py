"""Predictions as tables: a row for each instance, and the counts of each image."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from lambda_det.detection.prediction.predictor import Prediction
from lambda_det.files import replace_text, writing_to

# Digits after the point, as in annotations
_DIGITS = {"score": 5, "x0": 2, "y0": 2, "x1": 2, "y1": 2, "area": 2}


class Tables:
    """Collects predictions, and writes them as two files of comma-separated values.

    The one has the columns picture and what :meth:`Prediction.to_dict` has. The other has a row for
    each image, also for one in which nothing was found: its name, the number of instances of
    each class, and their total.
    """

    def __init__(self, class_names: list[str] | None) -> None:
        self._names = class_names
        self._rows: list[Sequence[object]] = []
        self._counts: dict[str, Counter[int]] = {}

    def add(self, file_name: str, prediction: Prediction, source: Path | None = None) -> None:
        """Add the predictions of an image or of a frame of a video."""
        self._counts[file_name] = Counter(prediction.classes.tolist())
        columns = prediction.to_dict()
        for name, digits in _DIGITS.items():
            columns[name] = [round(value, digits) for value in columns[name]]
        self._rows += [(file_name, *row) for row in zip(*columns.values(), strict=True)]

    def save(self, path: Path) -> None:
        """Write both files; the second one is :func:`counts_file` of ``path``.

        Raises:
            ConfigError: one cannot be written.
        """
        head = ["picture", "class", *_DIGITS]
        _write(path, [head, *self._rows])
        highest = max((index for counts in self._counts.values() for index in counts), default=-1)
        names = self._names or [str(index) for index in range(highest + 1)]
        rows = [
            [file_name, *(counts[index] for index in range(len(names))), counts.total()]
            for file_name, counts in self._counts.items()
        ]
        _write(counts_file(path), [["picture", *names, "total"], *rows])


def counts_file(path: str | Path) -> Path:
    """The file of counts beside the file of instances: found_counts.csv beside found.csv."""
    path = Path(path)
    return path.with_name(f"{path.stem}_counts{path.suffix}")


def _write(path: Path, rows: Iterable[Sequence[object]]) -> None:
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    with writing_to(path):
        replace_text(path, text.getvalue())
