"""Pictures of the figures, from the content of the JSON file."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from lambda_benchmarks.measure import BOTH
from lambda_benchmarks.report import machine_line

ACCURACY = "top-1 (paper)"  # the column that draw_families needs
# How the names of a family begin
# By the start of a name; those with "_se" have a curve of their own
FAMILIES = {
    "lambda_resnet": "LambdaResNet",
    "resnet_rs": "ResNet-RS",
    "tf_efficientnet_": "EfficientNet",
    "vit_": "ViT",
}

Curves = dict[str, list[tuple[float, list[float]]]]


def save(figure: plt.Figure, content: dict[str, Any], path: str) -> None:
    """Write the picture with the machine below it."""
    figure.supxlabel(machine_line(content["machine"]), fontsize=6)
    with warnings.catch_warnings():  # where nothing was measured there is little to lay out
        warnings.filterwarnings("ignore", "constrained_layout not applied")
        figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_ratios(content: dict[str, Any], path: str) -> None:
    """A bar for each case, a column of axes for each mode, a row of axes for each group."""
    groups = content["groups"]
    columns = max(len(group["modes"]) for group in groups)
    heights = [len(group["cases"]) + 2 for group in groups]
    figure, axes = plt.subplots(
        len(groups),
        columns,
        figsize=(5 * columns + 2, 0.3 * sum(heights) + 1.2),
        squeeze=False,
        height_ratios=heights,
        constrained_layout=True,
    )
    for group, row in zip(groups, axes, strict=True):
        for mode, axis in zip(group["modes"], row, strict=False):
            _draw_bars(axis, group, mode)
        for axis in row[1:]:
            axis.set_yticklabels([])
    save(figure, content, path)


def _draw_bars(axis: plt.Axes, group: Mapping[str, Any], mode: str) -> None:
    names = list(group["cases"])
    for place, case in enumerate(group["cases"].values()):
        ratio = case[mode].get("ratio")
        if ratio is None:
            axis.text(0, place, " " + case[mode].get("reason", "-")[:40], va="center", fontsize=6)
            continue
        low, middle, high = ratio
        axis.barh(place, middle, xerr=[[middle - low], [high - middle]], color="C0", height=0.7)
        axis.text(high, place, f" {middle:.2f}", va="center", fontsize=7)
    axis.axvline(1, color="black", lw=0.8)
    axis.set_yticks(range(len(names)), names, fontsize=7)
    axis.invert_yaxis()
    axis.margins(x=0.15)
    axis.set_title(f"{group['title']}\n{mode}, time as a multiple of {group['base']}'s", fontsize=7)


def draw_families(content: dict[str, Any], path: str) -> None:
    """Accuracy over ms per image: a column of axes for each mode, a row for each group."""
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
            _draw_accuracies(axis, group, mode)
    save(figure, content, path)


def _draw_accuracies(axis: plt.Axes, group: Mapping[str, Any], mode: str) -> None:
    families: dict[str, list[tuple[float, float]]] = {}
    for name, case in group["cases"].items():
        if "reason" in case[mode] or not case[ACCURACY]:
            continue
        milliseconds = 1e3 * case[mode]["seconds"][1] / case["images"]
        point = (milliseconds, float(case[ACCURACY]))
        start = next(start for start in FAMILIES if name.startswith(start))
        title = FAMILIES[start] + (" with SE" if "_se," in name else "")
        families.setdefault(title, []).append(point)
        label = name.removeprefix(start)
        axis.annotate(label, point, fontsize=5, xytext=(2, 3), textcoords="offset points")
    for number, (title, found) in enumerate(sorted(families.items())):
        axis.plot(*zip(*found, strict=True), "o-", ms=3, label=title, color=f"C{number}")
    axis.set(xscale="log", xlabel="ms per image", ylabel="top-1 in the paper")
    _label_log_axis(axis.xaxis)
    axis.margins(x=0.3)  # room for the names
    axis.set_title(f"{group['title']}, {mode}", fontsize=8)
    axis.grid(alpha=0.3)
    if families:
        axis.legend(fontsize=7)


def draw_sizes(content: dict[str, Any], path: str) -> None:
    """Times of layers and networks over the size, peak memory, and what the stages keep."""
    figure, axes = plt.subplots(2, 2, figsize=(11, 8), constrained_layout=True)
    for axis, kind in zip(axes[0], ("layer", "network"), strict=True):
        _draw_curves(axis, curves(content["groups"], kind, "seconds", 1e3), f"{kind}: ms, {BOTH}")
    peaks = curves(content["groups"], "network", "peak_bytes", 1e-6)
    _draw_curves(axes[1][0], peaks, "network: peak MB beyond weights and image")
    _draw_kept(axes[1][1], content["kept_bytes"])
    save(figure, content, path)


def curves(groups: list[Mapping[str, Any]], kind: str, value: str, factor: float) -> Curves:
    """By case, points (side, (lower quartile, median, upper quartile)) times a factor."""
    found: Curves = {}
    for group in groups:
        if group["kind"] != kind:
            continue
        for name, case in group["cases"].items():
            points = found.setdefault(name, [])
            if "reason" not in case[BOTH]:
                values = case[BOTH][value]
                values = values if isinstance(values, list) else [values] * 3
                points.append((group["image_size"], [factor * number for number in values]))
    return found


def _draw_curves(
    axis: plt.Axes, found: Mapping[str, Sequence[tuple[float, Sequence[float]]]], label: str
) -> None:
    """Medians over the side of the image with the quartiles as a band, both axes logarithmic."""
    for name, points in found.items():
        if not points:
            continue
        x = [place for place, _ in points]
        low, middle, high = zip(*(values for _, values in points), strict=True)
        axis.plot(x, middle, "o-", ms=3, label=name)
        axis.fill_between(x, low, high, alpha=0.2)
    ticks = sorted({place for points in found.values() for place, _ in points})
    axis.set(xscale="log", yscale="log", xlabel="side of the image", ylabel=label)
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks], fontsize=7)
    axis.xaxis.set_minor_formatter(NullFormatter())
    _label_log_axis(axis.yaxis)
    axis.grid(alpha=0.3)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=7)


def _label_log_axis(axis: matplotlib.axis.Axis) -> None:
    """Put ticks at 1, 2 and 5, written as plain numbers."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, place: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _draw_kept(axis: plt.Axes, kept: Mapping[str, Mapping[int, dict[str, int] | str]]) -> None:
    """Stacked bars at the largest size at which all networks could be counted."""
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
