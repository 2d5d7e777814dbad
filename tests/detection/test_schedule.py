"""The schedule on any number of workers; DeepLab's polynomial, through a resume."""

import logging
import re
from dataclasses import replace
from operator import attrgetter

import pytest
import torch
from detectron2.config import get_cfg
from detectron2.projects.deeplab import add_deeplab_config
from torch import nn

from lambda_det.config import add_lambda_config, leaves
from lambda_det.detection.parts import of_yaml, read_settings
from lambda_det.detection.schedule import build_lr_scheduler, build_optimizer, scale_settings
from lambda_det.errors import ConfigError


def _build(steps: int, name: str = "WarmupPolyLR"):
    cfg = get_cfg()
    add_deeplab_config(cfg)
    cfg.SOLVER.LR_SCHEDULER_NAME = name
    cfg.SOLVER.MAX_ITER, cfg.SOLVER.STEPS = steps, ()
    cfg.SOLVER.WARMUP_ITERS, cfg.SOLVER.WARMUP_FACTOR = 4, 0.0
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    return build_lr_scheduler(cfg, optimizer), optimizer


def test_it_is_linear_and_then_a_power():
    scheduler, optimizer = _build(10)
    for step in range(10):
        expected = 2.0 * min(step / 4, 1) * (1 - step / 10) ** 0.9
        assert optimizer.param_groups[0]["lr"] == pytest.approx(expected)
        optimizer.step()
        scheduler.step()


def test_a_resumed_run_may_be_longer():
    scheduler, optimizer = _build(6)
    for _ in range(6):
        optimizer.step()
        scheduler.step()
    assert scheduler.state_dict() == {"base_lrs": [2.0], "last_epoch": 6}
    longer, optimizer = _build(12)
    longer.load_state_dict(scheduler.state_dict())
    optimizer.step()
    longer.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(2.0 * (1 - 7 / 12) ** 0.9)


def test_milestones_may_lie_at_the_end_and_beyond():
    cfg = get_cfg()
    cfg.SOLVER.MAX_ITER, cfg.SOLVER.STEPS, cfg.SOLVER.WARMUP_ITERS = 4, (2, 4, 6), 0
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = build_lr_scheduler(cfg, optimizer)
    rates = []
    for _ in range(4):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([1, 1, 0.1, 0.1])
    assert cfg.SOLVER.STEPS == (2, 4, 6)


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


def test_counts_do_not_vanish_and_stay_without_a_reference():
    written = replace(read_settings(_paper(4)), reference_world_size=4, eval_period=3)
    assert scale_settings(written, 64).eval_period == 1
    written = replace(written, reference_world_size=0)
    assert scale_settings(written, 8) is written and written.images_per_batch == 64


@pytest.mark.parametrize(
    ("images", "reference", "accumulate", "workers", "words"),
    [
        (10, 0, 2, 4, ["IMS_PER_BATCH 10", "4 process", "8 or 16"]),
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


def _table(caplog) -> dict[str, list[str]]:
    """The cells of the rows by key, without those that are empty."""
    lines = "\n".join(record.getMessage() for record in caplog.records).splitlines()
    rows = [re.split(r"  +", line.strip()) for line in lines if "." in line.split("  ")[0]]
    return {key: cells for key, *cells in rows}


def test_what_is_typed_is_taken_literally(caplog):
    """130k steps of 256 images in the file; 40 steps of 5 images are typed."""
    keys = ("SOLVER.MAX_ITER", "SOLVER.IMS_PER_BATCH")
    typed = replace(read_settings(_paper()), max_iter=40, images_per_step=5, unscaled=keys)
    with caplog.at_level(logging.INFO, logger="lambda_det"):
        logging.getLogger("lambda_det").propagate = True
        scaled = scale_settings(typed, 1)
    assert (scaled.max_iter, scaled.images_per_step) == (40, 5)
    assert scaled.base_lr == pytest.approx(0.0025)  # the file's, for 2 images a worker
    rows = _table(caplog)
    assert rows["SOLVER.BASE_LR"][:2] == ["0.32", "0.0025"]
    assert rows["SOLVER.MAX_ITER"] == ["40", "it is typed"]
    assert rows["SOLVER.IMS_PER_BATCH"] == ["5", "it is typed"]


def test_a_resumed_run_keeps_what_the_optimiser_saves():
    """Its saved groups replace those of the configuration, so a changed key would do nothing."""
    cfg = get_cfg()
    add_lambda_config(cfg)
    model = nn.ModuleDict({"backbone": nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1))})
    model["head"] = nn.Linear(1, 1)

    def groups(cfg) -> list[dict]:
        saved = build_optimizer(cfg, model).state_dict()["param_groups"]
        return [{key: value for key, value in group.items() if key != "params"} for group in saved]

    saved = []
    for key, value in leaves(cfg):
        if key.startswith("SOLVER.") and isinstance(value, bool | int | float | None):
            changed = cfg.clone()
            section, _, name = key.rpartition(".")
            attrgetter(section)(changed)[name] = not value if isinstance(value, bool) else 0.5
            saved += [key] if groups(changed) != groups(cfg) else []
    assert {"SOLVER.BACKBONE_MULTIPLIER", "SOLVER.WEIGHT_DECAY_BIAS"} <= {*saved}
    assert [key for key in saved if key not in of_yaml(cfg).fixed_keys] == []


@pytest.mark.parametrize(
    "key", ["SOLVER.BASE_LR", "SOLVER.BACKBONE_MULTIPLIER", "SOLVER.WEIGHT_DECAY_NORM"]
)
@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf")])
def test_rates_that_no_training_can_have(key, value):
    cfg = get_cfg()
    add_lambda_config(cfg)
    cfg.merge_from_list([key, value])
    with pytest.raises(ConfigError, match=rf"{key} is {value}; .* finite .*\b0\b"):
        of_yaml(cfg)
