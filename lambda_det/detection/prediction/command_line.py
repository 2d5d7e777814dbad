"""``lambda-det predict``: the predictions of a trained detector on images and videos."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import Any

from lambda_det.detection.command_line import add_checkpoint_flags
from lambda_det.detection.data.written_formats import WRITTEN
from lambda_det.detection.prediction import DEFAULT_THRESHOLD
from lambda_det.errors import (
    ConfigError,
    command_parser,
    counted,
    exit_status,
    listed,
    log_to_terminal,
    printable,
)
from lambda_det.files import refuse_existing, refuse_missing

logger = logging.getLogger(__name__)

_WEAK = 0.1  # scores of a well trained detector are far above this

EXAMPLES = """
With the best checkpoint of a run, or a detector that lambda-det export wrote:
  %(prog)s output/run --input photo.jpg --output pictures
  %(prog)s detector.onnx --input holiday/ film.mp4 --output pictures

With annotations beside the images, for labelling tools, in COCO's format or another one:
  %(prog)s output/run --input holiday/ --output pictures --json holiday.json
  %(prog)s output/run --input holiday/ --output pictures --format yolo

With tables, found.csv of all instances and found_counts.csv of each image:
  %(prog)s output/run --input holiday/ --output pictures --csv found.csv

Another checkpoint, and configuration keys at the end:
  %(prog)s output/run/model_final.pth --input photo.jpg --output pictures \\
      MODEL.DEVICE cpu INPUT.MIN_SIZE_TEST 800

status: 0; 1 if a file could not be read, and the others are done; 2 if nothing could be done
"""


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = command_parser(
        "predict", "Draw the predictions of a trained detector on images and videos.", EXAMPLES
    )
    parser.add_argument(
        "source",
        metavar="RUN",
        help="folder of a run, one of its checkpoints, an exported detector, or hf://OWNER/NAME",
    )
    add_checkpoint_flags(parser)
    parser.add_argument(
        "--input",
        required=True,
        nargs="+",
        metavar="PATH",
        help="images, videos, folders, which are searched recursively for images, or patterns",
    )
    parser.add_argument("--output", metavar="DIR", required=True, help="folder of the drawings")
    parser.add_argument(
        "--score-threshold",
        type=float,
        metavar="S",
        help="draw instances of at least this score; default: the one with the best F1 at the "
        f"evaluation of the run, {DEFAULT_THRESHOLD:g} where none is known",
    )
    parser.add_argument(
        "--agnostic-nms",
        action="store_true",
        help="keep one class per place: of overlapping instances the one with the highest score",
    )
    parser.add_argument(
        "--no-labels", action="store_true", help="write no classes and scores into the images"
    )
    parser.add_argument("--device", metavar="D", help="cpu or cuda; default: MODEL.DEVICE")
    parser.add_argument(
        "--json", metavar="FILE", help="also write the predictions as annotations in COCO's format"
    )
    parser.add_argument(
        "--csv",
        metavar="FILE",
        help="also write a table: picture, class, score, box in pixels and area of each instance; "
        "FILE of found.csv also makes found_counts.csv, with the counts by image and class",
    )
    parser.add_argument(
        "--format",
        choices=WRITTEN,
        help="also write the predictions as labels of this format to correct, to labels/ in the "
        "--output (coco: labels.json); outlines have few points and no specks",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace existing files")
    parser.add_argument(
        "opts", nargs="*", help="configuration keys and values; of a LazyConfig key=value"
    )
    return parser.parse_intermixed_args(argv)


def run(args: argparse.Namespace) -> int:
    refuse_missing(args.source)
    from lambda_det.detection.data.label_files import place_labels
    from lambda_det.detection.data.outputs import mark_output
    from lambda_det.detection.prediction.annotations import Annotations
    from lambda_det.detection.prediction.files import plan_files, predict
    from lambda_det.detection.prediction.predictor import Predictor, is_exported, local_path
    from lambda_det.detection.prediction.tables import Tables, counts_file
    from lambda_det.detection.saved_run import open_run

    source = local_path(args.source)
    if not is_exported(source):
        source = open_run(source, args.checkpoint, raw=args.raw, opts=args.opts)
    elif args.raw or args.opts:
        raise ConfigError(f"{source} is exported; leave {' '.join(args.opts) or '--raw'} out.")
    images = plan_files(args.input, args.output, args.overwrite)
    is_folder = args.format not in (None, "coco")
    labels = Path(args.output, "labels" if is_folder else "labels.json")
    made = (args.json, args.csv, args.csv and counts_file(args.csv))
    written = [Path(file) for file in made if file]
    if len({file.resolve() for file in written}) < len(written):
        raise ConfigError("--json and --csv write to one file; name another one.")
    for file in written:
        refuse_existing(file, args.overwrite)
    if args.format:
        refuse_existing(labels, args.overwrite, folder=is_folder)
    if is_folder:  # two equal names are refused before the work
        place_labels((p.name for p in images if not p.is_video), args.format, labels)
    predictor = Predictor(
        source,
        score_threshold=args.score_threshold,
        device=args.device,
        agnostic_nms=args.agnostic_nms,
    )
    mark_output(args.output)
    print(f"Weights: {printable(str(predictor.origin))}")
    threshold = predictor.score_threshold
    is_best, origin = threshold == predictor.best_score, ""
    if is_best:
        origin = " (of the best F1 at the run's evaluation)"
    elif args.score_threshold is None:
        origin = " (no evaluation of these weights has recorded one)"
    print(f"Score threshold: {threshold:.3g}{origin}")
    if is_best and threshold < _WEAK:
        logger.warning(
            f"The best score threshold is only {threshold:.3g}, so this detector is weak or young "
            "and many predictions are wrong; --score-threshold shows fewer."
        )
    names = predictor.class_names
    collectors: dict[Annotations | Tables, tuple[Any, ...]] = {}  # and where to save them
    if args.json:
        collectors[Annotations(names)] = (Path(args.json),)
    if args.format:
        collectors[Annotations(names, for_hands=True)] = (labels, args.format)
    if args.csv:
        collectors[Tables(names)] = (Path(args.csv),)
    result = predict(predictor, images, [*collectors], with_labels=not args.no_labels)
    for collector, place in collectors.items():
        collector.save(*place)
    seen = " and ".join(counted(number, noun) for noun, number in result.seen.items())
    print(f"{counted(result.instances, 'instance')} on {seen} in {printable(args.output)}")
    total = result.seen.total()
    if 2 * result.empty > total:
        print(
            f"No instance has a score of {threshold:.3g} or more on {result.empty} of {total}; a "
            "lower --score-threshold shows weaker ones."
        )
    if result.empty_masks:
        print(
            f"{result.empty_masks} of {result.instances} masks are empty: the mask head has not "
            "learned them yet"
        )
    if result.unreadable:
        names = listed(result.unreadable, 20)
        print(f"{len(result.unreadable)} could not be read: {names}", file=sys.stderr)
    return int(bool(result.unreadable))


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    log_to_terminal(logging.WARNING)
    return exit_status(lambda: run(args))
