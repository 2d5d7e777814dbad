"""Optimisers, length and learning rate of the recipes."""

import math

import pytest
import torch
from torch import nn

from lambda_det.classification.config import get_classification_config
from lambda_det.classification.schedule import EpochSchedule, Plan, peak_learning_rate
from lambda_det.classification.task import ClassificationTask
from lambda_det.errors import ConfigError


def _cfg(*pairs):
    cfg = get_classification_config()
    cfg.merge_from_list(["SOLVER.WEIGHT_DECAY", 0.5, "SOLVER.IMS_PER_BATCH", 512, *pairs])
    return cfg


COSINE = ("SOLVER.EPOCHS", 90.0, "SOLVER.WARMUP_EPOCHS", 5.0)


@pytest.mark.parametrize(
    ("epoch", "expected"),
    [(4, 0.8), (5, 1), (7.99, 1), (8, 0.99), (11, 0.99**2), (350, 0.99**115)],
)
def test_exponential_falls_every_third_epoch_after_the_warm_up(epoch, expected):
    words = ("SOLVER.EPOCHS", 350.0, "SOLVER.WARMUP_EPOCHS", 5.0, "SOLVER.SCHEDULE", "exponential")
    schedule = EpochSchedule(_cfg(*words, "SOLVER.DECAY", 0.99, "SOLVER.DECAY_EPOCHS", 3.0))
    assert schedule(epoch / 350) == pytest.approx(expected)


def test_by_epoch_the_first_five_epochs_have_one_to_five_fifths():
    """The reproduction's list: initial_lr times 1, 2, 3, 4, 5, then a cosine over the rest."""
    schedule = EpochSchedule(_cfg(*COSINE, "SOLVER.LR_BY_EPOCH", True))
    rates = [schedule(step / 391 / 90) for step in range(391 * 90)]
    for epoch in range(90):
        assert len(set(rates[391 * epoch : 391 * (epoch + 1)])) == 1
    assert rates[::391][:6] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1])
    assert rates[391 * 47] == pytest.approx(0.5 * (1 + math.cos(math.pi * 42 / 85)))
    # The warm-up may end within an epoch
    words = ("SOLVER.EPOCHS", 10.0, "SOLVER.WARMUP_EPOCHS", 2.5, "SOLVER.LR_BY_EPOCH", True)
    schedule = EpochSchedule(_cfg(*words))
    assert [schedule(epoch / 10) for epoch in range(3)] == pytest.approx([0.4, 0.8, 1.0])


def test_the_learning_rate_and_the_steps_follow_the_batch():
    cfg = _cfg("SOLVER.BASE_LR", 0.1, "SOLVER.LR_BATCH", 256, "SOLVER.IMS_PER_BATCH", 4096)
    for accumulated in (1, 4):  # the step's images stay, and so does the rate
        cfg.SOLVER.EPOCHS, cfg.SOLVER.ACCUMULATE_GRADIENTS = 350.0, accumulated
        assert peak_learning_rate(cfg) == pytest.approx(1.6)
        plan = Plan(cfg, 1_281_167, 8)
        assert (plan.steps, plan.forward, plan.batch) == (109_475, 512 // accumulated, 4096)


@pytest.mark.parametrize(("images", "expected"), [(10_000, (625, 156.25)), (5, (1, 1))])
def test_evaluations_keep_to_the_epochs(images, expected):
    """A data set smaller than a batch still has a step."""
    cfg = _cfg("SOLVER.IMS_PER_BATCH", 128, "SOLVER.EPOCHS", 8.0, "TEST.EVAL_PERIOD", 2.0)
    plan = Plan(cfg, images, 1)
    assert (plan.steps, plan.eval_steps) == expected


def _model():
    return nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3, 2))


def test_norms_have_a_weight_decay_of_their_own_and_every_parameter_is_there_once():
    model = _model()
    cfg = _cfg("SOLVER.WEIGHT_DECAY_NORM", 0.25)
    optimizer = ClassificationTask(cfg).build_optimizer(model)
    decay = [(p, g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]]
    expected = {p: 0.25 if part is model[1] else 0.5 for part in model for p in part.parameters()}
    assert dict(decay) == expected and len(decay) == len(expected)
    assert {group["lr"] for group in optimizer.param_groups} == {0.2}


def test_rmsprop_is_tensorflows():
    """ms <- .9 ms + .1 g^2 from 1; mom <- .9 mom + lr g / sqrt(ms + eps); w <- w - mom."""
    words = ("SOLVER.OPTIMIZER", "rmsprop", "SOLVER.BASE_LR", 0.1, "SOLVER.WEIGHT_DECAY", 0.01)
    layer = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(layer.weight, 2.0)
    optimizer = ClassificationTask(_cfg(*words)).build_optimizer(layer)
    w, square, momentum = 2.0, 1.0, 0.0
    for grad in (0.3, -0.2, 0.5, 0.1):
        layer.weight.grad = torch.tensor([[grad]], dtype=torch.float64)
        optimizer.step()
        grad += 0.01 * w
        square = 0.9 * square + 0.1 * grad**2
        momentum = 0.9 * momentum + 0.2 * grad / (square + 1e-3) ** 0.5
        w -= momentum
        assert layer.weight.item() == pytest.approx(w, rel=1e-9)


@pytest.mark.parametrize(
    ("pairs", "kind", "options"),
    [
        (("SOLVER.NESTEROV", True), torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        (
            ("SOLVER.OPTIMIZER", "adam", "SOLVER.BETAS", [0.5, 0.75]),
            torch.optim.Adam,
            {"betas": (0.5, 0.75)},
        ),
    ],
)
def test_others_are_pytorchs_with_the_values_of_their_keys(pairs, kind, options):
    optimizer = ClassificationTask(_cfg(*pairs)).build_optimizer(_model())
    assert type(optimizer) is kind
    for group in optimizer.param_groups:
        assert {name: group[name] for name in options} == options


@pytest.mark.parametrize(
    ("pairs", "word"),
    [
        (("SOLVER.OPTIMIZER", "sdg"), "SOLVER.OPTIMIZER"),
        (("SOLVER.SCHEDULE", "poli"), "SOLVER.SCHEDULE"),
        (("SOLVER.EPOCHS", 3.0, "SOLVER.WARMUP_EPOCHS", 3.0), "SOLVER.WARMUP_EPOCHS"),
        (("SOLVER.IMS_PER_BATCH", 100), ": 96 images"),
        (("SOLVER.IMS_PER_BATCH", 4), ": 8 images"),
    ],
)
def test_what_cannot_be(pairs, word):
    cfg = _cfg(*pairs)
    with pytest.raises(ConfigError, match=word):
        ClassificationTask(cfg).build_optimizer(_model()), EpochSchedule(cfg), Plan(cfg, 1000, 8)
