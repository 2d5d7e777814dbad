"""Published weights as checkpoints to export, and as files for Detectron2's checkpointer."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any

from detectron2.utils.file_io import PathManager
from iopath.common.file_io import PathHandler, get_cache_dir

from lambda_det.errors import WeightsError
from lambda_det.export.backbone import extract_backbone
from lambda_det.export.verify import alike, export_backbone
from lambda_det.version import __version__
from lambda_det.weights.backbone_file import read_backbone
from lambda_det.weights.loading import read_weights
from lambda_det.weights.provenance import wanted_pixels
from lambda_det.weights.public import SCHEMES, fetch

__all__ = ["PublicWeights", "read_source", "register_public_weights"]

logger = logging.getLogger(__name__)


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
    state = {name.removeprefix("backbone."): t for name, t in content["model"].items()}
    if "linear.weight" not in state:
        raise WeightsError(
            f"{path} ({meta['imported']}) has no classifier, so nothing shows that it is complete; "
            "use weights with one."
        )
    if model is None:
        raise WeightsError(
            f"{path} ({meta['imported']}) does not say which network it holds; name it with "
            "--model of lambda-det backbone, such as --model resnet50."
        )
    recipe = {
        "model": model,
        "options": {},
        "num_classes": len(state["linear.weight"]),
        **wanted_pixels(content).as_meta(),
        "source": meta.get("source", meta["imported"]),
        "license": meta.get("license"),
    }
    results = {"published": {"raw": {"top1": meta["top1"]}}} if meta.get("top1") else {}
    return {"model": content["model"], "recipe": recipe, "results": results}


class PublicWeights(PathHandler):
    """Lets any project of Detectron2 name published weights, such as "timm://resnetrs101.tf_in1k".

    The local path of such a URL is a verified backbone file for Detectron2's default pixel
    settings, in iopath's cache. A file of lambda_det on the Hugging Face Hub stays as it is.
    """

    def _get_supported_prefixes(self) -> list[str]:
        return list(SCHEMES)

    def _get_local_path(self, path: str, force: bool = False, **kwargs: Any) -> str:
        name = path.replace("://", "_").replace("/", "_")
        target = Path(get_cache_dir(), "lambda_det", f"{name}_{__version__}.pth")
        if not force:
            with contextlib.suppress(WeightsError):  # missing, or cut short
                read_backbone(target)
                return str(target)
        checkpoint = read_source(path)
        if "source" not in checkpoint.get("recipe", {}):
            return fetch(path).local_path()
        content = extract_backbone(checkpoint, source=path)
        errors = export_backbone(content, target, checkpoint, overwrite=True)
        if not alike(errors):
            raise WeightsError(f"{path} cannot be converted: its features differ by {errors}.")
        return str(target)

    def _isfile(self, path: str, **kwargs: Any) -> bool:
        return Path(self._get_local_path(path)).is_file()

    def _exists(self, path: str, **kwargs: Any) -> bool:
        return self._isfile(path)

    def _open(self, path: str, mode: str = "r", buffering: int = -1, **kwargs: Any):
        return open(self._get_local_path(path), mode, buffering=buffering)


def register_public_weights() -> None:
    """Make timm://, torchvision:// and hf:// known to Detectron2 in this process."""
    PathManager.register_handler(PublicWeights(), allow_override=True)
