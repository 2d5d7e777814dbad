"""Weights of a file put into a model: which must be there, and what starts afresh."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

from torch import Tensor, nn

from lambda_det.errors import WeightsError, listed, refused
from lambda_det.weights.backbone_file import fold_normalisation
from lambda_det.weights.formats import check_address, read_checkpoint
from lambda_det.weights.import_names import import_weights
from lambda_det.weights.names import (
    Fit,
    backbone_prefixes,
    bare_name,
    check_shared,
    compare,
    fitting,
    is_counter,
    named_as_in,
    note_other_classes,
    tensors_only,
)
from lambda_det.weights.provenance import (
    PixelSettings,
    check_layers,
    check_provenance,
    format_options,
    initial_weights,
    recorded_network,
    wanted_pixels,
)
from lambda_det.weights.public import fetch, is_public, read_public

# Detectron2 is imported in the functions that need it: backbones are loaded without it, too

logger = logging.getLogger(__name__)

# Layers whose shape depends on the number of classes, as patterns of the beginnings of their names:
# they start afresh when the classes change. Heads add theirs.
CLASS_LAYERS = [
    r"roi_heads\.box_predictor(\.\d+)?\.(cls_score|bbox_pred)",
    r"roi_heads\.mask_head\.predictor",
    r"roi_heads\.keypoint_head\.score_lowres",
    r"sem_seg_head\.predictor",
    r"head\.cls_score",
    r"(backbone\.)?linear",
]
# Parts of detectors, by the beginnings of their names, and the keys that decide on their tensors
_STRUCTURE = {
    "proposal_generator.": "MODEL.RPN.CONV_DIMS",
    "roi_heads.box_head.": "MODEL.ROI_BOX_HEAD.NUM_CONV, NUM_FC and NORM",
    "roi_heads.mask_head.": "MODEL.ROI_MASK_HEAD.NUM_CONV and NORM",
    "head.": "MODEL.RETINANET.NUM_CONVS and NORM",
    "backbone.fpn_": "MODEL.FPN.IN_FEATURES and NORM",
}
# Set from the configuration; checkpoints of some versions of Detectron2 hold them
_PIXEL_BUFFERS = ("pixel_mean", "pixel_std")


def read_weights(path: str) -> dict[str, Any]:
    """Read weights from wherever Detectron2's ``MODEL.WEIGHTS`` may point to.

    Args:
        path: of a file, or a URL (https, detectron2://, or one of
            :func:`lambda_det.weights.public.fetch`); "?matching_heuristics=True" at its end
            matches tensors by the ends of their names.

    Returns:
        A state dict under "model", and what the file holds beside it. The tensors of timm and
        torchvision have the names of our classifiers.

    Raises:
        ConfigError: the URL names no published weights.
        WeightsError: the file is missing, unreadable or unsafe, or one of ``torch.save`` from an
            address and PyTorch is older than 2.10.
    """
    if is_public(path):
        content, public = read_public(path)
        logger.info(f"Weights: {public.describe()}")
        return content if "model" in content else {"model": content}
    from detectron2.utils.file_io import PathManager

    url = urlparse(path)
    options = parse_qs(url.query)
    if "://" in path:
        check_address(url._replace(query="").geturl())
    with refused(
        WeightsError, f"The weights {path} cannot be fetched", "", OSError, AssertionError
    ):
        file = PathManager.get_local_path(url._replace(query="").geturl())
    content = read_checkpoint(file)
    if file.endswith(".pyth"):  # of pycls
        model = content.get("model_state", {})
        content = {"model": model, "__author__": "pycls", "matching_heuristics": True}
    content = import_weights(content, path)
    if "model" not in content:
        content = {"model": content}
    if options.pop("matching_heuristics", None) == ["True"]:
        content["matching_heuristics"] = True
    if options:
        raise WeightsError(f"{path} has the options {listed(options)}, which are not known.")
    return content


def load_complete_model(model: nn.Module, content: Mapping[str, Any], path: str | Path) -> None:
    """Load every tensor of ``model``; the file must hold all of them and no others.

    Args:
        model: unchanged if an error is raised.
        content: of the file, see :func:`read_weights`.
        path: of the file, for messages.

    Raises:
        WeightsError: the file does not match this model.
    """
    check_provenance(content, path)
    own = _own_tensors(model)
    state = _named_as_in_model(model.state_dict(), None, content["model"], content, path)
    fit = compare(own, state)
    # Tensors too many, too: those of a deeper network are a superset with equal shapes
    fit = replace(fit, unexpected=[n for n in fit.unexpected if n not in _PIXEL_BUFFERS])
    if not fit:
        raise WeightsError(
            f"{path} does not match this model: {listed(fit.sentences())}; is it of the same "
            "configuration?"
        )
    _load(model, state, content, path, "the weights")


def load_initial_weights(
    model: nn.Module,
    content: Mapping[str, Any],
    path: str | Path,
    pixels: PixelSettings | None = None,
) -> None:
    """Load what training starts from: every tensor of the backbone must be there.

    That includes running statistics. The file may be of a backbone, of a classifier, whose
    averaged weights are taken if it has them, or of a detector; see
    :func:`lambda_det.weights.names.bare_name` for the names. FPN and heads, and layers made for
    other classes, start afresh where the file does not hold them; any other difference in shape is
    an error. Where the file's pixel settings differ from the model's in std or in the order of the
    channels, the difference is folded into the first convolution.

    Args:
        model: unchanged if an error is raised.
        content: of the file, see :func:`read_weights`.
        path: of the file, for messages.
        pixels: what the model makes of images, to compare with what the file says, if anything.

    Raises:
        WeightsError: the backbone is not complete, or a tensor has another shape.
        ConfigError: the weights are for other pixel settings, which cannot be folded in.
    """
    check_provenance(content, path)
    weights, which = initial_weights(content)
    prefixes = backbone_prefixes(model)
    # Of several backbones, each must be in the file under its own name
    prefix = prefixes[0] if len(prefixes) == 1 else None
    state = _named_as_in_model(model.state_dict(), prefix, weights, content, path)
    _fill_res5_heads(model.state_dict(), state)
    about = content.get("meta")
    about = about if isinstance(about, Mapping) else {}
    if str(about.get("imported")).startswith("a detector"):
        _check_structure(model, state, path, about)
    _check_start(_own_tensors(model), state, prefixes, path, about)
    if pixels is not None:
        wanted = wanted_pixels(content)
        if wanted is not None and pixels.differences(wanted):
            wanted = _fold(model, prefixes, state, wanted, pixels)
        pixels.check(wanted, path)
    _load(model, state, content, path, which)


def load_backbone_weights(
    backbone: nn.Module, path: str | Path, name: str | None = None
) -> PixelSettings | None:
    """Load every parameter and running statistic of ``backbone`` from a file.

    Args:
        backbone: any module; unchanged if an error is raised.
        path: a backbone file, the checkpoint of a classifier or a detector, a state dict, a file of
            timm or torchvision, or a URL of published weights (see
            :func:`lambda_det.weights.public.fetch`), which stands for a backbone file. Of a
            classifier the averaged weights are loaded if there are any. Prefixes of names are
            removed, see :func:`lambda_det.weights.names.bare_name`.
        name: of the model. A file that records another name is refused.

    Returns:
        The pixel settings that the weights need. None: the file does not record them.

    Raises:
        WeightsError: the file cannot be read or was changed, or a tensor is missing or has another
            shape.
    """
    file = path
    if str(path).startswith("lambda://"):  # in this package, and so without Detectron2, too
        file = fetch(str(path)).local_path()
    elif is_public(path):
        from detectron2.utils.file_io import PathManager  # which has a handler of ours for them

        file = PathManager.get_local_path(str(path))
    content = import_weights(read_checkpoint(file), path)
    check_provenance(content, path)
    there, options = recorded_network(content)
    if name is not None and there not in (None, name):
        raise WeightsError(
            f"{path} holds the weights of {there}{format_options(options)}, but the backbone is "
            f"{name}: use a file of {name}, or create the backbone {there!r}."
        )
    weights, which = initial_weights(content)
    own = backbone.state_dict()
    state = named_as_in(own, "", tensors_only(weights, path), path)
    fit = compare(own, state)
    if not fit:
        network = f" It holds the weights of {there}{format_options(options)}." if there else ""
        raise WeightsError(
            f"{path} does not fit the backbone: {fit.summary()}. Check the model's name and "
            f"options.{network}"
        )
    note_other_classes(own, state, path)
    _load(backbone, state, content, path, which)
    if pixels := wanted_pixels(content):
        logger.info(f"{path} is for the pixel settings {pixels}")
    return pixels


def _own_tensors(model: nn.Module) -> dict[str, Tensor]:
    own = model.state_dict().items()
    return {name: t for name, t in own if not is_counter(name) and name not in _PIXEL_BUFFERS}


def _named_as_in_model(
    own: Mapping[str, Tensor],
    prefix: str | None,
    weights: Any,
    content: Mapping[str, Any],
    path: str | Path,
) -> dict[str, Tensor]:
    """The weights of the file by the names of the model, as far as it has them."""
    from detectron2.checkpoint import c2_model_loading

    state = tensors_only(weights, path)
    if content.get("__author__") == "Caffe2" and not any("." in name for name in state):
        # Only Caffe2's own names: the conversion would spoil running_mean
        state, _ = c2_model_loading.convert_c2_detectron_names(state)
    state = named_as_in(own, prefix, state, path)
    if not content.get("matching_heuristics"):
        return state
    # Detectron2's search by the ends of names, for what is not found under its whole name, such
    # as the res5 of a backbone in the heads of a C4 detector
    free = {name: tensor for name, tensor in own.items() if name not in state}
    left = {name: state.pop(name) for name in list(state) if name not in own}
    if not (free and left):
        return {**state, **left}
    try:
        left = c2_model_loading.align_and_update_state_dicts(free, left, c2_conversion=False)
    except ValueError as error:
        raise WeightsError(
            f"{path} is ambiguous: a tensor in it fits several places in the model by its name; "
            "give the whole names in the file."
        ) from error
    return {**state, **left}


def _fill_res5_heads(own: Mapping[str, Tensor], state: dict[str, Tensor]) -> None:
    """Let the C4 layout, whose res5 is in its heads, have that of a backbone or classifier."""
    for name in list(state):
        head = f"roi_heads.{bare_name(name)}"
        if head.startswith("roi_heads.res5.") and name not in own and head in own:
            state.setdefault(head, state.pop(name))


def _fold(
    model: nn.Module,
    prefixes: list[str],
    state: dict[str, Tensor],
    wanted: PixelSettings,
    pixels: PixelSettings,
) -> PixelSettings:
    """Fold what the weights want of images into ``state``; returns what they want then."""
    if len(prefixes) != 1 or not wanted.can_fold_to(pixels):
        return wanted
    (prefix,) = prefixes
    backbone = {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}
    module = model.get_submodule(prefix.removesuffix("."))
    try:
        folded, pixels = fold_normalisation(module, backbone, wanted, pixels)
    except WeightsError:  # no single first convolution: the settings are compared, and refused
        return wanted
    state.update((prefix + name, tensor) for name, tensor in folded.items())
    logger.info(f"Folded into the first convolution, whose images are now: {pixels}")
    return pixels


def _check_start(
    own: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    prefixes: list[str],
    path: str | Path,
    about: Mapping[str, Any],
) -> None:
    note_other_classes(own, state, path)
    own = _without_classes(own)
    for prefix in prefixes:
        fit = compare(own, state, prefix)
        if len(fit.missing) == fit.wanted:
            raise WeightsError(
                f"Nothing of the backbone is in {path}: {_which(about, fit)}the model wants "
                f"{listed(fit.missing)}, the file has {listed(state)}."
            )
        if not fit:
            raise WeightsError(
                f"{path} does not hold this backbone, and training would start from a network "
                f"that is partly random: {fit.summary()}; {_which(about, fit)}check the path of "
                "the weights and the name and options of the backbone."
            )
    fit = compare(own, state)
    if fit.reshaped:
        wrong = replace(fit, missing=(), unexpected=()).sentences()
        raise WeightsError(f"{path} does not fit the model: {listed(wrong)}.")


def _without_classes(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    changing = re.compile("|".join(rf"{pattern}\." for pattern in CLASS_LAYERS))
    return {name: tensor for name, tensor in tensors.items() if not changing.match(name)}


def _check_structure(
    model: nn.Module, state: Mapping[str, Tensor], path: str | Path, about: Mapping[str, Any]
) -> None:
    """Refuse an imported detector whose parts are others than the model's; masks may lack."""
    tensors = [_without_classes(_own_tensors(model)), _without_classes(state)]
    keys = []
    for part, keys_of_part in _STRUCTURE.items():
        here, there = ({n: t.shape for n, t in x.items() if n.startswith(part)} for x in tensors)
        if here and there and here != there:
            keys.append(keys_of_part)
        elif here != there and part != "roi_heads.mask_head.":
            keys.insert(0, "MODEL.META_ARCHITECTURE and MODEL.BACKBONE.NAME")
    if any(getattr(part, "aligned", False) is True for part in model.modules()):
        keys.append("MODEL.ROI_BOX_HEAD.POOLER_TYPE and MODEL.ROI_MASK_HEAD.POOLER_TYPE")
    if keys and any(name.startswith(tuple(_STRUCTURE)) for name in tensors[0]):
        raise WeightsError(
            f"{path} holds {about['imported']}, and the model has another structure: set {keys[0]} "
            "as there, or start from that configuration."
        )


def _which(about: Mapping[str, Any], fit: Fit) -> str:
    """A clause on what differs: only the scope of the lambda layers, or the network."""
    embeddings = [shapes for n, shapes in fit.reshaped.items() if n.endswith("position.embedding")]
    if embeddings and len(embeddings) == len(fit.reshaped) and not fit.missing:
        there, here = ("x".join(map(str, shape[-2:])) for shape in embeddings[0])
        return f"its lambda layers have the scope {there}, those of the backbone {here}; "
    network = about.get("model") or about.get("imported")
    return f"the file is of {network}; " if network else ""


def _load(
    model: nn.Module,
    state: Mapping[str, Tensor],
    content: Mapping[str, Any],
    path: str | Path,
    which: str,
) -> None:
    """Load tensors that were found to fit, unless the layers compute or share something else."""
    check_layers(model, content, path)
    check_shared(model, state, path)
    names = list(_own_tensors(model))
    loaded = fitting(model.state_dict(), state)
    model.load_state_dict(loaded, strict=False)
    logger.info(
        f"Loaded {sum(name in loaded for name in names)} of the model's {len(names)} tensors "
        f"from {which} of {path}; start afresh: "
        f"{listed(name for name in names if name not in loaded)}; unused in the file: "
        f"{listed(name for name in state if name not in loaded and not is_counter(name))}"
    )
