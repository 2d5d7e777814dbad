"""The schedule on any number of workers, and through a resume; optimisers of a configuration."""

import logging
import re
from dataclasses import replace
from operator import attrgetter

import pytest
import torch
from detectron2.config import CfgNode, get_cfg
from detectron2.projects import deeplab
from detectron2.solver import LRMultiplier
from detectron2.solver import build_lr_scheduler as build_detectron2_scheduler
from torch import nn

from lambda_det.config import FIXED, add_lambda_config, leaves, on_resume
from lambda_det.detection.components import of_yaml, read_settings
from lambda_det.detection.schedule import (
    DetectionSettings,
    build_optimizer,
    build_schedule,
    scale_settings,
)
from lambda_det.errors import ConfigError


def _config(*pairs: object) -> CfgNode:
    cfg = get_cfg()
    add_lambda_config(cfg)
    cfg.merge_from_list(list(pairs))
    return cfg


def _sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)


def _rates(scheduler: LRMultiplier, steps: int) -> list[float]:
    """The learning rates of a number of steps."""
    rates = [scheduler.optimizer.param_groups[0]["lr"]]
    while len(rates) < steps:
        scheduler.optimizer.step()
        scheduler.step()
        rates.append(scheduler.optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize("method", ["linear", "constant"])
@pytest.mark.parametrize(
    ("name", "pairs"),
    [
        ("WarmupMultiStepLR", ()),
        ("WarmupMultiStepLR", ("SOLVER.RESCALE_INTERVAL", True)),
        ("WarmupCosineLR", ("SOLVER.BASE_LR_END", 0.25)),
        ("WarmupStepWithFixedGammaLR", ("SOLVER.NUM_DECAYS", 6, "SOLVER.GAMMA", 0.7)),
    ],
)
def test_the_schedules_of_detectron2_have_its_bits(name, pairs, method):
    """DeepLab's multiplies three numbers in another order, which rounds another way."""
    cfg = _config(
        *("SOLVER.LR_SCHEDULER_NAME", name, "SOLVER.MAX_ITER", 97, "SOLVER.STEPS", (31, 67)),
        *("SOLVER.WARMUP_ITERS", 9, "SOLVER.WARMUP_FACTOR", 0.1, "SOLVER.BASE_LR", 2.0),
        *("SOLVER.WARMUP_METHOD", method, *pairs),
    )
    ours = _rates(LRMultiplier(_sgd(), build_schedule(cfg), 97), 97)
    assert ours == _rates(build_detectron2_scheduler(cfg, _sgd()), 97)
    assert len(set(ours)) > 2


@pytest.mark.parametrize(("method", "ending"), [("linear", 0.0), ("constant", 0.3)])
def test_poly_is_that_of_deeplab(method, ending):
    cfg = _config(
        *("SOLVER.LR_SCHEDULER_NAME", "WarmupPolyLR", "SOLVER.MAX_ITER", 97),
        *("SOLVER.WARMUP_ITERS", 9, "SOLVER.WARMUP_METHOD", method),
        *("SOLVER.POLY_LR_POWER", 0.8, "SOLVER.POLY_LR_CONSTANT_ENDING", ending),
    )
    ours = _rates(LRMultiplier(_sgd(), build_schedule(cfg), 97), 97)
    theirs = _rates(deeplab.build_lr_scheduler(cfg, _sgd()), 97)
    assert ours == pytest.approx(theirs, rel=1e-12) and min(ours[1:]) > 0


def test_milestones_may_lie_at_the_end_and_beyond():
    cfg = _config("SOLVER.MAX_ITER", 4, "SOLVER.STEPS", (2, 4, 6), "SOLVER.WARMUP_ITERS", 0)
    rates = _rates(LRMultiplier(_sgd(), build_schedule(cfg), 4), 4)
    assert rates == pytest.approx([2, 2, 0.2, 0.2])


PAPER = """REFERENCE_WORLD_SIZE 128 IMS_PER_BATCH 256 BASE_LR 0.32 MAX_ITER 130000
STEPS (117000,123500,126750) WARMUP_ITERS 1000 CHECKPOINT_PERIOD 5000"""


def _paper(**more: int) -> DetectionSettings:
    """130k steps of 256 images, written for 128 workers of 2 images, with other keys."""
    words = [*PAPER.split(), *(word for pair in more.items() for word in pair)]
    words[::2] = [f"SOLVER.{key}" for key in words[::2]]
    return read_settings(_config("TEST.EVAL_PERIOD", 0, *words))


@pytest.mark.parametrize(
    ("workers", "accumulate", "images", "lr", "steps"),
    [
        (128, 1, 256, 0.32, 130_000),
        (8, 16, 256, 0.32, 130_000),
        (1, 1, 2, 0.0025, 16_640_000),
        (1, 8, 16, 0.02, 2_080_000),
    ],
)
def test_the_papers_schedule(workers, accumulate, images, lr, steps):
    scaled = scale_settings(_paper(ACCUMULATE_GRADIENTS=accumulate), workers)
    assert scaled.images_per_step == images
    assert scaled.base_lr == pytest.approx(lr)
    assert scaled.max_iter == steps
    assert scaled.lr_steps == pytest.approx([0.9 * steps, 0.95 * steps, 0.975 * steps])
    assert scaled.warmup_iters == pytest.approx(steps / 130)
    assert scaled.images_per_batch == 2 * workers  # in memory on each
    assert scaled.checkpoint_period == 5000


def test_counts_do_not_vanish_and_stay_without_a_reference():
    written = replace(_paper(), reference_world_size=4, eval_period=3)
    assert scale_settings(written, 64).eval_period == 1
    # Of a LazyConfig whose optimiser names no rate
    written = replace(written, reference_world_size=0, base_lr=None)
    assert scale_settings(written, 8) is written and written.images_per_batch == 256


@pytest.mark.parametrize(
    ("images", "reference", "accumulate", "words"),
    [
        (10, 0, 2, "IMS_PER_BATCH 10.*4 process.*: 8 images"),
        (3, 0, 1, "IMS_PER_BATCH 3.*4 images would do"),
        (8, 0, 0, "ACCUMULATE_GRADIENTS is 0"),
    ],
)
def test_a_batch_that_does_not_divide(images, reference, accumulate, words):
    keys = {"IMS_PER_BATCH": images, "REFERENCE_WORLD_SIZE": reference}
    with pytest.raises(ConfigError, match=words):
        scale_settings(_paper(**keys, ACCUMULATE_GRADIENTS=accumulate), 4)


def test_what_is_given_is_taken_literally():
    """130k steps of 256 images in the file; 40 steps of 5 images are given."""
    keys = ("SOLVER.MAX_ITER", "SOLVER.IMS_PER_BATCH")
    given = replace(_paper(), max_iter=40, images_per_step=5, unscaled=keys)
    scaled = scale_settings(given, 1)
    assert (scaled.max_iter, scaled.images_per_step) == (40, 5)
    assert scaled.base_lr == pytest.approx(0.0025)  # the file's, for 2 images a worker


def _model() -> nn.ModuleDict:
    model = nn.ModuleDict({"backbone": nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1))})
    model["head"] = nn.Linear(1, 1)
    return model


@pytest.mark.parametrize(("name", "other"), [("sgd", "adamw"), ("adamw", "sgd")])
def test_a_resumed_run_keeps_what_the_optimiser_saves(name, other):
    """Its saved groups replace those of the configuration, so a changed key would do nothing."""
    cfg, model = _config("SOLVER.OPTIMIZER", name), _model()

    def groups(cfg: CfgNode) -> list[dict]:
        saved = build_optimizer(cfg, model).state_dict()["param_groups"]
        return [{key: value for key, value in group.items() if key != "params"} for group in saved]

    others, saved = {"SOLVER.BETAS": [0.8, 0.9], "SOLVER.OPTIMIZER": other}, set()
    for key, value in leaves(cfg.SOLVER, "SOLVER."):
        if key in others or isinstance(value, bool | int | float | None):
            changed = cfg.clone()
            section, _, last = key.rpartition(".")
            changed_value = others.get(key, not value if isinstance(value, bool) else 0.5)
            attrgetter(section)(changed)[last] = changed_value
            if groups(changed) != groups(cfg):
                saved.add(key)
    assert saved > {"SOLVER.BACKBONE_MULTIPLIER", "SOLVER.WEIGHT_DECAY_BIAS", "SOLVER.OPTIMIZER"}
    assert ("SOLVER.BETAS" in saved) == (name == "adamw")
    assert {on_resume(of_yaml(cfg).on_resume, key) for key in saved} == {FIXED}


def test_each_group_has_its_rate_and_decay_of_adamw():
    pairs = "BETAS [0.8,0.95] BASE_LR 0.004 WEIGHT_DECAY 0.3 WEIGHT_DECAY_NORM 0.1 "
    pairs += "WEIGHT_DECAY_BIAS 0.0 BIAS_LR_FACTOR 2.0 BACKBONE_MULTIPLIER 0.25 OPTIMIZER AdamW"
    words = pairs.split()
    words[::2] = [f"SOLVER.{key}" for key in words[::2]]
    model = _model()
    optimizer = build_optimizer(_config(*words), model)
    assert type(optimizer) is torch.optim.AdamW
    assert optimizer.defaults["lr"] == 0.004  # which the log calls lr
    assert {tuple(group["betas"]) for group in optimizer.param_groups} == {(0.8, 0.95)}
    found = {
        parameter: (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    assert {name: found[parameter] for name, parameter in model.named_parameters()} == {
        "backbone.0.weight": (0.001, 0.3),
        "backbone.0.bias": (0.008, 0.0),  # as in Detectron2, the bias's rate replaces the other
        "backbone.1.weight": (0.001, 0.1),
        "backbone.1.bias": (0.008, 0.0),
        "head.weight": (0.004, 0.3),
        "head.bias": (0.008, 0.0),
    }


def test_a_rate_for_sgd_is_refused_for_another_optimiser(caplog):
    """Unless the rate is given as well: then it is a warning."""
    cfg = _config("SOLVER.OPTIMIZER", "adamw", "SOLVER.BASE_LR", 0.02)
    components = of_yaml(cfg)
    with pytest.raises(
        ConfigError, match=r"SOLVER\.BASE_LR is 0\.02.*adamw.*SOLVER\.BASE_LR 0\.0005"
    ):
        components.make_schedule(components.settings)
    cfg.SOLVER.UNSCALED = ["SOLVER.BASE_LR"]
    components = of_yaml(cfg)
    logging.getLogger("lambda_det").propagate = True
    components.make_schedule(components.settings)
    assert "SOLVER.BASE_LR is 0.02" in caplog.text
    cfg.SOLVER.OPTIMIZER, cfg.SOLVER.UNSCALED = "sgd", []
    of_yaml(cfg).make_schedule(components.settings)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("BASE_LR", 0.0),
        ("BASE_LR", float("nan")),
        ("BACKBONE_MULTIPLIER", -0.1),
        ("WEIGHT_DECAY_NORM", float("inf")),
        ("MOMENTUM", 1.0),
        ("BETAS", [0.9]),
        ("BETAS", ["a", 0.9]),
        ("STEPS", (300, 200)),
        ("NUM_DECAYS", 0),
        ("OPTIMIZER", "lion"),
    ],
)
def test_values_that_no_training_can_have(key, value):
    with pytest.raises(ConfigError, match=rf"^SOLVER\.{key} is {re.escape(repr(value))}; it "):
        of_yaml(_config(f"SOLVER.{key}", value))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("LR_SCHEDULER_NAME", "CosineWithRestarts", "WarmupCosineLR"),
        ("BASE_LR_END", 0.5, r"SOLVER\.BASE_LR"),
    ],
)
def test_a_schedule_that_cannot_be(key, value, words):
    cfg = _config("SOLVER.LR_SCHEDULER_NAME", "WarmupCosineLR", f"SOLVER.{key}", value)
    with pytest.raises(ConfigError, match=rf"^SOLVER\.{key} is .*{value}.*{words}"):
        build_schedule(cfg)
