"""Trained networks as files that other runtimes load: TorchScript, torch.export and ONNX.

The names below are imported when they are asked for: ``import lambda_det`` needs none of them.
"""

import importlib

_HOMES = {
    "FORMATS": "formats",
    "Format": "formats",
    "Network": "networks",
    "Report": "session",
    "backbone_network": "networks",
    "detector_network": "networks",
    "export_network": "session",
    "format_of": "formats",
    "portable_copy": "portable",
}

__all__ = list(_HOMES)


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
