"""Registered data sets: their files, and registering COCO-format files that the config names."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets import register_coco_instances
from detectron2.utils.file_io import PathManager
from torch.utils.data import Dataset

from lambda_det.config import leaves
from lambda_det.detection.data.ground_truth import file_report, forget_records, ground_truth
from lambda_det.detection.data.shapes import register_shapes_among
from lambda_det.detection.data.truth import all_decided
from lambda_det.detection.registry import class_keys
from lambda_det.errors import ConfigError, DataError, listed, suggest
from lambda_det.files import expanded

# The letter of the left side, as in l_eye, L-Eye, eye.l and LEye
_LEFT = re.compile(r"(?<![^\W_])[lL](?=[\W_A-Z]|$)")
_HERE = "the folder that the environment variable DETECTRON2_DATASETS names (now {root})"
# what to do about missing data, by the beginnings of their names
_ADVICE = {
    ("shapes_",): (
        "make it with `python datasets/make_shapes.py` (of keypoints, semantic masks and segments "
        "`python datasets/make_shapes.py --panoptic`), which needs no download, or correct "
        f"{_HERE}"
    ),
    ("coco_", "keypoints_coco_"): (
        f"unpack COCO 2017 (datasets/README.md) into coco/ under {_HERE}, or try without any "
        "download: run `python datasets/make_shapes.py` and train on shapes_train"
    ),
    ("",): "put the data there or correct the path",
}
# of the files and folders of a data set, in Detectron2's metadata
_PLACES = ("image_root", "sem_seg_root", "panoptic_root", "panoptic_json")


def registered_files(name: str) -> tuple[str, str]:
    """The annotation file and image folder of a registered data set in COCO format.

    Raises:
        ConfigError: ``name`` is not registered, or is not a data set of COCO instances.
        DataError: one of its files or folders is missing.
    """
    if (files := check_files(name)) is None:
        raise ConfigError(
            f"The data set {name!r} does not hold COCO instances; name one that does."
        )
    return files


def has_masks(name: str) -> bool:
    """Whether any annotation of a registered data set has a mask, or there is no annotation."""
    if is_coco(name):
        report = file_report(*registered_files(name))
        return report.masks > 0 or report.annotations == 0
    entries = [entry for record in load_records(name) for entry in record.get("annotations", ())]
    return not entries or any("segmentation" in entry for entry in entries)


def check_files(name: str) -> tuple[str, str] | None:
    """:func:`registered_files`; None for a data set that does not hold COCO instances.

    From now on the data set gives records that are checked and repaired.

    Raises:
        ConfigError: ``name`` is not registered.
        DataError: one of its files or folders is missing.
    """
    register_shapes_among([name])
    if name not in DatasetCatalog:
        hint = suggest(name, DatasetCatalog)
        raise ConfigError(f"The data set {name!r} is not registered{hint}")
    metadata = MetadataCatalog.get(name)
    # of another data set, Detectron2's evaluator may have named a temporary file
    places = ("json_file", *_PLACES) if is_coco(name) else _PLACES
    for path in filter(None, map(metadata.get, places)):
        if not PathManager.exists(path):
            root = os.path.abspath(expanded(os.getenv("DETECTRON2_DATASETS", "datasets")))
            advice = next(text for starts, text in _ADVICE.items() if name.startswith(starts))
            raise DataError(
                f"No data for {name}: {os.path.abspath(path)} does not exist; "
                f"{advice.format(root=root)}."
            )
    _decide_when_loaded(name)
    if not is_coco(name):
        return None
    return os.fspath(metadata.json_file), os.fspath(metadata.image_root)


def load_records(name: str) -> Any:
    """The records of a registered data set, checked and repaired.

    Raises:
        ConfigError: ``name`` is not registered.
        DataError: one of its files or folders is missing, or it cannot be read.
    """
    check_files(name)
    return DatasetCatalog.get(name)


def forget_all_but(names: Iterable[str]) -> None:
    """Forget the records of files that are kept, but for these data sets."""
    known = (check_files(name) for name in names if name in DatasetCatalog)
    forget_records(but=filter(None, known))


def _decide_when_loaded(name: str) -> None:
    """Let a registered data set give records that are checked and repaired, once."""
    load = DatasetCatalog[name]
    if getattr(load, "is_decided", False):
        return
    # a user's function may give others than those of the file that its metadata name
    of_file = is_coco(name) and load.__module__ == "detectron2.data.datasets.coco"

    @functools.wraps(load)
    def load_decided() -> Any:
        metadata = MetadataCatalog.get(name)
        names = metadata.get("keypoint_names")
        keypoints = None if names is None else len(names)
        if of_file:
            truth = ground_truth(metadata.json_file, metadata.image_root, keypoints)
            metadata.thing_classes = truth.report.classes
            metadata.thing_dataset_id_to_contiguous_id = truth.report.places
            return truth.records
        records = load()
        if isinstance(records, Dataset) or not isinstance(records, Sequence):
            return records  # the loader decides about each record when it is read
        return all_decided(records, name, keypoints)

    load_decided.is_decided = True
    DatasetCatalog[name] = load_decided


def is_coco(name: str) -> bool:
    """Whether a data set has instances in COCO format; it may have other annotations as well."""
    metadata = MetadataCatalog.get(name)
    kinds = ("coco", "coco_panoptic_seg")
    return metadata.get("evaluator_type") in kinds and bool(metadata.get("json_file"))


def given_name(name: str) -> str:
    """What its user calls a registered data set: the labels, where a command line named those."""
    return MetadataCatalog.get(name).get("given_name", name)


logger = logging.getLogger(__name__)


def register_json_datasets(cfg: CfgNode) -> None:
    """Register the files of ``DATASETS.{TRAIN,TEST}_{JSON,IMAGES}`` and make ``cfg`` use them.

    ``DATASETS.TRAIN`` and ``.TEST`` become the new names. The numbers of classes become the number
    of categories in the training file, or in the test file if no training file is given. A training
    file without a test file empties ``DATASETS.TEST``, which named other data. Without a file
    nothing changes. It is safe to call it again, in the same or another process.

    Raises:
        ConfigError: one of a pair is given without the other.
        DataError: a file is missing or not in COCO format.
    """
    train, test = (
        register_coco_files(
            cfg.DATASETS[f"{split.upper()}_JSON"],
            cfg.DATASETS[f"{split.upper()}_IMAGES"],
            split,
            keypoints=cfg.MODEL.KEYPOINT_ON,
        )
        for split in ("train", "test")
    )
    if train:
        if cfg.INPUT.RANDOM_FLIP == "horizontal":
            _report_pairs(train)
        cfg.DATASETS.TRAIN = (train,)
        if not test:
            logger.info("There is no evaluation; --test-json and --test-images name data.")
            cfg.DATASETS.TEST = ()
    if test:
        cfg.DATASETS.TEST = (test,)
    if train or test:
        names = MetadataCatalog.get(train or test).thing_classes
        present = dict(leaves(cfg))
        for key in filter(present.__contains__, class_keys()):
            cfg.merge_from_list([key, len(names)])


def register_coco_files(
    json_file: str,
    images: str,
    split: str,
    *,
    keypoints: bool = False,
) -> str | None:
    """Register a data set by its files. Safe to call again, in the same or another process.

    Args:
        json_file: annotations in COCO's format.
        images: the folder of the images.
        split: "train" or "test", which names the flags in messages.
        keypoints: also read the names of keypoints.

    Returns:
        The name of the data set; None where neither file nor folder is given.

    Raises:
        ConfigError: one of the two is given without the other.
        DataError: a file is missing, not in COCO's format, or refused by a rule for what it holds.
    """
    if not json_file and not images:
        return None
    json_flag, images_flag = (
        f"--{split}-{what} (DATASETS.{split.upper()}_{what.upper()})" for what in ("json", "images")
    )
    if not json_file or not images:
        raise ConfigError(f"One of {json_flag} and {images_flag} is not given; give both.")
    json_file, images = os.path.abspath(expanded(json_file)), os.path.abspath(expanded(images))
    if not os.path.isdir(images):
        raise DataError(
            f"The image folder {images} of {images_flag} does not exist; correct the path."
        )
    report = file_report(json_file, images)
    if refusal := report.refusal():
        raise DataError(refusal)
    categories = [f"{number} {name}" for number, name in report.categories.items()]
    stem = os.path.splitext(os.path.basename(json_file))[0]
    stem = re.sub("_[0-9a-f]{8}$", "", stem)  # a digest of its content, where prepare wrote it
    # The categories are part of the name: a changed file is another data set for the catalogue
    identity = "\n".join([json_file, images, *categories])
    name = f"{stem}_{hashlib.sha256(os.fsencode(identity)).hexdigest()[:8]}"
    if name not in DatasetCatalog:
        facts = {"thing_classes": report.classes, "given_name": report.json_file}
        register_coco_instances(name, facts, json_file, images)
        _decide_when_loaded(name)
    metadata, names = MetadataCatalog.get(name), report.keypoints
    if keypoints and names and not metadata.get("keypoint_names"):
        # a flip exchanges left and right
        metadata.set(keypoint_names=names, keypoint_flip_map=_pairs(names))
    return name


def _pairs(names: Sequence[str]) -> list[tuple[str, str]]:
    """Names that differ only in their side, such as left_eye and right_eye, L-Eye and R-Eye."""
    by_folded = {name.casefold(): name for name in names}
    pairs = {}  # the left name by the right one
    for name in names:
        folded = name.casefold()
        for other in (folded.replace("left", "right"), _LEFT.sub("r", name).casefold()):
            if other != folded and other in by_folded:
                pairs.setdefault(by_folded[other], name)
    return [(left, right) for right, left in pairs.items()]


def _report_pairs(name: str) -> None:
    """Log which keypoints of a training set a flip exchanges; a warning if these are none."""
    pairs = MetadataCatalog.get(name).get("keypoint_flip_map")
    if pairs is not None:
        names = listed((f"{left} and {right}" for left, right in pairs), 20)
        logger.log(
            logging.INFO if pairs else logging.WARNING,
            f"A horizontal flip of an image of {name} exchanges its keypoints: {names or 'none'}. "
            "Those with sides need names such as left_eye and right_eye, or l_eye and r_eye; "
            "INPUT.RANDOM_FLIP none flips no image.",
        )
