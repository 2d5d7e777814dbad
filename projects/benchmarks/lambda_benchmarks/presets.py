"""The presets of projects/benchmarks/benchmark.py as tables of cases.

Each preset is a function of the options and the setting that makes groups of cases; its docstring
is the text of ``--help``. Figures of the paper are beside their cases.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lambda_benchmarks import data
from lambda_benchmarks.detectors import ZOO, detectron2_detector, our_detector, zoo_detector
from lambda_benchmarks.measure import BOTH, FORWARD, STEP, Case, Group, Setting
from lambda_benchmarks.report import installed
from lambda_benchmarks.runtimes import NETWORKS, RUNTIMES, run_by
from lambda_det import (
    LambdaLayer,
    convert_lambda_layers,
    create_backbone,
    create_classifier,
    list_models,
)
from lambda_det.errors import ConfigError
from lambda_det.layers import IMPLEMENTATIONS, local_position_output
from lambda_det.layers.local import check_implementation
from lambda_det.modeling.specs import get_spec

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


def batch_size(args: Options, setting: Setting, on_gpu: int, on_cpu: int) -> int:
    default = on_gpu if setting.device.type == "cuda" else on_cpu
    return args.batch or (1 if args.small else default)


def image_side(args: Options, default: int, small: int) -> int:
    return args.image_size or (small if args.small else default)


def implementations(args: Options, default: list[str]) -> list[str]:
    """The chosen names; ConfigError for unknown ones."""
    names = args.implementations or default
    for name in names:
        check_implementation(name)
    return names


def all_or_fastest(args: Options) -> list[str]:
    other_device = "compiled" if args.device.startswith("cuda") else "fused"
    left_out = {other_device, *(("depthwise", "dense") if args.small else ())}
    return [name for name in IMPLEMENTATIONS if name not in left_out]


def with_images(
    create: Callable[..., nn.Module], name: str, batch: int, side: int, **options: Any
) -> tuple[nn.Module, tuple[Tensor]]:
    return create(name, **options), (torch.randn(batch, 3, side, side),)


# local --------------------------------------------------------------------------------------------

# batch, side of the map (height, width), value depth, side of the scope; u=1
LOCAL_SIZES = [
    (8, (8, 8), 64, 23),
    (8, (14, 14), 64, 23),
    (2, (20, 20), 64, 23),
    (8, (28, 28), 32, 23),
    (1, (13, 21), 128, 23),
    (1, (32, 32), 128, 23),
    (1, (64, 64), 64, 7),
    (1, (64, 64), 64, 23),
]
SMALL_LOCAL_SIZES = [LOCAL_SIZES[index] for index in (1, 4, 5, 7)]
HEADS, QUERY_DEPTH = 4, 16
PRODUCT = "matrix product of as many multiply-adds"


def local(args: Options, setting: Setting) -> list[Group]:
    """The implementations of the local position output, compared with each other.

    Without the projections and norms of the layer: queries, values and embedding are the inputs,
    of the dtype that is asked for. Ratios are to the first implementation. That of the matrix
    product at the end, of as many multiply-adds as the sum needs, is the share of the matrix rate
    that it reaches.
    """
    names = implementations(args, all_or_fastest(args))
    groups = []
    for size in SMALL_LOCAL_SIZES if args.small else LOCAL_SIZES:
        batch, (height, width), depth, scope = size
        title = f"batch {batch}, map {height}x{width}, value depth {depth}, scope {scope}x{scope}"
        cases = [Case(name, partial(make_local, size, name, setting.dtype)) for name in names]
        cases.append(Case(PRODUCT, partial(make_product, size, setting.dtype)))
        groups.append(Group(title, cases, (FORWARD, BOTH)))
    return groups


def make_local(
    size: tuple, implementation: str, dtype: torch.dtype
) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """The position output as a function of queries, values and embedding, with gradients of all."""
    batch, (height, width), depth, scope = size
    shapes = (
        (batch, height, width, HEADS, QUERY_DEPTH),
        (batch, height, width, depth, 1),
        (QUERY_DEPTH, 1, scope, scope),
    )
    inputs = tuple(torch.randn(shape).to(dtype).requires_grad_() for shape in shapes)
    return partial(local_position_output, implementation=implementation), inputs


def make_product(
    size: tuple, dtype: torch.dtype
) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """A product of two large matrices with the multiply-adds of the query-first position output.

    Its ratio is the share of the device's matrix rate that the base reaches, forward and backward:
    the gradients of both take twice the multiply-adds of the output. Offsets that lead out of the
    map do not count.
    """
    batch, (height, width), depth, scope = size
    reach, side = scope // 2, 512
    pairs = math.prod(
        sum(min(n, at + reach + 1) - max(0, at - reach) for at in range(n)) for n in (height, width)
    )
    rows = round(batch * pairs * HEADS * (QUERY_DEPTH + depth) / side**2)
    inputs = (torch.randn(max(rows, 1), side), torch.randn(side, side))
    return torch.mm, tuple(matrix.to(dtype).requires_grad_() for matrix in inputs)


# layer --------------------------------------------------------------------------------------------

LAYER_SIZES = [(64, 256), (64, 512), (32, 512)]  # side of the map, channels
CONVOLUTION = "3x3 convolution"


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


def convolution(channels: int) -> nn.Module:
    return nn.Conv2d(channels, channels, 3, padding=1, bias=False)


def layer_cases(names: list[str], batch: int, side: int, channels: int) -> list[Case]:
    """The convolution, our layer in these implementations, and these packages' layers."""
    makers: dict[str, Callable[[int], nn.Module]] = {CONVOLUTION: convolution}
    for name in names:
        if name in PEERS:
            makers[f"{name} {installed(name)}"] = PEERS[name]
        else:
            makers[f"lambda layer, {name}"] = partial(LambdaLayer, implementation=name)
    return [
        Case(name, partial(make_layer, maker, batch, side, channels))
        for name, maker in makers.items()
    ]


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
    names, batch = implementations(args, all_or_fastest(args)), args.batch or 1
    for peer in args.peer or ():
        if installed(peer) is None:
            raise ConfigError(f"--peer {peer} is not installed here; pip install {peer}.")
        names = [*names, peer]
    return [
        Group(
            f"batch {batch}, map {side}x{side}, {channels} channels",
            layer_cases(names, batch, side, channels),
            (FORWARD, BOTH),
        )
        for side, channels in LAYER_SIZES
    ]


# attention ----------------------------------------------------------------------------------------

# Table 4's rows. name: (network, its options), then in the paper images per second on 8 TPUv3
# cores, GB of a batch of 128, and top-1
TABLE_4: dict[str, tuple[str, dict[str, Any], str, str, str]] = {
    "lambda layer": ("resnet50_lambda_c2345", {}, "1160", "1.9", "78.4"),
    "lambda layer, |k|=8": ("resnet50_lambda_k8_h4_u1", {}, "1640", "0.95", "77.9"),
    "lambda layer, shared embeddings": (
        "resnet50_lambda_c2345",
        {"share_positions": "size"},
        "1210",
        "0.63",
        "78.0",
    ),
    "lambda convolution, 7x7": ("resnet50_lambda_c2345", {"scope": 7}, "1100", "", "78.1"),
    "global self-attention": ("resnet50_global_attention", {}, "OOM", "120", "OOM"),
    "axial self-attention": ("resnet50_axial_attention", {}, "960", "4.8", "77.5"),
    "local self-attention, 7x7": ("resnet50_local_attention", {}, "440", "", "77.4"),
}


def attention(args: Options, setting: Setting) -> list[Group]:
    """Lambda layers against global, axial and local self-attention: Table 4.

    A ResNet-50 whose 3x3 convolutions are all replaced. The paper's memory is that of attention
    maps or position embeddings alone, of all 16 layers for 128 images, in GiB; here it is what a
    run takes in all. Heads of attention are 8, with which the paper's figures come out. The rows of
    self-attention need PYTHONPATH=projects/paper and DETECTRON2_ENV_MODULE=lambda_paper.attention
    in the environment.
    """
    side, batch = image_side(args, 224, 160), batch_size(args, setting, 128, 8)
    cases = []
    for name, (network, options, rate, memory, accuracy) in TABLE_4.items():
        if network not in list_models():
            print(f"{name}: left out; --preset attention --help says what it needs")
            continue
        if get_spec(network).global_context:
            options = {**options, "global_context": side}
        make = partial(with_images, create_classifier, network, batch, side, **options)
        paper = {"paper: images/s": rate, "paper: GB": memory, "paper: top-1": accuracy}
        cases.append(Case(name, make, batch, paper))
    title = f"ResNet-50 without 3x3 convolutions, batch {batch}, {side}x{side}"
    return [Group(title, cases, (FORWARD, BOTH))]


# placement ----------------------------------------------------------------------------------------

# title: networks with the paper's images per second on 8 TPUv3 cores
PLACEMENT: dict[str, dict[str, int]] = {
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


def placement(args: Options, setting: Setting) -> list[Group]:
    """Where lambda layers stand in a ResNet, and how many: Tables 12 and 13.

    Classifiers of 1000 classes in inference and in a training step, without and with
    squeeze-and-excitation; ratios are to the network without lambda layers. (Tables 13 and 14 on
    arXiv.)
    """
    batch, groups = batch_size(args, setting, 64, 8), []
    for title, rates in list(PLACEMENT.items())[: 2 if args.small else None]:
        base = next(iter(rates))
        side = image_side(args, get_spec(base).image_size, 128)
        cases = [
            Case(
                name,
                partial(with_images, create_classifier, name, batch, side),
                batch,
                {"paper: ratio": f"{rates[base] / rate:.2f}"},
            )
            for name, rate in rates.items()
        ]
        groups.append(Group(f"{title}, batch {batch}, {side}x{side}", cases, (FORWARD, STEP)))
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
        for name in implementations(args, ["auto"]):
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
            if runtime != "lambda_det" and installed(runtime) is None:
                raise ConfigError(f"{runtime} is not installed here; pip install {runtime}.")
            for name in names:
                run = partial(run_by, runtime, make, name, side, setting.dtype)
                cases.append(Case(f"{name}, {runtime}", run, 1))
        groups.append(Group(f"{make.__name__}, batch 1, {side}x{side}", cases, (FORWARD,)))
    return groups


# convert ------------------------------------------------------------------------------------------

CONVERTED = ("lambda_resnet26t", "lambda_resnet26rpt_256", "lambda_resnet50ts")


def convert(args: Options, setting: Setting) -> list[Group]:
    """The gain of convert_lambda_layers for timm's three lambda ResNets, at 1024x1024.

    Whole classifiers with random weights: timm's own layers, and the same network with ours in
    their places. Inference, and a training step of forward, backward and SGD. Ratios are to timm's.
    lambda_resnet26rpt_256 is made for images of that size here, as its embeddings span the whole
    map; timm's memory for them grows with the square of the positions.
    """
    side, batch, groups = image_side(args, 1024, 256), args.batch or 1, []
    for name in CONVERTED[:1] if args.small else CONVERTED:
        # the other networks take any size, and have no such option
        options = {"img_size": side} if "rpt" in name else {}
        cases = [
            Case(title, partial(with_images, create, name, batch, side, **options), batch)
            for title, create in (("timm's layers", create_timm), ("converted", create_converted))
        ]
        groups.append(Group(f"{name}, batch {batch}, {side}x{side}", cases, (FORWARD, STEP)))
    return groups


def create_timm(name: str, **options: Any) -> nn.Module:
    import timm

    return timm.create_model(name, pretrained=False, **options)


def create_converted(name: str, **options: Any) -> nn.Module:
    return convert_lambda_layers(create_timm(name, **options))


# families -----------------------------------------------------------------------------------------

# Table 18: (depth, side of the images, LambdaResNet's top-1 in percent after 350 epochs, seconds of
# a training step of 1024 images on 8 TPUv3 cores)
TABLE_18: list[tuple[int, int, float | None, float]] = [
    (50, 128, 77.4, 0.058),
    (50, 160, 79.2, 0.089),
    (101, 160, 80.8, 0.14),
    (101, 192, 81.9, 0.20),
    (152, 192, 82.5, 0.28),
    (152, 224, 83.2, 0.38),
    (152, 256, 83.8, 0.49),
    (152, 288, None, 0.63),
    (270, 256, 84.2, 0.91),
    (350, 256, 84.4, 1.16),
    (350, 288, 84.5, 1.48),
    (350, 320, 84.7, 1.91),
    (420, 320, 84.9, 2.25),
]
# The points of ResNet-RS whose accuracy is printed, without and with squeeze-and-excitation: Table
# 13, and the text on Figure 4
RESNET_RS = {(152, 256): (82.5, 83.0), (420, 320): (84.0, 84.25)}
# (network, side of the images, top-1 and seconds or None where none are printed)
Networks = list[tuple[str, int, float | None, float | None]]
FIGURE_4: Networks = [
    *((f"lambda_resnet{depth}", side, top1, time) for depth, side, top1, time in TABLE_18),
    *(
        (f"resnet_rs{depth}{ending}", side, RESNET_RS.get((depth, side), (None, None))[kind], None)
        for kind, ending in enumerate(("", "_se"))
        for depth, side, *_ in TABLE_18
    ),
    # Tan and Le (2019), version 5, with AutoAugment
    *(
        (f"tf_efficientnet_b{number}", side, top1, None)
        for number, (side, top1) in enumerate(
            (
                *((224, 77.1), (240, 79.1), (260, 80.1), (300, 81.6)),
                *((380, 82.9), (456, 83.6), (528, 84.0), (600, 84.3)),
            )
        )
    ),
]
# Trained on more data than ImageNet
TABLE_5: Networks = [
    ("lambda_resnet152", 288, 86.7, 0.63),
    ("tf_efficientnet_b7", 600, 86.7, None),
    ("vit_large_patch16_384", 384, 87.1, None),
]
FAMILIES = {"Figure 4": FIGURE_4, "Table 5": TABLE_5}
SMALL_FAMILIES = {
    "Figure 4": [FIGURE_4[index] for index in (1, 3, 16, 29, 39, 42)],
    "Table 5": [TABLE_5[0], TABLE_5[2]],
}


def families(args: Options, setting: Setting) -> list[Group]:
    """LambdaResNets, ResNet-RS, EfficientNets, ViT-L/16: Figure 4, Tables 5 and 18.

    Inference and training steps, each at the size of its own images, beside the accuracy that the
    papers print (ours is not measured here; most points of ResNet-RS are not printed), and the
    images of a training step in a second on the paper's 8 TPUv3 cores. As in Appendix F.3, the
    batch of 1024 is halved until it fits into the memory, and times are scaled to 1024 images.
    EfficientNets and ViT are timm's, without weights.
    """
    batch, groups = batch_size(args, setting, 1024, 4), []
    for title, rows in (SMALL_FAMILIES if args.small else FAMILIES).items():
        cases = []
        for name, side, accuracy, seconds in rows:
            ours = name.startswith(("lambda_", "resnet_rs"))
            create = create_classifier if ours else create_timm
            paper = {
                "paper: top-1": "" if accuracy is None else f"{accuracy:g}",
                "paper: images/s": "" if seconds is None else f"{1024 / seconds:.0f}",
            }
            make = partial(with_images, create, name, side=side)
            cases.append(halving(f"{name}, {side}x{side}", make, batch, paper))
        groups.append(Group(f"{title}, times for {batch} images", cases, (FORWARD, STEP)))
    return groups


def halving(
    name: str,
    make: Callable[..., tuple[nn.Module, tuple[Tensor]]],
    batch: int,
    columns: dict[str, str],
) -> Case:
    """A case whose batch is halved where the memory ends; ``make`` takes the batch."""
    smaller = partial(halving, name, make, batch // 2, columns) if batch > 1 else None
    return Case(name, partial(make, batch=batch), batch, columns, smaller)


# size ---------------------------------------------------------------------------------------------

STRIDE, CHANNELS = 16, 256  # of the layer, in c4
SIZE_NETWORKS = ("resnet_rs101", "lambda_resnet101")
SIZES, SMALL_SIZES = (256, 384, 512, 768, 1024, 1536, 2048), (256, 384)


def size(args: Options, setting: Setting) -> list[Group]:
    """Cost against the size of the images: of a layer, and of a network.

    The layer stands in c4, so its map has a sixteenth of the image's side, and 256 channels.
    Forward and backward, batch 1.
    """
    names, groups = implementations(args, ["auto"]), []
    for side in args.image_sizes or (SMALL_SIZES if args.small else SIZES):
        cases = layer_cases(names, 1, side // STRIDE, CHANNELS)
        groups.append(Group(f"layer at {side}x{side}", cases, (BOTH,)))
        cases = [
            Case(name, partial(with_images, create_backbone, name, 1, side), 1)
            for name in SIZE_NETWORKS
        ]
        groups.append(Group(f"network at {side}x{side}", cases, (BOTH,)))
    return groups


PRESETS = {
    "local": Preset(local, ("dtype", "implementations")),
    "layer": Preset(
        layer,
        ("dtype", "channels_last", "batch", "implementations", "peer"),
        libraries=tuple(PEERS),
    ),
    "attention": Preset(attention, ("dtype", "channels_last", "batch", "image_size")),
    "placement": Preset(placement, ("dtype", "channels_last", "batch", "image_size")),
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
    "convert": Preset(
        convert, ("dtype", "channels_last", "batch", "image_size"), libraries=("timm",)
    ),
    "families": Preset(families, ("dtype", "channels_last", "batch"), libraries=("timm",)),
    "size": Preset(size, ("dtype", "channels_last", "implementations", "image_sizes")),
    "data": Preset(data.groups, ("images", "annotations"), libraries=data.LIBRARIES),
}
