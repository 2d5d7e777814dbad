import pytest
import torch
from torch import nn

from lambda_det.classification.config import get_classification_config
from lambda_det.classification.schedule import build_optimizer
from lambda_det.errors import ConfigError


def _cfg(*pairs):
    cfg = get_classification_config()
    cfg.merge_from_list(["SOLVER.WEIGHT_DECAY", 0.5, "SOLVER.IMS_PER_BATCH", 512, *pairs])
    return cfg


def _model():
    return nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3, 2))


def test_norms_have_a_weight_decay_of_their_own_and_every_parameter_is_there_once():
    model = _model()
    optimizer = build_optimizer(_cfg("SOLVER.WEIGHT_DECAY_NORM", 0.25), model)
    decay = {p: g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert set(decay) == set(model.parameters())
    assert sum(len(g["params"]) for g in optimizer.param_groups) == len(decay)
    for part in model:
        for parameter in part.parameters():
            assert decay[parameter] == (0.25 if isinstance(part, nn.BatchNorm2d) else 0.5)
    assert {group["lr"] for group in optimizer.param_groups} == {0.2}


def _steps(optimizer, parameter, grads):
    values = []
    for grad in grads:
        parameter.grad = torch.tensor([grad], dtype=torch.float64)
        optimizer.step()
        values.append(parameter.item())
    return values


def _layer():
    layer = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(layer.weight, 2.0)
    return layer


GRADS = (0.3, -0.2, 0.5, 0.1)


def test_rmsprop_is_tensorflows():
    """ms <- .9 ms + .1 g^2 from 1; mom <- .9 mom + lr g / sqrt(ms + eps); w <- w - mom."""
    layer = _layer()
    cfg = _cfg("SOLVER.OPTIMIZER", "rmsprop", "SOLVER.BASE_LR", 0.1, "SOLVER.WEIGHT_DECAY", 0.01)
    got = _steps(build_optimizer(cfg, layer), layer.weight, [[g] for g in GRADS])
    w, square, momentum, expected = 2.0, 1.0, 0.0, []
    for grad in GRADS:
        grad += 0.01 * w
        square = 0.9 * square + 0.1 * grad**2
        momentum = 0.9 * momentum + 0.2 * grad / (square + 1e-3) ** 0.5
        w -= momentum
        expected.append(w)
    assert got == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd(nesterov):
    layer = _layer()
    cfg = _cfg("SOLVER.NESTEROV", nesterov)
    got = _steps(build_optimizer(cfg, layer), layer.weight, [[g] for g in GRADS])
    w, momentum, expected = 2.0, 0.0, []
    for grad in GRADS:
        grad += 0.5 * w
        momentum = 0.9 * momentum + grad
        w -= 0.2 * (grad + 0.9 * momentum if nesterov else momentum)
        expected.append(w)
    assert got == pytest.approx(expected, rel=1e-9)


def test_adam():
    """The first step is one learning rate; the next shows both averages."""
    layer = _layer()
    options = ("SOLVER.OPTIMIZER", "adam", "SOLVER.BETAS", [0.5, 0.75])
    optimizer = build_optimizer(_cfg(*options), layer)
    first, second = 1 + 0.5 * 2, 0 + 0.5 * 1.8  # with weight decay
    mean = (0.5 * 0.5 * first + 0.5 * second) / (1 - 0.5**2)
    square = (0.75 * 0.25 * first**2 + 0.25 * second**2) / (1 - 0.75**2)
    expected = [1.8, 1.8 - 0.2 * mean / square**0.5]
    assert _steps(optimizer, layer.weight, [[1.0], [0.0]]) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("pairs", "word"),
    [
        (("SOLVER.OPTIMIZER", "sdg"), "SOLVER.OPTIMIZER"),
        (("SOLVER.NESTEROV", True, "SOLVER.MOMENTUM", 0.0), "SOLVER.NESTEROV"),
    ],
)
def test_optimizers_that_cannot_be(pairs, word):
    with pytest.raises(ConfigError, match=word):
        build_optimizer(_cfg(*pairs), _model())
