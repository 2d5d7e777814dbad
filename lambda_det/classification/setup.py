"""From the command line to a run: what can be refused first, then the folder, then the work."""

from __future__ import annotations

import argparse
import copy
import logging
from collections.abc import Callable
from pathlib import Path

import torch
from detectron2.config import CfgNode
from detectron2.utils import comm

from lambda_det.classification.command_line import load_recipe
from lambda_det.classification.data import (
    Source,
    Sources,
    build_sources,
    check_held_out,
    write_list,
)
from lambda_det.classification.data.transforms import TestTransform, TrainTransform
from lambda_det.classification.evaluator import EMA, RAW, describe
from lambda_det.classification.model import (
    STRIDE,
    PixelClassifier,
    build_classifier,
    pixel_settings,
)
from lambda_det.classification.optimizer import build_optimizer
from lambda_det.classification.ranges import check_ranges
from lambda_det.classification.schedule import EpochSchedule, plan_training
from lambda_det.classification.trainer import ClassificationTrainer, evaluate_model
from lambda_det.detection.model_check import load_for_trial
from lambda_det.distributed.launch import launch, on_main_process
from lambda_det.errors import ConfigError, WeightsError
from lambda_det.training.checkpointer import SafeCheckpointer, newest_good
from lambda_det.training.disk_errors import disk_errors_in_words
from lambda_det.training.loop import checkpoint_to_resume
from lambda_det.training.precision import Precision
from lambda_det.training.run_folder import (
    FixedKeys,
    check_evaluation_folder,
    check_run_folder,
    describe_run,
    save_config,
)
from lambda_det.training.run_log import start_log
from lambda_det.weights.formats import read_checkpoint
from lambda_det.weights.provenance import wanted_pixels

__all__ = ["run"]

logger = logging.getLogger(__name__)

# What a resumed run must keep. The folders of the data may have moved.
_FIXED = FixedKeys(
    names=("MODEL", "DATA", "INPUT", "SEED", "SOLVER"),
    but_not=(
        "MODEL.CHANNELS_LAST",
        "MODEL.CHECKPOINT_ACTIVATIONS",
        "MODEL.COMPILE",
        "MODEL.DEVICE",
        "MODEL.WEIGHTS",
        "DATA.MAX_UNREADABLE_IMAGES",
        "DATA.PSEUDO_IMAGES",
        "DATA.PSEUDO_LABELS",
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
)


def run(args: argparse.Namespace) -> None:
    """Train or evaluate as the command line says, in as many processes as it says.

    Args:
        args: of :func:`lambda_det.classification.parser`.

    Raises:
        UserError: one sentence to print.
    """
    # Read here as well as in the processes, so that a mistake is told once and at once
    cfg = load_recipe(args)
    launch(_work, args, device=cfg.MODEL.DEVICE)


def _work(args: argparse.Namespace) -> None:
    cfg = load_recipe(args)
    check_ranges(cfg)
    Precision.from_config(cfg)
    sources = _build_sources(cfg)
    on_main_process(lambda: _check(cfg, sources, args))
    start_log(cfg, args)
    cfg.freeze()
    if args.eval_only:
        _evaluate(cfg, sources, resume=args.resume)
    else:
        with disk_errors_in_words(cfg.OUTPUT_DIR):
            _train(cfg, sources, resume=args.resume, debug=args.debug_numerics)
        logger.info(describe_run(cfg))


def _build_sources(cfg: CfgNode) -> Sources:
    """On the first process first, which may leave an index for the others."""
    sources: list[Sources] = []
    on_main_process(lambda: sources.append(build_sources(cfg)))
    return sources[0] if sources else build_sources(cfg)


def _check(cfg: CfgNode, sources: Sources, args: argparse.Namespace) -> None:
    """Refuse what cannot work, before anything is written."""
    TestTransform(cfg)
    model = _build_for_trial(cfg, sources)
    if args.eval_only:
        path = _weights_to_evaluate(cfg, args.resume, newest_good)
        check_evaluation_folder(cfg, path)
        load_for_trial(model.classifier, lambda c: c.load_complete_model(path))
        _check_recipe(path, cfg, sources.train)
        return
    TrainTransform(cfg)
    EpochSchedule(cfg)
    plan = plan_training(cfg, len(sources.train), comm.get_world_size())
    build_optimizer(cfg, model)
    _check_statistics(cfg, plan.forward)
    check_run_folder(cfg, resume=args.resume, fixed=_FIXED)
    checkpoint = newest_good(cfg.OUTPUT_DIR) if args.resume else ""
    if checkpoint:
        load_for_trial(model.classifier, lambda c: c.load_everything(checkpoint))
        _check_recipe(checkpoint, cfg, sources.train)
        if sources.held_out is not None:
            check_held_out(_held_out_list(cfg), sources.held_out)
    elif cfg.MODEL.WEIGHTS:
        load_for_trial(
            model.classifier,
            lambda c: c.load_initial_weights(cfg.MODEL.WEIGHTS, pixel_settings(cfg)),
        )


def _check_statistics(cfg: CfgNode, images: int) -> None:
    """Refuse batch norms that have nothing to take a statistic from."""
    if images == 1 and cfg.INPUT.SIZE <= STRIDE and cfg.MODEL.NORM == "BN":
        raise ConfigError(
            "A forward pass of one image leaves batch norm a single value for a channel in the "
            f"last stage, where {cfg.INPUT.SIZE} pixels are one position: lower "
            "SOLVER.ACCUMULATE_GRADIENTS, or raise SOLVER.IMS_PER_BATCH."
        )
    alone = comm.get_world_size() > 1 and cfg.MODEL.NORM != "SyncBN"
    if alone and cfg.TEST.PRECISE_BN_BATCHES == 0:
        raise ConfigError(
            "TEST.PRECISE_BN_BATCHES 0 keeps the running averages of batch norm, which differ from "
            "process to process: set it above 0, or MODEL.NORM SyncBN."
        )


def _build_for_trial(cfg: CfgNode, sources: Sources) -> PixelClassifier:
    """The model where it takes no memory and hardly any time: names and shapes alone."""
    trial = cfg.clone()
    trial.defrost()
    trial.MODEL.DEVICE = "meta"
    with torch.device("meta"):
        return build_classifier(trial, len(sources.train.classes))


def _check_recipe(path: str, cfg: CfgNode, source: Source) -> None:
    """Refuse what fits the network by its shapes alone: other classes, or other pixels."""
    checkpoint = read_checkpoint(path)
    pixel_settings(cfg).check(wanted_pixels(checkpoint), path)
    classes = checkpoint.get("recipe", {}).get("classes", source.classes)
    for label, (there, here) in enumerate(zip(classes, source.classes, strict=False)):
        if there != here:
            raise WeightsError(
                f"{path} is of other classes than DATA.TRAIN: its class {label} is {there!r}, and "
                f"there it is {here!r}."
            )


def _weights_to_evaluate(cfg: CfgNode, resume: bool, newest: Callable[[str], str]) -> str:
    path = newest(cfg.OUTPUT_DIR) if resume else cfg.MODEL.WEIGHTS
    if path:
        return path
    if resume:
        raise WeightsError(
            f"--eval-only --resume evaluates the last checkpoint of OUTPUT_DIR, and "
            f"{cfg.OUTPUT_DIR} holds none."
        )
    raise ConfigError(
        "--eval-only needs weights: add MODEL.WEIGHTS FILE at the end of the command line, or "
        "--resume for the last checkpoint of OUTPUT_DIR."
    )


def _held_out_list(cfg: CfgNode) -> Path:
    return Path(cfg.OUTPUT_DIR, "held_out.txt")


def _train(cfg: CfgNode, sources: Sources, *, resume: bool, debug: bool) -> None:
    trainer = ClassificationTrainer(cfg, sources)
    if debug:
        trainer.debug_numerics()
    trainer.resume_or_load(resume)
    if comm.is_main_process():
        save_config(cfg)
        if sources.held_out is not None:
            held_out = sources.held_out
            write_list(_held_out_list(cfg), map(held_out.name, range(len(held_out))))
    trainer.train()


def _evaluate(cfg: CfgNode, sources: Sources, *, resume: bool) -> None:
    path = _weights_to_evaluate(cfg, resume, checkpoint_to_resume)
    model = build_classifier(cfg, len(sources.train.classes))
    SafeCheckpointer(model.classifier).load_complete_model(path)
    models = {RAW: model}
    average = read_checkpoint(path).get("ema")
    if average:
        models[EMA] = copy.deepcopy(model)
        models[EMA].classifier.load_state_dict(average["model"])
    results = evaluate_model(cfg, sources, models)
    logger.info(f"{path}: {describe(results)}")
