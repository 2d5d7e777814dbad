"""LambdaResNets against EfficientNets and ViT-L/16: Figure 4 and Table 5.

Inference and training steps per image, each at the size of its own images, beside the accuracy that
the papers print (ours is not measured here). EfficientNets and ViT are timm's, without weights. The
plot has time per image against accuracy, as Figure 4.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import partial
from typing import Any

import matplotlib.pyplot as plt
import timm
import torch
from torch import Tensor, nn

from lambda_det import create_classifier
from lambda_det.benchmarks import plot
from lambda_det.benchmarks.measure import FORWARD, STEP, Case, Group
from lambda_det.benchmarks.options import add_common, setting_of
from lambda_det.benchmarks.session import run_groups

# (network, side of the images, top-1 in percent). LambdaResNets: 350 epochs on ImageNet (Table 19
# on arXiv). EfficientNets: Tan and Le (2019), version 5, with AutoAugment.
FIGURE_4 = [
    ("lambda_resnet50", 128, 77.4),
    ("lambda_resnet50", 160, 79.2),
    ("lambda_resnet101", 160, 80.8),
    ("lambda_resnet101", 192, 81.9),
    ("lambda_resnet152", 192, 82.5),
    ("lambda_resnet152", 224, 83.2),
    ("lambda_resnet152", 256, 83.8),
    ("lambda_resnet270", 256, 84.2),
    ("lambda_resnet350", 256, 84.4),
    ("lambda_resnet350", 288, 84.5),
    ("lambda_resnet350", 320, 84.7),
    ("lambda_resnet420", 320, 84.9),
    ("tf_efficientnet_b0", 224, 77.1),
    ("tf_efficientnet_b1", 240, 79.1),
    ("tf_efficientnet_b2", 260, 80.1),
    ("tf_efficientnet_b3", 300, 81.6),
    ("tf_efficientnet_b4", 380, 82.9),
    ("tf_efficientnet_b5", 456, 83.6),
    ("tf_efficientnet_b6", 528, 84.0),
    ("tf_efficientnet_b7", 600, 84.3),
]
# Trained on more data than ImageNet
TABLE_5 = [
    ("lambda_resnet152", 288, 86.7),
    ("tf_efficientnet_b7", 600, 86.7),
    ("vit_large_patch16_384", 384, 87.1),
]
# How the names of a family begin
FAMILIES = {"lambda_resnet": "LambdaResNet", "tf_efficientnet_": "EfficientNet", "vit_": "ViT"}

SMALL_FIGURE_4 = [FIGURE_4[1], FIGURE_4[3], FIGURE_4[12], FIGURE_4[15]]
SMALL_TABLE_5 = [TABLE_5[0], TABLE_5[2]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser, batch="32 on a GPU, 4 on the CPU; --small: 1")


def run(args: argparse.Namespace) -> None:
    """A group for the figure and one for the table; ratios are to the first LambdaResNet."""
    setting = setting_of(args)
    default = 32 if setting.device.type == "cuda" else 4
    batch = args.batch or (1 if args.small else default)
    tables = {
        "Figure 4": SMALL_FIGURE_4 if args.small else FIGURE_4,
        "Table 5": SMALL_TABLE_5 if args.small else TABLE_5,
    }
    groups = []
    for title, networks in tables.items():
        cases = [
            Case(
                f"{name}, {side}x{side}",
                partial(make, name, batch, side),
                batch,
                {"top-1 (paper)": f"{accuracy:g}"},
            )
            for name, side, accuracy in networks
        ]
        title = f"{title}, batch {batch}"
        groups.append(Group(title, cases, (FORWARD, STEP), cases[0].name, {"batch": batch}))
    run_groups(args, setting, groups, libraries=("timm",), draw=draw)


def make(name: str, batch: int, side: int) -> tuple[nn.Module, tuple[Tensor]]:
    images = (torch.randn(batch, 3, side, side),)
    if name.startswith("lambda_"):
        return create_classifier(name), images
    return timm.create_model(name, pretrained=False), images


def draw(content: Mapping[str, Any], path: str) -> None:
    """Accuracy over milliseconds per image: a column of axes per mode, a row per group."""
    groups = content["groups"]
    modes = groups[0]["modes"]
    figure, axes = plt.subplots(
        len(groups),
        len(modes),
        figsize=(5.5 * len(modes), 4 * len(groups)),
        squeeze=False,
        constrained_layout=True,
    )
    for group, row in zip(groups, axes, strict=True):
        for mode, axis in zip(modes, row, strict=True):
            _draw_group(axis, group, mode)
    plot.save(figure, content, path)


def _draw_group(axis: plt.Axes, group: Mapping[str, Any], mode: str) -> None:
    families: dict[str, list[tuple[float, float]]] = {}
    for name, case in group["cases"].items():
        if "reason" in case[mode]:
            continue
        milliseconds = 1e3 * case[mode]["seconds"][1] / case["images"]
        point = (milliseconds, float(case["top-1 (paper)"]))
        title, start = next((t, s) for s, t in FAMILIES.items() if name.startswith(s))
        families.setdefault(title, []).append(point)
        axis.annotate(
            name.removeprefix(start), point, fontsize=5, xytext=(2, 3), textcoords="offset points"
        )
    for number, title in enumerate(FAMILIES.values()):
        if title in families:
            points = zip(*families[title], strict=True)
            axis.plot(*points, "o-", ms=3, label=title, color=f"C{number}")
    axis.set(xscale="log", xlabel="ms per image", ylabel="top-1 in the paper")
    plot.plain_log(axis.xaxis)
    axis.margins(x=0.3)  # room for the names
    axis.set_title(f"{group['title']}, {mode}", fontsize=8)
    axis.grid(alpha=0.3)
    if families:
        axis.legend(fontsize=7)
