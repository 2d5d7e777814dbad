"""What a command line leaves open: the parts of a data set, and the recipe without ``--config``.

The log has one table of what was chosen and why. What is typed counts instead.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import logging
import os
import statistics
import urllib.request
from collections.abc import Iterable, Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Any

import torch
import yaml
from iopath.common.file_io import get_cache_dir
from tabulate import tabulate

from lambda_det.config import CONFIGS, leaves, read_plain
from lambda_det.detection.config import DATA_FLAGS, sizes_for, typed_keys
from lambda_det.detection.config_files import get_config
from lambda_det.detection.data.coco import file_report
from lambda_det.distributed.devices import check_device
from lambda_det.errors import ConfigError, DataError
from lambda_det.own_data.held_out import Split, hold_out
from lambda_det.own_data.labels import as_coco, refuse_address
from lambda_det.own_data.layouts import find_images, find_parts
from lambda_det.own_data.recipe import USABLE

__all__ = ["RECIPES", "complete"]

logger = logging.getLogger(__name__)

VAL_SHARE = 0.1
# The best first: the first whose weights can be had, and of which a GPU holds LEAST_IMAGES by its
# RECIPE.MEMORY. Those for a CPU have none; the weights of the last one are in this package.
RECIPES = {
    "cuda": ("mask_rcnn_resnetrs101_se", "mask_rcnn_resnetrs50_se", "mask_rcnn_lambda_resnet26t"),
    "cpu": ("light_mobilenet_v2", "light_lambdaresnet26"),
}
LEAST_IMAGES = 4
LARGEST_SCALE = 2  # of an image: more pixels than that show nothing new, and take time
_HOST, _SECONDS = "https://huggingface.co", 3  # of timm's weights; to wait for it


def complete(args: argparse.Namespace) -> None:
    """Fill in data flags and configuration that are not typed, and log what and why.

    Args:
        args: of :func:`lambda_det.detection.command_line.parser`. ``config_file`` is None where the
            file is to be chosen; a second call chooses nothing.

    Raises:
        ConfigError: there is neither a file nor data, or flags do not go together.
        DataError: the data are not of a known format, or not found.
    """
    rows: list[tuple[str, str, str]] = getattr(args, "choices", [])
    if not rows:
        rows += _name_data(args)
        rows += _choose(args) if args.config_file is None else []
        args.choices = rows
    if rows:
        logger.info(f"What was chosen:\n{tabulate(rows, ('', 'choice', 'why'))}")


def _name_data(args: argparse.Namespace) -> list[tuple[str, str, str]]:
    """Set the flags for the files of the data; what they are is for the table."""
    place, rows = getattr(args, "data", None), []
    for part in (place, args.train_json, args.train_images, args.test_json, args.test_images):
        refuse_address(part or "")
    if place or args.config_file is None:
        _take(args, typed_keys(args.opts), (*DATA_FLAGS, "group_by", "val_share"))
    if place and args.train_json:
        raise ConfigError("--data and --train-json both name data to train on; give one of them.")
    if place:
        kind, (train, *tests) = find_parts(place, args.train_images)
        rows.append(("labels", kind, f"of what lies in {place}"))
        args.train_json, args.train_images = str(train.labels), str(train.images)
        if tests and not args.test_json and args.val_share is None:
            args.test_json = str(tests[0].labels)
            args.test_images = args.test_images or str(tests[0].images)
            rows.append(("evaluation", tests[0].source, f"with the images in {args.test_images}"))
    for part in ("train", "test"):
        labels = getattr(args, f"{part}_json", None)
        if labels and not getattr(args, f"{part}_images") and Path(labels).exists():
            setattr(args, f"{part}_images", str(find_images(labels)))
    holds_out = place or (args.config_file is None and args.train_json)
    if holds_out and not args.test_json and args.val_share is None:
        why = "--resume goes on as the run was started"
        if saved := _saved(args):
            _take(args, saved, ("val_share", "group_by", "stratify"))
        else:
            args.val_share = _share(args.train_json, args.train_images, args.group_by or "")
            why = "no part of the data is called val or test; --val-share changes it"
        part = f"{args.val_share:g} of the images" if args.val_share else "none: too few images"
        rows.append(("evaluation", part, why))
    return rows


def _take(args: argparse.Namespace, keys: Mapping[str, Any], flags: Iterable[str]) -> None:
    """Set those flags for data that are not typed from keys in their place."""
    for flag in flags:
        value = keys.get(f"DATASETS.{flag.upper()}")
        if value not in (None, "") and getattr(args, flag, None) is None:
            with contextlib.suppress(ValueError):  # whoever reads the keys refuses it
                setattr(args, flag, float(value) if flag == "val_share" else value)


def _saved(args: argparse.Namespace) -> dict[str, Any]:
    """The keys of the run that ``--resume`` continues; none where there is no such run."""
    typed = typed_keys(args.opts)
    folder = typed.get("OUTPUT_DIR", "output/finetune")
    file = Path(args.output or folder, "config.yaml")
    if not args.resume or not file.is_file():
        return {}
    with contextlib.suppress(yaml.YAMLError, UnicodeDecodeError, AttributeError):
        return {"file": str(file), **dict(leaves(read_plain(file.read_text("utf-8"))))}
    raise ConfigError(f"{file} is not a saved configuration; mend or remove it.")


def _share(labels: str, images: str, group_by: str) -> float | None:
    """The smallest share that holds out an image and leaves some of each class, or None."""
    (json_file,) = as_coco((labels, images))
    for share in (VAL_SHARE, 0.2, 0.3, 0.5):
        with contextlib.suppress(DataError):
            hold_out(json_file, images, Split(share, group_by=group_by))
            return share
    return None


def _choose(args: argparse.Namespace) -> list[tuple[str, str, str]]:
    """Set the configuration, with the keys that belong to it before those that are typed."""
    typed = typed_keys(args.opts)
    if saved := _saved(args):
        args.config_file = saved["file"]
        return [("recipe", args.config_file, "--resume goes on as the run was started")]
    if args.eval_only or not args.train_json:
        raise ConfigError(
            "--config FILE is missing, which names a file of yours or of configs/; with --data DIR "
            "or --train FILE --images DIR it follows from the data and the machine."
        )
    if args.num_machines > 1 or "TORCHELASTIC_RUN_ID" in os.environ:
        raise ConfigError(
            "Several machines, or processes of torchrun, may choose different recipes: name one "
            f"with --config, such as configs/finetune/{RECIPES['cuda'][0]}.yaml."
        )
    device = typed.get("MODEL.DEVICE") or ("cuda" if torch.cuda.is_available() else "cpu")
    names, memory, reasons = RECIPES["cpu"], 0.0, ["no GPU is used"]
    if check_device(device, 1).type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory / 2**30
        names, reasons = RECIPES["cuda"] + names, [f"the GPU has {memory:.0f} GiB"]
    for name in names:
        recipe = get_config(f"finetune/{name}.yaml")
        fixed, each = recipe.RECIPE.MEMORY or (0, 0)
        weights = recipe.MODEL.WEIGHTS
        if fixed and fixed + LEAST_IMAGES * each > USABLE * memory:
            reasons.append(f"{name} takes more")
        elif weights and not typed.get("MODEL.WEIGHTS", _can_be_had(weights)):
            why = "MODEL.WEIGHTS is typed as empty" if "MODEL.WEIGHTS" in typed else "no connection"
            reasons.append(f"{name} needs {weights} ({why})")
        else:
            break
    weights = typed.get("MODEL.WEIGHTS", weights)
    args.config_file = str(CONFIGS / "finetune" / f"{name}.yaml")
    found = "typed" if "MODEL.DEVICE" in typed else "the best that PyTorch finds here"
    keys = {"MODEL.DEVICE": (device, found)}
    (json_file,) = as_coco((args.train_json, args.train_images))
    report = file_report(json_file, args.train_images)
    short = statistics.median(min(file["width"], file["height"]) for file in report.files)
    largest = LARGEST_SCALE * short
    if args.size is None and largest < recipe.INPUT.MIN_SIZE_TEST:
        why = f"of images enlarged {LARGEST_SCALE} times at most"
        keys |= {key: (value, why) for key, value in sizes_for(recipe, largest).items()}
    args.opts[:0] = [str(word) for key, (value, _) in keys.items() for word in (key, value)]
    alone = "" if weights else f"all is learnt from {report.images} images"
    return [
        ("images", str(report.images), f"the median of their shorter sides is {short:g} pixels"),
        ("recipe", args.config_file, "; ".join(reasons)),
        ("start", weights or "random weights", alone),
        *((key, str(value), why) for key, (value, why) in keys.items()),
    ]


def _can_be_had(url: str) -> bool:
    """Whether weights come with this package, are kept here, or there is a connection to them."""
    if url.startswith("lambda://"):
        return True
    name, folder = url.removeprefix("timm://"), Path(get_cache_dir(), "lambda_det")
    kept = [*folder.glob(f"timm_{name}_*.pth"), *folder.glob(f"timm/{name}.safetensors")]
    return bool(kept) or _is_connected()


@functools.cache
def _is_connected() -> bool:
    """Whether the host of timm's weights answers; it is asked once, and not where HF forbids it."""
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        return False
    try:
        with urllib.request.urlopen(urllib.request.Request(_HOST, method="HEAD"), timeout=_SECONDS):
            return True
    except (OSError, HTTPException):
        return False
