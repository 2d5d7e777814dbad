"""Where lambda layers stand in a ResNet, and how many: Tables 12 and 13 (13 and 14 on arXiv).

Classifiers of 1000 classes in inference and in a training step, without and with
squeeze-and-excitation.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from torch import Tensor, nn

from lambda_det import create_classifier
from lambda_det.benchmarks.measure import FORWARD, STEP, Case, Group
from lambda_det.benchmarks.networks import add_image_size, image_size
from lambda_det.benchmarks.options import add_common, setting_of
from lambda_det.benchmarks.session import run_groups
from lambda_det.modeling.specs import get_spec

# title: networks with the paper's images per second on 8 TPUv3 cores; the first one is the base
TABLES: dict[str, dict[str, int]] = {
    "ResNet-50 with lambda layers by stage": {
        "resnet50": 7240,
        "resnet50_lambda_c2": 1880,
        "resnet50_lambda_c23": 1280,
        "resnet50_lambda_c234": 1160,
        "resnet50_lambda_c2345": 1160,
        "resnet50_lambda_c345": 2200,
        "resnet50_lambda_c45": 4980,
        "resnet50_lambda_c5": 7160,
    },
    "101 layers": {
        "resnet_rs101": 4600,
        "resnet_rs101_se": 4000,
        "lambda_resnet101": 4040,
        "lambda_resnet101_c4": 2560,
    },
    "152 layers": {
        "resnet_rs152": 2780,
        "resnet_rs152_se": 2400,
        "lambda_resnet152": 2400,
        "lambda_resnet152_c4": 1480,
    },
}
SMALL_TABLES = ("ResNet-50 with lambda layers by stage", "101 layers")
SMALL_IMAGE_SIZE = 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser, batch="64 on a GPU, 8 on the CPU; --small: 1")
    add_image_size(parser, f"the paper's, 224 or 256; --small: {SMALL_IMAGE_SIZE}")


def run(args: argparse.Namespace) -> None:
    """One group per table; ratios are to the network without lambda layers."""
    setting = setting_of(args)
    default = 64 if setting.device.type == "cuda" else 8
    batch = args.batch or (1 if args.small else default)
    groups = []
    for title, rates in TABLES.items():
        if args.small and title not in SMALL_TABLES:
            continue
        base = next(iter(rates))
        side = image_size(args, SMALL_IMAGE_SIZE if args.small else get_spec(base).image_size)
        cases = []
        for name, rate in rates.items():
            columns = {
                "M params": f"{parameters(name) / 1e6:.1f}",
                "paper: ratio": f"{rates[base] / rate:.2f}",
            }
            cases.append(Case(name, partial(make, name, batch, side), batch, columns))
        title = f"{title}, batch {batch}, {side}x{side}"
        about = {"batch": batch, "image_size": side}
        groups.append(Group(title, cases, (FORWARD, STEP), base, about))
    run_groups(args, setting, groups)


def parameters(name: str) -> int:
    with torch.device("meta"):
        model = create_classifier(name)
    return sum(parameter.numel() for parameter in model.parameters())


def make(name: str, batch: int, side: int) -> tuple[nn.Module, tuple[Tensor]]:
    return create_classifier(name), (torch.randn(batch, 3, side, side),)
