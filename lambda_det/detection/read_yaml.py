"""The parts of a training that a YAML configuration describes."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog
from detectron2.data.transforms import AugmentationList
from detectron2.evaluation import verify_results
from detectron2.modeling import GeneralizedRCNNWithTTA, build_backbone
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lambda_det.detection import data
from lambda_det.detection.data.jitter import ResizeShortestEdgeAtLeastOnePixel
from lambda_det.detection.data.loader import TrainLoader
from lambda_det.detection.data.predictions import Detector
from lambda_det.detection.evaluation import build_evaluator, check_evaluators
from lambda_det.detection.model import make_model
from lambda_det.detection.parts import Parts, padded
from lambda_det.detection.recipe import fit_to_data
from lambda_det.detection.schedule import DetectionSettings, build_lr_scheduler, build_optimizer
from lambda_det.errors import ConfigError
from lambda_det.training import config_file
from lambda_det.training.settings import FixedKeys
from lambda_det.weights.provenance import PixelSettings

__all__ = ["KEYS", "by_key", "read_settings", "read_yaml"]

logger = logging.getLogger(__name__)

# fmt: off
KEYS = config_file.KEYS | {
    "max_iter":             "SOLVER.MAX_ITER",
    "float32_precision":    "FLOAT32_PRECISION",
    "reference_world_size": "SOLVER.REFERENCE_WORLD_SIZE",
    "base_lr":              "SOLVER.BASE_LR",
    "warmup_iters":         "SOLVER.WARMUP_ITERS",
    "lr_steps":             "SOLVER.STEPS",
    "eval_period":          "TEST.EVAL_PERIOD",
    "best_metric":          "TEST.BEST_METRIC",
    "test_precision":       "TEST.PRECISION",
}
# fmt: on
LOG_PERIOD = 20  # steps; YAML has no key for it

FIXED_KEYS = FixedKeys(
    names=(
        "MODEL",
        "INPUT.FORMAT",
        "SEED",
        "SOLVER.BASE_LR",
        "SOLVER.BIAS_LR_FACTOR",
        "SOLVER.IMS_PER_BATCH",
        "SOLVER.MOMENTUM",
        "SOLVER.NESTEROV",
        "SOLVER.REFERENCE_WORLD_SIZE",
        "SOLVER.WEIGHT_DECAY",
        "SOLVER.WEIGHT_DECAY_BIAS",
        "SOLVER.WEIGHT_DECAY_NORM",
    ),
    but_not=(
        "MODEL.CHANNELS_LAST",
        "MODEL.DEVICE",
        "MODEL.WEIGHTS",
        "MODEL.LAMBDA_RESNET.CHECKPOINT_ACTIVATIONS",
        "MODEL.LAMBDA_RESNET.IMPLEMENTATION",
    ),
)
SAMPLE_KEYS = FixedKeys(
    names=("INPUT", "DATASETS", "DATALOADER"),
    but_not=(
        "INPUT.MIN_SIZE_TEST",
        "INPUT.MAX_SIZE_TEST",
        "DATASETS.TEST",
        "DATASETS.TEST_IMAGES",
        "DATASETS.TEST_JSON",
        "DATALOADER.MAX_UNREADABLE_IMAGES",
        "DATALOADER.NUM_WORKERS",
        "DATALOADER.TIMEOUT",
    ),
)


def read_yaml(cfg: CfgNode) -> Parts:
    """The parts that a configuration describes.

    Args:
        cfg: is changed only by ``register`` and ``fit``.

    Raises:
        ConfigError: a value cannot be.
    """
    if cfg.TEST.IMS_PER_BATCH < 1:
        raise ConfigError(f"TEST.IMS_PER_BATCH is {cfg.TEST.IMS_PER_BATCH}; give 1 or more.")
    return Parts(
        settings=read_settings(cfg),
        detector=Detector.from_config(cfg),
        pixels=PixelSettings.from_config(cfg),
        train_names=tuple(cfg.DATASETS.TRAIN),
        test_names=tuple(cfg.DATASETS.TEST),
        test_sets=tuple(cfg.DATASETS.TEST),
        training_size=_training_size(cfg),
        channels_last=cfg.MODEL.CHANNELS_LAST,
        test_precision=cfg.TEST.PRECISION,
        test_loss=cfg.TEST.LOSS,
        with_recipe=cfg.RECIPE.ENABLED,
        kept=tuple(cfg.RECIPE.KEEP),
        fixed_keys=FIXED_KEYS,
        sample_keys=SAMPLE_KEYS,
        advice="A lower SOLVER.BASE_LR, a longer SOLVER.WARMUP_ITERS, SOLVER.CLIP_GRADIENTS or "
        "clean annotations",
        make_model=partial(make_model, cfg),
        make_backbone=partial(build_backbone, cfg),
        make_optimizer=partial(_optimizer, cfg),
        make_scheduler=partial(_scheduler, cfg),
        make_train_loader=partial(_train_loader, cfg),
        make_test_loader=partial(data.build_test_loader, cfg),
        make_loss_loader=partial(data.build_loss_loader, cfg),
        make_evaluator=partial(build_evaluator, cfg),
        make_test_augmentations=partial(_test_augmentations, cfg),
        make_augmented=partial(GeneralizedRCNNWithTTA, cfg) if cfg.TEST.AUG.ENABLED else None,
        check_data=partial(_check_data, cfg),
        register=partial(_register, cfg),
        fit=lambda in_file: fit_to_data(cfg, in_file=by_key(in_file)),
        verify=partial(verify_results, cfg),
        dump=cfg.dump,
    )


def read_settings(cfg: CfgNode) -> DetectionSettings:
    """The settings of a YAML configuration, as written.

    Raises:
        ConfigError: a value cannot be.
    """
    solver = cfg.SOLVER
    return DetectionSettings(
        **config_file.common_settings(cfg),
        float32_precision=cfg.FLOAT32_PRECISION,
        max_iter=solver.MAX_ITER,
        reference_world_size=solver.REFERENCE_WORLD_SIZE,
        base_lr=solver.BASE_LR,
        warmup_iters=solver.WARMUP_ITERS,
        lr_steps=tuple(solver.STEPS),
        log_period=LOG_PERIOD,
        eval_period=cfg.TEST.EVAL_PERIOD,
        best_metric=cfg.TEST.BEST_METRIC,
        precise_bn_batches=cfg.TEST.PRECISE_BN.NUM_ITER if cfg.TEST.PRECISE_BN.ENABLED else 0,
        keys=KEYS,
    )


def by_key(settings: DetectionSettings) -> dict[str, Any]:
    """Settings by their keys in YAML."""
    return {key: getattr(settings, name, None) for name, key in KEYS.items()}


def _for_run(cfg: CfgNode, settings: DetectionSettings) -> CfgNode:
    """The configuration as Detectron2's builders have to read it."""
    cfg = cfg.clone()
    cfg.defrost()
    cfg.SOLVER.IMS_PER_BATCH = settings.images_per_step
    cfg.SOLVER.BASE_LR = settings.base_lr
    cfg.SOLVER.MAX_ITER = settings.max_iter
    cfg.SOLVER.STEPS = settings.lr_steps
    cfg.SOLVER.WARMUP_ITERS = settings.warmup_iters
    cfg.SOLVER.CLIP_GRADIENTS.ENABLED = False  # the training step clips
    cfg.DATALOADER.NUM_WORKERS = settings.num_workers
    return cfg


def _register(cfg: CfgNode) -> None:
    """Register the user's files; a recipe learns masks only where there are some."""
    data.register_json_datasets(cfg)
    follows = cfg.RECIPE.ENABLED and "MODEL.MASK_ON" not in cfg.RECIPE.KEEP
    if cfg.MODEL.MASK_ON and cfg.DATASETS.TRAIN_JSON and follows:
        records = (record for name in cfg.DATASETS.TRAIN for record in DatasetCatalog.get(name))
        objects = (annotation for record in records for annotation in record["annotations"])
        if not any(annotation.get("segmentation") for annotation in objects):
            cfg.MODEL.MASK_ON = False
            logger.info("MODEL.MASK_ON is now False: no annotation of --train-json has a mask.")


def _optimizer(cfg: CfgNode, settings: DetectionSettings, model: nn.Module) -> Optimizer:
    return build_optimizer(_for_run(cfg, settings), model)


def _scheduler(cfg: CfgNode, settings: DetectionSettings, optimizer: Optimizer) -> LRScheduler:
    return build_lr_scheduler(_for_run(cfg, settings), optimizer)


def _train_loader(cfg: CfgNode, settings: DetectionSettings) -> TrainLoader:
    return data.build_train_loader(_for_run(cfg, settings), settings.images_per_batch)


def _test_augmentations(cfg: CfgNode) -> AugmentationList:
    sizes = cfg.INPUT
    return AugmentationList(
        [ResizeShortestEdgeAtLeastOnePixel([sizes.MIN_SIZE_TEST] * 2, sizes.MAX_SIZE_TEST)]
    )


def _training_size(cfg: CfgNode) -> tuple[int, int]:
    inputs = cfg.INPUT
    if inputs.LSJ.ENABLED:
        return padded(inputs.LSJ.SIZE, inputs.LSJ.SIZE)
    height = width = inputs.MAX_SIZE_TRAIN
    if cfg.DATALOADER.ASPECT_RATIO_GROUPING:  # else upright images share a batch
        height = min(max(inputs.MIN_SIZE_TRAIN), width)
    return padded(height, width)


def _check_data(cfg: CfgNode, train: bool) -> None:
    test = not train or len(cfg.DATASETS.TEST) > 0
    data.check_datasets(cfg, train=train, test=test)
    check_evaluators(cfg)
