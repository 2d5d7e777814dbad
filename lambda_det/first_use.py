"""Names of a package that are imported when they are first asked for (PEP 562).

So a command line answers without PyTorch and Detectron2, whose import takes seconds.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from typing import Any

from lambda_det.errors import importing_detectron2


def names_of(package: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package, whose ``dir()`` and ``import *`` get the names, too.

    It also imports the package's modules, as attributes of a package that was imported itself.

    Args:
        package: its ``__name__``.
        places: the names that it gives to others, each with the module of lambda_det that has it.
    """

    def get(name: str) -> Any:
        with importing_detectron2():
            if name in places:
                value = getattr(importlib.import_module(f"lambda_det.{places[name]}"), name)
                setattr(module, name, value)
                return value
            if not name.startswith("_") and importlib.util.find_spec(f"{package}.{name}"):
                return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    module = sys.modules[package]
    vars(module).setdefault("__all__", [*places])
    module.__dir__ = lambda: sorted({*vars(module), *places})
    return get
