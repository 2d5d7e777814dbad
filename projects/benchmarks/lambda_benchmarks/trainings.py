"""A training as its plan has to know it, whichever way its file is written."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

from detectron2.config import CfgNode
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.optim import Optimizer

from lambda_det.classification import task as classification
from lambda_det.classification.config import check_ranges, is_recipe, load_recipe
from lambda_det.classification.data import build_sources
from lambda_det.classification.model import build_classifier, make_classifier
from lambda_det.classification.schedule import build_optimizer, peak_learning_rate, plan_training
from lambda_det.detection.read_yaml import read_settings
from lambda_det.detection.recipe import fit_to_data
from lambda_det.detection.schedule import DetectionSettings
from lambda_det.detection.task import DetectionTask, load_any_config
from lambda_det.errors import ConfigError, DataError
from lambda_det.training.config_file import common_settings

__all__ = ["Training", "load_training"]

# Name, images and classes, where the data are not here; by DATA.FORMAT
_KNOWN = {"cifar10": ("CIFAR-10", 50_000, 10)}
_IMAGENET = ("ImageNet", 1_281_167, 1000)


@dataclass(frozen=True)
class Training:
    """What a plan wants to know of a training, whichever way its file is written.

    Attributes:
        kind: "detector" or "classifier".
        settings: as written.
        size: height and width of the largest image.
        checkpointing: the key of activation checkpointing.
        is_checkpointed: whether it is on.
        moments: numbers that the optimiser keeps for each parameter.
        make: gives the model where PyTorch makes its tensors, for a device and with or without
            checkpointing.
        build: gives model and optimiser on the device of the settings.
        keypoints: of an object.
        notes: what the user has to know of the figures, in sentences.
    """

    kind: str
    settings: DetectionSettings
    size: tuple[int, int]
    checkpointing: str
    is_checkpointed: bool
    moments: int
    make: Callable[[str, bool], nn.Module]
    build: Callable[[], tuple[nn.Module, Optimizer]]
    keypoints: int = 17
    notes: tuple[str, ...] = ()


def load_training(args: argparse.Namespace) -> Training:
    """The training of --config-file: YAML or a LazyConfig of a detector, or a recipe.

    Raises:
        ConfigError, DataError: the file, a key or a value cannot be, or the data that it names.
    """
    if is_recipe(args.config_file):
        if getattr(args, "train_json", None) or getattr(args, "train_images", None):
            raise ConfigError(
                f"--train-json and --train-images are for detectors, and {args.config_file} is a "
                "recipe of a classifier: DATA.TRAIN DIR names its images."
            )
        words = argparse.Namespace(**vars(args), synthetic_data=False, debug_numerics=False)
        return _of_recipe(load_recipe(words))
    config = load_any_config(args)
    return _of_lazy(config) if isinstance(config, DictConfig) else _of_yaml(config)


def _of_yaml(cfg: CfgNode) -> Training:
    cfg = cfg.clone()
    cfg.defrost()
    task = DetectionTask(cfg)
    notes = []
    if cfg.DATASETS.TRAIN_JSON:
        task.register_data()
    if cfg.RECIPE.ENABLED and cfg.DATASETS.TRAIN_JSON:
        fit_to_data(cfg)
        notes.append("Batch and schedule follow from the data (RECIPE), as for one process here.")
    elif cfg.RECIPE.ENABLED:
        notes.append(
            "In the training batch, learning rate and steps follow from the data (RECIPE.ENABLED): "
            "these are the file's.\n--train-json FILE --train-images DIR gives those of your data."
        )
    own = cfg.MODEL.LAMBDA_RESNET

    def make(device: str, checkpointing: bool) -> nn.Module:
        changed = cfg.clone()
        changed.MODEL.DEVICE = device
        changed.MODEL.LAMBDA_RESNET.CHECKPOINT_ACTIVATIONS = checkpointing
        return DetectionTask(changed).parts.make_model()

    return Training(
        kind="detector",
        settings=read_settings(cfg),
        size=task.parts.training_size,
        checkpointing="MODEL.LAMBDA_RESNET.CHECKPOINT_ACTIVATIONS",
        is_checkpointed=own.CHECKPOINT_ACTIVATIONS,
        moments=1 if cfg.SOLVER.MOMENTUM else 0,
        make=make,
        build=lambda: _built(DetectionTask(cfg)),
        keypoints=cfg.MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS,
        notes=tuple(notes),
    )


def _of_lazy(lazy: DictConfig) -> Training:
    task = DetectionTask(lazy)
    if task.parts.training_size is None:
        raise ConfigError(
            "The size of training images does not follow from "
            "dataloader.train.mapper.augmentations: let the last of them be a FixedSizeCrop, or a "
            "ResizeShortestEdge with a max_size."
        )
    key = "model.backbone.bottom_up.checkpoint_activations"
    optimizer = lazy.optimizer

    def make(device: str, checkpointing: bool) -> nn.Module:
        changed = copy.deepcopy(lazy)
        OmegaConf.update(changed, "train.device", device)
        if checkpointing:
            OmegaConf.update(changed, key, checkpointing)
        return DetectionTask(changed).parts.make_model()

    return Training(
        kind="detector",
        settings=task.settings,
        size=task.parts.training_size,
        checkpointing=key,
        is_checkpointed=bool(OmegaConf.select(lazy, key)),
        moments=1 if optimizer.get("momentum") else 2 if "Adam" in str(optimizer._target_) else 0,
        make=make,
        build=lambda: _built(task),
    )


def _built(task: DetectionTask) -> tuple[nn.Module, Optimizer]:
    model = task.build_model()
    return model, task.build_optimizer(model)


def _of_recipe(cfg: CfgNode) -> Training:
    check_ranges(cfg)
    notes = []
    try:
        train = build_sources(cfg).train
        images, classes = len(train), len(train.classes)
    except DataError:
        name, images, classes = _KNOWN.get(cfg.DATA.FORMAT, _IMAGENET)
        notes.append(
            f"Guessed, since DATA.TRAIN {cfg.DATA.TRAIN} is not here: {images:,} images of "
            f"{classes:,} classes, as {name} has."
        )
    if cfg.MODEL.COMPILE:
        notes.append("Not counted: what torch.compile saves (MODEL.COMPILE).")
    settings = DetectionSettings(
        **common_settings(cfg),
        max_iter=plan_training(cfg, images, 1).steps,
        base_lr=peak_learning_rate(cfg),
        checkpoints_kept=cfg.SOLVER.CHECKPOINTS_KEPT,
        log_period=cfg.LOG_PERIOD,
        keys=classification.KEYS,
    )

    def make(device: str, checkpointing: bool) -> nn.Module:
        changed = cfg.clone()
        changed.MODEL.DEVICE, changed.MODEL.CHECKPOINT_ACTIVATIONS = device, checkpointing
        # Tensors without data cannot be laid out anew
        with mock.patch.object(nn.Module, "to", lambda module, *to, **layout: module):
            return make_classifier(changed, classes)

    def build() -> tuple[nn.Module, Optimizer]:
        model = build_classifier(cfg, classes)
        return model, build_optimizer(cfg, model)

    momentum = 1 if cfg.SOLVER.MOMENTUM else 0
    return Training(
        kind="classifier",
        settings=settings,
        size=(cfg.INPUT.SIZE, cfg.INPUT.SIZE),
        checkpointing="MODEL.CHECKPOINT_ACTIVATIONS",
        is_checkpointed=cfg.MODEL.CHECKPOINT_ACTIVATIONS,
        moments={"adam": 2, "rmsprop": 1 + momentum}.get(cfg.SOLVER.OPTIMIZER, momentum),
        make=make,
        build=build,
        notes=tuple(notes),
    )
