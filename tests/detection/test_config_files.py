"""lambda_det.get_config: the shipped configurations by name."""

import pytest
from detectron2.config import instantiate

import lambda_det
from lambda_det.config import CONFIGS
from lambda_det.errors import ConfigError


def test_a_node_is_fresh_each_time():
    node = lambda_det.get_config("common/backbone.py").lambda_resnet
    node.name = "lambda_resnet26_slim"
    node.norm = "BN"
    assert isinstance(instantiate(node), lambda_det.LambdaResNet)
    assert lambda_det.get_config("common/backbone.py").lambda_resnet.name == "lambda_resnet50"


@pytest.mark.parametrize(
    "path", sorted([*CONFIGS.rglob("*.py"), *CONFIGS.glob("*.yaml")]), ids=lambda path: path.name
)
def test_every_file_of_a_detector_loads(path):
    assert lambda_det.get_config(str(path.relative_to(CONFIGS)))


def test_detectron2_s_own():
    assert "model" in lambda_det.detectron2_config("common/models/retinanet.py")
    assert lambda_det.detectron2_config("COCO-Detection/retinanet_R_50_FPN_1x.yaml").SOLVER


# A misspelt name, and a recipe of a classifier
@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("mask_rcnn_lambdarsnet50.py", r"mask_rcnn_lambdaresnet50\.py"),
        ("imagenet/base.yaml", r"base\.yaml"),
    ],
)
def test_a_file_that_is_no_detector_s(name, named):
    with pytest.raises(ConfigError, match=named):
        lambda_det.get_config(name)
