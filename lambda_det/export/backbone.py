"""A backbone file that gets its name once it is verified."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode
from omegaconf import DictConfig

from lambda_det.errors import ConfigError
from lambda_det.export.verify import Report, verify_backbone
from lambda_det.weights.backbone_file import check_target, save_backbone

__all__ = ["export_backbone"]


def export_backbone(
    content: Mapping[str, Any],
    path: str | Path,
    target: CfgNode | DictConfig | None = None,
    *,
    checkpoint: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> Report:
    """Write a backbone file and verify it; only if it passes does it stay.

    A file that was there is kept unless the new one passes.

    Args:
        content: of :func:`lambda_det.weights.extract_backbone`.
        path: see :func:`lambda_det.weights.save_backbone`.
        target, checkpoint: see :func:`lambda_det.weights.verify_backbone`.
        overwrite: replace a file that is there.

    Raises:
        ConfigError: the name is not one to write to, or ``target`` describes no detector.
    """
    check_target(path, overwrite=overwrite)
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A folder, so that the draft has the file's own name in what is said of it
        with tempfile.TemporaryDirectory(prefix=".unverified_", dir=path.parent) as folder:
            draft = Path(folder, path.name)
            save_backbone(content, draft)
            report = verify_backbone(draft, target, checkpoint=checkpoint)
            report.offenders = [o.replace(str(draft), str(path)) for o in report.offenders]
            if report.passed:
                os.replace(draft, path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}.") from error
    return report
