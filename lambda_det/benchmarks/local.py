"""The implementations of the local position output, compared with each other.

Without the projections and norms of the layer: queries, values and embedding go in as they are, of
the dtype that is asked for.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from lambda_det.benchmarks.measure import BOTH, FORWARD, Case, Group
from lambda_det.benchmarks.options import DTYPES, add_common, setting_of
from lambda_det.benchmarks.session import run_groups
from lambda_det.layers import IMPLEMENTATIONS, local_position_output
from lambda_det.layers.local import check_implementation

# batch, side of the map (height, width), value depth, side of the scope; k=16, h=4, u=1
SIZES = [
    (8, (8, 8), 64, 23),
    (8, (14, 14), 64, 23),
    (2, (20, 20), 64, 23),
    (8, (28, 28), 32, 23),
    (1, (13, 21), 128, 23),
    (1, (32, 32), 128, 23),
    (1, (64, 64), 64, 7),
    (1, (64, 64), 64, 23),
]
SMALL = [SIZES[1], SIZES[4], SIZES[5], SIZES[7]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser, channels_last=False)
    add_implementations(parser)


def add_implementations(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--implementations",
        nargs="+",
        metavar="NAME",
        default=None,
        help=f"of auto, {', '.join(IMPLEMENTATIONS)} (all of the device; --small: without the "
        "slowest)",
    )


def implementations(args: argparse.Namespace) -> list[str]:
    """The names asked for, each once.

    Raises:
        ConfigError: if there is no such implementation.
    """
    names = args.implementations
    if names is None:
        left_out = ["compiled" if args.device.startswith("cuda") else "fused"]  # its kernels
        if args.small:
            left_out += ["depthwise", "dense"]
        names = [name for name in IMPLEMENTATIONS if name not in left_out]
    for name in names:
        check_implementation(name)
    return list(dict.fromkeys(names))


def run(args: argparse.Namespace) -> None:
    """One group per size; ratios are to the first implementation."""
    names, setting = implementations(args), setting_of(args)
    dtype = DTYPES[args.dtype]
    groups = [
        Group(
            title_of(size),
            [Case(name, partial(make, size, name, dtype)) for name in names],
            (FORWARD, BOTH),
            base=names[0],
            about={"size": size},
        )
        for size in (SMALL if args.small else SIZES)
    ]
    # Autocast has nothing to do here, since there are no projections
    run_groups(args, replace(setting, autocast=False), groups)


def title_of(size: tuple) -> str:
    batch, (height, width), value_depth, scope = size
    return f"batch {batch}, map {height}x{width}, value depth {value_depth}, scope {scope}x{scope}"


def make(
    size: tuple, implementation: str, dtype: torch.dtype
) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """The sum as a function of queries, values and embedding, which all want gradients."""
    batch, (height, width), value_depth, scope = size

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape).to(dtype).requires_grad_()

    inputs = (
        draw(batch, height, width, 4, 16),
        draw(batch, height, width, value_depth, 1),
        draw(16, 1, scope, scope),
    )
    return partial(local_position_output, implementation=implementation), inputs
