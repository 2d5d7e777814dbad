"""``lambda-det export``: a trained network as a file for other runtimes, which was compared."""

from __future__ import annotations

import argparse
import logging
import re
import shlex
from pathlib import Path

from lambda_det.detection.command_line import add_checkpoint_flags
from lambda_det.errors import command_parser, exit_status, log_to_terminal
from lambda_det.export import MOST
from lambda_det.export.output import check_output
from lambda_det.files import refuse_missing

EXAMPLES = """examples:
A whole detector, with the best checkpoint of its run. It takes resized images in one tensor:
  %(prog)s output/run detector.onnx
  %(prog)s output/run detector.onnx --batch any --images holiday/*.jpg
  %(prog)s output/run for_tensorrt.onnx --batch 8 --fixed 640x640
  %(prog)s output/run detector.onnx MODEL.DEVICE cpu

The backbone of a detector, and one of a backbone file or of published weights, with features by
name:
  %(prog)s output/run backbone.onnx --backbone-only
  %(prog)s backbone.pth backbone.onnx

OUTPUT is written only if it computes what the model does: a backbone on several sizes, a detector
on validation images of its run, by AP too, or on --images. OUTPUT.json says what it takes.

status: 0; 1 if the file did not compute the same and was removed; 2 if it could not be made
"""


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = command_parser(
        "export",
        "Write a trained detector or backbone as ONNX, and compare the file with the model.",
        EXAMPLES,
    )
    add = parser.add_argument
    text = """folder of a detector's run or one of its checkpoints; or a backbone: a file of
        lambda-det backbone, or published weights such as timm://resnetrs101.tf_in1k"""
    add("source", metavar="RUN", help=text)
    add("output", type=Path, metavar="OUTPUT", help="file, ending in .onnx")
    add_checkpoint_flags(parser)
    add("--backbone-only", action="store_true", help="of the detector only the backbone (and FPN)")
    text = "photographs to compare a detector's file on, as DIR/*.jpg, beside validation images"
    add("--images", nargs="+", default=(), metavar="FILE", help=text)
    text = """validation images to compare the AP of a detector's file on (default: %(default)s);
        0 for none: without --images, too, the file is written and nobody has compared it"""
    add("--proof", type=int, default=100, metavar="N", help=text)
    text = "by which AP may differ, such as where --fixed pads images (default: %(default)s)"
    add("--apart", type=float, default=MOST, metavar="AP", help=text)
    text = "images that a detector's file takes at once, or 'any' for any number (default: 1)"
    add(
        "--batch", dest="together", type=_batch, default=1, metavar="N", help=text
    )  # `batch`: for trainings
    text = "size of the images of a detector's file, for runtimes that want fixed shapes"
    add("--fixed", type=_size, metavar="HxW", help=text)
    add("--overwrite", action="store_true", help="replace OUTPUT if it is there")
    add("opts", nargs="*", help="configuration keys and values")
    return parser.parse_intermixed_args(argv)


def _size(word: str) -> tuple[int, int]:
    if not (sides := re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", word)):
        raise argparse.ArgumentTypeError(f"{word!r} is no size such as 480x640, height first")
    return int(sides[1]), int(sides[2])


def _batch(word: str) -> int:
    if not re.fullmatch(r"any|[1-9]\d*", word):
        raise argparse.ArgumentTypeError(f"{word!r} is neither a number from 1 nor 'any'")
    return 0 if word == "any" else int(word)


def run(args: argparse.Namespace) -> int:
    refuse_missing(args.source)
    check_output(args.output, args.overwrite)
    from lambda_det.export.session import export_network
    from lambda_det.export.sources import network_to_export
    from lambda_det.weights.provenance import Origin

    network = network_to_export(
        args.source,
        checkpoint=args.checkpoint,
        raw=args.raw,
        opts=args.opts,
        proof=args.proof,
        apart=args.apart,
        backbone_only=args.backbone_only,
        batch=args.together,
        fixed=args.fixed,
    )
    report = export_network(network, args.output, images=args.images, overwrite=args.overwrite)
    about = network.about
    print(f"weights: {Origin(about['weights'], about['step'], about['averaged'])}\n{report}")
    if network.detector and report.passed:
        print(
            f"next: lambda-det predict {shlex.quote(str(args.output))} --input IMAGES --output DIR"
            "; elsewhere docs/detect.py of the repository needs no lambda_det"
        )
    return 0 if report.passed else 1


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    log_to_terminal(logging.WARNING)
    return exit_status(lambda: run(args))
