"""Long measurements in small units: each writes its result at once, and is not repeated.

A part is one process that takes the next units until its time is over. The results are a JSON
file, of which a Markdown table is made. A unit that ends its process, by a crash or a time limit,
is tried again for its number of attempts, and then has the failure as its result.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate

from lambda_benchmarks.measure import OUT_OF_MEMORY, is_out_of_memory
from lambda_det.errors import reason
from lambda_det.files import replace_text

Row = dict[str, Any]  # by COLUMNS

COLUMNS = {
    "case": "case",
    "forward_ms": "forward ms",
    "forward_device_ms": "of the device",
    "training_ms": "training ms",
    "training_device_ms": "of the device",
    "images_per_second": "images/s in training",
    "peak_mb": "peak MB in training",
    "result": "result",
}


class Unfinished(Exception):
    """The time of the part is over; the unit continues in the next part."""


@dataclass(frozen=True)
class Unit:
    """A measurement.

    Attributes:
        part: the letter of its part.
        name: unique.
        work: makes its rows before the deadline that it gets, a time of ``time.monotonic``; raises
            ``Unfinished``, or any error, which is its result then.
        seconds: that must be left in a part before it begins.
        attempts: how many processes it may crash before it counts as failed.
    """

    part: str
    name: str
    work: Callable[[float], list[Row]]
    seconds: float = 30
    attempts: int = 2


class Results:
    """The results of all parts in a file.

    Args:
        path: of the JSON file; an existing one is continued.
        machine: what the machine is, for a new file.
    """

    def __init__(self, path: Path, machine: dict[str, Any]) -> None:
        self.path = path
        self.content: dict[str, Any] = {"machine": machine, "units": {}, "attempts": {}}
        if path.exists():
            self.content = json.loads(path.read_text("utf-8"))

    def is_finished(self, unit: Unit) -> bool:
        return unit.name in self.content["units"]

    def attempts(self, unit: Unit) -> int:
        """How often a unit was begun without a result."""
        return self.content["attempts"].get(unit.name, 0)

    def begin(self, unit: Unit) -> None:
        self.content["attempts"][unit.name] = self.attempts(unit) + 1
        self._write()

    def finish(self, unit: Unit, rows: list[Row], seconds: float) -> None:
        """Write the rows of a unit, and the table of all units."""
        self.content["units"][unit.name] = {"part": unit.part, "seconds": seconds, "rows": rows}
        self._write()

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(self.path, json.dumps(self.content, indent=1) + "\n")
        replace_text(self.path.with_suffix(".md"), self.table() + "\n")

    def table(self) -> str:
        """One Markdown table of all results."""
        rows = [
            [result["part"], *(_shown(row.get(column)) for column in COLUMNS)]
            for _, result in sorted(self.content["units"].items(), key=lambda item: item[1]["part"])
            for row in result["rows"]
        ]
        machine = ", ".join(f"{name} {value}" for name, value in self.content["machine"].items())
        header = ["part", *COLUMNS.values()]
        table = tabulate(rows, header, tablefmt="github", disable_numparse=True)
        return f"{machine}\n\n{table}"


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return "" if value is None else str(value).replace("|", "/").replace("\n", " ")


def run_part(
    units: Sequence[Unit],
    results: Results,
    seconds: float,
    is_broken: Callable[[], bool] = lambda: False,
) -> bool:
    """Take the next units until the time of a part is over.

    Args:
        units: in their order.
        results: of what was made before.
        seconds: of the part.
        is_broken: whether this process can no longer work; it is called after each error.

    Returns:
        Whether all units have a result.
    """
    deadline, first = time.monotonic() + seconds, True
    for unit in units:
        if results.is_finished(unit):
            continue
        if results.attempts(unit) >= unit.attempts:
            text = f"its process ended {results.attempts(unit)} times, by a crash or a time limit"
            results.finish(unit, [{"case": unit.name, "result": text}], 0.0)
            continue
        if not first and time.monotonic() + unit.seconds > deadline:
            return False
        first = False
        print(f"{unit.part}: {unit.name}", flush=True)
        results.begin(unit)
        start, failed = time.monotonic(), False
        try:
            rows = unit.work(deadline)
        except Unfinished:
            return False
        except Exception as error:  # libraries raise errors of their own
            text = OUT_OF_MEMORY if is_out_of_memory(error) else reason(error)[:300]
            rows, failed = [{"case": unit.name, "result": text}], True
        results.finish(unit, rows, time.monotonic() - start)
        if failed and is_broken():
            return all(results.is_finished(unit) for unit in units)
    return True
