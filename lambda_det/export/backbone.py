"""The backbone of any checkpoint as a backbone file: extracted, written, read again, compared."""

from __future__ import annotations

import contextlib
import copy
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lambda_det.config import read_plain
from lambda_det.errors import ConfigError, WeightsError, listed, reason
from lambda_det.export.session import differences, passes
from lambda_det.files import writing_to
from lambda_det.layers.lambda_layer import RelativePosition
from lambda_det.layers.local import crop_offsets, grid_size
from lambda_det.modeling.build import create_backbone
from lambda_det.modeling.specs import STAGES
from lambda_det.version import __version__
from lambda_det.weights.backbone_file import (
    fold_normalisation,
    read_backbone,
    save_backbone,
)
from lambda_det.weights.loading import load, read_weights
from lambda_det.weights.names import bare_name, is_weight, tensors_only
from lambda_det.weights.provenance import (
    AUTHOR,
    DETECTRON2_PIXELS,
    FORMAT,
    Origin,
    PixelSettings,
    check_provenance,
    checksum,
    entry,
    format_options,
    initial_weights,
    recorded_network,
    wanted_pixels,
)
from lambda_det.weights.public import fetch

_ABOUT = "recipe", "run", "meta"  # what a checkpoint says of its network
_SIZE = 96, 128  # sides of the image on which a file is compared, so nothing is padded


# What a checkpoint holds --------------------------------------------------------------------------


def read_source(path: str, model: str | None = None) -> dict[str, Any]:
    """Read a checkpoint to export: one of ours, of timm or of torchvision.

    Args:
        path: a file, or a URL of :func:`lambda_det.weights.public.fetch`.
        model: our name of the network, for files of timm or torchvision.

    Returns:
        The content of the file. Weights of timm and torchvision become the checkpoint of a
        classifier, whose recipe names the network, the pixel settings, the source and the licence.

    Raises:
        ConfigError: there are no such published weights.
        WeightsError: the file cannot be read, or does not say which network it holds.
    """
    content = read_weights(path)
    meta = content.get("meta", {})
    if "imported" not in meta:
        return content
    model = meta.get("model") or model
    if not {"linear.weight", "backbone.linear.weight"} & content["model"].keys():
        raise WeightsError(
            f"{path} ({meta['imported']}) has no classifier, so nothing shows that it is complete; "
            "use weights with one."
        )
    if model is None:
        raise _unnamed(f"{path} ({meta['imported']})")
    recipe = {
        "model": model,
        "options": {},
        **wanted_pixels(content).as_meta(),
        "source": meta.get("source", meta["imported"]),
        "license": meta.get("license"),
    }
    return {"model": content["model"], "recipe": recipe}


def _unnamed(source: str) -> WeightsError:
    return WeightsError(
        f"{source} does not say which network it holds; name it with --model of lambda-det "
        "backbone, such as --model lambda_resnet50."
    )


def read_network(
    content: Mapping[str, Any],
    *,
    raw: bool,
    model: str | None,
    source: str = "the checkpoint",
) -> nn.Module:
    """The backbone of a checkpoint, with its weights in float32, and its stages alone.

    Args:
        content: of a classifier, a detector with or without FPN, or a backbone.
        raw: take the raw weights also where there are averaged ones.
        model: the name of a network with default options, for a checkpoint that records none.
        source: name of the checkpoint for messages.

    Raises:
        WeightsError: the network is unknown, or the checkpoint does not hold all of it.
    """
    name, options = recorded_network(content)
    if name is None:
        if model is None:
            raise _unnamed(source)
        name, options = model, {}
    weights, _ = initial_weights(content, raw=raw)
    state, about = tensors_only(weights, source), {k: content[k] for k in _ABOUT if k in content}
    modules = {bare_name(tensor).split(".")[0] for tensor in state}
    if "res5" not in modules:  # a C4 detector has it in its heads, where others have convolutions
        with contextlib.suppress(WeightsError):
            moved = {n.replace("roi_heads.res5.", "res5."): tensor for n, tensor in state.items()}
            return _loaded(name, options, STAGES, {**about, "model": moved}, source)
    stages = [stage for stage in STAGES if stage in modules] or STAGES
    return _loaded(name, options, stages, {**about, "model": state}, source)


def _loaded(
    name: str, options: Mapping[str, Any], stages: Sequence[str], content: dict, source: str
) -> nn.Module:
    try:
        network = create_backbone(name, stages, **options)
    except (ConfigError, TypeError) as error:  # TypeError: an option that does not exist (any more)
        raise WeightsError(
            f"The network {name}{format_options(options)} of {source} cannot be created: "
            f"{reason(error)}"
        ) from error
    load(network, source, content)
    return network


# What becomes of it -------------------------------------------------------------------------------


def extract_backbone(
    content: Mapping[str, Any],
    *,
    raw: bool = False,
    model: str | None = None,
    source: str = "the checkpoint",
) -> dict[str, Any]:
    """Make the content of a backbone file.

    The input normalisation of a classifier is folded into its first convolution, see
    :func:`lambda_det.weights.backbone_file.fold_normalisation`; detectors are not changed.

    Args:
        content, raw, model, source: see :func:`read_network`.

    Returns:
        ``model``: float32 tensors under the backbone's own names, with running statistics, without
        counters and without the classifier's last layer. ``meta``: plain values, among them the
        network and its pixel settings (None where they are not known). ``__author__`` and
        ``matching_heuristics`` make Detectron2 match the tensors by the ends of their names.

    Raises:
        WeightsError: the network is unknown, tensors are missing or untrained, or a backbone file
            has the averaged weights and the raw ones are asked for.
    """
    check_provenance(content, source)
    origin, recipe = Origin.of(source, content, raw=raw), entry(content, "recipe")
    if raw and origin.averaged:
        raise WeightsError(
            f"{source} is a backbone file of the 'ema' weights; name the checkpoint it was made "
            "from to get others."
        )
    network = read_network(content, raw=raw, model=model, source=source)
    state = {
        name: tensor.detach().clone(memory_format=torch.contiguous_format)
        for name, tensor in network.state_dict().items()
        if is_weight(name)
    }
    pixels, (name, options) = wanted_pixels(content), network.created_as
    meta = {
        **entry(content, "meta"),
        "model": name,
        "options": dict(options),
        "stages": [s for s in ("stem", *STAGES) if any(n.startswith(f"{s}.") for n in state)],
        "weights": "ema" if origin.averaged else "model",
        "step": origin.step,
        "format": FORMAT,
        "lambda_det": __version__,
    }
    if recipe:  # of a classifier
        state, pixels = fold_normalisation(network, state, pixels)
        side, unseen = 0, []
        with contextlib.suppress(KeyError):
            side = read_plain(recipe["config"])["INPUT"]["SIZE"]
        if side:
            state, unseen = forget_unseen(state, network, side)
        kind, results = "ema" if origin.averaged else "raw", content.get("results", {})
        meta |= {key: recipe[key] for key in ("source", "license") if key in recipe}
        meta |= {
            "recipe": recipe.get("config", ""),
            "folded": True,
            "trained_at": side,  # pixels of an image's side; 0 where it is unknown
            "unseen": unseen,  # embeddings whose values for offsets beyond that are 0
            "accuracy": {part: dict(by[kind]) for part, by in results.items() if kind in by},
        }
    meta |= pixels.as_meta() if pixels else {}
    _check_trained(state, source)
    meta["sha256"] = checksum(state, meta)
    return {"model": state, "__author__": AUTHOR, "matching_heuristics": True, "meta": meta}


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
        if module in sizes and "embedding" in module._parameters:  # what is computed was learnt
            name = f"{name}.embedding"
            seen = torch.zeros_like(state[name])
            crop_offsets(seen, *sizes[module]).copy_(crop_offsets(state[name], *sizes[module]))
            changed += [name] if not torch.equal(seen, state[name]) else []
            state[name] = seen
    return state, changed


def _check_trained(state: Mapping[str, Tensor], source: str) -> None:
    """Refuse what is not finite, and statistics that no image was used for."""
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


# Written and compared -----------------------------------------------------------------------------


def export_backbone(
    content: Mapping[str, Any], path: Path, checkpoint: Mapping[str, Any]
) -> dict[str, float]:
    """Write a backbone file under a temporary name, verify it, and rename it if it passes.

    An existing file stays until then.

    Args:
        content: made by :func:`extract_backbone`.
        path: see :func:`lambda_det.weights.backbone_file.save_backbone`.
        checkpoint: from which the content was made.

    Returns:
        The errors of :func:`verify_backbone`; the file is there if they are only of rounding.

    Raises:
        ConfigError: the file cannot be written.
    """
    with (
        writing_to(path),
        # A folder, so that the temporary file has the final suffix and name
        tempfile.TemporaryDirectory(prefix=".unverified_", dir=path.parent) as folder,
    ):
        temporary = Path(folder, path.name)
        save_backbone(content, temporary)
        errors = verify_backbone(temporary, checkpoint)
        if passes(errors):
            os.replace(temporary, path)
    return errors


@torch.no_grad()
def verify_backbone(path: str | Path, checkpoint: Mapping[str, Any]) -> dict[str, float]:
    """Compare the features of a backbone file with its checkpoint's, in float64.

    Args:
        path: a file of :func:`lambda_det.weights.backbone_file.save_backbone`. It is loaded as
            other projects load it, which needs every tensor and the right checksum.
        checkpoint: from which the file was made.

    Returns:
        See :func:`lambda_det.export.session.differences`, for each map that both have.

    Raises:
        WeightsError: the file is no backbone file, or was changed.
    """
    meta = read_backbone(path)["meta"]
    raw = meta["weights"] == "model"
    source = read_network(checkpoint, raw=raw, model=meta["model"])
    network = create_backbone(meta["model"], meta["stages"], path, **meta["options"])
    # global embeddings refuse larger maps, on which the checkpoint has embeddings that the file
    # lacks
    limits = meta["options"].get("global_context"), meta.get("unseen") and meta["trained_at"]
    size = [min(side, *(limit for limit in limits if limit), side) for side in _SIZE]
    generator = torch.Generator().manual_seed(0)
    image = torch.randint(0, 256, (3, *size), generator=generator).double()
    expected = _features(source, image, wanted_pixels(checkpoint))
    maps = _features(network, image, wanted_pixels({"meta": meta}))
    return differences(maps, {name: y for name, y in expected.items() if name in maps})


def _features(
    backbone: nn.Module, image: Tensor, pixels: PixelSettings | None
) -> dict[str, Tensor]:
    """The maps of an RGB image [3, H, W], in float64."""
    pixels = pixels or DETECTRON2_PIXELS
    image = image.flip(0) if pixels.format == "BGR" else image
    mean, std = (
        torch.tensor(values, dtype=torch.float64)[:, None, None]
        for values in (pixels.mean, pixels.std)
    )
    return backbone.double().eval()(((image - mean) / std)[None])


def convert_public(path: str, target: Path) -> str:
    """The local path of published weights as Detectron2's own checkpointer reads them.

    Args:
        path: a URL of :func:`lambda_det.weights.public.fetch`.
        target: where a verified backbone file for Detectron2's default pixel settings is written.
            A file of lambda_det stays where it is.

    Raises:
        WeightsError: the weights cannot be read, or their features change.
    """
    checkpoint = read_source(path)
    if "source" not in checkpoint.get("recipe", {}):
        return fetch(path).local_path()
    content = extract_backbone(checkpoint, source=path)
    errors = export_backbone(content, target, checkpoint)
    if not passes(errors):
        raise WeightsError(f"{path} cannot be converted: its features differ by {errors}.")
    return str(target)
