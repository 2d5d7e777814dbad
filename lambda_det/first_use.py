"""Names of a package that are imported when they are first asked for (PEP 562).

So a command line answers without PyTorch and Detectron2, whose import takes seconds.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from lambda_det.errors import importing_detectron2

__all__ = ["names_of"]


def names_of(package: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package.

    Args:
        package: its ``__name__``.
        places: the names that it gives to others, each with the module of lambda_det that has it.
    """

    def get(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with importing_detectron2():
            value = getattr(importlib.import_module(f"lambda_det.{places[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return get
