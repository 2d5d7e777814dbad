"""The parts of a training that a LazyConfig describes."""

from __future__ import annotations

import argparse
import copy
import importlib.util
import inspect
import logging
import re
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from detectron2.config import instantiate
from detectron2.data import MetadataCatalog
from detectron2.data.transforms import AugmentationList
from detectron2.evaluation import COCOEvaluator, DatasetEvaluator
from detectron2.modeling import GeneralizedRCNNWithTTA
from detectron2.solver import LRMultiplier
from detectron2.utils.registry import locate
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lambda_det.detection import data
from lambda_det.detection.config import DATA_FLAGS, load_config
from lambda_det.detection.data.predictions import Detector
from lambda_det.detection.evaluation import TolerantCOCOEvaluator, check_augmented_test
from lambda_det.detection.lazy import (
    KEYS,
    counts_steps,
    dump_lazy,
    has_steps,
    read_settings,
    read_value,
    refuse_unknown_train_keys,
    select,
)
from lambda_det.detection.parts import Parts, padded
from lambda_det.detection.read_yaml import by_key, read_yaml
from lambda_det.detection.recipe import fit_to_data
from lambda_det.detection.registry import class_keys, needed_packages
from lambda_det.detection.schedule import DetectionSettings
from lambda_det.detection.yaml_view import (
    EQUIVALENTS,
    class_name,
    in_lazy_keys,
    kept_keys,
    place_in,
    yaml_view,
)
from lambda_det.errors import ConfigError, reason
from lambda_det.training.settings import FixedKeys
from lambda_det.weights.provenance import PixelSettings

__all__ = ["read_lazy"]

logger = logging.getLogger(__name__)

FIXED_KEYS = FixedKeys(
    names=(
        "model",
        "optimizer",
        "dataloader.train.mapper.image_format",
        "dataloader.train.total_batch_size",
        "train.reference_world_size",
        "train.seed",
    ),
    but_not=(
        "model.backbone.bottom_up.checkpoint_activations",
        "model.backbone.bottom_up.implementation",
        "model.vis_period",
    ),
)
SAMPLE_KEYS = FixedKeys(
    names=("dataloader",),
    but_not=(
        "dataloader.evaluator",
        "dataloader.test",
        "dataloader.test_images",
        "dataloader.test_json",
        "dataloader.train.max_unreadable",
        "dataloader.train.num_workers",
        "dataloader.train.timeout",
    ),
)
# Of the channels of the images
_ORDERS = ("dataloader.train.mapper.image_format", "dataloader.test.mapper.image_format")
_PIXEL_KEYS = (_ORDERS[0], "model.pixel_mean", "model.pixel_std")
_AUGMENTATIONS = "dataloader.train.mapper.augmentations"
_FILTER = "dataloader.train.dataset.filter_empty"
_MASKS = "dataloader.train.mapper.use_instance_mask"


def read_lazy(lazy: DictConfig) -> Parts:
    """The parts that a configuration describes.

    Args:
        lazy: is changed only by ``register`` and ``fit``.

    Raises:
        ConfigError: a value is of the wrong type or cannot be.
    """
    is_evaluated = "test" in lazy.dataloader and "evaluator" in lazy.dataloader
    test_names = _dataset_names(lazy, "test") if is_evaluated else ()
    ddp_options = dict(lazy.train.get("ddp", {}))
    ddp_options.pop("broadcast_buffers", None)
    return Parts(
        settings=read_settings(lazy),
        detector=_detector(lazy),
        pixels=_pixels(lazy),
        train_names=_dataset_names(lazy, "train"),
        test_names=test_names,
        test_sets=(", ".join(test_names) or "dataloader.test",) if is_evaluated else (),
        training_size=_training_size(lazy),
        channels_last=read_value(lazy, "train.channels_last", True),
        test_precision=read_value(lazy, KEYS["test_precision"], "float32"),
        test_loss=read_value(lazy, "train.test_loss", False),
        with_recipe=read_value(lazy, EQUIVALENTS["RECIPE.ENABLED"], False),
        kept=kept_keys(lazy),
        fixed_keys=FIXED_KEYS,
        sample_keys=SAMPLE_KEYS,
        advice="A lower optimizer.lr, a longer lr_multiplier.warmup_length, train.clip_gradients "
        "or clean annotations",
        ddp_options=ddp_options,
        make_model=lambda: _make(lazy.model, "model"),
        make_backbone=partial(_backbone, lazy),
        make_optimizer=partial(_optimizer, lazy),
        make_scheduler=partial(_scheduler, lazy),
        make_train_loader=partial(_train_loader, lazy),
        make_test_loader=lambda name: _make(lazy.dataloader.test, "dataloader.test"),
        make_loss_loader=lambda name: _loss_loader(lazy),
        make_evaluator=partial(_evaluator, lazy),
        make_test_augmentations=partial(_test_augmentations, lazy),
        make_augmented=partial(_augmented, lazy)
        if read_value(lazy, EQUIVALENTS["TEST.AUG.ENABLED"], False)
        else None,
        check_data=partial(_check_data, lazy),
        register=partial(_register, lazy),
        fit=partial(_fit, lazy),
        dump=partial(dump_lazy, lazy),
    )


# -------------------------------------------------------------------------------------------- facts
def _detector(lazy: DictConfig) -> Detector:
    classes = _class_keys(lazy)
    reader = str(select(lazy, "dataloader.train.dataset._target_"))
    return Detector(
        architecture=class_name(lazy.model.get("_target_", "")),
        num_classes=read_value(lazy, classes[0], 1) if classes else None,
        masks=read_value(lazy, _MASKS, False),
        filters_empty=read_value(lazy, _FILTER, "get_detection_dataset_dicts" in reader),
        semantic_classes=select(lazy, "model.sem_seg_head.num_classes"),
        ignored_label=select(lazy, "model.sem_seg_head.ignore_value"),
        keys={
            "architecture": "model",
            "num_classes": classes[0] if classes else "",
            "masks": _MASKS,
            "semantic_classes": "model.sem_seg_head.num_classes",
            "ignored_label": "model.sem_seg_head.ignore_value",
            "filters_empty": _FILTER,
            "train": "dataloader.train.dataset.names",
            "test": "dataloader.test.dataset.names",
        },
    )


def _class_keys(lazy: DictConfig) -> list[str]:
    """Where the model has the number of its classes."""
    places = (EQUIVALENTS.get(key, "") for key in class_keys())
    return [place for place in places if place and select(lazy, place) is not None]


def _pixels(lazy: DictConfig) -> PixelSettings | None:
    if "pixel_mean" not in lazy.model:
        return None
    order = read_value(lazy, _PIXEL_KEYS[0], "BGR")
    mean, std = (read_value(lazy, key, [1.0] * 3) for key in _PIXEL_KEYS[1:])
    return PixelSettings(order, mean, std, _PIXEL_KEYS)


def _dataset_names(lazy: DictConfig, split: str) -> tuple[str, ...]:
    """Empty where a loader of another project names its data in another way."""
    names = select(lazy, f"dataloader.{split}.dataset.names")
    return (names,) if isinstance(names, str) else tuple(names or ())


def _training_size(lazy: DictConfig) -> tuple[int, int] | None:
    """From the last augmentation after which all images fit into one size."""
    augmentations = select(lazy, _AUGMENTATIONS)
    for node in reversed(augmentations if isinstance(augmentations, ListConfig) else ()):
        if not isinstance(node, DictConfig):  # an object, or what another project takes
            continue
        if isinstance(node.get("crop_size"), ListConfig) and "crop_type" not in node:
            # FixedSizeCrop
            return padded(*node.crop_size)
        if "short_edge_length" in node and "max_size" in node:
            shortest, longest = node.short_edge_length, node.max_size
            if isinstance(shortest, ListConfig):
                shortest = max(shortest)
            grouped = select(lazy, "dataloader.train.aspect_ratio_grouping")
            return padded(longest if grouped is False else min(shortest, longest), longest)
    return None


# ------------------------------------------------------------------------------- what is made of it
def _make(node: DictConfig | ListConfig, name: str) -> Any:
    """What a node describes.

    Raises:
        ConfigError: it names something that is not there, or gives wrong arguments to it.
    """
    try:
        return instantiate(node)
    except (OmegaConfBaseException, ImportError, AssertionError) as error:
        raise ConfigError(f"{name} cannot be made: {reason(error)}.") from error
    except TypeError as error:
        if not re.search(r"unexpected keyword|multiple values|required .*argument", str(error)):
            raise
        raise ConfigError(f"{name} cannot be made: {error}.") from error


def _backbone(lazy: DictConfig) -> nn.Module:
    if "backbone" not in lazy.model:
        raise ConfigError("The configuration has no model.backbone; name that of a detector.")
    return _make(lazy.model.backbone, "model.backbone")


def _test_augmentations(lazy: DictConfig) -> AugmentationList:
    """Those of the mapper of dataloader.test; where it has none, those of Detectron2's keys."""
    nodes = select(lazy, "dataloader.test.mapper.augmentations")
    if nodes is None:
        defaults = load_config(argparse.Namespace(config_file=None, opts=[]))
        return read_yaml(defaults).make_test_augmentations()
    return AugmentationList(list(_make(nodes, "dataloader.test.mapper.augmentations")))


def _augmented(lazy: DictConfig, model: nn.Module) -> nn.Module:
    return GeneralizedRCNNWithTTA(yaml_view(lazy), model)


def _optimizer(lazy: DictConfig, settings: DetectionSettings, model: nn.Module) -> Optimizer:
    node = copy.deepcopy(lazy).optimizer
    if settings.base_lr is not None:
        node.lr = settings.base_lr
    node.params.model = model
    return _make(node, "optimizer")


def _scheduler(lazy: DictConfig, settings: DetectionSettings, optimizer: Optimizer) -> LRScheduler:
    node = copy.deepcopy(lazy).lr_multiplier
    if counts_steps(lazy):
        # fvcore refuses those beyond the end, as in a run that is made shorter
        steps = [step for step in settings.lr_steps if step < settings.max_iter]
        node.scheduler.milestones = steps
        node.scheduler.num_updates = settings.max_iter
        if "values" in node.scheduler:
            node.scheduler["values"] = node.scheduler["values"][: len(steps) + 1]
        node.warmup_length = min(settings.warmup_iters / settings.max_iter, 1.0)
    return LRMultiplier(optimizer, _make(node, "lr_multiplier"), settings.max_iter)


def _train_loader(lazy: DictConfig, settings: DetectionSettings) -> Iterable:
    node = copy.deepcopy(lazy).dataloader.train
    if "total_batch_size" in node:
        node.total_batch_size = settings.images_per_batch
    if "num_workers" in node:
        node.num_workers = settings.num_workers
    return _make(node, "dataloader.train")


def _loss_loader(lazy: DictConfig) -> Iterable:
    """``dataloader.test`` with the ground truth that the mapper of ``dataloader.train`` reads."""
    lazy = copy.deepcopy(lazy)
    for split in ("train", "test"):
        if select(lazy, f"dataloader.{split}.mapper.augmentations") is None:
            raise ConfigError(
                f"train.test_loss needs dataloader.{split}.mapper with augmentations; set it to "
                "False."
            )
    mapper = lazy.dataloader.train.mapper
    mapper.augmentations = list(_test_augmentations(lazy).augs)
    mapper.recompute_boxes = False
    if issubclass(_target(mapper), data.TolerantMapper):
        mapper.exact_pixels = True  # those of the evaluation
    node = lazy.dataloader.test
    node.mapper = _make(mapper, "dataloader.train.mapper")
    node.batch_size = 1
    return _make(node, "dataloader.test")


def _evaluator(
    lazy: DictConfig, name: str, folder: str
) -> DatasetEvaluator | list[DatasetEvaluator]:
    """What ``dataloader.evaluator`` says; its files go below the folder of the run."""
    node = copy.deepcopy(lazy).dataloader.evaluator
    for part in _evaluators(node):
        if _writes_files(part) and part.get("output_dir") is None:
            part.output_dir = str(Path(read_settings(lazy).output_dir, folder))
    made = _make(node, "dataloader.evaluator")
    return list(made) if isinstance(made, ListConfig) else made


def _evaluators(node: Any) -> Iterator[DictConfig]:
    """The nodes of dataloader.evaluator: itself, and those in a list or in DatasetEvaluators."""
    if isinstance(node, DictConfig) and "_target_" in node:
        yield node
    if isinstance(node, (DictConfig, ListConfig)):
        for child in node.values() if isinstance(node, DictConfig) else node:
            yield from _evaluators(child)


def _target(node: DictConfig) -> type:
    """The class that a node makes an object of; NoneType where it is none."""
    target = node.get("_target_")
    target = locate(target) if isinstance(target, str) else target
    return target if isinstance(target, type) else type(None)


def _writes_files(evaluator: DictConfig) -> bool:
    return any(
        "output_dir" in inspect.signature(kind.__init__).parameters
        for kind in _target(evaluator).__mro__
        if issubclass(kind, DatasetEvaluator)
    )


# --------------------------------------------------------------------------------------------- data
def _register(lazy: DictConfig) -> None:
    if not any(lazy.dataloader.get(key) for key in (*DATA_FLAGS, "val_share")):
        return
    cfg = yaml_view(lazy)
    before = cfg.clone()
    with in_lazy_keys():
        data.register_json_datasets(cfg)
    for split in ("train", "test"):
        names = cfg.DATASETS[split.upper()]
        if names and names != before.DATASETS[split.upper()]:
            OmegaConf.update(lazy, f"dataloader.{split}.dataset.names", names[0], merge=False)
    if cfg.DATASETS.TRAIN_JSON and not cfg.DATASETS.TEST:
        lazy.dataloader.pop("evaluator", None)
    if cfg.DATASETS.TRAIN_JSON or cfg.DATASETS.TEST_JSON:
        for key in _class_keys(lazy):
            OmegaConf.update(lazy, key, cfg.MODEL.ROI_HEADS.NUM_CLASSES)


def _fit(lazy: DictConfig, in_file: DetectionSettings) -> None:
    settings = read_settings(lazy)
    if not has_steps(lazy) or None in (settings.images_per_step, settings.base_lr):
        raise ConfigError(
            "train.recipe.enabled (--epochs) sets dataloader.train.total_batch_size, optimizer.lr "
            "and the steps of an lr_multiplier as that of configs/common/schedule.py, and one of "
            "these is not there; set train.recipe.enabled=False, and train.max_iter."
        )
    with in_lazy_keys():
        rules = fit_to_data(yaml_view(lazy), in_file=by_key(in_file), names=EQUIVALENTS)
    steps = {rule.key: rule.value for rule in rules}
    max_iter = steps.get("SOLVER.MAX_ITER", lazy.train.max_iter)
    for rule in rules:
        place = place_in(lazy, EQUIVALENTS.get(rule.key, ""))
        value = list(rule.value) if isinstance(rule.value, tuple) else rule.value
        if rule.key == "SOLVER.WARMUP_ITERS":
            lazy.lr_multiplier.warmup_length = min(value / max_iter, 1.0)
        elif not place:
            logger.warning(f"{rule.key} has no place in this LazyConfig: that rule is left out")
        elif place.startswith("train.") or select(lazy, place) is not None:
            is_flat = place.endswith("aspect_ratios") and not isinstance(
                select(lazy, place)[0], ListConfig
            )
            OmegaConf.update(lazy, place, value[0] if is_flat else value)
        else:
            logger.warning(f"{rule.key} has no place in this LazyConfig: that rule is left out")
    schedule = lazy.lr_multiplier.scheduler
    schedule.num_updates = lazy.train.max_iter
    if "values" in schedule:
        schedule["values"] = schedule["values"][: len(schedule.milestones) + 1]


def _check_data(lazy: DictConfig, train: bool) -> None:
    if train:
        refuse_unknown_train_keys(lazy)
    parts = read_lazy(lazy)
    here, there = (read_value(lazy, key, "") for key in _ORDERS)
    if here and there and here != there:
        raise ConfigError(
            f"{_ORDERS[0]} is {here} and {_ORDERS[1]} {there}: the model would be evaluated on "
            "images with other channels than it learns from; give both the same."
        )
    if parts.make_augmented:
        with in_lazy_keys():
            check_augmented_test(yaml_view(lazy))
    if parts.test_sets:
        _check_evaluators(lazy, parts.test_names)
    if here and parts.pixels is not None:
        data.check_pixels(parts.pixels)
    data.check_detector_data(
        parts.detector,
        train=(parts.train_names or None) if train else None,
        test=parts.test_names or None,
    )


def _check_evaluators(lazy: DictConfig, test_names: tuple[str, ...]) -> None:
    """Refuse another ground truth than that of the test data, and packages that are missing."""
    try:
        nodes = [
            (_target(node), node.get("dataset_name"))
            for node in _evaluators(lazy.dataloader.evaluator)
        ]
    except (OmegaConfBaseException, ImportError) as error:
        raise ConfigError(f"dataloader.evaluator cannot be made: {reason(error)}.") from error
    for kind, name in nodes:
        if isinstance(name, str) and test_names and name not in test_names:
            raise ConfigError(
                f"dataloader.evaluator has the dataset_name {name}, but the model is evaluated "
                f"on {', '.join(test_names)} (dataloader.test.dataset.names, or "
                "--test-json); give both the same, as by "
                "dataset_name='${..test.dataset.names}' in the file."
            )
        by_number = issubclass(kind, COCOEvaluator) and not issubclass(kind, TolerantCOCOEvaluator)
        if by_number and any(MetadataCatalog.get(n).get("file_classes") for n in test_names):
            raise ConfigError(
                f"dataloader.evaluator has Detectron2's {kind.__name__}, and the test data have "
                "their classes in another order than the run, which it would name wrongly; take "
                "lambda_det.detection.evaluation.TolerantCOCOEvaluator."
            )
        for package in needed_packages(kind):
            if importlib.util.find_spec(package) is None:
                raise ConfigError(
                    f"dataloader.evaluator has a {kind.__name__}, which needs the package "
                    f"{package}, and that is not installed; install it, or take another "
                    "evaluator."
                )
