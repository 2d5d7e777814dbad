"""``lambda-det check`` and ``lambda-det convert``: data sets before a long run."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path

from lambda_det.detection.data.annotations import check_coco
from lambda_det.detection.data.labels import FORMATS, read_labels
from lambda_det.detection.data.registration import registered_files
from lambda_det.detection.data.report import BAD_BOX, NOTED, REFUSED, Report
from lambda_det.errors import ConfigError, exit_status
from lambda_det.files import replace_file

EXAMPLES = """examples:
  %(prog)s annotations.json images/
  %(prog)s --dataset coco_2017_val
  %(prog)s --dataset shapes_train --no-images

The exit status is 0 if nothing is wrong, 1 if problems were found, and 2 if the data cannot be
read at all.
"""


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="lambda-det check",
        description="Check a COCO-format data set before a long run.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("json", nargs="?", metavar="JSON", help="the annotation file")
    parser.add_argument("images", nargs="?", metavar="IMAGES", help="the folder of its images")
    parser.add_argument("--dataset", metavar="NAME", help="a registered data set instead")
    parser.add_argument("--no-images", action="store_true", help="do not open the images")
    arguments = parser.parse_args(argv)
    if bool(arguments.dataset) == bool(arguments.json):
        parser.error("give either JSON and IMAGES or --dataset NAME")
    if arguments.json and not arguments.images:
        parser.error("IMAGES is missing: the folder that holds the images of JSON")
    return arguments


def show_progress(done: int, total: int) -> None:
    if done % 100 == 0 or done == total:
        print(f"\ropened {done} of {total} images", end="", file=sys.stderr)
    if done == total:
        print(file=sys.stderr)


def print_report(report: Report) -> None:
    headings = {
        REFUSED: "Problems that training and evaluation refuse",
        BAD_BOX: "Left out of training or cut at the border; more than 1 % of them are refused",
        NOTED: "For information",
    }
    print(f"{report.json_file}\nimages in {report.image_root}\n")
    print(f"{report.images:9,} images")
    print(f"{report.annotations:9,} annotations, {report.crowds:,} of them crowds")
    print(f"{report.usable:9,} can be trained on")
    for size, count in report.sizes.items():
        print(f"{count:9,} {size}")
    print(f"{len(report.categories):9,} categories:")
    for name, count in report.per_category.items():
        print(f"{count:9,} {name}")
    for severity, heading in headings.items():
        if problems := report.of(severity):
            print(f"\n{heading}:")
        for kind, problem in problems.items():
            print(f"{problem.count:9,} {kind}")
            for offender in problem.first:
                print(f"{'':10}- {offender}")


def check(arguments: argparse.Namespace) -> int:
    if arguments.dataset:
        json_file, images = registered_files(arguments.dataset)
    else:
        json_file, images = arguments.json, arguments.images
    files = "none" if arguments.no_images else "all"
    report = check_coco(json_file, images, files=files, progress=show_progress)
    print_report(report)
    found = bool(report.of(REFUSED) or report.of(BAD_BOX))
    print("\nProblems were found." if found else "\nNothing is wrong.")
    return int(found)


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    return exit_status(lambda: check(arguments))


CONVERT_EXAMPLES = """examples:
  %(prog)s VOC2007/Annotations train.json --images VOC2007/JPEGImages
  %(prog)s data.yaml train.json --images images/train
  %(prog)s annotations.xml train.json --images pictures
"""


def convert(arguments: argparse.Namespace) -> None:
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    output = Path(arguments.output)
    if output.exists() and not arguments.overwrite:
        raise ConfigError(f"{output} exists; --overwrite replaces it.")
    content = read_labels(arguments.labels, arguments.images)
    output.parent.mkdir(parents=True, exist_ok=True)
    replace_file(output, lambda file: file.write(json.dumps(content).encode()))
    print(output)


def convert_main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="lambda-det convert",
        description=f"Write labels of {', '.join(FORMATS)} in COCO's format.",
        epilog=CONVERT_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("labels", metavar="IN", help="folder of labels, or a file of them")
    parser.add_argument("output", metavar="OUT.json", help="the file to write")
    parser.add_argument("--images", metavar="DIR", help="folder of the pictures; default: of IN")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT.json")
    arguments = parser.parse_args(argv)
    return exit_status(lambda: convert(arguments))
