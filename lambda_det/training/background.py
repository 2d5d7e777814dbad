"""Checkpoints that are written beside the training, by a thread."""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from detectron2.checkpoint import DetectionCheckpointer
from torch import nn

from lambda_det.files import replace_file
from lambda_det.training.checkpoint_files import (
    check_checkpoint,
    link_file,
    numbered,
    point_to,
    remove_drafts,
    remove_old,
)
from lambda_det.training.disk_errors import gigabytes, writing
from lambda_det.training.host_copy import host_copy, tensor_bytes
from lambda_det.weights.formats import write_torch

__all__ = ["BackgroundWriter", "SavingCheckpointer"]


class BackgroundWriter:
    """One thread that does one piece of work after the other; after an error, none of the rest."""

    def __init__(self) -> None:
        # Its thread is waited for when the process ends, so no work is lost then either
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._jobs: deque[Future[None]] = deque()
        self._failed = False

    def submit(self, work: Callable[[], object]) -> None:
        """Have ``work`` done after what was submitted before; returns at once."""
        self._jobs.append(self._pool.submit(self._do, work))

    def _do(self, work: Callable[[], object]) -> None:
        if self._failed:
            return
        try:
            work()
        except BaseException:
            self._failed = True
            raise

    def check(self) -> None:
        """Raise what finished work has raised; does not wait."""
        while self._jobs and self._jobs[0].done():
            self._finish(self._jobs.popleft())

    def wait(self) -> None:
        """Return when all is done, or raise what it has raised."""
        while self._jobs:
            self._jobs[0].exception()  # an interruption here leaves it in the list
            self._finish(self._jobs.popleft())

    def _finish(self, job: Future[None]) -> None:
        if error := job.exception():
            for rest in self._jobs:
                rest.exception()
            self._jobs.clear()
            self._failed = False
            raise error


class SavingCheckpointer(DetectionCheckpointer):
    """Detectron2's checkpointer, but that a file is whole before anything relies on it."""

    def __init__(
        self, model: nn.Module, save_dir: str = "", *, keep: int | None = None, **others: Any
    ) -> None:
        """
        Args:
            model: to save and load.
            save_dir: the folder of the run.
            keep: numbered checkpoints that stay, the newest; None for all. Those of earlier
                processes of the same run count.
            others: what has a state to save, by name; and ``save_to_disk``, as in Detectron2.
        """
        super().__init__(model, save_dir, **others)
        self._keep = keep
        self._writer = BackgroundWriter()
        self._warned = False

    def save(self, name: str, **extra: Any) -> None:
        """Copy model, training state and ``extra``, and have them written to NAME.pth.

        A thread writes a draft, reads it back, gives it its name, points last_checkpoint to it and
        only then removes older ones; see :meth:`wait`. A save that is still being written is waited
        for. Does nothing without a folder, or on any process but the first.

        Args:
            name: ``model_`` and seven digits of the iteration, or another, such as model_final.
            extra: plain values. ``iteration`` says how far the run is where the name does not.

        Raises:
            DiskError: a checkpoint before this could not be written.
        """
        if not self.save_dir or not self.save_to_disk:
            return
        self.wait()
        content = host_copy({"model": self.model.state_dict(), **self._states(), **extra})
        self.logger.info(f"Saving checkpoint to {os.path.join(self.save_dir, name)}.pth")
        self._writer.submit(lambda: self._write(name, content))

    def link(self, name: str, other: str) -> None:
        """Give the checkpoint NAME.pth a second name OTHER.pth, once it is on the disk."""
        if not self.save_dir or not self.save_to_disk:
            return
        path, second = (os.path.join(self.save_dir, f"{n}.pth") for n in (name, other))

        def work() -> None:
            with writing(second):
                link_file(path, second)

        self._writer.submit(work)

    def check(self) -> None:
        """Raise the error of a save that failed; does not wait. Call it after each step.

        Raises:
            DiskError: names file, cause, the last good checkpoint and what to do.
        """
        self._writer.check()

    def wait(self) -> None:
        """Return when all that was saved is on the disk.

        Raises:
            DiskError: as in :meth:`check`.
        """
        self._writer.wait()

    def _states(self) -> dict[str, Any]:
        return {key: item.state_dict() for key, item in self.checkpointables.items()}

    def _write(self, name: str, content: dict[str, Any]) -> None:
        path, size = os.path.join(self.save_dir, f"{name}.pth"), tensor_bytes(content)
        with writing(path, size):
            remove_drafts(self.save_dir)
            replace_file(path, lambda file: write_torch(content, file), check_checkpoint)
            self.tag_last_checkpoint(f"{name}.pth")
            iteration = content.get("iteration")
            if numbers := re.fullmatch(r"model_(\d{7,})", name):
                iteration = int(numbers[1])
            if self._keep is not None and iteration is not None:
                remove_old(self.save_dir, self._keep, iteration)
        self._warn_of_little_space(os.path.getsize(path))

    def tag_last_checkpoint(self, last_filename_basename: str) -> None:
        """Let last_checkpoint name the newest checkpoint."""
        point_to(self.save_dir, last_filename_basename)

    def warn_of_little_space(self) -> None:
        """Warn, once, if the disk has no room for the checkpoints to come; call it at the start.

        What an optimiser will keep is reckoned along with what it has.
        """
        if self.save_dir and self.save_to_disk:
            states = self._states()
            size = tensor_bytes([self.model.state_dict(), states]) + _momenta(self.model, states)
            self._warn_of_little_space(size)

    def _warn_of_little_space(self, size: int) -> None:
        # Besides those that stay, a draft and the best of a run that is no longer among them
        count = 2 + (self._keep or 1)
        wanted = size * max(count - len(numbered(self.save_dir)), 1)
        try:
            free = shutil.disk_usage(self.save_dir).free
        except OSError:
            return
        if free < wanted and not self._warned:
            self._warned = True
            logging.getLogger(__name__).warning(
                f"The checkpoints of this run will take {gigabytes(wanted)} more, and only "
                f"{gigabytes(free)} are free in {self.save_dir}: free some space, or keep fewer"
            )


def _momenta(model: nn.Module, states: Mapping[str, Any]) -> int:
    """Bytes that an optimiser without a state yet will have after its first step."""
    for state in states.values():
        for part in (state, *(v for v in state.values() if isinstance(v, Mapping))):
            optimizer = part.get("optimizer") or {}
            groups = optimizer.get("param_groups") or [{}]
            if optimizer.get("state") == {} and any(k in groups[0] for k in ("betas", "momentum")):
                sizes = (p.numel() * p.element_size() for p in model.parameters())
                return sum(sizes) * (2 if "betas" in groups[0] else 1)
    return 0
