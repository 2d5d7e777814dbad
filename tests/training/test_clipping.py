"""Gradient clipping: what is clipped to what, and when."""

import pytest
import torch
from detectron2.config import get_cfg
from detectron2.utils.events import EventStorage
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from lambda_det.classification.config import get_classification_config
from lambda_det.classification.optimizer import build_optimizer as build_classification_optimizer
from lambda_det.config import add_lambda_config
from lambda_det.detection.trainer import DetectionTrainer
from lambda_det.errors import ConfigError
from lambda_det.training.clipping import add_clipping, check_clipping
from lambda_det.training.precision import LossScaler, Precision
from lambda_det.training.step import StepTrainer
from tests.training.toy import ToyModel, batches, items

TYPES = ("value", "norm", "full_model")


def _config(**clip):
    cfg = get_cfg()
    add_lambda_config(cfg)
    cfg.SOLVER.CLIP_GRADIENTS.ENABLED = True
    cfg.SOLVER.CLIP_GRADIENTS.update(clip)
    return cfg


def _clipped(parameters, kind, most, norm_type=2.0):
    """By PyTorch's functions, on gradients as they come without clipping."""
    if kind == "value":
        clip_grad_value_(parameters, most)
    elif kind == "norm":
        for parameter in parameters:
            clip_grad_norm_(parameter, most, norm_type)
    else:
        clip_grad_norm_(parameters, most, norm_type)


@pytest.mark.parametrize("scaled", [False, True], ids=["unscaled", "loss scaling"])
@pytest.mark.parametrize("kind", TYPES)
def test_the_sum_of_all_batches_is_clipped_without_its_scale(kind, scaled):
    data = items(8)
    expected = ToyModel()
    sum(expected(data).values()).backward()
    norm = torch.stack([p.grad.norm() for p in expected.parameters()]).norm().item()
    most = 0.02
    _clipped(list(expected.parameters()), kind, most)
    assert norm > 10 * most
    model = ToyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = add_clipping(_config(CLIP_TYPE=kind, CLIP_VALUE=most), optimizer)
    precision = Precision("cpu", None)
    trainer = StepTrainer(model, batches(data, 2), optimizer, precision=precision, accumulate=4)
    trainer.grad_scaler = LossScaler("cpu", enabled=scaled)
    trainer.iter = 0
    with EventStorage() as storage:
        trainer.run_step()
    for found, start, want in zip(
        model.parameters(), ToyModel().parameters(), expected.parameters(), strict=True
    ):
        torch.testing.assert_close(start - found, want.grad, rtol=1e-4, atol=1e-6)
    # The norm in the log is that of before
    assert storage.history("grad_norm").latest() == pytest.approx(norm, rel=1e-4)


def test_the_kinds_differ_and_the_norm_type_counts():
    data, results = items(8), []
    for kind, norm_type in [("value", 2.0), ("norm", 2.0), ("full_model", 2.0), ("norm", 1.0)]:
        model = ToyModel()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        cfg = _config(CLIP_TYPE=kind, CLIP_VALUE=0.02, NORM_TYPE=norm_type)
        sum(model(data).values()).backward()
        add_clipping(cfg, optimizer).step()
        results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    for i, one in enumerate(results):
        assert not any(torch.allclose(one, other) for other in results[:i])


def test_without_it_nothing_is_clipped():
    optimizer = torch.optim.SGD(ToyModel().parameters(), lr=1.0)
    cfg = _config(ENABLED=False, CLIP_TYPE="nonsense")
    assert type(add_clipping(cfg, optimizer)) is torch.optim.SGD


@pytest.mark.parametrize("kind", TYPES)
def test_detection_and_classification_take_the_same_keys(kind):
    clip = {"ENABLED": True, "CLIP_TYPE": kind, "CLIP_VALUE": 1e-3}
    classification = get_classification_config()
    classification.SOLVER.CLIP_GRADIENTS.update(clip)
    for build, cfg in (
        (DetectionTrainer.build_optimizer, _config(**clip)),
        (build_classification_optimizer, classification),
    ):
        model = ToyModel()
        args = (cfg, model) if build is not None else ()
        optimizer = build(*args)
        sum(model(items(4)).values()).backward()
        optimizer.step()
        grads = torch.cat([p.grad.flatten() for p in model.parameters()])
        largest = grads.abs().max() if kind == "value" else grads.norm()
        assert largest <= 1e-3 * (2.01 if kind == "norm" else 1.01)  # norm: of each of 4


@pytest.mark.parametrize(
    ("clip", "words"),
    [
        ({"CLIP_TYPE": "nrom"}, "CLIP_TYPE is 'nrom'"),
        ({"CLIP_VALUE": 0.0}, "CLIP_VALUE is 0; it must be above 0"),
        ({"CLIP_VALUE": -1.0}, "CLIP_VALUE is -1"),
        ({"CLIP_VALUE": float("nan")}, "CLIP_VALUE is nan"),
        ({"CLIP_VALUE": float("inf")}, "CLIP_VALUE is inf"),
        ({"NORM_TYPE": 0.0}, "NORM_TYPE is 0"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(clip, words):
    with pytest.raises(ConfigError, match=words):
        check_clipping(_config(**clip))
    with pytest.raises(ConfigError, match=words):
        DetectionTrainer.build_optimizer(_config(**clip), ToyModel())
