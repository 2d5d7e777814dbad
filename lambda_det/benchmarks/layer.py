"""The whole lambda layer, with its projections and norms, against the 3x3 convolution it replaces.

The sizes are those of LambdaResNet at 1024x1024: c4 with 256 channels, the first block of c5 with
512 channels before its pooling, and c5; |k|=16, |h|=4, |m|=23x23. Other people's layers, with
--peer, have the same sizes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from lambda_det import LambdaLayer
from lambda_det.benchmarks.local import add_implementations, implementations
from lambda_det.benchmarks.machine import installed
from lambda_det.benchmarks.measure import BOTH, FORWARD, Case, Group
from lambda_det.benchmarks.options import add_common, setting_of
from lambda_det.benchmarks.session import run_groups
from lambda_det.errors import ConfigError

# side of the map, channels
SIZES = [(64, 256), (64, 512), (32, 512)]
CONVOLUTION = "3x3 convolution"


def lucidrains_layer(channels: int) -> nn.Module:
    from lambda_networks import LambdaLayer as Peer

    return Peer(dim=channels, dim_out=channels, r=23, dim_k=16, heads=4, dim_u=1)


def timm_layer(channels: int) -> nn.Module:
    from timm.layers.lambda_layer import LambdaLayer as Peer

    return Peer(channels, r=23, dim_head=16, num_heads=4)


# By the name of the distribution; the value makes a layer of so many channels
PEERS: dict[str, Callable[[int], nn.Module]] = {
    "lambda-networks": lucidrains_layer,
    "timm": timm_layer,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser, batch="1")
    add_implementations(parser)
    parser.add_argument(
        "--peer",
        nargs="+",
        choices=PEERS,
        default=[],
        metavar="NAME",
        help=f"also measure the layer of these packages, where installed: {', '.join(PEERS)}",
    )


def run(args: argparse.Namespace) -> None:
    """One group per size; ratios are to the convolution."""
    setting, names = setting_of(args), implementations(args)
    for peer in args.peer:
        if installed(peer) is None:
            raise ConfigError(
                f"--peer {peer} needs the package {peer}, which is not installed here; "
                f"pip install {peer}, or leave it out."
            )
    makers: dict[str, Callable[[int], nn.Module]] = {CONVOLUTION: convolution}
    for name in names:
        makers[f"lambda layer, {name}"] = partial(our_layer, implementation=name)
    for peer in dict.fromkeys(args.peer):
        makers[f"{peer} {installed(peer)}"] = PEERS[peer]
    batch = args.batch or 1
    groups = [
        Group(
            f"batch {batch}, map {side}x{side}, {channels} channels",
            [
                Case(name, partial(make, maker, batch, side, channels))
                for name, maker in makers.items()
            ],
            (FORWARD, BOTH),
            base=CONVOLUTION,
            about={"batch": batch, "side": side, "channels": channels},
        )
        for side, channels in SIZES
    ]
    run_groups(args, setting, groups, libraries=tuple(PEERS))


def convolution(channels: int) -> nn.Module:
    return nn.Conv2d(channels, channels, 3, padding=1, bias=False)


def our_layer(channels: int, implementation: str) -> nn.Module:
    return LambdaLayer(channels, implementation=implementation)


def make(
    maker: Callable[[int], nn.Module], batch: int, side: int, channels: int
) -> tuple[nn.Module, tuple[Tensor]]:
    """The layer and a map that wants a gradient, as within a network."""
    return maker(channels), (torch.randn(batch, channels, side, side).requires_grad_(),)
