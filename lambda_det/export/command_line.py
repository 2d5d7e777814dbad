"""``lambda-det export``: a trained network as TorchScript, torch.export or ONNX, compared."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from lambda_det.detection.inference import Taken, add_model_flags, typed_weights
from lambda_det.detection.task import load_any_config
from lambda_det.errors import command_parser, exit_status
from lambda_det.export.networks import Network, takes_rgb
from lambda_det.export.onnx_file import OPSET
from lambda_det.export.proof import MOST
from lambda_det.export.session import Report, export_network
from lambda_det.export.sources import named_backbone, network_to_export, read_images
from lambda_det.export.triton import write_repository

EXAMPLES = """
The ending of OUTPUT says the format: .ts TorchScript, .pt2 torch.export, .onnx ONNX. Predictor and
lambda-det predict read these and the .xml that OpenVINO (ovc) makes of an .onnx.

A backbone by its name, and the backbone of a detector, with features by name:
  %(prog)s backbone.onnx --model lambda_resnet50 --weights backbone.pth
  %(prog)s backbone.onnx --config output/run/config.yaml --backbone-only

A whole detector; the config.yaml of a run's folder brings the run's best checkpoint with it. ONNX
takes an image [H, W, 3] of uint8, RGB, of any size, which it resizes:
  %(prog)s detector.onnx --config output/run/config.yaml
  %(prog)s detector.ts --images photo.jpg street.jpg --config output/run/config.yaml
  %(prog)s batches.onnx --config output/run/config.yaml --batch any
  %(prog)s for_tensorrt.onnx --config output/run/config.yaml --batch 8 --fixed 640x640 \\
      --outside normalise --masks pasted
  %(prog)s detector.pt2 --config configs/mask_rcnn_lambdaresnet50.yaml \\
      --weights model_final.pth --sizes 800x1216,1216x800 MODEL.DEVICE cpu

The file is read again and compared with the model on several sizes. Only if all agree does OUTPUT
get its name, with OUTPUT.json beside it: input, pixel settings, outputs, sizes, versions. A
detector is also evaluated on validation images of its run: an AP more than 0.1 apart is refused.

status: 0; 1 if the file did not compute the same and was removed; 2 if it could not be made
"""


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = command_parser(
        "export",
        "Write a trained backbone or detector as TorchScript, torch.export or ONNX, "
        "and compare the file with the model.",
        EXAMPLES,
    )
    parser.add_argument("output", help="file to write, ending in .ts, .pt2 or .onnx")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", metavar="RUN", help="a run's folder, or a backbone's name")
    add_model_flags(parser, source)
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
        dest="together",  # `batch` is that of trainings
        type=_batch,
        metavar="N",
        help="images that a detector's .onnx takes at once, or 'any' for any number",
    )
    parser.add_argument(
        "--fixed",
        type=_size,
        metavar="HxW",
        help="size of the images of a detector's .onnx, for runtimes that want fixed shapes",
    )
    parser.add_argument(
        "--outside",
        type=lambda text: text.split(","),
        default=(),
        metavar="WORD,..",
        help="what a detector's .onnx leaves to you, of resize, normalise (then resize, too) and "
        "nms (not that of the proposals); its metadata say what it takes",
    )
    parser.add_argument(
        "--masks",
        choices=("boxes", "pasted"),
        default="boxes",
        help="of a detector's .onnx: 28x28 or so within their boxes (default), or of the image",
    )
    parser.add_argument(
        "--triton", metavar="DIR", help="also write the .onnx as a model repository of Triton"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace OUTPUT if it is there")
    parser.add_argument("opts", nargs="*", help="configuration keys and values")
    args = parser.parse_intermixed_args(argv)
    if args.model and Path(args.model).is_dir():  # as lambda-det predict takes it
        args.config_file, args.model = str(Path(args.model, "config.yaml")), None
    if args.model and not args.weights:
        parser.error(f"--model {args.model} is no folder; a backbone of that name needs --weights")
    if args.model and (args.backbone_only or args.opts):
        parser.error("--backbone-only and configuration keys go with --config-file")
    if args.triton and not args.output.endswith(".onnx"):
        parser.error("--triton goes with an .onnx")
    forms = (args.together is not None, args.fixed, args.outside, args.masks == "pasted")
    if any(forms) and (args.model or args.backbone_only):
        parser.error("--batch, --fixed, --outside and --masks are for whole detectors")
    return args


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
    if args.model:
        network = named_backbone(args.model, args.weights)
    else:
        cfg = load_any_config(args)
        network = network_to_export(
            cfg,
            args.config_file,
            args.weights or typed_weights(args.opts),
            backbone_only=args.backbone_only,
            checkpoint=args.checkpoint,
            raw=args.raw,
            proof=args.proof,
            apart=args.apart,
            batch=args.together,
            fixed=args.fixed,
            outside=args.outside,
            pasted=args.masks == "pasted",
        )
    report = export_network(
        network, args.output, sizes=args.sizes, images=images, overwrite=args.overwrite
    )
    about = network.pixels
    print(f"weights: {Taken(about['weights'], about['step'], about['averaged'])}")
    print(describe(report))
    if network.batch is not None and report.passed:
        print(tensorrt(args.output, network))
    if args.triton and report.passed:
        print(f"Triton: {write_repository(report.path, Path(args.triton))}")
    return 0 if report.passed else 1


def describe(report: Report) -> str:
    """The result of each comparison, and the greatest error of each output."""
    lines = [f"written in {report.seconds:.0f} s: {report.size / 1e6:.1f} MB"]
    for made in report.comparisons:
        name = "x".join(map(str, made.shape))
        found = "" if made.detections is None else f", {made.detections} detections"
        said = f"error {max(made.errors.values(), default=0.0):.1e}"
        if made.undecided:
            said = "not compared, the model itself ranks them by rounding"
        elif not made.passed:
            said = f"FAILED, {made.fault or said}"
        lines.append(f"  {name}{found}: {said}")
    lines.append("greatest error of each output, over its greatest value:")
    lines += [f"  {name}: {error:.1e}" for name, error in report.errors().items()]
    if {c.detections for c in report.comparisons} == {0}:
        lines.append("note: nothing was detected and little compared; give photographs (--images)")
    if report.openvino:
        lines.append(f"note: OpenVINO {report.openvino}")
    elif report.openvino is not None and not report.proof:
        lines.append("OpenVINO computes the same")
    lines += [str(report.proof)] if report.proof else []
    if report.proof and not report.proof.passed:
        lines.append("note: on few images one box may make that; --apart AP allows for more")
    failed = f"FAILED: it does not compute what the model does, and {report.path} was not written"
    lines.append(f"verified: {report.path}" if report.passed else failed)
    return "\n".join(lines)


def tensorrt(path: str, network: Network) -> str:
    """How TensorRT makes an engine of a file for batches, and what is known of that."""
    if not network.fixed:
        return "TensorRT is told more easily what to compile if --fixed gives one size"
    sizes = (*network.fixed, 3) if takes_rgb(network.outside) else (3, *network.fixed)
    size = "x".join(map(str, sizes))
    shapes = {"min": 1, "opt": 8, "max": 8} if network.batch == 0 else {}
    flags = [f" --{k}Shapes=images:{n}x{size},sizes:{n}x2" for k, n in shapes.items()]
    return (
        f"TensorRT was not tried. The graph has opset {OPSET}, no loops or branches, and no shape "
        f"that depends on what images show:\n  trtexec --onnx={path} "
        f"--saveEngine={path.removesuffix('.onnx')}.engine{''.join(flags)}"
    )


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    return exit_status(lambda: run(args))
