"""Building blocks of figures: maps over images, grids of tiles, colour scales."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle

__all__ = [
    "Grid",
    "around_one",
    "centred",
    "draw_tiles",
    "logarithmic",
    "new_figure",
    "overlay",
    "tiles",
    "to_picture",
]

_DPI = 100
_BRIGHTNESS = 0.55  # of the image under a map


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
        values: [H, W], of cells that cover the picture evenly.
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
    # A colour bar cannot be made of an image whose transparency differs by pixel
    return ScalarMappable(norm, cmap)


@dataclass(frozen=True)
class Grid:
    """Tiles in rows and columns, with gaps between.

    Attributes:
        values: [rows * (tile height + gap) - gap, ..], NaN in the gaps.
        corners: (x, y) of each tile's top left corner.
    """

    values: np.ndarray
    corners: list[tuple[int, int]]


def tiles(maps: np.ndarray, columns: int) -> Grid:
    """Arrange maps [N, H, W] in a grid, row by row."""
    count, height, width = maps.shape
    rows = math.ceil(count / columns)
    gap = max(1, round(0.04 * max(height, width)))
    grid = np.full((rows * (height + gap) - gap, columns * (width + gap) - gap), np.nan)
    corners = []
    for index in range(count):
        y, x = index // columns * (height + gap), index % columns * (width + gap)
        grid[y : y + height, x : x + width] = maps[index]
        corners.append((x, y))
    return Grid(grid, corners)


def draw_tiles(
    axes: Axes,
    maps: np.ndarray,
    names: Sequence[str],
    rows: Sequence[str],
    *,
    norm: Normalize,
    columns: int,
) -> AxesImage:
    """Draw maps [N, H, W] as a grid of tiles on one colour scale.

    Args:
        axes: to draw on.
        maps: row by row.
        names: of the columns if ``rows`` is given, else of the tiles.
        rows: names of the rows, or empty.
        norm: the scale.
        columns: number of columns.
    """
    grid = tiles(maps, columns)
    shown = axes.imshow(grid.values, cmap="RdBu_r", norm=norm, interpolation="nearest")
    axes.set_axis_off()

    def write(tile: int, text: str, offset: tuple[int, int], **where: str) -> None:
        corner = (grid.corners[tile][0] - 0.5, grid.corners[tile][1] - 0.5)
        box = {"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 1}
        axes.annotate(
            text, corner, offset, textcoords="offset points", fontsize=7, bbox=box, **where
        )

    for index, name in enumerate(names):
        write(index, name, (2, 3 if rows else -2), va="bottom" if rows else "top")
    for index, name in enumerate(rows):
        write(index * columns, name, (-3, -4), va="top", ha="right")
    return shown


def logarithmic(values: np.ndarray) -> LogNorm:
    """A logarithmic scale of three powers of ten below the largest value."""
    top = float(values.max()) or 1.0
    return LogNorm(top * 1e-3, top, clip=True)


def around_one(values: np.ndarray) -> LogNorm:
    """A logarithmic scale of ratios with 1 at its centre, which covers 99.9 % of the values."""
    top = max(1.05, float(np.quantile(values, 0.999)))
    return LogNorm(1 / top, top, clip=True)
