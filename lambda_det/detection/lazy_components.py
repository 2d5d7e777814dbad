"""The components of a training that a LazyConfig describes by its nodes.

Besides the nodes, only these places are read: the settings of a run (:data:`KEYS`), ``train.ddp``,
and, where they exist, the names of the data sets, the means of pixels, and the augmentations of
``dataloader.test.mapper``.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator
from functools import cache, partial
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from detectron2.config import instantiate
from detectron2.data.transforms import AugmentationList
from omegaconf import DictConfig, ListConfig, OmegaConf
from torch import nn
from torch.optim import Optimizer

from lambda_det.config import leaves
from lambda_det.detection import data
from lambda_det.detection.components import Components, Evaluators
from lambda_det.detection.data.predictions import Detector
from lambda_det.detection.lazy import KEYS, ON_RESUME, dump_lazy, lazy_code
from lambda_det.detection.schedule import DetectionSettings
from lambda_det.errors import ConfigError
from lambda_det.training.library_errors import naming_keys
from lambda_det.training.settings import Clipping
from lambda_det.weights.provenance import PixelSettings

logger = logging.getLogger(__name__)

_ADVICE = "a lower optimizer.lr, a longer warm-up in lr_multiplier, train.clip_grad or clean labels"


def of_lazy(config: DictConfig) -> Components:
    """The components that a LazyConfig describes.

    Args:
        config: with ``model``, ``dataloader.train``, ``optimizer``, ``lr_multiplier`` and
            ``train``; with ``dataloader.test`` and ``dataloader.evaluator`` if it is evaluated.

    Raises:
        ConfigError: a setting cannot be.
    """
    detector = _detector(config)
    train_names, test_names = (_data_names(config, part) for part in ("train", "test"))
    is_evaluated = "test" in config.dataloader and "evaluator" in config.dataloader
    ddp_options = dict(config.train.get("ddp", {}))
    # the buffers belong to norms, which are synchronised, or saved from the first process alone
    ddp_options.pop("broadcast_buffers", None)

    def check_data(train: bool) -> None:
        if train:
            _warn_of_unread(config)
        data.check_registered(detector, train_names if train else (), test_names)
        if is_evaluated:  # what would fail at the first evaluation
            _made(config.dataloader.evaluator, "dataloader.evaluator")
        elif not train:
            raise ConfigError(
                "There is nothing to evaluate: set dataloader.test to the data and "
                "dataloader.evaluator to the measure."
            )

    return Components(
        settings=read_settings(config),
        make_model=lambda: _made(config.model, "model"),
        make_backbone=lambda: _made(config.model.backbone, "model.backbone"),
        make_optimizer=partial(_optimizer, config),
        make_schedule=lambda settings: _made(config.lr_multiplier, "lr_multiplier"),
        make_train_loader=partial(_train_loader, config),
        make_test_loader=lambda name: _made(config.dataloader.test, "dataloader.test"),
        make_evaluator=lambda name, ending: _evaluator(config, ending),
        make_test_augmentations=partial(_test_augmentations, config),
        check_data=check_data,
        dump=cache(partial(dump_lazy, config)),
        detector=detector,
        pixels=_pixels(config),
        train_names=train_names,
        test_names=test_names,
        test_sets=(", ".join(test_names) or "dataloader.test",) if is_evaluated else (),
        ddp_options=ddp_options,
        on_resume=ON_RESUME,
        test_keys=("dataloader.test.dataset.",),
        advice=_ADVICE,
    )


# ----------------------------------------------------------------------------------------- settings
def read_settings(config: DictConfig) -> DetectionSettings:
    """The settings of a LazyConfig, as written, or their defaults.

    Raises:
        ConfigError: a value is of another type, or cannot be.
    """
    values: dict[str, Any] = {
        "output_dir": "./output",
        "device": "cuda",
        "seed": -1,
        "weights": "",
        "images_per_step": None,
    }
    kinds = get_type_hints(DetectionSettings)
    for name, key in KEYS.items():
        if name in kinds and (value := OmegaConf.select(config, key)) is not None:
            values[name] = _of_type(kinds[name], key, value)
    is_mixed = OmegaConf.select(config, "train.amp.enabled")
    values["amp_dtype"] = values.get("amp_dtype", "auto") if is_mixed else None
    if not OmegaConf.select(config, "train.model_ema.enabled"):
        values["ema_decay"] = 0.0
    if OmegaConf.select(config, "train.clip_grad.enabled"):
        keys = KEYS["clipping.limit"], KEYS["clipping.norm_type"]
        limit = OmegaConf.select(config, keys[0])
        norm_type = OmegaConf.select(config, keys[1], default=2.0)
        values["clipping"] = Clipping(
            "full_model", _of_type(float, keys[0], limit), _of_type(float, keys[1], norm_type)
        )
    return DetectionSettings(**values, keys=KEYS)


def _of_type(kind: Any, key: str, value: Any) -> Any:
    """The value of a setting; it must have the setting's type."""
    if isinstance(value, ListConfig):
        value = tuple(value)
    allowed = get_args(kind) if isinstance(kind, UnionType) else (get_origin(kind) or kind,)
    if float in allowed:
        allowed = (*allowed, int)
    # Python takes True for the number 1
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        words = " or ".join(getattr(one, "__name__", str(one)) for one in allowed)
        raise ConfigError(f"{key} is {value!r}; it must be of type {words}.")
    return value


# ------------------------------------------------------------------------------------- from nodes
def _made(node: DictConfig | ListConfig, key: str) -> Any:
    """The object that a node makes; an error names the node's key."""

    def values() -> Iterable[tuple[str, Any]]:
        return leaves({key: OmegaConf.to_container(node)})  # of a list the list itself

    with lazy_code(f"The configuration's {key} cannot be made"), naming_keys(values):
        return instantiate(node)


def _optimizer(config: DictConfig, settings: DetectionSettings, model: nn.Module) -> Optimizer:
    node = copy.deepcopy(config.optimizer)
    node.params.model = model
    if settings.base_lr is not None:
        node.lr = settings.base_lr
    return _made(node, "optimizer")


def _train_loader(config: DictConfig, settings: DetectionSettings) -> Iterable:
    node = copy.deepcopy(config.dataloader.train)
    if "total_batch_size" in node:
        node.total_batch_size = settings.images_per_batch
    if "num_workers" in node:
        node.num_workers = settings.num_workers
    return _made(node, "dataloader.train")


def _evaluator(config: DictConfig, ending: str) -> Evaluators:
    node = copy.deepcopy(config.dataloader.evaluator)
    for each in _nodes(node):
        if each.get("output_dir"):  # results of averaged weights are beside the raw ones
            each.output_dir = f"{each.output_dir}{ending}"
    made = _made(node, "dataloader.evaluator")
    return list(made) if isinstance(made, ListConfig) else made


def _test_augmentations(config: DictConfig) -> AugmentationList:
    key = "dataloader.test.mapper.augmentations"
    nodes = OmegaConf.select(config, key)
    if nodes is None:
        raise ConfigError(f"There is no {key}, which says how images are resized.")
    return AugmentationList(list(_made(nodes, key)))


def _nodes(node: Any) -> Iterator[DictConfig]:
    """A node and all nodes in it."""
    if isinstance(node, DictConfig):
        yield node
    if isinstance(node, (DictConfig, ListConfig)):
        for child in node.values() if isinstance(node, DictConfig) else node:
            yield from _nodes(child)


# --------------------------------------------------------------------- what a configuration says of
def _data_names(config: DictConfig, part: str) -> tuple[str, ...]:
    names = OmegaConf.select(config, f"dataloader.{part}.dataset.names")
    if isinstance(names, str):
        return (names,)
    return tuple(names) if isinstance(names, ListConfig) else ()


def _detector(config: DictConfig) -> Detector:
    target = config.model.get("_target_", "")
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    keys = {"architecture": "model._target_"}
    keys |= {part: f"dataloader.{part}.dataset.names" for part in ("train", "test")}
    # the place in Detectron2's own models; models of other projects may have another, or none
    count = OmegaConf.select(config, "model.roi_heads.num_classes")
    count = OmegaConf.select(config, "model.num_classes") if count is None else count
    return Detector(architecture=name.rpartition(".")[2], num_classes=count, keys=keys)


def _pixels(config: DictConfig) -> PixelSettings | None:
    keys = ("dataloader.train.mapper.image_format", "model.pixel_mean", "model.pixel_std")
    values = [OmegaConf.select(config, key) for key in keys]
    if None in values:
        return None
    return PixelSettings(values[0], list(values[1]), list(values[2]), keys=keys)


def _warn_of_unread(config: DictConfig) -> None:
    """Log the keys of ``train`` that nothing reads."""
    read = {".".join(key.split(".")[:2]) for key in KEYS.values()} | {"train.ddp"}
    if unread := {f"train.{name}" for name in config.train} - read:
        logger.warning(f"Nothing here reads {', '.join(sorted(unread))}")
