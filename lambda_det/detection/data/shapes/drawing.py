"""Drawing the shapes data sets: which shapes an image has, its background, and its pixels.

numpy may change how its distributions draw; everything here is built on ``random()`` alone, in an
order that is part of the data's format.
"""

from __future__ import annotations

import math

import numpy as np

SHAPE_CLASSES = ("circle", "rectangle", "triangle")

_MIN_DIAMETER, _MAX_DIAMETER = 0.125, 0.625  # of the image's side: 16 to 80 pixels at 128
_MIN_VISIBLE = 0.75  # share of a shape that later shapes and the border may not hide
_SUBSAMPLES = 3  # a pixel's coverage is measured on so many points each way


def place_shapes(rng: np.random.Generator, size: int) -> list[tuple[int, np.ndarray]]:
    """The shapes of one picture as (class, polygon [points, 2]), in drawing order."""
    wanted = 1 + int(rng.random() * 4)
    shapes: list[tuple[int, np.ndarray]] = []
    coverages: list[tuple[np.ndarray, float]] = []
    for _ in range(4 * wanted):  # a shape that would hide too much of another is drawn anew
        category = int(rng.random() * len(SHAPE_CLASSES))
        whole = _outline(rng, SHAPE_CLASSES[category], size)
        # The picture is drawn from the numbers that are written down.
        polygon = np.round(_cut_at_border(whole, size), 2)
        if len(polygon) < 3 or polygon_area(polygon) < _MIN_VISIBLE * polygon_area(whole):
            continue
        coverage = rasterise(polygon, size)
        if all(
            (below * (1 - coverage)).sum() >= _MIN_VISIBLE * whole_sum
            for below, whole_sum in coverages
        ):
            coverages = [(below * (1 - coverage), total) for below, total in coverages]
            coverages.append((coverage, coverage.sum()))
            shapes.append((category, polygon))
        if len(shapes) == wanted:
            break
    return shapes


def paint_shapes(
    rng: np.random.Generator, picture: np.ndarray, shapes: list[tuple[int, np.ndarray]]
) -> np.ndarray:
    """Paint the shapes over a background, float [size, size, 3]; returns uint8."""
    size = len(picture)
    for category, polygon in shapes:
        coverage = rasterise(polygon, size)[..., None]
        colour = _shape_colour(rng, category)
        shade = colour + 20 * (rng.random((size, size, 1)) - 0.5)
        picture = coverage * shade + (1 - coverage) * picture
    return np.clip(np.round(picture), 0, 255).astype(np.uint8)


def background(rng: np.random.Generator, size: int) -> np.ndarray:
    """A smooth, dull texture with some noise, float [size, size, 3]."""
    cells = 5
    grey = 70 + 110 * rng.random()
    grid = grey + 40 * (rng.random((cells, cells, 1)) - 0.5) + 30 * (rng.random(3) - 0.5)
    place = np.linspace(0, cells - 1, size)
    low = np.minimum(place.astype(int), cells - 2)
    share = place - low
    rows = grid[low] * (1 - share)[:, None, None] + grid[low + 1] * share[:, None, None]
    smooth = rows[:, low] * (1 - share)[:, None] + rows[:, low + 1] * share[:, None]
    return smooth + 20 * (rng.random((size, size, 3)) - 0.5)


def _outline(rng: np.random.Generator, name: str, size: int) -> np.ndarray:
    """Corner points [points, 2] of a convex shape, before it is cut at the border."""
    radius = 0.5 * size * (_MIN_DIAMETER + (_MAX_DIAMETER - _MIN_DIAMETER) * rng.random())
    turn = 2 * math.pi * rng.random()
    stretch = rng.random()
    centre = np.array([rng.random(), rng.random()]) * size
    if name == "circle":
        angles = np.arange(24) * (2 * math.pi / 24)
    elif name == "rectangle":
        half = math.pi * (0.14 + 0.11 * stretch)  # half the angle over one side: 2.1:1 to a square
        angles = np.array([-half, half, math.pi - half, math.pi + half])
    else:
        angles = np.array([0.0, 2.1 + 0.3 * stretch, 4.2 + 0.3 * stretch])
    angles = angles + turn
    return centre + radius * np.stack([np.cos(angles), np.sin(angles)], axis=1)


def _cut_at_border(polygon: np.ndarray, size: int) -> np.ndarray:
    """The part of a convex polygon inside [0, size] x [0, size] (Sutherland-Hodgman)."""
    points = [tuple(point) for point in polygon]
    for axis, sign, limit in ((0, 1, 0), (0, -1, -size), (1, 1, 0), (1, -1, -size)):
        kept = []
        for before, point in zip(points[-1:] + points[:-1], points, strict=True):
            inside_before = sign * before[axis] - limit
            inside = sign * point[axis] - limit
            if inside_before * inside < 0:
                share = inside_before / (inside_before - inside)
                kept.append(tuple(b + share * (p - b) for b, p in zip(before, point, strict=True)))
            if inside >= 0:
                kept.append(point)
        points = kept
    return np.array(points).reshape(-1, 2)


def polygon_area(polygon: np.ndarray) -> float:
    x, y = polygon.T
    return 0.5 * abs(float(np.sum(x * np.roll(y, -1) - y * np.roll(x, -1))))


def rasterise(polygon: np.ndarray, size: int) -> np.ndarray:
    """Share of each pixel inside a convex polygon: [size, size] in 0..1.

    Drawn here rather than by Pillow or OpenCV, whose edges differ from version to version.
    """
    steps = (np.arange(size * _SUBSAMPLES) + 0.5) / _SUBSAMPLES
    inside = np.ones((len(steps), len(steps)), dtype=bool)
    for (x0, y0), (x1, y1) in zip(polygon, np.roll(polygon, -1, axis=0), strict=True):
        inside &= (x1 - x0) * (steps[:, None] - y0) >= (y1 - y0) * (steps[None, :] - x0)
    blocks = inside.reshape(size, _SUBSAMPLES, size, _SUBSAMPLES)
    return blocks.mean(axis=(1, 3))


def _shape_colour(rng: np.random.Generator, category: int) -> np.ndarray:
    """A colour [3] more vivid than any background's, out of the two families of the class."""
    colour = 90 * rng.random(3)
    colour[category] += 160  # circles red or yellow, rectangles green or cyan, triangles blue, ...
    if rng.random() < 0.5:
        colour[(category + 1) % 3] += 160
    return colour
