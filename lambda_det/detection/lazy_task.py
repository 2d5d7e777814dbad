"""Detection as a task of the trainer, described by a LazyConfig."""

from __future__ import annotations

import argparse
import copy
import importlib.util
import inspect
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode, instantiate
from detectron2.data import MetadataCatalog
from detectron2.data.transforms import AugmentationList
from detectron2.evaluation import (
    CityscapesInstanceEvaluator,
    CityscapesSemSegEvaluator,
    COCOPanopticEvaluator,
    DatasetEvaluator,
    LVISEvaluator,
    inference_on_dataset,
    print_csv_format,
)
from detectron2.solver import LRMultiplier
from detectron2.utils import comm
from detectron2.utils.registry import locate
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lambda_det.detection import data
from lambda_det.detection.config import load_config
from lambda_det.detection.data.predictions import Detector
from lambda_det.detection.evaluation import images_of_any_size
from lambda_det.detection.lazy import (
    KEYS,
    counts_steps,
    dump_lazy,
    is_lazy_file,
    load_lazy_config,
    read_settings,
    read_value,
    refuse_unknown_train_keys,
)
from lambda_det.detection.model import check_precision, for_inference, prepare_model
from lambda_det.detection.schedule import scale_settings
from lambda_det.detection.task import DetectionTask, padded
from lambda_det.errors import ConfigError, reason
from lambda_det.training.settings import FixedKeys
from lambda_det.training.task import EMA, Results
from lambda_det.weights.provenance import PixelSettings

__all__ = ["LazyTask", "load_any_config", "task_of"]

logger = logging.getLogger(__name__)

# Where models have the number of their classes
_NUM_CLASSES = ("model.roi_heads.num_classes", "model.num_classes")
# Of the channels of the images
_ORDERS = ("dataloader.train.mapper.image_format", "dataloader.test.mapper.image_format")
_PIXEL_KEYS = (_ORDERS[0], "model.pixel_mean", "model.pixel_std")
_AUGMENTATIONS = "dataloader.train.mapper.augmentations"
_FILTER = "dataloader.train.dataset.filter_empty"
_MASKS = "dataloader.train.mapper.use_instance_mask"
_TEST_PRECISION = "train.test_precision"
# Of Detectron2's evaluators, the packages that they import once they are made or used
_PACKAGES = {
    CityscapesInstanceEvaluator: "cityscapesscripts",
    CityscapesSemSegEvaluator: "cityscapesscripts",
    COCOPanopticEvaluator: "panopticapi",
    LVISEvaluator: "lvis",
}


def task_of(config: CfgNode | DictConfig) -> DetectionTask:
    """The task of a configuration of either kind."""
    return LazyTask(config) if isinstance(config, DictConfig) else DetectionTask(config)


def load_any_config(args: argparse.Namespace) -> CfgNode | DictConfig:
    """What --config-file holds, which is YAML or a LazyConfig; its content says which.

    Raises:
        ConfigError: as :func:`load_lazy_config` or :func:`lambda_det.detection.load_config` do.
    """
    return load_lazy_config(args) if is_lazy_file(args.config_file) else load_config(args)


class LazyTask(DetectionTask):
    """A detector whose parts a LazyConfig describes.

    Attributes:
        lazy: the LazyConfig, as written.
        settings: of it; fitted to the processes in a training.
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
        "A lower optimizer.lr, a longer lr_multiplier.warmup_length, train.clip_gradients or "
        "clean annotations"
    )

    def __init__(self, lazy: DictConfig) -> None:
        """
        Args:
            lazy: is not changed, but by :meth:`register_data`.

        Raises:
            ConfigError: a value is of the wrong type or cannot be.
        """
        self.lazy = lazy
        self.settings = read_settings(lazy)
        check_precision(self.test_precision, _TEST_PRECISION)
        options = dict(lazy.train.get("ddp", {}))
        options.pop("broadcast_buffers", None)
        self.ddp_options = options

    # ------------------------------------------------------------------------------- configuration
    @classmethod
    def read(cls, args: argparse.Namespace) -> DictConfig:
        return load_lazy_config(args)

    @classmethod
    def device(cls, config: DictConfig) -> tuple[str, str]:
        return read_value(config, KEYS["device"], "cuda"), KEYS["device"]

    @classmethod
    def for_run(cls, config: DictConfig, *, train: bool) -> LazyTask:
        task = cls(config)
        task.register_data()
        if train:
            refuse_unknown_train_keys(config)
            task.settings = scale_settings(task.settings, comm.get_world_size())
        return task

    def register_data(self) -> None:
        train, test = (
            data.register_coco_files(
                read_value(self.lazy, f"dataloader.{split}_json", ""),
                read_value(self.lazy, f"dataloader.{split}_images", ""),
                split,
                keys=(f"dataloader.{split}_json", f"dataloader.{split}_images"),
            )
            for split in ("train", "test")
        )
        for split, name in (("train", train), ("test", test)):
            if name:
                key = f"dataloader.{split}.dataset.names"
                OmegaConf.update(self.lazy, key, name, merge=False)
        if train and not test:
            logger.info("There is no evaluation; --test-json and --test-images name data for it")
            self.lazy.dataloader.pop("evaluator", None)
        if train or test:
            count = len(MetadataCatalog.get(train or test).thing_classes)
            for key in _NUM_CLASSES:
                if OmegaConf.select(self.lazy, key) is not None:
                    OmegaConf.update(self.lazy, key, count)

    def dump(self) -> str:
        return dump_lazy(self.lazy)

    # --------------------------------------------------------------------------------------- parts
    def build_model(self) -> nn.Module:
        settings = self.settings
        return prepare_model(
            self.make_model(),
            settings.device,
            mixed_precision=settings.amp_dtype is not None,
            channels_last=self.trains_channels_last(),
        )

    def make_model(self) -> nn.Module:
        """The model as it is described, where PyTorch makes its tensors."""
        return _make(self.lazy.model, "model")

    def build_backbone(self) -> nn.Module:
        if "backbone" not in self.lazy.model:
            raise ConfigError("The configuration has no model.backbone; name that of a detector.")
        return _make(self.lazy.model.backbone, "model.backbone")

    @property
    def detector(self) -> Detector:
        model = self.lazy.model
        target = model.get("_target_", "")
        classes = [key for key in _NUM_CLASSES if OmegaConf.select(self.lazy, key) is not None]
        name = target if isinstance(target, str) else getattr(target, "__name__", "")
        reader = str(OmegaConf.select(self.lazy, "dataloader.train.dataset._target_"))
        return Detector(
            architecture=name.split(".")[-1],
            num_classes=read_value(self.lazy, classes[0], 1) if classes else None,
            masks=read_value(self.lazy, _MASKS, False),
            filters_empty=read_value(self.lazy, _FILTER, "get_detection_dataset_dicts" in reader),
            semantic_classes=OmegaConf.select(self.lazy, "model.sem_seg_head.num_classes"),
            ignored_label=OmegaConf.select(self.lazy, "model.sem_seg_head.ignore_value"),
            keys={
                "architecture": "model",
                "num_classes": classes[0] if classes else "",
                "masks": _MASKS,
                "semantic_classes": "model.sem_seg_head.num_classes",
                "ignored_label": "model.sem_seg_head.ignore_value",
                "filters_empty": _FILTER,
                "train": "dataloader.train.dataset.names",
                "test": "dataloader.test.dataset.names",
            },
        )

    def build_test_augmentations(self) -> AugmentationList:
        """Those of the mapper of dataloader.test; where it has none, those of Detectron2's keys."""
        nodes = OmegaConf.select(self.lazy, "dataloader.test.mapper.augmentations")
        if nodes is None:
            defaults = load_config(argparse.Namespace(config_file=None, opts=[]))
            return DetectionTask(defaults).build_test_augmentations()
        return AugmentationList(list(_make(nodes, "dataloader.test.mapper.augmentations")))

    @property
    def channels_last(self) -> bool:
        return read_value(self.lazy, "train.channels_last", True)

    @property
    def test_precision(self) -> str:
        return read_value(self.lazy, _TEST_PRECISION, "float32")

    @property
    def training_size(self) -> tuple[int, int] | None:
        """As the last augmentation says that makes all images fit into one size."""
        augmentations = OmegaConf.select(self.lazy, _AUGMENTATIONS)
        for node in reversed(augmentations if isinstance(augmentations, ListConfig) else ()):
            if not isinstance(node, DictConfig):  # an object, or what another project takes
                continue
            if isinstance(node.get("crop_size"), ListConfig) and "crop_type" not in node:
                # FixedSizeCrop
                return padded(*node.crop_size)
            if "short_edge_length" in node and "max_size" in node:
                shortest, longest = node.short_edge_length, node.max_size
                if isinstance(shortest, ListConfig):
                    shortest = max(shortest)
                grouped = OmegaConf.select(self.lazy, "dataloader.train.aspect_ratio_grouping")
                return padded(longest if grouped is False else min(shortest, longest), longest)
        return None

    @property
    def pixels(self) -> PixelSettings | None:
        if "pixel_mean" not in self.lazy.model:
            return None
        order = read_value(self.lazy, _PIXEL_KEYS[0], "BGR")
        mean, std = (read_value(self.lazy, key, [1.0] * 3) for key in _PIXEL_KEYS[1:])
        return PixelSettings(order, mean, std, _PIXEL_KEYS)

    @property
    def train_names(self) -> tuple[str, ...]:
        return self._dataset_names("train")

    @property
    def test_names(self) -> tuple[str, ...]:
        return self._dataset_names("test")

    def _dataset_names(self, split: str) -> tuple[str, ...]:
        """None where a loader of another project names its data in another way."""
        names = OmegaConf.select(self.lazy, f"dataloader.{split}.dataset.names")
        return (names,) if isinstance(names, str) else tuple(names or ())

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        node = copy.deepcopy(self.lazy).optimizer
        if self.settings.base_lr is not None:
            node.lr = self.settings.base_lr
        node.params.model = model
        return _make(node, "optimizer")

    def build_scheduler(self, optimizer: Optimizer) -> LRScheduler:
        settings, node = self.settings, copy.deepcopy(self.lazy).lr_multiplier
        if counts_steps(self.lazy):
            node.scheduler.milestones = list(settings.lr_steps)
            node.scheduler.num_updates = settings.max_iter
            node.warmup_length = min(settings.warmup_iters / settings.max_iter, 1.0)
        return LRMultiplier(optimizer, _make(node, "lr_multiplier"), settings.max_iter)

    def build_train_loader(self, *, for_statistics: bool = False) -> Iterable:
        node = copy.deepcopy(self.lazy).dataloader.train
        if "total_batch_size" in node:
            node.total_batch_size = self.settings.images_per_batch
        if "num_workers" in node:
            node.num_workers = 0 if for_statistics else self.settings.num_workers
        return _make(node, "dataloader.train")

    def build_test_loader(self, dataset_name: str = "") -> Iterable:
        return _make(self.lazy.dataloader.test, "dataloader.test")

    def build_evaluator(
        self, dataset_name: str = "", folder: str = "inference"
    ) -> DatasetEvaluator | list[DatasetEvaluator]:
        """What ``dataloader.evaluator`` says; its files go below the folder of the run."""
        node = copy.deepcopy(self.lazy).dataloader.evaluator
        for part in _evaluators(node):
            if _writes_files(part) and part.get("output_dir") is None:
                part.output_dir = str(Path(self.settings.output_dir, folder))
        made = _make(node, "dataloader.evaluator")
        return list(made) if isinstance(made, ListConfig) else made

    # ----------------------------------------------------------------------- checks and evaluation
    def check_data(self, *, train: bool, resumed: bool = False) -> None:
        here, there = (read_value(self.lazy, key, "") for key in _ORDERS)
        if here and there and here != there:
            raise ConfigError(
                f"{_ORDERS[0]} is {here} and {_ORDERS[1]} {there}: the model would be evaluated on "
                "images with other channels than it learns from; give both the same."
            )
        if self._is_evaluated():
            self._check_evaluators()
        if here and self.pixels is not None:
            data.check_pixels(self.pixels)
        data.check_detector_data(
            self.detector,
            train=(self.train_names or None) if train else None,
            test=self.test_names or None if self._is_evaluated() else None,
        )

    def _check_evaluators(self) -> None:
        """Refuse another ground truth than that of the test data, and packages that are missing."""
        try:
            parts = [
                (_target(node), node.get("dataset_name"))
                for node in _evaluators(self.lazy.dataloader.evaluator)
            ]
        except (OmegaConfBaseException, ImportError) as error:
            raise ConfigError(f"dataloader.evaluator cannot be made: {reason(error)}.") from error
        for kind, name in parts:
            if isinstance(name, str) and self.test_names and name not in self.test_names:
                raise ConfigError(
                    f"dataloader.evaluator has the dataset_name {name}, but the model is evaluated "
                    f"on {', '.join(self.test_names)} (dataloader.test.dataset.names, or "
                    "--test-json); give both the same, as by "
                    "dataset_name='${..test.dataset.names}' in the file."
                )
            for evaluator, package in _PACKAGES.items():
                if issubclass(kind, evaluator) and importlib.util.find_spec(package) is None:
                    raise ConfigError(
                        f"dataloader.evaluator has a {kind.__name__}, which needs the package "
                        f"{package}, and that is not installed; install it, or take another "
                        "evaluator."
                    )

    def _is_evaluated(self) -> bool:
        return "test" in self.lazy.dataloader and "evaluator" in self.lazy.dataloader

    @images_of_any_size()
    def evaluate(self, models: Mapping[str, nn.Module], *, final: bool) -> Results:
        results: Results = {}
        for weights, model in models.items() if self._is_evaluated() else ():
            ending = "_EMA" if weights == EMA else ""
            evaluator = self.build_evaluator(folder=f"inference{ending}")
            model = for_inference(model, self.test_precision, channels_last=self.channels_last)
            found = inference_on_dataset(model, self.build_test_loader(), evaluator) or {}
            results |= {f"{key}{ending}": value for key, value in found.items()}
        if comm.is_main_process():
            print_csv_format(results)
        return results

    def finish(self, results: Results) -> None:
        pass


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


def _make(node: DictConfig | ListConfig, name: str) -> Any:
    """What a node describes.

    Raises:
        ConfigError: it names something that is not there, or gives wrong arguments to it.
    """
    try:
        return instantiate(node)
    except (OmegaConfBaseException, ImportError, AssertionError) as error:
        raise ConfigError(f"{name} cannot be made: {reason(error)}.") from error
    except TypeError as error:
        if not re.search(r"unexpected keyword|multiple values|required .*argument", str(error)):
            raise
        raise ConfigError(f"{name} cannot be made: {error}.") from error
