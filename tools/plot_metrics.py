#!/usr/bin/env python
"""Draw the losses and the AP or accuracy of runs, from their metrics.json, to a picture."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of one run or of several")
    parser.add_argument("picture", type=Path, help="file to write, such as curve.png")
    return parser.parse_args(argv)


def series(records: list[dict[str, float]], name: str) -> tuple[list[float], list[float]]:
    """Iterations and values of one metric."""
    points = [(r["iteration"], r[name]) for r in records if name in r]
    return [x for x, _ in points], [y for _, y in points]


def draw(runs: dict[str, list[dict[str, float]]], picture: Path) -> None:
    """Losses at the left, AP or accuracy at the right, over the iterations, of runs by label."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), constrained_layout=True)
    for label, records in runs.items():
        for name in sorted({name for record in records for name in record}):
            # The sum alone of several runs: all losses would be too many curves
            if "loss" in name and (len(runs) == 1 or name == "total_loss"):
                width = 2 if name == "total_loss" and len(runs) == 1 else 1
                left.plot(*series(records, name), label=label + name, lw=width)
            elif name.endswith(("/AP", "_top1")):
                right.plot(*series(records, name), "o-", ms=3, label=label + name)
    left.set(xlabel="iteration", ylabel="loss", ylim=(0, None))
    right.set(xlabel="iteration", ylabel="AP, or top-1 in percent", ylim=(0, 100))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    figure.savefig(picture, dpi=100)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    runs = {}
    for run in args.runs:
        metrics = run / "metrics.json"
        if not metrics.is_file():
            print(f"error: there is no {metrics}; name the folder of a run.", file=sys.stderr)
            return 2
        label = f"{run.resolve().name}: " if len(args.runs) > 1 else ""
        runs[label] = [json.loads(line) for line in metrics.read_text().splitlines()]
    draw(runs, args.picture)
    print(args.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
