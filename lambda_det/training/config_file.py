"""Read configurations of keys and values from YAML files and command lines, with clear errors."""

from __future__ import annotations

import contextlib
import copy
import io
import os
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import detectron2
import yaml
from detectron2.config import CfgNode

from lambda_det.config import CONFIGS, REMOVED_KEYS, leaves, read_plain
from lambda_det.errors import ConfigError, refused, suggest
from lambda_det.training.run_folder import CONFIG, RunFolder

# The configurations that Detectron2 installs
ZOO = (Path(detectron2.__file__).parent / "model_zoo" / "configs").resolve()
# What a file describes: a training by nodes, or the training of a detector or classifier by keys
LAZY, DETECTOR, CLASSIFIER = "LazyConfig", "detector", "classifier"


class ConfigFile:
    """A configuration file, which is opened once, when it is first asked for what it holds.

    Attributes:
        path: of the file.
    """

    def __init__(self, path: str | os.PathLike, text: str | None = None) -> None:
        """
        Args:
            path: of a file of YAML, or of a LazyConfig in Python.
            text: the configuration, where the file is of another kind and records it.
        """
        self.path = os.fspath(path)
        self._recorded = text

    @cached_property
    def text(self) -> str:
        """
        Raises:
            OSError, UnicodeDecodeError: it cannot be read.
        """
        return Path(self.path).read_text("utf-8") if self._recorded is None else self._recorded

    @property
    def is_recorded(self) -> bool:
        """Whether a run wrote it: into a checkpoint, or as the config.yaml of its folder."""
        path = Path(self.path)
        is_of_folder = path.name == CONFIG and RunFolder(path.parent).has_own_config
        return self._recorded is not None or is_of_folder

    @cached_property
    def content(self) -> dict[str, Any]:
        """The keys and values of YAML, in place of its _BASE_'s.

        Files are read as plain data, except those that Detectron2 has installed, because its
        RetinaNet computes its anchors. Detectron2's own reader lets a tag in any file run a
        program.

        Raises:
            ConfigError: the file is missing or not a mapping, or has other objects than plain data.
        """
        self.refuse_missing()
        what = f"{self.path} or its _BASE_ is no YAML of keys and plain values"
        advice = "write it such as `SOLVER:` with an indented `MAX_ITER: 1000` under it"
        # A _BASE_ that is not there; a tag of Python; an impossible date; not UTF-8; a file that is
        # its own _BASE_; and by what Detectron2 refuses what is no mapping
        errors = (OSError, yaml.YAMLError, ValueError, RecursionError)
        errors += (TypeError, AttributeError, AssertionError)
        with refused(ConfigError, what, advice, *errors):
            if self._recorded is None:
                loaded = _reader(self).load_yaml_with_base(self.path)
            else:
                loaded = yaml.safe_load(self.text)
            if not isinstance(loaded, dict):
                raise ValueError("it is not a mapping")
            return loaded

    def refuse_missing(self) -> None:
        """
        Raises:
            ConfigError: the file is missing; similar names of its kind follow.
        """
        path = Path(self.path)
        if self._recorded is None and not path.is_file():
            kind = "*.py" if path.suffix == ".py" else "*.yaml"
            there = {str(one) for one in path.parent.glob(kind)}
            there |= {f"configs/{one.relative_to(CONFIGS)}" for one in CONFIGS.rglob(kind)}
            raise ConfigError(f"There is no config file {path}{suggest(self.path, sorted(there))}")

    @property
    def is_lazy(self) -> bool:
        """Whether it is a LazyConfig: Python, or YAML that a run saved, which runs nothing here.

        A missing file, or one that is no YAML, is none; its reader reports the error.
        """
        if Path(self.path).suffix == ".py":
            return True
        try:
            content = read_plain(self.text)  # which may have the tags of Python
        except (OSError, ValueError, TypeError, yaml.YAMLError):
            return False
        return isinstance(content, dict) and isinstance(content.get("model"), dict)


def _reader(file: ConfigFile) -> type[CfgNode]:
    """Detectron2's reader, for a file that is opened already."""

    class Reader(CfgNode):
        @classmethod
        def _open_cfg(cls, filename: str) -> Any:
            return io.StringIO(file.text) if filename == file.path else super()._open_cfg(filename)

        @classmethod
        def load_yaml_with_base(cls, filename: str, allow_unsafe: bool = False) -> dict[str, Any]:
            """Each file of a chain of _BASE_ is trusted by its place."""
            is_trusted = Path(filename).resolve().is_relative_to(ZOO)
            return super().load_yaml_with_base(filename, is_trusted)

    return Reader


def kind_of(file: ConfigFile) -> str:
    """What a configuration file describes, by its content: LAZY, DETECTOR or CLASSIFIER.

    A file that cannot be read counts as a detector's; its reader reports the error.
    """
    if file.is_lazy:
        return LAZY
    try:
        content = file.content
    except ConfigError:
        return DETECTOR
    model = content.get("MODEL")
    is_recipe = "DATA" in content or (isinstance(model, dict) and "NAME" in model)
    return CLASSIFIER if is_recipe else DETECTOR


def read_config(
    cfg: CfgNode,
    file: ConfigFile | None,
    opts: Sequence[str] | None,
    add_keys: Callable[[CfgNode, list[tuple[str, Any]]], None] = lambda cfg, settings: None,
) -> None:
    """Read a file, if any, and then KEY VALUE pairs over the values in ``cfg``.

    Args:
        cfg: gets the values; not frozen.
        file: of YAML.
        opts: keys and values in turn, as on a command line.
        add_keys: adds the keys to ``cfg`` that the given (key, value) pairs need.

    Raises:
        ConfigError: the file is missing or not a mapping, or a key or value cannot be.
    """
    settings = list(leaves(copy.deepcopy(file.content))) if file else []
    if file and file.is_recorded:
        settings = [(key, value) for key, value in settings if key not in REMOVED_KEYS]
    opts = list(opts or [])
    if len(opts) % 2:
        raise ConfigError(
            f"Keys are given in pairs KEY VALUE, and {opts[-1]!r} has no partner; write "
            "SOLVER.MAX_ITER 1000, without =; and most options take a single value."
        )
    pairs = zip(opts[::2], opts[1::2], strict=True)
    given = [(key, value, file.path) for key, value in settings]
    given += [(key, value, "the command line") for key, value in pairs]
    add_keys(cfg, [(key, value) for key, value, _ in given])
    for key, value, where in given:
        _set(cfg, key, value, where)


def _set(cfg: CfgNode, key: str, value: Any, where: str) -> None:
    known = dict(leaves(cfg))
    if key not in known:
        hint = suggest(key, known)
        raise ConfigError(f"{where} sets {key}, which is no configuration key{hint}")
    before = known[key]
    if isinstance(before, float) and isinstance(value, (int, str)) and not isinstance(value, bool):
        # yacs refuses whole numbers, also in quotes, for a key with a fraction
        with contextlib.suppress(ValueError):
            value = float(value)
    if isinstance(before, str) and isinstance(value, str):
        value = repr(value)  # or yacs would read a folder named 2024 as a number
    try:
        cfg.merge_from_list([key, value])
    except (ValueError, SyntaxError) as error:
        raise ConfigError(
            f"{where} sets {key} to {value!r}; it must be of type {type(before).__name__}, such as "
            f"{before!r}."
        ) from error
