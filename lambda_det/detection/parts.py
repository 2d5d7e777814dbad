"""What a configuration says of a detector's training: of YAML here, of a LazyConfig beside it."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog
from detectron2.data.transforms import AugmentationList
from detectron2.evaluation import DatasetEvaluator, verify_results
from detectron2.modeling import GeneralizedRCNNWithTTA, build_backbone
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lambda_det.detection import data
from lambda_det.detection.data.jitter import ResizeShortestEdgeAtLeastOnePixel
from lambda_det.detection.data.predictions import Detector
from lambda_det.detection.data.transforming import Outline, draws_by_size
from lambda_det.detection.evaluation import build_evaluator, check_evaluators
from lambda_det.detection.model import check_precision, make_model
from lambda_det.detection.schedule import DetectionSettings, build_lr_scheduler, build_optimizer
from lambda_det.errors import ConfigError
from lambda_det.training import config_file
from lambda_det.training.settings import FixedKeys
from lambda_det.training.task import Results
from lambda_det.weights.provenance import PixelSettings

logger = logging.getLogger(__name__)

# fmt: off
_OF_DETECTORS = {
    "max_iter":             "SOLVER.MAX_ITER",
    "float32_precision":    "FLOAT32_PRECISION",
    "reference_world_size": "SOLVER.REFERENCE_WORLD_SIZE",
    "base_lr":              "SOLVER.BASE_LR",
    "warmup_iters":         "SOLVER.WARMUP_ITERS",
    "eval_period":          "TEST.EVAL_PERIOD",
    "best_metric":          "TEST.BEST_METRIC",
}
# fmt: on
# The user's key for each setting
KEYS = config_file.KEYS | _OF_DETECTORS | {"lr_steps": "SOLVER.STEPS"}
LOG_PERIOD = 20  # steps; YAML has no key for it


def read_settings(cfg: CfgNode, keys: Mapping[str, str] = KEYS) -> DetectionSettings:
    """The settings of a configuration, as written.

    Args:
        cfg: in the keys of YAML.
        keys: the user's key for each setting.

    Raises:
        ConfigError: a value cannot be.
    """
    return DetectionSettings(
        **config_file.common_settings(cfg),
        **{name: attrgetter(key)(cfg) for name, key in _OF_DETECTORS.items()},
        lr_steps=tuple(cfg.SOLVER.STEPS),
        log_period=LOG_PERIOD,
        precise_bn_batches=cfg.TEST.PRECISE_BN.NUM_ITER if cfg.TEST.PRECISE_BN.ENABLED else 0,
        keys=keys,
    )


class Parts:
    """The parts of a detector's training, as a YAML configuration describes them.

    :class:`lambda_det.detection.lazy_parts.LazyParts` makes those of a LazyConfig. Methods that
    take settings are given those of the run: fitted to the data and to the number of processes.

    Attributes:
        cfg: what was read, by the keys of YAML; changed only by :meth:`register` and :meth:`fit`.
        settings: as written.
        detector: what the model predicts, as far as its data depend on it.
        pixels: what the model makes of images; None if unknown.
        train_names, test_names: the data sets to train and to evaluate on; empty where a loader of
            another project names its data in another way.
        test_sets: what each evaluation of its own runs on; empty for no evaluation.
        kept: the user's keys that neither the data nor the number of processes change.
        ddp_options: of :func:`lambda_det.distributed.connection.distribute`.
        fixed_keys, sample_keys, advice: see :class:`lambda_det.training.task.Task`.
    """

    fixed_keys = FixedKeys(
        names=(
            "MODEL",
            "INPUT.FORMAT",
            "SEED",
            "SOLVER.BASE_LR",
            "SOLVER.BIAS_LR_FACTOR",
            "SOLVER.IMS_PER_BATCH",
            "SOLVER.MOMENTUM",
            "SOLVER.NESTEROV",
            "SOLVER.REFERENCE_WORLD_SIZE",
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
    sample_keys = FixedKeys(
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
    advice = (
        "A lower SOLVER.BASE_LR, a longer SOLVER.WARMUP_ITERS, SOLVER.CLIP_GRADIENTS or clean "
        "annotations"
    )

    def __init__(self, cfg: CfgNode, keys: Mapping[str, str] = KEYS) -> None:
        """
        Raises:
            ConfigError: a value cannot be.
        """
        if cfg.TEST.IMS_PER_BATCH < 1:
            raise ConfigError(f"TEST.IMS_PER_BATCH is {cfg.TEST.IMS_PER_BATCH}; give 1 or more.")
        check_precision(cfg.TEST.PRECISION)
        self.cfg = cfg
        self.settings = read_settings(cfg, keys)
        self.detector = Detector.from_config(cfg)
        self.pixels: PixelSettings | None = PixelSettings.from_config(cfg)
        self.train_names, self.test_names = tuple(cfg.DATASETS.TRAIN), tuple(cfg.DATASETS.TEST)
        self.test_sets = self.test_names
        self.kept = tuple(cfg.RECIPE.KEEP)
        self.ddp_options: dict[str, bool] = {}

    @property
    def training_size(self) -> tuple[int, int] | None:
        """Height and width of the largest training batch, padded to 32; None if unknown."""
        inputs = self.cfg.INPUT
        if inputs.LSJ.ENABLED:
            height = width = inputs.LSJ.SIZE
        else:
            height = width = inputs.MAX_SIZE_TRAIN
            if self.cfg.DATALOADER.ASPECT_RATIO_GROUPING:  # else upright images share a batch
                height = min(max(inputs.MIN_SIZE_TRAIN), width)
        return padded(height, width)

    def make_model(self) -> nn.Module:
        """The whole model, where PyTorch makes its tensors."""
        return make_model(self.cfg)

    def make_backbone(self) -> nn.Module:
        """The backbone of the model, with an FPN if it has one."""
        return build_backbone(self.cfg)

    def make_optimizer(self, settings: DetectionSettings, model: nn.Module) -> Optimizer:
        return build_optimizer(_for_run(self.cfg, settings), model)

    def make_scheduler(self, settings: DetectionSettings, optimizer: Optimizer) -> LRScheduler:
        return build_lr_scheduler(_for_run(self.cfg, settings), optimizer)

    def make_train_loader(self, settings: DetectionSettings) -> Iterable:
        return data.build_train_loader(_for_run(self.cfg, settings), settings.images_per_batch)

    def make_test_loader(self, name: str) -> Iterable:
        """The images of one of ``test_sets``."""
        return data.build_test_loader(self.cfg, name)

    def make_loss_loader(self, name: str) -> Iterable:
        """The images of one of ``test_sets`` with their ground truth."""
        return data.build_test_loader(self.cfg, name, with_truth=True)

    def make_evaluator(self, name: str, folder: str) -> DatasetEvaluator | list[DatasetEvaluator]:
        """For one of ``test_sets``, with a folder for its files below that of the run."""
        return build_evaluator(self.cfg, name, folder)

    def make_test_augmentations(self) -> AugmentationList:
        """What an evaluation does to an image: it is resized."""
        sizes = self.cfg.INPUT
        return AugmentationList(
            [ResizeShortestEdgeAtLeastOnePixel([sizes.MIN_SIZE_TEST] * 2, sizes.MAX_SIZE_TEST)]
        )

    def test_scale(self, sizes: Sequence[tuple[int, int]]) -> float:
        """The median factor by which an evaluation resizes images of these heights and widths."""
        resize, outlines = self.make_test_augmentations(), [Outline(*size) for size in sizes]
        for outline in outlines if draws_by_size(resize) else ():
            resize(outline)
        factors = [
            o.image.shape[0] / height for o, (height, _) in zip(outlines, sizes, strict=True)
        ]
        return statistics.median(factors or [1.0])

    def make_augmented(self, model: nn.Module) -> nn.Module:
        """A model that averages over augmented images, as TEST.AUG says."""
        return GeneralizedRCNNWithTTA(self.cfg, model)

    def register(self) -> None:
        """Register the data sets that are named by their files, and complete the configuration.

        A recipe learns masks only where there are some.
        """
        cfg = self.cfg
        data.register_json_datasets(cfg)
        follows = cfg.RECIPE.ENABLED and "MODEL.MASK_ON" not in cfg.RECIPE.KEEP
        if cfg.MODEL.MASK_ON and cfg.DATASETS.TRAIN_JSON and follows:
            records = (record for name in cfg.DATASETS.TRAIN for record in DatasetCatalog.get(name))
            objects = (annotation for record in records for annotation in record["annotations"])
            if not any(annotation.get("segmentation") for annotation in objects):
                cfg.MODEL.MASK_ON = False
                logger.info("MODEL.MASK_ON is now False: no annotation of --train-json has a mask.")

    def fit(self) -> None:
        """Change the configuration as a recipe says for the data."""
        from lambda_det.own_data.recipe import fit_to_data

        fit_to_data(self.cfg)

    def check_data(self, train: bool) -> None:
        """See :meth:`lambda_det.training.task.Task.check_data`."""
        data.check_datasets(self.cfg, train=train, test=not train or len(self.test_names) > 0)
        check_evaluators(self.cfg)

    def verify(self, results: Results) -> None:
        """End the process where the results are not those that TEST.EXPECTED_RESULTS names."""
        verify_results(self.cfg, results)

    def dump(self) -> str:
        """The configuration as YAML."""
        return self.cfg.dump()


def padded(height: int, width: int) -> tuple[int, int]:
    """The sides of an image, padded to a stride of 32."""
    return -(-height // 32) * 32, -(-width // 32) * 32


def _for_run(cfg: CfgNode, settings: DetectionSettings) -> CfgNode:
    """The configuration as Detectron2's builders have to read it."""
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
