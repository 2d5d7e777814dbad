"""Read configurations of keys and values from YAML files and command lines, with clear errors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import detectron2
import yaml
from detectron2.config import CfgNode

from lambda_det.config import CONFIGS, leaves
from lambda_det.errors import ConfigError, reason, refused, suggest

__all__ = ["ZOO", "read_config"]

# The configurations that Detectron2 installs
ZOO = (Path(detectron2.__file__).parent / "model_zoo" / "configs").resolve()


def read_config(
    cfg: CfgNode,
    file: str | None,
    opts: Sequence[str] | None,
    add_keys: Callable[[CfgNode, list[tuple[str, Any]]], None] = lambda cfg, settings: None,
    text: str | None = None,
) -> None:
    """Read a file, if any, and then KEY VALUE pairs over the defaults in ``cfg``.

    Files are read as plain data, except those that Detectron2 has installed, because its RetinaNet
    computes its anchors. Detectron2's own reader lets a tag in any file run a program.

    Args:
        cfg: gets the values; not frozen.
        file: of YAML.
        opts: keys and values in turn, as on a command line.
        add_keys: adds the keys to ``cfg`` that the given (key, value) pairs need.
        text: of the configuration, where ``file`` is a file of another kind that records it.

    Raises:
        ConfigError: the file is missing or not a mapping, or a key or value cannot be.
    """
    settings = []
    if text is not None:
        settings = list(leaves(_load_text(text, file)))
    elif file:
        settings = list(leaves(_load_yaml(file)))
    opts = list(opts or [])
    _check_pairs(opts)
    pairs = list(zip(opts[::2], opts[1::2], strict=True))
    add_keys(cfg, settings + pairs)
    for key, value in settings:
        _set(cfg, key, value, file)
    for key, value in pairs:
        _set(cfg, key, value, "the command line")


class _File(CfgNode):
    @classmethod
    def load_yaml_with_base(cls, filename: str, allow_unsafe: bool = False) -> dict[str, Any]:
        """Each file of a chain of _BASE_ is trusted by its place."""
        return super().load_yaml_with_base(filename, Path(filename).resolve().is_relative_to(ZOO))


def _load_yaml(file: str) -> dict[str, Any]:
    if not Path(file).is_file():
        there = {str(path) for path in Path(file).parent.glob("*.yaml")}
        there |= {f"configs/{p.relative_to(CONFIGS)}" for p in CONFIGS.rglob("*.yaml")}
        raise ConfigError(f"There is no config file {file}{suggest(file, sorted(there))}")
    try:
        loaded = _File.load_yaml_with_base(file)
    except OSError as error:
        raise ConfigError(
            f"A _BASE_ of {file} cannot be read: {error.filename or error}."
        ) from error
    except (yaml.YAMLError, ValueError) as error:  # a tag of Python; an impossible date; not UTF-8
        raise ConfigError(
            f"{file} or its _BASE_ is not valid YAML of plain values: {reason(error)}"
        ) from error
    except (TypeError, AttributeError, AssertionError):
        loaded = None
    if not isinstance(loaded, dict):
        raise ConfigError(
            f"{file} or its _BASE_ is not a mapping of keys to values, such as `SOLVER:` with an "
            "indented `MAX_ITER: 1000` under it."
        )
    return loaded


def _load_text(text: str, file: str | None) -> dict[str, Any]:
    what = f"The configuration that {file} records cannot be read"
    with refused(ConfigError, what, "use another copy", yaml.YAMLError, ValueError, RecursionError):
        loaded = yaml.safe_load(text)
        if not isinstance(loaded, dict):
            raise ValueError("it is no mapping")
        return loaded


def _check_pairs(opts: list[str]) -> None:
    if len(opts) % 2:
        raise ConfigError(
            f"Keys are given in pairs KEY VALUE, and {opts[-1]!r} has no partner; write "
            "SOLVER.MAX_ITER 1000, without =."
        )


def _set(cfg: CfgNode, key: str, value: Any, where: str) -> None:
    if cfg.key_is_deprecated(key):
        return
    node: Any = cfg
    for name in key.split("."):
        if not isinstance(node, CfgNode) or name not in node:
            hint = suggest(key, (known for known, _ in leaves(cfg)))
            raise ConfigError(f"{where} sets {key}, which is no configuration key{hint}")
        node = node[name]
    if isinstance(node, CfgNode):
        raise ConfigError(f"{where} sets {key} to {value!r}, but {key} is a section of keys.")
    if isinstance(node, float) and isinstance(value, (int, str)) and not isinstance(value, bool):
        # yacs refuses whole numbers, also in quotes, for a key with a fraction
        with contextlib.suppress(ValueError):
            value = float(value)
    if isinstance(node, str) and isinstance(value, str):
        value = repr(value)  # or yacs would read a folder named 2024 as a number
    try:
        cfg.merge_from_list([key, value])
    except (ValueError, SyntaxError) as error:
        raise ConfigError(
            f"{where} sets {key} to {value!r}; it must be of type {type(node).__name__}, such as "
            f"{node!r}."
        ) from error
