"""Published weights by their URL in any project of Detectron2."""

from __future__ import annotations

import contextlib
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from detectron2.utils.file_io import PathManager
from iopath.common.file_io import PathHandler, get_cache_dir

from lambda_det.errors import WeightsError
from lambda_det.version import __version__
from lambda_det.weights.backbone_file import read_backbone
from lambda_det.weights.public import SCHEMES

# The function in another module that makes a backbone file of published weights
CONVERTER = "lambda_det.export.backbone:convert_public"


class PublicWeights(PathHandler):
    """Lets any project of Detectron2 name published weights, such as "timm://resnetrs101.tf_in1k".

    The local path of such a URL is a verified backbone file for Detectron2's default pixel
    settings, in iopath's cache. A file of lambda_det on the Hugging Face Hub stays as it is.

    Args:
        scheme: such as "timm://".
    """

    def __init__(self, scheme: str) -> None:
        self._scheme = scheme

    def _get_supported_prefixes(self) -> list[str]:
        return [self._scheme]

    def _get_local_path(self, path: str, force: bool = False, **kwargs: Any) -> str:
        name = path.replace("://", "_").replace("/", "_")
        target = Path(get_cache_dir(), "lambda_det", f"{name}_{__version__}.pth")
        if not force:
            with contextlib.suppress(WeightsError):  # missing, or cut short
                read_backbone(target)
                return str(target)
        return resolve_name(CONVERTER)(path, target)

    def _isfile(self, path: str, **kwargs: Any) -> bool:
        return Path(self._get_local_path(path)).is_file()

    def _exists(self, path: str, **kwargs: Any) -> bool:
        return self._isfile(path)

    def _open(self, path: str, mode: str = "r", buffering: int = -1, **kwargs: Any):
        return open(self._get_local_path(path), mode, buffering=buffering)


def register_public_weights() -> None:
    """Make timm://, torchvision://, hf:// and lambda:// known to Detectron2 in this process.

    A scheme for which there is a handler already keeps it.
    """
    for scheme in SCHEMES:
        with contextlib.suppress(KeyError):
            PathManager.register_handler(PublicWeights(scheme), allow_override=False)
