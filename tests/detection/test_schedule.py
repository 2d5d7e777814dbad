"""The polynomial schedule of DeepLab, from the configuration, and through a resume."""

from __future__ import annotations

import pytest
import torch
from detectron2.config import get_cfg
from detectron2.projects.deeplab import add_deeplab_config

from lambda_det.detection.schedule import build_lr_scheduler


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


def test_others_are_detectron2_s():
    scheduler, _ = _build(10, "WarmupCosineLR")
    assert type(scheduler).__name__ == "LRMultiplier"
