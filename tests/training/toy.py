"""A model small enough to train in a moment, for the tests of the training step."""

import logging
from dataclasses import dataclass

import torch
from detectron2.utils.events import EventStorage
from torch import nn

from lambda_det.training.log import BufferedLog
from lambda_det.training.precision import Precision
from lambda_det.training.settings import Settings
from lambda_det.training.step import TrainStep
from lambda_det.training.task import Task

FLOAT32 = Precision("cpu", None)


class ToyModel(nn.Module):
    """Two linear layers; each loss is a mean over the batch, as accumulation assumes.

    Takes a list of dicts with "x" [4] and "y" []; returns two losses. "offset" is added to the
    first of them and has no gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, batch: list[dict]) -> dict[str, torch.Tensor]:
        x = torch.stack([item["x"] for item in batch])
        y = torch.stack([item["y"] for item in batch])
        out = self.layers(x)[:, 0]
        offset = sum(item.get("offset", 0.0) for item in batch)
        return {"loss_fit": (out - y).square().mean() + offset, "loss_size": 0.1 * out.abs().mean()}


def weights(model: nn.Module) -> torch.Tensor:
    """All weights in one vector, which later steps leave as it is."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def items(count: int, seed: int = 0) -> list[dict]:
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "x": torch.randn(4, generator=generator),
            "y": torch.randn((), generator=generator),
        }
        for _ in range(count)
    ]


def batches(data: list[dict], size: int) -> list[list[dict]]:
    return [data[i : i + size] for i in range(0, len(data), size)]


@dataclass
class Named:
    """What a training step asks of a task."""

    settings: Settings
    advice: str = Task.advice
    image_names = Task.image_names
    smaller_batches = Task.smaller_batches


class Steps(TrainStep):
    """A training step with the batches that it takes, by SGD on the CPU."""

    def __init__(
        self,
        model,
        batches,
        optimizer=None,
        precision=FLOAT32,
        seed=0,
        last_checkpoint=str,
        debug_numerics=False,
        **changes,
    ) -> None:
        optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        super().__init__(
            model,
            optimizer,
            Named(settings(**changes)),
            seed=seed,
            last_checkpoint=last_checkpoint,
            debug_numerics=debug_numerics,
        )
        self.precision, self.grad_scaler = precision, precision.grad_scaler()
        self.batches = iter(batches)
        self.iter = 0

    def run_step(self) -> None:
        self.run(self.batches, self.iter)

    def take(self, steps: range) -> EventStorage:
        """Take these steps; what they recorded."""
        with EventStorage(steps.start) as storage:
            for self.iter in steps:
                storage.iter = self.iter
                self.run_step()
        return storage


def settings(**changes) -> Settings:
    """Settings of a short run on the CPU."""
    usual = {"output_dir": "run", "device": "cpu", "seed": 0, "weights": "", "max_iter": 6}
    return Settings(**{**usual, "images_per_step": 2, **changes})


def let_logs_reach_pytest(monkeypatch):
    """The log of a run keeps to its own handlers, which caplog is none of."""
    opened = BufferedLog.open

    def open_and_propagate(log, folder):
        opened(log, folder)
        for name in ("fvcore", "detectron2", "lambda_det"):
            logging.getLogger(name).propagate = True

    monkeypatch.setattr(BufferedLog, "open", open_and_propagate)
