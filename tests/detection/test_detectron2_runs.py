"""Runs of Detectron2 alone, without a key or module of ours, are predicted and exported."""

import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
from detectron2.config import get_cfg
from detectron2.engine import DefaultPredictor

from lambda_det.cli import main
from lambda_det.detection.prediction import Predictor
from tests.export.unrecorded import record_nothing
from tests.shapes import make_shapes

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

# What each has beside the common part, as in Detectron2's model zoo
DETECTORS = {
    "mask_rcnn": "",
    "cascade": "MODEL: {ROI_HEADS: {NAME: CascadeROIHeads},"
    " ROI_BOX_HEAD: {CLS_AGNOSTIC_BBOX_REG: True}}",
    "retinanet": "MODEL: {META_ARCHITECTURE: RetinaNet, MASK_ON: False,"
    " BACKBONE: {NAME: build_retinanet_resnet_fpn_backbone},"
    " RESNETS: {OUT_FEATURES: [res3, res4, res5]}, FPN: {IN_FEATURES: [res3, res4, res5]},"
    " ANCHOR_GENERATOR: {SIZES: [[16], [24], [32], [48], [64]]},"
    " RETINANET: {NUM_CLASSES: 3, NUM_CONVS: 1, SCORE_THRESH_TEST: 0.0}}",
    "c4": "MODEL: {BACKBONE: {NAME: build_resnet_backbone}, RESNETS: {OUT_FEATURES: [res4]},"
    " ANCHOR_GENERATOR: {SIZES: [[16, 32]]}, RPN: {IN_FEATURES: [res4]},"
    " ROI_HEADS: {NAME: Res5ROIHeads, IN_FEATURES: [res4]},"
    " ROI_MASK_HEAD: {NUM_CONV: 0}}",
    "dc5": "MODEL: {BACKBONE: {NAME: build_resnet_backbone},"
    " RESNETS: {OUT_FEATURES: [res5], RES5_DILATION: 2},"
    " ANCHOR_GENERATOR: {SIZES: [[16, 32]]}, RPN: {IN_FEATURES: [res5]},"
    " ROI_HEADS: {IN_FEATURES: [res5]}}",
}
COMMON = """
VERSION: 2
MODEL:
  DEVICE: cpu
  WEIGHTS: ""
  MASK_ON: True
  BACKBONE: {NAME: build_resnet_fpn_backbone, FREEZE_AT: 0}
  PIXEL_STD: [57.375, 57.12, 58.395]
  RESNETS: {NORM: BN, STEM_OUT_CHANNELS: 8, RES2_OUT_CHANNELS: 16, WIDTH_PER_GROUP: 4,
    OUT_FEATURES: [res2, res3, res4, res5]}
  FPN: {IN_FEATURES: [res2, res3, res4, res5], OUT_CHANNELS: 16}
  ANCHOR_GENERATOR: {SIZES: [[16], [24], [32], [48], [64]]}
  RPN: {IN_FEATURES: [p2, p3, p4, p5, p6], PRE_NMS_TOPK_TEST: 50, POST_NMS_TOPK_TEST: 20}
  ROI_HEADS: {NAME: StandardROIHeads, NUM_CLASSES: 3, IN_FEATURES: [p2, p3, p4, p5],
    SCORE_THRESH_TEST: 0.0}
  ROI_BOX_HEAD: {NAME: FastRCNNConvFCHead, NUM_FC: 1, FC_DIM: 16, POOLER_RESOLUTION: 7}
  ROI_MASK_HEAD: {NAME: MaskRCNNConvUpsampleHead, NUM_CONV: 1, CONV_DIM: 16}
DATASETS: {TRAIN: [mine], TEST: []}
DATALOADER: {NUM_WORKERS: 0}
INPUT: {MIN_SIZE_TRAIN: [64], MIN_SIZE_TEST: 64, MAX_SIZE_TEST: 128}
SOLVER: {IMS_PER_BATCH: 2, MAX_ITER: 2}
"""
TRAINING = """
import sys
from pathlib import Path
from detectron2.config import get_cfg
from detectron2.data.datasets import register_coco_instances
from detectron2.engine import DefaultTrainer
from detectron2.engine.defaults import default_setup

register_coco_instances("mine", {}, "shapes/annotations/instances_train.json", "shapes/train")
for name in sys.argv[1:]:
    cfg = get_cfg()
    cfg.merge_from_file(f"{name}.yaml")
    cfg.OUTPUT_DIR = name
    Path(name).mkdir()
    trainer = DefaultTrainer(cfg)
    trainer.train()
    Path(name, "config.yaml").write_text(cfg.dump())
assert "lambda_det" not in sys.modules
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of each detector, trained in a process without lambda_det."""
    folder = tmp_path_factory.mktemp("detectron2")
    make_shapes(folder, num_train=2, num_val=1, size=64)
    for name, more in DETECTORS.items():
        (folder / "common.yaml").write_text(COMMON)
        (folder / f"{name}.yaml").write_text(f"_BASE_: common.yaml\n{more}\n")
    words = [sys.executable, "-c", TRAINING, *DETECTORS]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


@pytest.mark.parametrize("name", DETECTORS)
def test_it_is_predicted_and_exported(folder, name, monkeypatch, capsys):
    """As Detectron2's own predictor does; a graph of each is recorded in tests/export."""
    image = cv2.imread(str(next(Path(folder, "shapes", "val").iterdir())))
    cfg = get_cfg()
    cfg.merge_from_file(str(folder / name / "config.yaml"))
    cfg.MODEL.WEIGHTS = str(folder / name / "model_final.pth")
    theirs = DefaultPredictor(cfg)(image)["instances"]
    ours = Predictor(folder / name, score_threshold=0.0)(image)
    assert len(ours) == len(theirs) > 0
    np.testing.assert_allclose(ours.scores, theirs.scores.numpy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(ours.boxes, theirs.pred_boxes.tensor.numpy(), rtol=1e-3, atol=1e-2)
    record_nothing(monkeypatch)
    monkeypatch.chdir(folder)
    assert main(["export", name, f"{name}.onnx", "--images", "shapes/val/000000.png"]) == 0
    assert "verified" in capsys.readouterr().out
