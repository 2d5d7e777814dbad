"""The generated data sets that ``datasets/make_shapes.py`` makes, by their names."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets import load_coco_json, load_sem_seg, register_coco_instances
from detectron2.data.datasets.coco_panoptic import merge_to_panoptic

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


def register_shapes(root: str | os.PathLike) -> None:
    """Register the generated data sets of a folder; they replace those of another folder.

    The names are ``shapes_train``; ``shapes_keypoints_train``; ``shapes_panoptic_train``
    ("separated": instances and semantic masks, for Panoptic FPN); ``shapes_stuff_train`` (only
    semantic masks); and the same with ``_val``.

    Args:
        root: in which ``datasets/make_shapes.py`` makes ``shapes`` and ``shapes_panoptic``.
    """
    root = os.path.expanduser(os.fspath(root))
    folder = os.path.join(root, "shapes_panoptic")
    for split in ("train", "val"):
        names = {
            kind: f"shapes_{kind}{split}" for kind in ("", "keypoints_", "panoptic_", "stuff_")
        }
        for name in filter(DatasetCatalog.__contains__, names.values()):
            DatasetCatalog.remove(name)
            MetadataCatalog.remove(name)
        json_file = os.path.join(root, "shapes", "annotations", f"instances_{split}.json")
        things = {"thing_classes": _THINGS}
        register_coco_instances(names[""], things, json_file, os.path.join(root, "shapes", split))

        json_file = os.path.join(folder, "annotations", f"keypoints_{split}.json")
        images, masks = os.path.join(folder, split), os.path.join(folder, f"stuff_{split}")
        register_coco_instances(names["keypoints_"], {**things, **_KEYPOINTS}, json_file, images)
        # register_coco_panoptic_separated expects JPEG files
        load_stuff = partial(load_sem_seg, masks, images, image_ext="png")
        common = {"image_root": images, "sem_seg_root": masks, **_STUFF}
        DatasetCatalog.register(names["stuff_"], load_stuff)
        MetadataCatalog.get(names["stuff_"]).set(evaluator_type="sem_seg", **common)
        name = names["panoptic_"]
        DatasetCatalog.register(name, partial(_load_panoptic, name, json_file, images, load_stuff))
        MetadataCatalog.get(name).set(
            evaluator_type="coco_panoptic_seg",
            json_file=json_file,
            panoptic_json=os.path.join(folder, "annotations", f"panoptic_{split}.json"),
            panoptic_root=os.path.join(folder, f"panoptic_{split}"),
            **common,
        )


def _load_panoptic(
    name: str, json_file: str, images: str, load_stuff: partial
) -> list[dict[str, Any]]:
    return merge_to_panoptic(load_coco_json(json_file, images, name), load_stuff())
