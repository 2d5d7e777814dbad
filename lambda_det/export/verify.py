"""Write a backbone file, load it again, and compare its features with its checkpoint's."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lambda_det.export.backbone import read_source_network
from lambda_det.export.differences import alike, differences
from lambda_det.files import writing_to
from lambda_det.modeling import create_backbone
from lambda_det.weights.backbone_file import check_target, read_backbone, save_backbone
from lambda_det.weights.provenance import DETECTRON2_PIXELS, PixelSettings, wanted_pixels

__all__ = ["export_backbone", "passes", "verify_backbone"]

TOLERANCE_HALF = 0.1  # of a file in float16: 0.001 is usual, untrained networks have 0.06
_SIZE = 96, 128  # sides of the image: multiples of 32, so nothing is padded


def export_backbone(
    content: Mapping[str, Any],
    path: str | Path,
    checkpoint: Mapping[str, Any],
    *,
    overwrite: bool = False,
) -> dict[str, float]:
    """Write a backbone file under a temporary name, verify it, and rename it if it passes.

    An existing file stays until then.

    Args:
        content: made by :func:`lambda_det.export.backbone.extract_backbone`.
        path: see :func:`lambda_det.weights.backbone_file.save_backbone`.
        checkpoint: from which the content was made.
        overwrite: replace an existing file.

    Returns:
        The errors of :func:`verify_backbone`; the file is there if it :func:`passes`.

    Raises:
        ConfigError: the file cannot be written.
    """
    check_target(path, overwrite=overwrite)
    path = Path(path)
    # A folder, so that the temporary file has the final suffix and name
    folder = tempfile.TemporaryDirectory(prefix=".unverified_", dir=path.parent)
    with writing_to(path), folder as place:
        temporary = Path(place, path.name)
        save_backbone(content, temporary)
        errors = verify_backbone(temporary, checkpoint)
        if passes(content, errors):
            os.replace(temporary, path)
    return errors


def passes(content: Mapping[str, Any], errors: Mapping[str, float]) -> bool:
    """Whether the errors of a file with this content are only of rounding."""
    return alike(errors, TOLERANCE_HALF if content["meta"].get("half") else None)


@torch.no_grad()
def verify_backbone(path: str | Path, checkpoint: Mapping[str, Any]) -> dict[str, float]:
    """Compare the features of a backbone file with its checkpoint's, in float64.

    Args:
        path: a file of :func:`lambda_det.weights.backbone_file.save_backbone`. It is loaded as
            other projects load it, which needs every tensor and the right checksum.
        checkpoint: from which the file was made.

    Returns:
        See :func:`lambda_det.export.differences.differences`, for each map that both have.

    Raises:
        WeightsError: the file is no backbone file, or was changed.
    """
    meta = read_backbone(path)["meta"]
    source = read_source_network(checkpoint, weights=meta["weights"], model=meta["model"])
    network = create_backbone(meta["model"], meta["stages"], path, **meta["options"])
    # global embeddings refuse larger maps, on which the checkpoint has embeddings that the file
    # lacks
    limits = meta["options"].get("global_context"), meta.get("unseen") and meta["trained_at"]
    size = [min(side, *(limit for limit in limits if limit), side) for side in _SIZE]
    generator = torch.Generator().manual_seed(0)
    image = torch.randint(0, 256, (3, *size), generator=generator).double()
    expected = _features(source.network, image, source.pixels)
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
