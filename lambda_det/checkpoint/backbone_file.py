"""A backbone out of a checkpoint, as a file that Detectron2's own checkpointer can load, too."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lambda_det
from lambda_det.checkpoint.folding import fold_normalisation
from lambda_det.errors import ConfigError, WeightsError, listed
from lambda_det.files import replace_file
from lambda_det.modeling import Classifier, create_classifier
from lambda_det.modeling.provenance import (
    AUTHOR,
    FORMAT,
    PixelSettings,
    check_provenance,
    checksum,
    wanted_pixels,
)
from lambda_det.modeling.weight_names import compare, is_counter, tensors_only
from lambda_det.modeling.weights import read_checkpoint

__all__ = ["extract_backbone", "read_backbone", "save_backbone"]

_CLASSIFIER = "backbone."
_DETECTOR = "backbone.bottom_up."
_RECIPE = ("model", "options", "num_classes", "input_format", "pixel_mean", "pixel_std")
_RESULTS = {"ema": "ema", "model": "raw"}  # as the results of each are called in a checkpoint


def extract_backbone(
    checkpoint: Mapping[str, Any],
    *,
    weights: str | None = None,
    fold_input: bool = True,
    source: str = "the checkpoint",
) -> dict[str, Any]:
    """Make the content of a backbone file.

    Args:
        checkpoint: of a classifier, as ``tools/train_imagenet.py`` writes it, or of a detector with
            FPN, whose images are those of its configuration.
        weights: "ema" or "model"; None for "ema" where there is one.
        fold_input: make the first convolution take images as Detectron2's default configuration has
            them: BGR, less their mean, not divided. The configuration's mean is right for a recipe
            with ImageNet's mean.
        source: what to call the checkpoint in messages.

    Returns:
        ``model``: float32 tensors by the backbone's own names, running statistics included, without
        counters and without the classifier's last layer. ``meta``: plain values, among them the
        pixel settings that the tensors want, None where they are not known. ``__author__`` and
        ``matching_heuristics`` let Detectron2 find the tensors' places.

    Raises:
        WeightsError: the checkpoint is of no kind that is known or was wrapped, is not complete,
            was never trained, or has no such weights.
    """
    if "meta" in checkpoint:
        raise WeightsError(f"{source} is a backbone file already; name the checkpoint it is from.")
    chosen, state = _weights_of(checkpoint, weights, source)
    if isinstance(checkpoint.get("recipe"), Mapping):
        model = _classifier_of(checkpoint, source)
        meta = {
            name: checkpoint["recipe"][name]
            for name in ("model", "options", "input_format", "pixel_mean", "pixel_std")
        }
        _check_classifier(model, state, source)
        state = _part(state, _CLASSIFIER)
        if fold_input:
            state, pixels = fold_normalisation(model.backbone, state, wanted_pixels({"meta": meta}))
            meta |= _pixel_meta(pixels)
        meta["recipe"] = checkpoint["recipe"].get("config", "")
    elif any(name.startswith(_DETECTOR) for name in state):
        state, fold_input = _part(state, _DETECTOR), False
        unknown = ("model", "options", "input_format", "pixel_mean", "pixel_std", "recipe")
        meta = dict.fromkeys(unknown)
    else:
        raise WeightsError(
            f"{source} is no checkpoint of a classifier or of a detector with FPN that lambda_det "
            f"knows: its tensors are {listed(state)}; save the model itself and not a wrapper."
        )
    _check_trained(state, source)
    results = checkpoint.get("results", {})
    meta |= {
        "weights": chosen,
        "folded": fold_input,
        "accuracy": {
            part: dict(by_weights[_RESULTS[chosen]])
            for part, by_weights in results.items()
            if _RESULTS[chosen] in by_weights
        },
        # "precise": taken afresh for these weights; "running": averages of the training, which lag
        "statistics": checkpoint.get("statistics"),
        "sha256": checksum(state),
        "format": FORMAT,
        "lambda_det": lambda_det.__version__,
    }
    return {"model": state, "__author__": AUTHOR, "matching_heuristics": True, "meta": meta}


def _weights_of(
    checkpoint: Mapping[str, Any], weights: str | None, source: str
) -> tuple[str, dict[str, Tensor]]:
    """The weights of a checkpoint that are meant, "ema" or "model", and their state dict.

    Raises:
        WeightsError: it has none of them.
    """
    chosen = weights or ("ema" if "ema" in checkpoint else "model")
    holder = checkpoint.get("ema") if chosen == "ema" else checkpoint
    if not isinstance(holder, Mapping) or "model" not in holder:
        held = [name for name in ("ema", "model") if name in checkpoint]
        raise WeightsError(f"{source} has no {chosen!r} weights; it has {listed(held)}.")
    return chosen, tensors_only(holder["model"], source)


def _classifier_of(checkpoint: Mapping[str, Any], source: str) -> Classifier:
    """The classifier that a checkpoint's recipe names, without values.

    Raises:
        WeightsError: this version of lambda_det cannot make it.
    """
    recipe = checkpoint["recipe"]
    lacking = [name for name in _RECIPE if name not in recipe]
    if lacking:
        raise WeightsError(f"The recipe in {source} lacks {listed(lacking)}; it cannot be used.")
    try:
        with torch.device("meta"):
            return create_classifier(recipe["model"], recipe["num_classes"], **recipe["options"])
    except (ConfigError, TypeError) as error:  # an option that is not there any more
        raise WeightsError(
            f"{source} is of a model that cannot be made here: {' '.join(str(error).split())}"
        ) from error


def _check_classifier(model: Classifier, state: Mapping[str, Tensor], source: str) -> None:
    fit = compare(model.state_dict(), state)
    if not fit:
        raise WeightsError(
            f"{source} does not hold the classifier that its recipe names: {fit.summary()}; save "
            "the model itself and not a wrapper."
        )


def _part(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The backbone's tensors, each with memory of its own."""
    return {
        name.removeprefix(prefix): tensor.detach()
        .float()
        .clone(memory_format=torch.contiguous_format)
        for name, tensor in state.items()
        if name.startswith(prefix)
        and not name.startswith(f"{prefix}linear.")
        and not is_counter(name)
    }


def _check_trained(state: Mapping[str, Tensor], source: str) -> None:
    broken = [name for name, tensor in state.items() if not tensor.isfinite().all()]
    if broken:
        raise WeightsError(f"{source} holds NaN or infinity in {listed(broken)}; take another one.")
    for name, var in state.items():
        mean = state.get(f"{name.removesuffix('running_var')}running_mean")
        if not name.endswith("running_var") or mean is None:
            continue
        # A frozen norm starts with 1 - eps
        if not mean.any() and torch.allclose(var, torch.ones_like(var), rtol=0, atol=1e-4):
            raise WeightsError(
                f"The statistics {name} in {source} are as they were at the start, all 0 and 1: "
                "these weights were never trained, or their statistics never estimated."
            )


def _pixel_meta(pixels: PixelSettings) -> dict[str, Any]:
    return {
        "input_format": pixels.format,
        "pixel_mean": list(pixels.mean),
        "pixel_std": list(pixels.std),
    }


def save_backbone(content: Mapping[str, Any], path: str | Path, *, overwrite: bool = False) -> None:
    """Write a backbone file, at once or not at all.

    Args:
        content: of :func:`extract_backbone`.
        path: ends in .pth, by which Detectron2 knows the format.
        overwrite: replace a file that is there.

    Raises:
        ConfigError: the name is not one to write to.
    """
    path = Path(path)
    if path.suffix != ".pth":
        raise ConfigError(f"The backbone file {path} must have a name that ends in .pth.")
    if path.is_dir() or (path.exists() and not overwrite):
        raise ConfigError(f"{path} is there already; give another name, or --overwrite.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, lambda file: torch.save(dict(content), file))
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}.") from error


def read_backbone(path: str | Path) -> dict[str, Any]:
    """Read a file of :func:`save_backbone`.

    Raises:
        WeightsError: it cannot be read, is another file, or is not what was written.
    """
    content = read_checkpoint(path)
    if content.get("__author__") != AUTHOR or "meta" not in content:
        raise WeightsError(
            f"{path} is no backbone file of lambda_det; tools/export_backbone.py makes one from a "
            "checkpoint."
        )
    check_provenance(content, path)
    return content
