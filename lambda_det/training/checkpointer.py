"""The checkpointer: whole files or none, written beside the training and read without running."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from detectron2.checkpoint import DetectionCheckpointer
from torch import nn

from lambda_det.errors import WeightsError, listed
from lambda_det.files import replace_file
from lambda_det.training.background import BackgroundWriter, host_copy
from lambda_det.training.checkpoint_files import (
    check_checkpoint,
    last_checkpoint,
    link_file,
    point_to,
    remove_drafts,
    remove_old,
)
from lambda_det.training.library_errors import writing
from lambda_det.weights.formats import write_torch
from lambda_det.weights.loading import load_complete_model, load_initial_weights, read_weights
from lambda_det.weights.provenance import PixelSettings

__all__ = ["SafeCheckpointer"]


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
            keep: numbered checkpoints that stay, the newest; None for all. Those of earlier
                processes of the same run count.
            others: what has a state to save, by name; and ``save_to_disk``, as in Detectron2.
        """
        super().__init__(model, save_dir, **others)
        self._keep = keep
        self._writer = BackgroundWriter()

    # ------------------------------------------------------------------------------------- loading
    def load(
        self,
        path: str,
        checkpointables: list[str] | None = None,
        *,
        content: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Load the model, every tensor of which must be there, and states beside it.

        When all is loaded from a checkpoint in the run's own folder, the folder's pointer names
        it from then on: one that it named before may be damaged.

        Args:
            path: of the file.
            checkpointables: names of the states to load; None for all, [] for only the model.
            content: of the file, where it was read already.

        Returns:
            What else is in the file.

        Raises:
            WeightsError: the file is missing, unreadable, unsafe, or lacks something; model and
                states are unchanged if it lacks a state.
        """
        self.wait()  # it may be the file that is being written
        content = dict(read_weights(path) if content is None else content)
        wanted = list(self.checkpointables if checkpointables is None else checkpointables)
        if lacking := sorted(set(wanted) - content.keys()):
            raise WeightsError(
                f"{path} lacks {listed(lacking)}, the state of the training, so no run can be "
                "resumed from it: start one with these weights in another folder."
            )
        load_complete_model(self.model, content, path)
        for name in wanted:
            self.checkpointables[name].load_state_dict(content.pop(name))
        if checkpointables is None:
            self._point_to_own(path)
        return {name: value for name, value in content.items() if name != "model"}

    def load_initial_weights(self, path: str, pixels: PixelSettings | None = None) -> None:
        """Load what training starts from; see :func:`lambda_det.weights.loading`.

        Args:
            path: of a file or a URL.
            pixels: what the model makes of images, to compare with what the file says, if anything.

        Raises:
            WeightsError: the file cannot be read, or the backbone in it is not complete.
            ConfigError: the weights are for images of other ``pixels``.
        """
        load_initial_weights(self.model, read_weights(path), path, pixels)

    def _point_to_own(self, path: str) -> None:
        folder, name = os.path.split(os.path.abspath(path))
        own = self.save_dir and folder == os.path.abspath(self.save_dir)
        if own and self.save_to_disk and os.path.basename(last_checkpoint(folder)) != name:
            point_to(folder, name)

    # -------------------------------------------------------------------------------------- saving
    def save(self, name: str, **extra: Any) -> None:
        """Copy model, training state and ``extra``, and have them written to NAME.pth.

        A thread writes a draft, reads it back, gives it its name, points last_checkpoint to it and
        only then removes older ones; see :meth:`wait`. A save that is still being written is waited
        for. Does nothing without a folder, or on any process but the first.

        Args:
            name: ``model_`` and seven digits of the iteration, or another, such as model_final.
            extra: plain values; with ``keep``, ``iteration`` says how far the run is.

        Raises:
            DiskError: a checkpoint before this could not be written.
        """
        if not self.save_dir or not self.save_to_disk:
            return
        self.wait()
        states = {key: item.state_dict() for key, item in self.checkpointables.items()}
        content = host_copy({"model": self.model.state_dict(), **states, **extra})
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

    def _write(self, name: str, content: dict[str, Any]) -> None:
        path = os.path.join(self.save_dir, f"{name}.pth")
        with writing(path):
            remove_drafts(self.save_dir)
            replace_file(path, lambda file: write_torch(content, file), check_checkpoint)
            point_to(self.save_dir, f"{name}.pth")
            if self._keep is not None:
                remove_old(self.save_dir, self._keep, content["iteration"])
