"""Detection as a task of the trainer, described by a YAML configuration."""

from __future__ import annotations

import argparse
import logging
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

from detectron2.config import CfgNode
from detectron2.data.transforms import AugmentationList
from detectron2.engine import HookBase
from detectron2.evaluation import (
    DatasetEvaluator,
    inference_on_dataset,
    print_csv_format,
    verify_results,
)
from detectron2.modeling import META_ARCH_REGISTRY, GeneralizedRCNNWithTTA, build_backbone
from detectron2.utils import comm
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lambda_det.detection import data
from lambda_det.detection.config import load_config
from lambda_det.detection.data.jitter import ResizeShortestEdgeAtLeastOnePixel
from lambda_det.detection.data.predictions import Detector
from lambda_det.detection.evaluation import build_evaluator, check_evaluators, images_of_any_size
from lambda_det.detection.model import (
    LossNormalizers,
    build_model,
    channels_last_pays,
    check_precision,
    for_inference,
)
from lambda_det.detection.recipe import fit_to_data
from lambda_det.detection.schedule import (
    DetectionSettings,
    build_lr_scheduler,
    build_optimizer,
    scale_settings,
)
from lambda_det.detection.validation_loss import validation_loss
from lambda_det.errors import ConfigError
from lambda_det.training import config_file
from lambda_det.training.precision import Precision
from lambda_det.training.settings import FixedKeys
from lambda_det.training.step import file_names
from lambda_det.training.task import EMA, RAW, Results, Task
from lambda_det.weights.provenance import PixelSettings

__all__ = ["DetectionTask", "read_settings"]

logger = logging.getLogger(__name__)

KEYS = config_file.KEYS | {
    "max_iter": "SOLVER.MAX_ITER",
    "float32_precision": "FLOAT32_PRECISION",
    "reference_world_size": "SOLVER.REFERENCE_WORLD_SIZE",
    "base_lr": "SOLVER.BASE_LR",
    "warmup_iters": "SOLVER.WARMUP_ITERS",
    "lr_steps": "SOLVER.STEPS",
    "eval_period": "TEST.EVAL_PERIOD",
    "best_metric": "TEST.BEST_METRIC",
}
LOG_PERIOD = 20  # steps; YAML has no key for it


def read_settings(cfg: CfgNode) -> DetectionSettings:
    """The settings of a YAML configuration, as written.

    Raises:
        ConfigError: a value cannot be.
    """
    check_precision(cfg.TEST.PRECISION)
    if cfg.TEST.IMS_PER_BATCH < 1:
        raise ConfigError(f"TEST.IMS_PER_BATCH is {cfg.TEST.IMS_PER_BATCH}; give 1 or more.")
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


def padded(height: int, width: int) -> tuple[int, int]:
    """The sides of an image, padded to a stride of 32."""
    return -(-height // 32) * 32, -(-width // 32) * 32


class DetectionTask(Task):
    """A detector that a YAML configuration describes, of Detectron2's and our parts.

    Attributes:
        cfg: the configuration, as written.
        settings: of it; fitted to the processes in a training.
    """

    fixed_keys = FixedKeys(
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
    sample_keys = FixedKeys(
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
    metrics = tuple(
        f"{task}{weights}/{metric}"
        for weights in ("_EMA", "")
        for task, metric in (
            ("segm", "AP"),
            ("bbox", "AP"),
            ("keypoints", "AP"),
            ("sem_seg", "mIoU"),
            ("sem_seg", "IoU"),
            ("panoptic_seg", "PQ"),
        )
    )
    advice = (
        "A lower SOLVER.BASE_LR, a longer SOLVER.WARMUP_ITERS, SOLVER.CLIP_GRADIENTS or clean "
        "annotations"
    )

    def __init__(self, cfg: CfgNode) -> None:
        """
        Args:
            cfg: is not changed, but by :meth:`register_data` and a recipe.

        Raises:
            ConfigError: a value cannot be.
        """
        self.cfg = cfg
        self.settings = read_settings(cfg)
        self._is_trained = True

    # ------------------------------------------------------------------------------- configuration
    @classmethod
    def read(cls, args: argparse.Namespace) -> CfgNode:
        return load_config(args)

    @classmethod
    def device(cls, config: CfgNode) -> tuple[str, str]:
        return config.MODEL.DEVICE, KEYS["device"]

    @classmethod
    def for_run(cls, config: CfgNode, *, train: bool) -> DetectionTask:
        task = cls(config)
        task._is_trained = train
        task.register_data()
        if train and config.RECIPE.ENABLED:
            fit_to_data(config)
            task.settings = read_settings(config)
        if train:
            task.settings = scale_settings(
                task.settings,
                comm.get_world_size(),
                config.RECIPE.KEEP,
                dict(config.RECIPE.WRITTEN),
            )
        return task

    def register_data(self) -> None:
        """Register the data sets that are named by their files, and complete the configuration.

        Raises:
            ConfigError, DataError: as :func:`lambda_det.detection.data.register_coco_files`.
        """
        data.register_json_datasets(self.cfg)

    def dump(self) -> str:
        return self.cfg.dump()

    def _scaled_config(self) -> CfgNode:
        """The configuration as Detectron2's builders have to read it."""
        cfg, settings = self.cfg.clone(), self.settings
        cfg.defrost()
        cfg.SOLVER.IMS_PER_BATCH = settings.images_per_step
        cfg.SOLVER.BASE_LR = settings.base_lr
        cfg.SOLVER.MAX_ITER = settings.max_iter
        cfg.SOLVER.STEPS = settings.lr_steps
        cfg.SOLVER.WARMUP_ITERS = settings.warmup_iters
        cfg.SOLVER.CLIP_GRADIENTS.ENABLED = False  # the training step clips
        return cfg

    # --------------------------------------------------------------------------------------- parts
    def build_model(self) -> nn.Module:
        return build_model(self.cfg, channels_last=self.trains_channels_last())

    def make_model(self) -> nn.Module:
        """The model as Detectron2 builds it, where PyTorch makes its tensors."""
        return META_ARCH_REGISTRY.get(self.cfg.MODEL.META_ARCHITECTURE)(self.cfg)

    def build_backbone(self) -> nn.Module:
        """Of the model alone, with an FPN if it has one."""
        return build_backbone(self.cfg)

    @property
    def detector(self) -> Detector:
        """What the model predicts, as far as its data depend on it."""
        return Detector.from_config(self.cfg)

    def build_test_augmentations(self) -> AugmentationList:
        """What an evaluation does to an image: it is resized."""
        sizes = self.cfg.INPUT
        return AugmentationList(
            [ResizeShortestEdgeAtLeastOnePixel([sizes.MIN_SIZE_TEST] * 2, sizes.MAX_SIZE_TEST)]
        )

    @property
    def channels_last(self) -> bool:
        """Whether all maps are so in inference, and in training where it is faster."""
        return self.cfg.MODEL.CHANNELS_LAST

    @property
    def test_precision(self) -> str:
        """In which evaluation and prediction compute: "float32" or "bfloat16"."""
        return self.cfg.TEST.PRECISION

    def trains_channels_last(self) -> bool:
        """To be asked for by all processes, as they agree on it."""
        fast = channels_last_pays(self.settings.device, self.training_size)
        return fast and self.channels_last

    @property
    def training_size(self) -> tuple[int, int] | None:
        """Height and width of the largest image of a training batch, padded to a stride of 32.

        None where nobody knows.
        """
        inputs = self.cfg.INPUT
        if inputs.LSJ.ENABLED:
            return padded(inputs.LSJ.SIZE, inputs.LSJ.SIZE)
        height = width = inputs.MAX_SIZE_TRAIN
        if self.cfg.DATALOADER.ASPECT_RATIO_GROUPING:  # else upright images share a batch
            height = min(max(inputs.MIN_SIZE_TRAIN), width)
        return padded(height, width)

    @property
    def pixels(self) -> PixelSettings | None:
        return PixelSettings.from_config(self.cfg)

    @property
    def train_names(self) -> tuple[str, ...]:
        """The data sets to train on."""
        return tuple(self.cfg.DATASETS.TRAIN)

    @property
    def test_names(self) -> tuple[str, ...]:
        """The data sets to evaluate on."""
        return tuple(self.cfg.DATASETS.TEST)

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return build_optimizer(self._scaled_config(), model)

    def build_scheduler(self, optimizer: Optimizer) -> LRScheduler:
        return build_lr_scheduler(self._scaled_config(), optimizer)

    def build_train_loader(self, *, for_statistics: bool = False) -> Iterable:
        cfg = self._scaled_config()
        # Workers for the statistics would idle between two evaluations
        cfg.DATALOADER.NUM_WORKERS = 0 if for_statistics else self.settings.num_workers
        return data.build_train_loader(cfg, self.settings.images_per_batch)

    def build_hooks(self) -> list[HookBase]:
        return [LossNormalizers()]

    def build_test_loader(self, dataset_name: str) -> Iterable:
        return data.build_test_loader(self.cfg, dataset_name)

    def build_evaluator(self, dataset_name: str, folder: str = "inference") -> DatasetEvaluator:
        return build_evaluator(self.cfg, dataset_name, folder)

    # ----------------------------------------------------------------------- checks and evaluation
    def check_data(self, *, train: bool, resumed: bool = False) -> None:
        test = not train or len(self.cfg.DATASETS.TEST) > 0
        data.check_datasets(self.cfg, train=train, test=test)
        check_evaluators(self.cfg)

    def set_back(self, key: str, changes: Iterable[tuple[str, Any, Any]]) -> str:
        before = {key: value for key, value, _ in changes}
        follows = key in ("SOLVER.BASE_LR", "SOLVER.IMS_PER_BATCH") and self.cfg.RECIPE.ENABLED
        if follows and "SOLVER.IMS_PER_BATCH" in before:
            # The learning rate follows the batch, and the batch the memory of the GPUs
            return f"Add --batch {before['SOLVER.IMS_PER_BATCH']}, the batch of that run"
        return super().set_back(key, changes)

    @images_of_any_size()
    def evaluate(self, models: Mapping[str, nn.Module], *, final: bool) -> Results:
        results: Results = {}
        for weights, model in models.items():
            ending = "_EMA" if weights == EMA else ""
            model = for_inference(model, self.test_precision, channels_last=self.channels_last)
            self._evaluate_on_all(model, f"inference{ending}", ending, results)
        if self.cfg.TEST.LOSS and self._is_trained and RAW in models:
            self._add_losses(models[RAW], results)
        if final and self.cfg.TEST.AUG.ENABLED:
            # As Detectron2's train_net.py does: once, when training is over
            model = for_inference(list(models.values())[-1], channels_last=self.channels_last)
            model = GeneralizedRCNNWithTTA(self.cfg, model)
            self._evaluate_on_all(model, "inference_TTA", "_TTA", results)
        # As Detectron2 has it: the name of a data set only where there are several
        return next(iter(results.values())) if len(results) == 1 else results

    def _evaluate_on_all(
        self, model: nn.Module, folder: str, ending: str, results: Results
    ) -> None:
        """Evaluate on all test sets, and add the results under names with an ending."""
        for name in self.cfg.DATASETS.TEST:
            evaluator = self.build_evaluator(name, folder)
            found = inference_on_dataset(model, self.build_test_loader(name), evaluator) or {}
            found = OrderedDict((f"{key}{ending}", value) for key, value in found.items())
            if comm.is_main_process():
                logger.info(f"Results on {name}{ending}:")
                print_csv_format(found)
            results.setdefault(name, {}).update(found)

    def _add_losses(self, model: nn.Module, results: Results) -> None:
        """Add the losses on all test sets, which only the raw weights are compared with."""
        for name in self.cfg.DATASETS.TEST:
            found = validation_loss(self.cfg, model, name, Precision.of(self.settings))
            results.setdefault(name, {})["validation"] = found
            if comm.is_main_process():
                losses = ", ".join(f"{key} {value:.4g}" for key, value in found.items())
                logger.info(f"Losses on {name}: {losses}")

    def finish(self, results: Results) -> None:
        if len(self.cfg.TEST.EXPECTED_RESULTS):
            verify_results(self.cfg, results)

    def image_names(self, batch: Any) -> list[str]:
        return file_names(batch)
