"""The data to which the results of an evaluation belong: recorded beside them, and compared once.

An evaluation on other data leaves results of the same name, whose numbers of images and classes
mean something else. So every reader of results reads :data:`FILE` first.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from pycocotools.coco import COCO

from lambda_det.errors import DataError, listed, printable, refused

FILE = "data.json"  # beside the results


def write_identity(folder: str | Path, name: str, file: str, ground_truth: COCO) -> None:
    """Record the data to which results belong.

    Args:
        folder: of the results.
        name: of the registered data set.
        file: its annotation file; "" where it has none.
        ground_truth: with which the results are compared.
    """
    dataset = ground_truth.dataset
    content = {
        "name": name,
        "file": file,
        "images": len(dataset["images"]),
        "digest": digest(ground_truth),
        "categories": dataset["categories"],
    }
    Path(folder, FILE).write_text(json.dumps(content, indent=1), "utf-8")


def digest(ground_truth: COCO) -> str:
    """A digest of the images, the names of the classes, and the objects with their masks.

    The places of files do not matter, nor the order of the objects, nor whether a mask is written
    as polygons or as run lengths.
    """
    dataset = ground_truth.dataset
    places = {category["id"]: place for place, category in enumerate(dataset["categories"])}
    objects = (
        [
            *(a["image_id"], places[a["category_id"]], a["bbox"], a["area"], a["iscrowd"]),
            ground_truth.annToRLE(a)["counts"],  # pycocotools replaces polygons by runs
        ]
        for a in dataset["annotations"]
    )
    content = [
        [[image["id"], image["height"], image["width"]] for image in dataset["images"]],
        [category["name"] for category in dataset["categories"]],
        sorted(json.dumps(one, default=_plain) for one in objects),
    ]
    text = json.dumps(content, default=_plain)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _plain(value: Any) -> Any:
    """A number of NumPy, runs of pycocotools, or an id of an image of any type."""
    if isinstance(value, bytes):
        return value.decode("ascii")
    return value.item() if hasattr(value, "item") else str(value)


def check_identity(results: Path, name: str, ground_truth: COCO) -> None:
    """Refuse results that are of other data.

    Args:
        results: their file. Where no file with their data is beside it, as after an evaluation
            by another program, nothing is compared.
        name: of the data set with whose ground truth they will be compared.
        ground_truth: of it.

    Raises:
        DataError: they belong to other data, also by the ids of the classes, or the file beside
            them does not say to which.
    """
    beside = results.with_name(FILE)
    if not beside.is_file():
        return
    now = ground_truth.dataset["categories"]
    # another program may have written a file of this name
    faults = (OSError, ValueError, LookupError, TypeError, RecursionError)
    what = f"{beside} cannot be read as the description of an evaluation's data"
    with refused(DataError, what, "evaluate again", *faults):
        of = json.loads(beside.read_text("utf-8"))
        classes = listed((category["name"] for category in of["categories"]), 8)
        data = f"{printable(of['file'] or of['name'])} as it was then: {of['images']} images"
        then = of["digest"], of["categories"]
    if then != (digest(ground_truth), now):
        raise DataError(
            f"{results} is of {data}, classes {classes}. "
            f"{name} has {len(ground_truth.dataset['images'])} images now, classes "
            f"{listed((category['name'] for category in now), 8)}, or other objects or ids; "
            "evaluate the run again on these data."
        )
