"""Pictures of the figures: bars of ratios, and curves over the size of the images."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from lambda_det.benchmarks.machine import machine_line

# Takes the content of the JSON file and the file to write
Draw = Callable[[dict[str, Any], str], None]


def save(figure: plt.Figure, content: dict[str, Any], path: str) -> None:
    """Write the picture with the machine below it."""
    figure.supxlabel(machine_line(content["machine"]), fontsize=6)
    with warnings.catch_warnings():  # where nothing was measured there is little to lay out
        warnings.filterwarnings("ignore", "constrained_layout not applied")
        figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_ratios(content: dict[str, Any], path: str) -> None:
    """A row of bars per case, a column of axes per mode, a row of axes per group."""
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
        for axis in row[len(group["modes"]) :]:
            axis.set_visible(False)
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


def plain_log(axis: matplotlib.axis.Axis) -> None:
    """Give a logarithmic axis ticks at 1, 2 and 5, written as plain numbers."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, place: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def draw_curves(
    axis: plt.Axes, curves: Mapping[str, Sequence[tuple[float, Sequence[float]]]], label: str
) -> None:
    """Medians over the side of the image with the quartiles as a band, both axes logarithmic.

    Args:
        axis: to draw on.
        curves: by name, points (x, (lower quartile, median, upper quartile)).
        label: of the y axis.
    """
    for name, points in curves.items():
        if not points:
            continue
        x = [place for place, _ in points]
        low, middle, high = zip(*(values for _, values in points), strict=True)
        axis.plot(x, middle, "o-", ms=3, label=name)
        axis.fill_between(x, low, high, alpha=0.2)
    ticks = sorted({place for points in curves.values() for place, _ in points})
    axis.set(xscale="log", yscale="log", xlabel="side of the image", ylabel=label)
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks], fontsize=7)
    axis.xaxis.set_minor_formatter(NullFormatter())
    plain_log(axis.yaxis)
    axis.grid(alpha=0.3)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=7)
