#!/usr/bin/env python
"""Make the shapes data set: COCO-format images and annotations, from a seed, in seconds.

Circles, rectangles and triangles of any size and rotation overlap on textured backgrounds. Each
class has two families of colour, so a small detector learns them within minutes, and its AP shows
whether a pipeline works.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import tempfile
from typing import Any

import numpy as np
from PIL import Image

# numpy may change its distributions, so everything here draws only from ``random()``, in an order
# that is part of the data format.

EXAMPLES = """examples:
  python datasets/make_shapes.py
  python datasets/make_shapes.py --root /data --num-train 2000 --size 256
  python datasets/make_shapes.py --panoptic
"""
SPLITS = ("train", "val")
SHAPE_CLASSES = ("circle", "rectangle", "triangle")
STUFF_CLASSES = ("plain", "striped", "checked")
KEYPOINTS = ("left", "top", "right", "bottom")
# The default of each number, the least that it can be, and what it is
NUMBERS = {
    "num_train": (500, 1, "training images"),
    "num_val": (100, 1, "validation images"),
    "size": (128, 32, "side of the images in pixels"),
    "seed": (0, 0, "another seed, another data set"),
}

_FORMAT = 1  # part of the manifest; raise it with any change to the images
_MIN_DIAMETER, _MAX_DIAMETER = 0.125, 0.625  # of the image's side: 16 to 80 pixels at 128
_MIN_VISIBLE = 0.75  # share of a shape that later shapes and the border leave visible
_SUBSAMPLES = 3  # points along each side of a pixel that measure its coverage
_INWARD = 0.25  # the place of a keypoint between the outline, 0, and the middle, 1
_FIRST_STUFF = len(SHAPE_CLASSES) + 1  # category id; those of the shapes come before
_CATEGORIES = [
    {
        "id": i,
        "name": name,
        "isthing": int(i < _FIRST_STUFF),
        **({"keypoints": KEYPOINTS, "skeleton": []} if i < _FIRST_STUFF else {}),
    }
    for i, name in enumerate(SHAPE_CLASSES + STUFF_CLASSES, start=1)
]


def make_shapes(root: str | os.PathLike, **numbers: int) -> str:
    """Write the shapes data set to ``root/shapes``, unless it exists.

    Files: ``shapes/{train,val}/*.png`` and ``shapes/annotations/instances_{train,val}.json``.
    Polygons, boxes and areas describe the whole shape within the image, including parts that other
    shapes cover. The same arguments give the same pixels and the same bytes of JSON. Image number i
    does not depend on the number of images.

    Args:
        root: folder that data sets live in, such as ``$DETECTRON2_DATASETS``.
        numbers: those of :data:`NUMBERS` that are not at their defaults.

    Returns:
        The folder.

    Raises:
        ValueError: a number is too small.
        OSError: ``root/shapes`` holds something else, which stays as it is, or cannot be written.
    """
    return _write_dataset(root, numbers, is_panoptic=False)


def make_panoptic_shapes(root: str | os.PathLike, **numbers: int) -> str:
    """Write shapes on patterned backgrounds to ``root/shapes_panoptic``, unless it exists.

    The files are ``{train,val}/*.png``, ``annotations/keypoints_{train,val}.json`` with boxes,
    polygons and the keypoints of :data:`KEYPOINTS`, ``annotations/panoptic_{train,val}.json`` with
    ``panoptic_{train,val}/*.png`` in COCO's panoptic format, and ``stuff_{train,val}/*.png`` with
    0 for things and the classes of :data:`STUFF_CLASSES` from 1. Polygons are whole; panoptic masks
    hold the visible part. Everything else is as in :func:`make_shapes`.
    """
    return _write_dataset(root, numbers, is_panoptic=True)


def _write_dataset(root: str | os.PathLike, numbers: dict[str, int], *, is_panoptic: bool) -> str:
    name = "shapes_panoptic" if is_panoptic else "shapes"
    manifest = {"format": _FORMAT}
    for key, (default, least, _) in NUMBERS.items():
        manifest[key] = numbers.get(key, default)
        if manifest[key] < least:
            raise ValueError(f"{key} is {manifest[key]}; give at least {least}.")
    root = os.path.expanduser(os.fspath(root))
    folder = os.path.join(root, name)
    if _is_made(folder, manifest):
        return folder
    os.makedirs(root, exist_ok=True)
    # It is written elsewhere and renamed, so an interrupted run leaves no half data set.
    workplace = tempfile.mkdtemp(prefix=f".{name}-", dir=root)
    try:
        made = os.path.join(workplace, name)
        os.makedirs(os.path.join(made, "annotations"))
        for split in SPLITS:
            count, size, seed = manifest[f"num_{split}"], manifest["size"], manifest["seed"]
            _write_split(made, split, count, size, seed, is_panoptic)
        _write_json(os.path.join(made, "manifest.json"), manifest)
        try:
            os.rename(made, folder)
        except OSError:
            if not _is_made(folder, manifest):  # otherwise another process was faster
                raise
    finally:
        shutil.rmtree(workplace, ignore_errors=True)
    return folder


def _is_made(folder: str, manifest: dict[str, int]) -> bool:
    """Whether ``folder`` holds the data set of ``manifest``; FileExistsError if it has another."""
    if not os.path.lexists(folder) or (os.path.isdir(folder) and not os.listdir(folder)):
        return False
    try:
        with open(os.path.join(folder, "manifest.json"), encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError):
        found = None
    if found != manifest:
        holds = f"shapes made with {found}" if found else "something that was not made here"
        raise FileExistsError(
            f"{folder} holds {holds}, and stays as it is; move it away or give another root."
        )
    return True


def _write_split(
    folder: str, split: str, count: int, size: int, seed: int, is_panoptic: bool
) -> None:
    """Write the images and labels of a split; only panoptic shapes have keypoints and segments."""
    images, instances, panoptic = [], [], []
    for index in range(count):
        rng = image_rng(seed, split, index)
        shapes = place_shapes(rng, size)
        image_id, name = index + 1, f"{index:06d}.png"
        images.append({"id": image_id, "file_name": name, "width": size, "height": size})
        entries = [
            _describe_shape(number, image_id, category, polygon)
            for number, (category, polygon) in enumerate(shapes, len(instances) + 1)
        ]
        instances += entries
        image, pixels = background(rng, size), {}
        if is_panoptic:
            stuff = _pattern(rng, image)
            owners = np.zeros((size, size), dtype=np.int64)  # 0 is background, i the i-th shape
            for number, (_, polygon) in enumerate(shapes, start=1):
                owners[_rasterise(polygon, size) >= 0.5] = number
            for number, (_, polygon) in enumerate(shapes, start=1):
                entries[number - 1] |= _keypoints(polygon, owners, number)
            # Ids in the panoptic image: shapes as in owners; stuff from 10, more than any image has
            segments = np.where(owners > 0, owners, 10 + stuff)
            segments_info = _segments_info(segments, [category + 1 for category, _ in shapes])
            panoptic.append(
                {"image_id": image_id, "file_name": name, "segments_info": segments_info}
            )
            encoded = np.stack([segments % 256, segments // 256, 0 * segments], axis=-1)
            pixels[f"panoptic_{split}"] = encoded.astype(np.uint8)
            pixels[f"stuff_{split}"] = np.where(owners > 0, 0, stuff + 1).astype(np.uint8)
        pixels[split] = paint_shapes(rng, image, shapes)
        for kind, values in pixels.items():
            os.makedirs(os.path.join(folder, kind), exist_ok=True)
            Image.fromarray(values).save(os.path.join(folder, kind, name))
    plain = [{"id": i, "name": name} for i, name in enumerate(SHAPE_CLASSES, start=1)]
    things = [entry for entry in _CATEGORIES if entry["isthing"]]
    files = {"instances": (instances, plain)}
    if is_panoptic:
        files = {"keypoints": (instances, things), "panoptic": (panoptic, _CATEGORIES)}
    for kind, (entries, categories) in files.items():
        about = f", {kind}" if is_panoptic else ""
        content = {
            "info": {"description": f"shapes{about}, {split}, seed {seed}"},
            "images": images,
            "annotations": entries,
            "categories": categories,
        }
        _write_json(os.path.join(folder, "annotations", f"{kind}_{split}.json"), content)


def _describe_shape(number: int, image_id: int, category: int, polygon: np.ndarray) -> dict:
    """COCO's annotation of a shape with the outline [points, 2]."""
    x, y = polygon.T
    box = (x.min(), y.min(), x.max() - x.min(), y.max() - y.min())
    return {
        "id": number,
        "image_id": image_id,
        "category_id": category + 1,
        "iscrowd": 0,
        "segmentation": [[round(float(v), 2) for v in polygon.reshape(-1)]],
        "bbox": [round(float(v), 2) for v in box],
        "area": round(_polygon_area(polygon), 2),
    }


def _write_json(path: str, content: dict) -> None:
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        json.dump(content, file, separators=(",", ":"))


def image_rng(seed: int, split: str, index: int) -> np.random.Generator:
    """The random numbers of one image."""
    source = np.random.SeedSequence([seed, SPLITS.index(split), index])
    return np.random.Generator(np.random.PCG64(source))


def place_shapes(rng: np.random.Generator, size: int) -> list[tuple[int, np.ndarray]]:
    """The shapes of one image as (class, polygon [points, 2]), in drawing order."""
    wanted = 1 + int(rng.random() * 4)
    shapes: list[tuple[int, np.ndarray]] = []
    coverages: list[tuple[np.ndarray, float]] = []
    for _ in range(4 * wanted):  # a shape that would hide too much of another is drawn again
        category = int(rng.random() * len(SHAPE_CLASSES))
        whole = _outline(rng, SHAPE_CLASSES[category], size)
        # The image is drawn from the rounded numbers of the annotations.
        polygon = np.round(_cut_at_border(whole, size), 2)
        if len(polygon) < 3 or _polygon_area(polygon) < _MIN_VISIBLE * _polygon_area(whole):
            continue
        coverage = _rasterise(polygon, size)
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
    rng: np.random.Generator, image: np.ndarray, shapes: list[tuple[int, np.ndarray]]
) -> np.ndarray:
    """Paint the shapes over a background, float [size, size, 3]; return uint8."""
    size = len(image)
    for category, polygon in shapes:
        coverage = _rasterise(polygon, size)[..., None]
        colour = _shape_colour(rng, category)
        shade = colour + 20 * (rng.random((size, size, 1)) - 0.5)
        image = coverage * shade + (1 - coverage) * image
    return np.clip(np.round(image), 0, 255).astype(np.uint8)


def background(rng: np.random.Generator, size: int) -> np.ndarray:
    """A smooth grey texture with some noise, float [size, size, 3]."""
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
    """The corners [points, 2] of a convex shape, before it is cut at the border."""
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


def _polygon_area(polygon: np.ndarray) -> float:
    x, y = polygon.T
    return 0.5 * abs(float(np.sum(x * np.roll(y, -1) - y * np.roll(x, -1))))


def _rasterise(polygon: np.ndarray, size: int) -> np.ndarray:
    """The share of each pixel inside a convex polygon, [size, size] in 0..1.

    The edges that Pillow and OpenCV draw differ between their versions.
    """
    steps = (np.arange(size * _SUBSAMPLES) + 0.5) / _SUBSAMPLES
    inside = np.ones((len(steps), len(steps)), dtype=bool)
    for (x0, y0), (x1, y1) in zip(polygon, np.roll(polygon, -1, axis=0), strict=True):
        inside &= (x1 - x0) * (steps[:, None] - y0) >= (y1 - y0) * (steps[None, :] - x0)
    blocks = inside.reshape(size, _SUBSAMPLES, size, _SUBSAMPLES)
    return blocks.mean(axis=(1, 3))


def _shape_colour(rng: np.random.Generator, category: int) -> np.ndarray:
    """A colour [3] of the two families of the class, more vivid than any background."""
    colour = 90 * rng.random(3)
    colour[category] += 160  # circles red or yellow, rectangles green or cyan, triangles blue, ...
    if rng.random() < 0.5:
        colour[(category + 1) % 3] += 160
    return colour


def _segments_info(segments: np.ndarray, categories: list[int]) -> list[dict[str, Any]]:
    """COCO's description of each segment; ``categories`` are the shapes'."""
    result = []
    for value in np.unique(segments).tolist():
        rows, columns = np.nonzero(segments == value)
        x, y = int(columns.min()), int(rows.min())
        result.append(
            {
                "id": value,
                "category_id": categories[value - 1] if value < 10 else _FIRST_STUFF + value - 10,
                "area": len(rows),
                "bbox": [x, y, int(columns.max()) - x + 1, int(rows.max()) - y + 1],
                "iscrowd": 0,
            }
        )
    return result


def _keypoints(polygon: np.ndarray, owners: np.ndarray, number: int) -> dict[str, Any]:
    """The outermost points of a shape, moved towards its middle, in COCO's format.

    The visibility is 1 if another shape covers the point, and 2 otherwise. A flipped image has the
    flipped keypoints, with left and right exchanged.
    """
    low, high = polygon.min(axis=0), polygon.max(axis=0)
    values: list[float] = []
    for axis, limit in ((0, low), (1, low), (0, high), (1, high)):  # left, top, right, bottom
        outermost = polygon[np.abs(polygon[:, axis] - limit[axis]) < 0.01].mean(axis=0)
        point = outermost + _INWARD * ((low + high) / 2 - outermost)
        row, column = (min(int(v), len(owners) - 1) for v in point[::-1])
        visibility = 2 if owners[row, column] in (0, number) else 1
        # COCO's keypoints are indices of pixels, whose centres are at halves.
        values += [*(round(float(v) - 0.5, 2) for v in point), visibility]
    return {"keypoints": values, "num_keypoints": len(KEYPOINTS)}


def _pattern(rng: np.random.Generator, image: np.ndarray) -> np.ndarray:
    """Draw two patterns, which may be the same, on an image, float [size, size, 3].

    A straight line divides them. Returns the index of each pixel's pattern, int [size, size].
    """
    size = len(image)
    y, x = np.mgrid[:size, :size] + 0.5
    first, second = (int(rng.random() * len(STUFF_CLASSES)) for _ in range(2))
    turn = 2 * math.pi * rng.random()
    centre = size * (0.3 + 0.4 * rng.random(2))
    beyond = (x - centre[0]) * math.cos(turn) + (y - centre[1]) * math.sin(turn) > 0
    stuff = np.where(beyond, second, first)
    period = size * (0.08 + 0.06 * rng.random())
    turn = math.pi * rng.random()
    along = x * math.cos(turn) + y * math.sin(turn)
    across = y * math.cos(turn) - x * math.sin(turn)
    stripes = np.where(along % period < period / 2, 1, -1)
    checks = stripes * np.where(across % period < period / 2, 1, -1)
    contrast = 20 + 15 * rng.random()
    image += contrast * np.choose(stuff, [0, stripes, checks])[..., None]
    return stuff


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--root",
        default=os.getenv("DETECTRON2_DATASETS", "datasets"),
        help="where shapes/ goes (default: $DETECTRON2_DATASETS, else datasets)",
    )
    for name, (default, _, text) in NUMBERS.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=int, default=default, help=f"{text} ({default})")
    parser.add_argument(
        "--panoptic",
        action="store_true",
        help="shapes_panoptic/ instead: with keypoints, and on patterns that are also classes",
    )
    numbers = vars(parser.parse_args(argv))
    make = make_panoptic_shapes if numbers.pop("panoptic") else make_shapes
    try:
        folder = make(**numbers)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"The shapes data set is in {folder}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
