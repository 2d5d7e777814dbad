"""From the flags for own data to files in COCO's format, in a temporary folder."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

from lambda_det.errors import ConfigError, DataError
from lambda_det.own_data.flags import PARTS
from lambda_det.own_data.held_out import Split, hold_out, smallest_share
from lambda_det.own_data.labels import as_coco, as_single_class
from lambda_det.own_data.layouts import find_images, find_parts

__all__ = ["Data", "Row", "read_data", "read_labels"]

Row = tuple[str, str, str]  # a row of the table of choices: what, the choice, and why


class Data(NamedTuple):
    """The parts of a data set.

    Attributes:
        parts: files in COCO's format, each with the folder of its images, by "train", "test" and
            "rest"; the last is a test part that is not used.
        wholes: the files from before images were held out, by the same names.
    """

    parts: dict[str, tuple[str, str]]
    wholes: dict[str, tuple[str, str]]


def read_data(args: argparse.Namespace, temporary: Path, rows: list[Row]) -> Data:
    """The data that flags name, with images held out where nothing to evaluate on is named.

    Args:
        args: of the command line.
        temporary: a folder for the files.
        rows: of the table of choices, which gets more.

    Raises:
        ConfigError: flags do not go together.
        DataError: the data are not of a known format, or not found; or the share leaves nothing.
    """
    parts = read_labels(args, temporary, rows, single_class=bool(args.single_class))
    asked = args.data or (args.config_file is None and args.train_json)
    group_by, stratify = args.group_by or "", bool(args.stratify)
    share = args.val_share
    if "train" in parts and "test" not in parts and share is None and asked:
        share = smallest_share(*parts["train"], group_by)
        part = f"{share:g} of the images" if share else "none: too few images"
        why = "no part of the data is called val; --val-share changes it"
        if "rest" in parts:
            why += ", and the test part is for the end"
        rows.append(("evaluation", part, why))
    if not share:
        if group_by or stratify:
            raise ConfigError("--group-by and --stratify need a --val-share.")
        return Data(parts, parts)
    if "train" not in parts:
        raise ConfigError("--val-share needs --data or --train-json, to hold out some images.")
    split = Split(share, group_by, stratify)
    labels, images = parts["train"]
    train, test = hold_out(labels, images, split, folder=temporary)
    return Data({**parts, "train": (train, images), "test": (test, images)}, parts)


def read_labels(
    args: argparse.Namespace, temporary: Path, rows: list[Row], *, single_class: bool
) -> dict[str, tuple[str, str]]:
    """Convert labels of any format to COCO files, each with the folder of its images, by part.

    Args:
        args: of the command line.
        temporary: a folder for the files.
        rows: of the table of choices, which gets more.
        single_class: whether all objects are of one class.

    Raises:
        ConfigError: flags do not go together.
        DataError: the data are not of a known format, or not found.
    """
    if args.data and args.train_json:
        raise ConfigError("--data and --train-json both name data to train on; give one of them.")
    if args.val_share and args.test_json:
        raise ConfigError("--val-share is for data without a --test-json; give one of them.")
    parts: dict[str, tuple[str, str]] = {}
    if args.data:
        name, found, _ = find_parts(args.data, args.train_images, folder=temporary)
        rows.append(("labels", name, f"of what lies in {args.data}"))
        named = {part.name: part for part in found}
        parts["train"] = str(named["train"].labels), str(named["train"].images)
        # A test part chooses no weights: it is for the end
        used = named.get("val") or (named.get("test") if args.eval_only else None)
        if used and not args.test_json and args.val_share is None:
            images = str(args.test_images or used.images)
            parts["test"] = str(used.labels), images
            rows.append(("evaluation", used.source, f"with the images in {images}"))
        if "test" in named and named["test"] is not used and not args.test_json:
            parts["rest"] = str(named["test"].labels), str(named["test"].images)
    named = {}
    for part in PARTS:
        labels, images = getattr(args, f"{part}_json"), getattr(args, f"{part}_images")
        if labels and not Path(labels).exists():
            raise DataError(f"The labels {labels} of --{part}-json do not exist.")
        if labels:
            named[part] = labels, images or str(find_images(labels))
        elif images and not args.data:
            raise ConfigError(f"--{part}-images is given without --{part}-json; give both.")
    files = as_coco(*named.values(), folder=temporary)
    parts |= {
        part: (file, images) for file, (part, (_, images)) in zip(files, named.items(), strict=True)
    }
    if single_class:
        rows.append(("classes", "one", "--single-class"))
        parts = {
            part: (as_single_class(file, temporary), images)
            for part, (file, images) in parts.items()
        }
    return parts
