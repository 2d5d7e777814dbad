"""Tensor names of timm and torchvision, as tables of rules that turn them into ours."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from lambda_det.weights.names import is_counter, tensors_only
from lambda_det.weights.provenance import PixelSettings

# The pixel settings of all networks of these libraries that are ours, too
IMAGENET_PIXELS = PixelSettings("RGB", [123.675, 116.28, 103.53], [58.395, 57.12, 57.375])

_Rules = tuple[tuple[str, str], ...]  # regular expressions and replacements, one after the other


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

# The modules of torchvision's MobileNet-v2.features that are stem and res2 to res5
_MOBILENET_STAGES = {"stem": (0, 2), "res2": (2, 4), "res3": (4, 7), "res4": (7, 14)}
_MOBILENET_STAGES |= {"res5": (14, 19)}
_MOBILENET: _Rules = (
    *(
        (rf"^features\.{number}\.", f"{stage}.{number - start}.")
        for stage, (start, end) in _MOBILENET_STAGES.items()
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


# By family and library: names that together only it has, and the rules for all of them
_NAMINGS: dict[str, tuple[tuple[str, ...], _Rules]] = {
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
    """Rename the tensors of a file of timm or torchvision to those of our classifiers.

    Args:
        content: of any file of weights.
        path: of the file, named in messages.

    Returns:
        ``content`` itself if its tensors have other names. Else "model", with the names of our
        classifiers ("backbone.stem.conv1.weight"), and "meta": the pixel settings of these
        libraries, and as "imported" a description of the source.
    """
    state = content.get("state_dict", content.get("model", content))
    there = set(state) if isinstance(state, Mapping) else set()
    source = next((name for name, (marks, _) in _NAMINGS.items() if there.issuperset(marks)), None)
    if source is None:
        return dict(content)
    _, rules = _NAMINGS[source]
    model = {}
    for name, tensor in tensors_only(state, path).items():
        for pattern, replacement in rules:
            name = re.sub(pattern, replacement, name)
        if rules is _TIMM_LAMBDA and name.endswith(".position.embedding"):
            tensor = _embedding(tensor)
        if not is_counter(name):
            model[f"backbone.{name}"] = tensor
    return {"model": model, "meta": {"imported": source, **IMAGENET_PIXELS.as_meta()}}
