"""Every key of Detectron2's is read by a part of a run.

A key that is only read beside another has that one in its group.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from detectron2.config import CfgNode, get_cfg
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets import register_coco_instances

from lambda_det.config import CONFIGS, leaves
from lambda_det.detection import DetectionTask
from lambda_det.detection.config_files import load_file
from lambda_det.errors import ConfigError
from tests.detection.heads.tiny import HEADS
from tests.detection.tiny import on_meta

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
    **{
        name: (HEADS[name].config.removesuffix(".yaml"), "")
        for name in ("retinanet", "cascade_mask_rcnn", "keypoint_rcnn", "panoptic_fpn")
    },
}
# That Detectron2 itself reads no more
UNREAD = {"VERSION", "GLOBAL.HACK", "MODEL.PANOPTIC_FPN.COMBINE.ENABLED"}


class Watched(CfgNode):
    """A configuration that notes which of its keys are read."""

    seen: ClassVar[set[str]] = set()

    @classmethod
    def of(cls, node: CfgNode, path: str = "") -> Watched:
        made = cls()
        made.__dict__["path"] = path
        for name, value in node.items():
            is_section = isinstance(value, CfgNode)
            dict.__setitem__(made, name, cls.of(value, f"{path}{name}.") if is_section else value)
        return made

    def __getitem__(self, name: str) -> Any:
        self.seen.add(self.__dict__["path"] + name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401


def _write_proposals(dataset: str) -> None:
    ids = [record["image_id"] for record in DatasetCatalog.get(dataset)]
    boxes = [np.array([[0, 0, 9, 9]], np.float32)] * len(ids)
    logits = [np.ones(1, np.float32)] * len(ids)
    content = {"ids": ids, "boxes": boxes, "objectness_logits": logits, "bbox_mode": 1}
    Path(f"{dataset}.pkl").write_bytes(pickle.dumps(content))


@pytest.fixture
def groups(shapes, tmp_path, monkeypatch) -> Callable[..., CfgNode]:
    """Make the configuration of a group, with one key set to a value."""
    monkeypatch.chdir(tmp_path)
    # One image without an object, one that is higher than wide
    content = json.loads((shapes / "shapes/annotations/instances_train.json").read_text())
    first, second = content["images"][:2]
    content["annotations"] = [a for a in content["annotations"] if a["image_id"] != first["id"]]
    second["width"] = 32
    Path("gaps.json").write_text(json.dumps(content))
    register_coco_instances("gaps", {}, "gaps.json", str(shapes / "shapes/train"))
    MetadataCatalog.get("gaps").class_image_count = [
        {"id": 1 + i, "image_count": 1 + 3 * i} for i in range(3)
    ]
    _write_proposals("gaps")
    _write_proposals("shapes_val")

    def make(group: str, *setting: str) -> CfgNode:
        file, keys = GROUPS[group]
        opts = HEADS[group].opts() if group in HEADS else (SMALL + keys).split()
        if group == "keypoint_rcnn":
            opts += ["TEST.KEYPOINT_OKS_SIGMAS", "[0.1,0.1,0.1,0.1]"]
        return load_file(CONFIGS / f"{file}.yaml", [*opts, *setting])

    return make


def _use(cfg: CfgNode) -> None:
    """Make all that a run is made of."""
    task = DetectionTask(cfg).prepare(train=True)
    components, name = task.components, cfg.DATASETS.TEST[0]
    model = on_meta(cfg)
    task.build_schedule()
    task.build_optimizer(model)
    task.build_train_loader()
    components.make_test_loader(name)
    components.make_evaluator(name, "inference")
    components.make_test_augmentations()
    if cfg.TEST.AUG.ENABLED:
        components.make_augmented(model)
    task.finish({})


@pytest.mark.slow
def test_every_key_is_read(groups, monkeypatch):
    # a check of its value is no use
    monkeypatch.setattr("lambda_det.detection.components._check_values", lambda cfg: None)
    monkeypatch.setattr("lambda_det.training.schedules.check_solver", lambda solver: None)
    for group in GROUPS:
        _use(Watched.of(groups(group)))
    keys = {key for key, _ in leaves(get_cfg())}
    assert sorted(keys - Watched.seen - UNREAD) == []


def test_results_are_held_against_what_is_expected(groups):
    expected = "[['bbox','AP',38.5,0.2]]"
    task = DetectionTask(groups("mask", "TEST.EXPECTED_RESULTS", expected))
    task.finish({"bbox": {"AP": 38.4}})
    with pytest.raises(SystemExit):
        task.finish({"bbox": {"AP": 38.0}})


@pytest.mark.parametrize("name", ["NoSuchSampler", "WeightedTrainingSampler"])
def test_samplers_that_cannot_be_made_are_refused(name, groups):
    task = DetectionTask(groups("mask", "DATALOADER.SAMPLER_TRAIN", name)).prepare(train=True)
    with pytest.raises(ConfigError, match=f"DATALOADER.SAMPLER_TRAIN.*{name}"):
        task.build_train_loader()
