"""Which image or video file goes where, settled before anything is predicted or written."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog

from lambda_det.detection.data import check_coco, register_json_datasets
from lambda_det.detection.data.checks import registered_files
from lambda_det.errors import ConfigError, DataError

IMAGE_SUFFIXES = frozenset([".bmp", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"])
VIDEO_SUFFIXES = frozenset([".avi", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".webm"])
# What pictures are written as; others become PNG files
_WRITTEN_SUFFIXES = frozenset([".jpeg", ".jpg", ".png"])


@dataclass
class Picture:
    """One thing to predict on: an image or video file, and where the picture of it goes."""

    source: Path
    target: Path
    annotations: list[dict] | None = None
    true_class_names: list[str] | None = None

    @property
    def is_video(self) -> bool:
        return self.source.suffix.lower() in VIDEO_SUFFIXES


def plan_files(inputs: Iterable[str | Path], output: str | Path, overwrite: bool) -> list[Picture]:
    """Say for image files, video files and folders of images what goes where.

    Args:
        inputs: files, and folders, which are searched for images with all that is in them.
        output: the folder of the pictures; those of a folder keep their place in it.
        overwrite: whether pictures that are there may be replaced.

    Raises:
        DataError: an input is missing, or a folder holds no image.
        ConfigError: two pictures would get the same name, or a file would be overwritten.
    """
    output = Path(output)
    pictures = []
    for path in map(Path, inputs):
        if path.is_dir():
            found = list(_images_in(path, output))
            if not found:
                raise DataError(
                    f"The folder {path} holds no image ({' '.join(sorted(IMAGE_SUFFIXES))}); name "
                    "another one."
                )
            pictures += [Picture(file, _target(output, file.relative_to(path))) for file in found]
        elif path.exists():
            pictures.append(Picture(path, _target(output, Path(path.name))))
        else:
            hint = "correct the path"
            if "." in path.name and path.name.isupper():
                hint = "KEY VALUE pairs follow another flag, such as --output DIR"
            raise DataError(f"There is no file or folder {path}; {hint}.")
    _check_targets(pictures, overwrite)
    return pictures


def plan_dataset(
    name: str, cfg: CfgNode, output: str | Path, overwrite: bool, limit: int | None = None
) -> list[Picture]:
    """Say for the images of a registered data set what goes where; the truth goes with them.

    Args:
        name: of the data set; "train" and "test" are the first of ``cfg.DATASETS``.
        cfg: may name data in COCO's format, as ``DATASETS.TEST_JSON``.
        output: the folder of the pictures.
        overwrite: whether pictures that are there may be replaced.
        limit: only so many images, the first ones.

    Raises:
        DataError: the data set is missing or is not in COCO's format.
        ConfigError: there is no such data set, or a file would be overwritten.
    """
    if name in ("train", "test"):
        cfg = cfg.clone()
        cfg.defrost()
        register_json_datasets(cfg)
        names = cfg.DATASETS[name.upper()]
        if not names:
            raise ConfigError(f"DATASETS.{name.upper()} is empty; name a data set.")
        name = names[0]
    json_file, images = registered_files(name)
    check_coco(json_file, images, files="none")
    records = DatasetCatalog.get(name)[:limit]
    if not records:
        raise DataError(f"The data set {name} holds no image.")
    true_names = MetadataCatalog.get(name).get("thing_classes")
    pictures = [
        Picture(
            Path(record["file_name"]),
            _target(Path(output), Path(os.path.relpath(record["file_name"], images))),
            record.get("annotations", []),
            true_names,
        )
        for record in records
    ]
    _check_targets(pictures, overwrite)
    return pictures


def _images_in(folder: Path, output: Path) -> Iterator[Path]:
    output = output.resolve()
    for path in sorted(folder.rglob("*")):
        # Pictures of an earlier run, where they are kept inside the folder, are no input
        if path.suffix.lower() in IMAGE_SUFFIXES and output not in path.resolve().parents:
            yield path


def _target(output: Path, relative: Path) -> Path:
    suffix = relative.suffix.lower()
    if suffix in VIDEO_SUFFIXES:
        return output / relative.with_suffix(".mp4")
    if suffix in _WRITTEN_SUFFIXES:
        return output / relative
    return output / relative.with_name(relative.name + ".png")


def _check_targets(pictures: Sequence[Picture], overwrite: bool) -> None:
    sources: dict[Path, Path] = {}
    inputs = {picture.source.resolve() for picture in pictures}
    for picture in pictures:
        other = sources.setdefault(picture.target, picture.source)
        if other != picture.source:
            raise ConfigError(
                f"{other} and {picture.source} would both be drawn to {picture.target}; give them "
                "in two runs with two output folders."
            )
        if picture.target.resolve() in inputs:
            raise ConfigError(
                f"{picture.target} is an input itself and would be overwritten; name another "
                "output folder."
            )
    existing = [target for target in sources if target.exists()]
    if existing and not overwrite:
        raise ConfigError(
            f"{existing[0]} exists already, one of {len(existing)} such pictures; add --overwrite "
            "to replace them or name another output folder."
        )
