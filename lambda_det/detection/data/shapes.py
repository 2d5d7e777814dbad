"""The shapes data set: COCO-format data made on the spot, from a seed.

Circles, rectangles and triangles of any size and rotation overlap on textured backgrounds. Each
class has two families of colour, so a small detector learns them within minutes, and its AP shows
whether a pipeline works.

numpy may change its distributions, so everything here draws only from ``random()``, in an order
that is part of the data format.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import tempfile
from collections.abc import Callable

import numpy as np
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets import register_coco_instances
from PIL import Image

from lambda_det.errors import ConfigError, DataError

_FORMAT = 1  # part of the manifest; raise it with any change to the pictures


def make_shapes(
    root: str | os.PathLike,
    *,
    num_train: int = 500,
    num_val: int = 100,
    size: int = 128,
    seed: int = 0,
) -> None:
    """Write the shapes data set to ``root/shapes``, unless it exists.

    Files: ``shapes/{train,val}/*.png`` and ``shapes/annotations/instances_{train,val}.json``.
    Polygons, boxes and areas describe the whole shape within the image, including parts that other
    shapes cover. The same arguments give the same pixels and the same bytes of JSON. Image number i
    does not depend on the number of images.

    Args:
        root: folder that data sets live in, such as ``$DETECTRON2_DATASETS``.
        num_train: images to train on.
        num_val: images to evaluate on.
        size: side of the square images, in pixels.
        seed: another seed makes another data set.

    Raises:
        ConfigError: a number is too small.
        DataError: ``root/shapes`` holds something else, which stays as it is.
    """
    numbers = {"num_train": num_train, "num_val": num_val, "size": size, "seed": seed}
    write_dataset(root, "shapes", {"format": _FORMAT, **numbers}, _write_split)


def register_shapes(root: str | os.PathLike) -> None:
    """Register ``shapes_train`` and ``shapes_val`` with Detectron2. It is safe to call it again.

    Args:
        root: the folder given to :func:`make_shapes`. A later call with another folder replaces it.
    """
    folder = os.path.join(os.path.expanduser(os.fspath(root)), "shapes")
    for split in SPLITS:
        name = f"shapes_{split}"
        images = os.path.join(folder, split)
        if is_free(name, images):
            json_file = os.path.join(folder, "annotations", f"instances_{split}.json")
            metadata = {"thing_classes": list(SHAPE_CLASSES)}
            register_coco_instances(name, metadata, json_file, images)


def is_free(name: str, images: str) -> bool:
    """Whether the name must be registered; a data set of another folder under it is removed."""
    if name in DatasetCatalog:
        if MetadataCatalog.get(name).image_root == images:
            return False
        DatasetCatalog.remove(name)
        MetadataCatalog.remove(name)
    return True


def _write_split(folder: str, split: str, count: int, size: int, seed: int) -> None:
    os.makedirs(os.path.join(folder, split))
    images, annotations = [], []
    for index in range(count):
        rng = image_rng(seed, split, index)
        shapes = place_shapes(rng, size)
        picture = paint_shapes(rng, background(rng, size), shapes)
        name = f"{index:06d}.png"
        Image.fromarray(picture).save(os.path.join(folder, split, name))
        images.append({"id": index + 1, "file_name": name, "width": size, "height": size})
        for category, polygon in shapes:
            annotations.append(describe_shape(len(annotations) + 1, index + 1, category, polygon))
    content = {
        "info": {"description": f"shapes, {split}, seed {seed}"},
        "images": images,
        "annotations": annotations,
        "categories": [{"id": i, "name": name} for i, name in enumerate(SHAPE_CLASSES, start=1)],
    }
    write_json(os.path.join(folder, "annotations", f"instances_{split}.json"), content)


def describe_shape(number: int, image_id: int, category: int, polygon: np.ndarray) -> dict:
    """COCO's annotation of a shape, of a polygon [points, 2]."""
    x, y = polygon.T
    box = (x.min(), y.min(), x.max() - x.min(), y.max() - y.min())
    return {
        "id": number,
        "image_id": image_id,
        "category_id": category + 1,
        "iscrowd": 0,
        "segmentation": [[round(float(v), 2) for v in polygon.reshape(-1)]],
        "bbox": [round(float(v), 2) for v in box],
        "area": round(polygon_area(polygon), 2),
    }


SPLITS = ("train", "val")

logger = logging.getLogger(__name__)


def write_dataset(
    root: str | os.PathLike,
    name: str,
    manifest: dict[str, int],
    write_split: Callable[[str, str, int, int, int], None],
) -> None:
    """Write ``root/name`` with its manifest, unless it exists.

    Args:
        root: the folder of data sets.
        name: of the new folder in it.
        manifest: the format, num_train, num_val, size and seed.
        write_split: called with the folder to write into, the split, its number of images, size and
            seed.

    Raises:
        ConfigError: a number is too small.
        DataError: ``root/name`` holds something else, which stays as it is.
    """
    for key, lowest in (("num_train", 1), ("num_val", 1), ("size", 32), ("seed", 0)):
        if manifest[key] < lowest:
            raise ConfigError(f"{key} is {manifest[key]}; give at least {lowest}.")
    root = os.path.expanduser(os.fspath(root))
    folder = os.path.join(root, name)
    if _is_made(folder, manifest):
        logger.info("The %s data set is already in %s.", name, folder)
        return
    try:
        os.makedirs(root, exist_ok=True)
        # Written elsewhere and renamed, so that an interrupted run leaves no half data set.
        workplace = tempfile.mkdtemp(prefix=f".{name}-", dir=root)
    except OSError as error:
        raise DataError(
            f"The {name} data set cannot be written to {root}: {error.strerror}; "
            "give a folder that can be written to."
        ) from error
    counts = (manifest["num_train"], manifest["num_val"])
    try:
        made = os.path.join(workplace, name)
        os.makedirs(os.path.join(made, "annotations"))
        for split, count in zip(SPLITS, counts, strict=True):
            write_split(made, split, count, manifest["size"], manifest["seed"])
        write_json(os.path.join(made, "manifest.json"), manifest)
        try:
            os.rename(made, folder)
        except OSError:
            if not _is_made(folder, manifest):  # otherwise another process was faster
                raise
    finally:
        shutil.rmtree(workplace, ignore_errors=True)
    logger.info("Made the %s data set in %s: %d + %d images.", name, folder, *counts)


def _is_made(folder: str, manifest: dict[str, int]) -> bool:
    """Whether ``folder`` holds the data set of ``manifest``; DataError if it holds another."""
    if not os.path.lexists(folder) or (os.path.isdir(folder) and not os.listdir(folder)):
        return False
    try:
        with open(os.path.join(folder, "manifest.json"), encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError):
        found = None
    if found != manifest:
        holds = f"shapes made with {found}" if found else "something that was not made here"
        raise DataError(
            f"{folder} holds {holds}, and stays as it is; move it away or give another root."
        )
    return True


def write_json(path: str, content: dict) -> None:
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        json.dump(content, file, separators=(",", ":"))


def image_rng(seed: int, split: str, index: int) -> np.random.Generator:
    """The random numbers of one image."""
    source = np.random.SeedSequence([seed, SPLITS.index(split), index])
    return np.random.Generator(np.random.PCG64(source))


SHAPE_CLASSES = ("circle", "rectangle", "triangle")

_MIN_DIAMETER, _MAX_DIAMETER = 0.125, 0.625  # of the image's side: 16 to 80 pixels at 128
_MIN_VISIBLE = 0.75  # share of a shape that later shapes and the border leave visible
_SUBSAMPLES = 3  # points along each side of a pixel that measure its coverage


def place_shapes(rng: np.random.Generator, size: int) -> list[tuple[int, np.ndarray]]:
    """The shapes of one picture as (class, polygon [points, 2]), in drawing order."""
    wanted = 1 + int(rng.random() * 4)
    shapes: list[tuple[int, np.ndarray]] = []
    coverages: list[tuple[np.ndarray, float]] = []
    for _ in range(4 * wanted):  # a shape that would hide too much of another is drawn again
        category = int(rng.random() * len(SHAPE_CLASSES))
        whole = _outline(rng, SHAPE_CLASSES[category], size)
        # The picture is drawn from the rounded numbers of the annotations.
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


def polygon_area(polygon: np.ndarray) -> float:
    x, y = polygon.T
    return 0.5 * abs(float(np.sum(x * np.roll(y, -1) - y * np.roll(x, -1))))


def rasterise(polygon: np.ndarray, size: int) -> np.ndarray:
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
