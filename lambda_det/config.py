"""Every configuration key of detectors in one table, with its default."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from lambda_det.errors import ConfigError

if TYPE_CHECKING:
    from detectron2.config import CfgNode as CN

_PACKAGE = Path(__file__).parent
# the configurations that lambda_det brings: their places in the wheel and in a checkout
CONFIGS = _PACKAGE / "configs"
if not CONFIGS.is_dir():
    CONFIGS = _PACKAGE.parent / "configs"
# of the pixels from 0 to 255 of red, green and blue, as torchvision and timm have them
IMAGENET_MEAN = (123.675, 116.28, 103.53)
IMAGENET_STD = (58.395, 57.12, 57.375)
PYTHON_TAG = "tag:yaml.org,2002:python/"  # of Python objects in YAML

# Keys of earlier versions: what an older run recorded is read without them
REMOVED_KEYS = ("SOLVER.COSINE_CYCLES", "SOLVER.CUDA_GRAPHS", "TEST.SAMPLE")


# What a value must be: a check, and the words for it
Rule = tuple[Callable[[Any], bool], str]


def finite(is_within: Callable[[float], bool], words: str) -> Rule:
    """The rule of a finite number."""
    return (lambda x: isinstance(x, Real) and math.isfinite(x) and is_within(x)), words


def each_of(count: int, rule: Rule) -> Rule:
    """The rule of a list of so many values, each with a rule."""
    return (
        (lambda each: len(each) == count and all(map(rule[0], each))),
        f"{count} numbers, each {rule[1]}",
    )


def or_none(rule: Rule) -> Rule:
    """The rule of a value that may be unknown."""
    return (lambda x: x is None or rule[0](x)), rule[1]


def one_of(*values: Any) -> Rule:
    """The rule of a key with a few values."""
    return values.__contains__, f"one of {values}"


POSITIVE = finite(lambda x: x >= 1, "a finite number, 1 or more")
NOT_NEGATIVE = finite(lambda x: x >= 0, "a finite number, 0 or more")
ABOVE_0 = finite(lambda x: x > 0, "a finite number above 0")
BELOW_1 = finite(lambda x: 0 <= x < 1, "at least 0 and below 1")
SHARE = finite(lambda x: 0 <= x <= 1, "from 0 to 1")
_SEED: Rule = (
    (lambda seed: seed < 2**32),
    "below 4294967296; a run draws its own where it is below 0",
)
_NORM_TYPE: Rule = (lambda norm: norm > 0), "above 0, such as 2.0"
_NOT_0: Rule = (lambda number: number != 0), "1 or more, or below 0 for all"
_ALL_ABOVE_0: Rule = (lambda each: len(each) > 0 and min(each) > 0), "numbers above 0"
_SIZES: Rule = (
    (lambda each: len(each) > 0 and min(each) >= 0),
    "one size or more, such as (640, 800)",
)
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


def check(key: str, value: Any, rule: Rule) -> None:
    """Refuse a value that a rule does not allow.

    Raises:
        ConfigError: the value of the key cannot be.
    """
    is_allowed, words = rule
    if not is_allowed(value):
        raise ConfigError(f"{key} is {value!r}; it must be {words}.")


PRECISION = one_of("float32", "bfloat16")  # of an evaluation
# Whether a resumed run may change a key: no, because the weights, their average or the state of the
# optimiser depend on it; with a warning that the samples are others; yes
FIXED, SAMPLES, FREE = "fixed", "samples", "free"


class Key(NamedTuple):
    """A key of a YAML configuration, and the setting of a run that it is.

    Attributes:
        default: None where Detectron2 has the key.
        rule: what its values must be; None where each value works, or a library refuses it at once.
        setting: its name in :class:`lambda_det.training.settings.Settings`; "" if it is none.
        lazy: the key of a LazyConfig for the setting; "" for train.NAME.
        is_scaled: whether the number of processes changes it.
        on_resume: FIXED, SAMPLES or FREE; "" as its section, and FREE without one.
        needs: the key without which, or with which at 0 or False, nothing reads this one.
        unseen: the default of layers, for an option of theirs that changes the result without a
            trace in any tensor. Weights of layers with another value are refused. None for other
            keys.
    """

    default: Any = None
    rule: Rule | None = None
    setting: str = ""
    lazy: str = ""
    is_scaled: bool = False
    on_resume: str = ""
    needs: str = ""
    unseen: Any = None


# The lambda layers, under MODEL.LAMBDA_RESNET in detection and in classification. In Python and in
# LazyConfigs the same names in lower case are arguments of create_backbone. The comment above a key
# of this file is its sentence in docs/keys.md, which .ci/keys.py writes.
LAMBDA_LAYER_KEYS: dict[str, Key] = {
    # Numbers of a query, |k|; 0 as in the named network, 16 in the paper's networks
    "QUERY_DEPTH": Key(0),
    # Queries of a position, |h|; 0 as in the named network, 4 in the paper's networks
    "HEADS": Key(0),
    # Intra-depth |u|; 0 as in the named network, 1 in the paper's networks
    "INTRA_DEPTH": Key(0),
    # Odd side of the local scope, |m|; 0 as in the named network, 23 in the paper's networks
    "SCOPE": Key(0),
    # The scopes of res2, res3, res4 and res5, where they differ (Appendix B)
    "STAGE_SCOPES": Key([]),
    # Side in pixels of the largest image: position lambdas then span its whole map (Table 10). 0
    # for local scopes
    "GLOBAL_CONTEXT": Key(0),
    # Whether there are content lambdas (Table 9)
    "CONTENT": Key(True),
    # Whether there are position lambdas (Table 9)
    "POSITION": Key(True),
    # How keys are normalised, by a name of docs/layer.md; "" as in the named network
    "KEY_NORM": Key("", unseen="softmax"),
    # Whether queries have a softmax over their depth (Table 11)
    "QUERY_SOFTMAX": Key(False, unseen=False),
    # Whether queries and values have the network's norm (Table 11)
    "QV_NORM": Key(True),
    # Which layers share position embeddings (Table 4): those of a "stage", or those of equal input
    # "size", which adds the first block of the next stage; "" for none
    "SHARE_POSITIONS": Key(""),
    # How the local position output is computed: "auto" or a name of docs/layer.md
    "IMPLEMENTATION": Key("auto", on_resume=FREE),
}


# Every key that detectors and classifiers share. SOLVER has those of training/schedules.py
SHARED_KEYS: dict[str, Key] = {
    **{f"MODEL.LAMBDA_RESNET.{name}": row for name, row in LAMBDA_LAYER_KEYS.items()},
    # Keep all maps channels last in memory, as GPUs in 16 bits and the CPU's fast 3x3 convolutions
    # want them. Without a compiler, trainings of detectors on a CPU that has AVX2 and no AVX-512
    # stay contiguous, which is faster there. Results differ by rounding. Files of weights do not
    # differ.
    "MODEL.CHANNELS_LAST": Key(True, setting="channels_last", on_resume=FREE),
    # torch.compile the forward pass of training, of a detector its backbone: minutes at the start,
    # faster steps after them. A detector's images must have one size (INPUT.LSJ), and its backbone
    # no hooks.
    "MODEL.COMPILE": Key(False, setting="compile", on_resume=FIXED),
    # The optimiser: "sgd", "adam", "adamw" (whose weight decay does not pass through its averages)
    # or "rmsprop" (TensorFlow's, with epsilon inside the root; it needs timm); "AdamW" is "adamw".
    # Each has learning rates of its own: set SOLVER.BASE_LR as well, unless a recipe for own data
    # sets it.
    "SOLVER.OPTIMIZER": Key("sgd", on_resume=FIXED),
    # Decay of the averages that Adam and AdamW keep of gradients and of their squares
    "SOLVER.BETAS": Key([0.9, 0.999], on_resume=FIXED),
    # Exponent of the schedule "poly", as in DeepLab
    "SOLVER.POLY_LR_POWER": Key(0.9),
    # The least learning rate of the schedule "poly", as a multiple of SOLVER.BASE_LR
    "SOLVER.POLY_LR_CONSTANT_ENDING": Key(0.0),
    # Batches of one optimiser step, which keeps its images (SOLVER.IMS_PER_BATCH): more batches
    # take less memory. SOLVER.REFERENCE_WORLD_SIZE sees this many times more workers than there
    # are.
    "SOLVER.ACCUMULATE_GRADIENTS": Key(1, POSITIVE, "accumulate", "train.accumulate_gradients"),
    # The dtype of mixed precision: "bfloat16", "float16" (with loss scaling, CUDA only), or "auto",
    # which is bfloat16 where the device has instructions for it and otherwise float32
    "SOLVER.AMP.DTYPE": Key(
        "auto", one_of("auto", "bfloat16", "float16", None), "amp_dtype", "train.amp.dtype"
    ),
    # Decay of an exponential moving average of the weights; after n steps it is at most
    # (1 + n) / (10 + n). The average is evaluated beside the weights. 0 for none
    "SOLVER.EMA_DECAY": Key(0.0, BELOW_1, "ema_decay", "train.model_ema.decay", on_resume=FIXED),
    # Seconds to wait for a batch of images before the workers are assumed to hang, as on a network
    # drive that does not answer; 0 waits for ever
    "DATALOADER.TIMEOUT": Key(
        600, NOT_NEGATIVE, "timeout", "dataloader.train.timeout", on_resume=FREE
    ),
    # Stop after this number of evaluations without a better one; 0 trains to the end. A resumed run
    # that is to be longer counts anew.
    "TEST.PATIENCE": Key(0, NOT_NEGATIVE, "patience"),
    # Where the numbers go besides metrics.json: "tensorboard", or the path of an EventWriter of
    # Detectron2, such as "package.module.Writer", which is called with OUTPUT_DIR
    "EVENT_WRITERS": Key(["tensorboard"], setting="event_writers"),
}


# Every key that lambda_det adds, with its default
KEYS: dict[str, Key] = {
    # ---- MODEL.BACKBONE.NAME is build_lambda_resnet_backbone or one of its FPN forms.
    # ---- MODEL.BACKBONE.FREEZE_AT applies as in Detectron2; 0 trains from scratch.
    # The network: one of lambda_det.list_models()
    "MODEL.LAMBDA_RESNET.NAME": Key("lambda_resnet50"),
    # The features that the backbone gives, from "stem" and "res2" to "res5"
    "MODEL.LAMBDA_RESNET.OUT_FEATURES": Key(["res2", "res3", "res4", "res5"]),
    # The norm: any name that detectron2.layers.get_norm knows, such as "BN", "SyncBN", "FrozenBN"
    "MODEL.LAMBDA_RESNET.NORM": Key("BN"),
    # Probability of dropping the residual branch in the last stage; earlier stages drop it less
    # often, as in the public ResNet-RS (Appendix F.3 gives one rate)
    "MODEL.LAMBDA_RESNET.STOCHASTIC_DEPTH": Key(0.0),
    # Keep only the input of each block and compute the block again in the backward pass, which
    # takes more time and less memory
    "MODEL.LAMBDA_RESNET.CHECKPOINT_ACTIVATIONS": Key(False, on_resume=FREE),
    # Give each image of a batch of differently sized images the features that it has by itself: its
    # padding takes no part in the lambda layers, in squeeze-and-excitation, or beside the border.
    # The paper trains on images of one size and has no such mask.
    "MODEL.LAMBDA_RESNET.MASK_PADDING": Key(False),
    # ---- Images of a training
    # Large-scale jitter: resize by a random factor, then crop or pad to a square. It replaces
    # Detectron2's resizing in training; the size of the test is INPUT.MIN_SIZE_TEST.
    "INPUT.LSJ.ENABLED": Key(False),
    # The smallest factor of large-scale jitter
    "INPUT.LSJ.MIN_SCALE": Key(0.1, ABOVE_0),
    # The largest factor of large-scale jitter
    "INPUT.LSJ.MAX_SCALE": Key(2.0, ABOVE_0),
    # Side in pixels of the square of large-scale jitter
    "INPUT.LSJ.SIZE": Key(1024, POSITIVE),
    # Give training images the pixels of Detectron2's own mapper, which takes longer; otherwise some
    # differ by a level of 255
    "INPUT.EXACT_PIXELS": Key(False),
    # Brightness, contrast and saturation change by up to this share, hue by a fourth of it; after
    # resizing, crop and flip
    "INPUT.COLOR": Key(0.0, SHARE),
    # Side in pixels of the overlapping tiles into which images are cut in memory, in training,
    # evaluation and prediction (--tile); the sizes of the input are then those of a tile. 0 for
    # whole images
    "INPUT.TILE.SIZE": Key(0),
    # Pixels that neighbouring tiles have in common, less than half of a tile; an object that is not
    # longer lies whole in one of them. -1 for a fifth of a tile
    "INPUT.TILE.OVERLAP": Key(-1, needs="INPUT.TILE.SIZE"),
    # Tiles without an object in training, at most, as a multiple of those with objects
    "INPUT.TILE.EMPTY": Key(0.25, needs="INPUT.TILE.SIZE"),
    # ---- Data
    # File of labels in COCO's format to train on, in place of DATASETS.TRAIN
    "DATASETS.TRAIN_JSON": Key(""),
    # Folder of the images of DATASETS.TRAIN_JSON
    "DATASETS.TRAIN_IMAGES": Key(""),
    # File of labels in COCO's format to evaluate on, in place of DATASETS.TEST
    "DATASETS.TEST_JSON": Key("", on_resume=FREE),
    # Folder of the images of DATASETS.TEST_JSON
    "DATASETS.TEST_IMAGES": Key("", on_resume=FREE),
    # An image that cannot be read is named, counted and replaced by the next one; when more than
    # this many different images could not be read, training stops.
    "DATALOADER.MAX_UNREADABLE_IMAGES": Key(20, on_resume=FREE),
    # ---- Solver. SOLVER.AMP.ENABLED is Detectron2's own.
    # Keys whose values are not scaled to the processes, whatever SOLVER.REFERENCE_WORLD_SIZE is;
    # those of the command line are added to them
    "SOLVER.UNSCALED": Key([], setting="unscaled"),
    # The learning rate of the backbone, as a multiple of the heads'
    "SOLVER.BACKBONE_MULTIPLIER": Key(1.0, on_resume=FIXED),
    # Number of the newest checkpoints that are kept; model_best.pth is kept besides
    "SOLVER.CHECKPOINTS_KEPT": Key(
        5, POSITIVE, "checkpoints_kept", "train.checkpointer.max_to_keep"
    ),
    # ---- lambda-det train derives a recipe before a training (lambda_det/own_data/fit.py), and
    # ---- sets ENABLED to False.
    # Let schedule, batch and detections follow from the training set. The log has a table of what
    # follows and why. Keys that the command line sets stay.
    "RECIPE.ENABLED": Key(False),
    # Passes over the images or tiles (--epochs); 0 for 30 up to 1,000, falling to 16 at 20,000, and
    # of n tiles an image fewer by n to the power of 3/4
    "RECIPE.EPOCHS": Key(0.0),
    # Seconds that a training may take (--time); 0 for any. Once its first steps are timed,
    # RECIPE.EPOCHS and the schedule follow from them, and this becomes 0
    "RECIPE.TIME": Key(0.0),
    # The least number of steps, where RECIPE.EPOCHS is 0
    "RECIPE.MIN_STEPS": Key(300),
    # Evaluations in the whole training, at most: where they would take more than a fifth of its
    # time they are fewer
    "RECIPE.EVALUATIONS": Key(10),
    # GiB of a GPU's memory: what a training takes without images, and for each image of a batch at
    # the file's sizes, as counted for 1 and 2 images. SOLVER.IMS_PER_BATCH follows from it; []
    # leaves that as it is, and --batch sets it.
    "RECIPE.MEMORY": Key([]),
    # Keys that the recipe does not set; those of the command line are added to them
    "RECIPE.KEEP": Key([]),
    # ---- Evaluation
    # The result whose best checkpoint is kept as model_best.pth, such as "bbox/AP50"; where only
    # averaged weights are evaluated, their result has this name. "" for the first existing one of
    # box AP, mask AP, keypoint AP, mean IoU and panoptic quality. For a loss, such as
    # "validation/total_loss", the lowest is the best.
    "TEST.BEST_METRIC": Key("", setting="best_metric"),
    # Also compute the losses of training on DATASETS.TEST, with every evaluation in a training
    "TEST.LOSS": Key(False),
    # Where there are averaged weights (SOLVER.EMA_DECAY), evaluate the trained ones beside them
    "TEST.RAW": Key(True, setting="evaluate_raw", needs="SOLVER.EMA_DECAY"),
    # The precision of evaluation and prediction: "float32" or "bfloat16". TEST.AUG computes in
    # float32 with either.
    "TEST.PRECISION": Key("float32", PRECISION, "test_precision"),
    # The most images of one size that each process evaluates together. Images of other sizes are
    # never padded to them, so the results are those of single images, up to rounding.
    "TEST.IMS_PER_BATCH": Key(1, POSITIVE),
    # ---- Others
    # The precision of float32 products and convolutions on a GPU: "highest", "high" or "medium"; ""
    # leaves PyTorch's. Detectron2 has the key since 2023.
    "FLOAT32_PRECISION": Key("", one_of("", "highest", "high", "medium"), "float32_precision"),
    **SHARED_KEYS,
}

# Detectron2's own keys, and sections. A rule stands where Detectron2 takes a value without a word,
# and would train or find nothing with it, or would refuse it after hours.
KEYS |= {
    "MODEL.DEVICE": Key(setting="device", on_resume=FREE),
    "MODEL.WEIGHTS": Key(setting="weights", lazy="train.init_checkpoint", on_resume=FREE),
    "INPUT": Key(on_resume=SAMPLES),
    "INPUT.MIN_SIZE_TEST": Key(rule=NOT_NEGATIVE, on_resume=FREE),
    "INPUT.MAX_SIZE_TEST": Key(rule=POSITIVE, on_resume=FREE),
    "DATASETS": Key(on_resume=SAMPLES),
    "DATASETS.TEST": Key(on_resume=FREE),
    "DATALOADER": Key(on_resume=SAMPLES),
    "DATALOADER.NUM_WORKERS": Key(
        None, NOT_NEGATIVE, "num_workers", "dataloader.train.num_workers", on_resume=FREE
    ),
    "OUTPUT_DIR": Key(None, (bool, "the path of a folder"), "output_dir"),
    "CUDNN_BENCHMARK": Key(setting="cudnn_benchmark"),
    "SEED": Key(None, _SEED, "seed", on_resume=FIXED),
    "SOLVER.BASE_LR": Key(
        None, or_none(ABOVE_0), "base_lr", "optimizer.lr", is_scaled=True, on_resume=FIXED
    ),
    "SOLVER.CHECKPOINT_PERIOD": Key(
        None, POSITIVE, "checkpoint_period", "train.checkpointer.period"
    ),
    "SOLVER.CLIP_GRADIENTS.CLIP_TYPE": Key(
        None, one_of("value", "norm", "full_model"), "clipping.kind"
    ),
    "SOLVER.CLIP_GRADIENTS.CLIP_VALUE": Key(
        None, ABOVE_0, "clipping.limit", "train.clip_grad.params.max_norm"
    ),
    "SOLVER.CLIP_GRADIENTS.NORM_TYPE": Key(
        None, _NORM_TYPE, "clipping.norm_type", "train.clip_grad.params.norm_type"
    ),
    "SOLVER.IMS_PER_BATCH": Key(
        None,
        or_none(POSITIVE),
        "images_per_step",
        "dataloader.train.total_batch_size",
        is_scaled=True,
        on_resume=FIXED,
    ),
    "SOLVER.MAX_ITER": Key(None, NOT_NEGATIVE, "max_iter", is_scaled=True),
    "SOLVER.REFERENCE_WORLD_SIZE": Key(rule=NOT_NEGATIVE, setting="reference_world_size"),
    "SOLVER.STEPS": Key(setting="lr_steps", is_scaled=True),
    "SOLVER.WARMUP_ITERS": Key(setting="warmup_iters", is_scaled=True),
    "TEST.EVAL_PERIOD": Key(setting="eval_period", is_scaled=True),
}
_BY_RULE: dict[Rule, tuple[str, ...]] = {
    SHARE: (
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
    POSITIVE: (
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
    ),
    NOT_NEGATIVE: (
        "MODEL.RETINANET.NUM_CONVS",
        "MODEL.RETINANET.SMOOTH_L1_LOSS_BETA",
        "MODEL.ROI_BOX_HEAD.NUM_CONV",
        "MODEL.ROI_BOX_HEAD.NUM_FC",
        "MODEL.ROI_BOX_HEAD.SMOOTH_L1_BETA",
        "MODEL.ROI_MASK_HEAD.NUM_CONV",
        "MODEL.RPN.SMOOTH_L1_BETA",
    ),
    _NOT_0: ("TEST.DETECTIONS_PER_IMAGE",),
    one_of("smooth_l1", "giou", "diou", "ciou"): (
        "MODEL.RETINANET.BBOX_REG_LOSS_TYPE",
        "MODEL.ROI_BOX_HEAD.BBOX_REG_LOSS_TYPE",
        "MODEL.RPN.BBOX_REG_LOSS_TYPE",
    ),
    _SIZES: (
        "INPUT.MIN_SIZE_TRAIN",
        "TEST.AUG.MIN_SIZES",
    ),
    _ALL_ABOVE_0: ("MODEL.PIXEL_STD",),
    _WIDTHS: ("MODEL.RPN.CONV_DIMS",),
    _BOX_WEIGHTS: (
        "MODEL.RETINANET.BBOX_REG_WEIGHTS",
        "MODEL.ROI_BOX_HEAD.BBOX_REG_WEIGHTS",
        "MODEL.RPN.BBOX_REG_WEIGHTS",
    ),
    _EXPECTED: ("TEST.EXPECTED_RESULTS",),
    _POWER_OF_2: ("MODEL.SEM_SEG_HEAD.COMMON_STRIDE",),
    _LEVELS: (
        "MODEL.ANCHOR_GENERATOR.ASPECT_RATIOS",
        "MODEL.ANCHOR_GENERATOR.SIZES",
    ),
}
KEYS |= {key: Key(rule=rule) for rule, keys in _BY_RULE.items() for key in keys}
_FIXED = (
    "MODEL",
    "INPUT.FORMAT",
    "SOLVER.BIAS_LR_FACTOR",
    "SOLVER.MOMENTUM",
    "SOLVER.NESTEROV",
    "SOLVER.WEIGHT_DECAY",
    "SOLVER.WEIGHT_DECAY_BIAS",
    "SOLVER.WEIGHT_DECAY_NORM",
)
KEYS |= {key: Key(on_resume=FIXED) for key in _FIXED}


def add_lambda_config(cfg: CN) -> None:
    """Add the keys of lambda_det to ``cfg``; no key that Detectron2 already has is changed.

    Args:
        cfg: the result of ``detectron2.config.get_cfg()``, before a file is merged into it.
    """
    ours = {key: row.default for key, row in KEYS.items() if row.default is not None}
    add_defaults(cfg, ours)


def add_defaults(cfg: CN, defaults: Mapping[str, Any]) -> None:
    """Add dotted keys with their values to ``cfg``; a key that is there keeps its value."""
    for key, value in defaults.items():
        *sections, name = key.split(".")
        node = cfg
        for section in sections:
            node = node.setdefault(section, type(cfg)())
        node.setdefault(name, copy.copy(value))


def leaves(node: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of all nested settings; an empty section counts as a value."""
    for name, value in node.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def find_config_file(name: str) -> str:
    """The path of a configuration that lambda_det brings, such as configs/quick/FILE.yaml.

    An existing file of that name comes first. Any other name is returned as it is.
    """
    brought = CONFIGS / name.removeprefix("configs/")
    return str(brought) if not Path(name).is_file() and brought.is_file() else name


def on_resume(keys: Mapping[str, str], key: str) -> str:
    """FIXED, SAMPLES or FREE, as ``keys`` has it for a key or for the nearest of its sections."""
    while key and key not in keys:
        key = key.rpartition(".")[0]
    return keys.get(key, FREE)


def option(key: str, value: Any) -> str:
    """A setting as a command line has it: KEY VALUE for YAML, key=value for a LazyConfig."""
    return f"{key} {value}" if key.isupper() else f"{key}={value}"


# PyYAML's parser in C takes a tenth of the time, but ends the process at a text of many brackets,
# and refuses "\udcff", as a path with a byte that is not UTF-8 is saved
class _PlainLoader(yaml.SafeLoader):
    """Reads the parts of Python objects, as a saved LazyConfig has them, and creates no object."""


def _arguments(loader: yaml.SafeLoader, tag: str, node: yaml.Node) -> Any:
    if isinstance(node, yaml.MappingNode):
        return loader.construct_mapping(node, deep=True)
    if isinstance(node, yaml.SequenceNode):
        return loader.construct_sequence(node, deep=True)
    return f"{tag} {node.value}".strip()


_PlainLoader.add_multi_constructor(PYTHON_TAG, _arguments)


def read_plain(text: str) -> Any:
    """A YAML text, with the parts of Python objects in place of the objects.

    Raises:
        yaml.YAMLError: it is not YAML.
    """
    try:
        return yaml.load(text, _PlainLoader)
    except RecursionError as error:
        raise yaml.YAMLError("its values lie too deep in one another") from error
