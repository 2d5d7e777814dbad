"""Shapes with keypoints on patterned backgrounds: keypoint, semantic and panoptic ground truth."""

from __future__ import annotations

import math
import os
from functools import partial
from typing import Any

import numpy as np
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets import load_coco_json, load_sem_seg, register_coco_instances
from detectron2.data.datasets.coco_panoptic import merge_to_panoptic
from PIL import Image

from lambda_det.detection.data.shapes import (
    SHAPE_CLASSES,
    SPLITS,
    background,
    describe_shape,
    image_rng,
    is_free,
    paint_shapes,
    place_shapes,
    rasterise,
    write_dataset,
    write_json,
)

STUFF_CLASSES = ("plain", "striped", "checked")
KEYPOINTS = ("left", "top", "right", "bottom")

_NAME = "shapes_panoptic"
_FORMAT = 1  # part of the manifest; raise it with any change to the data
_INWARD = 0.25  # the place of a keypoint between the outline, 0, and the middle, 1
_FIRST_STUFF = len(SHAPE_CLASSES) + 1  # category id; those of the shapes come before
_CATEGORIES = [
    {
        "id": i,
        "name": name,
        "isthing": int(i < _FIRST_STUFF),
        # Detectron2 reads names and flips from the metadata; these are for other programs.
        **({"keypoints": KEYPOINTS, "skeleton": []} if i < _FIRST_STUFF else {}),
    }
    for i, name in enumerate(SHAPE_CLASSES + STUFF_CLASSES, start=1)
]
_METADATA = {
    "thing_classes": list(SHAPE_CLASSES),
    # As in Detectron2's "separated" COCO, class 0 of the semantic masks is all things.
    "stuff_classes": ["things", *STUFF_CLASSES],
    "thing_dataset_id_to_contiguous_id": {i + 1: i for i in range(len(SHAPE_CLASSES))},
    "stuff_dataset_id_to_contiguous_id": {
        0: 0,
        **{_FIRST_STUFF + i: i + 1 for i in range(len(STUFF_CLASSES))},
    },
}


def make_panoptic_shapes(
    root: str | os.PathLike,
    *,
    num_train: int = 500,
    num_val: int = 100,
    size: int = 128,
    seed: int = 0,
) -> None:
    """Write shapes on patterned backgrounds to ``root/shapes_panoptic``, unless it exists.

    The files are ``{train,val}/*.png``, ``annotations/keypoints_{train,val}.json`` with boxes,
    polygons and the keypoints of :data:`KEYPOINTS`, ``annotations/panoptic_{train,val}.json`` with
    ``panoptic_{train,val}/*.png`` in COCO's panoptic format, and ``stuff_{train,val}/*.png`` with
    0 for things and the classes of :data:`STUFF_CLASSES` from 1. Polygons are whole; panoptic masks
    hold the visible part. Arguments and errors are those of
    :func:`lambda_det.detection.data.make_shapes`.
    """
    numbers = {"num_train": num_train, "num_val": num_val, "size": size, "seed": seed}
    write_dataset(root, _NAME, {"format": _FORMAT, **numbers}, _write_split)


def register_panoptic_shapes(root: str | os.PathLike) -> None:
    """Register keypoint, panoptic and stuff data of both splits. It is safe to call it again.

    The names are ``shapes_keypoints_train``, ``shapes_panoptic_train`` ("separated": instances and
    semantic masks, for Panoptic FPN), ``shapes_stuff_train`` (only semantic masks), and the same
    with ``_val``.

    Args:
        root: the folder given to :func:`make_panoptic_shapes`. A later call with another one
            replaces it.
    """
    folder = os.path.join(os.path.expanduser(os.fspath(root)), _NAME)
    for split in SPLITS:
        json_file = os.path.join(folder, "annotations", f"keypoints_{split}.json")
        images = os.path.join(folder, split)
        stuff = os.path.join(folder, f"stuff_{split}")
        name = f"shapes_keypoints_{split}"
        if is_free(name, images):
            metadata = {
                "thing_classes": list(SHAPE_CLASSES),
                "keypoint_names": list(KEYPOINTS),
                "keypoint_flip_map": [("left", "right")],
            }
            register_coco_instances(name, metadata, json_file, images)
        # register_coco_panoptic_separated expects JPEG files
        load_stuff = partial(load_sem_seg, stuff, images, image_ext="png")
        common = {"image_root": images, "sem_seg_root": stuff, "ignore_label": 255, **_METADATA}
        name = f"shapes_panoptic_{split}"
        if is_free(name, images):
            DatasetCatalog.register(
                name, partial(_load_panoptic, name, json_file, images, load_stuff)
            )
            MetadataCatalog.get(name).set(
                evaluator_type="coco_panoptic_seg",
                json_file=json_file,
                panoptic_json=os.path.join(folder, "annotations", f"panoptic_{split}.json"),
                panoptic_root=os.path.join(folder, f"panoptic_{split}"),
                **common,
            )
        name = f"shapes_stuff_{split}"
        if is_free(name, images):
            DatasetCatalog.register(name, load_stuff)
            MetadataCatalog.get(name).set(evaluator_type="sem_seg", **common)


def _load_panoptic(
    name: str, json_file: str, images: str, load_stuff: partial
) -> list[dict[str, Any]]:
    return merge_to_panoptic(load_coco_json(json_file, images, name), load_stuff())


def _write_split(folder: str, split: str, count: int, size: int, seed: int) -> None:
    for name in (split, f"panoptic_{split}", f"stuff_{split}"):
        os.makedirs(os.path.join(folder, name))
    images, instances, panoptic = [], [], []
    for index in range(count):
        rng = image_rng(seed, split, index)
        shapes = place_shapes(rng, size)
        picture, stuff = _patterned_background(rng, size)
        picture = paint_shapes(rng, picture, shapes)
        image_id, name = index + 1, f"{index:06d}.png"
        images.append({"id": image_id, "file_name": name, "width": size, "height": size})
        owners = np.zeros((size, size), dtype=np.int64)  # 0 is background, i the i-th shape
        for number, (_, polygon) in enumerate(shapes, start=1):
            owners[rasterise(polygon, size) >= 0.5] = number
        for number, (category, polygon) in enumerate(shapes, start=1):
            entry = describe_shape(len(instances) + 1, image_id, category, polygon)
            instances.append(entry | _keypoints(polygon, owners, number))
        # Ids in the panoptic image: shapes as in owners; stuff from 10, more than any image has
        segments = np.where(owners > 0, owners, 10 + stuff)
        categories = [category + 1 for category, _ in shapes]
        panoptic.append(
            {
                "image_id": image_id,
                "file_name": name,
                "segments_info": _segments_info(segments, categories),
            }
        )
        encoded = np.stack([segments % 256, segments // 256, 0 * segments], axis=-1)
        for kind, pixels in (
            (split, picture),
            (f"panoptic_{split}", encoded.astype(np.uint8)),
            (f"stuff_{split}", np.where(owners > 0, 0, stuff + 1).astype(np.uint8)),
        ):
            Image.fromarray(pixels).save(os.path.join(folder, kind, name))
    things = [entry for entry in _CATEGORIES if entry["isthing"]]
    for kind, entries, categories in (
        ("keypoints", instances, things),
        ("panoptic", panoptic, _CATEGORIES),
    ):
        content = {
            "info": {"description": f"shapes, {kind}, {split}, seed {seed}"},
            "images": images,
            "annotations": entries,
            "categories": categories,
        }
        write_json(os.path.join(folder, "annotations", f"{kind}_{split}.json"), content)


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


def _patterned_background(rng: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
    """A background, float [size, size, 3], and the index of its pattern, int [size, size].

    A straight line divides it into two patterns, which may be the same.
    """
    y, x = np.mgrid[:size, :size] + 0.5
    picture = background(rng, size)
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
    return picture + contrast * np.choose(stuff, [0, stripes, checks])[..., None], stuff
