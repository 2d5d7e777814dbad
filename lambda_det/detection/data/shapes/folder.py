"""Writing a generated data set: made beside its place and moved there as a whole."""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable

import numpy as np

from lambda_det.errors import ConfigError, DataError

SPLITS = ("train", "val")

logger = logging.getLogger(__name__)


def write_dataset(
    root: str | os.PathLike,
    name: str,
    manifest: dict[str, int],
    write_split: Callable[[str, str, int, int, int], None],
) -> None:
    """Write ``root/name`` with its manifest, unless it is there already.

    Args:
        root: folder that data sets live in.
        name: of the new folder in it.
        manifest: the format, num_train, num_val, size and seed.
        write_split: called with the folder to write into, the split, its number of images, size and
            seed.

    Raises:
        ConfigError: a number that cannot work.
        DataError: ``root/name`` holds something else, which is left as it is.
    """
    for key, lowest in (("num_train", 1), ("num_val", 1), ("size", 32), ("seed", 0)):
        if manifest[key] < lowest:
            raise ConfigError(f"{key} is {manifest[key]}; give at least {lowest}.")
    root = os.path.expanduser(os.fspath(root))
    folder = os.path.join(root, name)
    if _is_made(folder, manifest):
        logger.info("The %s data set is already in %s.", name, folder)
        return
    try:
        os.makedirs(root, exist_ok=True)
        # Made beside its place and renamed: a run that breaks off leaves no half data set there.
        workplace = tempfile.mkdtemp(prefix=f".{name}-", dir=root)
    except OSError as error:
        raise DataError(
            f"The {name} data set cannot be written to {root}: {error.strerror}; "
            "give a folder that can be written to."
        ) from error
    counts = (manifest["num_train"], manifest["num_val"])
    try:
        made = os.path.join(workplace, name)
        os.makedirs(os.path.join(made, "annotations"))
        for split, count in zip(SPLITS, counts, strict=True):
            write_split(made, split, count, manifest["size"], manifest["seed"])
        write_json(os.path.join(made, "manifest.json"), manifest)
        try:
            os.rename(made, folder)
        except OSError:
            if not _is_made(folder, manifest):  # else another process was faster
                raise
    finally:
        shutil.rmtree(workplace, ignore_errors=True)
    logger.info("Made the %s data set in %s: %d + %d images.", name, folder, *counts)


def _is_made(folder: str, manifest: dict[str, int]) -> bool:
    """Whether ``folder`` holds exactly the data set of ``manifest``; DataError if another thing."""
    if not os.path.lexists(folder) or (os.path.isdir(folder) and not os.listdir(folder)):
        return False
    try:
        with open(os.path.join(folder, "manifest.json"), encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError):
        found = None
    if found != manifest:
        holds = f"shapes made with {found}" if found else "something that was not made here"
        raise DataError(
            f"{folder} holds {holds}, and is left as it is; move it away or give another root."
        )
    return True


def write_json(path: str, content: dict) -> None:
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        json.dump(content, file, separators=(",", ":"))


def image_rng(seed: int, split: str, index: int) -> np.random.Generator:
    """Random numbers of one image, that no other image has a part in."""
    source = np.random.SeedSequence([seed, SPLITS.index(split), index])
    return np.random.Generator(np.random.PCG64(source))
