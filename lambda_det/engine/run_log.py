"""What a run says at its start, and the seeds it starts from."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import torch
from detectron2.config import CfgNode
from detectron2.utils import comm
from detectron2.utils.collect_env import collect_env_info
from detectron2.utils.env import seed_all_rng
from detectron2.utils.logger import setup_logger

from lambda_det.engine.run_folder import changed_keys

__all__ = ["start_log"]

logger = logging.getLogger(__name__)


def start_log(cfg: CfgNode, args: argparse.Namespace) -> None:
    """As Detectron2's default_setup, but config.yaml waits until the weights are loaded."""
    rank = comm.get_rank()
    changes = []
    if comm.is_main_process():
        if args.resume and not args.eval_only:
            changes = list(changed_keys(cfg, Path(cfg.OUTPUT_DIR, "config.yaml")))
        Path(cfg.OUTPUT_DIR).mkdir(parents=True, exist_ok=True)
    comm.synchronize()
    for name in ("fvcore", "detectron2", "lambda_det"):
        setup_logger(cfg.OUTPUT_DIR, distributed_rank=rank, name=name)
    logger.info(f"Process {rank} of {comm.get_world_size()}")
    logger.info("Environment:\n" + collect_env_info())
    logger.info(f"Command line: {args}")
    logger.info(f"Configuration:\n{cfg.dump()}")
    if changes:
        text = ", ".join(f"{key} {before!r} -> {now!r}" for key, before, now in changes)
        logger.info(f"Changed since the run was started: {text}")
    # Another seed on each process, so that their jitter differs
    seed_all_rng(None if cfg.SEED < 0 else cfg.SEED + rank)
    torch.backends.cudnn.benchmark = cfg.CUDNN_BENCHMARK and not args.eval_only
