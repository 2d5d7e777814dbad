"""A LazyConfig out of its file and the command line, with a clear word on each mistake."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode, LazyConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lambda_det.detection.lazy_config import KEYS, OTHER_TRAIN_KEYS, LazyRun, first_line
from lambda_det.errors import ConfigError, UserError
from lambda_det.training.config_file import load_config
from lambda_det.training.lazy_yaml import is_lazy_file, read_saved

__all__ = ["load_config_of_either_kind", "load_lazy_config", "load_lazy_file", "unused_train_keys"]

_DATA_FLAGS = ("train_json", "train_images", "test_json", "test_images")


def load_lazy_config(args: argparse.Namespace) -> LazyRun:
    """Run the Python of --config-file, then take the key=value pairs and the data flags.

    Args:
        args: of :func:`lambda_det.detection.lazy_parser`.

    Raises:
        ConfigError: the file is missing, fails or is no such configuration, or a key or value
            cannot be.
    """
    if not args.config_file:
        raise ConfigError("There is no config file; --config-file names one.")
    lazy = load_lazy_file(args.config_file)
    for key, value in _overrides(args.opts or []):
        _check_key(lazy, key.lstrip("+"), added=key.startswith("+"))
        try:
            OmegaConf.update(lazy, key.lstrip("+"), value, merge=True)
        except OmegaConfBaseException as error:
            raise ConfigError(f"{key}={value} cannot be set: {first_line(error)}.") from error
    for flag in _DATA_FLAGS:
        if getattr(args, flag, None):
            OmegaConf.update(lazy, f"dataloader.{flag}", getattr(args, flag))
    return LazyRun.of(lazy)


def load_lazy_file(file: str | Path) -> DictConfig:
    """A LazyConfig as its file has it: Python, which is run, or YAML, of which nothing is.

    Raises:
        ConfigError: it is missing, fails or holds something else.
    """
    file = Path(file)
    if not file.is_file():
        near = difflib.get_close_matches(file.name, [p.name for p in file.parent.glob("*.py")], 2)
        hint = f"; in {file.parent} there is {' and '.join(near)}." if near else "; check the path."
        raise ConfigError(f"There is no config file {file}{hint}")
    try:
        if file.suffix in (".yaml", ".yml"):  # Detectron2 would run what tags in it name
            lazy = OmegaConf.create(read_saved(file), flags={"allow_objects": True})
        else:
            lazy = LazyConfig.load(str(file))
    except UserError:
        raise
    except Exception as error:  # it is a program, and may raise anything
        raise ConfigError(
            f"{file} fails as it is loaded: {type(error).__name__}: {first_line(error)}."
        ) from error
    if not isinstance(lazy, DictConfig):
        raise ConfigError(f"{file} holds no mapping, and so no LazyConfig.")
    return lazy


def load_config_of_either_kind(args: argparse.Namespace) -> CfgNode:
    """What --config-file describes, which is YAML or a LazyConfig; its content says which.

    Returns:
        A :class:`LazyRun` for a LazyConfig.

    Raises:
        ConfigError: as :func:`load_lazy_config` or :func:`lambda_det.detection.load_config` do.
    """
    return load_lazy_config(args) if is_lazy_file(args.config_file) else load_config(args)


def _overrides(opts: list[str]) -> Iterator[tuple[str, Any]]:
    for text in opts:
        if text.startswith("--"):
            raise ConfigError(f"{text} stands among the key=value pairs; flags come before them.")
        try:
            [override] = OverridesParser.create().parse_overrides([text])
        except OverrideParseException as error:
            raise ConfigError(
                f"{text!r} is not key=value, such as train.output_dir=output/mine."
            ) from error
        if override.is_delete():
            raise ConfigError(f"{text} would remove a key; set it to null, or edit the file.")
        yield ("+" if override.is_add() else "") + override.key_or_group, override.value()


def _check_key(lazy: DictConfig, key: str, *, added: bool) -> None:
    """Refuse a key that nothing reads; Detectron2 would take it without a word."""
    if added or key in KEYS.values() or key in OTHER_TRAIN_KEYS:
        return
    node: Any = lazy
    for name in key.split("."):
        if isinstance(node, ListConfig):
            return  # OmegaConf looks at the index
        if isinstance(node, DictConfig) and "_target_" in node and key.endswith(f".{name}"):
            return  # what it names looks at its arguments
        if not isinstance(node, DictConfig) or name not in node:
            near = difflib.get_close_matches(key, list(_all_keys(lazy)), n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(
                f"The command line sets {key}, which the configuration does not have{hint} "
                f"(+{key}=... adds it)"
            )
        node = node._get_node(name)


def _all_keys(node: DictConfig, prefix: str = "") -> Iterator[str]:
    for name in node:
        yield prefix + str(name)
        child = node._get_node(name)
        if isinstance(child, DictConfig) and not child._is_none() and not child._is_interpolation():
            yield from _all_keys(child, f"{prefix}{name}.")


def unused_train_keys(lazy: DictConfig) -> list[str]:
    """Keys of ``train`` that this engine does not know, such as those of another project."""
    known = {*KEYS.values(), *OTHER_TRAIN_KEYS}
    sections = {name.rpartition(".")[0] for name in known}
    keys = [f"train.{name}" for name in _all_keys(lazy.train)]
    return [
        key for key in keys if key not in known | sections and key.rpartition(".")[0] in sections
    ]
