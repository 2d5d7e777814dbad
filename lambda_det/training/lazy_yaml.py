"""LazyConfigs that were saved as YAML, read without running what is in them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml
from detectron2.layers import ShapeSpec

from lambda_det.errors import ConfigError, reason

__all__ = ["is_lazy", "is_lazy_file", "read_plain", "read_saved"]

_PYTHON = "tag:yaml.org,2002:python/"


class _PlainLoader(yaml.SafeLoader):
    """Reads the Python objects in a saved LazyConfig as what they are made of, and makes none."""


def _contents(loader: yaml.SafeLoader, tag: str, node: yaml.Node) -> Any:
    if isinstance(node, yaml.MappingNode):
        return loader.construct_mapping(node, deep=True)
    if isinstance(node, yaml.SequenceNode):
        return loader.construct_sequence(node, deep=True)
    return f"{tag} {node.value}".strip()


_PlainLoader.add_multi_constructor(_PYTHON, _contents)


class _SavedLoader(yaml.SafeLoader):
    """Makes the few objects that a LazyConfig of Detectron2 or of ours holds, and no others."""


def _tuple(loader: yaml.SafeLoader, node: yaml.Node) -> tuple:
    return tuple(loader.construct_sequence(node, deep=True))


def _shape(loader: yaml.SafeLoader, node: yaml.Node) -> ShapeSpec:
    return ShapeSpec(**loader.construct_mapping(node, deep=True))


def _class(loader: yaml.SafeLoader, name: str, node: yaml.Node) -> type:
    """As nodes of RegNet have them; found among what is imported already, and not called."""
    module, _, last = name.rpartition(".")
    found = getattr(sys.modules.get(module), last, None)
    return found if isinstance(found, type) else _refused(loader, f"name:{name}", node)


def _refused(loader: yaml.SafeLoader, tag: str, node: yaml.Node) -> Any:
    raise yaml.constructor.ConstructorError(None, None, f"python/{tag}", node.start_mark)


_SavedLoader.add_constructor(f"{_PYTHON}tuple", _tuple)
_SavedLoader.add_constructor(f"{_PYTHON}object:{ShapeSpec.__module__}.ShapeSpec", _shape)
_SavedLoader.add_multi_constructor(f"{_PYTHON}name:", _class)
_SavedLoader.add_multi_constructor(_PYTHON, _refused)


def read_plain(text: str) -> Any:
    """A YAML text, with the parts of Python objects for the objects.

    Raises:
        yaml.YAMLError: it is not YAML.
    """
    return yaml.load(text, _PlainLoader)


def read_saved(file: str | Path) -> Any:
    """A YAML file with the objects that a saved LazyConfig needs: tuples, ``ShapeSpec``, classes.

    Raises:
        ConfigError: the file cannot be read, or holds other Python objects, which as Detectron2
            reads them could run any program.
    """
    try:
        return yaml.load(Path(file).read_text("utf-8"), _SavedLoader)
    except yaml.constructor.ConstructorError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        raise ConfigError(
            f"{file} is refused: its line {line} holds {error.problem!r}, and of Python objects a "
            "saved LazyConfig may hold tuples, ShapeSpec and classes; write that value as plain "
            "YAML, or take the Python file that the LazyConfig was saved from."
        ) from error
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"{file} cannot be read as YAML ({reason(error)}); mend it, or name another file."
        ) from error


def is_lazy(loaded: Any) -> bool:
    """Whether what a YAML file holds is a LazyConfig, and not Detectron2's keys in capitals."""
    return isinstance(loaded, dict) and isinstance(loaded.get("model"), dict)


def is_lazy_file(file: str | Path) -> bool:
    """Whether a configuration file is a LazyConfig: Python, or YAML that was saved from it.

    What is not there or no YAML is none; who reads it has the word on it.
    """
    if Path(file).suffix == ".py":
        return True
    try:
        return is_lazy(read_plain(Path(file).read_text("utf-8")))
    except (OSError, ValueError, TypeError, yaml.YAMLError):
        return False
