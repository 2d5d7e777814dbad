"""Every configuration key that lambda_det adds to Detectron2's, with its default."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

if TYPE_CHECKING:
    from detectron2.config import CfgNode as CN

__all__ = [
    "CONFIGS",
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "LAMBDA_LAYER_KEYS",
    "PYTHON_TAG",
    "REMOVED_KEYS",
    "SOLVER_KEYS",
    "add_lambda_config",
    "add_lambda_layer_keys",
    "add_solver_keys",
    "find_config_file",
    "leaves",
    "option",
    "read_plain",
]

_PACKAGE = Path(__file__).parent
# the configurations that lambda_det brings: their places in the wheel and in a checkout
CONFIGS = next(
    (folder for folder in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if folder.is_dir()),
    _PACKAGE / "configs",
)
# of the pixels from 0 to 255 of red, green and blue, as torchvision and timm have them
IMAGENET_MEAN = (123.675, 116.28, 103.53)
IMAGENET_STD = (58.395, 57.12, 57.375)
PYTHON_TAG = "tag:yaml.org,2002:python/"  # of Python objects in YAML

# Keys of earlier versions, of YAML and of LazyConfigs, each with a sentence on what to do. A file
# or a command line that sets one is refused with it; what an older run recorded is read without it.
REMOVED_KEYS: dict[str, str] = {
    "SOLVER.CUDA_GRAPHS": "MODEL.COMPILE True compiles the backbone in its place.",
    "train.cuda_graphs": "train.compile=True compiles the backbone in its place.",
    "TEST.SAMPLE": "Evaluations are on all images; a larger TEST.EVAL_PERIOD makes fewer of them.",
}


class LayerKey(NamedTuple):
    """A key of the lambda layers.

    Attributes:
        default: stands for the value of the model of that NAME.
        unseen: the default of layers, for an option that changes the result without a trace in any
            tensor. Weights of layers with another value are refused. None for other options.
    """

    default: Any
    unseen: Any = None


# The lambda layers, under MODEL.LAMBDA_RESNET in detection and in classification. In Python and in
# LazyConfigs the same names in lower case are arguments of create_backbone. The comment above a key
# of this file is its sentence in docs/keys.md, which .ci/keys.py writes.
LAMBDA_LAYER_KEYS: dict[str, LayerKey] = {
    # Numbers of a query, |k|; 0 as in the named network, 16 in the paper's networks
    "QUERY_DEPTH": LayerKey(0),
    # Queries of a position, |h|; 0 as in the named network, 4 in the paper's networks
    "HEADS": LayerKey(0),
    # Intra-depth |u|; 0 as in the named network, 1 in the paper's networks
    "INTRA_DEPTH": LayerKey(0),
    # Odd side of the local scope, |m|; 0 as in the named network, 23 in the paper's networks
    "SCOPE": LayerKey(0),
    # The scopes of res2, res3, res4 and res5, where they differ (Appendix B)
    "STAGE_SCOPES": LayerKey([]),
    # Side in pixels of the largest image: position lambdas then span its whole map (Table 10). 0
    # for local scopes
    "GLOBAL_CONTEXT": LayerKey(0),
    # Whether there are content lambdas (Table 9)
    "CONTENT": LayerKey(True),
    # Whether there are position lambdas (Table 9)
    "POSITION": LayerKey(True),
    # How keys are normalised, by a name of docs/layer.md; "" as in the named network
    "KEY_NORM": LayerKey("", unseen="softmax"),
    # Whether queries have a softmax over their depth (Table 11)
    "QUERY_SOFTMAX": LayerKey(False, unseen=False),
    # Whether queries and values have the network's norm (Table 11)
    "QV_NORM": LayerKey(True),
    # Which layers share position embeddings (Table 4): those of a "stage", or those of equal input
    # "size", which adds the first block of the next stage; "" for none
    "SHARE_POSITIONS": LayerKey(""),
    # How the local position output is computed: "auto" or a name of docs/layer.md
    "IMPLEMENTATION": LayerKey("auto"),
}


def add_lambda_layer_keys(section: CN) -> None:
    """Add the keys of the lambda layers to the section ``MODEL.LAMBDA_RESNET``."""
    for key, option in LAMBDA_LAYER_KEYS.items():
        section[key] = copy.copy(option.default)


# Under SOLVER in detection and in classification, for the tables of training/schedules.py
SOLVER_KEYS: dict[str, Any] = {
    # The optimiser: "sgd", "adam", "adamw" (whose weight decay does not pass through its averages)
    # or "rmsprop" (TensorFlow's, with epsilon inside the root; it needs timm); "AdamW" is "adamw".
    # Each has learning rates of its own: set SOLVER.BASE_LR as well, unless a recipe for own data
    # sets it.
    "OPTIMIZER": "sgd",
    # Decay of the averages that Adam and AdamW keep of gradients and of their squares
    "BETAS": [0.9, 0.999],
    # Cosines of the schedule "cosine", one after the other: each begins at the full learning rate
    # (warm restarts, Loshchilov and Hutter, 2017)
    "COSINE_CYCLES": 1,
    # Exponent of the schedule "poly", as in DeepLab
    "POLY_LR_POWER": 0.9,
    # The least learning rate of the schedule "poly", as a multiple of SOLVER.BASE_LR
    "POLY_LR_CONSTANT_ENDING": 0.0,
}


def add_solver_keys(section: CN) -> None:
    """Add the keys of optimisers and schedules to the section ``SOLVER``."""
    for key, default in SOLVER_KEYS.items():
        section[key] = copy.copy(default)


def add_lambda_config(cfg: CN) -> None:
    """Add the keys of lambda_det to ``cfg``; no key that Detectron2 already has is changed.

    Args:
        cfg: the result of ``detectron2.config.get_cfg()``, before a file is merged into it.
    """
    from detectron2.config import CfgNode as CN  # networks need the table above, without Detectron2

    _C = cfg

    # ---- Backbone. MODEL.BACKBONE.NAME is build_lambda_resnet_backbone or one of its FPN forms.
    # MODEL.BACKBONE.FREEZE_AT applies as in Detectron2; 0 trains from scratch.

    _C.MODEL.LAMBDA_RESNET = CN()
    # The network: one of lambda_det.list_models()
    _C.MODEL.LAMBDA_RESNET.NAME = "lambda_resnet50"
    # The features that the backbone gives, from "stem" and "res2" to "res5"
    _C.MODEL.LAMBDA_RESNET.OUT_FEATURES = ["res2", "res3", "res4", "res5"]
    # The norm: any name that detectron2.layers.get_norm knows, such as "BN", "SyncBN", "FrozenBN"
    _C.MODEL.LAMBDA_RESNET.NORM = "BN"
    add_lambda_layer_keys(_C.MODEL.LAMBDA_RESNET)
    # Probability of dropping the residual branch in the last stage; earlier stages drop it less
    # often, as in the public ResNet-RS (Appendix F.3 gives one rate)
    _C.MODEL.LAMBDA_RESNET.STOCHASTIC_DEPTH = 0.0
    # Keep only the input of each block and compute the block again in the backward pass, which
    # takes more time and less memory
    _C.MODEL.LAMBDA_RESNET.CHECKPOINT_ACTIVATIONS = False
    # Give each image of a batch of differently sized images the features that it has by itself: its
    # padding takes no part in the lambda layers, in squeeze-and-excitation, or beside the border.
    # The paper trains on images of one size and has no such mask.
    _C.MODEL.LAMBDA_RESNET.MASK_PADDING = False

    # Keep the maps of the whole detector channels last in memory, as GPUs in 16 bits and the CPU's
    # fast 3x3 convolutions want them. Without a compiler, trainings on a CPU that has AVX2 and no
    # AVX-512 stay contiguous, which is faster there, except for small images. Results differ by
    # rounding. Files of weights do not differ.
    _C.MODEL.CHANNELS_LAST = True
    # Compile the backbone for the training by torch.compile: minutes at the start, faster steps
    # after them. All images must have one size (INPUT.LSJ), and the backbone no hooks.
    _C.MODEL.COMPILE = False

    # ---- Images of a training

    _C.INPUT.LSJ = CN()
    # Large-scale jitter: resize by a random factor, then crop or pad to a square. It replaces
    # Detectron2's resizing in training; the size of the test is INPUT.MIN_SIZE_TEST.
    _C.INPUT.LSJ.ENABLED = False
    # The smallest factor of large-scale jitter
    _C.INPUT.LSJ.MIN_SCALE = 0.1
    # The largest factor of large-scale jitter
    _C.INPUT.LSJ.MAX_SCALE = 2.0
    # Side in pixels of the square of large-scale jitter
    _C.INPUT.LSJ.SIZE = 1024
    # Give training images the pixels of Detectron2's own mapper, which takes longer; otherwise some
    # differ by a level of 255
    _C.INPUT.EXACT_PIXELS = False
    # Brightness, contrast and saturation change by up to this share, hue by a fourth of it; after
    # resizing, crop and flip
    _C.INPUT.COLOR = 0.0

    _C.INPUT.TILE = CN()
    # Side in pixels of the overlapping tiles into which images are cut in memory, in training,
    # evaluation and prediction (--tile); the sizes of the input are then those of a tile. 0 for
    # whole images
    _C.INPUT.TILE.SIZE = 0
    # Pixels that neighbouring tiles have in common, less than half of a tile; an object that is not
    # longer lies whole in one of them. -1 for a fifth of a tile
    _C.INPUT.TILE.OVERLAP = -1
    # Tiles without an object in training, at most, as a multiple of those with objects
    _C.INPUT.TILE.EMPTY = 0.25

    # ---- Data

    # File of labels in COCO's format to train on, in place of DATASETS.TRAIN
    _C.DATASETS.TRAIN_JSON = ""
    # Folder of the images of DATASETS.TRAIN_JSON
    _C.DATASETS.TRAIN_IMAGES = ""
    # File of labels in COCO's format to evaluate on, in place of DATASETS.TEST
    _C.DATASETS.TEST_JSON = ""
    # Folder of the images of DATASETS.TEST_JSON
    _C.DATASETS.TEST_IMAGES = ""

    # An image that cannot be read is named, counted and replaced by the next one; when more than
    # this many different images could not be read, training stops.
    _C.DATALOADER.MAX_UNREADABLE_IMAGES = 20
    # Seconds to wait for a batch of images before the workers are assumed to hang, as on a network
    # drive that does not answer; 0 waits for ever
    _C.DATALOADER.TIMEOUT = 600

    # ---- Solver. SOLVER.AMP.ENABLED is Detectron2's own.

    add_solver_keys(_C.SOLVER)
    # The dtype of mixed precision: "bfloat16", "float16" (with loss scaling, CUDA only), or "auto",
    # which is bfloat16 where the device has instructions for it and otherwise float32
    _C.SOLVER.AMP.DTYPE = "auto"
    # Batches of one optimiser step. SOLVER.IMS_PER_BATCH stays the number of images of one
    # optimiser step; SOLVER.REFERENCE_WORLD_SIZE sees this many times more workers than there are.
    _C.SOLVER.ACCUMULATE_GRADIENTS = 1
    # Keys whose values are not scaled to the processes, whatever SOLVER.REFERENCE_WORLD_SIZE is;
    # those of the command line are added to them
    _C.SOLVER.UNSCALED = []
    # The learning rate of the backbone, as a multiple of the heads'
    _C.SOLVER.BACKBONE_MULTIPLIER = 1.0
    # Number of the newest checkpoints that are kept; model_best.pth is kept besides
    _C.SOLVER.CHECKPOINTS_KEPT = 5
    # Decay of an exponential moving average of the weights; after n steps it is at most
    # (1 + n) / (10 + n). The average is evaluated beside the weights. 0 for none
    _C.SOLVER.EMA_DECAY = 0.0

    # The precision of float32 products and convolutions on a GPU: "highest", "high" or "medium"; ""
    # leaves PyTorch's. Detectron2 has the key since 2023.
    _C.FLOAT32_PRECISION = _C.get("FLOAT32_PRECISION", "")

    # ---- Recipes: schedule, sampling and anchors follow from the training set. lambda-det train
    # derives them before a training, by lambda_det/own_data/recipe.py, and sets ENABLED to False.

    _C.RECIPE = CN()
    # Let schedule, sampling and anchors follow from the training set. The log has a table of what
    # follows and why. Keys that the command line sets stay.
    _C.RECIPE.ENABLED = False
    # Passes over the images or tiles (--epochs); 0 for 30 up to 1,000, falling to 16 at 20,000, and
    # of n tiles an image fewer by n to the power of 3/4
    _C.RECIPE.EPOCHS = 0.0
    # The least number of steps, where RECIPE.EPOCHS is 0
    _C.RECIPE.MIN_STEPS = 300
    # Evaluations in the whole training, at most: where they would take more than a fifth of its
    # time they are fewer
    _C.RECIPE.EVALUATIONS = 10
    # GiB of a GPU's memory: what a training takes without images, and for each image of a batch at
    # the file's sizes, as counted for 1 and 2 images. SOLVER.IMS_PER_BATCH follows from it; []
    # leaves that as it is, and --batch sets it.
    _C.RECIPE.MEMORY = []
    # Keys that the recipe does not set; those of the command line are added to them
    _C.RECIPE.KEEP = []

    # Where the numbers go besides metrics.json: "tensorboard", or the path of an EventWriter of
    # Detectron2, such as "package.module.Writer", which is called with OUTPUT_DIR
    _C.EVENT_WRITERS = ["tensorboard"]

    # ---- Evaluation

    # The result whose best checkpoint is kept as model_best.pth, such as "bbox/AP50"; where only
    # averaged weights are evaluated, their result has this name. "" for the first existing one of
    # mask AP, box AP, keypoint AP, mean IoU and panoptic quality. For a loss, such as
    # "validation/total_loss", the lowest is the best.
    _C.TEST.BEST_METRIC = ""
    # Also compute the losses of training on DATASETS.TEST, with every evaluation in a training
    _C.TEST.LOSS = False
    # Where there are averaged weights (SOLVER.EMA_DECAY), evaluate the trained ones beside them
    _C.TEST.RAW = True
    # The precision of evaluation and prediction: "float32" or "bfloat16". TEST.AUG computes in
    # float32 with either.
    _C.TEST.PRECISION = "float32"
    # The most images of one size that each process evaluates together. Images of other sizes are
    # never padded to them, so the results are those of single images, up to rounding.
    _C.TEST.IMS_PER_BATCH = 1
    # Stop after this number of evaluations without a better one; 0 trains to the end
    _C.TEST.PATIENCE = 0


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
    return str(brought) if name and not Path(name).is_file() and brought.is_file() else name


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
