"""LambdaResNet against ResNet-RS of the same depth as backbones of a detector, at 1024x1024.

Features of res2 to res5 without a detector's heads; a training step is forward, backward and SGD.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from torch import Tensor, nn

from lambda_det import create_backbone
from lambda_det.benchmarks.measure import FORWARD, STEP, Case, Group
from lambda_det.benchmarks.options import add_common, setting_of
from lambda_det.benchmarks.session import run_groups
from lambda_det.errors import ConfigError
from lambda_det.layers import IMPLEMENTATIONS
from lambda_det.layers.local import check_implementation

DEPTHS = (101, 152)
SMALL_DEPTHS = (101,)
IMAGE_SIZE, SMALL_IMAGE_SIZE = 1024, 512


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser, batch="1")
    add_image_size(parser, f"{IMAGE_SIZE}; --small: {SMALL_IMAGE_SIZE}")
    add_auto(parser, "lambda layers")
    parser.add_argument(
        "--checkpoint-activations",
        action="store_true",
        help="also a LambdaResNet that keeps only each block's input for the backward pass",
    )


def add_auto(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument(
        "--implementations",
        nargs="+",
        metavar="NAME",
        default=["auto"],
        help=f"of the {what}: of auto, {', '.join(IMPLEMENTATIONS)} (auto)",
    )


def add_image_size(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--image-size", type=int, metavar="SIDE", help=f"side of the images ({default})"
    )


def image_size(args: argparse.Namespace, default: int) -> int:
    """The side asked for, or the default.

    Raises:
        ConfigError: if it is below 32, where the last maps would have no positions to speak of.
    """
    if args.image_size is None:
        return default
    if args.image_size < 32:
        raise ConfigError(f"--image-size is {args.image_size}; give 32 or more.")
    return args.image_size


def run(args: argparse.Namespace) -> None:
    """One group per depth; ratios are to ResNet-RS without squeeze-and-excitation."""
    setting = setting_of(args)
    for name in args.implementations:
        check_implementation(name)
    side = image_size(args, SMALL_IMAGE_SIZE if args.small else IMAGE_SIZE)
    batch = args.batch or 1
    groups = []
    for depth in SMALL_DEPTHS if args.small else DEPTHS:
        base = f"resnet_rs{depth}"
        cases = [
            Case(name, partial(make, name, batch, side), batch) for name in (base, f"{base}_se")
        ]
        cases += [
            Case(
                f"lambda_resnet{depth}, {name}",
                partial(make, f"lambda_resnet{depth}", batch, side, implementation=name),
                batch,
            )
            for name in dict.fromkeys(args.implementations)
        ]
        if args.checkpoint_activations:
            cases.append(
                Case(
                    f"lambda_resnet{depth}, activation checkpointing",
                    partial(
                        make, f"lambda_resnet{depth}", batch, side, checkpoint_activations=True
                    ),
                    batch,
                )
            )
        title = f"backbones of {depth} layers, batch {batch}, {side}x{side}"
        about = {"depth": depth, "batch": batch, "image_size": side}
        groups.append(Group(title, cases, (FORWARD, STEP), base=base, about=about))
    run_groups(args, setting, groups)


def make(
    name: str, batch: int, side: int, **options: str | bool
) -> tuple[nn.Module, tuple[Tensor]]:
    return create_backbone(name, **options), (torch.randn(batch, 3, side, side),)
