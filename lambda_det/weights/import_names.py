"""Tensor names of timm and torchvision, as tables of rules that turn them into ours."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lambda_det.weights.names import is_weight, tensors_only
from lambda_det.weights.provenance import IMAGENET_PIXELS

# Regular expressions and replacements, one after the other
_Rules = tuple[tuple[str, str | Callable[[re.Match], str]], ...]


# The blocks of timm's and torchvision's ResNets
_RESNET_BLOCKS: _Rules = (
    *((rf"^layer{index + 1}\.", f"res{index + 2}.") for index in range(4)),
    (r"\.bn(\d)\.", r".conv\1.norm."),
    (r"\.se\.fc1\.", ".se.reduce."),
    (r"\.se\.fc2\.", ".se.expand."),
    (r"^fc\.", "linear."),
)

# The stem is three convolutions and, in place of the max pooling, a fourth. Shortcuts begin with
# average pooling.
_RESNET_RS: _Rules = (
    (r"^conv1\.0\.", "stem.conv1."),
    (r"^conv1\.1\.", "stem.conv1.norm."),
    (r"^conv1\.3\.", "stem.conv2."),
    (r"^conv1\.4\.", "stem.conv2.norm."),
    (r"^conv1\.6\.", "stem.conv3."),
    (r"^bn1\.", "stem.conv3.norm."),
    (r"^maxpool\.0\.", "stem.conv4."),
    (r"^maxpool\.1\.", "stem.conv4.norm."),
    (r"\.downsample\.1\.", ".shortcut."),
    (r"\.downsample\.2\.", ".shortcut.norm."),
    *_RESNET_BLOCKS,
)

_RESNET: _Rules = (
    (r"^conv1\.", "stem.conv1."),
    (r"^bn1\.", "stem.conv1.norm."),
    (r"\.downsample\.0\.", ".shortcut."),
    (r"\.downsample\.1\.", ".shortcut.norm."),
    *_RESNET_BLOCKS,
)

# The modules of torchvision's MobileNet-v2.features that are stem and res2 to res5, each of which
# ends with the last inverted bottleneck before a stride
MOBILENET_STAGES = {"stem": (0, 2), "res2": (2, 4), "res3": (4, 7), "res4": (7, 14)}
MOBILENET_STAGES |= {"res5": (14, 19)}
_MOBILENET: _Rules = (
    *(
        (rf"^features\.{number}\.", f"{stage}.{number - start}.")
        for stage, (start, end) in MOBILENET_STAGES.items()
        for number in range(start, end)
    ),
    (r"^classifier\.1\.", "linear."),
)

# timm groups the blocks, features.1 to features.17, by their width
_TIMM_MOBILENET: _Rules = (
    (r"^conv_stem\.", "features.0.0."),
    (r"^bn1\.", "features.0.1."),
    (r"^conv_head\.", "features.18.0."),
    (r"^bn2\.", "features.18.1."),
    (r"^classifier\.", "linear."),
    (r"^blocks\.0\.0\.conv_dw\.", "features.1.conv.0.0."),
    (r"^blocks\.0\.0\.bn1\.", "features.1.conv.0.1."),
    (r"^blocks\.0\.0\.conv_pw\.", "features.1.conv.1."),
    (r"^blocks\.0\.0\.bn2\.", "features.1.conv.2."),
    *(
        (rf"^blocks\.{width}\.{block}\.", f"features.{start + block}.conv.")
        for width, (start, end) in enumerate(itertools.pairwise((1, 2, 4, 7, 11, 14, 17, 18)))
        for block in range(end - start)
    ),
    (r"\.conv_pw\.", ".0.0."),
    (r"\.bn1\.", ".0.1."),
    (r"\.conv_dw\.", ".1.0."),
    (r"\.bn2\.", ".1.1."),
    (r"\.conv_pwl\.", ".2."),
    (r"\.bn3\.", ".3."),
    *_MOBILENET,
)

# timm's ByoaNet
_TIMM_LAMBDA: _Rules = (
    *((rf"^stages\.{index}\.", f"res{index + 2}.") for index in range(4)),
    (r"\.conv([123])_(1x1|kxk)\.", r".conv\1."),
    (r"\.conv\.weight$", ".weight"),
    (r"\.bn\.", ".norm."),
    (r"\.self_attn\.", ".conv2."),
    (r"\.norm_q\.", ".query_norm."),
    (r"\.norm_v\.", ".value_norm."),
    (r"\.(conv_lambda\.weight|pos_emb)$", ".position.embedding"),
    (r"\.conv_lambda\.bias$", ".position.bias"),
    (r"\.post_attn\.", ".norm2."),
    (r"^head\.fc\.", "linear."),
)


def _embedding(tensor: Tensor) -> Tensor:
    """timm's conv_lambda.weight [k, 1, r, r, 1] or pos_emb [2H - 1, 2W - 1, k] as [k, 1, r, r]."""
    return tensor.squeeze(4) if tensor.ndim == 5 else tensor.permute(2, 0, 1)[:, None].contiguous()


# ------------------------------------------------------------------------ detectors of torchvision
HEADS = ("proposal_generator.", "roi_heads.", "head.")  # the parts beside the backbone
# Of the 91 classes of their COCO models, the background and these have no object
_COCO_GAPS = (12, 26, 29, 30, 45, 66, 68, 69, 71, 83)


def _numbered(name: str, first: int) -> Callable[[re.Match], str]:
    """A rule for a name whose number is 0 there and ``first`` here."""
    return lambda match: f"{name}{int(match[1]) + first}."


def _pyramid(first: int) -> _Rules:
    """ResNet and FPN, whose levels begin with the stage ``first``."""
    return (
        (r"^backbone\.body\.", ""),
        *_RESNET,
        (r"^(stem|res\d)\.", r"bottom_up.\1."),
        (r"^backbone\.fpn\.extra_blocks\.", "top_block."),
        (r"^backbone\.fpn\.inner_blocks\.(\d)\.", _numbered("fpn_lateral", first)),
        (r"^backbone\.fpn\.layer_blocks\.(\d)\.", _numbered("fpn_output", first)),
        # Convolutions, and the norms after them if there are any
        (r"(fpn_\w+\d|\.conv\d|\.mask_fcn\d)\.0\.", r"\1."),
        (r"(fpn_\w+\d|\.conv\d|\.mask_fcn\d)\.1\.", r"\1.norm."),
    )


_RCNN: _Rules = (
    (r"^rpn\.head\.", "proposal_generator.rpn_head."),
    (r"rpn_head\.cls_logits\.", "rpn_head.objectness_logits."),
    (r"rpn_head\.bbox_pred\.", "rpn_head.anchor_deltas."),
    (r"rpn_head\.conv\.(\d)\.", _numbered("rpn_head.conv.conv", 0)),
    (r"box_head\.(fc6|5)\.", "box_head.fc1."),
    (r"box_head\.fc7\.", "box_head.fc2."),
    (r"box_head\.(\d)\.", _numbered("box_head.conv", 1)),
    (r"mask_head\.(\d)\.", _numbered("mask_head.mask_fcn", 1)),
    (r"mask_predictor\.conv5_mask\.", "mask_head.deconv."),
    (r"mask_predictor\.mask_fcn_logits\.", "mask_head.predictor."),
    *_pyramid(2),
)
_RCNN_V1: _Rules = (*_RCNN, (r"rpn_head\.conv\.conv0\.", "rpn_head.conv."))
_RETINANET: _Rules = (
    (r"^head\.classification_head\.cls_logits\.", "head.cls_score."),
    (r"^head\.regression_head\.bbox_reg\.", "head.bbox_pred."),
    (r"^head\.classification_head\.conv\.", "head.cls_subnet."),
    (r"^head\.regression_head\.conv\.", "head.bbox_subnet."),
    # Each convolution has a norm and an activation behind it
    (r"(?<=_subnet\.)(\d)\.(\d)\.", lambda match: f"{3 * int(match[1]) + int(match[2])}."),
    *_pyramid(3),
)


def _objects(tensor: Tensor, dim: int = 0) -> Tensor:
    """The classes of objects, without the first class, which is the background."""
    gaps = _COCO_GAPS if tensor.shape[dim] == 91 else ()
    classes = [number for number in range(1, tensor.shape[dim]) if number not in gaps]
    return tensor.index_select(dim, torch.tensor(classes))


def _by_size(tensor: Tensor) -> Tensor:
    """Reorder channels of anchors [9, ...]: 3 ratios of 3 sizes there, 3 sizes of 3 ratios here."""
    return tensor.unflatten(0, (3, 3, -1)).transpose(0, 1).flatten(0, 1)


# The functions that turn their tensors into ours, by our names
_CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    r"\.position\.embedding$": _embedding,
    r"^roi_heads\.box_predictor\.cls_score": lambda x: torch.cat([_objects(x), x[:1]]),
    r"^roi_heads\.box_predictor\.bbox_pred": (
        lambda x: _objects(x.unflatten(0, (-1, 4))).flatten(0, 1)
    ),
    r"^roi_heads\.mask_head\.predictor": _objects,
    r"^head\.cls_score": lambda x: _objects(_by_size(x), 1).flatten(0, 1),
    r"^head\.bbox_pred": lambda x: _by_size(x).flatten(0, 1),
}


def _complete(model: dict[str, Tensor], *, frozen: bool) -> None:
    """Adapt the norms: their frozen norms add nothing to the variance, and ours add 1e-5."""
    # Detectron2's RetinaNet also has a bias before a norm
    for name, tensor in list(model.items()):
        if frozen and name.endswith("running_var"):
            model[name] = (tensor.double() - 1e-5).to(tensor.dtype)
        elif "_subnet." in name and tensor.ndim == 4:
            model[name.replace("weight", "bias")] = tensor.new_zeros(len(tensor))


# For each family and library the names that only it has together, and the rules for all names
_NAMINGS: dict[str, tuple[tuple[str, ...], _Rules]] = {
    "a detector of torchvision, as in configs/finetune/mask_rcnn_resnet50_coco.yaml": (
        ("rpn.head.conv.1.0.weight", "roi_heads.box_head.0.0.weight", "backbone.body.bn1.weight"),
        _RCNN,
    ),
    "a detector of torchvision, as in configs/finetune/mask_rcnn_resnet50_coco_v1.yaml": (
        ("rpn.head.cls_logits.weight", "roi_heads.box_head.fc6.weight", "backbone.body.bn1.weight"),
        _RCNN_V1,
    ),
    "a detector of torchvision, as in configs/finetune/retinanet_resnet50_coco.yaml": (
        ("head.classification_head.conv.0.1.weight", "backbone.body.bn1.weight"),
        _RETINANET,
    ),
    "a ResNet-RS of timm": (
        ("conv1.0.weight", "conv1.6.weight", "maxpool.0.weight", "layer1.0.downsample.1.weight"),
        _RESNET_RS,
    ),
    "a ResNet of timm or torchvision": (
        ("conv1.weight", "bn1.weight", "layer1.0.conv3.weight", "layer1.0.downsample.0.weight"),
        _RESNET,
    ),
    "MobileNet-v2 of torchvision": (
        ("features.0.0.weight", "features.1.conv.0.0.weight", "features.18.0.weight"),
        _MOBILENET,
    ),
    "MobileNet-v2 of timm": (
        ("conv_stem.weight", "blocks.0.0.conv_pw.weight", "blocks.6.0.conv_pwl.weight"),
        _TIMM_MOBILENET,
    ),
    "a lambda ResNet of timm": (
        ("stem.conv1.conv.weight", "stages.3.1.conv1_1x1.conv.weight", "head.fc.weight"),
        _TIMM_LAMBDA,
    ),
}


def import_weights(content: Mapping[str, Any], path: str | Path) -> dict[str, Any]:
    """Give the tensors of a file of timm or torchvision the names in our networks.

    Args:
        content: of any file of weights.
        path: of the file, named in messages.

    Returns:
        ``content`` if its tensors have other names, as "model" if it is a state dict. Else "model",
        with the names of our classifiers ("backbone.stem.conv1.weight") or of Detectron2's
        detectors, and "meta": the pixel settings of these libraries, and as "imported" a
        description of the source.
    """
    state = content.get("state_dict", content.get("model", content))
    there = set(state) if isinstance(state, Mapping) else set()
    source = next((name for name, (marks, _) in _NAMINGS.items() if there.issuperset(marks)), None)
    if source is None:
        return dict(content if "model" in content else {"model": content})
    _, rules = _NAMINGS[source]
    model = {}
    state = tensors_only(state, path)
    for name, tensor in state.items():
        for pattern, replacement in rules:
            name = re.sub(pattern, replacement, name)
        for pattern, change in _CHANGES.items():
            if re.search(pattern, name):
                tensor = change(tensor)
        if is_weight(name):
            model[name if name.startswith(HEADS) else f"backbone.{name}"] = tensor
    # Frozen norms count no batches
    _complete(model, frozen=rules is _RCNN_V1 and all(map(is_weight, state)))
    return {"model": model, "meta": {"imported": source, **IMAGENET_PIXELS.as_meta()}}
