"""Classification as a task of the trainer, described by a recipe."""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.evaluation.testing import flatten_results_dict
from detectron2.utils import comm
from torch import nn
from torch.optim import Optimizer

from lambda_det.classification.config import check_ranges, load_recipe
from lambda_det.classification.data.build import Sources, build_sources
from lambda_det.classification.data.loader import LabelledTrainLoader, build_eval_loader
from lambda_det.classification.data.sources import check_same_classes
from lambda_det.classification.evaluation import evaluate_accuracy
from lambda_det.classification.model import build_classifier, model_options
from lambda_det.classification.schedule import EpochSchedule, Plan, peak_learning_rate
from lambda_det.config import FIXED, FREE
from lambda_det.errors import ConfigError, counted
from lambda_det.training.config_file import ConfigFile
from lambda_det.training.log import show
from lambda_det.training.precision import Precision
from lambda_det.training.schedules import build_optimizer, check_rate, warn_of_unread
from lambda_det.training.settings import YAML_KEYS, Settings, read_yaml
from lambda_det.training.task import EMA, RAW, Results, Task
from lambda_det.version import __version__
from lambda_det.weights.provenance import PixelSettings, wanted_pixels

HELD_OUT, VAL = "held_out", "val"

KEYS = YAML_KEYS | {"max_iter": "SOLVER.EPOCHS", "log_period": "LOG_PERIOD"}
# The folders of the data may have moved
_ON_RESUME = {
    **dict.fromkeys(("MODEL", "DATA", "INPUT", "SEED", "SOLVER"), FIXED),
    **dict.fromkeys(
        (
            "MODEL.CHANNELS_LAST",
            "MODEL.CHECKPOINT_ACTIVATIONS",
            "MODEL.COMPILE",
            "MODEL.DEVICE",
            "MODEL.LAMBDA_RESNET.IMPLEMENTATION",
            "MODEL.WEIGHTS",
            "DATA.MAX_UNREADABLE_IMAGES",
            "DATA.TRAIN",
            "DATA.VAL",
            "INPUT.TEST_CROP",
            "INPUT.TEST_SIZE",
            "SOLVER.ACCUMULATE_GRADIENTS",
            "SOLVER.AMP",
            "SOLVER.CHECKPOINTS_KEPT",
            "SOLVER.CHECKPOINT_PERIOD",
            "SOLVER.CLIP_GRADIENTS",
            "SOLVER.EPOCHS",
        ),
        FREE,
    ),
}


class ClassificationTask(Task):
    """The training of a classifier that a recipe describes, on labelled images.

    Attributes:
        cfg: the recipe.
        sources: the images, from :meth:`prepare` on.
        plan: counts of images and steps, from then on, as are the settings.
    """

    on_resume = _ON_RESUME
    # held-out images decide if there are any, and the averaged weights
    metrics = tuple(f"{part}/{weights}_top1" for part in (HELD_OUT, VAL) for weights in (EMA, RAW))
    advice = (
        "SOLVER.CLIP_GRADIENTS, a lower SOLVER.BASE_LR, a longer SOLVER.WARMUP_EPOCHS or bfloat16"
    )

    sources: Sources
    plan: Plan

    def __init__(self, cfg: CfgNode) -> None:
        """
        Args:
            cfg: a recipe.
        """
        self.cfg = cfg

    # ------------------------------------------------------------------------------- configuration
    @classmethod
    def read(cls, args: argparse.Namespace, file: ConfigFile | None = None) -> ClassificationTask:
        cfg = load_recipe(args, file=file)
        needs = {"INPUT.RANDAUGMENT.MAGNITUDE": "INPUT.RANDAUGMENT.LAYERS"}
        warn_of_unread(cfg, args.opts or (), "SCHEDULE", needs)
        return cls(cfg)

    @property
    def device(self) -> tuple[str, str]:
        return self.cfg.MODEL.DEVICE, KEYS["device"]

    def prepare(self, *, train: bool) -> ClassificationTask:
        cfg = self.cfg
        check_ranges(cfg)
        self.sources = build_sources(cfg)
        if train:
            EpochSchedule(cfg)
            check_rate(cfg.SOLVER, is_given=True)  # no key says whether it is
            unsynchronised = comm.get_world_size() > 1 and cfg.MODEL.NORM != "SyncBN"
            if unsynchronised and cfg.TEST.PRECISE_BN_BATCHES == 0:
                raise ConfigError(
                    "TEST.PRECISE_BN_BATCHES 0 keeps the running averages of batch norm, which "
                    "differ from process to process: set it above 0, or MODEL.NORM SyncBN."
                )
        world_size = comm.get_world_size() if train else 1
        self.plan = plan = Plan(cfg, len(self.sources.train), world_size)
        if train:
            show(
                f"Schedule for {cfg.SOLVER.EPOCHS:g} epochs of {plan.images} images: {plan.batch} "
                f"images a step, {plan.forward} at once on each process, lr "
                f"{peak_learning_rate(cfg):g}, {counted(plan.steps, 'step')}"
            )
        per_epoch = math.ceil(plan.images / plan.forward)
        batches = min(cfg.TEST.PRECISE_BN_BATCHES, per_epoch)
        self.settings = read_yaml(
            cfg,
            Settings,
            max_iter=plan.steps,
            log_period=cfg.LOG_PERIOD,
            eval_period=plan.eval_steps,
            precise_bn_batches=math.ceil(batches / world_size),
            keys=KEYS,
        )
        return self

    def dump(self) -> str:
        return self.cfg.dump()

    # --------------------------------------------------------------------------------------- parts
    def build_model(self) -> nn.Module:
        return build_classifier(self.cfg, len(self.sources.train.classes))

    def network(self, model: nn.Module) -> nn.Module:
        return model.classifier

    def distribute(self, model: nn.Module) -> nn.Module:
        if self.cfg.MODEL.COMPILE:
            # A second handle on the same modules, so that evaluation is not compiled as well
            model = copy.copy(model)
            model.compile()
        return super().distribute(model)

    @property
    def pixels(self) -> PixelSettings:
        model = self.cfg.MODEL
        return PixelSettings("RGB", model.PIXEL_MEAN, model.PIXEL_STD)

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return build_optimizer(self.cfg.SOLVER, model, peak_learning_rate(self.cfg))

    def build_schedule(self) -> EpochSchedule:
        return EpochSchedule(self.cfg)

    def build_train_loader(self, *, for_statistics: bool = False) -> LabelledTrainLoader:
        return LabelledTrainLoader(self.cfg, self.sources.train, batch_size=self.plan.forward)

    # ----------------------------------------------------------------------- checks and evaluation

    def check_weights(self, content: Mapping[str, Any], path: str) -> None:
        self.pixels.check(wanted_pixels(content), path)
        if "recipe" in content:
            theirs, classes = content["recipe"]["classes"], self.sources.train.classes
            check_same_classes(theirs, classes, path, "DATA.TRAIN")

    def evaluate(self, models: Mapping[str, nn.Module], *, final: bool) -> Results:
        """Accuracy of each model on each part of the data."""
        cfg = self.cfg
        total = cfg.TEST.IMS_PER_BATCH or self.settings.images_per_batch
        batch_size = max(total // comm.get_world_size(), 1)
        parts = {HELD_OUT: self.sources.held_out, VAL: self.sources.val}
        results: Results = {}
        for part, source in parts.items():
            if source is not None:
                loader = build_eval_loader(cfg, source, batch_size=batch_size)
                results[part] = evaluate_accuracy(models, loader, Precision.of(self.settings))
        return results

    def describe(self, results: Results) -> str:
        values = flatten_results_dict(results)
        return ", ".join(f"{name} {value:.4g}" for name, value in values.items())

    # --------------------------------------------------------------------- what the run says of it
    def image_names(self, batch: Mapping[str, torch.Tensor]) -> list[str]:
        return [self.sources.train.name(index) for index in batch["indices"].tolist()]

    def checkpoint_content(self, results: Results) -> dict[str, Any]:
        """The recipe, and what users of the weights must know."""
        cfg, classes = self.cfg, list(self.sources.train.classes)
        return {
            "recipe": {
                "model": cfg.MODEL.NAME,
                "options": model_options(cfg),
                "num_classes": len(classes),
                "classes": classes,
                "input_format": "RGB",
                "pixel_mean": list(cfg.MODEL.PIXEL_MEAN),
                "pixel_std": list(cfg.MODEL.PIXEL_STD),
                "image_size": cfg.INPUT.TEST_SIZE or cfg.INPUT.SIZE,
                "config": self.dump(),
                "lambda_det": __version__,
            },
            "results": {
                part: {
                    weights: {name: values[f"{weights}_{name}"] for name in ("top1", "top5")}
                    for weights in (RAW, EMA)
                    if f"{weights}_top1" in values
                }
                for part, values in results.items()
            },
        }
