"""The configurations: they load, hold the paper's figures, and describe detectors."""

import argparse
from pathlib import Path

import pytest
from detectron2.config import CfgNode

import lambda_det
from lambda_det.detection import load_config
from tests.detection.tiny import on_meta

CONFIGS = Path(__file__).parents[1] / "configs"
PAPER = {
    "mask_rcnn_lambdaresnet50": "lambda_resnet50",
    "mask_rcnn_lambdaresnet101": "lambda_resnet101",
    "mask_rcnn_lambdaresnet152": "lambda_resnet152",
    "mask_rcnn_resnetrs101": "resnet_rs101",
    "mask_rcnn_resnetrs101_se": "resnet_rs101_se",
    "mask_rcnn_resnetrs152": "resnet_rs152",
    "mask_rcnn_resnetrs152_se": "resnet_rs152_se",
}
# Of heads with the losses of Mask R-CNN. By those of the others tests/detection/heads tells them
TENSORS = {
    "mask_rcnn_c4_lambdaresnet50.yaml": "roi_heads.res5.2.conv1.weight",
    "mask_rcnn_dc5_lambdaresnet50.yaml": "backbone.res5.2.conv1.weight",
}
ALL = sorted(
    str(path.relative_to(CONFIGS))
    for folder in (".", "quick")  # the others hold recipes of classifiers, as do cifar10_*
    for path in (CONFIGS / folder).glob("*.yaml")
    if not path.name.startswith("cifar10")
)
# Appendix F.3 of the paper, and what training from scratch needs besides
FIGURES = {
    "SOLVER.IMS_PER_BATCH": 256,
    "SOLVER.BASE_LR": 0.32,
    "SOLVER.MAX_ITER": 130000,
    "SOLVER.GAMMA": 0.1,
    "SOLVER.WARMUP_ITERS": 1000,
    "SOLVER.WARMUP_FACTOR": 0.0,
    "SOLVER.WARMUP_METHOD": "linear",
    "SOLVER.WEIGHT_DECAY": 4e-5,
    "SOLVER.MOMENTUM": 0.9,
    "INPUT.LSJ.ENABLED": True,
    "INPUT.LSJ.MIN_SCALE": 0.1,
    "INPUT.LSJ.MAX_SCALE": 2.0,
    "INPUT.LSJ.SIZE": 1024,
    "INPUT.MIN_SIZE_TEST": 1024,
    "INPUT.MAX_SIZE_TEST": 1024,
    "MODEL.WEIGHTS": "",
    "MODEL.MASK_ON": True,
    "MODEL.BACKBONE.FREEZE_AT": 0,
    "MODEL.RESNETS.STRIDE_IN_1X1": False,
    "MODEL.LAMBDA_RESNET.NORM": "SyncBN",
    "MODEL.FPN.NORM": "SyncBN",
    "MODEL.ROI_BOX_HEAD.NUM_CONV": 4,
    "MODEL.ROI_BOX_HEAD.NUM_FC": 1,
    "MODEL.RPN.CONV_DIMS": [-1, -1],
}


def _load(name: str) -> CfgNode:
    return load_config(argparse.Namespace(config_file=str(CONFIGS / name), opts=[]))


def _value(cfg: CfgNode, key: str):
    for name in key.split("."):
        cfg = cfg[name]
    return cfg


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_it_loads_and_its_detector_is_built(name):
    cfg = _load(name)
    assert cfg.MODEL.LAMBDA_RESNET.NAME in lambda_det.list_models()
    model = on_meta(cfg)
    assert all(parameter.is_meta and parameter.requires_grad for parameter in model.parameters())
    names = set(model.state_dict())
    lambdas = {n for n in names if n.startswith("backbone.") and "position" in n}
    assert bool(lambdas) == ("lambda" in cfg.MODEL.LAMBDA_RESNET.NAME)
    if name in TENSORS:
        assert TENSORS[name] in names


NETWORKS = PAPER | {
    path.stem: "lambda_resnet50" for path in sorted(CONFIGS.glob("*_lambdaresnet50.yaml"))
}


@pytest.mark.parametrize("name", NETWORKS)
def test_the_paper_s_figures(name):
    cfg, figures = _load(f"{name}.yaml"), dict(FIGURES)
    if name.startswith(("retinanet", "deeplabv3plus")):
        figures["SOLVER.BASE_LR"] = 0.16
    if name not in PAPER:
        del figures["MODEL.MASK_ON"], figures["MODEL.RPN.CONV_DIMS"]
        assert len(cfg.MODEL.RPN.CONV_DIMS) == 2
    assert {key: _value(cfg, key) for key in figures} == figures
    assert NETWORKS[name] == cfg.MODEL.LAMBDA_RESNET.NAME
    assert [step / cfg.SOLVER.MAX_ITER for step in cfg.SOLVER.STEPS] == [0.9, 0.95, 0.975]
    assert all(50 < std < 65 for std in cfg.MODEL.PIXEL_STD)  # images reach the network divided
    assert Path(cfg.OUTPUT_DIR).name == name
