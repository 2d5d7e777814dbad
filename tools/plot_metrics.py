#!/usr/bin/env python
"""Draw the losses and the AP or accuracy of runs, from their metrics.json, to a picture."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lambda_det.errors import DataError, exit_status


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of one run or of several")
    parser.add_argument("picture", type=Path, help="file to write, such as curve.png")
    return parser.parse_args(argv)


def draw(runs: list[Path], picture: Path) -> None:
    """Losses at the left, AP or accuracy at the right, over the steps.

    Raises:
        DataError: a folder holds no run.
    """
    # Imported here, and not for --help
    from matplotlib.figure import Figure

    from lambda_det.report.run_page import draw_panel, read_metrics

    records = {}
    for run in runs:
        if not (run / "metrics.json").is_file():
            raise DataError(f"There is no {run / 'metrics.json'}; name the folder of a run.")
        label = f"{run.resolve().name}: " if len(runs) > 1 else ""
        records[label] = read_metrics(run)
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    draw_panel(left, "losses", records)
    draw_panel(right, "AP or accuracy, percent", records)
    figure.savefig(picture, dpi=100)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    status = exit_status(lambda: draw(args.runs, args.picture))
    if not status:
        print(args.picture)
    return status


if __name__ == "__main__":
    sys.exit(main())
