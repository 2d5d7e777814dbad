"""Figures of a lambda layer: embeddings, keys, context weights, receptive fields.

Each is an array [height, width, 3] uint8, RGB.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import compress
from typing import Any

import numpy as np
import torch
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import SubFigure
from matplotlib.patches import Circle
from torch import Tensor

from lambda_paper.context import effective_positions, radius
from lambda_paper.plots import (
    around_one,
    centred,
    draw_tiles,
    logarithmic,
    new_figure,
    overlay,
    to_picture,
)

__all__ = ["Field", "content_reach", "context", "embeddings", "receptive_fields"]

_HEADS = 4  # largest number of heads that are drawn one by one
_KEYS = 16  # largest number of keys that are drawn; a multi-head layer has |h||k||u|


@dataclass(frozen=True)
class Field:
    """An effective receptive field.

    Attributes:
        values: [height, width], one for each pixel of the input.
        position: (y, x), the position on the feature map.
        size: (H, W) of the feature map.
    """

    values: np.ndarray
    position: tuple[int, int]
    size: tuple[int, int]


def embeddings(embedding: np.ndarray, title: str, dilation: int = 1) -> np.ndarray:
    """Draw position embeddings [k, u, r_y, r_x] or [h, k, u, r_y, r_x], and their norms by offset.

    The norm of an offset is over all |k||u| (and heads).
    """
    *lead, r_y, r_x = embedding.shape
    depth, intra = lead[-2:]
    maps = embedding.reshape(-1, r_y, r_x)
    columns = math.ceil(math.sqrt(depth))
    names = [f"k {k}" for k in range(depth)]
    rows: list[str] = []
    if len(maps) > depth:  # a row for each u of each head, a column for each k
        columns = depth
        maps = np.moveaxis(embedding, -4, -3).reshape(-1, r_y, r_x)
        letters = "u" if len(lead) == 2 else "hu"
        rows = [_label(letters, index) for index in np.ndindex(*lead[:-2], intra)]
    side = 7.5 if columns <= 8 else 11
    height = side * math.ceil(len(maps) / columns) / columns * r_y / r_x
    figure = new_figure(
        side + 5.5,
        min(max(0.92 * height + 0.9, 5.5), 16),
        f"{title}: position embeddings, {r_y}x{r_x} offsets"
        + (f", {dilation} positions apart" if dilation > 1 else ""),
    )
    left, right = figure.subplots(1, 2, width_ratios=(side, 4))
    shown = draw_tiles(left, maps, names, rows, norm=centred(maps), columns=columns)
    left.set_title("embedding by offset, the query at the centre of each tile", fontsize=9, pad=18)
    figure.colorbar(shown, ax=left, shrink=0.8, extend="both")
    norms = np.sqrt((maps**2).sum(0))
    half_y, half_x = dilation * r_y / 2, dilation * r_x / 2
    extent = (-half_x, half_x, half_y, -half_y)
    shown = right.imshow(norms, cmap="viridis", extent=extent, interpolation="nearest")
    right.set_title(
        f"norm by offset: {norms.min():.2f} to {norms.max():.2f}, mean {norms.mean():.2f}",
        fontsize=9,
    )
    right.set(xlabel="dx, positions", ylabel="dy, positions")
    figure.colorbar(shown, ax=right, shrink=0.6)
    return to_picture(figure)


def content_reach(picture: np.ndarray, keys: Tensor, key_norm: str, title: str) -> np.ndarray:
    """Draw the normalised keys [g, k, u, H, W]: the positions that the content lambda reads.

    A softmax key is a distribution over the H * W positions. Red positions have more than the
    uniform share 1 / (H * W), blue ones less. At the left is the mean over the keys.
    """
    groups, depth, intra, height, width = keys.shape
    maps = keys.flatten(0, 2)
    spread = effective_positions(maps)
    softmax = key_norm == "softmax"
    cells = height * width
    maps = maps * (cells if softmax else 1)
    total = maps.mean(0)
    scale = around_one if softmax else centred
    label = "share of a position / uniform share" if softmax else f"key ({key_norm} norm)"
    several = [groups > 1, True, intra > 1]
    labels = [
        _label("".join(compress("hku", several)), tuple(compress(index, several)))
        for index in np.ndindex(groups, depth, intra)
    ]
    drawn = min(len(maps), _KEYS)
    columns = math.ceil(math.sqrt(drawn))
    rows = math.ceil(drawn / columns)
    aspect = picture.shape[0] / picture.shape[1]
    figure = new_figure(
        13, max(4.0, 7.0 * aspect * rows / columns + 1.4), f"{title}: reach of the content lambda"
    )
    left, right = figure.subfigures(1, 2, width_ratios=(5, 8))
    axes = left.subplots()
    bar = overlay(
        axes,
        picture,
        total.numpy(),
        norm=scale(total.numpy()),
        cmap="bwr",
        title=f"mean over the {len(maps)} keys: spread over {float(effective_positions(total)):.0f}"
        f" of {cells} positions",
    )
    _bar(left, bar, axes, label, orientation="horizontal")
    norm = scale(maps[:drawn].numpy())
    grid = right.subplots(rows, columns, squeeze=False).ravel()
    for index, small in enumerate(grid):
        if index >= drawn:
            small.set_axis_off()
            continue
        bar = overlay(
            small,
            picture,
            maps[index].numpy(),
            norm=norm,
            cmap="bwr",
            title=f"{labels[index]}: {float(spread[index]):.0f} positions",
        )
    _bar(right, bar, list(grid), label)
    if drawn < len(maps):
        right.suptitle(f"the first {drawn} of {len(maps)} keys", fontsize=9)
    return to_picture(figure)


def context(
    picture: np.ndarray,
    weights: Mapping[str, np.ndarray],
    norms: Mapping[str, float],
    pixel: tuple[float, float],
    position: tuple[int, int],
    title: str,
) -> np.ndarray:
    """Draw the weights [heads, u, H, W] of the values in one output, by part of the lambda.

    At the left is the norm over heads and u, then each head, as the norm over u if |u| > 1.
    """
    heads, intra, height, width = next(iter(weights.values())).shape
    drawn = min(heads, _HEADS)
    aspect = picture.shape[0] / picture.shape[1]
    figure = new_figure(
        3.1 * (drawn + 1),
        len(weights) * (2.45 * aspect + 0.7) + 0.5,
        f"{title}: weights of the values in the output at row {position[0]}, column {position[1]} "
        f"of {height}x{width}",
    )
    grid = figure.subplots(len(weights), drawn + 1, squeeze=False)
    for row, (part, values) in zip(grid, weights.items(), strict=True):
        overall = np.sqrt((values**2).sum((0, 1)))
        spread = float(effective_positions(torch.from_numpy(overall)))
        bar = overlay(
            row[0],
            picture,
            overall,
            norm=Normalize(0, float(overall.max()) or 1.0),
            cmap="inferno",
            title=f"{part}: norm over heads,\n{spread:.0f} positions, output {norms[part]:.3g}",
            position=pixel,
            size=(height, width),
        )
        figure.colorbar(bar, ax=row[0], shrink=0.75, format="%.2g")
        signed = intra == 1
        by_head = values[:, 0] if signed else np.sqrt((values**2).sum(1))
        limit = float(np.abs(by_head).max()) or 1.0
        for head in range(drawn):
            bar = overlay(
                row[head + 1],
                picture,
                by_head[head],
                norm=Normalize(-limit if signed else 0, limit),
                cmap="bwr" if signed else "inferno",
                title=f"{part}, head {head}" + (f" of {heads}" if heads > drawn else ""),
                position=pixel,
                size=(height, width),
            )
        figure.colorbar(bar, ax=list(row[1:]), shrink=0.75, format="%.2g")
    return to_picture(figure)


def receptive_fields(
    picture: np.ndarray, fields: Mapping[str, Field], pixel: tuple[float, float], title: str
) -> np.ndarray:
    """Draw effective receptive fields over the input image, relative to their largest values.

    The circle around the centre of the position's cell holds half of the sum.
    """
    columns = min(len(fields), 4)
    rows = math.ceil(len(fields) / columns)
    aspect = picture.shape[0] / picture.shape[1]
    figure = new_figure(
        3.7 * columns + 0.8,
        rows * (3.4 * aspect + 0.85) + 0.4,
        f"effective receptive field of one position, {title}",
    )
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in grid[len(fields) :]:
        axes.set_axis_off()
    for axes, (name, field) in zip(grid, fields.items(), strict=False):
        values = field.values / (field.values.max() or 1.0)
        centre = [
            (place + 0.5) * whole / cells
            for place, whole, cells in zip(field.position, values.shape, field.size, strict=True)
        ]
        pixels = (centre[0] - 0.5, centre[1] - 0.5)  # as indices
        half, most = (radius(torch.from_numpy(values), pixels, share) for share in (0.5, 0.95))
        above = 100 * np.count_nonzero(values > 0.01) / values.size
        bar = overlay(
            axes,
            picture,
            values,
            norm=logarithmic(values),
            cmap="inferno",
            title=f"{name} ({field.size[0]}x{field.size[1]})\nhalf within {half:.0f} pixels, 95 % "
            f"within {most:.0f}\n{above:.2g} % of the pixels above 1 % of the largest",
            position=pixel,
            size=field.size,
        )
        axes.add_patch(Circle(centre[::-1], half, fill=False, color="lime", lw=1))
    figure.colorbar(bar, ax=list(grid), shrink=0.8, label="gradient, share of the largest")
    return to_picture(figure)


def _bar(figure: SubFigure, shown: ScalarMappable, axes: Any, label: str, **more: str) -> None:
    """A colour bar with ticks at both ends and the centre, as short logarithmic bars have none."""
    norm = shown.norm
    ticks = [norm.vmin, 1 if isinstance(norm, LogNorm) else 0, norm.vmax]
    bar = figure.colorbar(shown, ax=axes, shrink=0.7, extend="both", ticks=ticks, **more)
    bar.set_ticks(ticks, labels=[_ratio(tick) for tick in ticks])
    bar.minorticks_off()
    bar.set_label(label)


def _ratio(value: float) -> str:
    return f"1/{1 / value:.3g}" if 0 < value < 1 else f"{value:.3g}"


def _label(letters: str, index: tuple[int, ...]) -> str:
    return ", ".join(f"{letter} {i}" for letter, i in zip(letters, index, strict=True))
