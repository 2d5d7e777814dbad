"""Trained networks as files that other runtimes load: TorchScript, torch.export and ONNX.

The names below are imported when they are asked for: ``import lambda_det`` needs none of them.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lambda_det.export.formats import FORMATS, Format, format_of
    from lambda_det.export.networks import Network, backbone_network, detector_network
    from lambda_det.export.portable import portable_copy
    from lambda_det.export.session import Report, export_network

__all__ = [
    "FORMATS",
    "Format",
    "Network",
    "Report",
    "backbone_network",
    "detector_network",
    "export_network",
    "format_of",
    "portable_copy",
]


def __getattr__(name: str) -> object:
    if name in __all__:
        for home in ("formats", "networks", "portable", "session"):
            module = importlib.import_module(f"{__name__}.{home}")
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
