"""What the training of a detector consists of, for both kinds of configurations."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from operator import attrgetter

from detectron2.config import CfgNode
from detectron2.data.transforms import AugmentationList
from detectron2.evaluation import DatasetEvaluator, verify_results
from detectron2.modeling import GeneralizedRCNNWithTTA
from fvcore.common.param_scheduler import ParamScheduler
from torch import nn
from torch.optim import Optimizer

from lambda_det.config import KEYS, Rule, check
from lambda_det.detection import data
from lambda_det.detection.data.predictions import Detector
from lambda_det.detection.data.transforming import Outline, draws_by_size
from lambda_det.detection.evaluation import build_evaluator, check_evaluators
from lambda_det.detection.model import make_backbone, make_model
from lambda_det.detection.schedule import (
    DetectionSettings,
    build_optimizer,
    build_schedule,
    read_settings,
)
from lambda_det.detection.tiles import Tiling
from lambda_det.errors import ConfigError
from lambda_det.training.schedules import check_rate
from lambda_det.training.task import Results
from lambda_det.weights.provenance import PixelSettings

Evaluators = DatasetEvaluator | list[DatasetEvaluator]


@dataclass(frozen=True, kw_only=True)
class Components:
    """What the training of a detector consists of.

    Settings and facts are values. Models, loaders and evaluators are functions that make them,
    because each command needs only some of them.

    :func:`of_yaml` makes them of a YAML configuration, and
    :func:`lambda_det.detection.lazy_components.of_lazy` of a LazyConfig.

    Attributes:
        settings: as written. Functions that take settings are given the run's, fitted to the
            number of processes.
        make_model: the whole model, where PyTorch makes its tensors.
        make_backbone: the backbone of the model, with an FPN if it has one.
        make_train_loader: endless batches.
        make_test_loader: the images of one of ``test_sets``.
        make_evaluator: for one of ``test_sets``, given the ending of the folder for its files:
            "inference" plus that ending, below the folder of the run.
        make_test_augmentations: what an evaluation does to an image before the model sees it.
        make_loss_loader: the images of one of ``test_sets`` with their ground truth; None where
            evaluations compute no losses.
        make_augmented: a model that averages over augmented images, for the last evaluation; None
            for none.
        check_data: see :meth:`lambda_det.training.task.Task.check_data`.
        verify: ends the process if the results are not the expected ones of the configuration.
        dump: the configuration as YAML.
        detector: what the model predicts and its data therefore need.
        pixels: what the model makes of images; None if unknown.
        train_names, test_names: the data sets to train and to evaluate on; empty where a loader of
            another project does not name them.
        test_sets: the name of each set that is evaluated separately; empty for no evaluation.
        tiling: how images are cut; None where they are not.
        one_size: False where training images have several sizes; None if the configuration does not
            say.
        ddp_options: of :func:`lambda_det.distributed.connection.distribute`.
        on_resume, test_keys, advice: see :class:`lambda_det.training.task.Task`.
    """

    settings: DetectionSettings
    make_model: Callable[[], nn.Module]
    make_backbone: Callable[[], nn.Module]
    make_optimizer: Callable[[DetectionSettings, nn.Module], Optimizer]
    make_schedule: Callable[[DetectionSettings], ParamScheduler]
    make_train_loader: Callable[[DetectionSettings], Iterable]
    make_test_loader: Callable[[str], Iterable]
    make_evaluator: Callable[[str, str], Evaluators]
    make_test_augmentations: Callable[[], AugmentationList]
    check_data: Callable[[bool], None]
    dump: Callable[[], str]
    detector: Detector
    on_resume: Mapping[str, str]
    test_keys: tuple[str, ...]
    advice: str
    train_names: tuple[str, ...]
    test_names: tuple[str, ...]
    test_sets: tuple[str, ...]
    pixels: PixelSettings | None
    tiling: Tiling | None = None
    one_size: bool | None = None
    make_loss_loader: Callable[[str], Iterable] | None = None
    make_augmented: Callable[[nn.Module], nn.Module] | None = None
    verify: Callable[[Results], None] = lambda results: None
    ddp_options: Mapping[str, bool] = field(default_factory=dict)

    def test_scale(self, sizes: Sequence[tuple[int, int]]) -> float:
        """The median factor by which an evaluation resizes images of these heights and widths, or
        their tiles.
        """
        if self.tiling:
            side = self.tiling.size
            sizes = [(min(height, side), min(width, side)) for height, width in sizes]
        resize, outlines = self.make_test_augmentations(), [Outline(*size) for size in sizes]
        for outline in outlines if draws_by_size(resize) else ():
            resize(outline)
        factors = [
            outline.image.shape[0] / height
            for outline, (height, _) in zip(outlines, sizes, strict=True)
        ]
        return statistics.median(factors or [1.0])


# ------------------------------------------------------------------------------------------ of YAML
_TEST_FILES = "DATASETS.TEST_IMAGES.", "DATASETS.TEST_JSON."
_ADVICE = (
    "a lower SOLVER.BASE_LR, a longer SOLVER.WARMUP_ITERS, SOLVER.CLIP_GRADIENTS or clean "
    "annotations"
)


# The two numbers of INPUT.CROP.SIZE, by the beginning of INPUT.CROP.TYPE
_CROPS: dict[str, Rule] = {
    "relative": (
        (lambda size: len(size) == 2 and all(0 < x <= 1 for x in size)),
        "two numbers above 0 and at most 1, such as [0.9, 0.9]",
    ),
    "absolute": (
        (lambda size: len(size) == 2 and all(isinstance(x, int) and x > 0 for x in size)),
        "two whole numbers of pixels, such as [640, 640]",
    ),
}


def of_yaml(cfg: CfgNode) -> Components:
    """The components that a YAML configuration describes.

    Raises:
        ConfigError: a value cannot be.
    """
    _check_values(cfg)

    def check_data(train: bool) -> None:
        data.check_datasets(cfg, train=train, test=not train or len(cfg.DATASETS.TEST) > 0)
        check_evaluators(cfg)

    def make_schedule(settings: DetectionSettings) -> ParamScheduler:
        check_rate(cfg.SOLVER, is_given=settings.key("base_lr") in settings.unscaled)
        return build_schedule(_for_run(cfg, settings))

    def make_train_loader(settings: DetectionSettings) -> Iterable:
        return data.build_train_loader(_for_run(cfg, settings), settings.images_per_batch)

    return Components(
        settings=read_settings(cfg),
        make_model=partial(make_model, cfg),
        make_backbone=partial(make_backbone, cfg),
        make_optimizer=lambda settings, model: build_optimizer(_for_run(cfg, settings), model),
        make_schedule=make_schedule,
        make_train_loader=make_train_loader,
        make_test_loader=partial(data.build_test_loader, cfg),
        make_evaluator=lambda name, ending: build_evaluator(cfg, name, f"inference{ending}"),
        make_test_augmentations=lambda: AugmentationList(data.build_augmentation(cfg, False)),
        make_loss_loader=(
            partial(data.build_test_loader, cfg, with_truth=True) if cfg.TEST.LOSS else None
        ),
        make_augmented=partial(GeneralizedRCNNWithTTA, cfg) if cfg.TEST.AUG.ENABLED else None,
        check_data=check_data,
        verify=partial(verify_results, cfg),
        dump=cache(cfg.dump),  # which every checkpoint holds
        detector=Detector.from_config(cfg),
        pixels=PixelSettings.from_config(cfg),
        train_names=tuple(cfg.DATASETS.TRAIN),
        test_names=tuple(cfg.DATASETS.TEST),
        test_sets=tuple(cfg.DATASETS.TEST),
        tiling=Tiling.from_config(cfg),
        one_size=cfg.INPUT.LSJ.ENABLED,
        on_resume={key: row.on_resume for key, row in KEYS.items() if row.on_resume},
        # the names are made of the files, if keys name any
        test_keys=_TEST_FILES if cfg.DATASETS.TEST_JSON else ("DATASETS.TEST.",),
        advice=_ADVICE,
    )


def _check_values(cfg: CfgNode) -> None:
    """Refuse values that the table of keys does not allow, and some that do not go together."""
    for key, row in KEYS.items():
        if row.rule and not row.setting:  # the others are checked as settings
            check(key, attrgetter(key)(cfg), row.rule)
    crop = cfg.INPUT.CROP
    if crop.ENABLED and (rule := _CROPS.get(crop.TYPE.partition("_")[0])):
        check("INPUT.CROP.SIZE", crop.SIZE, rule)
    if len(cfg.MODEL.PIXEL_MEAN) != len(cfg.MODEL.PIXEL_STD):
        raise ConfigError(
            f"MODEL.PIXEL_MEAN is {cfg.MODEL.PIXEL_MEAN} and MODEL.PIXEL_STD "
            f"{cfg.MODEL.PIXEL_STD}; give a number of each for each channel."
        )


def _for_run(cfg: CfgNode, settings: DetectionSettings) -> CfgNode:
    """The configuration in the form that Detectron2's builders read."""
    cfg = cfg.clone()
    cfg.defrost()
    for key, row in KEYS.items():
        if row.is_scaled:
            section, _, name = key.rpartition(".")
            setattr(attrgetter(section)(cfg), name, getattr(settings, row.setting))
    cfg.SOLVER.CLIP_GRADIENTS.ENABLED = False  # the training step clips
    cfg.DATALOADER.NUM_WORKERS = settings.num_workers
    return cfg
