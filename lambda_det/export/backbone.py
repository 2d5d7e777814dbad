"""A backbone out of a checkpoint of any kind, as a file that gets its name once it is verified."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode
from omegaconf import DictConfig
from torch import Tensor

import lambda_det
from lambda_det.errors import ConfigError, WeightsError, listed, reason
from lambda_det.export.identify import Network, fits, identify
from lambda_det.export.verify import Report, verify_backbone
from lambda_det.modeling import Classifier, create_backbone, create_classifier
from lambda_det.modeling.specs import STAGES
from lambda_det.weights.backbone_file import check_target, fold_normalisation, save_backbone
from lambda_det.weights.names import compare, is_counter, named_as_in, tensors_only
from lambda_det.weights.provenance import (
    AUTHOR,
    FORMAT,
    PixelSettings,
    check_provenance,
    checksum,
    in_words,
    wanted_pixels,
)

__all__ = [
    "export_backbone",
    "extract_backbone",
    "says_network",
]

_RECIPE = ("model", "options", "num_classes", "input_format", "pixel_mean", "pixel_std")
_RESULTS = {"ema": "ema", "model": "raw"}  # as the results of each are called in a checkpoint
# Where the networks are in models, by the beginning of their tensors' names; the first that is
# there counts. C4 detectors have the last stage in their heads.
_PLACES = ("backbone.bottom_up.", "backbone.", "")
_STAGE_IN_HEADS = "roi_heads.res5."
_PARTS = ("stem", *STAGES)


def extract_backbone(
    checkpoint: Mapping[str, Any],
    *,
    weights: str | None = None,
    fold_input: bool = True,
    network: Network | None = None,
    source: str = "the checkpoint",
) -> dict[str, Any]:
    """Make the content of a backbone file.

    Args:
        checkpoint: of a classifier, as ``tools/train_imagenet.py`` writes it, whose recipe says
            which network it is of; of a detector, with FPN or without, whose images are those of
            its configuration; of a backbone; or the state dict of one of them.
        weights: "ema" or "model"; None for "ema" where there is one.
        fold_input: make the first convolution of a classifier take images as Detectron2's default
            configuration has them: BGR, less their mean, not divided. The configuration's mean is
            right for a recipe with ImageNet's mean. Detectors' stay as they are.
        network: of a detector, as :func:`lambda_det.weights.network_of_config` finds it; None to
            find it by its tensors.
        source: what to call the checkpoint in messages.

    Returns:
        ``model``: float32 tensors by the backbone's own names, running statistics included, without
        counters and without the classifier's last layer. ``meta``: plain values, among them the
        network and the pixel settings that the tensors want, None where they are not known.
        ``__author__`` and ``matching_heuristics`` let Detectron2 find the tensors' places.

    Raises:
        WeightsError: the checkpoint is of no network that is known, is not complete, was never
            trained, or has no such weights.
    """
    if _is_backbone_file(checkpoint):
        return _of_backbone_file(checkpoint, weights, fold_input, source)
    chosen, state = _weights_of(checkpoint, weights, source)
    recipe = checkpoint.get("recipe")
    if isinstance(recipe, Mapping):
        network, model = _network_of_recipe(recipe, source)
        _check_classifier(model, state, source)
        state = _backbone_part(state, source)
        if fold_input:
            state, pixels = fold_normalisation(model.backbone, state, network.pixels)
            network = replace(network, pixels=pixels)
    else:
        fold_input = False
        part = _backbone_part(state, source)
        from_heads = any(name.startswith(_STAGE_IN_HEADS) for name in state)
        try:
            state, network = part, _checked(part, network, source)
        except WeightsError:
            if not from_heads:
                raise
            # Detectron2's C4 heads have a res5 of convolutions, whatever the backbone is
            state = {name: tensor for name, tensor in part.items() if not name.startswith("res5.")}
            network = _checked(state, network, source)
    _check_trained(state, source)
    meta = {
        "model": network.model,
        "options": dict(network.options),
        "stages": [part for part in _PARTS if any(n.startswith(f"{part}.") for n in state)],
        **_pixel_meta(network.pixels),
        "recipe": recipe.get("config", "") if isinstance(recipe, Mapping) else None,
        "known_from": network.known_from,
        "weights": chosen,
        "folded": fold_input,
        "accuracy": _accuracy(checkpoint, chosen),
        # "precise": taken afresh for these weights; "running": averages of the training, which lag
        "statistics": checkpoint.get("statistics"),
        "format": FORMAT,
        "lambda_det": lambda_det.__version__,
    }
    meta["sha256"] = checksum(state, meta)
    return {"model": state, "__author__": AUTHOR, "matching_heuristics": True, "meta": meta}


def says_network(checkpoint: Mapping[str, Any]) -> bool:
    """Whether a checkpoint itself says which network it is of, as those of classifiers do."""
    return isinstance(checkpoint.get("recipe"), Mapping) or _is_backbone_file(checkpoint)


def _is_backbone_file(checkpoint: Mapping[str, Any]) -> bool:
    return checkpoint.get("__author__") == AUTHOR and "meta" in checkpoint


def _of_backbone_file(
    content: Mapping[str, Any], weights: str | None, fold_input: bool, source: str
) -> dict[str, Any]:
    """The content of a backbone file, to be written in another form.

    Raises:
        WeightsError: it is damaged, or other things are wanted than it has.
    """
    check_provenance(content, source)
    if content["meta"]["format"] != FORMAT:
        raise WeightsError(f"{source} is of an older lambda_det; name the checkpoint it is from.")
    meta = content["meta"]
    if weights not in (None, meta["weights"]) or (meta["folded"] and not fold_input):
        folded = "folded" if meta["folded"] else "not folded"
        raise WeightsError(
            f"{source} is a backbone file already, of the {meta['weights']!r} weights, {folded}: "
            "name the checkpoint that it is from to have others."
        )
    return {**content, "model": dict(tensors_only(content["model"], source))}


def _weights_of(
    checkpoint: Mapping[str, Any], weights: str | None, source: str
) -> tuple[str, dict[str, Tensor]]:
    """The weights of a checkpoint that are meant, "ema" or "model", and their state dict.

    Raises:
        WeightsError: it has none of them, or not as tensors.
    """
    chosen = weights or ("ema" if "ema" in checkpoint else "model")
    holder = checkpoint.get("ema") if chosen == "ema" else checkpoint
    if chosen == "model" and any(isinstance(value, Tensor) for value in checkpoint.values()):
        holder = {"model": checkpoint}  # a bare state dict
    if not isinstance(holder, Mapping) or "model" not in holder:
        held = [name for name in ("ema", "model") if name in checkpoint]
        raise WeightsError(f"{source} has no {chosen!r} weights; it has {listed(held)}.")
    # As a classifier's own or a detector's: the places are looked for in these names
    return chosen, named_as_in({}, None, tensors_only(holder["model"], source), source)


def _network_of_recipe(recipe: Mapping[str, Any], source: str) -> tuple[Network, Classifier]:
    """The network that a classifier's recipe names, and the classifier without values.

    Raises:
        WeightsError: this version of lambda_det cannot make it.
    """
    lacking = [name for name in _RECIPE if name not in recipe]
    if lacking:
        raise WeightsError(f"The recipe in {source} lacks {listed(lacking)}; it cannot be used.")
    try:
        with torch.device("meta"):
            model = create_classifier(recipe["model"], recipe["num_classes"], **recipe["options"])
    except (ConfigError, TypeError) as error:  # an option that is not there any more
        raise WeightsError(
            f"{source} is of a model that cannot be made here: {reason(error)}"
        ) from error
    pixels = wanted_pixels({"recipe": recipe})
    return Network(recipe["model"], recipe["options"], pixels, "recipe"), model


def _check_classifier(model: Classifier, state: Mapping[str, Tensor], source: str) -> None:
    fit = compare(model.state_dict(), state)
    if not fit:
        raise WeightsError(
            f"{source} does not hold the classifier that its recipe names: {fit.summary()}; take "
            "another checkpoint of that run."
        )


def _backbone_part(state: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """The backbone's tensors by its own names, each with memory of its own.

    Raises:
        WeightsError: the stem and the first stages are nowhere in it.
    """
    for place in _PLACES:
        names = {name: name.removeprefix(place) for name in state if name.startswith(place)}
        parts = {own.split(".")[0] for own in names.values()}
        if "stem" in parts:
            break
    else:
        raise WeightsError(
            f"{source} holds no backbone of lambda_det: its tensors are {listed(state)}, and not "
            "those of a backbone, a classifier or a detector with a stem and stages res2 to res5."
        )
    if "res5" not in parts:
        names |= {
            name: name.removeprefix("roi_heads.")
            for name in state
            if name.startswith(_STAGE_IN_HEADS)
        }
    return {
        own: state[name].detach().float().clone(memory_format=torch.contiguous_format)
        for name, own in names.items()
        if own.split(".")[0] in _PARTS and not is_counter(own)
    }


def _checked(state: Mapping[str, Tensor], network: Network | None, source: str) -> Network:
    """The network that the tensors are of.

    Raises:
        WeightsError: they are not those of ``network``, or if it is None of no network.
    """
    if network is None:
        return identify(state, source)
    if fits(network.model, network.options, state):
        return network
    with torch.device("meta"):
        fit = compare(create_backbone(network.model, **network.options).state_dict(), state)
    raise WeightsError(
        f"{source} does not hold the {network.model}{in_words(network.options)} that its "
        f"configuration names: {fit.summary()}; name the right one by --config."
    )


def _accuracy(checkpoint: Mapping[str, Any], chosen: str) -> dict[str, dict[str, float]]:
    """What a classifier's trainer measured with these weights, by part of the data."""
    results = checkpoint.get("results", {})
    return {
        part: dict(by_weights[_RESULTS[chosen]])
        for part, by_weights in results.items()
        if _RESULTS[chosen] in by_weights
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


def _pixel_meta(pixels: PixelSettings | None) -> dict[str, Any]:
    if pixels is None:
        return dict.fromkeys(("input_format", "pixel_mean", "pixel_std"))
    return {
        "input_format": pixels.format,
        "pixel_mean": list(pixels.mean),
        "pixel_std": list(pixels.std),
    }


def export_backbone(
    content: Mapping[str, Any],
    path: str | Path,
    target: CfgNode | DictConfig | None = None,
    *,
    checkpoint: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> Report:
    """Write a backbone file and verify it; only if it passes does it stay.

    A file that was there is kept unless the new one passes.

    Args:
        content: of :func:`lambda_det.weights.extract_backbone`.
        path: see :func:`lambda_det.weights.save_backbone`.
        target, checkpoint: see :func:`lambda_det.weights.verify_backbone`.
        overwrite: replace a file that is there.

    Raises:
        ConfigError: the name is not one to write to, or ``target`` describes no detector.
    """
    check_target(path, overwrite=overwrite)
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A folder, so that the draft has the file's own name in what is said of it
        with tempfile.TemporaryDirectory(prefix=".unverified_", dir=path.parent) as folder:
            draft = Path(folder, path.name)
            save_backbone(content, draft)
            report = verify_backbone(draft, target, checkpoint=checkpoint)
            report.offenders = [o.replace(str(draft), str(path)) for o in report.offenders]
            if report.passed:
                os.replace(draft, path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}.") from error
    return report
