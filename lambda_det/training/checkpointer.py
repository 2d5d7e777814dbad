"""The checkpointer writes whole files or none, beside the training, and reads them without running
code.
"""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from detectron2.checkpoint import DetectionCheckpointer
from torch import nn

from lambda_det.errors import WeightsError, listed
from lambda_det.files import TEMPORARY, replace_file, sync_folder
from lambda_det.training.library_errors import writing
from lambda_det.training.run_folder import RunFolder, check_model, iteration_of
from lambda_det.weights.formats import read_torch
from lambda_det.weights.loading import load, read_weights


class SafeCheckpointer(DetectionCheckpointer):
    """Detectron2's checkpointer with four promises.

    Files may hold tensors, arrays, numbers, strings and containers of them; Detectron2 unpickles
    whatever is there, which runs programs hidden in a file. Weights that do not fit are an error
    and leave the model as it was; Detectron2 warns and goes on with random ones. A crash at any
    moment of saving leaves a whole checkpoint and the pointer to one. Saving goes on beside the
    training: ``save`` returns when the state is copied.
    """

    def __init__(
        self, model: nn.Module, save_dir: str = "", *, keep: int | None = None, **others: Any
    ) -> None:
        """
        Args:
            model: to save and load.
            save_dir: the folder of the run.
            keep: how many of the newest checkpoints stay; None for all. Those of earlier processes
                of the same run count, and so does model_final.pth.
            others: objects with a state to save, by name; and ``save_to_disk``, as in Detectron2.
        """
        super().__init__(model, save_dir, **others)
        self.save_to_disk = bool(save_dir) and self.save_to_disk
        self._keep = keep
        # One thread; the process waits for it at its end, so no work is lost then either
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._last: Future[None] | None = None

    # ------------------------------------------------------------------------------------- loading
    def load(self, path: str, *, content: Mapping[str, Any] | None = None) -> None:
        """Load all tensors of the model, and the states beside it.

        When all is loaded from a checkpoint in the run's own folder, the folder's pointer names it
        from then on, because another that it named before may be damaged.

        Args:
            path: of the file.
            content: of the file, where it was already read.

        Raises:
            WeightsError: the file is missing, unreadable, unsafe, or lacks something; model and
                states are unchanged if it lacks a state.
        """
        self.wait()  # it may be the file that is being written
        content = read_weights(path) if content is None else content
        if lacking := sorted(set(self.checkpointables) - content.keys()):
            raise WeightsError(
                f"{path} lacks {listed(lacking)}, the state of the training, so no run can be "
                "resumed from it: start one with these weights in another folder."
            )
        load(self.model, path, content, complete=True, averaged=False)
        for name, item in self.checkpointables.items():
            try:
                item.load_state_dict(content[name])
            except KeyError as error:
                raise WeightsError(
                    f"{path} lacks {error} in the state of its training, which another version of "
                    "lambda_det wrote: continue the run with that version, or start one with these "
                    "weights in another folder."
                ) from error
        folder, name = os.path.split(os.path.abspath(path))
        is_own = self.save_to_disk and folder == os.path.abspath(self.save_dir)
        if is_own and os.path.basename(RunFolder(folder).last) != name:
            RunFolder(folder).point_to(name)

    # -------------------------------------------------------------------------------------- saving
    def save(self, name: str, **extra: Any) -> None:
        """Have model, training state and ``extra``, as they are now, written to NAME.pth.

        A thread writes a temporary file, reads it back, renames it and points last_checkpoint to
        it. Only then it removes older ones; see :meth:`wait`. It waits for a save that is still
        being written. It does nothing without a folder, and on all processes except the first.

        Args:
            name: ``model_`` and seven digits of the iteration, or another, such as model_final.
            extra: plain values; with ``keep``, ``iteration`` says how far the run is.

        Raises:
            DiskError: a checkpoint before this could not be written.
        """
        if not self.save_to_disk:
            return
        self.wait()
        states = {key: item.state_dict() for key, item in self.checkpointables.items()}
        content = io.BytesIO()  # the training goes on with the tensors
        torch.save({"model": self.model.state_dict(), **states, **extra}, content)
        path = self._path(name)
        self.logger.info(f"Saving checkpoint to {path}")
        self._submit(path, lambda: self._write(path, content, extra.get("iteration")))

    def link(self, name: str, other: str) -> None:
        """Give the checkpoint NAME.pth a second name OTHER.pth, once it is on the disk."""
        if self.save_to_disk:
            path, second = self._path(name), self._path(other)
            self._submit(second, lambda: link_file(path, second))

    def _path(self, name: str) -> str:
        return os.path.join(self.save_dir, f"{name}.pth")

    def check(self) -> None:
        """Raise the error of a save that failed; does not wait. Call it after each step.

        Raises:
            DiskError: names file, cause, the last good checkpoint and what to do.
        """
        if self._last is not None and self._last.done():
            self.wait()

    def wait(self) -> None:
        """Return when all that was saved is on the disk.

        Raises:
            DiskError: as in :meth:`check`.
        """
        if self._last is not None:
            self._last.exception()  # an interruption here leaves the error to the next call
            last, self._last = self._last, None
            last.result()

    def _submit(self, path: str, work: Callable[[], object]) -> None:
        """Have work on a file done after all that was submitted before."""
        before = self._last

        def after() -> None:
            if before is not None:
                before.result()  # it is done; this work then fails with the same error
            with writing(path):
                work()

        self._last = self._pool.submit(after)

    def _write(self, path: str, content: io.BytesIO, iteration: int | None) -> None:
        folder, name = RunFolder(self.save_dir), os.path.basename(path)
        folder.remove_temporary_files()
        replace_file(path, lambda file: file.write(content.getbuffer()), check_checkpoint)
        folder.point_to(name)
        if self._keep is not None:
            others = self._keep - (iteration_of(name) < 0)  # the final one has no number
            folder.remove_old(others, iteration)


def check_checkpoint(path: str | Path) -> None:
    """Read a checkpoint of ours from end to end, and keep nothing of it.

    Raises:
        WeightsError: it is damaged, or is something else.
        OSError: it is not there or cannot be read.
    """
    check_model(read_torch(path, mmap=True), path)


def link_file(path: str | Path, link: str | Path) -> None:
    """Give a file a second name, and replace what had that name; copy it where links are
    impossible.
    """
    temporary = Path(f"{link}{TEMPORARY}")
    temporary.unlink(missing_ok=True)
    try:
        os.link(path, temporary)
    except OSError:
        with open(path, "rb") as file:
            replace_file(link, lambda copy: shutil.copyfileobj(file, copy))
    else:
        os.replace(temporary, link)
        temporary.unlink(missing_ok=True)  # which is there if both were names of one file already
        sync_folder(temporary.parent)
