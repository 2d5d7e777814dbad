"""The paper's schedule on any number of workers."""

from __future__ import annotations

import logging

import pytest
from detectron2.config import get_cfg

from lambda_det.config import add_lambda_config
from lambda_det.detection.scaling import images_per_batch, scale_schedule
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
    cfg = scale_schedule(_paper(accumulate), workers)
    solver = dict(cfg.SOLVER)
    assert solver["IMS_PER_BATCH"] == images
    assert solver["BASE_LR"] == pytest.approx(lr)
    assert solver["MAX_ITER"] == steps
    assert solver["STEPS"] == pytest.approx([0.9 * steps, 0.95 * steps, 0.975 * steps])
    assert solver["WARMUP_ITERS"] == pytest.approx(steps / 130)
    # whatever the workers: the same images in all, and 2 in memory on each
    assert cfg.SOLVER.IMS_PER_BATCH * cfg.SOLVER.MAX_ITER == 256 * 130_000
    assert images_per_batch(cfg) == 2 * workers
    assert cfg.SOLVER.CHECKPOINT_PERIOD == 5000


def test_counts_do_not_vanish():
    cfg = _paper().clone()
    cfg.defrost()
    cfg.SOLVER.REFERENCE_WORLD_SIZE, cfg.TEST.EVAL_PERIOD = 1, 3
    cfg.freeze()
    scaled = scale_schedule(cfg, 64)
    assert scaled.TEST.EVAL_PERIOD == 1
    assert scaled.is_frozen() and cfg.TEST.EVAL_PERIOD == 3


def test_no_reference_means_no_scaling():
    cfg = _paper(4).clone()
    cfg.defrost()
    cfg.SOLVER.REFERENCE_WORLD_SIZE = 0
    assert scale_schedule(cfg, 8) is cfg
    assert images_per_batch(cfg) == 64


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
        scale_schedule(cfg, workers)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_the_log_tells_both_schedules(caplog):
    with caplog.at_level(logging.INFO, logger="lambda_det"):
        logging.getLogger("lambda_det").propagate = True
        scale_schedule(_paper(), 8)
    (line,) = [r.getMessage() for r in caplog.records if r.name.startswith("lambda_det")]
    for part in ("256 images", "lr 0.32", "130000 steps", "16 images", "lr 0.02", "2080000 steps"):
        assert part in line
