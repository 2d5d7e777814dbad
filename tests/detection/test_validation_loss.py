"""The losses on a test set: their means, and that nothing of the training is touched."""

import numpy as np
import pytest
import torch
from detectron2.utils.events import EventStorage, get_event_storage
from torch import nn
from torch.nn.utils import prune

from lambda_det.detection.task import DetectionTask
from lambda_det.detection.validation_loss import mean_losses
from lambda_det.training.precision import Precision
from lambda_det.training.task import RAW
from tests.training.tiny_detector import tiny_config


class _Detector(nn.Module):
    """Has losses in training mode only. They depend on norms, dropout and random numbers."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.head = nn.Sequential(nn.Linear(4, 1), nn.BatchNorm1d(1), nn.Dropout(0.5))

    def forward(self, batch):
        assert self.training and self.head.training
        out = self.head(self.backbone(torch.stack(batch)))
        get_event_storage().put_scalar("drawn", 1.0)
        return {"loss_a": out.square().mean(), "loss_b": torch.rand(()) + out.abs().mean()}


def _scrambled():
    model = _Detector()
    for module in (model.backbone[1], model.head[1]):
        nn.init.uniform_(module.running_mean)
        nn.init.uniform_(module.running_var, 0.5, 2.0)
    return model


@torch.no_grad()
def test_means_over_the_images_without_a_trace():
    model, images = _scrambled(), list(torch.randn(5, 3))
    model.head[2].eval()
    batches = [images[:3], images[3:]]

    def traces():
        modes = [module.training for module in model.modules()]
        state = {name: value.tolist() for name, value in model.state_dict().items()}
        numbers = torch.default_generator.get_state().tolist(), np.random.get_state()[1].tolist()
        return modes, state, numbers

    before = traces()
    with EventStorage() as storage:
        first = mean_losses(model, batches, Precision("cpu", None))
        assert "drawn" not in storage.histories()
    assert traces() == before
    torch.rand(7)
    assert mean_losses(model, batches, Precision("cpu", None)) == first
    # As in a test: with running statistics, and nothing dropped
    out = model.double().eval().head(model.backbone(torch.stack(images).double()))
    assert abs(first["loss_a"] - out.square().mean()) < 1e-6
    assert 0 < first["loss_b"] - out.abs().mean() < 1
    assert abs(first["total_loss"] - first["loss_a"] - first["loss_b"]) < 1e-9
    assert mean_losses(model, [], Precision("cpu", None)) == {}


def test_weights_that_a_hook_computes_are_no_obstacle():
    """PyTorch refuses to copy such a model."""
    model, images = _scrambled(), list(torch.randn(5, 3))
    expected = mean_losses(model, [images], Precision("cpu", None))
    prune.identity(model.head[0], "weight")
    assert mean_losses(model, [images], Precision("cpu", None)) == expected


class _Dense(nn.Module):
    """Draws at steps of a period, and has a mean over its steps, as Detectron2's RetinaNet."""

    def __init__(self):
        super().__init__()
        self.vis_period, self.drawn = 5, 0

    def forward(self, batch):
        self.drawn += self.vis_period > 0 and get_event_storage().iter % self.vis_period == 0
        self.loss_normalizer = 0.9 * getattr(self, "loss_normalizer", 100.0) + 0.1
        return {"loss": torch.tensor(1.0 / self.loss_normalizer)}


@pytest.mark.parametrize("normalizer", [None, 7.0])
def test_nothing_is_drawn_and_the_normalizer_of_the_training_stays(normalizer):
    model = _Dense()
    if normalizer:
        model.loss_normalizer = normalizer
    mean_losses(model, [[0], [1]], Precision("cpu", None))
    assert model.drawn == 0 and model.vis_period == 5
    assert getattr(model, "loss_normalizer", None) == normalizer


def test_an_evaluation_alone_has_no_losses(monkeypatch):
    cfg, asked = tiny_config(), []
    cfg.TEST.LOSS, cfg.DATASETS.TEST = True, ("shapes_val",)
    monkeypatch.setattr(DetectionTask, "_evaluate_on", lambda *args: None)
    monkeypatch.setattr(DetectionTask, "_add_losses", lambda *args: asked.append(args))
    task = DetectionTask(cfg)
    task.evaluate({RAW: nn.Identity()}, final=True)
    assert len(asked) == 1
    task.prepare(train=False).evaluate({RAW: nn.Identity()}, final=True)
    assert len(asked) == 1
