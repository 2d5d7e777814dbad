"""The command-line tools as modules, loaded from their files.

Detectron2 installs a top-level package named ``tools`` as well, so that name may be theirs.
"""

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]


@cache
def load_tool(name: str, folder: str = "tools") -> ModuleType:
    """The module ``tools/NAME.py``, or that of another folder of the checkout."""
    spec = importlib.util.spec_from_file_location(f"tool_{name}", ROOT / folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look it up there
    spec.loader.exec_module(module)
    return module
