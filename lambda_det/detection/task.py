"""Detection as a task of the trainer."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pkgutil import resolve_name
from typing import Any, NamedTuple

from detectron2.config import CfgNode
from detectron2.data.transforms import ResizeShortestEdge
from detectron2.engine import HookBase
from detectron2.evaluation import inference_on_dataset, print_csv_format
from detectron2.evaluation.testing import flatten_results_dict
from detectron2.utils import comm
from fvcore.common.param_scheduler import ParamScheduler
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import nn
from torch.optim import Optimizer

from lambda_det.config import KEYS
from lambda_det.detection.components import Components, of_yaml
from lambda_det.detection.config import load_with_data, with_projects
from lambda_det.detection.config_files import load_any_config
from lambda_det.detection.data import classes, register_json_datasets
from lambda_det.detection.data.registration import forget_all_but
from lambda_det.detection.data.shapes import register_shapes_among
from lambda_det.detection.evaluation import (
    cost_of_image,
    fix_lvis,
    images_of_any_size,
    number_of_images,
)
from lambda_det.detection.first_batch import FirstBatch
from lambda_det.detection.lazy import load_lazy_config
from lambda_det.detection.lazy_components import of_lazy
from lambda_det.detection.model import (
    LossNormalizers,
    channels_last_pays,
    for_inference,
    prepare_model,
)
from lambda_det.detection.results import IN_LOG, MASKS_LEARNT, METRICS
from lambda_det.detection.schedule import scale_settings
from lambda_det.detection.validation_loss import mean_losses
from lambda_det.distributed.connection import distribute
from lambda_det.distributed.signals import UntilAsked
from lambda_det.errors import ConfigError
from lambda_det.modeling.compilation import why_not
from lambda_det.training.config_file import ConfigFile
from lambda_det.training.log import ONLY_IN_FILE
from lambda_det.training.precision import Precision
from lambda_det.training.schedules import warn_of_unread
from lambda_det.training.task import EMA, RAW, Results, Task
from lambda_det.weights.provenance import BEST_SCORES, RUN

logger = logging.getLogger(__name__)

# Options of create_backbone that change neither the tensors nor the features
_OF_TRAINING = (
    "freeze_at",
    "stochastic_depth",
    "checkpoint_activations",
    "implementation",
    "dropout",
    "out_features",
)
# The hook of a run that has a time; of a wing, which is imported when it is used
TIME_BUDGET = "lambda_det.own_data.time_budget:TimeBudget"


def read_components(config: CfgNode | DictConfig) -> Components:
    """The components of a training that a configuration of either kind describes.

    Raises:
        ConfigError: a value cannot be.
    """
    return of_lazy(config) if isinstance(config, DictConfig) else of_yaml(config)


def recorded_input(components: Components) -> dict[str, Any]:
    """The pixel settings, and the sides to which an evaluation resizes images and does no more."""
    recorded = components.pixels.as_meta() if components.pixels else {}
    made = components.make_test_augmentations().augs
    if len(made) == 1 and isinstance(made[0], ResizeShortestEdge):
        recorded["min_size_test"] = made[0].short_edge_length[0]
        recorded["max_size_test"] = made[0].max_size
    return recorded


def recorded_backbone(model: nn.Module) -> dict[str, Any]:
    """How the backbone of a model was made, as plain values; {} for another project's."""
    made = next((part.created_as for part in model.modules() if hasattr(part, "created_as")), None)
    if made is None:
        return {}
    name, options = made
    kept = {key: value for key, value in options.items() if key not in _OF_TRAINING}
    try:
        plain = json.loads(json.dumps(OmegaConf.to_container(OmegaConf.create(kept))))
    except (TypeError, ValueError, OmegaConfBaseException):  # a value that only a program makes
        return {}
    return {"model": name, "options": plain}


class DetectionTask(Task):
    """The training of a detector that a configuration of either kind describes.

    Attributes:
        config: the configuration; :meth:`register_data` completes one of YAML.
        components: what it says.
        settings: of the configuration; in a training fitted to the processes.
    """

    metrics = tuple(
        f"{predictions}{weights}{metric.ending}"
        for weights in ("_EMA", "")
        for metric in METRICS
        for predictions in metric.best_of
    )

    def __init__(
        self, config: CfgNode | DictConfig, read_again: Callable[[], DictConfig] | None = None
    ) -> None:
        """
        Args:
            config: is changed only by :meth:`prepare` and :meth:`register_data`.
            read_again: runs the program of a LazyConfig in each of several processes, once they are
                connected, because it may ask for their number.

        Raises:
            ConfigError: a value cannot be.
        """
        self.config = config
        self._read_again = read_again
        self._is_trained = True
        self._backbone: dict[str, Any] = {}  # of the model that was built
        self._read()

    def _read(self) -> None:
        self.components = components = read_components(self.config)
        register_shapes_among([*components.train_names, *components.test_names])
        self.settings, self.pixels = components.settings, components.pixels
        self.on_resume, self.test_keys = components.on_resume, components.test_keys
        self.advice = components.advice

    # ------------------------------------------------------------------------------- configuration
    @classmethod
    def read(cls, args: argparse.Namespace, file: ConfigFile | None = None) -> DetectionTask:
        if hasattr(args, "prepare"):  # own data, which go with YAML
            prepared = load_with_data(args, file)
            task = cls(prepared.config)
            task.config_file = prepared.file
        else:
            config = load_any_config(args, file)
            is_program = isinstance(config, DictConfig)
            task = cls(config, partial(load_lazy_config, args) if is_program else None)
        if isinstance(task.config, CfgNode):
            needs = {key: row.needs for key, row in KEYS.items() if row.needs}
            warn_of_unread(task.config, args.opts or (), "LR_SCHEDULER_NAME", needs)
        return task

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        # components have functions and a LazyConfig has objects that no pickle holds
        read = self._read_again or partial(with_projects, self.config)
        return _HandedOver, (type(self), read)

    def prepare(self, *, train: bool) -> DetectionTask:
        if self._read_again and comm.get_world_size() > 1:
            return type(self)(self._read_again()).prepare(train=train)
        self._is_trained = train
        if train and isinstance(self.config, CfgNode) and self.config.RECIPE.ENABLED:
            raise ConfigError(
                "RECIPE.ENABLED is True, and what the recipe derives from the data is not derived: "
                "lambda-det train does that first; or set it to False, and SOLVER.MAX_ITER."
            )
        self.register_data()
        if train:
            self.settings = scale_settings(self.settings, comm.get_world_size())
        return self

    def register_data(self) -> None:
        """Register the data sets that keys of YAML name by their files, and complete these keys.

        Raises:
            ConfigError, DataError: as :func:`lambda_det.detection.data.register_coco_files`.
        """
        if isinstance(self.config, CfgNode):
            register_json_datasets(self.config)
            self._read()

    def change(self, config: CfgNode) -> None:
        """Go on with a configuration that has another schedule, in a training."""
        self.config = config
        self._read()
        self.settings = scale_settings(self.settings, comm.get_world_size())

    def dump(self) -> str:
        return self.components.dump()

    # ------------------------------------------------------------------ what a training consists of
    def build_model(self) -> nn.Module:
        settings = self.settings
        model = prepare_model(
            self.components.make_model(),
            settings.device,
            channels_last=settings.channels_last and channels_last_pays(settings.device),
        )
        if self._is_trained:
            self._check_evaluations(model)
            self._check_compilation(model)
        self._backbone = recorded_backbone(model)
        return model

    def _check_evaluations(self, model: nn.Module) -> None:
        """Refuse a named implementation of 16 bits before evaluations in float32 fail with it."""
        names = {getattr(layer, "implementation", "") for layer in model.modules()}
        if self.settings.test_precision == "float32" and "fused" in names:
            raise ConfigError(
                "The implementation fused computes in 16 bits, and evaluations compute in float32: "
                f"set {self.settings.key('test_precision')} to bfloat16, or "
                "MODEL.LAMBDA_RESNET.IMPLEMENTATION to auto, which takes fused where it can."
            )

    def _check_compilation(self, model: nn.Module) -> None:
        """Refuse to compile a backbone where that cannot serve."""
        settings, backbone = self.settings, getattr(model, "backbone", None)
        if settings.compile and (why := why_not(backbone, one_size=self.components.one_size)):
            raise ConfigError(f"{settings.key('compile')} is True, and {why}; set it to False.")

    def distribute(self, model: nn.Module) -> nn.Module:
        if self.settings.compile:
            # In place: evaluations and exports are of copies, which are not compiled
            model.backbone.compile()
            logger.info("The backbone is compiled in the first step, which takes minutes")
        return distribute(model, self.settings.device, **self.components.ddp_options)

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return self.components.make_optimizer(self.settings, model)

    def build_schedule(self) -> ParamScheduler:
        return self.components.make_schedule(self.settings)

    def build_train_loader(self, *, for_statistics: bool = False) -> Iterable:
        settings = self.settings
        if for_statistics:  # its workers would be idle between two evaluations
            settings = dataclasses.replace(settings, num_workers=0)
        loader = self.components.make_train_loader(settings)
        # which keeps its records itself; evaluations ask for the test sets' records
        forget_all_but(self.components.test_names)
        return loader

    def build_hooks(self) -> list[HookBase]:
        hooks: list[HookBase] = [LossNormalizers()]
        if self.pixels is not None:
            names = classes.facts_of(self.components.train_names).get("thing_classes")
            hooks.append(FirstBatch(self.settings.output_dir, self.pixels.format, names))
        if isinstance(self.config, CfgNode) and self.config.RECIPE.TIME:
            hooks.append(resolve_name(TIME_BUDGET)(self))
        return hooks

    # ----------------------------------------------------------------------- checks and evaluation
    def check_data(self, *, train: bool) -> None:
        self.components.check_data(train)

    def check_weights(self, content: Mapping[str, Any], path: str) -> None:
        """
        Raises:
            DataError: the data have other classes than the checkpoint, or another order of them.
        """
        components, run = self.components, classes.of_checkpoint(content)
        names = (*(components.train_names if self._is_trained else ()), *components.test_names)
        if run is not None:
            classes.check(components.detector, names, run, path)

    def checkpoint_content(self, results: Results) -> dict[str, Any]:
        """What the run is, see :mod:`lambda_det.detection.saved_run`, and its classes."""
        components = self.components
        entry = {
            # a LazyConfig is a program, which no file of weights may hold
            "config": self.dump() if isinstance(self.config, CfgNode) else None,
            **recorded_input(components),
            **self._backbone,
            BEST_SCORES: _best_scores(results),
        }
        return {RUN: entry, classes.ENTRY: classes.facts_of(components.train_names)}

    def smaller_batches(self) -> str:
        written = self.components.settings  # before they were scaled to the processes
        words = super().smaller_batches()
        if reference := written.reference_world_size:
            # accumulated batches count as processes
            words += f" {written.option('reference_world_size', 2 * reference)}"
        return words

    def cost_of_evaluation(self) -> float:
        components, settings = self.components, self.settings
        each = cost_of_image(
            has_masks=components.detector.masks,
            has_losses=components.make_loss_loader is not None,
            sets_of_weights=1 + (settings.ema_decay > 0 and settings.evaluate_raw),
        )
        # ``test_sets`` of a LazyConfig are names of its nodes, and need not be names of data sets
        return each * number_of_images(components.test_names, components.tiling)

    @images_of_any_size()
    def evaluate(self, models: Mapping[str, nn.Module], *, final: bool) -> Results:
        components, settings = self.components, self.settings
        results: Results = {}
        if not components.test_sets:
            return results
        layout = settings.channels_last
        for weights, model in models.items():
            fast = for_inference(model, settings.test_precision, channels_last=layout)
            self._evaluate_on(fast, "_EMA" if weights == EMA else "", results)
        if components.make_loss_loader and self._is_trained:
            # A training's losses are of its own weights, where these are evaluated
            self._add_losses(models.get(RAW, models.get(EMA)), results)
        if final and components.make_augmented:
            # as in Detectron2's train_net.py: once, when training is over
            model = for_inference([*models.values()][-1], channels_last=layout)
            self._evaluate_on(components.make_augmented(model), "_TTA", results)
        # As in Detectron2 the name of a data set only where there are several
        return next(iter(results.values())) if len(results) == 1 else results

    def _evaluate_on(self, model: nn.Module, ending: str, results: Results) -> None:
        """Evaluate on the test sets, and add the results under names with an ending."""
        for name in self.components.test_sets:
            evaluator = self.components.make_evaluator(name, ending)
            fix_lvis()
            loader = UntilAsked(
                self.components.make_test_loader(name), f"Evaluated{ending.replace('_', ' ')} on"
            )
            measures = inference_on_dataset(model, loader, evaluator) or {}
            measures = {f"{key}{ending}": value for key, value in measures.items()}
            if comm.is_main_process():
                logger.info(f"Results on {name}{ending}:", extra=ONLY_IN_FILE)
                print_csv_format(measures)
            results.setdefault(name, {}).update(measures)

    def _add_losses(self, model: nn.Module, results: Results) -> None:
        """Add the losses on the test sets."""
        precision = Precision.of(self.settings)
        for name in self.components.test_sets:
            means = mean_losses(model, self.components.make_loss_loader(name), precision)
            results.setdefault(name, {})["validation"] = means

    def describe(self, results: Results) -> str:
        """AP and its like; all numbers where there is none of these."""
        values = flatten_results_dict(results)
        shown = [name for name in values if name.endswith(IN_LOG)] or list(values)
        return ", ".join(f"{name} {values[name]:.4g}" for name in shown)

    def finish(self, results: Results) -> None:
        self.components.verify(results)


class _HandedOver(NamedTuple):
    """The task of another process, until this one is connected and makes it."""

    kind: type[DetectionTask]
    read: Callable[[], CfgNode | DictConfig]

    def prepare(self, *, train: bool) -> DetectionTask:
        return self.kind(self.read()).prepare(train=train)


def _best_scores(results: Results) -> dict[str, float]:
    """The scores with the best F1 on the first test set, of masks once they are learnt."""
    values = flatten_results_dict(results)

    def of_first_set(name: str) -> float:
        return next((values[key] for key in values if f"/{key}".endswith(f"/{name}")), 0.0)

    best = {}
    for weights, ending in ((RAW, ""), (EMA, "_EMA")):
        # the page of the run decides so, too
        least = MASKS_LEARNT * of_first_set(f"bbox{ending}/AP50")
        kind = "segm" if of_first_set(f"segm{ending}/AP50") > least else "bbox"
        if score := of_first_set(f"{kind}{ending}/best_score"):
            best[weights] = score
    return best
