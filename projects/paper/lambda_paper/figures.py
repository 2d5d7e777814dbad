"""Figures of a lambda layer: embeddings, keys, context weights, receptive fields.

Each is an array [height, width, 3] uint8, RGB.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Circle, Rectangle
from torch import Tensor
from torchvision.utils import make_grid

from lambda_paper.context import effective_positions, radius

_DPI = 100
_BRIGHTNESS = 0.55  # opacity of the image under a map
_HEADS = 4  # largest number of heads that are drawn one by one
_KEYS = 16  # largest number of keys that are drawn; a multi-head layer has |h||k||u|


class Field(NamedTuple):
    """An effective receptive field of ``position`` (y, x) on a feature map of ``size`` (H, W)."""

    values: np.ndarray  # [height, width], one for each pixel of the input
    position: tuple[int, int]
    size: tuple[int, int]


def embeddings(embedding: np.ndarray, title: str, dilation: int = 1) -> np.ndarray:
    """Draw position embeddings [k, u, r_y, r_x] or [h, k, u, r_y, r_x], and their norms by offset.

    The norm of an offset is over all |k||u| (and heads).
    """
    *lead, r_y, r_x = embedding.shape
    depth = lead[-2]
    # a row for each u of each head, with each k in it
    maps = np.moveaxis(embedding, -4, -3).reshape(-1, r_y, r_x)
    columns = depth if len(maps) > depth else math.ceil(math.sqrt(depth))
    heads = lead[0] if len(lead) == 3 else 1
    names = _names({"h": heads, "u": lead[-1], "k": depth})
    side = 7.5 if columns <= 8 else 11
    height = side * math.ceil(len(maps) / columns) / columns * r_y / r_x
    figure = new_figure(
        side + 5.5,
        min(max(0.92 * height + 0.9, 5.5), 16),
        f"{title}: position embeddings, {r_y}x{r_x} offsets"
        + (f", {dilation} positions apart" if dilation > 1 else ""),
    )
    left, right = figure.subplots(1, 2, width_ratios=(side, 4))
    shown = draw_tiles(left, maps, names, columns, centred(maps))
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


def content_reach(picture: np.ndarray, keys: Tensor, title: str) -> np.ndarray:
    """Draw the normalised keys [g, k, u, H, W]: the positions that the content lambda reads.

    Keys that sum to 1, as softmax makes them, are distributions over the H * W positions. Red
    positions have more than the uniform share 1 / (H * W), blue ones less. The first map is the
    mean over the keys.
    """
    groups, depth, intra, height, width = keys.shape
    maps = keys.flatten(0, 2)
    sums = maps.sum((-2, -1))
    are_shares = bool((maps >= 0).all()) and torch.allclose(sums, torch.ones_like(sums), atol=1e-3)
    if are_shares:
        maps = maps * (height * width)
    names = _names({"h": groups, "k": depth, "u": intra})[:_KEYS]
    shown = [maps.mean(0), *maps[:_KEYS]]
    columns = math.ceil(math.sqrt(len(shown)))
    rows = math.ceil(len(shown) / columns)
    aspect = picture.shape[0] / picture.shape[1]
    text = f", the first {_KEYS} of {len(maps)} keys" if len(maps) > _KEYS else ""
    figure = new_figure(
        13,
        max(4.0, 12.0 * aspect * rows / columns + 1.4),
        f"{title}: reach of the content lambda{text}",
    )
    norm = (around_one if are_shares else centred)(torch.stack(shown).numpy())
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in grid[len(shown) :]:
        axes.set_axis_off()
    for axes, name, values in zip(
        grid, [f"mean over {len(maps)} keys", *names], shown, strict=False
    ):
        text = f"{name}: {float(effective_positions(values)):.0f} positions"
        bar = overlay(axes, picture, values.numpy(), norm=norm, cmap="bwr", title=text)
    label = "share of a position / uniform share" if are_shares else "normalised key"
    _bar(figure, bar, list(grid), label)
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
    text = f"at row {position[0]}, column {position[1]} of {height}x{width}"
    figure = new_figure(
        3.1 * (drawn + 1),
        len(weights) * (2.45 * aspect + 0.7) + 0.5,
        f"{title}: weights of the values in the output {text}",
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


def _bar(figure: Figure, shown: ScalarMappable, axes: list[Axes], label: str) -> None:
    """A colour bar with ticks at both ends and the centre, because short logarithmic bars have
    none.
    """
    norm = shown.norm
    ticks = [norm.vmin, 1 if isinstance(norm, LogNorm) else 0, norm.vmax]
    bar = figure.colorbar(shown, ax=axes, shrink=0.7, extend="both", ticks=ticks)
    bar.set_ticks(ticks, labels=[_ratio(tick) for tick in ticks])
    bar.minorticks_off()
    bar.set_label(label)


def _ratio(value: float) -> str:
    return f"1/{1 / value:.3g}" if 0 < value < 1 else f"{value:.3g}"


def _names(sizes: Mapping[str, int]) -> list[str]:
    """Names of all indices, such as "h 1, k 0": k, and others if there are several."""
    named = [letter for letter, size in sizes.items() if size > 1 or letter == "k"]
    indices = np.ndindex(*(sizes[letter] for letter in named))
    return [", ".join(f"{n} {i}" for n, i in zip(named, index, strict=True)) for index in indices]


def new_figure(width: float, height: float, title: str) -> Figure:
    """A figure of ``width`` x ``height`` inches, without the global state of pyplot."""
    figure = Figure(figsize=(width, height), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=11)
    return figure


def to_picture(figure: Figure) -> np.ndarray:
    """Render a figure to [height, width, 3] uint8, RGB."""
    figure.canvas.draw()
    return np.asarray(figure.canvas.buffer_rgba())[:, :, :3].copy()


def centred(values: np.ndarray) -> Normalize:
    """A scale symmetric around 0 that covers 99.9 % of the values."""
    limit = float(np.quantile(np.abs(values), 0.999)) or float(np.abs(values).max()) or 1.0
    return Normalize(-limit, limit)


def overlay(
    axes: Axes,
    picture: np.ndarray,
    values: np.ndarray,
    *,
    norm: Normalize,
    cmap: str,
    title: str,
    position: tuple[float, float] | None = None,
    size: tuple[int, int] | None = None,
) -> ScalarMappable:
    """Draw a map over a grey version of its image. Larger magnitudes are more opaque.

    Args:
        axes: to draw on.
        picture: [height, width, 3] uint8.
        values: [H, W], for cells that cover the picture evenly.
        norm: the scale. Its lower end is transparent; with ``cmap`` "bwr", its centre.
        cmap: name of the colormap.
        title: of the axes.
        position: (y, x) in pixels, marked with a cross.
        size: (H, W) of the map whose cell at ``position`` is framed.

    Returns:
        The mappable for a colour bar.
    """
    height, width = picture.shape[:2]
    extent = (0, width, height, 0)
    grey = picture.mean(2) * _BRIGHTNESS
    axes.imshow(grey, cmap="gray", vmin=0, vmax=255, extent=extent)
    strength = np.clip(np.ma.filled(norm(values), 0.0).astype(float), 0, 1)
    if cmap == "bwr":
        strength = np.abs(2 * strength - 1)
    axes.imshow(
        values, cmap=cmap, norm=norm, extent=extent, alpha=strength**0.5, interpolation="nearest"
    )
    if position is not None:
        axes.plot(position[1], position[0], "+", color="lime", ms=7, mew=1)
    if size is not None:
        cell = (height / size[0], width / size[1])
        corner = [p // side * side for p, side in zip(position, cell, strict=True)]
        axes.add_patch(Rectangle(corner[::-1], *cell[::-1], fill=False, color="lime", lw=1))
    axes.set_title(title, fontsize=9)
    axes.set(xlim=(0, width), ylim=(height, 0), xticks=[], yticks=[])
    # a colour bar cannot be made from an image whose transparency differs by pixel
    return ScalarMappable(norm, cmap)


def draw_tiles(
    axes: Axes, maps: np.ndarray, names: Sequence[str], columns: int, norm: Normalize
) -> AxesImage:
    """Draw maps [N, H, W] with their names as a grid of tiles, row by row, on one scale."""
    height, width = maps.shape[1:]
    gap = max(1, round(0.04 * max(height, width)))
    grid = make_grid(torch.from_numpy(maps)[:, None], columns, gap, pad_value=math.nan)[0]
    shown = axes.imshow(grid, cmap="RdBu_r", norm=norm, interpolation="nearest")
    axes.set_axis_off()

    box = {"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 1}
    for index, name in enumerate(names):
        row, column = divmod(index, columns)
        corner = (gap + column * (width + gap) - 0.5, gap + row * (height + gap) - 0.5)
        offset = {"xytext": (2, -2), "textcoords": "offset points", "va": "top"}
        axes.annotate(name, corner, fontsize=7, bbox=box, **offset)
    return shown


def logarithmic(values: np.ndarray) -> LogNorm:
    """A logarithmic scale of three powers of ten below the largest value."""
    top = float(values.max()) or 1.0
    return LogNorm(top * 1e-3, top, clip=True)


def around_one(values: np.ndarray) -> LogNorm:
    """A logarithmic scale of ratios with 1 at its centre, which covers 99.9 % of the values."""
    top = max(1.05, float(np.quantile(values, 0.999)))
    return LogNorm(1 / top, top, clip=True)
