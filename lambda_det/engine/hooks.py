"""Hooks in which Detectron2's need a change."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

from detectron2.engine import HookBase
from detectron2.engine.hooks import PeriodicWriter
from detectron2.utils.events import (
    CommonMetricPrinter,
    EventWriter,
    JSONWriter,
    TensorboardXWriter,
)

from lambda_det.engine.run_folder import cut_metrics

__all__ = ["RunWriter", "batches_with_objects"]


class RunWriter(HookBase):
    """Progress on the screen, metrics.json and TensorBoard, from the iteration that begins.

    Detectron2 opens the files when the trainer is made, before a resumed run knows where it
    begins, so iterations computed twice stay in them twice.
    """

    def __init__(
        self, folder: str, *, printer: EventWriter | None = None, period: int = 20
    ) -> None:
        """
        Args:
            folder: of the run.
            printer: shows the progress, in place of Detectron2's.
            period: steps between two records.
        """
        self._folder = folder
        self._printer = printer
        self._period = period
        self._hook: PeriodicWriter | None = None

    def before_train(self) -> None:
        first = self.trainer.start_iter
        cut_metrics(self._folder, first)
        writers = [
            self._printer or CommonMetricPrinter(self.trainer.max_iter),
            JSONWriter(os.path.join(self._folder, "metrics.json")),
            TensorboardXWriter(self._folder, purge_step=first),
        ]
        self._hook = PeriodicWriter(writers, self._period)
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
