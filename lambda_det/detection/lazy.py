"""Read LazyConfigs from a file and a command line, and save them as YAML."""

from __future__ import annotations

import argparse
import contextlib
import sys
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

import yaml
from detectron2.config import LazyConfig
from detectron2.layers import ShapeSpec
from detectron2.utils.registry import _convert_target_to_string
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException
from omegaconf import DictConfig, ListConfig, OmegaConf, SCMode

from lambda_det.config import FIXED, FREE, PYTHON_TAG, SAMPLES, leaves
from lambda_det.config import KEYS as YAML
from lambda_det.detection.schedule import SCALED
from lambda_det.errors import ConfigError, UserError, reason, refused, suggest
from lambda_det.training.config_file import ConfigFile

# The key of a LazyConfig for each setting: Detectron2's and detrex's names, or train.NAME
KEYS = {name: f"train.{name}" for name in ("log_period", "precise_bn_batches")} | {
    row.setting: row.lazy or f"train.{row.setting}"
    for row in YAML.values()
    if row.setting not in ("", "clipping.kind")
}
# What a resumed run may change: what the table says of these settings, and some sections
ON_RESUME = {
    KEYS[row.setting]: row.on_resume
    for row in YAML.values()
    if row.setting in KEYS and row.on_resume
} | {
    "model": FIXED,
    "model.backbone.bottom_up.checkpoint_activations": FREE,
    "model.backbone.bottom_up.implementation": FREE,
    "model.vis_period": FREE,
    "optimizer": FIXED,
    "dataloader": SAMPLES,
    "dataloader.evaluator": FREE,
    "dataloader.test": FREE,
    "dataloader.train.max_unreadable": FREE,
    "train.model_ema.enabled": FIXED,
}


# ------------------------------------------------------------------------------------------ reading
def load_lazy_config(args: argparse.Namespace, file: ConfigFile | None = None) -> DictConfig:
    """Run the Python of --config-file, then take the key=value pairs.

    Args:
        args: of :func:`lambda_det.detection.lazy_parser`.
        file: ``args.config_file``, where it was opened already.

    Raises:
        ConfigError: there is no such file, a pair cannot be read, or its key does not exist.
    """
    config = load_lazy_file(file or ConfigFile(args.config_file))
    what = "The words after the flags, which are pairs such as train.max_iter=40, cannot be read"
    with refused(ConfigError, what, "correct them", OverrideParseException):
        overrides = OverridesParser.create().parse_overrides(list(args.opts or []))
    for override in overrides:
        key = override.key_or_group
        if override.is_delete():
            raise ConfigError(f"~{key} would remove a key; set it to null, or edit the file.")
        if not override.is_add():
            _check_key(config, key)
        OmegaConf.update(config, key, override.value(), merge=True)
    unscaled = {override.key_or_group for override in overrides} & {KEYS[name] for name in SCALED}
    if unscaled and "train" in config:
        unscaled.update(config.train.get("unscaled") or ())
        config.train.unscaled = sorted(unscaled)
    return config


def load_lazy_file(file: ConfigFile) -> DictConfig:
    """Load a LazyConfig from its file: Python, which is run, or YAML, which runs nothing.

    Raises:
        ConfigError: it is missing, or cannot be read.
    """
    file.refuse_missing()
    with lazy_code(f"{file.path} cannot be loaded"):
        if file.path.endswith((".yaml", ".yml")):  # Detectron2 would run what its tags name
            config = OmegaConf.create(read_saved(file), flags={"allow_objects": True})
        else:
            config = LazyConfig.load(file.path)
    return config


@contextlib.contextmanager
def lazy_code(what: str) -> Iterator[None]:
    """Turn errors of code that a LazyConfig runs into one sentence, with their type and line.

    The file and its nodes run code of users and of other projects, which may raise anything.

    Args:
        what: failed, with the name of the file or node.

    Raises:
        ConfigError: the code raised an exception that is not a UserError.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"{what}: {type(error).__name__}: {reason(error)} ({place.filename}, line "
            f"{place.lineno})."
        ) from error


def _check_key(config: DictConfig, key: str) -> None:
    """Refuse a key that is neither there nor an argument of a node's target: a typing error."""
    # Detectron2 adds it to the configuration, where nothing reads it
    section, _, name = key.rpartition(".")
    node = OmegaConf.select(config, section) if section else config
    is_call = isinstance(node, DictConfig) and "_target_" in node
    numbers = range(len(node)) if isinstance(node, ListConfig) else ()
    if is_call or name in map(str, node if isinstance(node, DictConfig) else numbers):
        return
    raise ConfigError(
        f"The command line sets {key}, which the configuration does not have (+{key}=... adds it)"
        f"{suggest(key, dict(leaves(OmegaConf.to_container(config))))}"
    )


# ------------------------------------------------------------------------------------ saved as YAML
class _SavedLoader(yaml.SafeLoader):
    """Creates only the few objects that a LazyConfig of Detectron2 or of this package holds."""


def _class(loader: yaml.SafeLoader, name: str, node: yaml.Node) -> type:
    """A class, as nodes of RegNet have it, looked up among imported modules and not called."""
    module, _, last = name.rpartition(".")
    found = getattr(sys.modules.get(module), last, None)
    return found if isinstance(found, type) else loader.construct_undefined(node)


_SavedLoader.add_constructor(
    f"{PYTHON_TAG}tuple", lambda loader, node: tuple(loader.construct_sequence(node, deep=True))
)
_SavedLoader.add_constructor(
    f"{PYTHON_TAG}object:{ShapeSpec.__module__}.ShapeSpec",
    lambda loader, node: ShapeSpec(**loader.construct_mapping(node, deep=True)),
)
_SavedLoader.add_multi_constructor(f"{PYTHON_TAG}name:", _class)


def read_saved(file: ConfigFile) -> Any:
    """A YAML file with the objects that a saved LazyConfig needs: tuples, ``ShapeSpec``, classes.

    Raises:
        ConfigError: the file cannot be read, or holds other Python objects, with which any program
            could run in Detectron2's reader.
    """
    what = f"{file.path} cannot be read as YAML"
    advice = (
        "correct it, or take the Python file that it was saved from; of Python objects it may hold "
        "tuples, ShapeSpec and classes"
    )
    with refused(ConfigError, what, advice, OSError, ValueError, TypeError, yaml.YAMLError):
        return yaml.load(file.text, _SavedLoader)


def dump_lazy(lazy: DictConfig) -> str:
    """A LazyConfig as text. ``LazyConfig.save`` writes files in place, and pickles beside them."""
    content = OmegaConf.to_container(lazy, resolve=False, structured_config_mode=SCMode.INSTANTIATE)
    # in the order of the file, in which nodes are made and draw their random numbers
    form = {"default_flow_style": None, "allow_unicode": True, "width": 9999, "sort_keys": False}
    return yaml.dump(_by_name(content), **form)


def _by_name(node: Any) -> Any:
    """Write targets as their names, and objects that YAML cannot hold as a text about them."""
    if isinstance(node, Mapping):
        node, target = dict(node), node.get("_target_")
        if callable(target):
            has_name = hasattr(target, "__qualname__")
            node["_target_"] = _convert_target_to_string(target) if has_name else str(target)
        return {name: _by_name(value) for name, value in node.items()}
    if isinstance(node, (list, tuple)):
        return [_by_name(value) for value in node]
    try:
        yaml.dump(node)
    except Exception:  # whatever an object's __reduce__ raises
        return str(node)
    return node
