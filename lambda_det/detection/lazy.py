"""LazyConfigs: read from a file and a command line, as settings of a run, and saved as YAML."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from detectron2.config import LazyConfig
from detectron2.layers import ShapeSpec
from detectron2.utils.registry import _convert_target_to_string
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException
from omegaconf import DictConfig, ListConfig, OmegaConf, SCMode
from omegaconf.errors import OmegaConfBaseException

from lambda_det.config import PYTHON_TAG, read_plain
from lambda_det.detection.config import FITTED_KEYS, flag_settings
from lambda_det.errors import ConfigError, UserError, reason, suggest

# Sections of YAML of which these keys have the same names in a LazyConfig, in small letters
_ALIKE = {
    "": ("train", "OUTPUT_DIR SEED CUDNN_BENCHMARK FLOAT32_PRECISION EVENT_WRITERS"),
    "DATASETS": (
        "dataloader",
        "TRAIN_JSON TRAIN_IMAGES TEST_JSON TEST_IMAGES VAL_SHARE GROUP_BY STRATIFY",
    ),
    "INPUT": ("dataloader.train.mixing", "COLOR COPY_PASTE MOSAIC"),
    "MODEL": ("train", "CHANNELS_LAST DEVICE"),
    "RECIPE": ("train.recipe", "ENABLED EPOCHS MIN_STEPS EVALUATIONS MEMORY KEEP"),
    "SOLVER": ("train", "ACCUMULATE_GRADIENTS MAX_ITER REFERENCE_WORLD_SIZE"),
    "SOLVER.AMP": ("train.amp", "DTYPE ENABLED"),
    "SOLVER.CLIP_GRADIENTS": ("train.clip_gradients", "CLIP_TYPE CLIP_VALUE ENABLED NORM_TYPE"),
    "TEST": ("train", "BEST_METRIC EVAL_PERIOD PATIENCE"),
    "TEST.AUG": ("train.test_aug", "ENABLED MIN_SIZES MAX_SIZE FLIP"),
    "TEST.PRECISE_BN": ("train.precise_bn", "ENABLED NUM_ITER"),
}
# Where a LazyConfig has what a key of YAML says; ``train`` is that of configs/common/train.py
# fmt: off
PLACES = {
    f"{section}.{key}".lstrip("."): f"{place}.{key.lower()}"
    for section, (place, keys) in _ALIKE.items() for key in keys.split()
} | {
    "INPUT.FORMAT":                           "dataloader.train.mapper.image_format",
    "DATASETS.TRAIN":                         "dataloader.train.dataset.names",
    "DATASETS.TEST":                          "dataloader.test.dataset.names",
    "DATALOADER.ASPECT_RATIO_GROUPING":       "dataloader.train.aspect_ratio_grouping",
    "DATALOADER.FILTER_EMPTY_ANNOTATIONS":    "dataloader.train.dataset.filter_empty",
    "DATALOADER.NUM_WORKERS":                 "dataloader.train.num_workers",
    "SOLVER.BASE_LR":                         "optimizer.lr",
    "SOLVER.CHECKPOINT_PERIOD":               "train.checkpointer.period",
    "SOLVER.EMA_DECAY":                       "train.model_ema.decay",
    "SOLVER.IMS_PER_BATCH":                   "dataloader.train.total_batch_size",
    "SOLVER.STEPS":                           "lr_multiplier.scheduler.milestones",
    "SOLVER.WARMUP_ITERS":                    "lr_multiplier.warmup_length",
    "TEST.DETECTIONS_PER_IMAGE":              "model.roi_heads.box_predictor.test_topk_per_image",
    "TEST.LOSS":                              "train.test_loss",
    "TEST.PRECISION":                         "train.test_precision",
    "MODEL.WEIGHTS":                          "train.init_checkpoint",
    "MODEL.META_ARCHITECTURE":                "model._target_",
    "MODEL.PIXEL_MEAN":                       "model.pixel_mean",
    "MODEL.PIXEL_STD":                        "model.pixel_std",
    "MODEL.MASK_ON":                          "dataloader.train.mapper.use_instance_mask",
    "MODEL.ROI_HEADS.NUM_CLASSES":            "model.roi_heads.num_classes",
    "MODEL.ROI_HEADS.NMS_THRESH_TEST":        "model.roi_heads.box_predictor.test_nms_thresh",
    "MODEL.RETINANET.NUM_CLASSES":            "model.num_classes",
    "MODEL.RETINANET.IN_FEATURES":            "model.head_in_features",
    "MODEL.RPN.IN_FEATURES":                  "model.proposal_generator.in_features",
    "MODEL.SEM_SEG_HEAD.NUM_CLASSES":         "model.sem_seg_head.num_classes",
    "MODEL.SEM_SEG_HEAD.IGNORE_VALUE":        "model.sem_seg_head.ignore_value",
    "MODEL.PROPOSAL_GENERATOR.NAME":          "model.proposal_generator._target_",
    "MODEL.ANCHOR_GENERATOR.NAME":            "model.proposal_generator.anchor_generator._target_",
    "MODEL.ANCHOR_GENERATOR.SIZES":           "model.proposal_generator.anchor_generator.sizes",
    "MODEL.ANCHOR_GENERATOR.ASPECT_RATIOS":
        "model.proposal_generator.anchor_generator.aspect_ratios",
}
# fmt: on
# Keys that a command line may set though the file does not have them
_KNOWN = {place for place in PLACES.values() if not place.startswith("model.")} | {
    "train.model_ema.enabled",
    "train.log_period",
    "train.checkpointer.max_to_keep",
    "train.ddp.find_unused_parameters",
    "train.ddp.fp16_compression",
    "dataloader.train.max_unreadable",
    "dataloader.train.timeout",
}
# What a recipe or the number of processes may change, and the command line sets literally
_FITTED = {PLACES[key] for key in FITTED_KEYS & PLACES.keys()} | {
    f"model.anchor_generator.{key}" for key in ("sizes", "aspect_ratios")
}
_NEEDED = ("model", "dataloader", "optimizer", "lr_multiplier", "train", "train.max_iter")
# What is read of the top of a configuration and of its dataloader
_PARTS = (*_NEEDED, "dataloader.train", "dataloader.test", "dataloader.evaluator")


# ------------------------------------------------------------------------------------------ reading
def load_lazy_config(args: argparse.Namespace) -> DictConfig:
    """Run the Python of --config-file, then take the key=value pairs and the data flags.

    Args:
        args: of :func:`lambda_det.detection.lazy_parser`.

    Raises:
        ConfigError: the file is missing, fails or is no such configuration, or a key or value
            cannot be.
    """
    if not args.config_file:
        raise ConfigError("There is no config file; --config-file names one.")
    lazy, typed = load_lazy_file(args.config_file), set()
    for key, value in _overrides(args.opts or []):
        typed.add(key.lstrip("+"))
        _check_key(lazy, key.lstrip("+"), added=key.startswith("+"))
        try:
            OmegaConf.update(lazy, key.lstrip("+"), value, merge=True)
        except OmegaConfBaseException as error:
            raise ConfigError(f"{key}={value} cannot be set: {_first_line(error)}.") from error
    for key, value in flag_settings(args).items():
        typed.add(PLACES[key])
        OmegaConf.update(lazy, PLACES[key], value)
    for name in _NEEDED:
        if select(lazy, name) is None:
            raise ConfigError(
                f"The configuration has no {name}: a LazyConfig to train has model, dataloader, "
                "optimizer, lr_multiplier and train, as those in configs/."
            )
    if kept := sorted(_FITTED & typed):
        before = select(lazy, "train.recipe.keep") or ()
        OmegaConf.update(lazy, "train.recipe.keep", sorted({*before, *kept}))
    return lazy


def load_lazy_file(file: str | Path) -> DictConfig:
    """A LazyConfig as its file has it: Python, which is run, or YAML, of which nothing is.

    Raises:
        ConfigError: it is missing, fails or holds something else.
    """
    file = Path(file)
    if not file.is_file():
        hint = suggest(str(file), map(str, file.parent.glob("*.py")))
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
            f"{file} fails as it is loaded: {type(error).__name__}: {_first_line(error)}."
        ) from error
    if not isinstance(lazy, DictConfig):
        raise ConfigError(f"{file} holds no mapping, and so no LazyConfig.")
    return lazy


def is_lazy(loaded: Any) -> bool:
    """Whether what a YAML file holds is a LazyConfig, and not Detectron2's keys in capitals."""
    return isinstance(loaded, dict) and isinstance(loaded.get("model"), dict)


def is_lazy_file(file: str | Path) -> bool:
    """Whether a configuration file is a LazyConfig: Python, or YAML that was saved from it.

    A file that is missing or no YAML is none; whoever reads it reports that.
    """
    if Path(file).suffix == ".py":
        return True
    try:
        return is_lazy(read_plain(Path(file).read_text("utf-8")))
    except (OSError, ValueError, TypeError, yaml.YAMLError):
        return False


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
    """Refuse a key that nothing reads; Detectron2 would silently take it."""
    if key in _KNOWN:
        return
    names, there = key.split("."), list(_all_keys(lazy))
    part = ".".join(names[: 2 if names[0] == "dataloader" else 1])
    can_be_added = part in _PARTS or part in there
    section = select(lazy, ".".join(names[:-1])) if len(names) > 1 else None
    # OmegaConf looks at an index of a list, and what a node makes at its arguments
    is_checked = isinstance(section, ListConfig) or (
        isinstance(section, DictConfig) and "_target_" in section
    )
    if key in there or is_checked or (added and can_be_added):
        return
    how = f"+{key}=... adds it" if can_be_added else "and nothing would read it"
    raise ConfigError(
        f"The command line sets {key}, which the configuration does not have ({how})"
        f"{suggest(key, there)}"
    )


def _all_keys(node: DictConfig, prefix: str = "") -> Iterator[str]:
    for name in node:
        yield prefix + str(name)
        child = node._get_node(name)
        if isinstance(child, DictConfig) and not child._is_none() and not child._is_interpolation():
            yield from _all_keys(child, f"{prefix}{name}.")


def refuse_unknown_train_keys(lazy: DictConfig) -> None:
    """Refuse keys of ``train`` that nothing here reads, such as those of another project.

    What is switched off may stand there: null, False, and a section whose ``enabled`` is False.

    Raises:
        ConfigError: it names the key, and a key of ours with a name like it.
    """
    sections = {name.rpartition(".")[0] for name in _KNOWN}
    for name in _all_keys(lazy.train):
        key = f"train.{name}"
        if key in _KNOWN | sections or key.rpartition(".")[0] not in sections:
            continue
        value = select(lazy, key)
        if value in (None, False, "") or (
            isinstance(value, DictConfig) and not value.get("enabled", 1)
        ):
            continue
        raise ConfigError(
            f"The configuration has {key}, which nothing here reads"
            f"{suggest(key, sorted(_KNOWN), 0.8)} Correct its name, or set "
            f"{key}=null to train without it."
        )


def read_value(lazy: DictConfig, key: str, default: Any) -> Any:
    """A value of the type of ``default``, which is taken where the key is absent or null.

    Raises:
        ConfigError: it is of another type, or refers to what is not there.
    """
    value = select(lazy, key)
    value = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    if value is None:
        return default
    kind = type(default)
    if kind is float and type(value) is int:
        value = float(value)
    fits = isinstance(value, (list, tuple)) if kind in (list, tuple) else type(value) is kind
    if not fits:
        raise ConfigError(
            f"{key} is {value!r}; it must be of type {kind.__name__}, such as {default!r}."
        )
    return value


def select(lazy: DictConfig, name: str) -> Any:
    """A value or node by its dotted key; None where it is absent.

    Raises:
        ConfigError: it refers to what is not there.
    """
    try:
        return OmegaConf.select(lazy, name)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{name} cannot be read: {_first_line(error)}.") from error


def _first_line(error: Exception) -> str:
    """Of what an error of another library says."""
    return next(iter(str(error).strip().splitlines()), "").rstrip(".")


# ------------------------------------------------------------------------------------ saved as YAML
class _SavedLoader(yaml.SafeLoader):
    """Makes the few objects that a LazyConfig of Detectron2 or of ours holds, and no others."""


def _class(loader: yaml.SafeLoader, name: str, node: yaml.Node) -> type:
    """As nodes of RegNet have them; found among what is imported already, and not called."""
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


def read_saved(file: str | Path) -> Any:
    """A YAML file with the objects that a saved LazyConfig needs: tuples, ``ShapeSpec``, classes.

    Raises:
        ConfigError: the file cannot be read, or holds other Python objects, which as Detectron2
            reads them could run any program.
    """
    try:
        return yaml.load(Path(file).read_text("utf-8"), _SavedLoader)
    except yaml.constructor.ConstructorError as error:
        raise ConfigError(
            f"{file} is refused: line {error.problem_mark.line + 1} {error.problem}. Of Python "
            "objects a saved LazyConfig may hold tuples, ShapeSpec and classes; write that value "
            "as plain YAML, or take the Python file that the LazyConfig was saved from."
        ) from error
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"{file} cannot be read as YAML ({reason(error)}); mend it, or name another file."
        ) from error


def dump_lazy(lazy: DictConfig) -> str:
    """``LazyConfig.save`` as text: that one writes files in place, and pickles beside them."""
    content = OmegaConf.to_container(lazy, resolve=False, structured_config_mode=SCMode.INSTANTIATE)
    # In the order of the file: parts are made in it, and draw their random numbers
    form = {"default_flow_style": None, "allow_unicode": True, "width": 9999, "sort_keys": False}
    return yaml.dump(_by_name(content), **form)


def _by_name(node: Any) -> Any:
    """Targets by their names, and what YAML cannot hold as a text about it."""
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
