"""From the command line to a run: what can be refused first, then the folder, then the work."""

from __future__ import annotations

import argparse
import functools
import logging
import os
from collections.abc import Callable
from pathlib import Path

from detectron2.config import CfgNode
from detectron2.utils import comm

from lambda_det.detection.model_check import load_for_trial
from lambda_det.detection.scaling import scale_schedule
from lambda_det.detection.trainer import DetectionTrainer
from lambda_det.distributed.launch import launch, on_main_process
from lambda_det.errors import ConfigError, WeightsError
from lambda_det.training.checkpointer import SafeCheckpointer, newest_good
from lambda_det.training.clipping import check_clipping
from lambda_det.training.disk_errors import disk_errors_in_words
from lambda_det.training.loop import checkpoint_to_resume
from lambda_det.training.precision import Precision
from lambda_det.training.run_folder import (
    check_evaluation_folder,
    check_run_folder,
    describe_run,
    save_config,
)
from lambda_det.training.run_log import start_log

__all__ = ["evaluate", "run", "setup", "train"]

logger = logging.getLogger(__name__)


def run(args: argparse.Namespace, trainer: type[DetectionTrainer] = DetectionTrainer) -> None:
    """Train or evaluate as the command line says, in as many processes as it says.

    Args:
        args: of :func:`lambda_det.detection.parser`.
        trainer: says how the configuration is read and what is made of it.

    Raises:
        UserError: one sentence to print.
    """
    # Read here as well as in the processes, so that a mistake is told once and at once
    cfg = trainer.load_config(args)
    launch(functools.partial(_work, trainer=trainer), args, device=cfg.MODEL.DEVICE)


def _work(args: argparse.Namespace, trainer: type[DetectionTrainer]) -> None:
    cfg = setup(args, trainer)
    with disk_errors_in_words(cfg.OUTPUT_DIR):
        if args.eval_only:
            evaluate(cfg, resume=args.resume, trainer=trainer)
        else:
            train(cfg, resume=args.resume, trainer=trainer, debug=args.debug_numerics)
    logger.info(describe_run(cfg))


def setup(args: argparse.Namespace, trainer: type[DetectionTrainer] = DetectionTrainer) -> CfgNode:
    """Read the configuration, refuse what cannot work, and make the run folder with its log.

    Call it in every process, after they are connected.

    Returns:
        The frozen configuration; the schedule is not yet scaled to the workers.

    Raises:
        UserError: before anything is written.
    """
    cfg = trainer.load_config(args)
    trainer.register_data(cfg)
    Precision.from_config(cfg)
    check_clipping(cfg)
    if not args.eval_only:
        _check_period(cfg)
        scale_schedule(cfg, comm.get_world_size())
    on_main_process(lambda: _check(cfg, args, trainer))
    start_log(cfg, args)
    cfg.freeze()
    return cfg


def _check_period(cfg: CfgNode) -> None:
    if cfg.SOLVER.CHECKPOINT_PERIOD < 1:
        raise ConfigError(
            f"SOLVER.CHECKPOINT_PERIOD is {cfg.SOLVER.CHECKPOINT_PERIOD}; give the number of steps "
            "between two checkpoints, from 1 on."
        )


def _check(cfg: CfgNode, args: argparse.Namespace, trainer: type[DetectionTrainer]) -> None:
    if args.eval_only:
        path = _weights_to_evaluate(cfg, args.resume, newest_good)
        check_evaluation_folder(cfg, path)
        load_for_trial(trainer.build_for_trial(cfg), lambda c: c.load_complete_model(path))
    else:
        check_run_folder(cfg, resume=args.resume, fixed=trainer.fixed_keys)
        _check_start(cfg, newest_good(cfg.OUTPUT_DIR) if args.resume else "", trainer)
    test = args.eval_only or len(cfg.DATASETS.TEST) > 0
    trainer.check_data(cfg, train=not args.eval_only, test=test)


def _check_start(cfg: CfgNode, checkpoint: str, trainer: type[DetectionTrainer]) -> None:
    """Try what DetectionTrainer.resume_or_load will do."""
    model = trainer.build_for_trial(cfg)
    if checkpoint:
        load_for_trial(model, lambda c: c.load_everything(checkpoint))
    elif cfg.MODEL.WEIGHTS:
        _check_weights_exist(cfg.MODEL.WEIGHTS)
        pixels = trainer.pixel_settings(cfg)
        load_for_trial(model, lambda c: c.load_initial_weights(cfg.MODEL.WEIGHTS, pixels))


def _check_weights_exist(path: str) -> None:
    if "://" not in path and not os.path.isfile(path.split("?")[0]):
        raise WeightsError(f"MODEL.WEIGHTS {path} is not there; it must name a checkpoint file.")


def _weights_to_evaluate(cfg: CfgNode, resume: bool, newest: Callable[[str], str]) -> str:
    if resume:
        path = newest(cfg.OUTPUT_DIR)
        if not path:
            raise WeightsError(
                f"--eval-only --resume evaluates the last checkpoint of OUTPUT_DIR, and "
                f"{cfg.OUTPUT_DIR} holds none."
            )
        return path
    if not cfg.MODEL.WEIGHTS:
        raise ConfigError(
            "--eval-only needs weights: add MODEL.WEIGHTS FILE at the end of the command line, or "
            "--resume for the last checkpoint of OUTPUT_DIR."
        )
    _check_weights_exist(cfg.MODEL.WEIGHTS)
    return cfg.MODEL.WEIGHTS


def train(
    cfg: CfgNode,
    *,
    resume: bool,
    trainer: type[DetectionTrainer] = DetectionTrainer,
    debug: bool = False,
) -> dict | None:
    """Train and evaluate; with ``resume`` from the last checkpoint, if there is one.

    With ``debug``, NaN and infinite numbers are traced to the layer that makes them.
    """
    training = trainer(cfg)
    if debug:
        training.debug_numerics()
    training.resume_or_load(resume=resume)
    if comm.is_main_process():
        save_config(cfg)
    return training.train()


def evaluate(
    cfg: CfgNode, *, resume: bool, trainer: type[DetectionTrainer] = DetectionTrainer
) -> dict:
    """Evaluate MODEL.WEIGHTS, or with ``resume`` the last checkpoint of OUTPUT_DIR.

    Raises:
        ConfigError: no weights were named.
        WeightsError: they are missing or do not hold the whole model.
    """
    path = _weights_to_evaluate(cfg, resume, checkpoint_to_resume)
    model = trainer.build_model(cfg)
    SafeCheckpointer(model, cfg.OUTPUT_DIR).load_complete_model(path)
    if (
        comm.is_main_process() and not Path(cfg.OUTPUT_DIR, "config.yaml").exists()
    ):  # that of a run is kept
        save_config(cfg)
    return trainer.test(cfg, model)
