"""The shapes data set itself: images, boxes and polygons, ``shapes_train`` and ``shapes_val``."""

from __future__ import annotations

import os

import numpy as np
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets import register_coco_instances
from PIL import Image

from lambda_det.detection.data.shapes.drawing import (
    SHAPE_CLASSES,
    background,
    paint_shapes,
    place_shapes,
    polygon_area,
)
from lambda_det.detection.data.shapes.folder import SPLITS, image_rng, write_dataset, write_json

_FORMAT = 1  # part of the manifest: to be raised by any change to the pictures


def make_shapes(
    root: str | os.PathLike,
    *,
    num_train: int = 500,
    num_val: int = 100,
    size: int = 128,
    seed: int = 0,
) -> None:
    """Write the shapes data set to ``root/shapes``, unless it is there already.

    Makes ``shapes/{train,val}/*.png`` and ``shapes/annotations/instances_{train,val}.json``.
    Polygons, boxes and areas describe the whole shape as drawn, cut at the image's border but not
    where another shape lies over it. The same arguments give the same pixels and the same JSON to
    the byte, and image number i does not depend on how many follow it.

    Args:
        root: folder that data sets live in, such as ``$DETECTRON2_DATASETS``.
        num_train: images to train on.
        num_val: images to evaluate on.
        size: side of the square images, in pixels.
        seed: another seed makes another data set.

    Raises:
        ConfigError: a number that cannot work.
        DataError: ``root/shapes`` holds something else, which is left as it is.
    """
    manifest = {
        "format": _FORMAT,
        "num_train": num_train,
        "num_val": num_val,
        "size": size,
        "seed": seed,
    }
    write_dataset(root, "shapes", manifest, _write_split)


def register_shapes(root: str | os.PathLike) -> None:
    """Register ``shapes_train`` and ``shapes_val`` with Detectron2; safe to call again.

    Args:
        root: the folder given to :func:`make_shapes`. A later call with another one replaces it.
    """
    folder = os.path.join(os.path.expanduser(os.fspath(root)), "shapes")
    for split in SPLITS:
        name = f"shapes_{split}"
        json_file = os.path.join(folder, "annotations", f"instances_{split}.json")
        if name in DatasetCatalog:
            if MetadataCatalog.get(name).json_file == json_file:
                continue
            DatasetCatalog.remove(name)
            MetadataCatalog.remove(name)
        metadata = {"thing_classes": list(SHAPE_CLASSES)}
        register_coco_instances(name, metadata, json_file, os.path.join(folder, split))


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
    """COCO's annotation of one shape, whose polygon has shape (points, 2)."""
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
