#!/usr/bin/env python
"""Train the rows of a plan one after another, and write a table of their AP.

    projects/benchmarks/recipe.py projects/benchmarks/recipe.toml --output output/recipe

A plan names the arguments of ``lambda-det train`` of each data set, and the keys of each row. It is
read again before each training, so rows can be added while others train. What is done is not
repeated, and what was stopped continues. Checkpoints are deleted when a training has ended.
"""

from __future__ import annotations

import argparse
import json
import resource
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

RESULT, TABLE = "result.json", "table.md"


class Training(NamedTuple):
    """One training of a plan: its set, row and seed, and the arguments of ``lambda-det train``."""

    data: str
    row: str
    seed: int
    arguments: list[str]

    def folder(self, output: Path) -> Path:
        return output / self.data / self.row / f"seed{self.seed}"


def trainings(plan: Path) -> list[Training]:
    """The trainings of a plan in their order: by rows, then by sets, then by seeds."""
    content = tomllib.loads(plan.read_text())
    found = []
    for row in content["rows"]:
        for data in row.get("sets", content["sets"]):
            for seed in row.get("seeds", [1]):
                words = f"{content['sets'][data]} SEED {seed} {row.get('keys', '')}"
                found.append(Training(data, row["name"], seed, shlex.split(words)))
    return found


def curve(metrics: Path) -> dict[int, tuple[float, float]]:
    """Box AP and AP50 by step, of the averaged weights where there are such."""
    found = {}
    for line in map(json.loads, metrics.read_text().splitlines()):
        for kind in ("bbox", "bbox_EMA"):
            if f"{kind}/AP" in line:
                found[line["iteration"] + 1] = (line[f"{kind}/AP"], line[f"{kind}/AP50"])
    return found


def _seconds_of_children() -> float:
    """Processor time of all processes that this one started and that ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def train(training: Training, output: Path) -> bool:
    """Whether the training ended well; its result is then in its folder."""
    folder = training.folder(output)
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "lambda_det", "train", "--output", str(folder), "--resume"]
    before = _seconds_of_children()
    with folder.with_suffix(".log").open("a") as log:
        ended = subprocess.run(
            [*command, "--no-progress", *training.arguments],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    if ended.returncode:
        return False
    minutes = (_seconds_of_children() - before) / 60
    result = {"minutes": minutes, "curve": curve(folder / "metrics.json")}
    (folder / RESULT).write_text(json.dumps(result))
    for checkpoint in folder.glob("model_*.pth"):
        checkpoint.unlink()
    return True


def table(done: list[Training], output: Path) -> str:
    """Markdown: AP / AP50 at the end and minutes of a core (of the last start) by row and set."""
    sets = list(dict.fromkeys(training.data for training in done))
    lines = ["| | " + " | ".join(sets) + " |", "|---|" + "---:|" * len(sets)]
    for row in dict.fromkeys(training.row for training in done):
        cells = []
        for data in sets:
            results = [
                json.loads((training.folder(output) / RESULT).read_text())
                for training in done
                if (training.row, training.data) == (row, data)
            ]
            ends = [list(result["curve"].values())[-1] for result in results]
            minutes = [f"{result['minutes']:.1f}" for result in results]
            values = ", ".join(f"{ap:.1f} / {ap50:.1f}" for ap, ap50 in ends)
            cells.append(f"{values} ({', '.join(minutes)} min)" if ends else "")
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("plan", type=Path, help="TOML file of sets and rows")
    parser.add_argument("--output", type=Path, required=True, help="folder of all trainings")
    args = parser.parse_args(argv)
    failed = []
    while True:
        planned = trainings(args.plan)
        done = [each for each in planned if (each.folder(args.output) / RESULT).exists()]
        if done:
            (args.output / TABLE).write_text(table(done, args.output))
        left = [each for each in planned if each not in done and each not in failed]
        if not left:
            break
        if not train(left[0], args.output):
            failed.append(left[0])
            log = left[0].folder(args.output).with_suffix(".log")
            print(f"A training failed: {log} has the reason.", file=sys.stderr)
    if done:
        print((args.output / TABLE).read_text(), end="")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
