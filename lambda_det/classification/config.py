"""Recipes: every configuration key of ImageNet training with its default, reading, and ranges."""

from __future__ import annotations

import argparse
from operator import attrgetter
from typing import Any

from detectron2.config import CfgNode as CN

from lambda_det.config import (
    ABOVE_0,
    BELOW_1,
    IMAGENET_MEAN,
    IMAGENET_STD,
    NOT_NEGATIVE,
    SHARED_KEYS,
    Rule,
    add_defaults,
    check,
    each_of,
    finite,
    one_of,
)
from lambda_det.training.config_file import ConfigFile, read_config
from lambda_det.training.schedules import check_solver

# Every key with its default. Keys that mean the same as in detection have the same name. The
# defaults are no recipe: each figure of the paper stands once in configs/imagenet, with its source.
DEFAULTS: dict[str, Any] = {
    # ---- Model; the number of classes comes from the data
    # "cuda" or "cpu"
    "MODEL.DEVICE": "cuda",
    # The network: one of lambda_det.list_models()
    "MODEL.NAME": "resnet50",
    # "BN", or "SyncBN" for statistics over all processes
    "MODEL.NORM": "BN",
    # Probability of dropping a feature before the last, linear layer
    "MODEL.DROPOUT": 0.0,
    # Probability of dropping the residual branch in the last stage; earlier stages drop it less
    # often
    "MODEL.STOCHASTIC_DEPTH": 0.0,
    # Keep only the input of each block and compute the block again in the backward pass, which
    # takes more time and less memory
    "MODEL.CHECKPOINT_ACTIVATIONS": False,
    # Start from this checkpoint's backbone, and from its last layer if it has as many classes
    "MODEL.WEIGHTS": "",
    # Mean of the pixels from 0 to 255, of red, green and blue; the default is ImageNet's
    "MODEL.PIXEL_MEAN": list(IMAGENET_MEAN),
    # Standard deviation of the pixels from 0 to 255, of red, green and blue; the default is
    # ImageNet's
    "MODEL.PIXEL_STD": list(IMAGENET_STD),
    # ---- Data
    # "folder": DATA.TRAIN and DATA.VAL hold one folder of images for each class. "cifar10":
    # DATA.TRAIN holds what torchvision's CIFAR10 has downloaded
    "DATA.FORMAT": "folder",
    # Folder of the images to train on
    "DATA.TRAIN": "datasets/imagenet/train",
    # Folder of the images to evaluate on; "" for none, where DATA.HELD_OUT is above 0
    "DATA.VAL": "datasets/imagenet/val",
    # Share of the training images of each class that is held out to choose the best checkpoint and
    # to stop early; 0 takes the validation images for that
    "DATA.HELD_OUT": 0.0,
    # Share of the training images of each class that is used at all
    "DATA.FRACTION": 1.0,
    # An image that cannot be read is replaced by the next one; when more than this many different
    # images could not be read, training stops.
    "DATA.MAX_UNREADABLE_IMAGES": 20,
    # Side in pixels of the square that the network sees in training
    "INPUT.SIZE": 224,
    # Side in pixels of the square that the network sees in evaluation; 0 as in training
    "INPUT.TEST_SIZE": 0,
    # Evaluation takes this share of the image's shorter side from its centre
    "INPUT.TEST_CROP": 0.875,
    # "resized": a random part of the image, from INPUT.MIN_AREA to all of its area, resized to
    # INPUT.SIZE. "padded": the image, resized to INPUT.SIZE if need be, and shifted
    "INPUT.CROP": "resized",
    # The smallest share of an image's area that the crop "resized" takes
    "INPUT.MIN_AREA": 0.08,
    # The most pixels by which the crop "padded" shifts an image
    "INPUT.PADDING": 4,
    # Mirror half of the images
    "INPUT.FLIP": True,
    # Number of RandAugment's operations on each image; 0 for none
    "INPUT.RANDAUGMENT.LAYERS": 0,
    # Strength of RandAugment's operations; 10 is nominal
    "INPUT.RANDAUGMENT.MAGNITUDE": 0,
    # Loader processes for each training process
    "DATALOADER.NUM_WORKERS": 8,
    # ---- Solver
    # Momentum of SGD and of RMSprop
    "SOLVER.MOMENTUM": 0.9,
    # Whether SGD has Nesterov's momentum
    "SOLVER.NESTEROV": False,
    # Weight decay of all parameters but the norms'
    "SOLVER.WEIGHT_DECAY": 0.0,
    # Weight decay of the scales and biases of norms, which TensorFlow's ResNets do not decay
    "SOLVER.WEIGHT_DECAY_NORM": 0.0,
    # Passes over the training images
    "SOLVER.EPOCHS": 100.0,
    # Images of one optimiser step, over all processes and accumulated batches
    "SOLVER.IMS_PER_BATCH": 256,
    # Learning rate for SOLVER.LR_BATCH images a step; it is scaled by IMS_PER_BATCH / LR_BATCH
    "SOLVER.BASE_LR": 0.1,
    # Images a step for which SOLVER.BASE_LR is given
    "SOLVER.LR_BATCH": 256,
    # Epochs in which the learning rate rises linearly from 0
    "SOLVER.WARMUP_EPOCHS": 0.0,
    # Learning rate after the warm-up: "cosine" to SOLVER.BASE_LR_END, "exponential", "steps" or
    # "poly"
    "SOLVER.SCHEDULE": "cosine",
    # Learning rate at the end of the schedule "cosine", for SOLVER.LR_BATCH images a step
    "SOLVER.BASE_LR_END": 0.0,
    # Epochs after which the schedule "steps" multiplies the learning rate by SOLVER.GAMMA
    "SOLVER.STEPS": [],
    # Factor of the learning rate at each of SOLVER.STEPS
    "SOLVER.GAMMA": 0.1,
    # Factor of the learning rate in every SOLVER.DECAY_EPOCHS of the schedule "exponential"
    "SOLVER.DECAY": 0.97,
    # Epochs between two decays of the schedule "exponential"
    "SOLVER.DECAY_EPOCHS": 1.0,
    # Change the learning rate once an epoch instead of at each step; the first epoch of E epochs
    # of warm-up then has 1/E of the peak
    "SOLVER.LR_BY_EPOCH": False,
    # Share of a label that is spread over all classes
    "SOLVER.LABEL_SMOOTHING": 0.0,
    # Clip the gradients
    "SOLVER.CLIP_GRADIENTS.ENABLED": False,
    # "value" clips each number of a gradient, "norm" the gradient of each parameter (as in
    # Detectron2), "full_model" the norm of all gradients together
    "SOLVER.CLIP_GRADIENTS.CLIP_TYPE": "full_model",
    # The number, or the norm, to which gradients are clipped
    "SOLVER.CLIP_GRADIENTS.CLIP_VALUE": 1.0,
    # Exponent of the norm by which gradients are clipped
    "SOLVER.CLIP_GRADIENTS.NORM_TYPE": 2.0,
    # Train in mixed precision
    "SOLVER.AMP.ENABLED": True,
    # Steps between checkpoints; there is also one after each evaluation
    "SOLVER.CHECKPOINT_PERIOD": 1000,
    # Number of the newest checkpoints that are kept; the best is kept besides
    "SOLVER.CHECKPOINTS_KEPT": 3,
    # ---- Evaluation
    # Epochs between evaluations; there is also one at the end
    "TEST.EVAL_PERIOD": 1.0,
    # Images of a batch, over all processes; 0 for as many as a forward pass of training has
    "TEST.IMS_PER_BATCH": 0,
    # Number of batches, over all processes, from which statistics of batch norms are estimated
    # before each evaluation. 0 takes the running averages for the raw weights, and the average of
    # these for the averaged weights
    "TEST.PRECISE_BN_BATCHES": 200,
    # Seed of the order of images, of augmentation, initialisation and dropout; from 0
    "SEED": 0,
    # Let cuDNN choose its algorithms by measurement
    "CUDNN_BENCHMARK": True,
    # Steps between lines of the log
    "LOG_PERIOD": 20,
    # The folder of the run
    "OUTPUT_DIR": "output/imagenet",
    # ---- The same as in detection
    **{key: row.default for key, row in SHARED_KEYS.items()},
}


def get_classification_config() -> CN:
    """The defaults, over which a recipe of ``configs/imagenet`` or ``configs/cifar10`` is read."""
    cfg = CN()
    add_defaults(cfg, DEFAULTS)
    return cfg


def load_recipe(
    args: argparse.Namespace, defaults: CN | None = None, file: ConfigFile | None = None
) -> CN:
    """The recipe of a command line, not frozen.

    Args:
        args: of :func:`lambda_det.classification.parser`.
        defaults: read over instead of those of :func:`get_classification_config`; changed.
        file: ``args.config_file``, where it was opened already.

    Raises:
        ConfigError: the file or a key or value cannot be.
    """
    cfg = defaults or get_classification_config()
    if args.config_file and file is None:
        file = ConfigFile(args.config_file)
    read_config(cfg, file, args.opts)
    return cfg


# What values must be of keys that neither ``Settings`` nor ``check_solver`` checks
_RULES: dict[Rule, tuple[str, ...]] = {
    one_of("BN", "SyncBN"): ("MODEL.NORM",),
    one_of("folder", "cifar10"): ("DATA.FORMAT",),
    one_of("resized", "padded"): ("INPUT.CROP",),
    each_of(3, finite(lambda x: True, "a number")): ("MODEL.PIXEL_MEAN",),
    each_of(3, ABOVE_0): ("MODEL.PIXEL_STD",),
    ABOVE_0: (
        "INPUT.SIZE",
        "SOLVER.EPOCHS",
        "SOLVER.LR_BATCH",
        "TEST.EVAL_PERIOD",
        # Settings checks these two, but their quotient is computed before
        "SOLVER.ACCUMULATE_GRADIENTS",
        "SOLVER.IMS_PER_BATCH",
    ),
    NOT_NEGATIVE: (
        "DATA.MAX_UNREADABLE_IMAGES",
        "INPUT.PADDING",
        "INPUT.RANDAUGMENT.LAYERS",
        "INPUT.TEST_SIZE",
        "SEED",
        "TEST.IMS_PER_BATCH",
        "TEST.PRECISE_BN_BATCHES",
    ),
    BELOW_1: ("SOLVER.LABEL_SMOOTHING",),
    finite(lambda x: 0 < x <= 1, "above 0 and at most 1"): (
        "DATA.FRACTION",
        "INPUT.MIN_AREA",
        "INPUT.TEST_CROP",
    ),
    finite(lambda x: 0 <= x <= 0.5, "from 0 to 0.5"): ("DATA.HELD_OUT",),
    finite(lambda x: 0 <= x <= 30, "from 0 to 30"): ("INPUT.RANDAUGMENT.MAGNITUDE",),
}


def check_ranges(cfg: CN) -> None:
    """Refuse values that no training can have.

    Raises:
        ConfigError: it names the key and its range.
    """
    check_solver(cfg.SOLVER)
    for rule, keys in _RULES.items():
        for key in keys:
            check(key, attrgetter(key)(cfg), rule)
