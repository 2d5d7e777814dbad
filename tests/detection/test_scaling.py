"""The paper's schedule on any number of workers."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from detectron2.config import get_cfg

from lambda_det.config import add_lambda_config
from lambda_det.detection.schedule import scale_settings
from lambda_det.detection.task import read_settings
from lambda_det.errors import ConfigError


def _paper(accumulate: int = 1):
    """130k steps of 256 images, lr 0.32, warm-up 1000, written for 128 workers of 2 images."""
    cfg = get_cfg()
    add_lambda_config(cfg)
    cfg.SOLVER.REFERENCE_WORLD_SIZE = 128
    cfg.SOLVER.IMS_PER_BATCH = 256
    cfg.SOLVER.BASE_LR = 0.32
    cfg.SOLVER.MAX_ITER = 130_000
    cfg.SOLVER.STEPS = (117_000, 123_500, 126_750)
    cfg.SOLVER.WARMUP_ITERS = 1000
    cfg.SOLVER.CHECKPOINT_PERIOD = 5000
    cfg.TEST.EVAL_PERIOD = 0
    cfg.SOLVER.ACCUMULATE_GRADIENTS = accumulate
    cfg.freeze()
    return cfg


@pytest.mark.parametrize(
    ("workers", "accumulate", "images", "lr", "steps"),
    [
        (128, 1, 256, 0.32, 130_000),
        (8, 16, 256, 0.32, 130_000),
        (1, 128, 256, 0.32, 130_000),
        (8, 1, 16, 0.02, 2_080_000),
        (1, 1, 2, 0.0025, 16_640_000),
        (1, 8, 16, 0.02, 2_080_000),
    ],
)
def test_the_papers_schedule(workers, accumulate, images, lr, steps):
    scaled = scale_settings(read_settings(_paper(accumulate)), workers)
    assert scaled.images_per_step == images
    assert scaled.base_lr == pytest.approx(lr)
    assert scaled.max_iter == steps
    assert scaled.lr_steps == pytest.approx([0.9 * steps, 0.95 * steps, 0.975 * steps])
    assert scaled.warmup_iters == pytest.approx(steps / 130)
    # whatever the workers: the same images in all, and 2 in memory on each
    assert scaled.images_per_step * scaled.max_iter == 256 * 130_000
    assert scaled.images_per_batch == 2 * workers
    assert scaled.checkpoint_period == 5000


def test_counts_do_not_vanish():
    written = replace(read_settings(_paper()), reference_world_size=1, eval_period=3)
    assert scale_settings(written, 64).eval_period == 1


def test_no_reference_means_no_scaling():
    written = replace(read_settings(_paper(4)), reference_world_size=0)
    assert scale_settings(written, 8) is written
    assert written.images_per_batch == 64


@pytest.mark.parametrize(
    ("images", "reference", "accumulate", "workers", "words"),
    [
        (10, 0, 2, 4, ["IMS_PER_BATCH 10", "4 worker", "8 or 16"]),
        (3, 0, 1, 4, ["IMS_PER_BATCH 3", "4 images would do"]),
        (10, 4, 1, 4, ["REFERENCE_WORLD_SIZE 4"]),
        (8, 0, 0, 1, ["ACCUMULATE_GRADIENTS is 0"]),
    ],
)
def test_a_batch_that_does_not_divide(images, reference, accumulate, workers, words):
    cfg = _paper(accumulate).clone()
    cfg.defrost()
    cfg.SOLVER.IMS_PER_BATCH, cfg.SOLVER.REFERENCE_WORLD_SIZE = images, reference
    with pytest.raises(ConfigError) as caught:
        scale_settings(read_settings(cfg), workers)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_the_log_tells_both_schedules(caplog):
    with caplog.at_level(logging.INFO, logger="lambda_det"):
        logging.getLogger("lambda_det").propagate = True
        scale_settings(read_settings(_paper()), 8)
    (line,) = [r.getMessage() for r in caplog.records if r.name.startswith("lambda_det")]
    for part in ("256 images", "lr 0.32", "130000 steps", "16 images", "lr 0.02", "2080000 steps"):
        assert part in line
