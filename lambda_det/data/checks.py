"""Looking a COCO-format data set over, before hours are spent on it."""

from __future__ import annotations

import difflib
import functools
import itertools
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.utils.file_io import PathManager

from lambda_det.data.mapper import image_fault, is_polygon, usable_runs
from lambda_det.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

# What is made of each kind of finding. REFUSED: loading, training or evaluation would break or be
# wrong. BAD_BOX: left out of training or cut at the border, and refused when there are many.
# NOTED: allowed, though some uses refuse it (see check_datasets).
REFUSED, BAD_BOX, NOTED = "refused", "bad box", "noted"
KINDS = {
    "image id used twice": REFUSED,
    "annotation id used twice": REFUSED,
    "category id used twice": REFUSED,
    "image whose width or height is not above 0": REFUSED,
    "annotation of an image that is not listed": REFUSED,
    "annotation of a category that is not listed": REFUSED,
    "bbox that is not a list of four numbers": REFUSED,
    "segmentation that is neither a list of polygons nor a run-length mask": REFUSED,
    "run-length mask that does not fit its image": REFUSED,
    "iscrowd that is neither 0 nor 1": REFUSED,
    "ignore flag, which Detectron2 does not know": REFUSED,
    "image file missing": REFUSED,
    "image file unreadable or of another size": REFUSED,
    "box with NaN or infinite numbers": BAD_BOX,
    "box of zero or negative size": BAD_BOX,
    "box outside its image": BAD_BOX,
    "polygon of fewer than three points, an odd count or no numbers": BAD_BOX,
    "annotation without segmentation": NOTED,
    "annotation without area": NOTED,
    "annotation without iscrowd": NOTED,
    "image without annotations": NOTED,
}

# COCO train2017 itself has one box of zero height among its 860 001, and boxes that stick out of
# their image by a rounding error.
MAX_BAD_BOX_SHARE = 0.01
OUTSIDE_TOLERANCE = 1.0  # pixels

_SMALL, _MEDIUM = 32**2, 96**2  # COCO's limits of area, in pixels
_FIRST_OFFENDERS = 3
_SAMPLED_FILES = 32

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

# The key that holds the number of categories, by MODEL.META_ARCHITECTURE.
_CLASS_KEYS = {
    "GeneralizedRCNN": "MODEL.ROI_HEADS.NUM_CLASSES",
    "PanopticFPN": "MODEL.ROI_HEADS.NUM_CLASSES",
    "RetinaNet": "MODEL.RETINANET.NUM_CLASSES",
}


@dataclass
class Problem:
    """One kind of finding: how often it occurs, and its first occurrences in words."""

    count: int = 0
    first: list[str] = field(default_factory=list)


@dataclass
class Report:
    """What a COCO-format data set holds, and what is wrong with it."""

    json_file: str
    image_root: str
    images: int
    annotations: int
    crowds: int
    usable: int  # annotations that are no crowds and have a box to train on
    categories: dict[int, str]  # names by id, in the order of the ids
    per_category: dict[str, int]  # annotations by category name, crowds included
    sizes: dict[str, int]  # annotations by COCO's sizes: small, medium, large
    problems: dict[str, Problem]  # by the kinds of KINDS, only those that occur
    files: list[dict[str, Any]] = field(repr=False)  # file_name, width and height of each image

    def add(self, kind: str, offenders: Iterable[str], count: int) -> None:
        """Record ``count`` more findings of a kind; only the first ``offenders`` are taken."""
        if count:
            problem = self.problems.setdefault(kind, Problem())
            problem.count += count
            room = _FIRST_OFFENDERS - len(problem.first)
            problem.first.extend(itertools.islice(offenders, room))

    def of(self, severity: str) -> dict[str, Problem]:
        """The problems of one severity: ``REFUSED``, ``BAD_BOX`` or ``NOTED``."""
        return {k: p for k, p in self.problems.items() if KINDS[k] == severity}

    def has_all(self, kind: str) -> bool:
        """Whether every annotation is of that kind."""
        return kind in self.problems and self.problems[kind].count == self.annotations

    def refusal(self) -> str | None:
        """Why nothing should be trained or evaluated on this, in one sentence, or None."""
        advice = f"correct the file (tools/check_dataset.py {self.json_file} lists all kinds)"
        for kind, problem in self.of(REFUSED).items():
            found = f"{problem.count} x {kind}, the first: {problem.first[0]}"
            return f"{self.json_file}: {found}; {advice}."
        bad = self.of(BAD_BOX)
        count = sum(problem.count for problem in bad.values())
        if count > MAX_BAD_BOX_SHARE * self.annotations:
            kind, problem = next(iter(bad.items()))
            return (
                f"{self.json_file}: {count} of {self.annotations} boxes or polygons are bad, more "
                f"than {MAX_BAD_BOX_SHARE:.0%}, the first a {kind}: {problem.first[0]}; {advice}."
            )
        return None


def check_coco(
    json_file: str | os.PathLike,
    image_root: str | os.PathLike,
    *,
    files: Literal["all", "sample", "none"] = "all",
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Look over an annotation file in COCO's format and its images.

    Args:
        json_file: the annotations.
        image_root: the folder of the images.
        files: "all" opens every image and compares its size; "sample" only sees whether the
            first, the last and some others between exist; "none" looks at no image.
        progress: called with (images done, images) while they are opened.

    Returns:
        Counts and findings. The annotations are read again only after the file has changed.

    Raises:
        DataError: the file or folder is missing, not JSON, or not COCO's format at all.
    """
    json_file, image_root = os.fspath(json_file), os.fspath(image_root)
    if not PathManager.isfile(json_file):
        raise DataError(f"The annotation file {json_file} does not exist; correct the path.")
    if files != "none" and not PathManager.isdir(image_root):
        raise DataError(f"The image folder {image_root} does not exist; correct the path.")
    status = os.stat(PathManager.get_local_path(json_file))
    report = deepcopy(_inspect(json_file, status.st_mtime_ns, status.st_size))
    report.image_root = image_root
    if files == "sample":
        _check_existence(report)
    elif files == "all":
        _check_images(report, progress)
    return report


def check_datasets(cfg: CfgNode, *, train: bool, test: bool) -> None:
    """Refuse, in one sentence, data sets that cannot be trained or evaluated on with ``cfg``.

    Cheap enough to be called before each run: it reads the annotations, but opens no image.

    Args:
        cfg: the config of the run.
        train: check ``DATASETS.TRAIN``.
        test: check ``DATASETS.TEST``.

    Raises:
        ConfigError: a name, a switch or a number of classes in the config does not fit the data.
        DataError: the data are missing or broken.
    """
    train_names = tuple(cfg.DATASETS.TRAIN) if train else ()
    test_names = tuple(cfg.DATASETS.TEST) if test else ()
    if train and not train_names:
        raise ConfigError("DATASETS.TRAIN names no data set; name one to train on.")
    if test and not train and not test_names:
        raise ConfigError("DATASETS.TEST names no data set; name one to evaluate on.")
    reports = {name: _check_registered(name) for name in dict.fromkeys(train_names + test_names)}
    for name, report in reports.items():
        if report is not None:
            _check_masks(cfg, name, report, training=name in train_names)
            if name in test_names:
                _check_evaluable(name, report)
    _check_usable([reports[name] for name in train_names], train_names)
    _check_categories(cfg, reports)


# ----------------------------------------------------------------------- the annotation file


@functools.lru_cache(maxsize=4)
def _inspect(json_file: str, mtime_ns: int, size: int) -> Report:
    """The report on the annotations alone; the file's time and size only tell versions apart."""
    content = _read_json(json_file)
    images = _entries(json_file, content, "images", ("id", "file_name", "width", "height"))
    annotations = _entries(json_file, content, "annotations", ("id", "image_id", "category_id"))
    categories = _entries(json_file, content, "categories", ("id", "name"))
    for name, entries in (("images", images), ("categories", categories)):
        if not entries:
            raise DataError(f"{json_file}: the list {name!r} is empty; add at least one entry.")
    for entry in images:
        if not isinstance(entry["file_name"], str):
            raise DataError(
                f"{json_file}: the file_name of image {entry['id']} is {entry['file_name']!r}; "
                "it must be a text."
            )
    image_ids = _numbers(json_file, images, "images", "id")
    category_ids = _numbers(json_file, categories, "categories", "id")
    ids = _numbers(json_file, annotations, "annotations", "id")
    image_of = _numbers(json_file, annotations, "annotations", "image_id")
    category_of = _numbers(json_file, annotations, "annotations", "category_id")
    widths = _numbers(json_file, images, "images", "width")
    heights = _numbers(json_file, images, "images", "height")

    names = {c["id"]: str(c["name"]) for c in sorted(categories, key=lambda c: c["id"])}
    by_id = Counter(category_of.tolist())
    report = Report(
        json_file=json_file,
        image_root="",
        images=len(images),
        annotations=len(annotations),
        crowds=sum(1 for a in annotations if a.get("iscrowd", 0) == 1),
        usable=0,
        categories=names,
        per_category={name: by_id[i] for i, name in names.items()},
        sizes={},
        problems={},
        files=[{k: i[k] for k in ("file_name", "width", "height")} for i in images],
    )

    def record(kind: str, wrong: np.ndarray, describe: Callable[[int], str]) -> None:
        where = np.flatnonzero(wrong)
        report.add(kind, (describe(int(i)) for i in where), len(where))

    def annotation(index: int) -> str:
        entry = annotations[index]
        return f"annotation {entry['id']} of image {entry['image_id']}"

    for kind, values in (
        ("image id used twice", image_ids),
        ("annotation id used twice", ids),
        ("category id used twice", category_ids),
    ):
        unique, counts = np.unique(values, return_counts=True)
        record(kind, counts > 1, lambda i, unique=unique: f"id {unique[i]}")
    record(
        "image whose width or height is not above 0",
        (widths <= 0) | (heights <= 0),
        lambda i: f"{images[i]['file_name']}, {widths[i]}x{heights[i]}",
    )
    known_image = np.isin(image_of, image_ids)
    record("annotation of an image that is not listed", ~known_image, annotation)
    record(
        "annotation of a category that is not listed",
        ~np.isin(category_of, category_ids),
        lambda i: f"{annotation(i)}, category {category_of[i]}",
    )
    record(
        "iscrowd that is neither 0 nor 1",
        np.array([a.get("iscrowd", 0) not in (0, 1) for a in annotations], dtype=bool),
        lambda i: f"{annotation(i)}, iscrowd {annotations[i]['iscrowd']!r}",
    )
    record(
        "ignore flag, which Detectron2 does not know",
        np.array([bool(a.get("ignore", 0)) for a in annotations], dtype=bool),
        annotation,
    )
    for key in ("area", "iscrowd"):
        missing = np.array([key not in a for a in annotations], dtype=bool)
        record(f"annotation without {key}", missing, annotation)
    record(
        "image without annotations",
        ~np.isin(image_ids, image_of),
        lambda i: images[i]["file_name"],
    )

    boxes, formed = _boxes(annotations)
    record(
        "bbox that is not a list of four numbers",
        ~formed,
        lambda i: f"{annotation(i)}, bbox {annotations[i].get('bbox')!r}",
    )
    # Row of each annotation's image; any row where the image is not listed, as that is refused.
    order = np.argsort(image_ids)
    row = order[np.searchsorted(image_ids, image_of, sorter=order).clip(max=len(order) - 1)]
    x, y, w, h = boxes.T
    finite = np.isfinite(boxes).all(axis=1)
    flat = finite & ((w <= 0) | (h <= 0))
    with np.errstate(invalid="ignore"):
        outside = (np.minimum(x, y) < -OUTSIDE_TOLERANCE) | (
            np.maximum(x + w - widths[row], y + h - heights[row]) > OUTSIDE_TOLERANCE
        )
    for kind, wrong in (
        ("box with NaN or infinite numbers", formed & ~finite),
        ("box of zero or negative size", flat),
        ("box outside its image", finite & ~flat & known_image & outside),
    ):
        record(
            kind,
            wrong,
            lambda i: (
                f"{annotation(i)} ({widths[row[i]]}x{heights[row[i]]}), bbox {boxes[i].tolist()}"
            ),
        )
    _inspect_masks(report, annotations, annotation, widths[row], heights[row])

    crowd = np.array([a.get("iscrowd", 0) == 1 for a in annotations], dtype=bool)
    report.usable = int((formed & finite & ~flat & ~crowd).sum())
    areas = np.array([_area(a, box) for a, box in zip(annotations, boxes, strict=True)])
    report.sizes = {
        "small": int((areas < _SMALL).sum()),
        "medium": int(((areas >= _SMALL) & (areas < _MEDIUM)).sum()),
        "large": int((areas >= _MEDIUM).sum()),
    }
    report.problems = {k: report.problems[k] for k in KINDS if k in report.problems}
    return report


def _read_json(json_file: str) -> dict[str, Any]:
    try:
        with PathManager.open(json_file, "r", encoding="utf-8") as file:
            content = json.load(file)
    except OSError as error:
        raise DataError(
            f"The annotation file {json_file} cannot be read ({error.strerror})."
        ) from error
    except ValueError as error:  # also of text that is not UTF-8
        raise DataError(
            f"The annotation file {json_file} is not JSON ({error}); make or fetch it again."
        ) from error
    if not isinstance(content, dict):
        raise DataError(
            f"{json_file} is not in COCO format: it holds a {type(content).__name__} where an "
            "object with images, annotations and categories is expected."
        )
    return content


def _entries(
    json_file: str, content: dict[str, Any], name: str, keys: tuple[str, ...]
) -> list[dict[str, Any]]:
    """The list ``content[name]``, of which each entry has all ``keys``."""
    entries = content.get(name)
    if not isinstance(entries, list):
        found = f"is a {type(entries).__name__}" if name in content else "is missing"
        raise DataError(f"{json_file} is not in COCO format: the list {name!r} {found}.")
    for index, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise DataError(
                f"{json_file} is not in COCO format: entry {index} of {name!r} is a "
                f"{type(entry).__name__}, not an object."
            )
        for key in keys:
            if key not in entry:
                raise DataError(
                    f"{json_file} is not in COCO format: entry {index} of {name!r} has no {key!r}."
                )
    return entries


def _numbers(json_file: str, entries: list[dict[str, Any]], name: str, key: str) -> np.ndarray:
    """The whole numbers under ``key``, int64 [entries]."""
    values = [entry[key] for entry in entries]
    for index, value in enumerate(values):
        if type(value) is not int or abs(value) >= 2**63:
            raise DataError(
                f"{json_file} is not in COCO format: the {key} of entry {index} of {name!r} is "
                f"{value!r}, not a whole number."
            )
    return np.array(values, dtype=np.int64)


def _boxes(annotations: list[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """The boxes, float64 [annotations, 4], and which of them are well formed, bool [annotations].

    A box that is not well formed is NaN.
    """
    boxes = [a.get("bbox") for a in annotations]
    formed = np.array(
        [
            isinstance(box, list)
            and len(box) == 4
            and all(isinstance(v, (int, float)) for v in box)
            for box in boxes
        ],
        dtype=bool,
    )
    filled = [box if ok else [np.nan] * 4 for box, ok in zip(boxes, formed, strict=True)]
    return np.array(filled, dtype=np.float64).reshape(-1, 4), formed


def _inspect_masks(
    report: Report,
    annotations: list[dict[str, Any]],
    describe: Callable[[int], str],
    widths: np.ndarray,
    heights: np.ndarray,
) -> None:
    for index, entry in enumerate(annotations):
        segmentation = entry.get("segmentation")
        if not segmentation:
            kind = "annotation without segmentation"
        elif isinstance(segmentation, dict):
            if usable_runs(segmentation, int(heights[index]), int(widths[index])) is not None:
                continue
            kind = "run-length mask that does not fit its image"
        elif not isinstance(segmentation, list) or not all(
            isinstance(polygon, list) for polygon in segmentation
        ):
            kind = "segmentation that is neither a list of polygons nor a run-length mask"
        elif not all(map(is_polygon, segmentation)):
            kind = "polygon of fewer than three points, an odd count or no numbers"
        else:
            continue
        report.add(kind, [describe(index)], 1)


def _area(entry: dict[str, Any], box: np.ndarray) -> float:
    area = entry.get("area")
    return area if isinstance(area, (int, float)) else box[2] * box[3]


# --------------------------------------------------------------------------- the image files


def _check_existence(report: Report) -> None:
    places = np.linspace(0, report.images - 1, _SAMPLED_FILES).round().astype(int)
    for index in np.unique(places):
        path = os.path.join(report.image_root, report.files[index]["file_name"])
        if not PathManager.isfile(path):
            report.add("image file missing", [path], 1)


def _check_images(report: Report, progress: Callable[[int, int], None] | None) -> None:
    def fault(file: dict[str, Any]) -> tuple[str, str] | None:
        path = os.path.join(report.image_root, file["file_name"])
        if not PathManager.isfile(path):
            return "image file missing", path
        sentence = image_fault({**file, "file_name": path})
        return sentence and ("image file unreadable or of another size", sentence)

    # Pillow decodes outside Python's lock, so threads are enough.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for done, found in enumerate(pool.map(fault, report.files), start=1):
            if found:
                report.add(found[0], [found[1]], 1)
            if progress:
                progress(done, report.images)


# --------------------------------------------------------------------- data sets and a config


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
    if not _is_coco(name):
        raise ConfigError(f"The data set {name!r} is not one of COCO instances; name one that is.")
    json_file, image_root = metadata.json_file, os.fspath(metadata.image_root)
    for path, exists in ((json_file, PathManager.isfile), (image_root, PathManager.isdir)):
        if not exists(path):
            raise DataError(_how_to_get(name, path))
    return json_file, image_root


def _is_coco(name: str) -> bool:
    metadata = MetadataCatalog.get(name)
    return metadata.get("evaluator_type") == "coco" and bool(metadata.get("json_file"))


def _check_registered(name: str) -> Report | None:
    """The report on a registered data set, or None where it is not COCO instances."""
    if name in DatasetCatalog and not _is_coco(name):
        return None
    json_file, image_root = registered_files(name)
    report = check_coco(json_file, image_root, files="sample")
    logger.info(
        "%s: %d images, %d annotations (%d crowds) of %d categories.",
        name,
        report.images,
        report.annotations,
        report.crowds,
        len(report.categories),
    )
    refusal = report.refusal()
    if refusal:
        raise DataError(refusal)
    for kind, problem in report.of(BAD_BOX).items():
        logger.warning(
            "%s: %d x %s, left out of training or cut at the border; the first: %s.",
            json_file,
            problem.count,
            kind,
            problem.first[0],
        )
    names = MetadataCatalog.get(name).get("thing_classes")
    if names is not None and list(names) != list(report.categories.values()):
        raise DataError(
            f"{json_file} holds {len(report.categories)} categories "
            f"({_some(report.categories.values())}) that are not those of the data set {name} "
            f"({_some(names)}); give your own data with --train-json and --train-images, or "
            "--test-json and --test-images."
        )
    return report


def _how_to_get(name: str, path: str) -> str:
    root = os.path.abspath(os.path.expanduser(os.getenv("DETECTRON2_DATASETS", "datasets")))
    advice = "put the data there or correct the path"
    if name.startswith("coco_"):
        advice = _GET_COCO.format(root=root)
    elif name.startswith("shapes_"):
        advice = _GET_SHAPES.format(root=root)
    return f"No data for {name}: {os.path.abspath(path)} does not exist; {advice}."


def _check_masks(cfg: CfgNode, name: str, report: Report, *, training: bool) -> None:
    kind = "annotation without segmentation"
    if not cfg.MODEL.MASK_ON or kind not in report.problems:
        return
    problem = report.problems[kind]
    if report.has_all(kind):
        raise ConfigError(
            f"MODEL.MASK_ON is on, but no annotation of {name} has a mask; set MODEL.MASK_ON False."
        )
    if training:
        logger.warning("%s: %d annotations without a mask take their box.", name, problem.count)
        return
    # pycocotools would raise a KeyError, after the whole test set was predicted.
    raise DataError(
        f"{report.json_file}: {problem.count} annotations have no segmentation (the first: "
        f"{problem.first[0]}), so that masks cannot be evaluated; add them or set "
        "MODEL.MASK_ON False."
    )


def _check_evaluable(name: str, report: Report) -> None:
    if not report.annotations:
        raise DataError(
            f"{report.json_file} holds no annotations, so that nothing can be evaluated on {name}."
        )
    for key in ("area", "iscrowd"):
        problem = report.problems.get(f"annotation without {key}")
        if problem:
            raise DataError(
                f"{report.json_file}: {problem.count} annotations have no {key!r} (the first: "
                f"{problem.first[0]}), which COCO's evaluation needs; add it."
            )


def _check_usable(reports: list[Report | None], names: tuple[str, ...]) -> None:
    if reports and all(report is not None and report.usable == 0 for report in reports):
        raise DataError(
            f"{', '.join(names)} hold{'' if len(names) > 1 else 's'} no annotation to train on "
            "(crowds and boxes without area do not count); add some."
        )


def _check_categories(cfg: CfgNode, reports: dict[str, Report | None]) -> None:
    found = {name: report for name, report in reports.items() if report is not None}
    for (first, one), (second, other) in itertools.pairwise(found.items()):
        if one.categories != other.categories:
            different = sorted(set(one.categories.items()) ^ set(other.categories.items()))[0]
            raise DataError(
                f"The categories of {first} ({one.json_file}) and {second} ({other.json_file}) "
                f"differ, first in id {different[0]}, {different[1]!r}; use data sets with the "
                "same ids and names."
            )
    key = _CLASS_KEYS.get(cfg.MODEL.META_ARCHITECTURE)
    for name in reports:
        names = MetadataCatalog.get(name).get("thing_classes")
        report = found.get(name)
        categories = list(report.categories.values()) if report else names
        if key is None or categories is None:
            continue
        _, section, _ = key.split(".")
        configured = cfg.MODEL[section].NUM_CLASSES
        if configured != len(categories):
            raise ConfigError(
                f"{key} is {configured}, but {name} has {len(categories)} categories "
                f"({_some(categories)}); set {key} to {len(categories)}."
            )


def _some(names: Iterable[str], limit: int = 5) -> str:
    names = list(names)
    return ", ".join(map(str, names[:limit])) + (", ..." if len(names) > limit else "")
