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

from lambda_det.training.checkpoint_files import last_checkpoint
from lambda_det.training.disk_errors import disk_errors_in_words, let_logs_fail
from lambda_det.training.run_folder import FixedKeys, changed_keys

__all__ = ["start_log"]

logger = logging.getLogger(__name__)

# With another value of these a resumed run sees other images, or sees them otherwise
_OF_SAMPLES = FixedKeys(
    names=(
        "INPUT",
        "DATASETS",
        "DATALOADER",
        "dataloader",
    ),
    but_not=(
        "INPUT.MIN_SIZE_TEST",
        "INPUT.MAX_SIZE_TEST",
        "INPUT.TEST_CROP",
        "INPUT.TEST_SIZE",
        "DATASETS.TEST",
        "DATASETS.TEST_IMAGES",
        "DATASETS.TEST_JSON",
        "DATALOADER.MAX_UNREADABLE_IMAGES",
        "DATALOADER.NUM_WORKERS",
        "DATALOADER.TIMEOUT",
        "dataloader.evaluator",
        "dataloader.test",
        "dataloader.test_images",
        "dataloader.test_json",
        "dataloader.train.max_unreadable",
        "dataloader.train.num_workers",
        "dataloader.train.timeout",
    ),
)


def start_log(cfg: CfgNode, args: argparse.Namespace) -> None:
    """As Detectron2's default_setup, but config.yaml waits until the weights are loaded."""
    rank = comm.get_rank()
    changes = []
    if comm.is_main_process():
        if args.resume and not args.eval_only:
            changes = list(changed_keys(cfg, Path(cfg.OUTPUT_DIR, "config.yaml")))
        with disk_errors_in_words(cfg.OUTPUT_DIR):
            Path(cfg.OUTPUT_DIR).mkdir(parents=True, exist_ok=True)
    comm.synchronize()
    for name in ("fvcore", "detectron2", "lambda_det"):
        setup_logger(cfg.OUTPUT_DIR, distributed_rank=rank, name=name)
    let_logs_fail()
    logger.info(f"Process {rank} of {comm.get_world_size()}")
    logger.info("Environment:\n" + collect_env_info())
    logger.info(f"Command line: {args}")
    logger.info(f"Configuration:\n{cfg.dump()}")
    if changes:
        text = ", ".join(f"{key} {before!r} -> {now!r}" for key, before, now in changes)
        logger.info(f"Changed since the run was started: {text}")
        others = [key for key, *_ in changes if key in _OF_SAMPLES]
        if others and last_checkpoint(cfg.OUTPUT_DIR):
            logger.warning(
                f"{', '.join(others)} changed: the samples are others from here on than those of "
                "the run that was started"
            )
    # Another seed on each process, so that their jitter differs
    seed_all_rng(None if cfg.SEED < 0 else cfg.SEED + rank)
    torch.backends.cudnn.benchmark = cfg.CUDNN_BENCHMARK and not args.eval_only
