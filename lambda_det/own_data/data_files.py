"""From the flags for own data to files in COCO's format, in a temporary folder."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
from pathlib import Path

from lambda_det.detection.data.coco_format import INSTANCES, read_lists
from lambda_det.errors import ConfigError
from lambda_det.files import refuse_missing
from lambda_det.own_data.fit_input import Row
from lambda_det.own_data.flags import PARTS
from lambda_det.own_data.held_out import Split, hold_out, numbered, smallest_share
from lambda_det.own_data.labels.conversion import as_single_class
from lambda_det.own_data.layouts import as_coco, find_parts

# Labels in COCO's format with the folder of their images, by "train", "test" and "rest", which is a
# test part that is not used
Parts = dict[str, tuple[str, str]]


def read_data(
    args: argparse.Namespace, temporary: Path, rows: list[Row]
) -> tuple[Parts, dict[str, str]]:
    """The data that flags name, with images held out where nothing to evaluate on is named; and the
    digests of the parts before that.

    Args:
        args: of the command line.
        temporary: a folder for the files.
        rows: of the table of choices, which gets more.

    Raises:
        ConfigError: flags do not go together.
        DataError: the data are not of a known format, or not found; or the share leaves nothing.
    """
    if args.data and args.train_json:
        raise ConfigError("--data and --train-json both name data to train on; give one of them.")
    if args.val_share and args.test_json:
        raise ConfigError("--val-share is for data without a --test-json; give one of them.")
    parts = read_labels(args, temporary, rows)
    # A test part that is left alone decides nothing in a run, and may be broken
    digests = {part: digest(file) for part, (file, _) in parts.items() if part != "rest"}
    if args.single_class:
        rows.append(("classes", "one", "--single-class"))
        parts = {
            part: (as_single_class(file, temporary), images)
            for part, (file, images) in parts.items()
        }
    split = Split(args.val_share or 0.0, args.group_by or "", bool(args.stratify))
    asked = args.data or (args.config_file is None and args.train_json)
    if asked and "test" not in parts and args.val_share is None:
        split = split._replace(share=smallest_share(*parts["train"], split))
        part = f"a share of {split.share:g}" if split.share else "none: too few images"
        why = "no part beside the training part is called val; --val-share changes it"
        if "rest" in parts:
            why += ", and the test part is for the end"
        rows.append(("evaluation", part, why))
    if not split.share:
        if split.group_by or split.stratify:
            raise ConfigError(
                "--group-by and --stratify need a --val-share, which is held out of the training "
                "part; a part val is not used then."
            )
        return parts, digests
    if "train" not in parts:
        raise ConfigError("--val-share needs --data or --train-json, to hold out some images.")
    labels, images = parts["train"]
    train, test = hold_out(labels, images, split, folder=temporary)
    return {**parts, "train": (train, images), "test": (test, images)}, digests


def digest(file: str) -> str:
    """A digest of labels in COCO's format, wherever those lay of which they were made.

    Raises:
        DataError: they are broken.
    """
    content = read_lists(file)
    lists = [content[name] for name in INSTANCES]
    for entry in itertools.chain(*lists):
        entry.pop("source", None)
    return hashlib.sha256(json.dumps(lists, sort_keys=True).encode()).hexdigest()


def read_labels(args: argparse.Namespace, temporary: Path, rows: list[Row]) -> Parts:
    """The labels that flags name, before images are held out.

    Raises:
        ConfigError, DataError: as :func:`read_data`.
    """
    parts = _of_folder(args, temporary, rows) if args.data else {}
    return parts | _of_files(args, temporary)


def _of_folder(args: argparse.Namespace, temporary: Path, rows: list[Row]) -> Parts:
    """The parts of ``--data``."""
    name, named, _ = find_parts(args.data, args.train_images, folder=temporary)
    rows.append(("labels", name, f"of what lies in {args.data}"))
    parts = {"train": (named["train"].labels, named["train"].images)}
    if args.test_json:
        return parts
    test = named.get("test")
    # A test part chooses no weights: it is for the end
    used = named.get("val") or (test if args.eval_only else None)
    if used and args.val_share:
        rows.append(("evaluation", "a share", f"--val-share; {used.source} is not used"))
    elif used:
        images = args.test_images or used.images
        parts["test"] = used.labels, images
        objects = numbered(len(read_lists(used.labels)["annotations"]))
        rows.append(("evaluation", used.source, f"with the images in {images}, {objects}"))
    if test and test is not used:
        parts["rest"] = test.labels, test.images
    return parts


def _of_files(args: argparse.Namespace, temporary: Path) -> Parts:
    """The labels of ``--train-json`` and ``--test-json``."""
    named = {}
    for part in PARTS:
        labels, images = getattr(args, f"{part}_json"), getattr(args, f"{part}_images")
        refuse_missing(labels)
        if labels:
            named[part] = labels, images
    return dict(zip(named, as_coco(*named.values(), folder=temporary), strict=True))
