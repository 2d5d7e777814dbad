#!/usr/bin/env python
"""Draw the losses and the AP of a run, from the metrics.json in its folder, to a picture."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("picture", type=Path, help="file to write, such as curve.png")
    return parser.parse_args(argv)


def series(records: list[dict[str, float]], name: str) -> tuple[list[float], list[float]]:
    """Iterations and values of one metric."""
    points = [(r["iteration"], r[name]) for r in records if name in r]
    return [x for x, _ in points], [y for _, y in points]


def draw(records: list[dict[str, float]], picture: Path) -> None:
    """Losses at the left, AP at the right, over the iterations."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), constrained_layout=True)
    names = sorted({name for record in records for name in record})
    for name in names:
        if "loss" in name:
            left.plot(*series(records, name), label=name, lw=2 if name == "total_loss" else 1)
        elif name.endswith("/AP"):
            right.plot(*series(records, name), "o-", label=name)
    left.set(xlabel="iteration", ylabel="loss", ylim=(0, None))
    right.set(xlabel="iteration", ylabel="AP", ylim=(0, 100))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    figure.savefig(picture, dpi=100)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    metrics = args.run / "metrics.json"
    if not metrics.is_file():
        print(f"error: there is no {metrics}; name the folder of a run.", file=sys.stderr)
        return 2
    draw([json.loads(line) for line in metrics.read_text().splitlines()], args.picture)
    print(args.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
