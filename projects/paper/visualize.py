#!/usr/bin/env python
"""Draw training samples, results beside the ground truth, and what lambda layers compute."""

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

    from lambda_paper.album import Album

EXAMPLES = """examples:
  %(prog)s samples --config-file configs/mask_rcnn_lambdaresnet50.yaml --output pictures
  %(prog)s results --results output/run/inference/coco_instances_results.json \\
      --dataset coco_2017_val --worst-first --output pictures
  %(prog)s layers --config-file output/run/config.yaml --image photo.jpg --output pictures
  %(prog)s SUBCOMMAND --help
"""

SAMPLES = """Draw training samples after augmentation, as the model sees them: boxes, masks,
keypoints, semantic classes and padding. The same seed gives the same pictures."""
SAMPLES_EXAMPLES = """examples, with configuration keys at the end:
  %(prog)s --config-file configs/mask_rcnn_lambdaresnet50.yaml --limit 20 --output pictures
  %(prog)s --config-file configs/mask_rcnn_lambdaresnet50.yaml \\
      --train-json mine.json --train-images mine/ --output pictures INPUT.LSJ.MIN_SCALE 0.5
"""

RESULTS = """Draw the predictions of a results file (inference/coco_instances_results.json of an
evaluation) beside the ground truth, with counts at an IoU of 0.5."""
RESULTS_EXAMPLES = """examples:
  %(prog)s --results output/run/inference/coco_instances_results.json \\
      --dataset coco_2017_val --output pictures
  %(prog)s --results output/mine/inference/coco_instances_results.json \\
      --test-json mine.json --test-images mine/ --worst-first --output pictures
"""

LAYERS = """Draw what the lambda layers of a backbone compute from an image: the learned position
embeddings, the positions that the content lambda reads, the weights of the context in one output,
and the effective receptive field. Of a network without lambda layers, only the last is drawn."""
LAYERS_EXAMPLES = """examples, with configuration keys at the end:
  %(prog)s --config-file output/run/config.yaml --image photo.jpg --output pictures
      the best checkpoint of the run, the last lambda layer of each stage
  %(prog)s --config-file output/run/config.yaml --fresh --image photo.jpg --output pictures_fresh
      the same network with random weights
  %(prog)s --model lambda_resnet50 --weights backbone.pth --image photo.jpg --output pictures \\
      --layer res5.0.conv2 --layer 'res4.*' --position 120 300 INPUT.MIN_SIZE_TEST 640
"""
# Sizes for a backbone alone. Larger images take minutes and show no more.
_MODEL_SIZES = {"MIN_SIZE_TEST": 512, "MAX_SIZE_TEST": 800}
_KINDS = ": YAML, or a LazyConfig, which is run"
_OPTS = "configuration keys and values; for a LazyConfig key=value"
_PIXEL_KEYS = {"INPUT.FORMAT", "MODEL.PIXEL_MEAN", "MODEL.PIXEL_STD"}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = _describe(argparse.ArgumentParser, __doc__, EXAMPLES)
    commands = parser.add_subparsers(dest="command", metavar="SUBCOMMAND", required=True)
    for name, (description, examples, add_flags) in _SUBCOMMANDS.items():
        first = description.split(":")[0].split(" (")[0].replace("\n", " ").rstrip(".")
        command = _describe(
            commands.add_parser, description, examples, name=name, help=first[0].lower() + first[1:]
        )
        _add_common_flags(command)
        add_flags(command)
    return parser.parse_args(argv)


def _add_common_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("--output", metavar="DIR", required=True, help="folder of the pictures")
    command.add_argument("--overwrite", action="store_true", help="replace existing pictures")
    command.add_argument(
        "--tensorboard",
        action="store_true",
        help="also write the pictures to a TensorBoard event file in DIR",
    )


def _add_samples_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--config-file",
        metavar="FILE",
        required=True,
        help=f"of the training{_KINDS}",
    )
    command.add_argument("--train-json", metavar="FILE", help="annotations of the data set")
    command.add_argument("--train-images", metavar="DIR", help="folder of their images")
    command.add_argument("--limit", type=int, default=8, metavar="N", help="samples (%(default)s)")
    command.add_argument("--seed", type=int, default=0, metavar="S", help="(default: %(default)s)")
    command.add_argument("opts", nargs=argparse.REMAINDER, help=_OPTS)


def _add_results_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("--results", metavar="FILE", required=True, help="file of an evaluation")
    command.add_argument("--dataset", metavar="NAME", help="the evaluated data set, registered")
    command.add_argument("--test-json", metavar="FILE", help="or its annotations in COCO's format")
    command.add_argument("--test-images", metavar="DIR", help="and the folder of their images")
    command.add_argument(
        "--score-threshold",
        type=float,
        default=0.5,
        metavar="S",
        help="draw predictions of at least this score (default: %(default)s)",
    )
    command.add_argument(
        "--limit", type=int, default=20, metavar="N", help="most images (default: %(default)s)"
    )
    command.add_argument(
        "--worst-first",
        action="store_true",
        help="start with the images with the largest share of errors",
    )


def _add_layers_flags(command: argparse.ArgumentParser) -> None:
    network = command.add_mutually_exclusive_group(required=True)
    network.add_argument("--config-file", metavar="FILE", help=f"of a detector{_KINDS}")
    network.add_argument(
        "--model",
        metavar="NAME",
        help="name of a backbone, which gets images of INPUT.MIN_SIZE_TEST "
        f"{_MODEL_SIZES['MIN_SIZE_TEST']}",
    )
    weights = command.add_mutually_exclusive_group()
    weights.add_argument(
        "--weights",
        metavar="FILE",
        help="of the detector or the backbone; default: the best checkpoint in the folder of "
        "--config-file, else MODEL.WEIGHTS. With --model, the pixel settings are those recorded in "
        "the file",
    )
    weights.add_argument(
        "--fresh",
        action="store_true",
        help="random weights, as at the start of a training, when the last norm of each block is 0 "
        "and features depend on the shortcuts only",
    )
    command.add_argument("--image", metavar="FILE", required=True)
    command.add_argument(
        "--layer",
        action="append",
        default=[],
        metavar="NAME",
        help="a lambda layer, or a pattern for several; may be repeated (default: the last of each "
        "stage)",
    )
    command.add_argument(
        "--position",
        nargs=2,
        type=float,
        metavar=("Y", "X"),
        help="row and column of a pixel of the image file (default: its centre)",
    )
    command.add_argument(
        "--draws",
        type=int,
        default=8,
        metavar="N",
        help="random gradients for each receptive field (default: %(default)s)",
    )
    command.add_argument(
        "--seed", type=int, default=0, metavar="S", help="of random weights and gradients"
    )
    command.add_argument("opts", nargs=argparse.REMAINDER, help=_OPTS)


_SUBCOMMANDS = {
    "samples": (SAMPLES, SAMPLES_EXAMPLES, _add_samples_flags),
    "results": (RESULTS, RESULTS_EXAMPLES, _add_results_flags),
    "layers": (LAYERS, LAYERS_EXAMPLES, _add_layers_flags),
}


def _describe(make, description: str, examples: str, **more) -> argparse.ArgumentParser:
    return make(
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        **more,
    )


def run(args: argparse.Namespace) -> None:
    from lambda_paper.album import Album

    with Album(
        args.output, overwrite=args.overwrite, tensorboard=args.tensorboard, group=args.command
    ) as album:
        _COMMANDS[args.command](args, album)
    count = len(album.written)
    print(f"{'1 picture' if count == 1 else f'{count} pictures'} in {args.output}")


def _samples(args: argparse.Namespace, album: Album) -> None:
    from lambda_det.detection.task import load_any_config
    from lambda_paper.samples import draw_samples

    draw_samples(load_any_config(args), album, limit=args.limit, seed=args.seed)


def _results(args: argparse.Namespace, album: Album) -> None:
    from lambda_det.detection import load_config
    from lambda_det.detection.data import register_json_datasets
    from lambda_det.errors import ConfigError
    from lambda_det.report import draw_results

    own = args.test_json or args.test_images
    if bool(own) == bool(args.dataset):
        raise ConfigError(
            "Give the data set that was evaluated: either --dataset NAME, or --test-json FILE with "
            "--test-images DIR."
        )
    dataset = args.dataset
    if own:
        cfg = load_config(argparse.Namespace(config_file=None, opts=[], **_data_flags(args)))
        register_json_datasets(cfg)
        (dataset,) = cfg.DATASETS.TEST
    counts = draw_results(
        args.results,
        dataset,
        album,
        score_threshold=args.score_threshold,
        limit=args.limit,
        worst_first=args.worst_first,
    )
    print(
        f"{counts.found} objects found, {counts.missed} missed, {counts.false} false predictions "
        f"at a score of {args.score_threshold:g}"
    )


def _data_flags(args: argparse.Namespace) -> dict[str, str | None]:
    return {"test_json": args.test_json, "test_images": args.test_images}


def _layers(args: argparse.Namespace, album: Album) -> None:
    from lambda_paper.layers import draw_layers

    cfg = _network_config(args)
    weights = None if args.fresh else args.weights or _own_weights(args, cfg)
    print(f"Weights: {weights or 'random'}")
    layers = draw_layers(
        cfg,
        args.image,
        album,
        weights=weights,
        # A backbone by name has no configuration: use the pixel settings of the file, unless
        # the command line sets them
        file_pixels=bool(args.model) and not _PIXEL_KEYS & set(args.opts[::2]),
        layers=args.layer,
        position=args.position,
        draws=args.draws,
        seed=args.seed,
    )
    if layers:
        print(f"Lambda layers: {', '.join(layers)}")
    else:
        print("The network has no lambda layers; only its receptive field is drawn.")


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
    from lambda_det.export.sources import find_checkpoint
    from lambda_det.training.checkpoint_files import last_checkpoint

    folder = os.path.dirname(args.config_file) if args.config_file else None
    if folder is not None and last_checkpoint(folder):
        return find_checkpoint(folder or ".")  # raises an error if the file is missing
    return DetectionTask(cfg).settings.weights or None


_COMMANDS = {"samples": _samples, "results": _results, "layers": _layers}


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    from lambda_det.errors import exit_status

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    return exit_status(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
