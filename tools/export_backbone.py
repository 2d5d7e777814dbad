#!/usr/bin/env python
"""Make a backbone file for detectors from the checkpoint of a training; --help shows how."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lambda_det.checkpoint import extract_backbone, read_backbone, save_backbone, verify_backbone
from lambda_det.engine import load_config
from lambda_det.errors import ConfigError, exit_status
from lambda_det.modeling.weights import read_checkpoint

EXAMPLES = """examples:
  tools/export_backbone.py output/imagenet/model_best.pth output/backbone.pth
      the averaged weights, for detectors with Detectron2's default pixel settings
  tools/export_backbone.py output/imagenet/model_best.pth output/backbone.pth \\
      --verify-config configs/mask_rcnn_lambdaresnet50_pretrained.yaml
      load them into that detector, too, and compare every tensor and the features

status: 0; 1 if the file is written but could not be verified, or did not pass; 2 if it could not be
made
"""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", help="of a classifier, or of a detector with FPN")
    parser.add_argument("output", help="the backbone file, a .pth")
    parser.add_argument(
        "--weights", choices=("ema", "model"), help="averaged or raw ones; averaged if there are"
    )
    parser.add_argument(
        "--no-fold",
        action="store_true",
        help="keep the first convolution as it was trained, for RGB images divided by their std",
    )
    parser.add_argument("--verify-config", metavar="FILE", help="a detector to load the file into")
    parser.add_argument("--overwrite", action="store_true", help="replace OUTPUT if it is there")
    return parser.parse_args(argv)


def export(args: argparse.Namespace) -> int:
    cfg = None
    if args.verify_config:
        cfg = load_config(argparse.Namespace(config_file=args.verify_config, opts=[]))
    if Path(args.output).resolve() == Path(args.checkpoint).resolve():
        raise ConfigError(f"{args.output} is the checkpoint itself; give OUTPUT another name.")
    checkpoint = read_checkpoint(args.checkpoint)
    content = extract_backbone(
        checkpoint, weights=args.weights, fold_input=not args.no_fold, source=args.checkpoint
    )
    save_backbone(content, args.output, overwrite=args.overwrite)
    print(describe(args.output))
    classifier = checkpoint if isinstance(checkpoint.get("recipe"), dict) else None
    if cfg is None and classifier is None:
        print("verified: no, since only its configuration says which network it is: name that as")
        print("--verify-config FILE")
        return 1
    report = verify_backbone(args.output, cfg, checkpoint=classifier)
    where = args.verify_config or "the backbone alone"
    print(f"{'verified' if report.passed else 'FAILED'} in {where}: {report}")
    for offender in report.offenders:
        print(f"  {offender}")
    return 0 if report.passed else 1


_STATISTICS = {
    "precise": "taken afresh for these weights",
    "running": "running averages, which lag behind the weights; model_best.pth and model_final.pth "
    "have better ones",
    None: "not said by the checkpoint",
}


def describe(path: str) -> str:
    """What is in a backbone file, line by line."""
    content = read_backbone(path)
    meta, tensors = content["meta"], content["model"].values()
    options = ", ".join(f"{name} {value}" for name, value in (meta["options"] or {}).items())
    accuracy = "; ".join(
        f"{part} " + ", ".join(f"{name} {value:.2f}" for name, value in values.items())
        for part, values in meta["accuracy"].items()
    )
    if meta["input_format"] is None:
        pixels = ["as in the detector's configuration"]
    else:
        pixels = [
            f"INPUT.FORMAT {meta['input_format']}",
            f"MODEL.PIXEL_MEAN {meta['pixel_mean']}",
            f"MODEL.PIXEL_STD {meta['pixel_std']}",
        ]
    rows = {
        "file": path,
        "model": (meta["model"] or "of a detector") + (f" ({options})" if options else ""),
        "weights": "averaged (EMA)" if meta["weights"] == "ema" else "raw",
        "accuracy": accuracy or "not in the checkpoint",
        "statistics": _STATISTICS[meta["statistics"]],
        "tensors": f"{len(tensors)} of {sum(t.numel() for t in tensors) / 1e6:.2f} M values",
        "sha256": meta["sha256"],
        "pixels": ", ".join(pixels) + (" (input normalisation folded)" if meta["folded"] else ""),
    }
    return "\n".join(f"{name + ':':<12}{value}" for name, value in rows.items())


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    return exit_status(lambda: export(args))


if __name__ == "__main__":
    sys.exit(main())
