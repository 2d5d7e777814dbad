"""The presets of projects/benchmarks/benchmark.py as tables of cases.

Each preset is a function of the options and the setting that makes groups of cases; its docstring
is the text of ``--help``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from lambda_benchmarks import data
from lambda_benchmarks.detectors import ZOO, detectron2_detector, our_detector, zoo_detector
from lambda_benchmarks.measure import BOTH, FORWARD, STEP, Case, Group, Setting
from lambda_benchmarks.runtimes import NETWORKS, RUNTIMES, run_by
from lambda_det import LambdaLayer, create_backbone
from lambda_det.config import check, one_of
from lambda_det.errors import ConfigError
from lambda_det.layers.local import IMPLEMENTATIONS

Options = argparse.Namespace


@dataclass(frozen=True)
class Preset:
    """What a preset measures, and its options.

    Attributes:
        groups: makes the groups of the options and the setting.
        options: that it follows, in addition to those of all presets.
        libraries: distributions whose versions belong beside the figures.
    """

    groups: Callable[[Options, Setting], list[Group]]
    options: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()


def image_side(args: Options, default: int, small: int) -> int:
    return args.image_size or (small if args.small else default)


def implementations(args: Options) -> list[str]:
    """The chosen names; ConfigError for unknown ones."""
    names = args.implementations or ["auto"]
    for name in names:
        check("--implementations", name, one_of("auto", *IMPLEMENTATIONS))
    return names


def check_installed(package: str) -> None:
    if find_spec(package.replace("-", "_")) is None:
        raise ConfigError(f"{package} is not installed here; pip install {package}.")


def with_images(
    create: Callable[..., nn.Module], name: str, batch: int, side: int, **options: Any
) -> tuple[nn.Module, tuple[Tensor]]:
    return create(name, **options), (torch.randn(batch, 3, side, side),)


# layer --------------------------------------------------------------------------------------------

LAYER_SIZES = [(64, 256), (64, 512), (32, 512)]  # side of the map, channels


def _lucidrains_layer(channels: int) -> nn.Module:
    from lambda_networks import LambdaLayer as Peer

    return Peer(dim=channels, dim_out=channels, r=23, dim_k=16, heads=4, dim_u=1)


def _timm_layer(channels: int) -> nn.Module:
    from timm.layers.lambda_layer import LambdaLayer as Peer

    return Peer(channels, r=23, dim_head=16, num_heads=4)


# for the name of a distribution a function that makes a layer of a number of channels
PEERS: dict[str, Callable[[int], nn.Module]] = {
    "lambda-networks": _lucidrains_layer,
    "timm": _timm_layer,
}


def make_layer(
    maker: Callable[[int], nn.Module], batch: int, side: int, channels: int
) -> tuple[nn.Module, tuple[Tensor]]:
    """The layer and a map that wants a gradient, as within a network."""
    return maker(channels), (torch.randn(batch, channels, side, side).requires_grad_(),)


def layer(args: Options, setting: Setting) -> list[Group]:
    """The whole lambda layer, with projections and norms, against the 3x3 convolution.

    The sizes are those of LambdaResNet at 1024x1024: c4 with 256 channels, the first block of c5
    with 512 channels before its pooling, and c5; |k|=16, |h|=4, |m|=23x23. Other people's layers,
    with --peer, have the same sizes.
    """
    batch, groups = args.batch or 1, []
    makers: dict[str, Callable[[int], nn.Module]] = {
        "3x3 convolution": lambda channels: nn.Conv2d(channels, channels, 3, padding=1, bias=False)
    }
    for name in implementations(args):
        makers[f"lambda layer, {name}"] = partial(LambdaLayer, implementation=name)
    for peer in args.peer or ():
        check_installed(peer)
        makers[peer] = PEERS[peer]
    for side, channels in LAYER_SIZES:
        cases = [
            Case(name, partial(make_layer, maker, batch, side, channels))
            for name, maker in makers.items()
        ]
        title = f"batch {batch}, map {side}x{side}, {channels} channels"
        groups.append(Group(title, cases, (FORWARD, BOTH)))
    return groups


# networks -----------------------------------------------------------------------------------------


def networks(args: Options, setting: Setting) -> list[Group]:
    """LambdaResNet against ResNet-RS of the same depth as backbones, at 1024x1024.

    Features of res2 to res5 without a detector's heads; a training step is forward, backward and
    SGD. Ratios are to ResNet-RS without squeeze-and-excitation.
    """
    side, batch, groups = image_side(args, 1024, 512), args.batch or 1, []
    for depth in (101,) if args.small else (101, 152):
        base, ours = f"resnet_rs{depth}", f"lambda_resnet{depth}"
        rows = [(base, base, {}), (f"{base}_se", f"{base}_se", {})]
        for name in implementations(args):
            rows.append((f"{ours}, {name}", ours, {"implementation": name}))
        if args.checkpoint_activations:
            title = f"{ours}, activation checkpointing"
            rows.append((title, ours, {"checkpoint_activations": True}))
        cases = [
            Case(title, partial(with_images, create_backbone, name, batch, side, **options), batch)
            for title, name, options in rows
        ]
        title = f"backbones of {depth} layers, batch {batch}, {side}x{side}"
        groups.append(Group(title, cases, (FORWARD, STEP)))
    return groups


# detector -----------------------------------------------------------------------------------------

DETECTORS: dict[str, list[Any]] = {
    "default settings": [],
    "predictions in bfloat16": ["TEST.PRECISION", "bfloat16"],
    "float32, channels last": ["SOLVER.AMP.ENABLED", False, "MODEL.CHANNELS_LAST", True],
    "float32, contiguous": ["SOLVER.AMP.ENABLED", False, "MODEL.CHANNELS_LAST", False],
}


def detector(args: Options, setting: Setting) -> list[Group]:
    """Whole Mask R-CNNs against Detectron2's own with a ResNet-FPN, at 1024x1024.

    Both have the heads of the paper's training, and random weights. Detectron2's is built and run
    as its train_net.py does, in float32, and gives freed memory back to the system. LambdaResNet's
    is in our default settings, whose precision depends on the device, in float32, and in float32
    with contiguous maps. A training step is forward, backward and SGD; inference ends with the
    masks of 100 objects.
    """
    side, batch, groups = image_side(args, 1024, 256), args.batch or 1, []
    device = str(setting.device)
    for depth in (50,) if args.small else (50, 101):
        make = partial(detectron2_detector, depth, batch, side, device)
        cases = [Case(f"Detectron2's ResNet-{depth}", make, batch)]
        for title, changes in DETECTORS.items():
            make = partial(our_detector, depth, changes, batch, side, device)
            cases.append(Case(f"LambdaResNet-{depth}, {title}", make, batch))
        title = f"Mask R-CNN, {depth} layers, batch {batch}, {side}x{side}"
        groups.append(Group(title, cases, (FORWARD, STEP)))
    return groups


# accelerate ---------------------------------------------------------------------------------------


def accelerated(args: Options, setting: Setting) -> list[Group]:
    """Detectron2's own detectors with ``lambda_det.accelerate``, at 800x800, on a CPU.

    Six of its model zoo with ResNet-50, one image a step, random weights, float32. Ratios are to
    the same detector without it, whose process gives freed memory back to the system.
    """
    side, groups = image_side(args, 800, 256), []
    for name in list(ZOO)[: 1 if args.small else None]:
        cases = [
            Case(title, partial(zoo_detector, name, fast, side), 1)
            for title, fast in ((f"Detectron2's {name}", False), ("accelerated", True))
        ]
        groups.append(Group(f"{name}, batch 1, {side}x{side}", cases, (FORWARD, STEP)))
    return groups


# runtimes -----------------------------------------------------------------------------------------


def runtimes(args: Options, setting: Setting) -> list[Group]:
    """Backbones and Mask R-CNNs here, and exported in ONNX Runtime and OpenVINO, at 1024x1024.

    LambdaResNet-50 and ResNet-50 with random weights, one image. Ratios are to LambdaResNet-50 as
    lambda-det predict computes it. ONNX Runtime has no bfloat16 on a CPU.
    """
    if setting.dtype == torch.float16:
        raise ConfigError("--dtype float16 is no precision of a CPU; take float32 or bfloat16.")
    side, groups = image_side(args, 1024, 256), []
    for make, names in NETWORKS.items():
        cases = []
        for runtime in RUNTIMES:
            if setting.dtype != torch.float32 and runtime == "onnxruntime":
                continue
            check_installed(runtime)
            for name in names:
                run = partial(run_by, runtime, make, name, side, setting.dtype)
                cases.append(Case(f"{name}, {runtime}", run, 1))
        groups.append(Group(f"{make.__name__}, batch 1, {side}x{side}", cases, (FORWARD,)))
    return groups


PRESETS = {
    "layer": Preset(
        layer,
        ("dtype", "channels_last", "batch", "implementations", "peer"),
        libraries=tuple(PEERS),
    ),
    "networks": Preset(
        networks,
        (
            "dtype",
            "channels_last",
            "batch",
            "image_size",
            "implementations",
            "checkpoint_activations",
        ),
    ),
    "detector": Preset(detector, ("batch", "image_size"), libraries=("detectron2",)),
    "accelerate": Preset(accelerated, ("image_size",), libraries=("detectron2",)),
    "runtimes": Preset(runtimes, ("dtype", "image_size"), libraries=tuple(RUNTIMES)[1:]),
    "data": Preset(data.groups, ("images", "annotations"), libraries=data.LIBRARIES),
}
