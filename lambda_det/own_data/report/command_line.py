"""``lambda-det report``: one HTML page on a run, or the curves of several runs."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

from lambda_det.errors import (
    ConfigError,
    DataError,
    command_parser,
    exit_status,
    log_to_terminal,
    refused,
)
from lambda_det.files import writing_to

__all__ = ["draw_curves", "main"]

DESCRIPTION = """\
Write one HTML page on a run: curves, AP by class, what would bring most, the worst images.
The page holds its figures and pictures: no server and no other file is needed to look at it.
"""
EXAMPLES = """
The page of a run, output/mine/report.html:
  %(prog)s output/mine

Its confusion of classes and its pictures at another score; another file:
  %(prog)s output/mine --score-threshold 0.3 --pictures 20 --output mine.html

Only the total loss and the AP or accuracy, of one run or of several, as a picture:
  %(prog)s output/mine output/other --curves curves.png
"""


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = command_parser("report", DESCRIPTION, EXAMPLES)
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", help="folder of a training or an evaluation"
    )
    parser.add_argument(
        "--curves", metavar="FILE", help="write a picture of the curves, and no page"
    )
    parser.add_argument(
        "--output", metavar="FILE", help="the page, replaced if it exists; default: RUN/report.html"
    )
    parser.add_argument(
        "--dataset", metavar="NAME", default="", help="of DATASETS.TEST; default: the first"
    )
    parser.add_argument(
        "--score-threshold",
        type=float,
        metavar="S",
        help="lowest score of predictions in the confusion of classes and in pictures (default: "
        "the one with the best F1, as for predict)",
    )
    parser.add_argument(
        "--pictures",
        type=int,
        default=8,
        metavar="N",
        help="of the worst images (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    if len(args.runs) > 1 and not args.curves:
        parser.error("a page is of one run; --curves FILE draws several")
    return args


def draw_curves(runs: Sequence[str], picture: str) -> None:
    """Write the figure of :func:`draw_totals` on runs.

    Args:
        runs: their folders.
        picture: the file to write.

    Raises:
        DataError: a folder holds no run.
    """
    from lambda_det.own_data.report.figures import draw_totals
    from lambda_det.training.run_folder import RunFolder

    metrics = {}
    for run in map(Path, runs):
        if not (run / "metrics.json").is_file():
            raise DataError(f"There is no {run / 'metrics.json'}; name the folder of a run.")
        label = f"{run.resolve().name}: " if len(runs) > 1 else ""
        metrics[label] = RunFolder(run).metrics()
    figure = draw_totals(metrics)
    with writing_to(picture), refused(ConfigError, f"{picture} cannot be drawn", "", ValueError):
        figure.savefig(picture)


def run(args: argparse.Namespace) -> None:
    if args.curves:
        draw_curves(args.runs, args.curves)
        print(f"The picture is {args.curves}")
        return
    from lambda_det.own_data.report.run_page import write_report

    path = write_report(
        *args.runs,
        args.output,
        dataset=args.dataset,
        score=args.score_threshold,
        pictures=args.pictures,
    )
    print(f"The page is {path}")


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    log_to_terminal(logging.WARNING)
    return exit_status(lambda: run(args))
