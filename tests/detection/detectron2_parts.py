"""What Detectron2 is.

Nothing here imports lambda_det, so ``python detectron2_parts.py FILE`` writes it as it is without.
"""

import contextlib
import importlib
import inspect
import json
import pkgutil
import sys
from pathlib import Path

import detectron2
from detectron2.config import get_cfg
from fvcore.common.registry import Registry


def _is_theirs(module: str) -> bool:
    return module.partition(".")[0] in ("detectron2", "fvcore")


def _what(value: object) -> object:
    """What a class or a function is made of: the names alone would be those of a patch as well."""
    if isinstance(value, classmethod | staticmethod | property):
        return _what(getattr(value, "__func__", None) or value.fget)
    if isinstance(value, Registry):
        return {name: _what(x) for name, x in value}
    named = [getattr(value, "__module__", None), getattr(value, "__qualname__", str(type(value)))]
    if inspect.isfunction(value):
        return [*named, value.__code__.co_filename, value.__code__.co_firstlineno]
    if inspect.isclass(value) and _is_theirs(value.__module__):
        inner = {n: str(x) if inspect.isclass(x) else _what(x) for n, x in vars(value).items()}
        inner.pop("__slotnames__", None)  # the copy module's, once an instance was copied
        return [*named, [str(x) for x in value.__mro__], inner]
    return named


def parts() -> dict[str, object]:
    """What each name of each module of Detectron2 is."""
    for module in pkgutil.walk_packages(detectron2.__path__, "detectron2.", lambda _: None):
        with contextlib.suppress(Exception):  # some need packages that are not here
            importlib.import_module(module.name)
    found = {}
    for module, content in list(sys.modules.items()):
        if _is_theirs(module):
            for name, value in vars(content).items():
                if not name.startswith("__"):
                    found[f"{module}.{name}"] = _what(value)
    return found


def state() -> dict[str, object]:
    """Detectron2's parts and default configuration."""
    return {"parts": parts(), "defaults": get_cfg().dump()}


if __name__ == "__main__":
    found = state()
    assert not any(name.partition(".")[0] == "lambda_det" for name in sys.modules)
    Path(sys.argv[1]).write_text(json.dumps(found))
