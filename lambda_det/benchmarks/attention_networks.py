"""Lambda layers against global, axial and local self-attention: Table 4.

A ResNet-50 whose 3x3 convolutions are all replaced. The paper's memory is that of attention maps or
position embeddings alone, for 128 images; here it is what a run takes in all. Heads of attention
are 8, with which the paper's figures come out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lambda_det import LambdaLayer, create_classifier
from lambda_det.benchmarks.attention import AxialAttention, GlobalAttention, LocalAttention
from lambda_det.benchmarks.measure import BOTH, FORWARD, Case, Group
from lambda_det.benchmarks.networks import add_image_size, image_size
from lambda_det.benchmarks.options import add_common, setting_of
from lambda_det.benchmarks.session import run_groups

IMAGE_SIZE, SMALL_IMAGE_SIZE = 224, 160
HEADS = 8
BASE = "lambda layer"

# name: (network, its options), images per second on 8 TPUv3 cores and GB in the paper
LAMBDA_LAYERS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    BASE: ("resnet50_lambda_c2345", {}, "1160", "1.9"),
    "lambda layer, |k|=8": ("resnet50_lambda_k8_h4_u1", {}, "1640", "0.95"),
    "lambda layer, shared embeddings": (
        "resnet50_lambda_c2345",
        {"share_positions": True},
        "1210",
        "0.63",
    ),
    "lambda convolution, 7x7": ("resnet50_lambda_c2345", {"scope": 7}, "1100", ""),
}
# name: (a layer out of channels and map size), and the paper's figures
ATTENTION: dict[str, tuple[Callable[[int, tuple[int, int]], nn.Module], str, str]] = {
    "global self-attention": (lambda dim, side: GlobalAttention(dim, HEADS, side), "OOM", "120"),
    "axial self-attention": (lambda dim, side: AxialAttention(dim, HEADS, side), "960", "4.8"),
    "local self-attention, 7x7": (lambda dim, side: LocalAttention(dim, HEADS, 7), "440", ""),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser, batch="128 on a GPU, 8 on the CPU; --small: 1")
    add_image_size(parser, f"{IMAGE_SIZE}; --small: {SMALL_IMAGE_SIZE}")


def run(args: argparse.Namespace) -> None:
    """One group; ratios are to the lambda layer of the paper's defaults."""
    setting = setting_of(args)
    side = image_size(args, SMALL_IMAGE_SIZE if args.small else IMAGE_SIZE)
    default = 128 if setting.device.type == "cuda" else 8
    batch = args.batch or (1 if args.small else default)
    cases = []
    for name, (network, options, rate, memory) in LAMBDA_LAYERS.items():
        make = partial(make_lambda, network, batch, side, **options)
        cases.append(Case(name, make, batch, _paper(rate, memory)))
    for name, (layer, rate, memory) in ATTENTION.items():
        make = partial(make_attention, layer, batch, side)
        cases.append(Case(name, make, batch, _paper(rate, memory)))
    title = f"ResNet-50 without 3x3 convolutions, batch {batch}, {side}x{side}"
    about = {"batch": batch, "image_size": side}
    run_groups(args, setting, [Group(title, cases, (FORWARD, BOTH), BASE, about)])


def _paper(rate: str, memory: str) -> dict[str, str]:
    return {"paper: images/s": rate, "paper: GB": memory}


def make_lambda(
    name: str, batch: int, side: int, **options: Any
) -> tuple[nn.Module, tuple[Tensor]]:
    return create_classifier(name, **options), (torch.randn(batch, 3, side, side),)


def make_attention(
    layer: Callable[[int, tuple[int, int]], nn.Module], batch: int, side: int
) -> tuple[nn.Module, tuple[Tensor]]:
    """The same network with attention in the places of its lambda layers."""
    model = create_classifier("resnet50_lambda_c2345", global_context=side)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, LambdaLayer):
                channels = child.qkv.in_channels
                setattr(module, name, layer(channels, child.position.map_size))
    return model, (torch.randn(batch, 3, side, side),)
