"""The files of own data in the folder of a run: written when it begins, and kept by --resume."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode

from lambda_det.detection.config import load_config
from lambda_det.detection.data.coco_format import name_labels, read_json
from lambda_det.detection.data.image_folder import images_below
from lambda_det.detection.data.outputs import mark_output
from lambda_det.errors import ConfigError, DataError, listed, refused
from lambda_det.files import refuse_unwritable, writing_to
from lambda_det.own_data.coco_files import identifying_stem
from lambda_det.own_data.data_files import Parts, digest, read_labels
from lambda_det.own_data.flags import PARTS
from lambda_det.own_data.labels.conversion import as_single_class
from lambda_det.training.log import show
from lambda_det.training.run_folder import RunFolder

logger = logging.getLogger(__name__)

FOLDER = "data"  # the folder of the files in COCO's format, within the run's
SOURCES = "sources.json"  # a file in it: what the run keeps of its beginning
FILE_KEYS = [f"DATASETS.{part.upper()}_{what}" for part in PARTS for what in ("JSON", "IMAGES")]


# ---------------------------------------------------------------------------------- a run begins
def write_data(
    args: argparse.Namespace, folder: Path, parts: Parts, digests: Mapping[str, str]
) -> dict[str, str]:
    """Write the parts of own data into the folder of a run that begins or is only evaluated.

    Args:
        args: of the command line.
        folder: of the run.
        parts: that it names.
        digests: of its labels, by which a run that is resumed knows those that have changed.

    Returns:
        The keys that name the files.

    Raises:
        ConfigError: they cannot be written.
    """
    if not parts:
        return {}
    keys, rest = {}, None
    for part, (file, images) in parts.items():
        path = keep_file(file, folder)
        if part == "rest":
            rest = path.name, os.path.abspath(os.path.expanduser(images))
            show(
                "There is a test part, which is left alone: once the training is over, "
                f"lambda-det evaluate {folder} --part test evaluates on it."
            )
        else:
            keys |= _keys_of(part, path, images)
    if not args.eval_only:
        sources = {
            "digests": digests,
            "single_class": bool(args.single_class),
            "rest": rest,
        }
        _write(folder / FOLDER / SOURCES, json.dumps(sources, indent=1).encode())
    return keys


def refuse_folder(args: argparse.Namespace, folder: Path) -> None:
    """Refuse a folder for a run before the data are read.

    Raises:
        ConfigError: it cannot be written to; or a run is to begin in it, and it holds another one,
            or images of the data, which would be no data later.
    """
    run = RunFolder(folder)
    refuse_unwritable(folder)
    if args.resume or args.eval_only:
        return
    run.refuse_other_run()
    named = (args.data, args.train_json, args.train_images, args.test_json, args.test_images)
    here = folder.resolve()
    is_inside = any(here.is_relative_to(Path(place).resolve()) for place in named if place)
    if is_inside and images_below(folder):
        raise ConfigError(
            f"{folder} has images of the data; give the run a folder of its own, such as --output "
            f"{folder / 'output'}."
        )


def _keys_of(part: str, path: Path, images: str) -> dict[str, str]:
    return {
        f"DATASETS.{part.upper()}_JSON": str(path.absolute()),
        f"DATASETS.{part.upper()}_IMAGES": os.path.abspath(os.path.expanduser(images)),
    }


def keep_file(file: str, folder: Path) -> Path:
    """Copy a file into the folder of the run, under a name that identifies its content."""
    mark_output(folder)  # before a configuration shows that it is a run's
    path = folder / FOLDER / f"{identifying_stem(file)}{Path(file).suffix}"
    if not path.exists():
        atexit.register(_take_back, path)
    written = Path(file).read_bytes()
    if path.suffix == ".json":  # and not the recipe of an earlier run
        content = read_json(file)
        name_labels(content, file)
        written = json.dumps(content).encode()
    _write(path, written)
    return path


def _take_back(path: Path) -> None:
    """Remove a file of a run that was refused before it began, and its folder if that is empty."""
    if not RunFolder(path.parent.parent).config_file.exists():
        with contextlib.suppress(OSError):  # other files are there
            path.unlink()
            (path.parent / SOURCES).unlink(missing_ok=True)
            path.parent.rmdir()


def _write(path: Path, content: bytes) -> None:
    """Write a file, which other processes may write at the same time."""
    with writing_to(path), tempfile.TemporaryDirectory(dir=path.parent) as own:
        temporary = Path(own, path.name)
        temporary.write_bytes(content)
        os.replace(temporary, path)


# ------------------------------------------------------------------------------------ a run goes on
class PreparedRun:
    """A run that was prepared, in its folder.

    Attributes:
        file: its configuration.
        sources: what it keeps of its beginning; {} where it has no data of its own.
    """

    def __init__(self, folder: Path) -> None:
        """
        Raises:
            DataError: what it says of its labels is damaged.
        """
        self.file = folder / "config.yaml"
        self.sources = read_sources(folder)

    @cached_property
    def config(self) -> CfgNode:
        """Its configuration, with its files where they are now.

        Raises:
            ConfigError: it is damaged.
        """
        return load_config(argparse.Namespace(config_file=str(self.file), opts=[]))

    def data(
        self, args: argparse.Namespace, given: Mapping[str, str], temporary: Path
    ) -> dict[str, str]:
        """The keys of its data, which it keeps, and of the file to evaluate on if another is named.

        A warning says that the labels of today are others, where they can be read.

        Args:
            args: of the command line.
            given: its keys, which may say where the images are now.
            temporary: a folder for labels that are converted.

        Raises:
            DataError: the labels to evaluate on are not of a known format, or not found.
        """
        kept = {key: attrgetter(key)(self.config) for key in FILE_KEYS}
        keys = {key: given.get(key, value) for key, value in kept.items() if value}
        folder = self.file.parent
        images = listed(sorted({keys[key] for key in keys if key.endswith("IMAGES")}))
        text = f"--resume goes on with the labels in {folder / FOLDER}, and the images in {images}"
        if {args.val_share, args.stratify, args.group_by, args.single_class} != {None}:
            text += "; --val-share, --stratify, --group-by and --single-class change nothing"
        show(text)
        if not (args.data or args.train_json or args.test_json):
            return keys
        try:
            today = read_labels(args, temporary, [])
        except DataError:  # they may be gone
            if args.test_json:
                raise
            return keys
        # Of a part that was held out there is nothing to compare
        before = self.sources.get("digests", {})
        parts = before.keys() & today.keys() - ({"test"} if args.test_json else set())
        labels = {}
        with contextlib.suppress(DataError):  # those that were broken since then have changed
            labels = {part: digest(today[part][0]) for part in parts}
        if labels != {part: before[part] for part in parts}:
            logger.warning(
                f"The labels in {args.data or args.train_json} have changed since the run in "
                f"{folder} began, which goes on with its own; another --output trains on the new "
                "ones."
            )
        if args.test_json:
            file, images = today["test"]
            if self.sources.get("single_class"):
                file = as_single_class(file, temporary)
            keys |= _keys_of("test", keep_file(file, folder), images)
        return keys


def read_sources(folder: Path) -> dict[str, Any]:
    """What a run with data of its own keeps of its beginning; {} for a run without.

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
