"""The files of own data in the folder of a run: written when it begins, and kept by --resume."""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import uuid
from collections.abc import Mapping
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode

from lambda_det.detection.config import load_config
from lambda_det.detection.data.coco_format import read_json
from lambda_det.detection.data.ground_truth import file_report
from lambda_det.detection.data.image_folder import SUFFIXES, walk
from lambda_det.detection.data.outputs import mark_output
from lambda_det.errors import ConfigError, DataError, refused
from lambda_det.files import TEMPORARY
from lambda_det.own_data.coco_files import identifying_stem
from lambda_det.own_data.data_files import Data, read_labels
from lambda_det.own_data.flags import PARTS
from lambda_det.own_data.held_out import Split
from lambda_det.training.log import show
from lambda_det.training.run_folder import RunFolder

__all__ = [
    "FILE_KEYS",
    "FOLDER",
    "PreparedRun",
    "keep_file",
    "read_sources",
    "refusal_of",
    "write_data",
]

logger = logging.getLogger(__name__)

FOLDER = "data"  # the folder of the files in COCO's format, within the run's
SOURCES = "sources.json"  # a file in it: the labels from which the files were made
FILE_KEYS = [f"DATASETS.{part.upper()}_{what}" for part in PARTS for what in ("JSON", "IMAGES")]


# ---------------------------------------------------------------------------------- a run begins
def write_data(args: argparse.Namespace, folder: Path, data: Data) -> dict[str, str]:
    """Write the parts of own data into the folder of a run that begins or is only evaluated.

    Returns:
        The keys that name the files.

    Raises:
        ConfigError: the folder holds another run.
        DataError: they cannot be written.
    """
    if not data.parts:
        return {}
    if not args.resume and not args.eval_only:
        RunFolder(folder).refuse_other_run()
        _refuse_folder_of_data(args, folder)
    keys, rest = {}, None
    for part, (file, images) in data.parts.items():
        path = keep_file(file, folder)
        if part == "rest":
            rest = path.name, os.path.abspath(os.path.expanduser(images))
            show(
                "There is a test part, which is left alone: once the training is over, "
                f"lambda-det evaluate {folder} --part test evaluates on it."
            )
            refusal = refusal_of(file, images)
            # the copy to train on is read here, as its report is kept for the registration
            train = keys["DATASETS.TRAIN_JSON"], keys["DATASETS.TRAIN_IMAGES"]
            if not refusal and _classes(file, images) != _classes(*train):
                refusal = f"{file} has other categories than the part to train on."
            if refusal:
                logger.warning(f"That command will refuse these labels as they are: {refusal}")
        else:
            keys |= _keys_of(part, path, images)
    if not args.eval_only:
        sources = {
            "labels": {part: str(file) for part, (file, _) in data.wholes.items()},
            "digests": {part: _digest(file) for part, (file, _) in data.wholes.items()},
            "held_out": data.split and data.split._asdict(),
            "single_class": bool(args.single_class),
            "tile": args.tile,
            "rest": rest,
        }
        _write_sources(folder, sources)
    return keys


def _refuse_folder_of_data(args: argparse.Namespace, folder: Path) -> None:
    """
    Raises:
        ConfigError: the folder of the run has images of the data, which would be no data later.
    """
    named = (args.data, args.train_json, args.train_images, args.test_json, args.test_images)
    places = [os.path.realpath(place) for place in named if place and os.path.isdir(place)]
    here = os.path.realpath(folder)
    if any(Path(here).is_relative_to(place) for place in places) and any(
        path.suffix.lower() in SUFFIXES for path in walk(folder)
    ):
        raise ConfigError(
            f"OUTPUT_DIR {folder} has images of the data; give the run a folder of its own, such "
            f"as --output {folder / 'output'}."
        )


def refusal_of(file: str, images: str) -> str:
    """Why a file in COCO's format is refused with a folder of images; "" if it is not."""
    try:
        return file_report(file, images).refusal()
    except DataError as error:
        return str(error)


def _classes(file: str, images: str) -> list[str]:
    return list(file_report(file, images).categories.values())


def _keys_of(part: str, path: Path, images: str) -> dict[str, str]:
    return {
        f"DATASETS.{part.upper()}_JSON": str(path.absolute()),
        f"DATASETS.{part.upper()}_IMAGES": os.path.abspath(os.path.expanduser(images)),
    }


def keep_file(file: str, folder: Path) -> Path:
    """Copy a file into the folder of the run, under a name that identifies its content."""
    mark_output(folder)  # before a configuration shows that it is a run's
    path = folder / FOLDER / f"{identifying_stem(Path(file))}{Path(file).suffix}"
    _write(path, Path(file).read_bytes())
    return path


def _write(path: Path, content: bytes) -> None:
    """Write a file, which other processes may write at the same time."""
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}{TEMPORARY}")
    with refused(DataError, f"{path} cannot be written", "", OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_bytes(content)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def _write_sources(folder: Path, sources: Mapping[str, Any]) -> None:
    _write(folder / FOLDER / SOURCES, json.dumps(sources, indent=1).encode())


def _digest(file: str) -> str:
    """A digest of the content of a file in COCO's format, without the places of its labels."""
    content = read_json(file)
    lists = [content.get(name) for name in ("images", "annotations", "categories")]
    text = json.dumps(_without_sources(lists), sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _without_sources(lists: list[Any]) -> list[Any]:
    return [
        [
            {name: value for name, value in entry.items() if name != "source"}
            for entry in entries or ()
            if isinstance(entry, dict)
        ]
        for entries in lists
    ]


# ------------------------------------------------------------------------------------ a run goes on
class PreparedRun:
    """A run that was prepared, in its folder.

    Attributes:
        file: its configuration.
        sources: the labels from which its data were made; {} where it has no data of its own.
    """

    def __init__(self, file: Path, sources: dict[str, Any]) -> None:
        self.file = file
        self.sources = sources

    @classmethod
    def of(cls, folder: Path) -> PreparedRun | None:
        """The run in a folder; None where there is none.

        Raises:
            DataError: what it says of its labels is damaged.
        """
        file = folder / "config.yaml"
        return cls(file, read_sources(folder)) if file.is_file() else None

    @cached_property
    def config(self) -> CfgNode:
        """Its configuration, with its files where they are now.

        Raises:
            ConfigError: it is damaged.
        """
        return load_config(argparse.Namespace(config_file=str(self.file), opts=[]))

    def is_of(self, file: str) -> bool:
        return os.path.realpath(file) == os.path.realpath(self.file)

    def data(self, args: argparse.Namespace, temporary: Path) -> dict[str, Any]:
        """The keys of its data, and of the file to evaluate on if another is named.

        Labels of the same content are the run's own, wherever they lie now. Its images are then in
        the folder of these labels, or in the folder of a flag for images.

        Args:
            args: of the command line.
            temporary: a folder for labels that are converted.

        Raises:
            ConfigError: another share is held out.
            DataError: the labels have changed.
        """
        self._refuse_changes(args)
        keys = {key: value for key in FILE_KEYS if (value := attrgetter(key)(self.config))}
        images_of = {part: getattr(args, f"{part}_images") for part in PARTS}
        if args.data or args.train_json or args.test_json:
            before = self.sources["digests"]
            is_single = self.sources.get("single_class", False)
            named = read_labels(args, temporary, [], single_class=is_single)
            for part, (file, images) in named.items():
                if part == "test" and args.test_json:
                    keys |= _keys_of(part, keep_file(file, self.file.parent), images)
                    images_of[part] = images
                elif _digest(file) != before.get(part):
                    raise DataError(
                        f"The labels in {args.data or args.train_json} have changed since the run "
                        f"in {self.file.parent} began: --resume without --data continues with its "
                        "own labels, and another --output trains on the new ones."
                    )
                elif part == "rest":
                    self._record_rest(images)
                else:
                    images_of[part] = images
        if self.sources.get("held_out"):  # of the images to train on
            images_of["test"] = images_of["test"] or images_of["train"]
        return keys | _moved_images(keys, images_of)

    def _refuse_changes(self, args: argparse.Namespace) -> None:
        """
        Raises:
            ConfigError: a flag asks for other data than the run has.
        """
        begin = f"--resume continues the run in {self.file.parent}, which has"
        held_out = self.sources.get("held_out") or Split(0.0)._asdict()
        for flag, name in (
            ("val_share", "share"),
            ("group_by", "group_by"),
            ("stratify", "stratify"),
        ):
            value = getattr(args, flag)
            if value is not None and value != held_out[name]:
                raise ConfigError(
                    f"{begin} --{flag.replace('_', '-')} {held_out[name]!r}; now it is {value!r}."
                )
        if args.single_class and not self.sources.get("single_class", False):
            raise ConfigError(
                f"{begin} classes of its labels; leave --single-class out, or give another "
                "--output."
            )

    def _record_rest(self, images: str) -> None:
        """Record where the images of the part are now that is evaluated on in the end."""
        file, before = self.sources["rest"]
        if not _is_same_folder(before, images):
            self.sources["rest"] = file, os.path.abspath(os.path.expanduser(images))
            _write_sources(self.file.parent, self.sources)


def read_sources(folder: Path) -> dict[str, Any]:
    """What was written of the labels from which the data of a run were made; {} for nothing.

    Args:
        folder: of the run.

    Raises:
        DataError: it is damaged.
    """
    file = folder / FOLDER / SOURCES
    if not file.is_file():
        return {}
    with refused(DataError, f"{file} cannot be read", "remove it", ValueError):
        return json.loads(file.read_text("utf-8"))


def _moved_images(keys: Mapping[str, str], images_of: Mapping[str, str | None]) -> dict[str, str]:
    """The keys of the folders of images that differ from the run's.

    Args:
        keys: of the run.
        images_of: folders by part; None: as in the run.
    """
    moved = {}
    for part, folder in images_of.items():
        key = f"DATASETS.{part.upper()}_IMAGES"
        if folder and key in keys and not _is_same_folder(keys[key], folder):
            moved[key] = os.path.abspath(os.path.expanduser(folder))
            logger.info(f"The images of {key} {keys[key]} are taken from {moved[key]}")
    return moved


def _is_same_folder(one: str, other: str) -> bool:
    other = os.path.expanduser(other)
    return os.path.isdir(one) and os.path.isdir(other) and os.path.samefile(one, other)
