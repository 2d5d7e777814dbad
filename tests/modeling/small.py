"""A small network of each design, with every sort of block that the named ones have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lambda_det.modeling import LambdaResNet
from lambda_det.modeling.specs import ALL, STAGES, ResNetSpec

DESIGNS = {"rs": "relu", "vanilla": "relu", "timm": "silu"}  # with their activations


def small_network(
    design: str = "rs", *, out_features: Sequence[str] = STAGES, **options: Any
) -> LambdaResNet:
    """Lambda layers with and without a stride, and squeeze-and-excitation with and without them.

    Args:
        design: of stem, shortcut and pooling.
        out_features: as the network takes them.
        options: of the network.
    """
    spec = ResNetSpec(
        (1, 1, 2, 1),
        design,
        lambda_blocks={"res4": (2,), "res5": ALL},
        se_stages=("res2", "res4"),
        activation=DESIGNS[design],
        width=16,
    )
    return LambdaResNet(spec, out_features=out_features, **options)
