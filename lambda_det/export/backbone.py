"""The backbone of any checkpoint as the content of a backbone file."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from lambda_det.config import read_plain
from lambda_det.errors import ConfigError, WeightsError, listed, reason
from lambda_det.export.sources import KnownNetwork
from lambda_det.layers.lambda_layer import RelativePosition
from lambda_det.layers.local import crop_offsets, grid_size
from lambda_det.modeling import create_backbone
from lambda_det.modeling.specs import STAGES
from lambda_det.version import __version__
from lambda_det.weights.backbone_file import fold_normalisation
from lambda_det.weights.names import compare, is_counter, named_as_in, tensors_only
from lambda_det.weights.provenance import (
    AUTHOR,
    FORMAT,
    check_provenance,
    checksum,
    format_options,
    wanted_pixels,
)

__all__ = ["extract_backbone", "in_half", "is_backbone_file", "names_network"]

_RECIPE = ("model", "options", "input_format", "pixel_mean", "pixel_std")
_RESULTS = {"ema": "ema", "model": "raw"}  # key in the checkpoint's "results", by kind of weights
# Name prefixes of backbones within models; the first match is used. In C4 detectors the last stage
# is a part of the heads.
_PLACES = ("backbone.bottom_up.", "backbone.", "")
_STAGE_IN_HEADS = "roi_heads.res5."
_PARTS = ("stem", *STAGES)
_UNKNOWN_PIXELS = dict.fromkeys(("input_format", "pixel_mean", "pixel_std"))


def extract_backbone(
    checkpoint: Mapping[str, Any],
    *,
    weights: str | None = None,
    fold_input: bool = True,
    network: KnownNetwork | None = None,
    source: str = "the checkpoint",
) -> dict[str, Any]:
    """Make the content of a backbone file.

    Args:
        checkpoint: of a classifier (its recipe names the network), of a detector with or without
            FPN, of a backbone, or a bare state dict of one of these.
        weights: "ema" or "model". None: "ema" if the checkpoint has them.
        fold_input: fold the input normalisation of a classifier into its first convolution, see
            :func:`lambda_det.weights.backbone_file.fold_normalisation`. Detectors are not changed.
        network: of a checkpoint that does not record it, such as a detector's.
        source: name of the checkpoint for messages.

    Returns:
        ``model``: float32 tensors under the backbone's own names, with running statistics, without
        counters and without the classifier's last layer. ``meta``: plain values, among them the
        network and its pixel settings (None where they are not known). ``__author__`` and
        ``matching_heuristics`` make Detectron2 match the tensors by the ends of their names.

    Raises:
        WeightsError: the network is unknown, tensors are missing or untrained, or the checkpoint
            does not have the ``weights`` asked for.
    """
    if is_backbone_file(checkpoint):
        return _of_backbone_file(checkpoint, weights, fold_input, source)
    chosen, state = _weights_of(checkpoint, weights, source)
    recipe = checkpoint.get("recipe")
    is_classifier = isinstance(recipe, Mapping)
    if is_classifier:
        network = _network_of_recipe(recipe, source)
    if network is None:
        raise WeightsError(
            f"{source} does not say which network it holds; name it with --model, or give its "
            "configuration with --config."
        )
    from_heads = any(name.startswith(_STAGE_IN_HEADS) for name in state)
    state = _backbone_part(state, source)
    try:
        backbone = _complete_backbone(state, network, source)
    except WeightsError:
        if not from_heads:
            raise
        # The C4 heads of Detectron2 have their own res5, of convolutions, for any backbone
        state = {name: t for name, t in state.items() if not name.startswith("res5.")}
        backbone = _complete_backbone(state, network, source)
    folded = is_classifier and fold_input
    if folded:
        state, pixels = fold_normalisation(backbone, state, network.pixels)
        network = replace(network, pixels=pixels)
    side, unseen = _trained_at(recipe) if is_classifier else None, []
    if side:
        state, unseen = forget_unseen(state, backbone, side)
    _check_trained(state, source)
    iteration, kind = checkpoint.get("iteration"), _RESULTS[chosen]
    results = checkpoint.get("results", {})
    meta = {
        "model": network.model,
        "options": dict(network.options),
        "stages": [part for part in _PARTS if any(n.startswith(f"{part}.") for n in state)],
        **(network.pixels.as_meta() if network.pixels else _UNKNOWN_PIXELS),
        "recipe": recipe.get("config", "") if is_classifier else None,
        "known_from": network.known_from,
        "weights": chosen,
        "step": iteration + 1 if type(iteration) is int else None,
        "folded": folded,
        "trained_at": side or 0,  # pixels of an image's side; 0 where it is unknown
        "unseen": unseen,  # embeddings whose offsets beyond that are 0
        "accuracy": {part: dict(by[kind]) for part, by in results.items() if kind in by},
        # "precise": recomputed for these weights; "running": the running averages of the training
        "statistics": checkpoint.get("statistics"),
        "format": FORMAT,
        "lambda_det": __version__,
    }
    if is_classifier and "source" in recipe:  # published weights
        meta |= {"source": recipe["source"], "license": recipe["license"]}
    meta["sha256"] = checksum(state, meta)
    return {"model": state, "__author__": AUTHOR, "matching_heuristics": True, "meta": meta}


def forget_unseen(
    state: Mapping[str, Tensor], backbone: nn.Module, side: int
) -> tuple[dict[str, Tensor], list[str]]:
    """Set the position embeddings of offsets that no map had in training to 0.

    They are as they were drawn, from N(0, 1). Images of 224 pixels have c5 maps of 7x7 positions,
    those of 1024 pixels 32x32, and a detector's features would hold more noise than what was learnt
    (docs/results.md has the measurement).

    Args:
        state: the tensors of the backbone.
        backbone: on the meta device.
        side: of the images in training, in pixels.

    Returns:
        A new state dict, and the names of the embeddings that were changed.
    """
    state, changed = dict(state), []
    sizes: dict[nn.Module, tuple[int, ...]] = {}

    def note(module: nn.Module, args: tuple, kwargs: dict[str, Any], _: Tensor) -> None:
        size = grid_size(args[1].shape[1:-2], kwargs["dilation"])
        sizes[module] = tuple(map(max, size, sizes.get(module, size)))

    layers = [m for m in backbone.modules() if isinstance(m, RelativePosition)]
    handles = [m.register_forward_hook(note, with_kwargs=True) for m in layers]
    with torch.no_grad():
        backbone.eval()(torch.empty(1, 3, side, side, device="meta"))
    for handle in handles:
        handle.remove()
    for name, module in backbone.named_modules(remove_duplicate=False):
        if module in sizes:
            name = f"{name}.embedding"
            seen = torch.zeros_like(state[name])
            crop_offsets(seen, *sizes[module]).copy_(crop_offsets(state[name], *sizes[module]))
            changed += [name] if not torch.equal(seen, state[name]) else []
            state[name] = seen
    return state, changed


def in_half(content: Mapping[str, Any]) -> dict[str, Any]:
    """The content with kernels and embeddings in float16, for a file of half the size.

    Norms and biases stay: a folded stem's statistics may exceed float16. Models that load the file
    are in float32 all the same.
    """
    model = {name: t.half() if t.ndim > 1 else t for name, t in content["model"].items()}
    meta = {**content["meta"], "half": True}
    return {**content, "model": model, "meta": {**meta, "sha256": checksum(model, meta)}}


def names_network(checkpoint: Mapping[str, Any]) -> bool:
    """Whether the checkpoint records its network. Those of classifiers do."""
    return isinstance(checkpoint.get("recipe"), Mapping) or is_backbone_file(checkpoint)


def is_backbone_file(checkpoint: Mapping[str, Any]) -> bool:
    """Whether it is the content of a backbone file."""
    return checkpoint.get("__author__") == AUTHOR and "meta" in checkpoint


def _of_backbone_file(
    content: Mapping[str, Any], weights: str | None, fold_input: bool, source: str
) -> dict[str, Any]:
    """The content of a backbone file, to be written in another format.

    Raises:
        WeightsError: the file was changed, or was made with other options than those asked for.
    """
    check_provenance(content, source)
    meta = content["meta"]
    if weights not in (None, meta["weights"]) or (meta["folded"] and not fold_input):
        folded = "folded" if meta["folded"] else "not folded"
        raise WeightsError(
            f"{source} is a backbone file of the {meta['weights']!r} weights, {folded}; name the "
            "checkpoint it was made from to get others."
        )
    return {**content, "model": dict(tensors_only(content["model"], source))}


def _weights_of(
    checkpoint: Mapping[str, Any], weights: str | None, source: str
) -> tuple[str, dict[str, Tensor]]:
    """Choose the "ema" or "model" weights of a checkpoint.

    Returns:
        The choice, and the state dict.

    Raises:
        WeightsError: the checkpoint does not have them, or they are no state dict.
    """
    chosen = weights or ("ema" if "ema" in checkpoint else "model")
    holder = checkpoint.get("ema") if chosen == "ema" else checkpoint
    if chosen == "model" and any(isinstance(value, Tensor) for value in checkpoint.values()):
        holder = {"model": checkpoint}  # a bare state dict
    if not isinstance(holder, Mapping) or "model" not in holder:
        held = [name for name in ("ema", "model") if name in checkpoint]
        raise WeightsError(f"{source} has no {chosen!r} weights; it has {listed(held)}.")
    # Keep the names that a classifier or detector gives its backbone: _backbone_part needs them
    return chosen, named_as_in({}, None, tensors_only(holder["model"], source), source)


def _trained_at(recipe: Mapping[str, Any]) -> int | None:
    """The side in pixels of the images that a classifier was trained on, as its recipe says."""
    with contextlib.suppress(yaml.YAMLError, AttributeError, KeyError, TypeError):
        side = read_plain(str(recipe["config"]))["INPUT"]["SIZE"]
        return side if type(side) is int and side > 0 else None
    return None


def _network_of_recipe(recipe: Mapping[str, Any], source: str) -> KnownNetwork:
    """The network that a classifier's recipe names.

    Raises:
        WeightsError: the recipe is incomplete.
    """
    if lacking := [name for name in _RECIPE if name not in recipe]:
        raise WeightsError(
            f"The recipe in {source} lacks {listed(lacking)}; use another checkpoint."
        )
    pixels = wanted_pixels({"recipe": recipe})
    return KnownNetwork(recipe["model"], recipe["options"], pixels, "recipe")


def _backbone_part(state: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """Copies of the backbone's tensors under the backbone's own names.

    Raises:
        WeightsError: ``state`` has no stem.
    """
    for place in _PLACES:
        names = {name: name.removeprefix(place) for name in state if name.startswith(place)}
        parts = {own.split(".")[0] for own in names.values()}
        if "stem" in parts:
            break
    else:
        raise WeightsError(
            f"{source} holds no backbone of lambda_det, which has a stem and stages res2 to res5; "
            f"its tensors are {listed(state)}."
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


def _complete_backbone(
    state: Mapping[str, Tensor], network: KnownNetwork, source: str
) -> nn.Module:
    """The backbone of a network on the meta device, of which ``state`` has complete stages.

    Raises:
        WeightsError: they are not complete, or the network does not exist.
    """
    named = f"{network.model}{format_options(network.options)}"
    try:
        with torch.device("meta"):
            backbone = create_backbone(network.model, **network.options)
    except (ConfigError, TypeError) as error:  # TypeError: an option that does not exist (any more)
        raise WeightsError(
            f"The network {named} of {source} cannot be created: {reason(error)}"
        ) from error
    stages = {name.split(".")[0] for name in state}
    own = {k: v for k, v in backbone.state_dict().items() if k.split(".")[0] in stages}
    fit = compare(own, state)
    if not fit:
        raise WeightsError(
            f"{source} does not hold {named}: {fit.summary()}; name another network with --model, "
            "give its configuration with --config, or use another checkpoint."
        )
    return backbone


def _check_trained(state: Mapping[str, Tensor], source: str) -> None:
    broken = [name for name, tensor in state.items() if not tensor.isfinite().all()]
    if broken:
        raise WeightsError(f"{source} holds NaN or infinity in {listed(broken)}; use another one.")
    for name, var in state.items():
        mean = state.get(f"{name.removesuffix('running_var')}running_mean")
        if not name.endswith("running_var") or mean is None:
            continue
        # FrozenBN starts with a variance of 1 - eps
        if not mean.any() and torch.allclose(var, torch.ones_like(var), rtol=0, atol=1e-4):
            raise WeightsError(
                f"The statistics {name} in {source} have their initial values, 0 and 1: the "
                "weights were never trained, or their statistics never computed."
            )
