"""Checkpoints that are read without running what is in them, and that must fit the model."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from detectron2.checkpoint.c2_model_loading import (
    align_and_update_state_dicts,
    convert_c2_detectron_names,
)
from torch import Tensor

from lambda_det.errors import WeightsError
from lambda_det.training.background import SavingCheckpointer
from lambda_det.training.checkpoint_files import last_checkpoint, newest_good
from lambda_det.weights.formats import read_checkpoint
from lambda_det.weights.names import (
    backbone_prefixes,
    bare_name,
    compare,
    fitting,
    is_counter,
    listed,
    named_as_in,
    tensors_only,
)
from lambda_det.weights.provenance import (
    PixelSettings,
    check_provenance,
    initial_weights,
    wanted_pixels,
)

__all__ = ["SafeCheckpointer", "last_checkpoint", "newest_good"]

# Layers whose shape depends on the number of classes: they start afresh when the classes change
_CLASS_LAYERS = re.compile(
    r"^(roi_heads\.box_predictor(\.\d+)?\.(cls_score|bbox_pred)"
    r"|roi_heads\.mask_head\.(predictor|coarse_head\.prediction|point_head\.\w+)"
    r"|roi_heads\.keypoint_head\.score_lowres"
    r"|sem_seg_head\.predictor"
    r"|head\.cls_score"
    r"|(backbone\.)?linear)\."
)
# Set from the configuration; not in checkpoints of today's Detectron2
_PIXEL_BUFFERS = ("pixel_mean", "pixel_std")


def _fill_res5_heads(own: Mapping[str, Tensor], state: dict[str, Tensor]) -> None:
    """Let the C4 layout, whose res5 is in its heads, have that of a backbone or classifier."""
    for name in list(state):
        head = f"roi_heads.{bare_name(name)}"
        if head.startswith("roi_heads.res5.") and name not in own and head in own:
            state.setdefault(head, state.pop(name))


class SafeCheckpointer(SavingCheckpointer):
    """Detectron2's checkpointer with four promises.

    Files may hold tensors, arrays, numbers, strings and containers of them; Detectron2 unpickles
    whatever is there, which runs programs hidden in a file. Weights that do not fit are an error,
    and leave the model as it was, where Detectron2 warns and goes on with random ones. A crash at
    any moment of saving leaves a whole checkpoint, and the pointer to one. And saving goes on
    beside the training: ``save`` returns when the state is copied.
    """

    def load_everything(self, path: str) -> dict[str, Any]:
        """Load the model and the training state; every tensor of the model must be there.

        The pointer of the run's folder names the file from then on, since one that it named before
        may be damaged.

        Raises:
            WeightsError: the file is missing, unreadable, unsafe, or lacks something; model and
                training state are unchanged if it lacks the training state.
        """
        self._must_be_complete = True
        self._must_hold_training = True
        rest = self._load(path, None)
        folder, name = os.path.split(os.path.abspath(path))
        named = os.path.basename(last_checkpoint(folder))
        own = self.save_dir and folder == os.path.abspath(self.save_dir)
        if own and self.save_to_disk and named != name:
            self.tag_last_checkpoint(name)
        return rest

    def load_complete_model(self, path: str) -> None:
        """Load the model alone; every tensor of it must be there.

        Raises:
            WeightsError: as in :meth:`load_everything`.
        """
        self._must_be_complete = True
        self._must_hold_training = False
        self._load(path, [])

    def load_initial_weights(self, path: str, pixels: PixelSettings | None = None) -> None:
        """Load what training starts from: every tensor of the backbone must be there.

        That includes running statistics. The file may be of a backbone, a classifier, whose
        averaged weights are taken if it has them, or a detector; see
        :func:`lambda_det.weights.names.bare_name` for the names. FPN and heads, and layers
        made for other classes, start afresh where the file does not hold them; any other difference
        in shape is an error.

        Args:
            path: of the file.
            pixels: what the model makes of images, to compare with what the file says, if anything.

        Raises:
            WeightsError: as in :meth:`load_everything`, or the backbone is not complete.
            ConfigError: the weights are for images of other ``pixels``.
        """
        self._must_be_complete = False
        self._must_hold_training = False
        self._pixels = pixels
        self._load(path, [])

    def _load(self, path: str, checkpointables: list[str] | None) -> dict[str, Any]:
        self._path = path
        self.wait()  # it may be the file that is being written
        try:
            return self.load(path, checkpointables)
        except (OSError, AssertionError) as error:
            # AssertionError is fvcore's way to say that there is no such file
            raise WeightsError(
                f"The weights {path} cannot be read ({error or type(error).__name__}); check "
                "MODEL.WEIGHTS, or with --resume the name in last_checkpoint beside it."
            ) from error
        finally:
            self._parsed_url_during_load = None  # Detectron2 leaves it behind after an error

    def _load_file(self, filename: str) -> dict[str, Any]:
        if filename.endswith(".pkl"):
            return read_checkpoint(filename)
        if filename.endswith(".pyth"):  # of pycls, as Detectron2 has it
            model = self._torch_load(filename).get("model_state", {})
            return {"model": model, "__author__": "pycls", "matching_heuristics": True}
        return super()._load_file(filename)

    def _torch_load(self, filename: str) -> dict[str, Any]:
        return read_checkpoint(filename)

    def _load_model(self, checkpoint: dict[str, Any]) -> None:
        wanted = {"trainer", *self.checkpointables} if self._must_hold_training else set()
        if lacking := sorted(wanted - checkpoint.keys()):
            raise WeightsError(
                f"{self._path} lacks {listed(lacking)}, the state of the training, so no run can "
                "be resumed from it: start one with MODEL.WEIGHTS and another OUTPUT_DIR."
            )
        check_provenance(checkpoint, self._path)
        own = self.model.state_dict()
        names = [name for name in own if not is_counter(name) and name not in _PIXEL_BUFFERS]
        if self._must_be_complete:
            which = "the weights"
            state = self._named_as_here(own, None, checkpoint["model"], checkpoint)
            self._check_complete({name: own[name] for name in names}, state)
        else:
            weights, which = initial_weights(checkpoint)
            prefixes = backbone_prefixes(self.model)
            # Of several backbones, each must be in the file under its own name
            prefix = prefixes[0] if len(prefixes) == 1 else None
            state = self._named_as_here(own, prefix, weights, checkpoint)
            _fill_res5_heads(own, state)
            self._check_start({name: own[name] for name in names}, state, prefixes)
            if self._pixels is not None:
                self._pixels.check(wanted_pixels(checkpoint), self._path)
        loaded = fitting(own, state)
        self.model.load_state_dict(loaded, strict=False)
        self.logger.info(
            f"Loaded {sum(name in loaded for name in names)} of the model's {len(names)} tensors "
            f"from {which} of {self._path}; start afresh: "
            f"{listed(name for name in names if name not in loaded)}; unused in the file: "
            f"{listed(name for name in state if name not in loaded and not is_counter(name))}"
        )
        # No return value: the line above replaces fvcore's tables

    def _named_as_here(
        self,
        own: Mapping[str, Tensor],
        prefix: str | None,
        weights: Any,
        checkpoint: Mapping[str, Any],
    ) -> dict[str, Tensor]:
        """The weights of the file by the names of the model, as far as it has them."""
        state = tensors_only(weights, self._path)
        if checkpoint.get("__author__") == "Caffe2" and not any("." in name for name in state):
            # Only Caffe2's own names: the conversion would spoil running_mean
            state, _ = convert_c2_detectron_names(state)
        state = named_as_in(own, prefix, state, self._path)
        if not checkpoint.get("matching_heuristics"):
            return state
        # Detectron2's search by the ends of names, for what is not found under its whole name, such
        # as the res5 of a backbone in the heads of a C4 detector
        free = {name: tensor for name, tensor in own.items() if name not in state}
        left = {name: state.pop(name) for name in list(state) if name not in own}
        if not (free and left):
            return {**state, **left}
        try:
            left = align_and_update_state_dicts(free, left, c2_conversion=False)
        except ValueError as error:
            raise WeightsError(
                f"{self._path} is ambiguous: a tensor in it fits several places in the model by "
                "its name; give the whole names in the file."
            ) from error
        return {**state, **left}

    def _check_complete(self, own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        fit = compare(own, state)
        # Tensors too many, too: those of a deeper network are a superset with equal shapes
        fit = replace(fit, unexpected=[n for n in fit.unexpected if n not in _PIXEL_BUFFERS])
        if not fit:
            raise WeightsError(
                f"{self._path} does not hold this model and no other: {listed(fit.sentences())}; "
                "is it of the same configuration?"
            )

    def _check_start(
        self, own: Mapping[str, Tensor], state: Mapping[str, Tensor], prefixes: list[str]
    ) -> None:
        own = {name: tensor for name, tensor in own.items() if not _CLASS_LAYERS.match(name)}
        for prefix in prefixes:
            fit = compare(own, state, prefix)
            if len(fit.missing) == fit.wanted:
                raise WeightsError(
                    f"Nothing of the backbone is in {self._path}: the model wants "
                    f"{listed(fit.missing)}, the file has {listed(state)}."
                )
            if not fit:
                raise WeightsError(
                    f"{self._path} does not hold this backbone, and training would start from a "
                    f"network that is partly random: {fit.summary()}; check MODEL.WEIGHTS and the "
                    "name and options of the backbone."
                )
        fit = compare(own, state)
        if fit.reshaped:
            wrong = replace(fit, missing=(), unexpected=()).sentences()
            raise WeightsError(f"{self._path} does not fit the model: {listed(wrong)}.")
