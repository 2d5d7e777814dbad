"""A LazyConfig as a YAML configuration, as far as rules and parts of Detectron2 read one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from detectron2.config import CfgNode, get_cfg
from omegaconf import DictConfig, ListConfig

from lambda_det.config import add_lambda_config, leaves
from lambda_det.detection.lazy import KEYS, read_settings, read_value, select
from lambda_det.detection.read_yaml import KEYS as YAML_KEYS
from lambda_det.errors import UserError

__all__ = ["EQUIVALENTS", "class_name", "in_lazy_keys", "kept_keys", "place_in", "yaml_view"]

_SETTINGS = (
    "device",
    "images_per_step",
    "accumulate",
    "reference_world_size",
    "base_lr",
    "max_iter",
    "lr_steps",
    "warmup_iters",
    "eval_period",
    "checkpoint_period",
)
# Where a LazyConfig has what a key of YAML says
# fmt: off
EQUIVALENTS = {YAML_KEYS[name]: KEYS[name] for name in _SETTINGS} | {
    "DATASETS.TRAIN":                         "dataloader.train.dataset.names",
    "DATASETS.TEST":                          "dataloader.test.dataset.names",
    "DATASETS.TRAIN_JSON":                    "dataloader.train_json",
    "DATASETS.TRAIN_IMAGES":                  "dataloader.train_images",
    "DATASETS.TEST_JSON":                     "dataloader.test_json",
    "DATASETS.TEST_IMAGES":                   "dataloader.test_images",
    "DATASETS.VAL_SHARE":                     "dataloader.val_share",
    "DATALOADER.FILTER_EMPTY_ANNOTATIONS":    "dataloader.train.dataset.filter_empty",
    "RECIPE.ENABLED":                         "train.recipe.enabled",
    "RECIPE.EPOCHS":                          "train.recipe.epochs",
    "RECIPE.MIN_STEPS":                       "train.recipe.min_steps",
    "RECIPE.EVALUATIONS":                     "train.recipe.evaluations",
    "RECIPE.MEMORY":                          "train.recipe.memory",
    "RECIPE.KEEP":                            "train.recipe.keep",
    "TEST.AUG.ENABLED":                       "train.test_aug.enabled",
    "TEST.AUG.MIN_SIZES":                     "train.test_aug.min_sizes",
    "TEST.AUG.MAX_SIZE":                      "train.test_aug.max_size",
    "TEST.AUG.FLIP":                          "train.test_aug.flip",
    "TEST.DETECTIONS_PER_IMAGE":              "model.roi_heads.box_predictor.test_topk_per_image",
    "MODEL.META_ARCHITECTURE":                "model._target_",
    "MODEL.ROI_HEADS.NUM_CLASSES":            "model.roi_heads.num_classes",
    "MODEL.ROI_HEADS.NMS_THRESH_TEST":        "model.roi_heads.box_predictor.test_nms_thresh",
    "MODEL.RETINANET.NUM_CLASSES":            "model.num_classes",
    "MODEL.RETINANET.IN_FEATURES":            "model.head_in_features",
    "MODEL.RPN.IN_FEATURES":                  "model.proposal_generator.in_features",
    "MODEL.PROPOSAL_GENERATOR.NAME":          "model.proposal_generator._target_",
    "MODEL.ANCHOR_GENERATOR.NAME":            "model.proposal_generator.anchor_generator._target_",
    "MODEL.ANCHOR_GENERATOR.SIZES":           "model.proposal_generator.anchor_generator.sizes",
    "MODEL.ANCHOR_GENERATOR.ASPECT_RATIOS":
        "model.proposal_generator.anchor_generator.aspect_ratios",
}
# fmt: on
# Where another structure has the same
_ELSEWHERE = {
    "model.proposal_generator.anchor_generator": "model.anchor_generator",
    "model.roi_heads.box_predictor.": "model.roi_heads.box_predictors[0].",
}
_AUGMENTATIONS = "dataloader.train.mapper.augmentations"


def yaml_view(lazy: DictConfig) -> CfgNode:
    """The keys of YAML that rules, registration and Detectron2's augmented test read.

    Args:
        lazy: is left as it is.

    Raises:
        ConfigError: a value is of the wrong type or cannot be.
    """
    cfg = get_cfg()
    add_lambda_config(cfg)
    defaults = dict(leaves(cfg))
    for key, place in EQUIVALENTS.items():
        place = place_in(lazy, place)
        if place == KEYS["warmup_iters"]:
            value: Any = read_settings(lazy).warmup_iters
        elif place.endswith("._target_"):
            value = class_name(select(lazy, place)) or defaults[key]
        elif isinstance(select(lazy, place), str) and isinstance(defaults[key], tuple):
            value = (select(lazy, place),)  # one data set
        else:
            value = read_value(lazy, place, defaults[key])
        _set(cfg, key, value)
    cfg.MODEL.MASK_ON = select(lazy, "model.roi_heads.mask_head") is not None
    cfg.MODEL.KEYPOINT_ON = select(lazy, "model.roi_heads.keypoint_head") is not None
    kept = kept_keys(lazy)
    cfg.RECIPE.KEEP = [
        key for key, place in EQUIVALENTS.items() if place in kept or place_in(lazy, place) in kept
    ]
    ratios = cfg.MODEL.ANCHOR_GENERATOR.ASPECT_RATIOS
    if ratios and not isinstance(ratios[0], (list, tuple)):
        cfg.MODEL.ANCHOR_GENERATOR.ASPECT_RATIOS = [ratios]
    _set_sizes(cfg, select(lazy, _AUGMENTATIONS))
    return cfg


def place_in(lazy: DictConfig, place: str) -> str:
    """Where this configuration has what others have in a place of :data:`EQUIVALENTS`."""
    for here, there in _ELSEWHERE.items():
        moved = place.replace(here, there)
        if select(lazy, place) is None and select(lazy, moved) is not None:
            return moved
    return place


def kept_keys(lazy: DictConfig) -> tuple[str, ...]:
    """The keys that neither the data nor the number of processes change."""
    return tuple(select(lazy, EQUIVALENTS["RECIPE.KEEP"]) or ())


@contextmanager
def in_lazy_keys() -> Iterator[None]:
    """Let errors about keys of YAML name those of a LazyConfig."""
    try:
        yield
    except UserError as error:
        text = str(error)
        for key in sorted(EQUIVALENTS, key=len, reverse=True):
            text = text.replace(key, EQUIVALENTS[key])
        raise type(error)(text) from error


def _set(cfg: CfgNode, key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for section in sections:
        cfg = cfg[section]
    cfg[name] = value


def class_name(target: Any) -> str:
    """The name of what a node makes; "" if unknown."""
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return name.rpartition(".")[2]


def _set_sizes(cfg: CfgNode, augmentations: Any) -> None:
    """Say how training resizes an image, where an augmentation of a known form does."""
    for node in augmentations if isinstance(augmentations, ListConfig) else ():
        if not isinstance(node, DictConfig):
            continue
        if {"min_scale", "max_scale", "target_height"} <= node.keys():
            jitter = cfg.INPUT.LSJ
            jitter.ENABLED, jitter.SIZE = True, node.target_height
            jitter.MIN_SCALE, jitter.MAX_SCALE = node.min_scale, node.max_scale
        elif {"short_edge_length", "max_size"} <= node.keys():
            sizes = node.short_edge_length
            cfg.INPUT.MIN_SIZE_TRAIN = list(sizes) if isinstance(sizes, ListConfig) else [sizes]
            cfg.INPUT.MAX_SIZE_TRAIN = node.max_size
