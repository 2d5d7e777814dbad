"""Published weights as checkpoints to export, and as files for Detectron2's checkpointer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lambda_det.errors import WeightsError
from lambda_det.export.backbone import extract_backbone
from lambda_det.export.verify import export_backbone, passes
from lambda_det.weights.loading import read_weights
from lambda_det.weights.provenance import wanted_pixels
from lambda_det.weights.public import fetch

__all__ = ["convert_public", "read_source"]


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
    errors = export_backbone(content, target, checkpoint, overwrite=True)
    if not passes(content, errors):
        raise WeightsError(f"{path} cannot be converted: its features differ by {errors}.")
    return str(target)
