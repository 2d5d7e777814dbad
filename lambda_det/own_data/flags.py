"""The flags for own data, and whether a command line has anything to prepare.

Every training of a detector imports this file. What reads labels and chooses a recipe is imported
where there is something to prepare.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING

from lambda_det.errors import ConfigError
from lambda_det.files import refuse_missing

if TYPE_CHECKING:
    from detectron2.config import CfgNode

    from lambda_det.detection.config import Prepared

AUTO = "auto"  # --tile auto: tiles by the rule, also where objects are not that small
PARTS = ("train", "test")  # flags name the files of each: --train-json, --test-images
_TIME = re.compile(
    r"(?:(\d+(?:\.\d+)?)\s*h(?:ours?)?)?"
    r"\s*(?:(\d+(?:\.\d+)?)\s*m(?:in(?:utes?)?)?)?"
    r"\s*(?:(\d+(?:\.\d+)?)\s*s(?:ec(?:onds?)?)?)?"
)
_FLAGS = (
    "data",
    "val_share",
    "stratify",
    "group_by",
    "single_class",
    "epochs",
    "time",
    "batch",
    "size",
    "tile",
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for own data, which :func:`prepared` looks at."""
    data = parser.add_argument_group(
        "your own data",
        "instead of DATASETS.TRAIN and .TEST; lambda-det check --help lists the formats of labels",
    )
    data.add_argument(
        "--data",
        metavar="DIR",
        help="folder of a data set, or YOLO's data.yaml: its parts to train and to evaluate on",
    )
    data.add_argument(
        "--val-share",
        type=float,
        metavar="S",
        help="share of the training images to evaluate on, by their names, without a --test-json; "
        "0.1 with --data or without --config, or more of few images",
    )
    data.add_argument(
        "--stratify", action="store_const", const=True, help="each class has its share as well"
    )
    data.add_argument(
        "--group-by",
        metavar="REGEX",
        help="images whose names match it alike stay on one side, such as frames of a film by "
        r"'^(.*?)\d+\.\w+$'",
    )
    data.add_argument(
        "--single-class",
        action="store_const",
        const=True,
        help="all objects are of one class, whatever their labels call them",
    )
    schedule = parser.add_argument_group(
        "schedule and size for your data", "RECIPE in lambda_det/config.py"
    )
    schedule.add_argument(
        "--epochs", type=float, metavar="N", help="passes over the training images; 0: by a rule"
    )
    schedule.add_argument(
        "--time",
        type=_seconds,
        metavar="T",
        help="as many epochs as fit into a time such as 1h, 45m or 1h30m, by the time of the first "
        "steps",
    )
    schedule.add_argument(
        "--batch",
        type=int,
        metavar="N",
        help="images a step; else by the memory of the GPUs, where the file says what it takes",
    )
    schedule.add_argument(
        "--size",
        type=int,
        metavar="N",
        help="pixels of the shorter side of images in the test; the longer side and the sizes in "
        "training change by the same factor",
    )
    schedule.add_argument(
        "--tile",
        type=_tile,
        metavar="N",
        help="cut images in memory into overlapping tiles of N pixels, in which objects keep their "
        "pixels; 0: whole images; auto: by a rule, as where most objects would be too small",
    )
    parser.set_defaults(
        check="lambda_det.own_data.flags:check", prepare="lambda_det.own_data.flags:prepared"
    )


def _tile(text: str) -> int | str:
    """The value of ``--tile``: a number of pixels, or "auto"."""
    if text == AUTO or text.isdecimal():
        return text if text == AUTO else int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no number of pixels; give one, 0 or {AUTO}")


def _seconds(text: str) -> float:
    """The value of ``--time`` in seconds: hours and minutes such as 1h, 90m, 1h30m or 1.5h."""
    found = _TIME.fullmatch(text.strip())
    numbers = [float(number or 0) for number in found.groups()] if found else [0.0] * 3
    seconds = 3600 * numbers[0] + 60 * numbers[1] + numbers[2]
    if not seconds:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no time; give hours and minutes, such as 1h, 45m or 1h30m"
        )
    return seconds


def check(args: argparse.Namespace) -> None:
    """Refuse flags that do not go together, before what takes seconds to import.

    Raises:
        ConfigError: one sentence.
    """
    if not args.resume:
        refuse_missing(args.data)
        if args.config_file is None:
            refuse_unnamed(args)
    if args.time is not None and (args.epochs is not None or "SOLVER.MAX_ITER" in args.opts):
        raise ConfigError(
            "--time, --epochs and SOLVER.MAX_ITER say how long a training is; give one of them."
        )
    if args.tile == AUTO and args.eval_only and not args.resume:
        raise ConfigError(
            "--tile auto chooses tiles by the objects of a training; give --eval-only their pixels."
        )
    if args.batch is not None and args.batch < 1:
        raise ConfigError(f"--batch is {args.batch}; give 1 or more.")
    if args.epochs is not None and not args.epochs >= 0:
        raise ConfigError(f"--epochs is {args.epochs:g}; give a number above 0, or 0 for the rule.")


def names_data(args: argparse.Namespace) -> bool:
    """Whether a recipe can be chosen by the data of a command line."""
    return not args.eval_only and bool(args.data or args.train_json)


def refuse_unnamed(args: argparse.Namespace) -> None:
    """Refuse a command line with neither a configuration nor data.

    Raises:
        ConfigError: there is nothing by which a recipe could be chosen.
    """
    if names_data(args):
        return
    if args.opts and Path(args.opts[0]).exists():
        flag = "--data" if Path(args.opts[0]).is_dir() else "--config"
        raise ConfigError(f"{args.opts[0]} follows no flag; type {flag} {args.opts[0]}.")
    raise ConfigError(
        "There is nothing to train on: type --data DIR, with your images and labels, or --train "
        "FILE --images DIR; or --config FILE, of yours or of configs/."
    )


def prepared(args: argparse.Namespace, config: CfgNode | None) -> Prepared | None:
    """The configuration with own data, or None where there is nothing to prepare.

    Args:
        args: of a parser with :func:`add_flags`; they are only read.
        config: of the file that they name, with the given keys; None where they name none.

    Raises:
        UserError: as :func:`check` and :func:`lambda_det.own_data.prepare.prepare` do.
    """
    check(args)
    if not _has_work(args, config):
        return None
    from lambda_det.own_data.prepare import prepare

    return prepare(args, config)


def _has_work(args: argparse.Namespace, config: CfgNode | None) -> bool:
    if config is None or any(getattr(args, flag) is not None for flag in _FLAGS):
        return True
    if config.RECIPE.ENABLED and not args.eval_only:
        return True
    for part in PARTS:
        labels = getattr(args, f"{part}_json")
        if labels and Path(labels).exists():
            from lambda_det.own_data.labels.formats import recognise
            from lambda_det.own_data.labels.table import COCO

            if not getattr(args, f"{part}_images") or recognise(Path(labels))[0] != COCO:
                return True
    return False
