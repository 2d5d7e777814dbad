#!/usr/bin/env python
"""Draw what the lambda layers of a backbone compute from an image.

The pictures show the learned position embeddings, the positions that the content lambda reads, the
weights of the context in one output, and the effective receptive field. For a network without
lambda layers, only the last is drawn.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from typing import TYPE_CHECKING

# The rest of lambda_det is imported in functions, so that --help answers at once
if TYPE_CHECKING:
    from detectron2.config import CfgNode
    from omegaconf import DictConfig

EXAMPLES = """examples, with configuration keys at the end:
  %(prog)s --config-file output/run/config.yaml --image photo.jpg --output pictures
      the best checkpoint of the run, the last lambda layer of each stage
  %(prog)s --config-file output/run/config.yaml --fresh --image photo.jpg --output pictures_fresh
      the same network with random weights
  %(prog)s --model lambda_resnet50 --weights backbone.pth --image photo.jpg --output pictures \\
      --layer res5.0.conv2 --layer 'res4.*' --position 120 300 INPUT.MIN_SIZE_TEST 640
"""
# Sizes for a backbone alone. Larger images take minutes and show no more.
_MODEL_SIZES = {"MIN_SIZE_TEST": 512, "MAX_SIZE_TEST": 800}
_PIXEL_KEYS = {"INPUT.FORMAT", "MODEL.PIXEL_MEAN", "MODEL.PIXEL_STD"}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    command = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLES, formatter_class=raw)
    add = command.add_argument
    add("--output", metavar="DIR", required=True, help="folder of the pictures")
    add("--overwrite", action="store_true", help="replace existing pictures")
    network = command.add_mutually_exclusive_group(required=True)
    text = "of a detector: YAML, or a LazyConfig, which is run"
    network.add_argument("--config-file", metavar="FILE", help=text)
    text = f"of a backbone, for images of INPUT.MIN_SIZE_TEST {_MODEL_SIZES['MIN_SIZE_TEST']}"
    network.add_argument("--model", metavar="NAME", help=text)
    weights = command.add_mutually_exclusive_group()
    text = """of the detector or the backbone; default: the best checkpoint in the folder of
        --config-file, else MODEL.WEIGHTS. With --model, the pixel settings are those recorded in
        the file"""
    weights.add_argument("--weights", metavar="FILE", help=text)
    text = """random weights, as at the start of a training, when the last norm of each block is 0
        and features depend on the shortcuts only"""
    weights.add_argument("--fresh", action="store_true", help=text)
    add("--image", metavar="FILE", required=True)
    text = "a lambda layer, or a pattern; may be repeated (default: the last of each stage)"
    add("--layer", action="append", default=[], metavar="NAME", help=text)
    text = "row and column of a pixel of the image file (default: its centre)"
    add("--position", nargs=2, type=float, metavar=("Y", "X"), help=text)
    text = "random gradients for each receptive field (default: %(default)s)"
    add("--draws", type=int, default=8, metavar="N", help=text)
    add("--seed", type=int, default=0, metavar="S", help="of random weights and gradients")
    text = "configuration keys and values; for a LazyConfig key=value"
    add("opts", nargs=argparse.REMAINDER, help=text)
    return command.parse_args(argv)


def run(args: argparse.Namespace) -> None:
    from lambda_paper.layers import draw_layers

    cfg = _network_config(args)
    weights = None if args.fresh else args.weights or _own_weights(args, cfg)
    print(f"Weights: {weights or 'random'}")
    layers, files = draw_layers(
        cfg,
        args.image,
        args.output,
        overwrite=args.overwrite,
        weights=weights,
        # A backbone by name has no configuration: use the pixel settings of the file, unless
        # the command line sets them
        file_pixels=bool(args.model) and not _PIXEL_KEYS & set(args.opts[::2]),
        layers=args.layer,
        position=args.position,
        draws=args.draws,
        seed=args.seed,
    )
    none = "The network has no lambda layers; only its receptive field is drawn."
    print(f"Lambda layers: {', '.join(layers)}" if layers else none)
    print(f"{len(files)} pictures in {args.output}")


def _network_config(args: argparse.Namespace) -> CfgNode | DictConfig:
    from lambda_det.detection import load_config
    from lambda_det.detection.task import load_any_config

    if not args.model:
        return load_any_config(args)
    own = ["MODEL.BACKBONE.NAME", "build_lambda_resnet_backbone"]
    own += ["MODEL.LAMBDA_RESNET.NAME", args.model, "MODEL.DEVICE", "cpu"]
    for key, value in _MODEL_SIZES.items():
        own += [f"INPUT.{key}", str(value)]
    return load_config(argparse.Namespace(config_file=None, opts=own + args.opts))


def _own_weights(args: argparse.Namespace, cfg: CfgNode | DictConfig) -> str | None:
    from lambda_det.detection.task import DetectionTask
    from lambda_det.training.checkpoint_files import find_checkpoint, last_checkpoint

    folder = os.path.dirname(args.config_file) if args.config_file else None
    if folder is not None and last_checkpoint(folder):
        return find_checkpoint(folder or ".")  # raises an error if the file is missing
    return DetectionTask(cfg).settings.weights or None


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    from lambda_det.errors import exit_status

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    return exit_status(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
