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
from fvcore.common.param_scheduler import ParamScheduler
from torch import nn
from torch.optim import Optimizer

from lambda_det.detection import data
from lambda_det.detection.data.jitter import ResizeShortestEdgeAtLeastOnePixel
from lambda_det.detection.data.predictions import Detector
from lambda_det.detection.data.transforming import Outline, draws_by_size
from lambda_det.detection.evaluation import augmented_test, build_evaluator, check_evaluators
from lambda_det.detection.model import make_backbone, make_model
from lambda_det.detection.schedule import (
    DetectionSettings,
    build_optimizer,
    build_schedule,
    read_settings,
)
from lambda_det.detection.tiles import Tiling
from lambda_det.errors import ConfigError
from lambda_det.modeling.specs import STRIDE
from lambda_det.training.schedules import check_rate
from lambda_det.training.settings import NOT_NEGATIVE, POSITIVE, SHARE, FixedKeys, Rule, check
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
        training_size: height and width of the largest training batch; None if unknown.
        one_size: whether all training images have one size; None if the configuration does not
            say.
        ddp_options: of :func:`lambda_det.distributed.connection.distribute`.
        fixed_keys, sample_keys, test_keys, advice: see :class:`lambda_det.training.task.Task`.
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
    fixed_keys: FixedKeys
    sample_keys: FixedKeys
    test_keys: FixedKeys
    advice: str
    train_names: tuple[str, ...]
    test_names: tuple[str, ...]
    test_sets: tuple[str, ...]
    pixels: PixelSettings | None
    tiling: Tiling | None = None
    training_size: tuple[int, int] | None = None
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
            sizes = [self.tiling.size_of(*size) for size in sizes]
        resize, outlines = self.make_test_augmentations(), [Outline(*size) for size in sizes]
        for outline in outlines if draws_by_size(resize) else ():
            resize(outline)
        factors = [
            outline.image.shape[0] / height
            for outline, (height, _) in zip(outlines, sizes, strict=True)
        ]
        return statistics.median(factors or [1.0])


# ------------------------------------------------------------------------------------------ of YAML
_FIXED = FixedKeys(
    names=(
        "MODEL",
        "INPUT.FORMAT",
        "SEED",
        "SOLVER.BACKBONE_MULTIPLIER",
        "SOLVER.BASE_LR",
        "SOLVER.BETAS",
        "SOLVER.BIAS_LR_FACTOR",
        "SOLVER.EMA_DECAY",
        "SOLVER.IMS_PER_BATCH",
        "SOLVER.MOMENTUM",
        "SOLVER.NESTEROV",
        "SOLVER.OPTIMIZER",
        "SOLVER.WEIGHT_DECAY",
        "SOLVER.WEIGHT_DECAY_BIAS",
        "SOLVER.WEIGHT_DECAY_NORM",
    ),
    but_not=(
        "MODEL.CHANNELS_LAST",
        "MODEL.DEVICE",
        "MODEL.WEIGHTS",
        "MODEL.LAMBDA_RESNET.CHECKPOINT_ACTIVATIONS",
        "MODEL.LAMBDA_RESNET.IMPLEMENTATION",
    ),
)
_SAMPLES = FixedKeys(
    names=("INPUT", "DATASETS", "DATALOADER"),
    but_not=(
        "INPUT.MIN_SIZE_TEST",
        "INPUT.MAX_SIZE_TEST",
        "DATASETS.TEST",
        "DATASETS.TEST_IMAGES",
        "DATASETS.TEST_JSON",
        "DATALOADER.MAX_UNREADABLE_IMAGES",
        "DATALOADER.NUM_WORKERS",
        "DATALOADER.TIMEOUT",
    ),
)
_TEST_FILES = FixedKeys(("DATASETS.TEST_IMAGES", "DATASETS.TEST_JSON"))
_TEST_NAMES = FixedKeys(("DATASETS.TEST",))  # made of the files, if keys name any
_ADVICE = (
    "a lower SOLVER.BASE_LR, a longer SOLVER.WARMUP_ITERS, SOLVER.CLIP_GRADIENTS or clean "
    "annotations"
)


_ALL_ABOVE_0: Rule = (lambda each: len(each) > 0 and min(each) > 0), "numbers above 0"
_SIZES: Rule = (
    (lambda each: len(each) > 0 and min(each) >= 0),
    "one size or more, such as (640, 800)",
)
_BOX_LOSSES = ("smooth_l1", "giou", "diou", "ciou")
_WIDTHS: Rule = (lambda each: all(x == -1 or x > 0 for x in each)), "numbers above 0, or -1"
_BOX_WEIGHTS: Rule = (lambda each: len(each) in (4, 5)), "4 numbers, or 5 of rotated boxes"
_EXPECTED: Rule = (
    (lambda rows: all(len(row) == 4 for row in rows)),
    "lists of task, metric, value and tolerance, such as [['bbox', 'AP', 38.5, 0.2]]",
)
_POWER_OF_2: Rule = (lambda stride: stride > 0 and stride & (stride - 1) == 0), "a power of 2"
_LEVELS: Rule = (
    (lambda each: len({len(level) if hasattr(level, "__len__") else 1 for level in each}) == 1),
    "a list for each map, all of one length",
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
# What Detectron2 takes without a word, and would train or find nothing with, or would refuse after
# hours, in the last evaluation
_KEY_RULES: tuple[tuple[Rule, tuple[str, ...]], ...] = (
    (
        SHARE,
        (
            "MODEL.PANOPTIC_FPN.COMBINE.INSTANCES_CONFIDENCE_THRESH",
            "MODEL.PANOPTIC_FPN.COMBINE.OVERLAP_THRESH",
            "MODEL.RETINANET.NMS_THRESH_TEST",
            "MODEL.RETINANET.SCORE_THRESH_TEST",
            "MODEL.ROI_HEADS.NMS_THRESH_TEST",
            "MODEL.ROI_HEADS.POSITIVE_FRACTION",
            "MODEL.ROI_HEADS.SCORE_THRESH_TEST",
            "MODEL.RPN.NMS_THRESH",
            "MODEL.RPN.POSITIVE_FRACTION",
        ),
    ),
    (
        POSITIVE,
        (
            "INPUT.MAX_SIZE_TEST",
            "INPUT.MAX_SIZE_TRAIN",
            "MODEL.FPN.OUT_CHANNELS",
            "MODEL.RETINANET.NUM_CLASSES",
            "MODEL.RETINANET.TOPK_CANDIDATES_TEST",
            "MODEL.ROI_BOX_HEAD.CONV_DIM",
            "MODEL.ROI_BOX_HEAD.FC_DIM",
            "MODEL.ROI_BOX_HEAD.POOLER_RESOLUTION",
            "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE",
            "MODEL.ROI_HEADS.NUM_CLASSES",
            "MODEL.ROI_KEYPOINT_HEAD.POOLER_RESOLUTION",
            "MODEL.ROI_MASK_HEAD.CONV_DIM",
            "MODEL.ROI_MASK_HEAD.POOLER_RESOLUTION",
            "MODEL.RPN.BATCH_SIZE_PER_IMAGE",
            "MODEL.RPN.POST_NMS_TOPK_TEST",
            "MODEL.RPN.POST_NMS_TOPK_TRAIN",
            "MODEL.RPN.PRE_NMS_TOPK_TEST",
            "MODEL.RPN.PRE_NMS_TOPK_TRAIN",
            "MODEL.SEM_SEG_HEAD.CONVS_DIM",
            "TEST.AUG.MAX_SIZE",
            "TEST.IMS_PER_BATCH",
        ),
    ),
    (
        NOT_NEGATIVE,
        (
            "INPUT.MIN_SIZE_TEST",
            "MODEL.RETINANET.NUM_CONVS",
            "MODEL.RETINANET.SMOOTH_L1_LOSS_BETA",
            "MODEL.ROI_BOX_HEAD.NUM_CONV",
            "MODEL.ROI_BOX_HEAD.NUM_FC",
            "MODEL.ROI_BOX_HEAD.SMOOTH_L1_BETA",
            "MODEL.ROI_MASK_HEAD.NUM_CONV",
            "MODEL.RPN.SMOOTH_L1_BETA",
        ),
    ),
    (
        ((lambda number: number != 0), "1 or more, or below 0 for all"),
        ("TEST.DETECTIONS_PER_IMAGE",),
    ),
    (
        (_BOX_LOSSES.__contains__, f"one of {_BOX_LOSSES}"),
        (
            "MODEL.RETINANET.BBOX_REG_LOSS_TYPE",
            "MODEL.ROI_BOX_HEAD.BBOX_REG_LOSS_TYPE",
            "MODEL.RPN.BBOX_REG_LOSS_TYPE",
        ),
    ),
    (_SIZES, ("INPUT.MIN_SIZE_TRAIN", "TEST.AUG.MIN_SIZES")),
    (_ALL_ABOVE_0, ("MODEL.PIXEL_STD",)),
    (_WIDTHS, ("MODEL.RPN.CONV_DIMS",)),
    (
        _BOX_WEIGHTS,
        (
            "MODEL.RETINANET.BBOX_REG_WEIGHTS",
            "MODEL.ROI_BOX_HEAD.BBOX_REG_WEIGHTS",
            "MODEL.RPN.BBOX_REG_WEIGHTS",
        ),
    ),
    (_EXPECTED, ("TEST.EXPECTED_RESULTS",)),
    (_POWER_OF_2, ("MODEL.SEM_SEG_HEAD.COMMON_STRIDE",)),
    (_LEVELS, ("MODEL.ANCHOR_GENERATOR.ASPECT_RATIOS", "MODEL.ANCHOR_GENERATOR.SIZES")),
)


def of_yaml(cfg: CfgNode) -> Components:
    """The components that a YAML configuration describes.

    Raises:
        ConfigError: a value cannot be.
    """
    for rule, keys in _KEY_RULES:
        for key in keys:
            check(key, attrgetter(key)(cfg), rule)
    crop = cfg.INPUT.CROP
    if crop.ENABLED and (rule := _CROPS.get(crop.TYPE.partition("_")[0])):
        check("INPUT.CROP.SIZE", crop.SIZE, rule)
    if len(cfg.MODEL.PIXEL_MEAN) != len(cfg.MODEL.PIXEL_STD):
        raise ConfigError(
            f"MODEL.PIXEL_MEAN is {cfg.MODEL.PIXEL_MEAN} and MODEL.PIXEL_STD "
            f"{cfg.MODEL.PIXEL_STD}; give a number of each for each channel."
        )

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
        make_test_augmentations=partial(_test_augmentations, cfg),
        make_loss_loader=(
            partial(data.build_test_loader, cfg, with_truth=True) if cfg.TEST.LOSS else None
        ),
        make_augmented=partial(augmented_test, cfg) if cfg.TEST.AUG.ENABLED else None,
        check_data=check_data,
        verify=partial(verify_results, cfg),
        dump=cache(cfg.dump),  # which every checkpoint holds
        detector=Detector.from_config(cfg),
        pixels=PixelSettings.from_config(cfg),
        train_names=tuple(cfg.DATASETS.TRAIN),
        test_names=tuple(cfg.DATASETS.TEST),
        test_sets=tuple(cfg.DATASETS.TEST),
        tiling=Tiling.from_config(cfg),
        training_size=_training_size(cfg),
        one_size=cfg.INPUT.LSJ.ENABLED,
        fixed_keys=_FIXED,
        sample_keys=_SAMPLES,
        test_keys=_TEST_FILES if cfg.DATASETS.TEST_JSON else _TEST_NAMES,
        advice=_ADVICE,
    )


def _test_augmentations(cfg: CfgNode) -> AugmentationList:
    sizes = cfg.INPUT
    return AugmentationList(
        [ResizeShortestEdgeAtLeastOnePixel([sizes.MIN_SIZE_TEST] * 2, sizes.MAX_SIZE_TEST)]
    )


def _training_size(cfg: CfgNode) -> tuple[int, int]:
    """Height and width of the largest training batch, padded to the stride of a backbone."""
    if cfg.INPUT.LSJ.ENABLED:
        height = width = cfg.INPUT.LSJ.SIZE
    else:
        height = width = cfg.INPUT.MAX_SIZE_TRAIN
        if cfg.DATALOADER.ASPECT_RATIO_GROUPING:  # otherwise upright images share a batch
            height = min(max(cfg.INPUT.MIN_SIZE_TRAIN), width)
    return -(-height // STRIDE) * STRIDE, -(-width // STRIDE) * STRIDE


def _for_run(cfg: CfgNode, settings: DetectionSettings) -> CfgNode:
    """The configuration in the form that Detectron2's builders read."""
    cfg = cfg.clone()
    cfg.defrost()
    cfg.SOLVER.IMS_PER_BATCH = settings.images_per_step
    cfg.SOLVER.BASE_LR = settings.base_lr
    cfg.SOLVER.MAX_ITER = settings.max_iter
    cfg.SOLVER.STEPS = settings.lr_steps
    cfg.SOLVER.WARMUP_ITERS = settings.warmup_iters
    cfg.SOLVER.CLIP_GRADIENTS.ENABLED = False  # the training step clips
    cfg.DATALOADER.NUM_WORKERS = settings.num_workers
    return cfg
