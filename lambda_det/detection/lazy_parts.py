"""The parts of a training that a LazyConfig describes; what it says, by the keys of YAML."""

from __future__ import annotations

import copy
import inspect
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode, get_cfg, instantiate
from detectron2.data import MetadataCatalog
from detectron2.data.transforms import AugmentationList
from detectron2.evaluation import COCOEvaluator, DatasetEvaluator
from detectron2.solver import LRMultiplier
from detectron2.utils.registry import locate
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lambda_det.config import add_lambda_config, leaves
from lambda_det.detection import data
from lambda_det.detection.config import DATA_FLAGS
from lambda_det.detection.data.predictions import Detector
from lambda_det.detection.evaluation import (
    TolerantCOCOEvaluator,
    check_augmented_test,
    check_package,
)
from lambda_det.detection.lazy import (
    PLACES,
    dump_lazy,
    read_value,
    refuse_unknown_train_keys,
    select,
)
from lambda_det.detection.parts import KEYS as YAML_KEYS
from lambda_det.detection.parts import Parts, padded
from lambda_det.detection.registry import class_keys, needed_packages
from lambda_det.detection.schedule import DetectionSettings
from lambda_det.errors import ConfigError, UserError, reason
from lambda_det.training.settings import FixedKeys

logger = logging.getLogger(__name__)

KEYS = {name: PLACES[key] for name, key in YAML_KEYS.items()} | {
    "log_period": "train.log_period",
    "checkpoints_kept": "train.checkpointer.max_to_keep",
}
# Values of keys that are absent, where they are not those of YAML
_ABSENT = {"DATALOADER.NUM_WORKERS": 0, "SOLVER.EMA_DECAY": 0.999}
_ROI_HEADS = "model.roi_heads"
# Where another structure has what PLACES has
_ELSEWHERE = {
    "model.proposal_generator.anchor_generator": "model.anchor_generator",
    f"{_ROI_HEADS}.box_predictor.": f"{_ROI_HEADS}.box_predictors[0].",
}
# Of the channels of the images
_ORDERS = (PLACES["INPUT.FORMAT"], "dataloader.test.mapper.image_format")
_AUGMENTATIONS = "dataloader.{}.mapper.augmentations"


class LazyParts(Parts):
    """The parts that a LazyConfig describes, made of its nodes.

    Attributes:
        lazy: the configuration; ``cfg`` has what rules and parts of Detectron2 read of it.
    """

    fixed_keys = FixedKeys(
        names=(
            "model",
            "optimizer",
            "dataloader.train.mapper.image_format",
            "dataloader.train.total_batch_size",
            "train.reference_world_size",
            "train.seed",
        ),
        but_not=(
            "model.backbone.bottom_up.checkpoint_activations",
            "model.backbone.bottom_up.implementation",
            "model.vis_period",
        ),
    )
    sample_keys = FixedKeys(
        names=("dataloader",),
        but_not=(
            "dataloader.evaluator",
            "dataloader.test",
            "dataloader.test_images",
            "dataloader.test_json",
            "dataloader.train.max_unreadable",
            "dataloader.train.num_workers",
            "dataloader.train.timeout",
        ),
    )
    advice = (
        "A lower optimizer.lr, a longer lr_multiplier.warmup_length, train.clip_gradients or clean "
        "annotations"
    )

    def __init__(self, lazy: DictConfig) -> None:
        self.lazy = lazy
        with _in_lazy_keys():
            super().__init__(_view(lazy), KEYS)
        settings = {
            name: read_value(lazy, KEYS[name], getattr(self.settings, name))
            for name in ("log_period", "checkpoints_kept")
        }
        unknown = [n for n in ("images_per_step", "base_lr") if select(lazy, KEYS[n]) is None]
        self.settings = replace(self.settings, **settings, **dict.fromkeys(unknown))
        self.detector = self._detector()
        pixels = replace(self.pixels, keys=tuple(PLACES[key] for key in self.pixels.keys))
        self.pixels = pixels if "pixel_mean" in lazy.model else None
        self.kept = tuple(read_value(lazy, PLACES["RECIPE.KEEP"], []))
        if "test" not in lazy.dataloader or "evaluator" not in lazy.dataloader:
            self.test_names = self.test_sets = ()
        elif not self._tests_nothing():
            self.test_sets = (", ".join(self.test_names) or "dataloader.test",)
        self.ddp_options = dict(lazy.train.get("ddp", {}))
        self.ddp_options.pop("broadcast_buffers", None)

    def _detector(self) -> Detector:
        lazy, classes = self.lazy, self._class_keys()
        reader = str(select(lazy, "dataloader.train.dataset._target_"))
        keys = {name: PLACES.get(key, "") for name, key in self.detector.keys.items()}
        return Detector(
            architecture=_class_name(lazy.model.get("_target_", "")),
            num_classes=read_value(lazy, classes[0], 1) if classes else None,
            masks=read_value(lazy, keys["masks"], False),
            filters_empty=read_value(
                lazy, keys["filters_empty"], "get_detection_dataset_dicts" in reader
            ),
            semantic_classes=select(lazy, keys["semantic_classes"]),
            ignored_label=select(lazy, keys["ignored_label"]),
            keys=keys | {"num_classes": classes[0] if classes else ""},
        )

    def _tests_nothing(self) -> bool:
        """Whether there is no test data, and not just a loader that names them in another way."""
        return select(self.lazy, PLACES["DATASETS.TEST"]) == []

    def _class_keys(self) -> list[str]:
        """Where the model has the number of its classes."""
        places = (PLACES.get(key, "") for key in class_keys())
        return [place for place in places if place and select(self.lazy, place) is not None]

    @property
    def training_size(self) -> tuple[int, int] | None:
        """From the last augmentation after which all images fit into one size."""
        for node in reversed(_training_augmentations(self.lazy)):
            if isinstance(node.get("crop_size"), ListConfig) and "crop_type" not in node:
                return padded(*node.crop_size)  # FixedSizeCrop
            if "short_edge_length" in node and "max_size" in node:
                return super().training_size
        return None

    # --------------------------------------------------------------------------- what is made of it
    def make_model(self) -> nn.Module:
        return _make(self.lazy, "model")

    def make_backbone(self) -> nn.Module:
        return _make(self.lazy, "model.backbone")

    def make_optimizer(self, settings: DetectionSettings, model: nn.Module) -> Optimizer:
        rate = {} if settings.base_lr is None else {"lr": settings.base_lr}
        return _make(self.lazy, "optimizer", {"params.model": model, **rate})

    def make_scheduler(self, settings: DetectionSettings, optimizer: Optimizer) -> LRScheduler:
        lazy = copy.deepcopy(self.lazy)
        if _counts_steps(lazy):
            # fvcore refuses those beyond the end, as in a run that is made shorter
            steps = [step for step in settings.lr_steps if step < settings.max_iter]
            _set_steps(lazy.lr_multiplier.scheduler, steps, settings.max_iter)
            lazy.lr_multiplier.warmup_length = min(settings.warmup_iters / settings.max_iter, 1.0)
        return LRMultiplier(optimizer, _make(lazy, "lr_multiplier"), settings.max_iter)

    def make_train_loader(self, settings: DetectionSettings) -> Iterable:
        given = {"total_batch_size": settings.images_per_batch, "num_workers": settings.num_workers}
        there = {key: value for key, value in given.items() if key in self.lazy.dataloader.train}
        with _in_lazy_keys():
            return _make(self.lazy, "dataloader.train", there)

    def make_test_loader(self, name: str) -> Iterable:
        return _make(self.lazy, "dataloader.test")

    def make_loss_loader(self, name: str) -> Iterable:
        """``dataloader.test`` with the ground truth that the mapper of ``dataloader.train`` reads.

        Raises:
            ConfigError: one of both has no mapper with augmentations.
        """
        for split in ("train", "test"):
            if select(self.lazy, _AUGMENTATIONS.format(split)) is None:
                raise ConfigError(
                    f"train.test_loss needs dataloader.{split}.mapper with augmentations; set it "
                    "to False."
                )
        changes = {"augmentations": list(self.make_test_augmentations().augs)}
        changes["recompute_boxes"] = False
        if issubclass(_target(self.lazy.dataloader.train.mapper), data.TolerantMapper):
            changes["exact_pixels"] = True  # those of the evaluation
        mapper = _make(self.lazy, "dataloader.train.mapper", changes)
        return _make(self.lazy, "dataloader.test", {"mapper": mapper, "batch_size": 1})

    def make_evaluator(self, name: str, folder: str) -> DatasetEvaluator | list[DatasetEvaluator]:
        lazy = copy.deepcopy(self.lazy)
        for part in _evaluators(lazy.dataloader.evaluator):
            if _writes_files(part) and part.get("output_dir") is None:
                part.output_dir = str(Path(self.settings.output_dir, folder))
        made = _make(lazy, "dataloader.evaluator")
        return list(made) if isinstance(made, ListConfig) else made

    def make_test_augmentations(self) -> AugmentationList:
        """Those of the mapper of dataloader.test; where it has none, those of Detectron2's keys."""
        name = _AUGMENTATIONS.format("test")
        if select(self.lazy, name) is None:
            return super().make_test_augmentations()
        return AugmentationList(list(_make(self.lazy, name)))

    # ----------------------------------------------------------------------------------------- data
    def register(self) -> None:
        lazy, cfg = self.lazy, self.cfg
        if not any(lazy.dataloader.get(key) for key in (*DATA_FLAGS, "val_share", "group_by")):
            return
        before = cfg.DATASETS.clone()
        with _in_lazy_keys():
            data.register_json_datasets(cfg)
        for split in ("TRAIN", "TEST"):
            names = cfg.DATASETS[split]
            if names != before[split]:
                names = names[0] if names else []
                OmegaConf.update(lazy, PLACES[f"DATASETS.{split}"], names, merge=False)
        if cfg.DATASETS.TRAIN_JSON or cfg.DATASETS.TEST_JSON:
            for key in self._class_keys():
                OmegaConf.update(lazy, key, cfg.MODEL.ROI_HEADS.NUM_CLASSES)

    def fit(self) -> None:
        from lambda_det.own_data.recipe import fit_to_data

        lazy, settings = self.lazy, self.settings
        if not _has_steps(lazy) or None in (settings.images_per_step, settings.base_lr):
            raise ConfigError(
                "train.recipe.enabled (--epochs) sets dataloader.train.total_batch_size, "
                "optimizer.lr and the steps of an lr_multiplier as that of "
                "configs/common/schedule.py, and one of these is not there; set "
                "train.recipe.enabled=False, and train.max_iter."
            )
        with _in_lazy_keys():
            rules = fit_to_data(self.cfg, PLACES)
        max_iter = self.cfg.SOLVER.MAX_ITER
        for rule in rules:
            place = _place_in(lazy, PLACES.get(rule.key, ""))
            value = list(rule.value) if isinstance(rule.value, tuple) else rule.value
            if rule.key == "SOLVER.WARMUP_ITERS":
                lazy.lr_multiplier.warmup_length = min(value / max_iter, 1.0)
            elif place.startswith("train.") or (place and select(lazy, place) is not None):
                is_flat = place.endswith("aspect_ratios") and not isinstance(
                    select(lazy, place)[0], ListConfig
                )
                OmegaConf.update(lazy, place, value[0] if is_flat else value)
            else:
                logger.warning(f"{rule.key} has no place in this LazyConfig: that rule is left out")
        scheduler = lazy.lr_multiplier.scheduler
        _set_steps(scheduler, scheduler.milestones, max_iter)

    def check_data(self, train: bool) -> None:
        lazy = self.lazy
        if train:
            refuse_unknown_train_keys(lazy)
        here, there = (read_value(lazy, key, "") for key in _ORDERS)
        if here and there and here != there:
            raise ConfigError(
                f"{_ORDERS[0]} is {here} and {_ORDERS[1]} {there}: the model would be evaluated on "
                "images with other channels than it learns from; give both the same."
            )
        with _in_lazy_keys():
            check_augmented_test(self.cfg)
        if self.test_sets:
            _check_evaluators(lazy, self.test_names)
        if here and self.pixels is not None:
            data.check_pixels(self.pixels)
        data.check_detector_data(
            self.detector,
            train=(self.train_names or None) if train else None,
            test=self.test_names or (() if not train and self._tests_nothing() else None),
        )

    def dump(self) -> str:
        return dump_lazy(self.lazy)


# --------------------------------------------------------------------------------- the keys of YAML
def _view(lazy: DictConfig) -> CfgNode:
    """What a LazyConfig says, by the keys of YAML.

    Raises:
        ConfigError: a value is of the wrong type.
    """
    cfg = get_cfg()
    add_lambda_config(cfg)
    defaults = dict(leaves(cfg)) | _ABSENT
    values = {key: _value(lazy, key, defaults[key]) for key in PLACES}
    if not read_value(lazy, "train.model_ema.enabled", False):
        values["SOLVER.EMA_DECAY"] = 0.0
    counts, length = _counts_steps(lazy), read_value(lazy, PLACES["SOLVER.WARMUP_ITERS"], 0.0)
    values["SOLVER.WARMUP_ITERS"] = round(length * values["SOLVER.MAX_ITER"]) if counts else 0
    values["SOLVER.STEPS"] = tuple(values["SOLVER.STEPS"]) if counts else ()
    values["MODEL.MASK_ON"] = select(lazy, f"{_ROI_HEADS}.mask_head") is not None
    values["MODEL.KEYPOINT_ON"] = select(lazy, f"{_ROI_HEADS}.keypoint_head") is not None
    kept = values["RECIPE.KEEP"]
    values["RECIPE.KEEP"] = [
        key for key, place in PLACES.items() if place in kept or _place_in(lazy, place) in kept
    ]
    ratios = values["MODEL.ANCHOR_GENERATOR.ASPECT_RATIOS"]
    if ratios and not isinstance(ratios[0], (list, tuple)):
        values["MODEL.ANCHOR_GENERATOR.ASPECT_RATIOS"] = [ratios]
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        (attrgetter(section)(cfg) if section else cfg)[name] = value
    for node in _training_augmentations(lazy):
        if {"min_scale", "max_scale", "target_height"} <= node.keys():
            jitter = cfg.INPUT.LSJ
            jitter.ENABLED, jitter.SIZE = True, node.target_height
            jitter.MIN_SCALE, jitter.MAX_SCALE = node.min_scale, node.max_scale
        elif {"short_edge_length", "max_size"} <= node.keys():
            sizes = node.short_edge_length
            cfg.INPUT.MIN_SIZE_TRAIN = list(sizes) if isinstance(sizes, ListConfig) else [sizes]
            cfg.INPUT.MAX_SIZE_TRAIN = node.max_size
    return cfg


def _value(lazy: DictConfig, key: str, default: Any) -> Any:
    """What a LazyConfig has in the place of a key of YAML."""
    place = _place_in(lazy, PLACES[key])
    value = select(lazy, place)
    if key == "SOLVER.WARMUP_ITERS":  # a share of the steps
        return default
    if place.endswith("._target_"):
        return _class_name(value) or default
    if isinstance(value, str) and isinstance(default, tuple):  # one data set
        return (value,)
    return read_value(lazy, place, default)


def _place_in(lazy: DictConfig, place: str) -> str:
    """Where this configuration has what others have in a place of :data:`PLACES`."""
    for here, there in _ELSEWHERE.items():
        moved = place.replace(here, there)
        if select(lazy, place) is None and select(lazy, moved) is not None:
            return moved
    return place


@contextmanager
def _in_lazy_keys() -> Iterator[None]:
    """Let errors about keys of YAML name those of a LazyConfig."""
    try:
        yield
    except UserError as error:
        text = str(error)
        for key in sorted(PLACES, key=len, reverse=True):
            text = text.replace(key, PLACES[key])
        raise type(error)(text) from error


def _training_augmentations(lazy: DictConfig) -> list[DictConfig]:
    """Without objects, and without those of a form that another project takes."""
    nodes = select(lazy, _AUGMENTATIONS.format("train"))
    nodes = nodes if isinstance(nodes, ListConfig) else ()
    return [node for node in nodes if isinstance(node, DictConfig)]


def _counts_steps(lazy: DictConfig) -> bool:
    """Whether the schedule gives the steps of this training, and not parts of any."""
    multiplier = lazy.lr_multiplier
    return _has_steps(lazy) and multiplier.scheduler.num_updates == lazy.train.max_iter


def _has_steps(lazy: DictConfig) -> bool:
    """Whether the schedule has a warm-up, and steps after which the learning rate decays."""
    names = ("scheduler.milestones", "scheduler.num_updates", "warmup_length")
    return all(select(lazy.lr_multiplier, name) is not None for name in names)


def _set_steps(scheduler: DictConfig, steps: Iterable[int], max_iter: int) -> None:
    scheduler.milestones, scheduler.num_updates = list(steps), max_iter
    if "values" in scheduler:
        scheduler["values"] = scheduler["values"][: len(scheduler.milestones) + 1]


def _class_name(target: Any) -> str:
    """The name of what a node makes; "" if unknown."""
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return name.rpartition(".")[2]


# -------------------------------------------------------------------------------------------- nodes
def _make(lazy: DictConfig, name: str, changes: Mapping[str, Any] | None = None) -> Any:
    """What the node of a name describes, with other values at some of its keys.

    Raises:
        ConfigError: it is not there, names something that is not, or gives wrong arguments to it.
    """
    if select(lazy, name) is None:
        raise ConfigError(f"The configuration has no {name}.")
    lazy = copy.deepcopy(lazy)
    for key, value in (changes or {}).items():
        OmegaConf.update(lazy, f"{name}.{key}", value, merge=False)
    with _as_config_error(name):
        return instantiate(select(lazy, name))


@contextmanager
def _as_config_error(name: str) -> Iterator[None]:
    """Let an error in the node of a name, and not in what it makes, be one of the user."""
    try:
        yield
    except (OmegaConfBaseException, ImportError, AssertionError) as error:
        raise ConfigError(f"{name} cannot be made: {reason(error)}.") from error
    except TypeError as error:
        if not re.search(r"unexpected keyword|multiple values|required .*argument", str(error)):
            raise
        raise ConfigError(f"{name} cannot be made: {error}.") from error


def _evaluators(node: Any) -> Iterator[DictConfig]:
    """The nodes of dataloader.evaluator: itself, and those in a list or in DatasetEvaluators."""
    if isinstance(node, DictConfig) and "_target_" in node:
        yield node
    if isinstance(node, (DictConfig, ListConfig)):
        for child in node.values() if isinstance(node, DictConfig) else node:
            yield from _evaluators(child)


def _target(node: DictConfig) -> type:
    """The class that a node makes an object of; NoneType where it is none."""
    target = node.get("_target_")
    target = locate(target) if isinstance(target, str) else target
    return target if isinstance(target, type) else type(None)


def _writes_files(evaluator: DictConfig) -> bool:
    return any(
        "output_dir" in inspect.signature(kind.__init__).parameters
        for kind in _target(evaluator).__mro__
        if issubclass(kind, DatasetEvaluator)
    )


def _check_evaluators(lazy: DictConfig, test_names: tuple[str, ...]) -> None:
    """Refuse another ground truth than that of the test data, and packages that are missing."""
    with _as_config_error("dataloader.evaluator"):
        nodes = [
            (_target(node), node.get("dataset_name"))
            for node in _evaluators(lazy.dataloader.evaluator)
        ]
    for kind, name in nodes:
        if isinstance(name, str) and test_names and name not in test_names:
            raise ConfigError(
                f"dataloader.evaluator has the dataset_name {name}, but the model is evaluated "
                f"on {', '.join(test_names)} (dataloader.test.dataset.names, or --test-json); give "
                "both the same, as by dataset_name='${..test.dataset.names}' in the file."
            )
        by_number = issubclass(kind, COCOEvaluator) and not issubclass(kind, TolerantCOCOEvaluator)
        if by_number and any(MetadataCatalog.get(n).get("file_classes") for n in test_names):
            raise ConfigError(
                f"dataloader.evaluator has Detectron2's {kind.__name__}, and the test data have "
                "their classes in another order than the run, which it would name wrongly; take "
                "lambda_det.detection.evaluation.TolerantCOCOEvaluator."
            )
        for package in needed_packages(kind):
            check_package(f"dataloader.evaluator has a {kind.__name__}, which", package)
