"""Training, evaluation and prediction of detectors.

The names below are imported when they are asked for, so that ``--help`` imports little.
"""

import importlib

_HOMES = {
    "DetectionTask": "task",
    "lazy_parser": "command_line",
    "load_any_config": "task",
    "load_config": "config",
    "load_lazy_config": "lazy",
    "parser": "command_line",
    "run": "command_line",
}

__all__ = list(_HOMES)


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
