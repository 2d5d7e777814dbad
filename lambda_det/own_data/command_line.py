"""``lambda-det check``, ``convert``, ``evaluate``, ``report`` and ``push``: their flags.

What does the work is imported where it begins, so a wrong flag is refused without PyTorch.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import traceback
from pathlib import Path

from lambda_det.detection.command_line import add_checkpoint_flags
from lambda_det.detection.data.written_formats import WRITTEN
from lambda_det.errors import ConfigError, command_parser, exit_status, log_to_terminal
from lambda_det.files import refuse_missing
from lambda_det.own_data.labels.table import FORMATS

FAULT_STATUS = 70  # EX_SOFTWARE of sysexits.h: a fault of this program


# ---------------------------------------------------------------------------------------- check
EXAMPLES = """examples:
  %(prog)s my/
  %(prog)s annotations.json images/
  %(prog)s --dataset coco_2017_val --no-images

The exit status is 0 if nothing is wrong, 1 if problems were found and nothing else, and 2 if the
data cannot be read at all.
"""


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The flags, which :func:`lambda_det.check` makes as well."""
    parser = command_parser(
        "check", "Check a data set before a long run, of one of " + ", ".join(FORMATS), EXAMPLES
    )
    add = parser.add_argument
    add("json", nargs="?", metavar="LABELS", help="file or folder of labels; all parts of a folder")
    add("images", nargs="?", metavar="IMAGES", help="the folder of its images")
    add("--data", metavar="LABELS", help="the same, as lambda-det train has it")
    add("--dataset", metavar="NAME", help="a registered data set instead")
    add("--no-images", action="store_true", help="do not open the images")
    add("--single-class", action="store_true", help="check as lambda-det train with this flag")
    arguments = parser.parse_args(argv)
    if arguments.data:
        arguments.json, arguments.images = arguments.data, arguments.json
    return arguments


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    log_to_terminal(logging.WARNING, sys.stdout)  # all of the report is there
    try:
        return exit_status(lambda: check(arguments))
    except Exception:
        # Python ends with 1 after an error, which says here that problems were found
        traceback.print_exc()
        return FAULT_STATUS


def check(arguments: argparse.Namespace) -> int:
    """Print what is wrong with a data set, and return the exit status.

    Raises:
        ConfigError: no data set is named, or two are.
        DataError: the data cannot be read at all.
    """
    if bool(arguments.dataset) == bool(arguments.json):
        raise ConfigError("Name one data set: LABELS with their IMAGES, or --dataset NAME.")
    refuse_missing(arguments.json, arguments.images)
    from lambda_det.own_data.check import check_data

    with tempfile.TemporaryDirectory(prefix="lambda_det_") as folder:
        return check_data(arguments, Path(folder))


# --------------------------------------------------------------------------------------- convert
CONVERT_EXAMPLES = """examples:
  %(prog)s VOC2007/Annotations train.json --images VOC2007/JPEGImages
  %(prog)s data.yaml train.json --images images/train
  %(prog)s annotations.xml train.json --images pictures
  %(prog)s train.json labels/ --images pictures --format yolo

YOLO and LabelMe have a file for each image, and YOLO one outline for an object. Crowds are written
in COCO's format alone.

The exit status is 0, 1 if labels were left out because their images are not there or cannot be
read, and 2 if nothing was written.
"""


def convert_main(argv: list[str] | None = None) -> int:
    parser = command_parser(
        "convert",
        f"Write labels of {', '.join(FORMATS)} as labels of "
        f"{' or '.join(row.title for row in WRITTEN.values())}.",
        CONVERT_EXAMPLES,
    )
    add = parser.add_argument
    add("labels", metavar="IN", help="folder of labels, or a file of them")
    add("output", metavar="OUT.json", help="the file to write, or the folder")
    add("--format", choices=WRITTEN, default="coco", help="default: coco")
    add("--images", metavar="DIR", help="folder of the images; default: of IN")
    add("--overwrite", action="store_true", help="replace what is there")
    arguments = parser.parse_args(argv)
    return exit_status(lambda: _convert(arguments))


def _convert(arguments: argparse.Namespace) -> int:
    log_to_terminal(logging.INFO)
    refuse_missing(arguments.labels, arguments.images)
    from lambda_det.own_data.convert import convert

    return convert(arguments)


# -------------------------------------------------------------------------------------- evaluate
EVALUATE_EXAMPLES = """
On the test part of the data that the run was trained on, or of another folder:
  %(prog)s output/mine --part test
  %(prog)s output/mine --data other/ --part test

On a file of labels:
  %(prog)s output/mine --json labels.json --images pictures/

The last checkpoint, with larger images:
  %(prog)s output/mine --checkpoint last --part val INPUT.MIN_SIZE_TEST 512 INPUT.MAX_SIZE_TEST 800
"""


def evaluate_main(argv: list[str] | None = None) -> int:
    """Do what the words after ``lambda-det evaluate`` say, and return the exit status."""
    parser = command_parser(
        "evaluate",
        "Evaluate a trained detector on a part of its data or on other data: AP, AP by class, how "
        "sure they are, and the run's own beside them.",
        EVALUATE_EXAMPLES,
    )
    add = parser.add_argument
    add("run", metavar="RUN", help="folder of a run, or one of its checkpoints")
    add("--data", metavar="DIR", help="a data set; default: the run's")
    add("--part", choices=("train", "val", "test"), help="default: test, or the one that there is")
    add("--json", metavar="FILE_OR_DIR", help="labels of any format, instead")
    add("--images", metavar="DIR", help="the folder of their images")
    add(
        "--output",
        metavar="DIR",
        help="of the results, new or of an earlier evaluation; default: below RUN/evaluations",
    )
    add("--device", metavar="D", help="cpu or cuda; default: MODEL.DEVICE")
    add_checkpoint_flags(parser)
    add("opts", nargs="*", help="configuration keys and values")
    args = parser.parse_intermixed_args(argv)
    return exit_status(lambda: _evaluate(args))


def _evaluate(args: argparse.Namespace) -> None:
    refuse_missing(args.run, args.data, args.json, args.images)
    from lambda_det.own_data.evaluate import evaluate

    opts = [*args.opts, *(["MODEL.DEVICE", args.device] if args.device else [])]
    evaluated = evaluate(
        args.run,
        data=args.data,
        part=args.part,
        labels=args.json,
        images=args.images,
        output=args.output,
        checkpoint=args.checkpoint,
        raw=args.raw,
        opts=opts,
    )
    print(evaluated)
    print(f"lambda-det report {evaluated.folder} makes a page of them")


# ---------------------------------------------------------------------------------------- report
REPORT_EXAMPLES = """
The page of a run, output/mine/report.html:
  %(prog)s output/mine

Its confusion of classes and its pictures at another score; another file:
  %(prog)s output/mine --score-threshold 0.3 --pictures 20 --output mine.html
"""


def report_main(argv: list[str] | None = None) -> int:
    parser = command_parser(
        "report",
        "Write one HTML page on a run: curves, AP by class, what would bring most, the worst "
        "images. It needs no server and no other file.",
        REPORT_EXAMPLES,
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
    return exit_status(lambda: _report(args))


def _report(args: argparse.Namespace) -> None:
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


# ------------------------------------------------------------------------------------------ push
PUSH_EXAMPLES = """
Write a model card, weights and configuration to look at; nothing is sent:
  %(prog)s output/mine owner/name --folder card --license cc-by-4.0

Send them, as the account of `hf auth login` or of the token in HF_TOKEN:
  %(prog)s output/mine owner/name --license cc-by-4.0 --private
"""


def push_main(argv: list[str] | None = None) -> int:
    """Do what the words after ``lambda-det push`` say, and return the exit status."""
    parser = command_parser(
        "push",
        "Send a trained detector to the Hugging Face Hub: model card, weights as "
        "safetensors, configuration.",
        PUSH_EXAMPLES,
    )
    add = parser.add_argument
    add("run", metavar="RUN", help="folder of a training")
    add("repository", metavar="OWNER/NAME", help="made if it is not there")
    add("--folder", type=Path, metavar="DIR", help="write the files there, and send nothing")
    add("--license", default="other", metavar="ID", help="such as apache-2.0")
    add("--private", action="store_true", help="make a repository for you alone")
    add("--checkpoint", default="best", metavar="best|last|STEP", help="of the run")
    args = parser.parse_args(argv)
    return exit_status(lambda: _push(args))


def _push(args: argparse.Namespace) -> None:
    log_to_terminal(logging.WARNING)
    refuse_missing(args.run)
    from lambda_det.own_data.hub import push

    push(args)
