"""The classification trainer: Detectron2's loop and hooks around our step."""

from __future__ import annotations

import copy
import functools
import logging
import math
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode
from detectron2.engine import hooks
from detectron2.solver import LRMultiplier
from detectron2.utils import comm
from torch import nn

import lambda_det
from lambda_det.classification.data import (
    Sources,
    build_eval_loader,
    build_train_loader,
)
from lambda_det.classification.ema import ExponentialAverage
from lambda_det.classification.evaluation import evaluate_accuracy
from lambda_det.classification.evaluator import EMA, HELD_OUT, RAW, VAL, Evaluator, Results
from lambda_det.classification.hooks import Averaging, Checkpoints, ProgressPrinter, Throughput
from lambda_det.classification.model import (
    PixelClassifier,
    build_classifier,
    model_options,
    pixel_settings,
)
from lambda_det.classification.optimizer import build_optimizer
from lambda_det.classification.schedule import EpochSchedule, plan_training
from lambda_det.classification.statistics import estimate_statistics
from lambda_det.errors import DataError
from lambda_det.training.checkpointer import SafeCheckpointer
from lambda_det.training.hooks import Histories, RunWriter
from lambda_det.training.loop import checkpoint_to_resume, distribute, last_saved, run_steps
from lambda_det.training.milestones import STATISTICS_SEED
from lambda_det.training.precision import Precision
from lambda_det.training.step import StepTrainer

__all__ = ["ClassificationTrainer", "evaluate_model"]

logger = logging.getLogger(__name__)


class ClassificationTrainer(StepTrainer):
    """Trains what a recipe says, evaluates raw and averaged weights, and can be resumed.

    Attributes:
        cfg: the recipe.
        plan: its counts of images and steps.
        classifier: what is trained, without wrappers.
        averaged: the same with averaged weights; None without EMA.
        average: keeps ``averaged``; None without EMA.
        checkpointer: of the network, the average and the training state.
        max_iter: steps of the whole training; lower after an early stop.
    """

    def __init__(self, cfg: CfgNode, sources: Sources) -> None:
        self.cfg = cfg
        self.sources = sources
        self.plan = plan_training(cfg, len(sources.train), comm.get_world_size())
        self.classifier = build_classifier(cfg, len(sources.train.classes))
        network = self.classifier
        if cfg.MODEL.COMPILE:
            # A second handle on the same modules, so that evaluation is not compiled as well
            network = copy.copy(network)
            network.compile()
        network = distribute(network, cfg.MODEL.DEVICE)
        self.averaged = self.average = None
        if cfg.SOLVER.EMA_DECAY:
            # Only now, since DistributedDataParallel has given all processes the same weights
            self.averaged = copy.deepcopy(self.classifier)
            self.average = ExponentialAverage(
                self.classifier.classifier, self.averaged.classifier, cfg.SOLVER.EMA_DECAY
            )
        state = {"trainer": weakref.proxy(self)}
        if self.average:
            state["ema"] = self.average
        self.checkpointer = SafeCheckpointer(
            self.classifier.classifier,
            cfg.OUTPUT_DIR,
            keep=cfg.SOLVER.CHECKPOINTS_KEPT,
            **state,
        )
        super().__init__(
            network,
            (),  # the loader is made when it is known where it begins
            build_optimizer(cfg, self.classifier),
            precision=Precision.from_config(cfg),
            accumulate=cfg.SOLVER.ACCUMULATE_GRADIENTS,
            seed=cfg.SEED,
            last_checkpoint=functools.partial(last_saved, self.checkpointer),
            cures="SOLVER.CLIP_GRADIENTS, a lower SOLVER.BASE_LR, a longer SOLVER.WARMUP_EPOCHS or "
            "bfloat16",
            names_of=lambda batch: [sources.train.name(i) for i in batch["indices"].tolist()],
        )
        self.start_iter = 0
        self.max_iter = self.plan.steps
        self.scheduler = LRMultiplier(self.optimizer, EpochSchedule(cfg), self.plan.steps)
        self.evaluator = Evaluator(self.evaluate, self.plan.eval_steps, cfg.TEST.PATIENCE)
        self.register_hooks(self._build_hooks())

    def _build_hooks(self) -> list[hooks.HookBase]:
        cfg = self.cfg
        checkpoints = Checkpoints(cfg.SOLVER.CHECKPOINT_PERIOD, self.evaluator)
        return [
            hooks.IterationTimer(),
            Throughput(self.plan.batch),
            hooks.LRScheduler(),
            Histories(),
            *([Averaging()] if self.average else []),
            self.evaluator,
            checkpoints,
            RunWriter(
                cfg.OUTPUT_DIR,
                printer=ProgressPrinter(weakref.proxy(self)),
                period=cfg.LOG_PERIOD,
            ),
        ]

    def resume_or_load(self, resume: bool) -> None:
        """Continue from the last checkpoint, or begin with MODEL.WEIGHTS, or from scratch.

        Raises:
            WeightsError: no checkpoint is whole, it does not fit, or not every process sees it.
        """
        path = checkpoint_to_resume(self.cfg.OUTPUT_DIR) if resume else ""
        if path:
            self.checkpointer.load_everything(path)
            self.start_iter = self.iter + 1
            if self.evaluator.best_step == self.start_iter:
                # The run may have been killed before this checkpoint got its second name
                self.checkpointer.link(Path(path).stem, "model_best")
                self.checkpointer.wait()
            logger.info(f"Continuing {path} after step {self.start_iter}")
        elif resume:
            logger.info(f"--resume: {self.cfg.OUTPUT_DIR} holds no checkpoint, so this starts")
        if not path and not self.cfg.MODEL.WEIGHTS:
            logger.info("MODEL.WEIGHTS is empty: training from scratch")
        elif not path:
            self.checkpointer.load_initial_weights(self.cfg.MODEL.WEIGHTS, pixel_settings(self.cfg))
            if self.average:
                self.average.average.load_state_dict(self.classifier.classifier.state_dict())

    def train(self) -> Results:
        """Run from ``start_iter`` to ``max_iter``.

        Returns:
            The results of the last evaluation of this call.

        Raises:
            NonFiniteLossError: see :class:`StepTrainer`.
            Preempted: a scheduler's signal ended the run; see :func:`run_steps`.
        """
        if self.start_iter >= self.max_iter and not self.evaluator.is_pending:
            logger.info(f"The run has its {self.max_iter} steps already; SOLVER.EPOCHS sets more")
            return self.evaluator.results
        self.data_loader = build_train_loader(
            self.cfg,
            self.sources.train,
            batch_size=self.plan.forward,
            start=self.start_iter * self.plan.batch,
            seed=self.cfg.SEED,
        )
        logger.info(self._describe_schedule())
        run_steps(self)
        self.log_skipped_steps(self.max_iter)
        return self.evaluator.results

    def _describe_schedule(self) -> str:
        plan, solver, world = self.plan, self.cfg.SOLVER, comm.get_world_size()
        peak = self.scheduler.base_lrs[0]
        return (
            f"Training from step {self.start_iter} to {self.max_iter} ({solver.EPOCHS:g} epochs of "
            f"{plan.images} images): {plan.batch} images a step = {world} process(es) x "
            f"{solver.ACCUMULATE_GRADIENTS} accumulated batch(es) x {plan.forward}; learning rate "
            f"{peak:g} = SOLVER.BASE_LR {solver.BASE_LR:g} x {plan.batch} / {solver.LR_BATCH}, "
            f"reached in {solver.WARMUP_EPOCHS:g} epochs, then {solver.SCHEDULE}"
        )

    def evaluate(self) -> Results:
        """Accuracy on held-out and validation images, of raw and averaged weights."""
        models = {RAW: self.classifier}
        if self.averaged is not None:
            models[EMA] = self.averaged
        self._estimate_statistics(list(models.values()))
        results = evaluate_model(self.cfg, self.sources, models)
        self.model.train()
        return results

    def _estimate_statistics(self, models: list[nn.Module]) -> None:
        per_epoch = math.ceil(self.plan.images / self.plan.forward)
        batches = min(self.cfg.TEST.PRECISE_BN_BATCHES, per_epoch)
        if batches == 0:
            return
        loader = build_train_loader(
            self.cfg,
            self.sources.train,
            batch_size=self.plan.forward,
            start=(self.iter + 1) * self.plan.batch,
            seed=self.cfg.SEED + STATISTICS_SEED,
        )
        count = math.ceil(batches / comm.get_world_size())
        estimate_statistics(models, loader, count, self.precision)

    def save_checkpoint(self, name: str) -> None:
        """Save network, average, training state, and what one needs to know to use them."""
        cfg = self.cfg
        evaluated = self.evaluator.last_step == self.iter + 1
        self.checkpointer.save(
            name,
            iteration=self.iter,
            statistics="precise" if evaluated and cfg.TEST.PRECISE_BN_BATCHES else "running",
            recipe={
                "model": cfg.MODEL.NAME,
                "options": model_options(cfg),
                "num_classes": len(self.sources.train.classes),
                "classes": list(self.sources.train.classes),
                "input_format": "RGB",
                "pixel_mean": list(cfg.MODEL.PIXEL_MEAN),
                "pixel_std": list(cfg.MODEL.PIXEL_STD),
                "image_size": cfg.INPUT.TEST_SIZE or cfg.INPUT.SIZE,
                "config": cfg.dump(),
                "lambda_det": lambda_det.__version__,
            },
            results={
                part: {
                    weights: {"top1": accuracy.top1, "top5": accuracy.top5}
                    for weights, accuracy in by_weights.items()
                }
                for part, by_weights in self.evaluator.results.items()
                if evaluated  # those of older weights are not these
            },
        )

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        state["images"] = self.plan.images
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        before, now = state_dict.get("images"), self.plan.images
        if before is not None and before != now:
            raise DataError(
                f"The run in {self.cfg.OUTPUT_DIR} has {before} training images and would have "
                f"{now} now, so that its epochs mean nothing any more: restore DATA.TRAIN (and "
                "DATA.PSEUDO_LABELS), or give another OUTPUT_DIR."
            )
        super().load_state_dict(state_dict)
        if "random_states" in state_dict:
            logger.warning(
                "The checkpoint is of an earlier version: dropout and stochastic depth draw other "
                "numbers from here on, and the smoothed values of the log start anew"
            )


def evaluate_model(
    cfg: CfgNode, sources: Sources, models: Mapping[str, PixelClassifier]
) -> Results:
    """Accuracy of each model on each part of the data that there is."""
    precision = Precision.from_config(cfg)
    total = cfg.TEST.IMS_PER_BATCH or cfg.SOLVER.IMS_PER_BATCH // cfg.SOLVER.ACCUMULATE_GRADIENTS
    batch_size = max(total // comm.get_world_size(), 1)
    parts = {HELD_OUT: sources.held_out, VAL: sources.val}
    return {
        part: evaluate_accuracy(
            models, build_eval_loader(cfg, source, batch_size=batch_size), precision
        )
        for part, source in parts.items()
        if source is not None
    }
