"""Load the weights of a file into a model: which must be there, and what starts afresh."""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lambda_det.errors import WeightsError, listed, refused
from lambda_det.weights.backbone_file import fold_normalisation
from lambda_det.weights.formats import check_address, read_checkpoint
from lambda_det.weights.import_names import HEADS, import_weights
from lambda_det.weights.names import (
    backbone_prefixes,
    bare_name,
    check_shared,
    compare,
    is_weight,
    named_as_in,
    tensors_only,
    with_metadata,
)
from lambda_det.weights.provenance import (
    PixelSettings,
    check_layers,
    check_provenance,
    entry,
    format_options,
    initial_weights,
    recorded_network,
    wanted_pixels,
)
from lambda_det.weights.public import is_public, read_public

# Detectron2 is imported in the functions that need it, because backbones are also loaded without
# it.

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
# Modules of detectors, by the beginnings of their names, and the keys that decide on their tensors
_STRUCTURE = {
    "proposal_generator.": "MODEL.RPN.CONV_DIMS",
    "roi_heads.box_head.": "MODEL.ROI_BOX_HEAD.NUM_CONV, NUM_FC and NORM",
    "roi_heads.mask_head.": "MODEL.ROI_MASK_HEAD.NUM_CONV and NORM",
    "head.": "MODEL.RETINANET.NUM_CONVS and NORM",
    "backbone.fpn_": "MODEL.FPN.IN_FEATURES and NORM",
}


def load(
    model: nn.Module,
    file: str | Path,
    content: Mapping[str, Any] | None = None,
    *,
    complete: bool = False,
    averaged: bool = True,
    pixels: PixelSettings | None = None,
    name: str | None = None,
) -> PixelSettings | None:
    """Load the weights of a file into a model: completely, or an error leaves it as it was.

    The file may be of a backbone, of a classifier or of a detector, ours or of timm or torchvision;
    see :func:`lambda_det.weights.names.bare_name` for the names. Running statistics belong to the
    weights. Where the pixel settings of file and model differ in std or in the order of the
    channels, the difference is folded into the first convolution.

    Args:
        model: a detector, a classifier or a backbone.
        file: see :func:`read_weights`.
        content: of the file, where it was already read.
        complete: the file must hold every tensor of the model and no others. Else it must hold
            every tensor of the backbone, as the start of a training does. Then FPN and heads, and
            layers made for other classes, start afresh where the file does not hold them; any other
            difference in shape is an error.
        averaged: take the averaged weights where the file has them.
        pixels: the pixel settings of the model, to compare with those that the file records. A
            file that records none gets a warning.
        name: of the model's network. A file that records another name is refused.

    Returns:
        The pixel settings that the weights need now; None where the file does not record them.

    Raises:
        WeightsError: the file cannot be read or was changed, or does not fit.
        ConfigError: the weights are for other pixel settings, which cannot be folded in.
    """
    content = read_weights(file) if content is None else content
    check_provenance(content, file)
    network, options = recorded_network(content)
    if name is not None and network not in (None, name):
        raise WeightsError(
            f"{file} holds the weights of {network}{format_options(options)}, but the backbone is "
            f"{name}: use a file of {name}, or create the backbone {network!r}."
        )
    weights, which = initial_weights(content, raw=not averaged)
    prefixes, own = backbone_prefixes(model), model.state_dict()
    # Of several backbones, each must be in the file under its own name
    prefix = prefixes[0] if len(prefixes) == 1 and not complete else None
    state = _named_as_in_model(own, prefix, weights, content, file)
    if not complete:
        _fill_res5_heads(own, state)
        _check_start(model, state, prefixes, content, file)
    # Surplus tensors count as well: those of a deeper network are a superset with equal shapes.
    elif not (fit := compare(own, state)):
        raise WeightsError(
            f"{file} does not match this model: {fit}; is it of the same configuration?"
        )
    wanted = wanted_pixels(content)
    if pixels is not None:
        if wanted is not None and pixels.differences(wanted):
            wanted = _fold(model, prefixes, state, wanted, pixels)
        pixels.check(wanted, file)
    check_layers(model, content, file)
    check_shared(model, state, file)
    fits = OrderedDict(
        (tensor, state[tensor])
        for tensor in own
        if tensor in state and state[tensor].shape == own[tensor].shape
    )
    model.load_state_dict(with_metadata(fits, weights), strict=False)
    afresh = [tensor for tensor in own if tensor not in fits and is_weight(tensor)]
    unused = [tensor for tensor in state if tensor not in fits and is_weight(tensor)]
    logger.info(
        f"Loaded {sum(map(is_weight, fits))} of the model's {sum(map(is_weight, own))} tensors "
        f"from {which} of {file}; start afresh: {listed(afresh)}; unused in the file: "
        f"{listed(unused)}; pixel settings: {wanted or 'not recorded'}"
    )
    return wanted


def read_weights(file: str | Path) -> dict[str, Any]:
    """Read weights from wherever Detectron2's ``MODEL.WEIGHTS`` may point to.

    Args:
        file: a path, or a URL (https, detectron2://, or one of
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
    if is_public(file):
        content, public = read_public(str(file))
        logger.info(f"Weights: {public.describe()}")
        return content
    path, _, query = str(file).partition("?")
    if "://" in path:
        from detectron2.utils.file_io import PathManager

        check_address(path)
        what = f"The weights {file} cannot be fetched"
        with refused(WeightsError, what, "", OSError, AssertionError):
            path = PathManager.get_local_path(path)
    content = read_checkpoint(path)
    if path.endswith(".pyth"):  # of pycls
        content = {"model": content.get("model_state", {}), "matching_heuristics": True}
    content = import_weights(content, file)
    if query == "matching_heuristics=True":
        content["matching_heuristics"] = True
    elif query:
        raise WeightsError(f"{file} has the options {query}, which are not known; leave them out.")
    return content


def _named_as_in_model(
    own: Mapping[str, Tensor],
    prefix: str | None,
    weights: Any,
    content: Mapping[str, Any],
    path: str | Path,
) -> dict[str, Tensor]:
    """The weights of the file under the model's names, where the model has them."""
    state = tensors_only(weights, path)
    if content.get("__author__") == "Caffe2" and not any("." in name for name in state):
        from detectron2.checkpoint import c2_model_loading

        # Only Caffe2's own names: the conversion would spoil running_mean
        state, _ = c2_model_loading.convert_c2_detectron_names(state)
    state = named_as_in(own, prefix, state, path)
    if not content.get("matching_heuristics"):
        return state
    # Detectron2's search by the ends of names is for tensors that are not found under their whole
    # names, such as the res5 of a backbone in the heads of a C4 detector.
    free = {name: t for name, t in own.items() if name not in state and is_weight(name)}
    left = {name: state[name] for name in state if name not in own}
    if not (free and left):
        return state
    try:
        from detectron2.checkpoint import c2_model_loading

        matched = c2_model_loading.align_and_update_state_dicts(free, left, c2_conversion=False)
    except ImportError:  # a backbone without Detectron2: its tensors have their whole names
        return state
    except ValueError as error:
        raise WeightsError(
            f"{path} is ambiguous: a tensor in it fits several places in the model by its name; "
            "give the whole names in the file."
        ) from error
    for name in left:
        del state[name]
    state.update(matched)
    return state


def _fill_res5_heads(own: Mapping[str, Tensor], state: dict[str, Tensor]) -> None:
    """Fill res5 in the heads of the C4 layout from a backbone or classifier."""
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
    """Fold the difference of pixel settings into ``state``; return the settings for the result."""
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
    return pixels


def _check_start(
    model: nn.Module,
    state: Mapping[str, Tensor],
    prefixes: list[str],
    content: Mapping[str, Any],
    path: str | Path,
) -> None:
    """Refuse a file without the whole backbone, or with heads of other shapes."""
    own, about = _without_classes(model.state_dict()), entry(content, "meta")
    if "imported" in about and any(name.startswith(HEADS) for name in state):
        _check_structure(model, state, path, about)
    network, options = recorded_network(content)
    network = network or about.get("model") or about.get("imported") or "another network"
    for prefix in prefixes:
        if not (fit := compare(own, state, prefix)):
            raise WeightsError(
                f"{path} does not hold this backbone, which would be partly random: {fit}; the "
                f"file is of {network}{format_options(options)} and has {listed(state)}: check "
                "the path of the weights and the name and options of the backbone."
            )
    if reshaped := compare(own, state).reshaped:
        raise WeightsError(f"{path} does not fit the model: {listed(reshaped)}.")


def _without_classes(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights that stay when the classes change."""
    changing = re.compile("|".join(rf"{pattern}\." for pattern in CLASS_LAYERS))
    return {n: tensor for n, tensor in tensors.items() if is_weight(n) and not changing.match(n)}


def _check_structure(
    model: nn.Module, state: Mapping[str, Tensor], path: str | Path, about: Mapping[str, Any]
) -> None:
    """Refuse an imported detector with other modules than the model; only masks may be missing."""
    tensors = [_without_classes(model.state_dict()), _without_classes(state)]
    keys = []
    for module, keys_of_module in _STRUCTURE.items():
        here, there = ({n: t.shape for n, t in x.items() if n.startswith(module)} for x in tensors)
        if here and there and here != there:
            keys.append(keys_of_module)
        elif here != there and module != "roi_heads.mask_head.":
            keys.insert(0, "MODEL.META_ARCHITECTURE and MODEL.BACKBONE.NAME")
    if any(getattr(one, "aligned", False) is True for one in model.modules()):
        keys.append("MODEL.ROI_BOX_HEAD.POOLER_TYPE and MODEL.ROI_MASK_HEAD.POOLER_TYPE")
    if keys and any(name.startswith(tuple(_STRUCTURE)) for name in tensors[0]):
        raise WeightsError(
            f"{path} holds {about['imported']}, and the model has another structure: set {keys[0]} "
            "as there, or start from that configuration."
        )
