"""The generated data sets that ``datasets/make_shapes.py`` makes, by their names."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets import load_coco_json, load_sem_seg, register_coco_instances
from detectron2.data.datasets.coco_panoptic import merge_to_panoptic

from lambda_det.errors import ConfigError

_THINGS = ["circle", "rectangle", "triangle"]
_KEYPOINTS = {
    "keypoint_names": ["left", "top", "right", "bottom"],
    "keypoint_flip_map": [("left", "right")],
}
# As in Detectron2's "separated" COCO, class 0 of the semantic masks is all things.
_STUFF = {
    "thing_classes": _THINGS,
    "thing_dataset_id_to_contiguous_id": {1: 0, 2: 1, 3: 2},
    "stuff_classes": ["things", "plain", "striped", "checked"],
    "stuff_dataset_id_to_contiguous_id": {0: 0, 4: 1, 5: 2, 6: 3},
    "ignore_label": 255,
}
_PREFIX = "shapes_"
_NAMES = [
    f"{_PREFIX}{kind}{part}"
    for part in ("train", "val")
    for kind in ("", "keypoints_", "panoptic_", "stuff_")
]
# Marks the metadata of what is registered here: another project may have these names as well
_MAKER = {"maker": "datasets/make_shapes.py"}


def register_shapes(root: str | os.PathLike) -> None:
    """Register the generated data sets of a folder; they replace data sets of another folder.

    The names are ``shapes_train``; ``shapes_keypoints_train``; ``shapes_panoptic_train``
    ("separated": instances and semantic masks, for Panoptic FPN); ``shapes_stuff_train`` (only
    semantic masks); and the same with ``_val``.

    Args:
        root: in which ``datasets/make_shapes.py`` makes ``shapes`` and ``shapes_panoptic``.

    Raises:
        ConfigError: another project has registered one of the names.
    """
    for name in _NAMES:
        _remove(name)
        if name in DatasetCatalog:
            raise ConfigError(
                f"The data set {name!r} is registered already, and not by lambda_det; register "
                "yours under another name."
            )
        _register(name, os.path.expanduser(os.fspath(root)))


def register_shapes_among(names: Iterable[str]) -> None:
    """Register the generated data sets where one of them is asked for, under names that are free.

    Their folder is that in which Detectron2 looks for its own data sets.

    Args:
        names: of data sets, of which others are left alone.
    """
    if any(name.startswith(_PREFIX) and name not in DatasetCatalog for name in names):
        root = os.path.expanduser(os.getenv("DETECTRON2_DATASETS", "datasets"))
        for name in _NAMES:
            if name not in DatasetCatalog:
                _register(name, root)


def lend_shapes() -> None:
    """Register the generated data sets until another project registers one of their names."""
    register_shapes_among(_NAMES)
    register = DatasetCatalog.register

    def register_instead(name: str, load: Callable[[], Any]) -> None:
        _remove(name)
        register(name, load)

    DatasetCatalog.register = register_instead


def _is_ours(name: str) -> bool:
    return name in DatasetCatalog and MetadataCatalog.get(name).get("maker") == _MAKER["maker"]


def _remove(name: str) -> None:
    """Remove a data set that was registered here."""
    if _is_ours(name):
        DatasetCatalog.remove(name)
        MetadataCatalog.remove(name)


def _register(name: str, root: str) -> None:
    kind, _, part = name.removeprefix(_PREFIX).rpartition("_")
    folder = os.path.join(root, "shapes_panoptic" if kind else "shapes")
    images, masks = os.path.join(folder, part), os.path.join(folder, f"stuff_{part}")
    labels = os.path.join(folder, "annotations", f"{kind or 'instances'}_{part}.json")
    if kind in ("", "keypoints"):
        more = _KEYPOINTS if kind else {}
        register_coco_instances(name, {"thing_classes": _THINGS, **more, **_MAKER}, labels, images)
        return
    # register_coco_panoptic_separated expects JPEG files
    load = partial(load_sem_seg, masks, images, image_ext="png")
    about = {"image_root": images, "sem_seg_root": masks, **_STUFF, **_MAKER}
    if kind == "stuff":
        about["evaluator_type"] = "sem_seg"
    else:
        things = os.path.join(folder, "annotations", f"keypoints_{part}.json")
        load = partial(_load_panoptic, name, things, images, load)
        about |= {
            "evaluator_type": "coco_panoptic_seg",
            "json_file": things,
            "panoptic_json": labels,
            "panoptic_root": os.path.join(folder, f"panoptic_{part}"),
        }
    DatasetCatalog.register(name, load)
    MetadataCatalog.get(name).set(**about)


def _load_panoptic(
    name: str, json_file: str, images: str, load_stuff: partial
) -> list[dict[str, Any]]:
    return merge_to_panoptic(load_coco_json(json_file, images, name), load_stuff())
