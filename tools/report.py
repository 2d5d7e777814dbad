#!/usr/bin/env python
"""Write one HTML page on a run: curves, AP by class, errors, worst images, speed, configuration.

The page holds its figures and pictures: no server and no other file is needed to look at it.
"""

from __future__ import annotations

import argparse
import logging
import sys

# lambda_det is imported in functions, so that --help answers at once

EXAMPLES = """
The page of a run, output/mine/report.html:
  %(prog)s output/mine

Its confusion of classes and its pictures at another score; another file:
  %(prog)s output/mine --score-threshold 0.3 --pictures 20 --output mine.html
"""


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN", help="folder of a training or an evaluation")
    parser.add_argument(
        "--output", metavar="FILE", help="the page, replaced if it exists; default: RUN/report.html"
    )
    parser.add_argument(
        "--dataset", metavar="NAME", default="", help="of DATASETS.TEST; default: the first"
    )
    parser.add_argument(
        "--score-threshold",
        type=float,
        default=0.5,
        metavar="S",
        help="of predictions in the confusion of classes and in pictures (default: %(default)s)",
    )
    parser.add_argument(
        "--pictures",
        type=int,
        default=8,
        metavar="N",
        help="of the worst images (default: %(default)s)",
    )
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> None:
    from lambda_det.report.run_page import write_report

    path = write_report(
        args.run,
        args.output,
        dataset=args.dataset,
        score=args.score_threshold,
        pictures=args.pictures,
    )
    print(f"The page is {path}")


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    from lambda_det.errors import exit_status

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    return exit_status(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
