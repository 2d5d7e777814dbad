"""A LazyConfig as the engine takes it: its own keys, and those that the engine reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml
from detectron2.config import CfgNode, get_cfg
from detectron2.utils.registry import _convert_target_to_string
from omegaconf import DictConfig, OmegaConf, SCMode
from omegaconf.errors import OmegaConfBaseException

from lambda_det.config import add_lambda_config
from lambda_det.errors import ConfigError

__all__ = ["KEYS", "OTHER_TRAIN_KEYS", "LazyRun", "dump_lazy", "first_line"]

# What the engine reads, and where a LazyConfig has it. The keys of ``train`` that are not
# Detectron2's own are those of configs/common/train.py.
# fmt: off
KEYS = {
    "OUTPUT_DIR":                       "train.output_dir",
    "SEED":                             "train.seed",
    "CUDNN_BENCHMARK":                  "train.cudnn_benchmark",
    "MODEL.DEVICE":                     "train.device",
    "MODEL.WEIGHTS":                    "train.init_checkpoint",
    "MODEL.PIXEL_MEAN":                 "model.pixel_mean",
    "MODEL.PIXEL_STD":                  "model.pixel_std",
    "MODEL.MASK_ON":                    "dataloader.train.mapper.use_instance_mask",
    "MODEL.ROI_HEADS.NUM_CLASSES":      "model.roi_heads.num_classes",
    "MODEL.RETINANET.NUM_CLASSES":      "model.num_classes",
    "INPUT.FORMAT":                     "dataloader.train.mapper.image_format",
    "DATASETS.TRAIN_JSON":              "dataloader.train_json",
    "DATASETS.TRAIN_IMAGES":            "dataloader.train_images",
    "DATASETS.TEST_JSON":               "dataloader.test_json",
    "DATASETS.TEST_IMAGES":             "dataloader.test_images",
    "DATALOADER.NUM_WORKERS":           "dataloader.train.num_workers",
    "DATALOADER.MAX_UNREADABLE_IMAGES": "dataloader.train.max_unreadable",
    "DATALOADER.TIMEOUT":               "dataloader.train.timeout",
    "SOLVER.IMS_PER_BATCH":             "dataloader.train.total_batch_size",
    "SOLVER.BASE_LR":                   "optimizer.lr",
    "SOLVER.MAX_ITER":                  "train.max_iter",
    "SOLVER.CHECKPOINT_PERIOD":         "train.checkpointer.period",
    "SOLVER.REFERENCE_WORLD_SIZE":      "train.reference_world_size",
    "SOLVER.ACCUMULATE_GRADIENTS":      "train.accumulate_gradients",
    "SOLVER.CLIP_GRADIENTS.ENABLED":    "train.clip_gradients.enabled",
    "SOLVER.CLIP_GRADIENTS.CLIP_TYPE":  "train.clip_gradients.clip_type",
    "SOLVER.CLIP_GRADIENTS.CLIP_VALUE": "train.clip_gradients.clip_value",
    "SOLVER.CLIP_GRADIENTS.NORM_TYPE":  "train.clip_gradients.norm_type",
    "SOLVER.AMP.ENABLED":               "train.amp.enabled",
    "SOLVER.AMP.DTYPE":                 "train.amp.dtype",
    "TEST.EVAL_PERIOD":                 "train.eval_period",
    "TEST.BEST_METRIC":                 "train.best_metric",
    "TEST.PRECISE_BN.ENABLED":          "train.precise_bn.enabled",
    "TEST.PRECISE_BN.NUM_ITER":         "train.precise_bn.num_iter",
}
# fmt: on
# Those that the trainer reads by itself
OTHER_TRAIN_KEYS = (
    "train.checkpointer.max_to_keep",
    "train.log_period",
    "train.ddp.broadcast_buffers",
    "train.ddp.find_unused_parameters",
    "train.ddp.fp16_compression",
)
_NEEDED = ("model", "dataloader", "optimizer", "lr_multiplier", "train", "train.max_iter")
_DATASETS = {"TRAIN": "dataloader.train.dataset.names", "TEST": "dataloader.test.dataset.names"}


class LazyRun(CfgNode):
    """The configuration of a run that a LazyConfig describes.

    It has the keys that the engine shares with YAML files, filled from the LazyConfig by ``KEYS``;
    others are Detectron2's defaults, and nothing reads them. What is saved of a run is the
    LazyConfig.

    Attributes:
        lazy: the LazyConfig, not scaled to the number of workers.
    """

    lazy: DictConfig

    @classmethod
    def of(cls, lazy: DictConfig) -> LazyRun:
        """
        Raises:
            ConfigError: a part is missing, or a value is of the wrong type.
        """
        for name in _NEEDED:
            if _select(lazy, name) is None:
                raise ConfigError(
                    f"The configuration has no {name}: a LazyConfig to train has model, "
                    "dataloader, optimizer, lr_multiplier and train, as those in configs/ (YAML "
                    "files of keys like SOLVER.MAX_ITER are for tools/train_net.py)."
                )
        run = cls()
        defaults = get_cfg()
        add_lambda_config(defaults)
        run.update(defaults)
        run.__dict__["lazy"] = lazy  # beside the keys, not among them
        for key, name in KEYS.items():
            value = _plain(_select(lazy, name))
            if value is not None:
                _set(run, key, value, name)
        for part, name in _DATASETS.items():
            names = _plain(_select(lazy, name))
            run.DATASETS[part] = (names,) if isinstance(names, str) else tuple(names or ())
        run.MODEL.META_ARCHITECTURE = str(_target_name(lazy.model))
        run._read_schedule()
        return run

    def _read_schedule(self) -> None:
        """The whole numbers of steps in it, which are rounded when they are scaled."""
        self.SOLVER.STEPS = ()
        multiplier = self.lazy.lr_multiplier
        if self.counts_steps():
            self.SOLVER.STEPS = tuple(multiplier.scheduler.milestones)
            self.SOLVER.WARMUP_ITERS = round(multiplier.warmup_length * self.SOLVER.MAX_ITER)
        else:
            self.SOLVER.WARMUP_ITERS = 0

    def counts_steps(self) -> bool:
        """Whether the schedule gives the steps of this training, and not parts of any."""
        multiplier = self.lazy.lr_multiplier
        return (
            _select(multiplier, "scheduler.milestones") is not None
            and _select(multiplier, "scheduler.num_updates") == self.lazy.train.max_iter
            and _select(multiplier, "warmup_length") is not None
        )

    def name_datasets(self) -> None:
        """Write the names of data sets and the number of classes back, as they are registered."""
        for part, name in _DATASETS.items():
            names = list(self.DATASETS[part])
            if names:
                value = names[0] if len(names) == 1 else names
                OmegaConf.update(self.lazy, name, value, merge=False)
            elif part == "TEST":
                self.lazy.dataloader.pop("evaluator", None)
        for key in ("MODEL.ROI_HEADS.NUM_CLASSES", "MODEL.RETINANET.NUM_CLASSES"):
            if _select(self.lazy, KEYS[key]) is not None:
                OmegaConf.update(self.lazy, KEYS[key], _get(self, key))

    def dump(self, *_: Any, **__: Any) -> str:
        """The LazyConfig as YAML text, which ``LazyConfig.load`` reads again."""
        return dump_lazy(self.lazy)


def dump_lazy(lazy: DictConfig) -> str:
    """``LazyConfig.save`` as text: that one writes files in place, and pickles beside them."""
    content = OmegaConf.to_container(lazy, resolve=False, structured_config_mode=SCMode.INSTANTIATE)
    # In the order of the file: parts are made in it, and draw their random numbers
    return yaml.dump(
        _by_name(content),
        default_flow_style=None,
        allow_unicode=True,
        width=9999,
        sort_keys=False,
    )


def _by_name(node: Any) -> Any:
    """Targets by their names, and what YAML cannot hold as a text about it."""
    if isinstance(node, Mapping):
        return {
            name: _callable_name(value)
            if name == "_target_" and callable(value)
            else _by_name(value)
            for name, value in node.items()
        }
    if isinstance(node, (list, tuple)):
        return [_by_name(value) for value in node]
    try:
        yaml.dump(node)
    except Exception:  # whatever an object's __reduce__ raises
        return str(node)
    return node


def _callable_name(target: Any) -> str:
    try:
        return _convert_target_to_string(target)
    except AttributeError:
        return str(target)


def _target_name(node: Any) -> str:
    target = node.get("_target_", "") if isinstance(node, Mapping) else ""
    return (target if isinstance(target, str) else getattr(target, "__name__", "")).split(".")[-1]


def _select(lazy: DictConfig, name: str) -> Any:
    try:
        return OmegaConf.select(lazy, name)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{name} cannot be read: {first_line(error)}.") from error


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _get(run: CfgNode, key: str) -> Any:
    for name in key.split("."):
        run = run[name]
    return run


def _set(run: CfgNode, key: str, value: Any, name: str) -> None:
    section, _, last = key.rpartition(".")
    node = _get(run, section) if section else run
    kind = type(node[last])
    if kind is float and type(value) is int:
        value = float(value)
    fits = isinstance(value, (list, tuple)) if kind in (list, tuple) else type(value) is kind
    if not fits:
        raise ConfigError(
            f"{name} is {value!r}; it must be of type {kind.__name__}, such as {node[last]!r}."
        )
    node[last] = value


def first_line(error: Exception) -> str:
    """Of what an error of another library says."""
    return next(iter(str(error).strip().splitlines()), "").rstrip(".")
