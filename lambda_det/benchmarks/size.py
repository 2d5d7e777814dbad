"""Cost against the size of the images, from 256 to 2048: a layer, a network, and its memory.

The layer stands in c4, so its map has a sixteenth of the image's side, and 256 channels. Forward
and backward, batch 1. The memory by stage is what the forward pass keeps for the backward pass, of
one image.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import partial
from typing import Any

import matplotlib.pyplot as plt
import torch
from tabulate import tabulate
from torch import nn

from lambda_det import create_backbone
from lambda_det.benchmarks import layer, networks, plot
from lambda_det.benchmarks.measure import BOTH, Case, Group, Result, Setting, Subject, attempt
from lambda_det.benchmarks.memory import kept_for_backward, limited_memory
from lambda_det.benchmarks.options import add_common, setting_of
from lambda_det.benchmarks.session import run_groups, say
from lambda_det.errors import ConfigError
from lambda_det.layers.local import check_implementation

CHANNELS, STRIDE = 256, 16
NETWORKS = ("resnet_rs101", "lambda_resnet101")
LAYER_SIZES = (256, 384, 512, 768, 1024, 1536, 2048)
SMALL_LAYER_SIZES = (256, 512, 1024, 2048)
NETWORK_SIZES = LAYER_SIZES
SMALL_NETWORK_SIZES = (256, 384)
ELSEWHERE = "elsewhere"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser)
    parser.add_argument(
        "--image-sizes",
        nargs="+",
        type=int,
        metavar="SIDE",
        help="of layers and networks (256 to 2048; --small: networks 256 and 384)",
    )
    networks.add_auto(parser, "layer alone")


def run(args: argparse.Namespace) -> None:
    """A group per size, of layers and then of networks; then memory by stage."""
    setting = setting_of(args)
    for name in args.implementations:
        check_implementation(name)
    layer_sizes = args.image_sizes or (SMALL_LAYER_SIZES if args.small else LAYER_SIZES)
    network_sizes = args.image_sizes or (SMALL_NETWORK_SIZES if args.small else NETWORK_SIZES)
    if min(layer_sizes) < 32:
        raise ConfigError(f"--image-sizes has {min(layer_sizes)}; give 32 or more.")
    groups = [layer_group(side, args.implementations) for side in layer_sizes]
    groups += [network_group(side) for side in network_sizes]

    def finish(content: dict[str, Any]) -> None:
        content["kept_bytes"] = {
            name: {side: kept_by_stage(name, side, setting) for side in network_sizes}
            for name in NETWORKS
        }
        for name, by_size in content["kept_bytes"].items():
            print(f"\n**{name}**: MB kept for the backward pass of one image\n")
            print(kept_table(by_size))

    run_groups(args, setting, groups, draw=draw, finish=finish)


def layer_group(side: int, names: list[str]) -> Group:
    makers = {layer.CONVOLUTION: layer.convolution}
    for name in names:
        makers[f"lambda layer, {name}"] = partial(layer.our_layer, implementation=name)
    cases = [
        Case(name, partial(layer.make, maker, 1, side // STRIDE, CHANNELS))
        for name, maker in makers.items()
    ]
    title = f"layer at {side}x{side}"
    return Group(title, cases, (BOTH,), layer.CONVOLUTION, {"kind": "layer", "image_size": side})


def network_group(side: int) -> Group:
    cases = [Case(name, partial(networks.make, name, 1, side), 1) for name in NETWORKS]
    title = f"network at {side}x{side}"
    return Group(title, cases, (BOTH,), NETWORKS[0], {"kind": "network", "image_size": side})


def kept_by_stage(name: str, side: int, setting: Setting) -> dict[str, int] | str:
    """Bytes that are kept of one image by stage and kind of block; a reason where it can't be."""
    say(f"memory by stage: {name} at {side}x{side}")
    case = Case(name, lambda: (create_backbone(name), (torch.randn(1, 3, side, side),)))
    result = Result(case)

    def count() -> dict[str, int]:
        subject = Subject(case, setting)
        subject.model.train()
        return kept_for_backward(subject.forward, places(subject.model), ELSEWHERE)

    with limited_memory(setting.memory_limit):
        kept = attempt(result, BOTH, count, setting)
    return result.reasons[BOTH] if kept is None else kept


def places(model: nn.Module) -> dict[nn.Module, str]:
    """Stem and blocks of a network, by stage and by what stands in the place of the convolution."""
    found = {model.stem: "stem"}
    for name, stage in zip(model.stage_names, model.stages, strict=True):
        for block in stage:
            found[block] = f"{name}, {'lambda' if block.is_lambda else 'convolution'} blocks"
    return found


def kept_table(by_size: Mapping[int, dict[str, int] | str]) -> str:
    known = {side: kept for side, kept in by_size.items() if not isinstance(kept, str)}
    names = list(dict.fromkeys(name for kept in known.values() for name in kept))
    rows = [
        [name, *(f"{known[side][name] / 1e6:.1f}" if side in known else "-" for side in by_size)]
        for name in names
    ]
    sums = [f"{sum(known[side].values()) / 1e6:.1f}" if side in known else "-" for side in by_size]
    header = ["", *(f"{side}x{side}" for side in by_size)]
    lines = [
        tabulate([*rows, ["together", *sums]], header, tablefmt="github", disable_numparse=True)
    ]
    lines += [f"- {side}x{side}: {why}" for side, why in by_size.items() if side not in known]
    return "\n".join(lines)


def draw(content: Mapping[str, Any], path: str) -> None:
    """Times of layers and networks over the size, peak memory, and what the stages keep."""
    figure, axes = plt.subplots(2, 2, figsize=(11, 8), constrained_layout=True)
    for axis, kind in zip(axes[0], ("layer", "network"), strict=True):
        curves = curves_of(content["groups"], kind, "seconds", 1e3)
        plot.draw_curves(axis, curves, f"{kind}: ms, {BOTH}")
    curves = curves_of(content["groups"], "network", "peak_bytes", 1e-6)
    plot.draw_curves(axes[1][0], curves, "network: peak MB beyond weights and image")
    _draw_kept(axes[1][1], content["kept_bytes"])
    plot.save(figure, content, path)


def curves_of(
    groups: list[Mapping[str, Any]], kind: str, value: str, factor: float
) -> dict[str, list[tuple[float, list[float]]]]:
    """By case, points (side, (lower quartile, median, upper quartile)) times a factor."""
    curves: dict[str, list[tuple[float, list[float]]]] = {}
    for group in groups:
        if group["kind"] != kind:
            continue
        for name, case in group["cases"].items():
            points = curves.setdefault(name, [])
            if "reason" not in case[BOTH]:
                found = case[BOTH][value]
                found = found if isinstance(found, list) else [found] * 3
                points.append((group["image_size"], [factor * number for number in found]))
    return curves


def _draw_kept(axis: plt.Axes, kept: Mapping[str, Mapping[int, dict[str, int] | str]]) -> None:
    """Stacked bars at the largest size that all networks could be counted at."""
    common = [
        side
        for side in next(iter(kept.values()))
        if not any(isinstance(by_size[side], str) for by_size in kept.values())
    ]
    if not common:
        axis.set_visible(False)
        return
    side = max(common)
    stages = dict.fromkeys(name for by_size in kept.values() for name in by_size[side])
    bottom = [0.0] * len(kept)
    for stage in stages:
        heights = [by_size[side].get(stage, 0) / 1e6 for by_size in kept.values()]
        if any(heights):
            axis.bar(list(kept), heights, bottom=bottom, label=stage)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axis.set_ylabel(f"MB kept for the backward pass, {side}x{side}")
    axis.legend(fontsize=6, loc="center left", bbox_to_anchor=(1, 0.5))
