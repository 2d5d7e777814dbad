"""The choice of a recipe by the data and the machine, where a command line names none."""

from __future__ import annotations

import functools
import os
import statistics
import urllib.request
from collections.abc import Collection, Iterable, Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple

import torch
from detectron2.config import CfgNode
from detectron2.structures import BoxMode
from iopath.common.file_io import get_cache_dir

from lambda_det.config import CONFIGS
from lambda_det.detection.config import changed_config
from lambda_det.detection.config_files import get_config
from lambda_det.detection.data.tile_records import number_of_whole_images, tile_records
from lambda_det.detection.tiles import Tiling
from lambda_det.errors import ConfigError, WeightsError
from lambda_det.own_data.flags import AUTO
from lambda_det.own_data.input_size import SIZES, FittedInput, fit_input, sizes_for
from lambda_det.own_data.machine import Machine
from lambda_det.own_data.recipe import USABLE, epochs_for
from lambda_det.own_data.tile_choice import OF_TILES, choose_tiles
from lambda_det.weights.backbone_file import read_backbone
from lambda_det.weights.public import fetch, is_public

__all__ = ["DEFAULT", "RECIPES", "Chosen", "choose"]

DEFAULT = "finetune/base.yaml"  # the base of all these recipes
# The best stand first. The first one is chosen whose weights can be had, and whose RECIPE.MEMORY
# lets the GPU hold LEAST_IMAGES images. Recipes for a CPU have no RECIPE.MEMORY; the weights of the
# last two are in this package. The last one is for a package that lacks the file of the one before,
# and for random weights: all of its backbone is trained.
RECIPES = {
    "cuda": ("mask_rcnn_resnetrs101_se", "mask_rcnn_resnetrs50_se", "mask_rcnn_lambda_resnet26t"),
    "cpu": ("light_mobilenet_v2", "light_mobilenet_v2_openimages", "light_lambdaresnet26"),
}
LEAST_IMAGES = 4
# Images of a step of the light recipes on a GPU: from this number of GiB on, and this many images.
# The host of an H200 took 0.09 s for a step of 4, whatever the GPU does, and these 4 kept it busy
# for a twentieth of that. Counted, 64 images take 10 GiB. The rest of the table is a guess: smaller
# GPUs are slower, and without bfloat16 all take half.
_FILLS_GPU = ((40, 64), (12, 32), (6, 16), (0, 4))
_LOADED = 10  # images that a loader process reads meanwhile; one takes 10 ms of a core
_MOST_LOADERS = 8
_TEST_IMAGES = 8  # of one size, which a GPU evaluates together
_HOST, _SECONDS = "https://huggingface.co", 3  # the host of timm's weights; seconds to wait for it


class Chosen(NamedTuple):
    """A recipe.

    Attributes:
        config: its configuration, with the given keys.
        file: of that.
        keys: for the data and the machine, with their values.
        rows: for the table: what, the choice, and why.
    """

    config: CfgNode
    file: str
    keys: dict[str, Any]
    rows: list[tuple[str, str, str]]


def choose(
    images: Collection[Mapping[str, Any]],
    annotations: Iterable[Mapping[str, Any]],
    given: Mapping[str, str],
    machine: Machine,
    size: int | None = None,
    tile: int | str | None = None,
) -> Chosen:
    """The first recipe that fits.

    Args:
        images: with id, width and height, as in COCO's format.
        annotations: as in COCO's format, with everything decided.
        given: keys of the command line.
        machine: where the training is to run.
        size: the given size; None if it follows from images and objects.
        tile: the given side of tiles, 0 for none, or "auto"; None if it follows from them.

    Raises:
        ConfigError: other machines or processes may choose another recipe, or the given tiles
            cannot be.
    """
    if not machine.is_alone:
        raise ConfigError(
            "Several machines, or processes of torchrun, may choose different recipes: name one "
            f"with --config, such as configs/finetune/{RECIPES['cuda'][0]}.yaml."
        )
    names, reasons = RECIPES["cpu"], ["no GPU is used"]
    if machine.memory is not None:
        names = RECIPES["cuda"] + names
        reasons = [f"the GPU has {machine.memory:.0f} GiB"]
    for name in names:
        recipe = get_config(f"finetune/{name}.yaml")
        fixed, each = recipe.RECIPE.MEMORY or (0, 0)
        weights = recipe.MODEL.WEIGHTS
        if fixed and fixed + LEAST_IMAGES * each > USABLE * (machine.memory or 0):
            reasons.append(f"{name} takes more")
        elif weights and (why := _why_not(weights, given.get("MODEL.WEIGHTS"))):
            reasons.append(f"{name} needs {weights} ({why})")
        else:
            break
    weights = given.get("MODEL.WEIGHTS", weights)
    file = str(CONFIGS / "finetune" / f"{name}.yaml")
    why = "given" if "MODEL.DEVICE" in given else "the best that PyTorch finds here"
    keys = {"MODEL.DEVICE": (machine.device, why)}
    short = statistics.median(min(image["width"], image["height"]) for image in images)
    annotations = list(annotations)
    config = changed_config(recipe, [word for pair in given.items() for word in pair])
    fitted, tiles = _fitted(config, images, annotations, given, size, tile)
    if machine.memory is not None:
        drawn = _drawn(images, annotations, config, fitted.keys)
        keys |= _keys_of_gpu(recipe, *drawn, machine)
    keys |= fitted.keys
    origin = f"all is learnt from {len(images)} images"
    if weights:
        origin = fetch(weights).figures if is_public(weights) else ""
    rows = [
        ("images", str(len(images)), f"the median of their shorter sides is {short:g} pixels"),
        ("recipe", f"configs/finetune/{name}.yaml", "; ".join(reasons)),
        ("start", weights or "random weights", origin),
        *tiles,
        *fitted.rows,
        *((key, str(value), why) for key, (value, why) in keys.items()),
    ]
    return Chosen(config, file, {key: value for key, (value, _) in keys.items()}, rows)


def default_tiles(
    images: Collection[Mapping[str, Any]], annotations: Iterable[Mapping[str, Any]]
) -> list[tuple[str, str, str]]:
    """What a training would say of tiles on this machine; [] where images stay whole.

    Args:
        images, annotations: as of :func:`choose`.
    """
    name = RECIPES["cuda" if torch.cuda.is_available() else "cpu"][0]
    recipe = get_config(f"finetune/{name}.yaml")
    fitted, rows = _fitted(recipe, images, list(annotations), {}, None, None)
    return rows if "INPUT.TILE.SIZE" in fitted.keys else []


def _fitted(
    cfg: CfgNode,
    images: Collection[Mapping[str, Any]],
    annotations: Collection[Mapping[str, Any]],
    given: Mapping[str, str],
    size: int | None,
    tile: int | str | None,
) -> tuple[FittedInput, list[tuple[str, str, str]]]:
    """The input of a recipe, and rows on its tiles.

    Args:
        cfg: the recipe, with the given keys.
        images, annotations, given, size, tile: as of :func:`choose`.
    """
    tile = cfg.INPUT.TILE.SIZE if "INPUT.TILE.SIZE" in given else tile
    recipe = cfg
    whole = fit_input(recipe, images, annotations, given, size)
    has_size = size is not None or not given.keys().isdisjoint(SIZES)
    if has_size and tile is None:  # what is given is of whole images
        return whole, []
    chosen = choose_tiles(
        cfg, images, annotations, tile, _with(cfg, {k: v for k, (v, _) in whole.keys.items()})
    )
    if chosen.tiling is None:
        return whole, chosen.rows
    keys = {key: (value, "for tiles") for key, value in chosen.keys.items()}
    rows = [*chosen.rows, OF_TILES] if has_size else chosen.rows
    if tile != AUTO and tile is not None and not has_size:
        sizes = sizes_for(recipe, tile)
        keys |= {key: (value, "objects keep their pixels") for key, value in sizes.items()}
        recipe = _with(recipe, sizes)
    fitted = fit_input(recipe, chosen.images, annotations, given, size)
    return FittedInput(keys | fitted.keys, fitted.rows), rows


def _drawn(
    images: Collection[Mapping[str, Any]],
    annotations: Iterable[Mapping[str, Any]],
    cfg: CfgNode,
    fitted: Mapping[str, tuple[Any, str]],
) -> tuple[int, int]:
    """How many images a training draws, or tiles of them, and of how many images."""
    keys = {key: value for key, (value, _) in fitted.items() if key.startswith("INPUT.TILE.")}
    tiling = Tiling.from_config(_with(cfg, keys))
    if tiling is None:
        return len(images), len(images)
    records = {
        image["id"]: {**image, "file_name": str(image["id"]), "annotations": []} for image in images
    }
    for one in annotations:
        kept = {key: one[key] for key in ("category_id", "iscrowd")}
        box = {"bbox": one["bbox"][:4], "bbox_mode": BoxMode.XYWH_ABS}
        records[one["image_id"]]["annotations"].append(kept | box)
    tiles = tile_records([*records.values()], tiling, cfg.INPUT.TILE.EMPTY, report=False)
    return len(tiles), number_of_whole_images(tiles)


def _with(cfg: CfgNode, keys: Mapping[str, Any]) -> CfgNode:
    cfg = cfg.clone()
    cfg.merge_from_list([word for pair in keys.items() for word in pair])
    return cfg


def _keys_of_gpu(
    recipe: CfgNode, images: int, whole_images: int, machine: Machine
) -> dict[str, tuple[Any, str]]:
    """What keeps a GPU busy, with the reasons: loader processes by the cores, and images of a step
    where the recipe was made for a CPU.

    Args:
        images: to train on, or tiles of them.
        whole_images: that they are of.
    """
    cores = machine.cores // machine.processes
    loaders = min(max(cores - 1, 1), _MOST_LOADERS)
    keys = {"DATALOADER.NUM_WORKERS": (loaders, f"{cores} cores for each process of the training")}
    if recipe.RECIPE.MEMORY:  # by which the batch follows
        return keys
    fills = next(most for least, most in _FILLS_GPU if machine.memory >= least)
    if not machine.has_bfloat16:
        fills = max(fills // 2, LEAST_IMAGES)
    in_steps = (
        int(epochs_for(images, whole_images) * images / recipe.RECIPE.MIN_STEPS)
        // machine.processes
    )
    share = max(min(fills, _LOADED * loaders, in_steps), LEAST_IMAGES)
    why = (
        f"the least of {fills} for this GPU, {_LOADED * loaders} for {loaders} loader process(es), "
        f"{in_steps} for {recipe.RECIPE.MIN_STEPS} steps; {LEAST_IMAGES} at least"
    )
    why += f"; {machine.processes} GPUs" if machine.processes > 1 else ""
    keys["SOLVER.IMS_PER_BATCH"] = share * machine.processes, why
    keys["TEST.IMS_PER_BATCH"] = _TEST_IMAGES, "images of one size are evaluated together"
    return keys


def _why_not(url: str, given: str | None) -> str:
    """Why the weights of a recipe cannot be taken; "" if they can, or others are given.

    They must be whole and in this package, or in the cache, or there is a connection.
    """
    if given is not None:
        return "" if given else "MODEL.WEIGHTS is given as empty"
    if url.startswith("lambda://"):
        place = fetch(url).place
        try:
            read_backbone(place)
        except WeightsError:
            state = "damaged" if place.is_file() else "missing"
            return f"{place} is {state}: install lambda_det again"
        return ""
    name, folder = url.removeprefix("timm://"), Path(get_cache_dir(), "lambda_det")
    kept = [*folder.glob(f"timm_{name}_*.pth"), *folder.glob(f"timm/{name}.safetensors")]
    return "" if kept or _is_connected() else "no connection; MODEL.WEIGHTS FILE takes a copy"


@functools.cache
def _is_connected() -> bool:
    """Whether the host of timm's weights answers; it is asked once, and not if HF_HUB_OFFLINE is
    set.
    """
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        return False
    try:
        with urllib.request.urlopen(urllib.request.Request(_HOST, method="HEAD"), timeout=_SECONDS):
            return True
    except (OSError, HTTPException):
        return False
