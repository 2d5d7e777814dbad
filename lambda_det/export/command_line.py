"""``lambda-det export``: a trained network as a file for other runtimes, which was compared."""

from __future__ import annotations

import argparse
import logging
from functools import partial

from lambda_det.detection.saved_run import add_checkpoint_flags
from lambda_det.errors import command_parser, exit_status, log_to_terminal
from lambda_det.export.formats import FORMATS
from lambda_det.export.proof import MOST
from lambda_det.export.session import ExportReport, export_network
from lambda_det.export.sources import network_to_export, read_images
from lambda_det.weights.provenance import Origin

EXAMPLES = """
A whole detector, with the best checkpoint of its run. It takes resized images in one tensor:
  %(prog)s output/run detector.onnx
  %(prog)s output/run detector.onnx --batch any --images photo.jpg street.jpg
  %(prog)s output/run for_tensorrt.onnx --batch 8 --fixed 640x640
  %(prog)s output/run detector.onnx --sizes 960x1280,1280x960 MODEL.DEVICE cpu

The backbone of a detector, and one of a backbone file or of published weights, with features by
name:
  %(prog)s output/run backbone.onnx --backbone-only
  %(prog)s backbone.pth backbone.pt2

The file is read again and compared with the model on several sizes. Only if all agree does OUTPUT
get its name, with OUTPUT.json beside it: input, pixel settings, outputs, sizes, versions. A
detector is also evaluated on validation images of its run: an AP more than 0.1 apart is refused.

status: 0; 1 if the file did not compute the same and was removed; 2 if it could not be made
"""


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = command_parser(
        "export",
        "Write a trained detector or backbone as a file for other runtimes, and compare the file "
        "with the model.",
        f"The ending of OUTPUT names the format:\n{_formats()}\n{EXAMPLES}",
    )
    parser.add_argument(
        "source",
        metavar="RUN",
        help="folder of a detector's run or one of its checkpoints; or a backbone: a file of "
        "lambda-det backbone, or published weights such as timm://resnetrs101.tf_in1k",
    )
    parser.add_argument("output", metavar="OUTPUT", help=f"file, ending in {', '.join(FORMATS)}")
    add_checkpoint_flags(parser)
    parser.add_argument(
        "--backbone-only", action="store_true", help="of the detector only the backbone (and FPN)"
    )
    parser.add_argument(
        "--sizes",
        type=lambda text: [_size(word) for word in text.split(",")],
        metavar="HxW,..",
        help="to compare on (several by default, odd ones and small ones)",
    )
    parser.add_argument(
        "--images", nargs="+", default=(), metavar="FILE", help="photographs to compare on"
    )
    parser.add_argument(
        "--proof",
        type=int,
        default=100,
        metavar="N",
        help="validation images to compare the AP of a detector's file on (default: %(default)s)",
    )
    parser.add_argument(
        "--apart",
        type=float,
        default=MOST,
        metavar="AP",
        help="by which AP may differ, such as where --fixed pads images (default: %(default)s)",
    )
    parser.add_argument(
        "--batch",
        dest="together",  # `batch` is for trainings
        type=_batch,
        metavar="N",
        help="images that a detector's file takes at once, or 'any' for any number (default: 1)",
    )
    parser.add_argument(
        "--fixed",
        type=_size,
        metavar="HxW",
        help="size of the images of a detector's file, for runtimes that want fixed shapes",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace OUTPUT if it is there")
    parser.add_argument("opts", nargs="*", help="configuration keys and values")
    args = parser.parse_intermixed_args(argv)
    return args


def _formats() -> str:
    """A line for each format."""
    lines = []
    for suffix, form in FORMATS.items():
        networks = "detectors and backbones" if form.holds_detectors else "backbones"
        lines.append(f"  {suffix:6} {networks} ({form.name})")
    return "\n".join(lines)


def _size(word: str) -> tuple[int, int]:
    height, _, width = word.partition("x")
    if not (height.isdecimal() and width.isdecimal() and int(height) and int(width)):
        raise argparse.ArgumentTypeError(f"{word!r} is no size such as 480x640, height first")
    return int(height), int(width)


def _batch(word: str) -> int:
    if word != "any" and not (word.isdecimal() and int(word)):
        raise argparse.ArgumentTypeError(f"{word!r} is neither a number from 1 nor 'any'")
    return 0 if word == "any" else int(word)


def run(args: argparse.Namespace) -> int:
    images = read_images(args.images)
    options = {"batch": args.together, "fixed": args.fixed}
    options |= {"backbone_only": args.backbone_only or None}
    network = network_to_export(
        args.source,
        checkpoint=args.checkpoint,
        raw=args.raw,
        opts=args.opts,
        proof=args.proof,
        apart=args.apart,
        announce=partial(print, flush=True),
        **{name: value for name, value in options.items() if value is not None},
    )
    report = export_network(
        network, args.output, sizes=args.sizes, images=images, overwrite=args.overwrite
    )
    about = network.about
    print(f"weights: {Origin(about['weights'], about['step'], about['averaged'])}")
    print(report_lines(report))
    return 0 if report.passed else 1


def report_lines(report: ExportReport) -> str:
    """The result of each comparison, and the greatest error of each output."""
    lines = [f"written in {report.seconds:.0f} s: {report.size / 1e6:.1f} MB"]
    for made in report.comparisons:
        name = "x".join(map(str, made.shape))
        count = "" if made.detections is None else f", {made.detections} detections"
        result = f"error {max(made.errors.values(), default=0.0):.1e}"
        if made.undecided:
            result = "not compared: rounding errors decide the order of the model's own detections"
        elif not made.passed:
            result = f"FAILED, {made.fault or result}"
        lines.append(f"  {name}{count}: {result}")
    lines.append("greatest error of each output, over its greatest value:")
    lines += [f"  {name}: {error:.1e}" for name, error in report.errors().items()]
    if not report.proof and {c.detections for c in report.comparisons} == {0}:
        lines.append("note: nothing was detected and little compared; give photographs (--images)")
    if report.proof:
        lines.append(str(report.proof))
        if not report.proof.passed:
            lines.append("note: on few images one box may make that; --apart AP allows for more")
    if report.passed:
        lines.append(f"verified: {report.path}")
    else:
        fault = "it does not compute what the model does"
        if report.compared:
            fault = f"its AP is more than {report.proof.most:g} from the run's"
        lines.append(f"FAILED: {fault}, and {report.path} was not written")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    log_to_terminal(logging.WARNING)
    return exit_status(lambda: run(args))
