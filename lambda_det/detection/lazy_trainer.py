"""The detection trainer for LazyConfigs: only how the parts are made differs."""

from __future__ import annotations

import argparse
import copy
import inspect
import logging
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode, instantiate
from detectron2.evaluation import DatasetEvaluator, inference_on_dataset, print_csv_format
from detectron2.solver import LRMultiplier
from detectron2.utils import comm
from detectron2.utils.registry import locate
from omegaconf import DictConfig, ListConfig
from omegaconf.errors import OmegaConfBaseException
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lambda_det.detection import data
from lambda_det.detection.lazy_config import LazyRun
from lambda_det.detection.lazy_file import load_lazy_config, unused_train_keys
from lambda_det.detection.lazy_words import lazy_words, own_words
from lambda_det.detection.scaling import images_per_batch
from lambda_det.detection.setup import run
from lambda_det.detection.trainer import DetectionTrainer
from lambda_det.errors import ConfigError, reason
from lambda_det.training.clipping import add_clipping
from lambda_det.training.loop import distribute
from lambda_det.training.run_folder import FixedKeys
from lambda_det.weights.provenance import PixelSettings

__all__ = ["LazyTrainer", "run_lazy", "trainer_of"]

logger = logging.getLogger(__name__)


def run_lazy(args: argparse.Namespace) -> None:
    """Train or evaluate what a LazyConfig describes, in as many processes as asked for.

    Args:
        args: of :func:`lambda_det.detection.lazy_parser`.

    Raises:
        UserError: one sentence to print, with the keys of a LazyConfig.
    """
    with lazy_words():
        run(args, LazyTrainer)


def trainer_of(cfg: CfgNode) -> type[DetectionTrainer]:
    """Which makes the parts that a configuration of either kind describes."""
    return LazyTrainer if isinstance(cfg, LazyRun) else DetectionTrainer


class LazyTrainer(DetectionTrainer):
    """Trains what a LazyConfig says, in the loop and with the promises of DetectionTrainer.

    Attributes:
        cfg: a :class:`LazyRun`, scaled to the number of workers.
    """

    fixed_keys = FixedKeys(
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

    def __init__(self, cfg: LazyRun) -> None:
        train = cfg.lazy.train
        self.checkpoints_kept = train.get("checkpointer", {}).get("max_to_keep", 5)
        self.log_period = train.get("log_period", 20)
        if unused := unused_train_keys(cfg.lazy):
            logger.warning(f"Not known here, and without effect: {', '.join(unused)}")
        super().__init__(cfg)

    @classmethod
    def load_config(cls, args: argparse.Namespace) -> LazyRun:
        with own_words():
            return load_lazy_config(args)

    @classmethod
    def register_data(cls, cfg: LazyRun) -> None:
        if cfg.DATASETS.TRAIN_JSON or cfg.DATASETS.TEST_JSON:
            data.register_json_datasets(cfg)
            cfg.name_datasets()

    @classmethod
    def check_data(cls, cfg: LazyRun, *, train: bool, test: bool) -> None:
        # A loader of another project may name its data in another way
        train = train and len(cfg.DATASETS.TRAIN) > 0
        data.check_datasets(cfg, train=train, test=test and len(cfg.DATASETS.TEST) > 0)

    @classmethod
    def build_for_trial(cls, cfg: LazyRun) -> nn.Module:
        """The model without values; the optimiser and the schedule are tried, too."""
        try:
            with torch.device("meta"):
                model = cls.make_model(cfg)
        except RuntimeError:  # NotImplementedError is one, too
            model = cls.make_model(cfg)  # a model that looks at values while it is built
        cls.build_lr_scheduler(cfg, cls.build_optimizer(cfg, model))
        return model

    @classmethod
    def pixel_settings(cls, cfg: LazyRun) -> PixelSettings | None:
        return PixelSettings.from_config(cfg) if "pixel_mean" in cfg.lazy.model else None

    @classmethod
    def make_model(cls, cfg: LazyRun) -> nn.Module:
        return _made(cfg.lazy.model, "model")

    @classmethod
    def build_backbone(cls, cfg: LazyRun) -> nn.Module:
        if "backbone" not in cfg.lazy.model:
            raise ConfigError("The configuration has no model.backbone; name that of a detector.")
        return _made(cfg.lazy.model.backbone, "model.backbone")

    @classmethod
    def distribute(cls, cfg: LazyRun, model: nn.Module) -> nn.Module:
        options = dict(cfg.lazy.train.get("ddp", {}))
        options.pop("broadcast_buffers", None)
        return distribute(model, cfg.MODEL.DEVICE, **options)

    @classmethod
    def build_optimizer(cls, cfg: LazyRun, model: nn.Module) -> Optimizer:
        lazy = copy.deepcopy(cfg.lazy)
        if "lr" in lazy.optimizer:
            lazy.optimizer.lr = cfg.SOLVER.BASE_LR
        lazy.optimizer.params.model = model
        return add_clipping(cfg, _made(lazy.optimizer, "optimizer"))

    @classmethod
    def build_lr_scheduler(cls, cfg: LazyRun, optimizer: Optimizer) -> LRScheduler:
        node = copy.deepcopy(cfg.lazy).lr_multiplier
        if cfg.counts_steps():
            node.scheduler.milestones = list(cfg.SOLVER.STEPS)
            node.scheduler.num_updates = cfg.SOLVER.MAX_ITER
            node.warmup_length = min(cfg.SOLVER.WARMUP_ITERS / cfg.SOLVER.MAX_ITER, 1.0)
        return LRMultiplier(optimizer, _made(node, "lr_multiplier"), cfg.SOLVER.MAX_ITER)

    @classmethod
    def build_train_loader(cls, cfg: LazyRun) -> Iterable:
        node = copy.deepcopy(cfg.lazy).dataloader.train
        if "total_batch_size" in node:
            node.total_batch_size = images_per_batch(cfg)
        if "num_workers" in node:
            node.num_workers = cfg.DATALOADER.NUM_WORKERS
        return _made(node, "dataloader.train")

    @classmethod
    def build_test_loader(cls, cfg: LazyRun, dataset_name: str = "") -> Iterable:
        return _made(cfg.lazy.dataloader.test, "dataloader.test")

    @classmethod
    def build_evaluator(
        cls, cfg: LazyRun, dataset_name: str = ""
    ) -> DatasetEvaluator | list[DatasetEvaluator]:
        """What ``dataloader.evaluator`` says; its files go below the folder of the run."""
        node = copy.deepcopy(cfg.lazy).dataloader.evaluator
        for part in node if isinstance(node, ListConfig) else [node]:
            if _writes_files(part) and part.get("output_dir") is None:
                part.output_dir = str(Path(cfg.OUTPUT_DIR, "inference"))
        made = _made(node, "dataloader.evaluator")
        return list(made) if isinstance(made, ListConfig) else made

    @classmethod
    def test(cls, cfg: LazyRun, model: nn.Module, evaluators: Any = None) -> dict:
        """Evaluate ``model``; nothing where the configuration has no evaluator."""
        if "test" not in cfg.lazy.dataloader or "evaluator" not in cfg.lazy.dataloader:
            return {}
        evaluator = evaluators or cls.build_evaluator(cfg)
        results = inference_on_dataset(model, cls.build_test_loader(cfg), evaluator)
        if comm.is_main_process():
            print_csv_format(results)
        return results


def _writes_files(evaluator: DictConfig) -> bool:
    target = evaluator.get("_target_")
    target = locate(target) if isinstance(target, str) else target
    return isinstance(target, type) and any(
        "output_dir" in inspect.signature(kind.__init__).parameters
        for kind in target.__mro__
        if issubclass(kind, DatasetEvaluator)
    )


def _made(node: DictConfig | ListConfig, name: str) -> Any:
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
