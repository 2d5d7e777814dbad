"""Hooks in which Detectron2's need a change."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

from detectron2.engine import HookBase
from detectron2.engine.hooks import PeriodicWriter
from detectron2.utils.events import CommonMetricPrinter, JSONWriter, TensorboardXWriter

from lambda_det.engine.run_folder import cut_metrics

__all__ = ["RunWriter", "batches_with_objects"]


class RunWriter(HookBase):
    """Progress on the screen, metrics.json and TensorBoard, from the iteration that begins.

    Detectron2 opens the files when the trainer is made, before a resumed run knows where it
    begins, so iterations computed twice stay in them twice.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._hook: PeriodicWriter | None = None

    def before_train(self) -> None:
        first = self.trainer.start_iter
        cut_metrics(self._folder, first)
        writers = [
            CommonMetricPrinter(self.trainer.max_iter),
            JSONWriter(os.path.join(self._folder, "metrics.json")),
            TensorboardXWriter(self._folder, purge_step=first),
        ]
        self._hook = PeriodicWriter(writers)
        self._hook.trainer = self.trainer

    def after_step(self) -> None:
        self._hook.after_step()

    def after_train(self) -> None:
        self._hook.after_train()


def batches_with_objects(loader: Iterable[list[dict[str, Any]]]) -> Iterator[list[dict[str, Any]]]:
    """The batches of ``loader`` that hold an object, for precise batch norm.

    A head sees no box in the others, and fvcore's estimate then divides by zero.
    """
    return (batch for batch in loader if any(len(image["instances"]) for image in batch))
