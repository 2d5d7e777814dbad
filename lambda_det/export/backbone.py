"""The backbone of any checkpoint as the content of a backbone file."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from lambda_det.config import read_plain
from lambda_det.errors import ConfigError, WeightsError, listed, reason
from lambda_det.layers.lambda_layer import RelativePosition
from lambda_det.layers.local import crop_offsets, grid_size
from lambda_det.modeling.build import create_backbone, norm_option
from lambda_det.modeling.specs import STAGES
from lambda_det.version import __version__
from lambda_det.weights.backbone_file import fold_normalisation
from lambda_det.weights.loading import load
from lambda_det.weights.names import bare_name, is_counter, tensors_only
from lambda_det.weights.provenance import (
    AUTHOR,
    FORMAT,
    PixelSettings,
    check_provenance,
    checksum,
    format_options,
    recorded_network,
    wanted_pixels,
)

__all__ = [
    "SourceNetwork",
    "extract_backbone",
    "in_half",
    "is_backbone_file",
    "read_source_network",
]

# the key in the checkpoint's "results" for each kind of weights
_RESULTS = {"ema": "ema", "model": "raw"}
_STAGE_IN_HEADS = "roi_heads.res5."
_STEM_AND_STAGES = ("stem", *STAGES)
_UNKNOWN_PIXELS = dict.fromkeys(("input_format", "pixel_mean", "pixel_std"))


@dataclass(frozen=True)
class SourceNetwork:
    """The backbone that a checkpoint holds.

    Attributes:
        network: with the weights of the checkpoint in float32, and its stages alone.
        model, options: how it was made.
        pixels: pixel settings that it needs; None where they are not known.
        known_from: what says which network it is.
        weights: "ema" or "model", which of the checkpoint's weights it has.
    """

    network: nn.Module
    model: str
    options: Mapping[str, Any]
    pixels: PixelSettings | None
    known_from: str
    weights: str


def read_source_network(
    checkpoint: Mapping[str, Any],
    *,
    weights: str | None = None,
    model: str | None = None,
    source: str = "the checkpoint",
) -> SourceNetwork:
    """The backbone of a checkpoint, with its weights as they are.

    Args:
        checkpoint: see :func:`extract_backbone`.
        weights: "ema" or "model". None: "ema" if the checkpoint has them.
        model: the name of a network with default options, for a checkpoint that records none.
        source: name of the checkpoint for messages.

    Raises:
        WeightsError: the network is unknown, tensors are missing, or the checkpoint does not have
            the ``weights`` asked for.
    """
    if is_backbone_file(checkpoint):
        meta = checkpoint["meta"]
        network = _create(meta["model"], meta["options"], meta["stages"], source)
        load(network, source, checkpoint)
        return SourceNetwork(
            network,
            meta["model"],
            meta["options"],
            wanted_pixels(checkpoint),
            meta["known_from"],
            meta["weights"],
        )
    weights, state = _weights_of(checkpoint, weights, source)
    about = {key: checkpoint[key] for key in ("recipe", "run", "meta") if key in checkpoint}
    name, options = recorded_network(checkpoint)
    known_from = "recipe" if "recipe" in checkpoint else "run"
    if name is None and model is None:
        raise WeightsError(
            f"{source} does not say which network it holds; name it with --model of lambda-det "
            "backbone, such as --model lambda_resnet50."
        )
    if name is None:
        name, options, known_from = model, norm_option(model, "BN"), "name"
    modules = {bare_name(tensor).split(".")[0] for tensor in state}
    if "stem" not in modules:
        raise WeightsError(
            f"{source} holds no backbone of lambda_det, which has a stem and stages res2 to res5; "
            f"its tensors are {listed(state)}."
        )
    if "res5" not in modules:  # a C4 detector may have res5 in its heads
        # Detectron2's own FPN of convolutions, which any backbone may have
        with contextlib.suppress(WeightsError):
            moved = {
                tensor.replace(_STAGE_IN_HEADS, "res5."): value for tensor, value in state.items()
            }
            network = _create(name, options, STAGES, source)
            load(network, source, {**about, "model": moved})
            return SourceNetwork(
                network, name, options, wanted_pixels(checkpoint), known_from, weights
            )
    stages = [stage for stage in STAGES if stage in modules]
    network = _create(name, options, stages, source)
    load(network, source, {**about, "model": state})
    return SourceNetwork(network, name, options, wanted_pixels(checkpoint), known_from, weights)


def _create(name: str, options: Mapping[str, Any], stages: Sequence[str], source: str) -> nn.Module:
    try:
        return create_backbone(name, [stage for stage in stages if stage != "stem"], **options)
    except (ConfigError, TypeError) as error:  # TypeError: an option that does not exist (any more)
        raise WeightsError(
            f"The network {name}{format_options(options)} of {source} cannot be created: "
            f"{reason(error)}"
        ) from error


def extract_backbone(
    checkpoint: Mapping[str, Any],
    *,
    weights: str | None = None,
    fold_input: bool = True,
    model: str | None = None,
    source: str = "the checkpoint",
) -> dict[str, Any]:
    """Make the content of a backbone file.

    Args:
        checkpoint: of a classifier or of a detector with or without FPN, which record the network;
            of a backbone, or a bare state dict of one of these.
        weights: "ema" or "model". None: "ema" if the checkpoint has them.
        fold_input: fold the input normalisation of a classifier into its first convolution, see
            :func:`lambda_det.weights.backbone_file.fold_normalisation`. Detectors are not changed.
        model: the name of a network with default options, for a checkpoint that records none.
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
    recipe = checkpoint.get("recipe")
    is_classifier = isinstance(recipe, Mapping)
    read = read_source_network(checkpoint, weights=weights, model=model, source=source)
    state, pixels = _tensors_of(read.network), read.pixels
    folded = is_classifier and fold_input
    if folded:
        state, pixels = fold_normalisation(read.network, state, pixels)
    side, unseen = _trained_at(recipe) if is_classifier else None, []
    if side:
        state, unseen = forget_unseen(state, read.network, side)
    _check_trained(state, source)
    iteration, results = checkpoint.get("iteration"), checkpoint.get("results", {})
    kind = _RESULTS[read.weights]
    statistics = None
    if (precise := checkpoint.get("precise_statistics")) is not None:
        statistics = "precise" if kind in precise else "running"
    meta = {
        "model": read.model,
        "options": dict(read.options),
        "stages": [
            name for name in _STEM_AND_STAGES if any(n.startswith(f"{name}.") for n in state)
        ],
        **(pixels.as_meta() if pixels else _UNKNOWN_PIXELS),
        "recipe": recipe.get("config", "") if is_classifier else None,
        "known_from": read.known_from,
        "weights": read.weights,
        "step": iteration + 1 if type(iteration) is int else None,
        "folded": folded,
        "trained_at": side or 0,  # pixels of an image's side; 0 where it is unknown
        "unseen": unseen,  # embeddings whose values for offsets beyond that are 0
        "accuracy": {part: dict(by[kind]) for part, by in results.items() if kind in by},
        # "precise": recomputed for these weights; "running": the running averages of the training
        "statistics": statistics,
        "format": FORMAT,
        "lambda_det": __version__,
    }
    if is_classifier and "source" in recipe:  # published weights
        meta |= {"source": recipe["source"], "license": recipe["license"]}
    meta["sha256"] = checksum(state, meta)
    return {"model": state, "__author__": AUTHOR, "matching_heuristics": True, "meta": meta}


def _tensors_of(network: nn.Module) -> dict[str, Tensor]:
    """Copies of its tensors without counters and without tensors outside of the stages."""
    return {
        name: tensor.detach().clone(memory_format=torch.contiguous_format)
        for name, tensor in network.state_dict().items()
        if name.split(".")[0] in _STEM_AND_STAGES and not is_counter(name)
    }


def forget_unseen(
    state: Mapping[str, Tensor], backbone: nn.Module, side: int
) -> tuple[dict[str, Tensor], list[str]]:
    """Set the position embeddings of offsets that no map had in training to 0.

    These are still as they were drawn, from N(0, 1). Images of 224 pixels have c5 maps of 7x7
    positions, images of 1024 pixels 32x32, and a detector's features would hold more noise than
    what was learnt (projects/benchmarks/detectors.md has the measurement).

    Args:
        state: the tensors of the backbone.
        backbone: the network.
        side: of the images in training, in pixels.

    Returns:
        A new state dict, and the names of the embeddings that were changed.
    """
    state, changed = dict(state), []
    sizes: dict[nn.Module, tuple[int, ...]] = {}

    def note(module: nn.Module, args: tuple, kwargs: dict[str, Any], _: Tensor) -> None:
        size = grid_size(args[1].shape[1:-2], kwargs["dilation"])
        sizes[module] = tuple(map(max, size, sizes.get(module, size)))

    backbone = copy.deepcopy(backbone).to("meta").eval()
    for module in backbone.modules():
        if isinstance(module, RelativePosition):
            module.register_forward_hook(note, with_kwargs=True)
    with torch.no_grad():
        backbone(torch.empty(1, 3, side, side, device="meta"))
    for name, module in backbone.named_modules(remove_duplicate=False):
        if module in sizes:
            name = f"{name}.embedding"
            seen = torch.zeros_like(state[name])
            crop_offsets(seen, *sizes[module]).copy_(crop_offsets(state[name], *sizes[module]))
            changed += [name] if not torch.equal(seen, state[name]) else []
            state[name] = seen
    return state, changed


def in_half(content: Mapping[str, Any]) -> dict[str, Any]:
    """Convert kernels and embeddings to float16, for a file of half the size.

    Norms and biases stay in float32, because a folded stem's statistics may exceed float16. Models
    that load the file are in float32.
    """
    model = {name: t.half() if t.ndim > 1 else t for name, t in content["model"].items()}
    meta = {**content["meta"], "half": True}
    return {**content, "model": model, "meta": {**meta, "sha256": checksum(model, meta)}}


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
    return chosen, tensors_only(holder["model"], source)


def _trained_at(recipe: Mapping[str, Any]) -> int | None:
    """The side in pixels of the images that a classifier was trained on, as its recipe says."""
    with contextlib.suppress(yaml.YAMLError, AttributeError, KeyError, TypeError):
        side = read_plain(str(recipe["config"]))["INPUT"]["SIZE"]
        return side if type(side) is int and side > 0 else None
    return None


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
