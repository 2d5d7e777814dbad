"""Where a training starts: the facts of the machine, and the first recipe whose weights can be had
there, where a command line names none.
"""

from __future__ import annotations

import argparse
import functools
import os
import urllib.request
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple

import torch
from detectron2.config import CfgNode
from iopath.common.file_io import get_cache_dir

from lambda_det.config import CONFIGS
from lambda_det.detection.config import changed_config
from lambda_det.detection.config_files import get_config
from lambda_det.distributed.launch import check_device, under_torchrun
from lambda_det.errors import ConfigError, WeightsError
from lambda_det.process import usable_cores
from lambda_det.weights.backbone_file import read_backbone
from lambda_det.weights.public import fetch, is_public

DEFAULT = "finetune/base.yaml"  # the base of all these recipes
# The best stand first. The first one is chosen whose weights can be had, and whose RECIPE.MEMORY
# lets the GPU hold LEAST_IMAGES images. Recipes for a CPU have no RECIPE.MEMORY; the weights of the
# last two are in this package. The last one is for a package that lacks the file of the one before,
# and for random weights: all of its backbone is trained.
RECIPES = {
    "cuda": ("mask_rcnn_resnetrs101_se", "mask_rcnn_resnetrs50_se", "mask_rcnn_lambda_resnet26t"),
    "cpu": ("light_mobilenet_v2", "light_mobilenet_v2_openimages", "light_lambdaresnet26"),
}
LEAST_IMAGES = 4  # of a step, as in all these recipes
USABLE = 0.9  # guess: share of a GPU's memory, because the memory was counted and not measured
_HOST, _SECONDS = "https://huggingface.co", 3  # the host of timm's weights; seconds to wait for it


class Machine(NamedTuple):
    """The machine of a training.

    Attributes:
        device: the one that PyTorch finds, or the given one.
        processes: of the training, on all machines together.
        memory: GiB of the smallest GPU that is used on this machine; None without one. It is not
            the free memory, because a run that is started again must get the same batch.
        is_alone: whether this process is the only one, on one machine, that chooses.
        cores: of the processor, which the processes on this machine share.
    """

    device: str
    processes: int = 1
    memory: float | None = None
    is_alone: bool = True
    cores: int = 1

    @classmethod
    def of(cls, args: argparse.Namespace, device: str | None) -> Machine:
        """
        Args:
            args: of the command line.
            device: the given one; None for the best that PyTorch finds here.

        Raises:
            ConfigError: there is no such device.
        """
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        processes, here = args.num_gpus * args.num_machines, args.num_gpus
        if under_torchrun():
            processes, here = (int(os.environ[f"{of}WORLD_SIZE"]) for of in ("", "LOCAL_"))
        parsed, memory = check_device(device, here), None
        if parsed.type == "cuda":
            used = [parsed.index] if parsed.index is not None else range(here)
            memory = min(torch.cuda.get_device_properties(gpu).total_memory for gpu in used) / 2**30
        is_alone = args.num_machines == 1 and (processes == 1 or not under_torchrun())
        return cls(device, processes, memory, is_alone, usable_cores())


class Start(NamedTuple):
    """A configuration, before the own data are in it.

    Attributes:
        config: with the given keys.
        file: that it is of.
        keys: that belong to it besides, with their values; a given key counts more.
        rows: of the table of choices: what, the choice, and why.
        is_chosen: whether it is a recipe that nobody named.
    """

    config: CfgNode
    file: str
    keys: dict[str, Any]
    rows: Sequence[tuple[str, str, str]] = ()
    is_chosen: bool = False


def choose_recipe(given: Mapping[str, str], machine: Machine) -> Start:
    """The first recipe that fits the machine, and whose weights can be had.

    Args:
        given: keys of the command line, with their values.
        machine: where the training is to run.

    Raises:
        ConfigError: other machines or processes may choose another recipe.
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
    origin = "all is learnt from these images"
    if weights:
        origin = fetch(weights).figures if is_public(weights) else ""
    why = "given" if "MODEL.DEVICE" in given else "the best that PyTorch finds here"
    rows = [
        ("recipe", f"configs/finetune/{name}.yaml", "; ".join(reasons)),
        ("start", weights or "random weights", origin),
        ("MODEL.DEVICE", machine.device, why),
    ]
    keys = {"MODEL.DEVICE": machine.device}
    config = changed_config(recipe, [word for pair in {**keys, **given}.items() for word in pair])
    return Start(config, str(CONFIGS / "finetune" / f"{name}.yaml"), keys, rows, is_chosen=True)


def _why_not(url: str, given: str | None) -> str:
    """Why the weights of a recipe cannot be taken; "" if they can, or others are given."""
    # They must be whole and in this package, or in the cache, or there is a connection
    if given is not None:
        return "" if given else "MODEL.WEIGHTS is given as empty"
    if url.startswith("lambda://"):
        place = fetch(url).place
        try:
            read_backbone(place)
        except WeightsError:
            return f"{place} is damaged or missing: install lambda_det again"
        return ""
    name, folder = url.removeprefix("timm://"), Path(get_cache_dir(), "lambda_det")
    kept = [*folder.glob(f"timm_{name}_*.pth"), *folder.glob(f"timm/{name}.safetensors")]
    return "" if kept or _is_connected() else "no connection; MODEL.WEIGHTS FILE takes a copy"


@functools.cache
def _is_connected() -> bool:
    """Whether the host of timm's weights answers; not asked if HF_HUB_OFFLINE is set."""
    # It is asked once
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        return False
    try:
        with urllib.request.urlopen(urllib.request.Request(_HOST, method="HEAD"), timeout=_SECONDS):
            return True
    except (OSError, HTTPException):
        return False
