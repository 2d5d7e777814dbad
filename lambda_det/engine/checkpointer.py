"""Checkpoints that are read without running what is in them, and that must fit the model."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Iterable
from typing import Any

from detectron2.checkpoint import DetectionCheckpointer
from detectron2.utils.file_io import PathManager

from lambda_det.errors import WeightsError
from lambda_det.modeling.weights import read_checkpoint

__all__ = ["SafeCheckpointer", "last_checkpoint"]

# What Detectron2's and Caffe2's weight files need; anything else in a pickle may be a program
_PICKLE_GLOBALS = {
    ("collections", "OrderedDict"),
    ("_codecs", "encode"),
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy.core.multiarray", "scalar"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "scalar"),
}

# Layers whose shape depends on the number of classes: they start afresh when the classes change
_CLASS_LAYERS = re.compile(
    r"^(roi_heads\.box_predictor(\.\d+)?\.(cls_score|bbox_pred)"
    r"|roi_heads\.mask_head\.predictor"
    r"|head\.cls_score)\."
)
# Buffers that a model may gain or lose without a change to what it computes
_OPTIONAL = re.compile(r"(num_batches_tracked|^pixel_mean|^pixel_std)$")


def last_checkpoint(folder: str) -> str:
    """Path of the newest checkpoint of a run folder; "" where there is none."""
    try:
        with open(os.path.join(folder, "last_checkpoint")) as file:
            name = file.read().strip()
    except OSError:
        return ""
    return os.path.join(folder, name) if name else ""


class _NumpyUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _PICKLE_GLOBALS:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}")
        return super().find_class(module, name)


class SafeCheckpointer(DetectionCheckpointer):
    """Detectron2's checkpointer with two promises.

    Files may hold tensors, arrays, numbers, strings and containers of them; Detectron2 unpickles
    whatever is there, which runs programs hidden in a file. And weights that do not fit are an
    error, where Detectron2 warns and goes on with random ones.
    """

    def load_everything(self, path: str) -> dict[str, Any]:
        """Load the model and the training state; every tensor of the model must be there.

        Raises:
            WeightsError: the file is missing, unreadable, unsafe, or lacks something; model and
                training state are unchanged if it lacks the training state.
        """
        self._must_be_complete = True
        self._must_hold_training = True
        return self._load(path, None)

    def load_complete_model(self, path: str) -> None:
        """Load the model alone; every tensor of it must be there.

        Raises:
            WeightsError: as in :meth:`load_everything`.
        """
        self._must_be_complete = True
        self._must_hold_training = False
        self._load(path, [])

    def load_initial_weights(self, path: str) -> None:
        """Load what training starts from: at least a part of the backbone must be there.

        Layers made for other classes start afresh; any other difference in shape is an error.

        Raises:
            WeightsError: as in :meth:`load_everything`, or nothing of the backbone fits.
        """
        self._must_be_complete = False
        self._must_hold_training = False
        self._load(path, [])

    def _load(self, path: str, checkpointables: list[str] | None) -> dict[str, Any]:
        self._path = path
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
            return self._load_pickle(filename)
        if filename.endswith(".pyth"):  # of pycls, as Detectron2 has it
            model = self._torch_load(filename).get("model_state", {})
            model = {k: v for k, v in model.items() if not k.endswith("num_batches_tracked")}
            return {"model": model, "__author__": "pycls", "matching_heuristics": True}
        return super()._load_file(filename)

    def _torch_load(self, filename: str) -> dict[str, Any]:
        return read_checkpoint(filename)

    def _load_pickle(self, filename: str) -> dict[str, Any]:
        try:
            with PathManager.open(filename, "rb") as file:
                data = _NumpyUnpickler(file, encoding="latin1").load()
        except OSError:
            raise
        except Exception as error:  # a damaged pickle may raise nearly anything
            raise WeightsError(
                f"{filename} is refused ({error}): a .pkl of weights may hold arrays, numbers, "
                "strings and containers of them alone."
            ) from error
        if not isinstance(data, dict):
            raise WeightsError(f"{filename} holds a {type(data).__name__}, not a state dict.")
        if "model" in data and "__author__" in data:
            return data
        # Caffe2's: detection models keep their tensors under "blobs"
        blobs = data.get("blobs", data)
        model = {k: v for k, v in blobs.items() if not k.endswith("_momentum")}
        return {"model": model, "__author__": "Caffe2", "matching_heuristics": True}

    def _load_model(self, checkpoint: dict[str, Any]) -> Any:
        if self._must_hold_training and "trainer" not in checkpoint:
            raise WeightsError(
                f"{self._path} holds weights alone, without optimiser and iteration, so no run can "
                "be resumed from it: start one with MODEL.WEIGHTS and another OUTPUT_DIR."
            )
        result = super()._load_model(checkpoint)
        names = [name for name in self.model.state_dict() if not _OPTIONAL.search(name)]
        reshaped = {name: (there, here) for name, there, here in result.incorrect_shapes}
        missing = [name for name in names if name in {*result.missing_keys, *reshaped}]
        if self._must_be_complete:
            if missing:
                raise WeightsError(
                    f"{self._path} does not hold the whole model: "
                    f"{_listed(_with_shapes(missing, reshaped))}; is it of the same configuration?"
                )
        else:
            self._check_start(names, missing, reshaped, result.unexpected_keys)
        self.logger.info(
            f"Loaded {len(names) - len(missing)} of the model's {len(names)} tensors from "
            f"{self._path}; start afresh: {_listed(missing)}; "
            f"unused in the file: {_listed(result.unexpected_keys)}"
        )
        return None  # the line above replaces fvcore's tables

    def _check_start(self, names, missing, reshaped, unexpected) -> None:
        wrong = [name for name in reshaped if not _CLASS_LAYERS.match(name)]
        if wrong:
            raise WeightsError(
                f"{self._path} does not fit the model: {_listed(_with_shapes(wrong, reshaped))}."
            )
        backbone = {name for name in names if name.startswith("backbone.")}
        if not (backbone or set(names)) - set(missing):
            raise WeightsError(
                f"Nothing of the backbone is in {self._path}: the model wants "
                f"{_listed([n for n in missing if n in backbone] or missing)}, the file has "
                f"{_listed(unexpected)}."
            )


def _with_shapes(names: Iterable[str], reshaped: dict[str, tuple]) -> list[str]:
    return [
        f"{name} has shape {list(reshaped[name][0])} in the file and {list(reshaped[name][1])} in "
        "the model"
        if name in reshaped
        else f"{name} is missing"
        for name in names
    ]


def _listed(items: list[str], limit: int = 3) -> str:
    if not items:
        return "none"
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more
