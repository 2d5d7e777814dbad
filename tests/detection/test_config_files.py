"""lambda_det.get_config: the shipped configurations by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from detectron2.config import CfgNode, instantiate

import lambda_det
from lambda_det.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"


def test_a_node_is_fresh_each_time():
    node = lambda_det.get_config("common/backbone.py").lambda_resnet
    node.name = "lambda_resnet26_slim"
    node.norm = "BN"
    assert isinstance(instantiate(node), lambda_det.LambdaResNet)
    assert lambda_det.get_config("common/backbone.py").lambda_resnet.name == "lambda_resnet50"


@pytest.mark.parametrize(
    "name", sorted(str(path.relative_to(CONFIGS)) for path in CONFIGS.rglob("*.py"))
)
def test_every_python_file_loads(name):
    assert lambda_det.get_config(name)


def test_yaml_files_come_with_our_keys():
    cfg = lambda_det.get_config("mask_rcnn_lambdaresnet101.yaml")
    assert isinstance(cfg, CfgNode) and cfg.MODEL.LAMBDA_RESNET.NAME == "lambda_resnet101"


@pytest.mark.parametrize("name", sorted(path.name for path in CONFIGS.glob("*.yaml")))
def test_every_detector_s_yaml_loads(name):
    assert f"./output/{Path(name).stem}" == lambda_det.get_config(name).OUTPUT_DIR or "base" in name


def test_recipes_of_classifiers_are_refused():
    with pytest.raises(ConfigError, match=r"base\.yaml"):
        lambda_det.get_config("imagenet/base.yaml")


def test_detectron2_s_own():
    assert "model" in lambda_det.detectron2_config("common/models/retinanet.py")
    assert lambda_det.detectron2_config("COCO-Detection/retinanet_R_50_FPN_1x.yaml").SOLVER


def test_a_misspelt_name():
    with pytest.raises(ConfigError, match=r"mask_rcnn_lambdaresnet50\.py"):
        lambda_det.get_config("mask_rcnn_lambdarsnet50.py")
