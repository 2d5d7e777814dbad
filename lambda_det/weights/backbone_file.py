"""Backbone files, in each of their forms: written whole or not at all, and checked when read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lambda_det.errors import ConfigError, WeightsError
from lambda_det.files import replace_file
from lambda_det.weights.formats import WRITERS
from lambda_det.weights.names import tensors_only
from lambda_det.weights.provenance import AUTHOR, FORMAT, check_provenance
from lambda_det.weights.reading import read_checkpoint

__all__ = ["check_target", "read_backbone", "save_backbone"]


def check_target(path: str | Path, *, overwrite: bool = False) -> None:
    """Refuse to write a backbone file of that name; write nothing.

    Raises:
        ConfigError: the name has no known ending, or is there already.
    """
    path = Path(path)
    if path.suffix not in WRITERS:
        raise ConfigError(
            f"The backbone file {path} must have a name that ends in one of {', '.join(WRITERS)}."
        )
    if path.is_dir() or (path.exists() and not overwrite):
        raise ConfigError(f"{path} is there already; give another name, or --overwrite.")


def save_backbone(content: Mapping[str, Any], path: str | Path, *, overwrite: bool = False) -> None:
    """Write a backbone file, at once or not at all.

    Args:
        content: of :func:`lambda_det.weights.extract_backbone`.
        path: ends in .pth, .pkl (Detectron2's model zoo; arrays) or .safetensors. Detectron2's own
            checkpointer reads the first two.
        overwrite: replace a file that is there.

    Raises:
        ConfigError: the name is not one to write to.
    """
    check_target(path, overwrite=overwrite)
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, lambda file: WRITERS[path.suffix](content, file))
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}.") from error


def read_backbone(path: str | Path) -> dict[str, Any]:
    """Read a file of :func:`save_backbone`, of any form.

    Returns:
        What :func:`lambda_det.weights.extract_backbone` made, with tensors for arrays.

    Raises:
        WeightsError: it cannot be read, is another file, or is not what was written.
    """
    content = read_checkpoint(path)
    if content.get("__author__") != AUTHOR or "meta" not in content:
        raise WeightsError(
            f"{path} is no backbone file of lambda_det; tools/export_backbone.py makes one from a "
            "checkpoint."
        )
    check_provenance(content, path)
    if content["meta"]["format"] != FORMAT:
        raise WeightsError(
            f"{path} is of an older lambda_det, which says less of the network in it: it can still "
            "be loaded, but not looked at or written anew; export the backbone again."
        )
    return {**content, "model": dict(tensors_only(content["model"], path))}
