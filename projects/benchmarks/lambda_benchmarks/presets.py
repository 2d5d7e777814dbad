"""What is compared: the presets of projects/benchmarks/benchmark.py as tables of cases.

Figures of the paper stand beside the cases that they belong to. The preset ``data``, which times
image pipelines and not modules, is in its own file.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

from lambda_benchmarks import plot
from lambda_benchmarks.detectors import default_precision, detectron2_detector, our_detector
from lambda_benchmarks.measure import (
    BOTH,
    FORWARD,
    STEP,
    Case,
    Group,
    Result,
    Setting,
    Subject,
    attempt,
)
from lambda_benchmarks.memory import kept_for_backward, limited_memory
from lambda_benchmarks.report import installed
from lambda_det import (
    LambdaLayer,
    convert_lambda_layers,
    create_backbone,
    create_classifier,
    list_models,
)
from lambda_det.distributed.memory import keep_memory
from lambda_det.errors import ConfigError
from lambda_det.layers import IMPLEMENTATIONS, local_position_output
from lambda_det.layers.local import check_implementation
from lambda_det.modeling.build import Classifier
from lambda_det.modeling.replacements import KINDS
from lambda_det.modeling.resnet import LambdaResNet
from lambda_det.modeling.specs import ResNetSpec, get_spec


@dataclass(frozen=True)
class Preset:
    """What a preset measures, and how it is shown.

    Attributes:
        groups: makes the groups of the options and the setting; raises ConfigError where an option
            has a value that cannot work.
        libraries: distributions whose versions belong beside the figures.
        draw: makes the plot of the content of the JSON file.
        finish: adds to that content, and may print, when all groups are measured.
    """

    groups: Callable[[argparse.Namespace, Setting], list[Group]]
    libraries: tuple[str, ...] = ()
    draw: Callable[[dict[str, Any], str], None] = plot.draw_ratios
    finish: Callable[[dict[str, Any], Setting], None] = lambda content, setting: None


# Options that several presets have ----------------------------------------------------------------


def batch_size(args: argparse.Namespace, setting: Setting, on_gpu: int, on_cpu: int) -> int:
    default = on_gpu if setting.device.type == "cuda" else on_cpu
    return args.batch or (1 if args.small else default)


def check_side(option: str, side: int) -> int:
    """Below 32 the last maps would have hardly any positions."""
    if side < 32:
        raise ConfigError(f"{option} is {side}; give 32 or more.")
    return side


def image_side(args: argparse.Namespace, default: int, small: int) -> int:
    if args.image_size is None:
        return small if args.small else default
    return check_side("--image-size", args.image_size)


def implementations(args: argparse.Namespace, default: Iterable[str] = ("auto",)) -> list[str]:
    """The names asked for, each once; raises ConfigError for unknown ones."""
    names = list(dict.fromkeys(default if args.implementations is None else args.implementations))
    for name in names:
        check_implementation(name)
    return names


def all_or_fastest(args: argparse.Namespace) -> list[str]:
    other_device = "compiled" if args.device.startswith("cuda") else "fused"
    left_out = {other_device, *(("depthwise", "dense") if args.small else ())}
    return [name for name in IMPLEMENTATIONS if name not in left_out]


def with_images(
    create: Callable[..., nn.Module], what: str | ResNetSpec, batch: int, side: int, **options: Any
) -> tuple[nn.Module, tuple[Tensor]]:
    return create(what, **options), (torch.randn(batch, 3, side, side),)


def sized_group(
    title: str, cases: list[Case], modes: tuple[str, ...], batch: int, side: int, **about: Any
) -> Group:
    """Cases that have the same images."""
    about = {**about, "batch": batch, "image_size": side}
    return Group(f"{title}, batch {batch}, {side}x{side}", cases, modes, about)


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


def local_groups(args: argparse.Namespace, setting: Setting) -> list[Group]:
    names = implementations(args, all_or_fastest(args))
    groups = []
    for size in SMALL_LOCAL_SIZES if args.small else LOCAL_SIZES:
        batch, (height, width), depth, scope = size
        title = f"batch {batch}, map {height}x{width}, value depth {depth}, scope {scope}x{scope}"
        cases = [Case(name, partial(make_local, size, name, setting.dtype)) for name in names]
        cases.append(Case(PRODUCT, partial(make_product, size, setting.dtype)))
        groups.append(Group(title, cases, (FORWARD, BOTH), {"size": size}))
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


# By the name of the distribution; makes a layer of so many channels
PEERS: dict[str, Callable[[int], nn.Module]] = {
    "lambda-networks": _lucidrains_layer,
    "timm": _timm_layer,
}


def convolution(channels: int) -> nn.Module:
    return nn.Conv2d(channels, channels, 3, padding=1, bias=False)


def layer_makers(names: list[str]) -> dict[str, Callable[[int], nn.Module]]:
    """The convolution and our layer in these implementations, as functions of the channels."""
    ours = {f"lambda layer, {name}": partial(LambdaLayer, implementation=name) for name in names}
    return {CONVOLUTION: convolution, **ours}


def make_layer(
    maker: Callable[[int], nn.Module], batch: int, side: int, channels: int
) -> tuple[nn.Module, tuple[Tensor]]:
    """The layer and a map that wants a gradient, as within a network."""
    return maker(channels), (torch.randn(batch, channels, side, side).requires_grad_(),)


def layer_groups(args: argparse.Namespace, setting: Setting) -> list[Group]:
    makers = layer_makers(implementations(args, all_or_fastest(args)))
    for peer in args.peer:
        if installed(peer) is None:
            raise ConfigError(
                f"--peer {peer} needs the package {peer}, which is not installed here; "
                f"pip install {peer}, or leave it out."
            )
        makers[f"{peer} {installed(peer)}"] = PEERS[peer]
    batch, groups = args.batch or 1, []
    for side, channels in LAYER_SIZES:
        cases = [Case(n, partial(make_layer, m, batch, side, channels)) for n, m in makers.items()]
        title = f"batch {batch}, map {side}x{side}, {channels} channels"
        about = {"batch": batch, "side": side, "channels": channels}
        groups.append(Group(title, cases, (FORWARD, BOTH), about))
    return groups


# attention ----------------------------------------------------------------------------------------

ATTENTION_IS_ELSEWHERE = (
    "attention networks are in projects/paper: set PYTHONPATH=projects/paper and "
    "DETECTRON2_ENV_MODULE=lambda_paper.attention"
)
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


def attention_groups(args: argparse.Namespace, setting: Setting) -> list[Group]:
    side, batch = image_side(args, 224, 160), batch_size(args, setting, 128, 8)
    cases = []
    for name, (network, options, rate, memory, accuracy) in TABLE_4.items():
        if network not in list_models():
            print(f"{name}: left out, as {ATTENTION_IS_ELSEWHERE}")
            continue
        if get_spec(network).global_context:
            options = {**options, "global_context": side}
        make = partial(with_images, create_classifier, network, batch, side, **options)
        paper = {"paper: images/s": rate, "paper: GB": memory, "paper: top-1": accuracy}
        cases.append(Case(name, make, batch, paper))
    title = "ResNet-50 without 3x3 convolutions"
    return [sized_group(title, cases, (FORWARD, BOTH), batch, side)]


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
SMALL_PLACEMENT = ("ResNet-50 with lambda layers by stage", "101 layers")


def placement_groups(args: argparse.Namespace, setting: Setting) -> list[Group]:
    batch, groups = batch_size(args, setting, 64, 8), []
    for title in SMALL_PLACEMENT if args.small else PLACEMENT:
        rates = PLACEMENT[title]
        base = next(iter(rates))
        side = image_side(args, get_spec(base).image_size, 128)
        cases = [
            Case(
                name,
                partial(with_images, create_classifier, name, batch, side),
                batch,
                {
                    "M params": f"{count_parameters(name) / 1e6:.1f}",
                    "paper: ratio": f"{rates[base] / rate:.2f}",
                },
            )
            for name, rate in rates.items()
        ]
        groups.append(sized_group(title, cases, (FORWARD, STEP), batch, side))
    return groups


def count_parameters(name: str) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in create_classifier(name).parameters())


# networks -----------------------------------------------------------------------------------------

DEPTHS, SMALL_DEPTHS = (101, 152), (101,)


def network_groups(args: argparse.Namespace, setting: Setting) -> list[Group]:
    names = implementations(args)
    side, batch, groups = image_side(args, 1024, 512), args.batch or 1, []
    for depth in SMALL_DEPTHS if args.small else DEPTHS:
        base, ours = f"resnet_rs{depth}", f"lambda_resnet{depth}"
        rows = [(base, base, {}), (f"{base}_se", f"{base}_se", {})]
        rows += [(f"{ours}, {name}", ours, {"implementation": name}) for name in names]
        if args.checkpoint_activations:
            title = f"{ours}, activation checkpointing"
            rows.append((title, ours, {"checkpoint_activations": True}))
        cases = [
            Case(title, partial(with_images, create_backbone, name, batch, side, **options), batch)
            for title, name, options in rows
        ]
        title = f"backbones of {depth} layers"
        groups.append(sized_group(title, cases, (FORWARD, STEP), batch, side, depth=depth))
    return groups


# detector -----------------------------------------------------------------------------------------

DETECTORS, SMALL_DETECTORS = (50, 101), (50,)
IN_FLOAT32 = ["SOLVER.AMP.ENABLED", False]


def detector_groups(args: argparse.Namespace, setting: Setting) -> list[Group]:
    side, batch, groups = image_side(args, 1024, 256), args.batch or 1, []
    device = str(setting.device)
    if setting.device.type == "cpu":
        keep_memory()  # as trainings do; Detectron2's gain from it here, too
    default = default_precision(50, device)
    settings = {f"default settings ({default})": []}
    for layout, channels_last in (("channels last", True), ("contiguous", False)):
        settings[f"float32, {layout}"] = [*IN_FLOAT32, "MODEL.CHANNELS_LAST", channels_last]
    for depth in SMALL_DETECTORS if args.small else DETECTORS:
        make = partial(detectron2_detector, depth, batch, side, device)
        cases = [Case(f"Detectron2's ResNet-{depth}", make, batch)]
        for title, changes in settings.items():
            make = partial(our_detector, depth, changes, batch, side, device)
            cases.append(Case(f"LambdaResNet-{depth}, {title}", make, batch))
        title = f"Mask R-CNN, {depth} layers"
        groups.append(sized_group(title, cases, (FORWARD, STEP), batch, side, depth=depth))
    return groups


# convert ------------------------------------------------------------------------------------------

CONVERTED = ("lambda_resnet26t", "lambda_resnet26rpt_256", "lambda_resnet50ts")


def convert_groups(args: argparse.Namespace, setting: Setting) -> list[Group]:
    side, batch, groups = image_side(args, 1024, 256), args.batch or 1, []
    for name in CONVERTED[:1] if args.small else CONVERTED:
        cases = [
            Case(title, partial(with_images, create, name, batch, side, img_size=side), batch)
            for title, create in (("timm's layers", create_timm), ("converted", create_converted))
        ]
        groups.append(sized_group(name, cases, (FORWARD, STEP), batch, side, network=name))
    return groups


def create_timm(name: str, *, img_size: int) -> nn.Module:
    import timm

    # The other networks take any size, and know no such option
    options = {"img_size": img_size} if "rpt" in name else {}
    return timm.create_model(name, pretrained=False, **options)


def create_converted(name: str, *, img_size: int) -> nn.Module:
    return convert_lambda_layers(create_timm(name, img_size=img_size))


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
# Tan and Le (2019), version 5, with AutoAugment
EFFICIENTNETS = [
    ("tf_efficientnet_b0", 224, 77.1),
    ("tf_efficientnet_b1", 240, 79.1),
    ("tf_efficientnet_b2", 260, 80.1),
    ("tf_efficientnet_b3", 300, 81.6),
    ("tf_efficientnet_b4", 380, 82.9),
    ("tf_efficientnet_b5", 456, 83.6),
    ("tf_efficientnet_b6", 528, 84.0),
    ("tf_efficientnet_b7", 600, 84.3),
]
LATENCY = {(f"lambda_resnet{depth}", side): time for depth, side, _, time in TABLE_18}
# (network, side of the images, top-1 or None where none is printed)
Networks = list[tuple[str, int, float | None]]
FIGURE_4: Networks = [
    *((f"lambda_resnet{depth}", side, top1) for depth, side, top1, _ in TABLE_18),
    *(
        (f"resnet_rs{depth}{ending}", side, RESNET_RS.get((depth, side), (None, None))[kind])
        for kind, ending in enumerate(("", "_se"))
        for depth, side, *_ in TABLE_18
    ),
    *EFFICIENTNETS,
]
# Trained on more data than ImageNet
TABLE_5: Networks = [
    ("lambda_resnet152", 288, 86.7),
    ("tf_efficientnet_b7", 600, 86.7),
    ("vit_large_patch16_384", 384, 87.1),
]
FAMILIES = {"Figure 4": FIGURE_4, "Table 5": TABLE_5}
SMALL_FAMILIES = {
    "Figure 4": [FIGURE_4[index] for index in (1, 3, 16, 29, 39, 42)],
    "Table 5": [TABLE_5[0], TABLE_5[2]],
}
NORMALISED = 1024  # images that times are given for


def family_groups(args: argparse.Namespace, setting: Setting) -> list[Group]:
    batch, groups = batch_size(args, setting, NORMALISED, 4), []
    for title, networks in (SMALL_FAMILIES if args.small else FAMILIES).items():
        cases = [family_case(*network, batch) for network in networks]
        title = f"{title}, batches of {batch} images, halved until they fit"
        groups.append(Group(title, cases, (FORWARD, STEP), {"batch": batch}))
    return groups


def family_case(name: str, side: int, accuracy: float | None, batch: int) -> Case:
    latency = LATENCY.get((name, side))
    return Case(
        f"{name}, {side}x{side}",
        partial(with_images, create_any_classifier, name, batch, side),
        batch,
        {
            "batch": str(batch),
            plot.ACCURACY: "" if accuracy is None else f"{accuracy:g}",
            "paper: s": "" if latency is None else f"{latency:g}",
        },
        partial(family_case, name, side, accuracy, batch // 2) if batch > 1 else None,
    )


def create_any_classifier(name: str) -> nn.Module:
    if name.startswith(("lambda_", "resnet_rs")):
        return create_classifier(name)
    import timm

    return timm.create_model(name, pretrained=False)


def add_normalised_times(content: dict[str, Any], setting: Setting) -> None:
    """Times for 1024 images beside Table 18, and both as multiples of the first case's."""
    for group in content["groups"]:
        times, rows = {}, []
        for name, case in group["cases"].items():
            rate = case[STEP].get("images_per_second")
            if rate is not None:
                times[name] = case[f"seconds for {NORMALISED} images"] = NORMALISED / rate[1]
        for name, seconds in times.items():
            case, first = group["cases"][name], next(iter(times))
            own, base = case["paper: s"], group["cases"][first]["paper: s"]
            paper = f"{float(own) / float(base):.2f}" if own and base else ""
            ratio = f"{seconds / times[first]:.2f}"
            rows.append([name, case["batch"], f"{seconds:.3g}", ratio, own, paper])
        header = ["", "batch", f"s for {NORMALISED} images", "ratio", "paper: s", "paper: ratio"]
        print(f"\n**{group['title']}**: a training step, ratios to the first\n")
        print(tabulate(rows, header, tablefmt="github", disable_numparse=True))


# hybrid -------------------------------------------------------------------------------------------

# Appendix E.2 and Table 4: what of position embeddings or attention maps, how many numbers, bytes
# of each, and the paper's figure. Table 4 counts the three layers of c2 on 56x56 positions, 128
# images and 8 heads; E.2 the eight lambda layers of c4 on 20x20 positions, 32 images and 8 heads.
COUNTED: list[tuple[str, int, int, str]] = [
    ("Table 4, lambda layer", 3 * 16 * 56**4, 4, "1.9 GB"),
    ("Table 4, lambda layer, |k|=8", 3 * 8 * 56**4, 4, "0.95 GB"),
    ("Table 4, lambda layer, shared embeddings", 16 * 56**4, 4, "0.63 GB"),
    ("Table 4, global self-attention", 3 * 128 * 8 * 56**4, 4, "120 GB"),
    ("Table 4, axial self-attention", 3 * 128 * 8 * 2 * 56**3, 4, "4.8 GB"),
    ("E.2, lambda layers", 8 * 16 * 20**4, 2, "38.4 MB"),
    ("E.2, shared embeddings", 16 * 20**4, 2, "4.8 MB"),
    ("E.2, self-attention", 8 * 32 * 8 * 20**4, 2, "0.625 GB"),
]


def hybrid_groups(args: argparse.Namespace, setting: Setting) -> list[Group]:
    name, default = ("lambda_resnet50", 160) if args.small else ("lambda_resnet420", 320)
    side, batch = image_side(args, default, default), batch_size(args, setting, 32, 1)
    spec = get_spec(name)
    shared = {"share_positions": "stage"}
    cases = [
        Case(
            title,
            partial(with_images, create_hybrid, replace(spec, **changes), batch, side, **options),
            batch,
        )
        for title, changes, options in (
            ("lambda layers", {}, {}),
            ("lambda layers, shared embeddings", {}, shared),
            ("global self-attention", {"kind": "global", "global_context": side}, {}),
        )
        if "kind" not in changes or changes["kind"] in KINDS
    ]
    title = f"{name} and the same with self-attention"
    return [sized_group(title, cases, (FORWARD, BOTH), batch, side)]


def create_hybrid(spec: ResNetSpec, **options: Any) -> Classifier:
    return Classifier(LambdaResNet(spec, num_classes=1000, **options))


def print_counted_memory(content: dict[str, Any], setting: Setting) -> None:
    """The memory of E.2 and Table 4 as the paper counts it, by formula."""
    rows = [
        [what, f"{numbers * size / 1e6:.4g}", f"{numbers * size / 2**20:.4g}", paper]
        for what, numbers, size, paper in COUNTED
    ]
    print("\nPosition embeddings and attention maps, counted as in the paper\n")
    print(tabulate(rows, ["", "MB", "MiB", "paper"], tablefmt="github", disable_numparse=True))


# size ---------------------------------------------------------------------------------------------

CHANNELS, STRIDE = 256, 16  # of the layer, in c4
SIZE_NETWORKS = ("resnet_rs101", "lambda_resnet101")
SIZES = (256, 384, 512, 768, 1024, 1536, 2048)
SMALL_LAYER_SIZES, SMALL_NETWORK_SIZES = (256, 512, 1024, 2048), (256, 384)
ELSEWHERE = "elsewhere"


def size_groups(args: argparse.Namespace, setting: Setting) -> list[Group]:
    makers = layer_makers(implementations(args))
    layer_sizes = args.image_sizes or (SMALL_LAYER_SIZES if args.small else SIZES)
    network_sizes = args.image_sizes or (SMALL_NETWORK_SIZES if args.small else SIZES)
    check_side("--image-sizes", min(layer_sizes))
    groups = []
    for side in layer_sizes:
        map_side = side // STRIDE
        cases = [Case(n, partial(make_layer, m, 1, map_side, CHANNELS)) for n, m in makers.items()]
        groups.append(size_group("layer", side, cases))
    for side in network_sizes:
        cases = [
            Case(name, partial(with_images, create_backbone, name, 1, side), images=1)
            for name in SIZE_NETWORKS
        ]
        groups.append(size_group("network", side, cases))
    return groups


def size_group(kind: str, side: int, cases: list[Case]) -> Group:
    about = {"kind": kind, "image_size": side}
    return Group(f"{kind} at {side}x{side}", cases, (BOTH,), about)


def add_memory_by_stage(content: dict[str, Any], setting: Setting) -> None:
    sides = [group["image_size"] for group in content["groups"] if group["kind"] == "network"]
    content["kept_bytes"] = {
        name: {side: kept_by_stage(name, side, setting) for side in sides} for name in SIZE_NETWORKS
    }
    for name, by_size in content["kept_bytes"].items():
        print(f"\n**{name}**: MB kept for the backward pass of one image\n")
        print(kept_table(by_size))


def kept_by_stage(name: str, side: int, setting: Setting) -> dict[str, int] | str:
    """Bytes that are kept of one image by stage and kind of block; or why they are unknown."""
    case = Case(name, partial(with_images, create_backbone, name, 1, side))
    result = Result(case)

    def count() -> dict[str, int]:
        subject = Subject(case, setting)
        subject.model.train()
        return kept_for_backward(subject.forward, stages_and_kinds(subject.model), ELSEWHERE)

    with limited_memory(setting.memory_limit):
        kept = attempt(result, [BOTH], count, setting)
    return result.reasons[BOTH] if kept is None else kept


def stages_and_kinds(model: nn.Module) -> dict[nn.Module, str]:
    """Stem and blocks of a network, by stage and by what stands in the place of the convolution."""
    found = {model.stem: "stem"}
    for name, stage in zip(model.stage_names, model.stages, strict=True):
        for block in stage:
            found[block] = f"{name}, {'lambda' if block.is_lambda else 'convolution'} blocks"
    return found


def kept_table(by_size: Mapping[int, dict[str, int] | str]) -> str:
    known = {side: kept for side, kept in by_size.items() if not isinstance(kept, str)}
    names = dict.fromkeys(name for kept in known.values() for name in kept)
    columns = {
        f"{side}x{side}": [f"{n / 1e6:.1f}" for n in (*(kept[name] for name in names), total)]
        for side, kept in known.items()
        for total in [sum(kept.values())]
    }
    columns = {"": [*names, "together"], **columns}
    table = tabulate(columns, "keys", tablefmt="github", disable_numparse=True)
    reasons = [f"- {side}x{side}: {why}" for side, why in by_size.items() if side not in known]
    return "\n".join([table, *reasons])


PRESETS = {
    "local": Preset(local_groups),
    "layer": Preset(layer_groups, libraries=tuple(PEERS)),
    "attention": Preset(attention_groups),
    "placement": Preset(placement_groups),
    "networks": Preset(network_groups),
    "detector": Preset(detector_groups, libraries=("detectron2",)),
    "convert": Preset(convert_groups, libraries=("timm",)),
    "families": Preset(
        family_groups,
        libraries=("timm",),
        draw=plot.draw_families,
        finish=add_normalised_times,
    ),
    "hybrid": Preset(hybrid_groups, finish=print_counted_memory),
    "size": Preset(size_groups, draw=plot.draw_sizes, finish=add_memory_by_stage),
}
