"""Every key of Detectron2's, set to another value: something changes, or the key is refused.

What a key is read for is compared in the parts that a run is made of: settings, model, optimiser,
schedule, loaders, evaluators. A key that only counts beside another has that one in its group.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from detectron2.config import CfgNode, get_cfg
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets import register_coco_instances
from detectron2.modeling import GeneralizedRCNNWithTTA

from lambda_det.config import leaves
from lambda_det.detection import DetectionTask, load_config
from lambda_det.detection.data import (
    make_panoptic_shapes,
    make_shapes,
    register_panoptic_shapes,
    register_shapes,
)
from lambda_det.detection.model import build_model
from lambda_det.errors import ConfigError, UserError
from tests.detection.heads.tiny import HEADS
from tests.detection.test_lazy_parity import _network, _settings
from tests.detection.tiny import on_meta

CONFIGS = Path(__file__).parents[2] / "configs"
SMALL = """
MODEL.DEVICE cpu  MODEL.LAMBDA_RESNET.NAME resnet14_slim_lambda_c5  MODEL.ROI_HEADS.NUM_CLASSES 3
DATALOADER.NUM_WORKERS 0  SOLVER.IMS_PER_BATCH 2  SOLVER.REFERENCE_WORLD_SIZE 0
DATASETS.TRAIN ('gaps',)  DATASETS.TEST ('shapes_val',)
"""
MASK = "mask_rcnn_lambdaresnet50"
# name: (configuration, keys beside SMALL)
GROUPS = {
    "mask": (MASK, ""),
    "sizes": (
        MASK,
        "INPUT.LSJ.ENABLED False  INPUT.CROP.ENABLED True  INPUT.MIN_SIZE_TRAIN (50,60)",
    ),
    "repeat": (
        MASK,
        "DATALOADER.SAMPLER_TRAIN RepeatFactorTrainingSampler  DATALOADER.REPEAT_THRESHOLD 4.0",
    ),
    "switched on": (
        MASK,
        "SOLVER.CLIP_GRADIENTS.ENABLED True  TEST.PRECISE_BN.ENABLED True  TEST.AUG.ENABLED True",
    ),
    "fed loss": (
        MASK,
        "MODEL.ROI_BOX_HEAD.USE_FED_LOSS True  MODEL.ROI_BOX_HEAD.USE_SIGMOID_CE True  "
        "MODEL.ROI_BOX_HEAD.FED_LOSS_NUM_CLASSES 2",
    ),
    "cosine": (MASK, "SOLVER.LR_SCHEDULER_NAME WarmupCosineLR"),
    "decays": (MASK, "SOLVER.LR_SCHEDULER_NAME WarmupStepWithFixedGammaLR  SOLVER.STEPS (100,)"),
    "resnet": (
        MASK,
        "MODEL.BACKBONE.NAME build_resnet_fpn_backbone  "
        "MODEL.RESNETS.OUT_FEATURES ['res2','res3','res4','res5']",
    ),
    "dilated": (
        "mask_rcnn_dc5_lambdaresnet50",
        "MODEL.BACKBONE.NAME build_resnet_backbone  MODEL.RESNETS.OUT_FEATURES ['res5']  "
        "MODEL.RESNETS.RES5_DILATION 2",
    ),
    "rotated": (
        MASK,
        "MODEL.ANCHOR_GENERATOR.NAME RotatedAnchorGenerator  MODEL.PROPOSAL_GENERATOR.NAME RRPN  "
        "MODEL.RPN.BBOX_REG_WEIGHTS (1,1,1,1,1)  MODEL.ROI_HEADS.NAME RROIHeads  "
        "MODEL.ROI_BOX_HEAD.POOLER_TYPE ROIAlignRotated  "
        "MODEL.ROI_BOX_HEAD.BBOX_REG_WEIGHTS (10,10,5,5,1)  MODEL.MASK_ON False",
    ),
    "proposals": (
        "faster_rcnn_lambdaresnet50",
        "INPUT.LSJ.ENABLED False  MODEL.LOAD_PROPOSALS True  "
        "MODEL.PROPOSAL_GENERATOR.NAME PrecomputedProposals  "
        "DATASETS.PROPOSAL_FILES_TRAIN ('gaps.pkl',)  "
        "DATASETS.PROPOSAL_FILES_TEST ('shapes_val.pkl',)",
    ),
    # Deformable convolutions are compiled operators, which a Detectron2 may lack
    **{name: (head.config.removesuffix(".yaml"), "") for name, head in HEADS.items()},
}
# The groups that the keys which begin so are tried in, until something changes
WHERE = {
    "MODEL.RETINANET": ("retinanet",),
    "MODEL.SEM_SEG_HEAD": ("panoptic_fpn",),
    "MODEL.PANOPTIC_FPN": ("panoptic_fpn",),
    "MODEL.ROI_KEYPOINT_HEAD": ("keypoint_rcnn",),
    "TEST.KEYPOINT": ("keypoint_rcnn",),
    "MODEL.ROI_BOX_CASCADE_HEAD": ("cascade_mask_rcnn",),
    "MODEL.RESNETS.RES5_DILATION": ("dilated",),
    "MODEL.RESNETS": ("resnet",),
    "MODEL.ANCHOR_GENERATOR.ANGLES": ("rotated",),
    "DATASETS.P": ("proposals",),
    "DATALOADER.REPEAT": ("repeat",),
    "SOLVER": ("mask", "switched on", "cosine", "decays"),
    "INPUT": ("mask", "sizes"),
    "MODEL.LOAD_PROPOSALS": ("proposals", "mask"),
    "MODEL.FPN.IN_FEATURES": ("retinanet",),
    "MODEL.ROI_BOX_HEAD.FED": ("fed loss",),
    "MODEL.ROI_BOX_HEAD.USE_FED": ("fed loss",),
    "TEST": ("mask", "switched on"),
    "": ("mask", "sizes"),
}
# What a key is set to where neither its opposite nor twice its value will do
OTHER = {
    "MODEL.META_ARCHITECTURE": "ProposalNetwork",
    "MODEL.BACKBONE.NAME": "build_retinanet_lambda_resnet_fpn_backbone",
    "MODEL.FPN.IN_FEATURES": "['res2','res3','res4','res5']",
    "MODEL.RPN.IN_FEATURES": "['p6','p5','p4','p3','p2']",
    "MODEL.RPN.CONV_DIMS": "[8]",
    "MODEL.ANCHOR_GENERATOR.OFFSET": "0.5",
    "MODEL.RETINANET.IN_FEATURES": "['p7','p6','p5','p4','p3']",
    "MODEL.RETINANET.NORM": "BN",
    "MODEL.RESNETS.RES5_DILATION": "1",
    "MODEL.ROI_BOX_CASCADE_HEAD.IOUS": "(0.5,0.65,0.8)",
    "MODEL.SEM_SEG_HEAD.NORM": "BN",
    "MODEL.ROI_KEYPOINT_HEAD.MIN_KEYPOINTS_PER_IMAGE": "9",
    "MODEL.BACKBONE.FREEZE_AT": "2",
    "MODEL.WEIGHTS": "other.pth",
    "MODEL.DEVICE": "cuda",
    "MODEL.FPN.FUSE_TYPE": "avg",
    "MODEL.ANCHOR_GENERATOR.NAME": "RotatedAnchorGenerator",
    "MODEL.ROI_HEADS.IN_FEATURES": "['p2','p3']",
    "MODEL.RESNETS.DEPTH": "101",
    "MODEL.RESNETS.OUT_FEATURES": "['stem','res2','res3','res4','res5']",
    "INPUT.FORMAT": "RGB",
    "INPUT.MASK_FORMAT": "bitmask",
    "INPUT.RANDOM_FLIP": "vertical",
    "INPUT.CROP.TYPE": "absolute",
    "INPUT.MIN_SIZE_TRAIN_SAMPLING": "range",
    "DATASETS.TRAIN": "('shapes_train',)",
    "DATASETS.TEST": "('shapes_train',)",
    "DATASETS.PROPOSAL_FILES_TRAIN": "('other.pkl',)",
    "DATASETS.PROPOSAL_FILES_TEST": "('other_val.pkl',)",
    "DATALOADER.SAMPLER_TRAIN": "RepeatFactorTrainingSampler",
    "SOLVER.LR_SCHEDULER_NAME": "WarmupCosineLR",
    "SOLVER.WARMUP_METHOD": "constant",
    "SOLVER.CLIP_GRADIENTS.CLIP_TYPE": "norm",
    "SOLVER.WEIGHT_DECAY_BIAS": "0.5",
    "SOLVER.BASE_LR_END": "0.01",
    "TEST.EXPECTED_RESULTS": "[['bbox','AP',38.5,0.2]]",
    "OUTPUT_DIR": "elsewhere",
    "FLOAT32_PRECISION": "high",
}
# Settings that tests of their own follow to where they count
ELSEWHERE = {
    "TEST.EXPECTED_RESULTS": "test_results_are_held_against_what_is_expected",
    # The compiled operators of deformable convolutions, which a Detectron2 may lack, refuse it
    "MODEL.RESNETS.DEFORM_MODULATED": "",
    "MODEL.RESNETS.DEFORM_NUM_GROUPS": "",
    "MODEL.RESNETS.DEFORM_ON_PER_STAGE": "",
}
KEYS = dict(leaves(get_cfg()))


def _other(key: str, value: Any) -> str:
    if key in OTHER:
        return OTHER[key]
    if key.endswith("IOU_LABELS"):
        return "[0,0,1]" if len(value) == 3 else "[-1,1]"
    if isinstance(value, bool):
        return str(not value)
    if isinstance(value, (int, float)):
        return str(value * 2 if value else type(value)(1))
    if isinstance(value, str):
        ends = {"_LOSS_TYPE": "giou", "POOLER_TYPE": "ROIAlign", "NORM": "GN"}
        fitting = (other for end, other in ends.items() if key.endswith(end) and other != value)
        return next(fitting, "NoSuchName")
    return str(_doubled(value)).replace(" ", "")


def _doubled(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        names = any(isinstance(item, str) for item in value)
        return list(value[1:]) if names else [_doubled(item) for item in value]
    return value * 2 if value else 1


def _write_proposals(file: str, dataset: str, side: float) -> None:
    ids = [record["image_id"] for record in DatasetCatalog.get(dataset)]
    boxes = [np.array([[0, 0, side, side]], np.float32)] * len(ids)
    logits = [np.ones(1, np.float32)] * len(ids)
    content = {"ids": ids, "boxes": boxes, "objectness_logits": logits, "bbox_mode": 1}
    Path(file).write_bytes(pickle.dumps(content))


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("data")
    make_shapes(root, num_train=6, num_val=3, size=64)
    make_panoptic_shapes(root, num_train=4, num_val=3, size=64)
    # One image without an object, one that is higher than wide
    content = json.loads((root / "shapes/annotations/instances_train.json").read_text())
    first, second = (image["id"] for image in content["images"][:2])
    content["annotations"] = [a for a in content["annotations"] if a["image_id"] != first]
    next(i for i in content["images"] if i["id"] == second)["width"] = 32
    (root / "gaps.json").write_text(json.dumps(content))
    return root


@pytest.fixture(scope="module")
def files() -> Callable[..., dict]:
    """Detectron2's reader of configuration files, which reads each of them once."""
    read = functools.cache(CfgNode.load_yaml_with_base)
    return lambda *args, **options: copy.deepcopy(read(*args, **options))


@pytest.fixture
def groups(root, files, tmp_path, monkeypatch) -> Callable[..., CfgNode]:
    """Make the configuration of a group, with one key set to a value."""
    monkeypatch.setattr(CfgNode, "load_yaml_with_base", files)
    monkeypatch.chdir(tmp_path)
    register_shapes(root)
    register_panoptic_shapes(root)
    register_coco_instances("gaps", {}, str(root / "gaps.json"), str(root / "shapes/train"))
    MetadataCatalog.get("gaps").class_image_count = [
        {"id": 1 + i, "image_count": 1 + 3 * i} for i in range(3)
    ]
    for name, dataset, side in (
        ("gaps", "gaps", 9),
        ("other", "gaps", 8),
        ("shapes_val", "shapes_val", 9),
        ("other_val", "shapes_val", 8),
    ):
        _write_proposals(f"{name}.pkl", dataset, side)

    def make(group: str, *setting: str) -> CfgNode:
        file, keys = GROUPS[group]
        opts = HEADS[group].opts() if group in HEADS else (SMALL + keys).split()
        if group == "keypoint_rcnn":
            opts += ["TEST.KEYPOINT_OKS_SIGMAS", "[0.1,0.1,0.1,0.1]"]
        return load_config(
            argparse.Namespace(config_file=str(CONFIGS / f"{file}.yaml"), opts=[*opts, *setting])
        )

    return make


@pytest.fixture(scope="module")
def kept() -> dict[tuple[str, str], Any]:
    return {}


@pytest.fixture
def base(groups, kept) -> Callable[[str, str], Any]:
    """A part of a group, or its keys, without a key that is set; each is made once."""

    def make(group: str, part: str) -> Any:
        if (group, part) not in kept:
            cfg = groups(group)
            build = PARTS.get(part, lambda task: dict(leaves(cfg)))
            kept[group, part] = build(DetectionTask(cfg.clone()).prepare(train=True))
        return kept[group, part]

    return make


def _values(task: DetectionTask) -> Any:
    """What the tensors of a model hold when it is made: anchors, pixel means, initial weights."""
    torch.manual_seed(0)
    state = build_model(task.config)
    return [
        float(value.detach().double().abs().sum())
        for value in (*state.parameters(), *state.buffers())
    ]


def _on_meta(task: DetectionTask) -> torch.nn.Module:
    """The model without data, made once for the parts that only look at it."""
    if not hasattr(task, "made"):
        task.made = on_meta(task.config)
    return task.made


def _optimizer(task: DetectionTask) -> Any:
    model = _on_meta(task)
    names = {parameter: name for name, parameter in model.named_parameters()}
    optimizer = task.build_optimizer(model)
    return [
        [sorted(names[p] for p in group["params"]), _settings({**group, "params": 0}, set())]
        for group in optimizer.param_groups
    ]


def _rates(task: DetectionTask) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=task.settings.base_lr)
    scheduler, last = task.build_scheduler(optimizer), task.settings.max_iter
    rates = []
    for step in sorted({0, 1, *(last * part // 20 for part in range(20)), last - 1}):
        scheduler.last_epoch = step
        rates.append(scheduler.get_lr()[0])
    return rates


def _loaders(task: DetectionTask) -> Any:
    torch.manual_seed(0)
    np.random.seed(0)
    made = [task.build_train_loader(), task.parts.make_test_loader(task.config.DATASETS.TEST[0])]
    return [_settings(loader, set()) for loader in made]


def _evaluators(task: DetectionTask) -> Any:
    cfg = task.config
    kept = ("_tasks", "_max_dets_per_image", "_kpt_oks_sigmas", "_output_dir", "dataset_name")
    made = task.parts.make_evaluator(cfg.DATASETS.TEST[0], "inference")
    result = [
        (type(one).__name__, [str(vars(one).get(name)) for name in kept])
        for one in getattr(made, "_evaluators", [made])
    ]
    if cfg.TEST.AUG.ENABLED:
        tested = GeneralizedRCNNWithTTA(cfg, on_meta(cfg))
        result.append(_settings(tested.tta_mapper, set()))
    return result


PARTS: dict[str, Callable[[DetectionTask], Any]] = {
    "settings": lambda task: dataclasses.asdict(task.settings),
    "model": lambda task: _network(_on_meta(task)),
    "trainable": lambda task: [p.requires_grad for p in _on_meta(task).parameters()],
    "optimizer": _optimizer,
    "rates": _rates,
    "loaders": _loaders,
    "evaluators": _evaluators,
    "values": _values,
}


def _first_change(key: str, make: Callable[..., CfgNode], base: Callable[..., Any]) -> str:
    """What changes with a key, or that it is refused; "" for nothing."""
    groups = next(groups for prefix, groups in WHERE.items() if key.startswith(prefix))
    for group in groups:
        value = base(group, "keys")[key]
        try:
            task = DetectionTask(make(group, key, _other(key, value))).prepare(train=True)
            for part, build in PARTS.items():
                if build(task) != base(group, part):
                    return f"{part} of {group}"
        except UserError as error:
            if key in str(error):
                return "refused"
            raise
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("group", ["mask", "sizes", "proposals"])
def test_the_same_keys_make_the_same_parts(group, groups, base, monkeypatch, tmp_path):
    """Also in another folder; otherwise every key would seem to have an effect."""
    expected = {part: base(group, part) for part in PARTS}
    for file in tmp_path.glob("*.pkl"):
        (tmp_path / "other").mkdir(exist_ok=True)
        (tmp_path / "other" / file.name).write_bytes(file.read_bytes())
    monkeypatch.chdir(tmp_path / "other")
    task = DetectionTask(groups(group)).prepare(train=True)
    assert [part for part, build in PARTS.items() if build(task) != expected[part]] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "section",
    sorted({key.split(".")[0] for key in KEYS} - {"MODEL"})
    + [
        f"MODEL.{part}"
        for part in ("A", "B", "D", "F", "K", "L", "M", "P", "RE", "RO", "RP", "S", "W")
    ],
)
def test_no_key_is_without_effect(section, groups, base):

    silent, failed = [], {}
    for key in KEYS:
        if not key.startswith(section) or key in ELSEWHERE:
            continue
        try:
            if not _first_change(key, groups, base):
                silent.append(key)
        except Exception as error:  # all of a section in one report
            failed[key] = f"{type(error).__name__}: {error}"[:300]
    assert (silent, failed) == ([], {})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("VERSION", "1"),
        ("GLOBAL.HACK", "2.0"),
        ("MODEL.PANOPTIC_FPN.COMBINE.ENABLED", "False"),
    ],
)
def test_keys_that_nothing_reads_are_refused(key, value):
    with pytest.raises(ConfigError, match=key):
        load_config(argparse.Namespace(config_file="", opts=[key, value]))


def test_results_are_held_against_what_is_expected(groups):
    expected = "[['bbox','AP',38.5,0.2]]"
    task = DetectionTask(groups("mask", "TEST.EXPECTED_RESULTS", expected))
    task.finish({"bbox": {"AP": 38.4}})
    with pytest.raises(SystemExit):
        task.finish({"bbox": {"AP": 38.0}})


@pytest.mark.parametrize(
    "name", ["NoSuchSampler", "RandomSubsetTrainingSampler", "WeightedTrainingSampler"]
)
def test_samplers_that_cannot_be_made_are_refused(name, groups):
    task = DetectionTask(groups("mask", "DATALOADER.SAMPLER_TRAIN", name)).prepare(train=True)
    with pytest.raises(ConfigError, match=f"DATALOADER.SAMPLER_TRAIN.*{name}"):
        task.build_train_loader()
