"""The files behind the name of a registered data set, or where to get them."""

from __future__ import annotations

import difflib
import os

from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.utils.file_io import PathManager

from lambda_det.errors import ConfigError, DataError

_GET_COCO = (
    "for COCO 2017 unpack http://images.cocodataset.org/zips/train2017.zip, "
    "http://images.cocodataset.org/zips/val2017.zip and "
    "http://images.cocodataset.org/annotations/annotations_trainval2017.zip into coco/train2017, "
    "coco/val2017 and coco/annotations under the folder that the environment variable "
    "DETECTRON2_DATASETS names (now {root}); to try without any download, run "
    "`python datasets/make_shapes.py` and train on shapes_train"
)
_GET_SHAPES = (
    "make it with `python datasets/make_shapes.py`, which needs no download, or point the "
    "environment variable DETECTRON2_DATASETS (now {root}) at the folder that holds shapes/"
)
_GET_PANOPTIC = (
    "for the panoptic segments of COCO unpack "
    "http://images.cocodataset.org/annotations/panoptic_annotations_trainval2017.zip into coco/ "
    "under the folder that the environment variable DETECTRON2_DATASETS names (now {root}), and "
    "run datasets/prepare_panoptic_fpn.py of Detectron2, which makes the stuff masks; to try "
    "without any download, run `python datasets/make_shapes.py --panoptic` and train on "
    "shapes_panoptic_train or shapes_stuff_train"
)
_PANOPTIC_SHAPES = ("shapes_keypoints_", "shapes_panoptic_", "shapes_stuff_")
_GET_PANOPTIC_SHAPES = _GET_SHAPES.replace("make_shapes.py`", "make_shapes.py --panoptic`").replace(
    "holds shapes/", "holds shapes_panoptic/"
)


def registered_files(name: str) -> tuple[str, str]:
    """The annotation file and image folder of a registered data set in COCO's format.

    Raises:
        ConfigError: ``name`` is not registered, or is not a data set of COCO instances.
        DataError: the file or the folder is not there.
    """
    if name not in DatasetCatalog:
        near = difflib.get_close_matches(name, list(DatasetCatalog), n=4, cutoff=0.6)
        hint = f"; did you mean {', '.join(near)}?" if near else "; correct the name."
        raise ConfigError(f"The data set {name!r} is not registered{hint}")
    metadata = MetadataCatalog.get(name)
    if not is_coco(name):
        raise ConfigError(f"The data set {name!r} is not one of COCO instances; name one that is.")
    json_file, image_root = metadata.json_file, os.fspath(metadata.image_root)
    for path, exists in ((json_file, PathManager.isfile), (image_root, PathManager.isdir)):
        if not exists(path):
            raise DataError(_how_to_get(name, path))
    return json_file, image_root


def is_coco(name: str) -> bool:
    """Whether there are instances in COCO's format, maybe among other things."""
    metadata = MetadataCatalog.get(name)
    kinds = ("coco", "coco_panoptic_seg")
    return metadata.get("evaluator_type") in kinds and bool(metadata.get("json_file"))


def check_segmentation_files(name: str) -> None:
    """Whether the semantic and panoptic masks of a registered data set are there.

    Raises:
        DataError: one of the files or folders is not.
    """
    metadata = MetadataCatalog.get(name)
    for key in ("image_root", "sem_seg_root", "panoptic_root", "panoptic_json"):
        path = metadata.get(key)
        if path and not PathManager.exists(path):
            raise DataError(_how_to_get(name, path))


def _how_to_get(name: str, path: str) -> str:
    root = os.path.abspath(os.path.expanduser(os.getenv("DETECTRON2_DATASETS", "datasets")))
    advice = "put the data there or correct the path"
    if name.startswith("coco_") and "panoptic" in path:
        advice = _GET_PANOPTIC.format(root=root)
    elif name.startswith(_PANOPTIC_SHAPES):
        advice = _GET_PANOPTIC_SHAPES.format(root=root)
    elif name.startswith(("coco_", "keypoints_coco_")):
        advice = _GET_COCO.format(root=root)
    elif name.startswith("shapes_"):
        advice = _GET_SHAPES.format(root=root)
    return f"No data for {name}: {os.path.abspath(path)} does not exist; {advice}."
