"""``lambda-det report``: one HTML page on a run."""

from __future__ import annotations

import argparse
import logging

from lambda_det.errors import command_parser, exit_status, log_to_terminal
from lambda_det.files import refuse_missing

EXAMPLES = """
The page of a run, output/mine/report.html:
  %(prog)s output/mine

Its confusion of classes and its pictures at another score; another file:
  %(prog)s output/mine --score-threshold 0.3 --pictures 20 --output mine.html
"""


def main(argv: list[str] | None = None) -> int:
    parser = command_parser(
        "report",
        "Write one HTML page on a run: curves, AP by class, what would bring most, the worst "
        "images. It needs no server and no other file.",
        EXAMPLES,
    )
    add = parser.add_argument
    add("run", metavar="RUN", help="folder of a training or an evaluation")
    add(
        "--output", metavar="FILE", help="the page, replaced if it exists; default: RUN/report.html"
    )
    add("--dataset", metavar="NAME", default="", help="of DATASETS.TEST; default: the first")
    add(
        "--score-threshold",
        type=float,
        metavar="S",
        help="lowest score of predictions in the confusion of classes and in pictures (default: "
        "the one with the best F1, as for predict)",
    )
    add(
        "--pictures",
        type=int,
        default=8,
        metavar="N",
        help="of the worst images (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    log_to_terminal(logging.WARNING)
    return exit_status(lambda: _write(args))


def _write(args: argparse.Namespace) -> None:
    refuse_missing(args.run)
    from lambda_det.own_data.report.run_page import write_report

    path = write_report(
        args.run,
        args.output,
        dataset=args.dataset,
        score=args.score_threshold,
        pictures=args.pictures,
    )
    print(f"The page is {path}")
