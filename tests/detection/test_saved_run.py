"""What a checkpoint says of its run, and who opens it."""

import copy
import json
import shutil

import numpy as np
import pytest
import torch
from detectron2.config import CfgNode
from torch import nn

from lambda_det.config import CONFIGS
from lambda_det.detection.config_files import load_file
from lambda_det.detection.prediction import Predictor
from lambda_det.detection.saved_run import open_run, with_network
from lambda_det.detection.task import DetectionTask, recorded_backbone
from lambda_det.errors import ConfigError, WeightsError
from lambda_det.modeling import create_backbone
from lambda_det.weights.provenance import recorded_network, wanted_pixels
from tests.detection.tiny import NARROW, TINY
from tests.export.tiny import lambda_detector_config, scramble
from tests.training.tiny_detector import save_run


@pytest.fixture(scope="module")
def content():
    """Of a checkpoint as a training writes it."""
    cfg = lambda_detector_config()
    cfg.INPUT.FORMAT, cfg.MODEL.LAMBDA_RESNET.KEY_NORM = "RGB", "l2"
    task = DetectionTask(cfg)
    torch.manual_seed(0)
    model = scramble(task.build_model())
    return {"model": model.state_dict(), "iteration": 99, **task.checkpoint_content({})}


@pytest.mark.parametrize(
    ("results", "raw", "averaged"),
    [
        ({}, None, None),
        ({"bbox": {"AP": 3.0, "best_score": 0.25}, "segm": {"AP": 0.0}}, 0.25, None),
        (
            {"bbox": {"AP50": 10, "best_score": 0.25}, "segm": {"AP50": 8.1, "best_score": 0.5}},
            *(0.5, None),
        ),
        (
            {"bbox": {"AP50": 90, "best_score": 0.25}, "segm": {"AP50": 72, "best_score": 0.5}},
            *(0.25, None),
        ),
        ({"bbox_EMA": {"best_score": 0.125}, "bbox": {"best_score": 0.25}}, 0.25, 0.125),
        ({"a": {"bbox": {"best_score": 0.25}}, "b": {"bbox": {"best_score": 0.5}}}, 0.25, None),
    ],
)
def test_a_checkpoint_records_the_best_score_of_its_evaluation(
    content, results, raw, averaged, tmp_path
):
    """Of masks once they are learnt, on the first test set, of all of its images."""
    more = DetectionTask(lambda_detector_config()).checkpoint_content(results)
    torch.save({**content, **more, "ema": {"model": content["model"]}}, tmp_path / "model.pth")
    for is_raw, best in ((True, raw), (False, averaged)):
        run = open_run(tmp_path / "model.pth", raw=is_raw)
        assert run.best_score == run.about()["best_score"] == best


@pytest.fixture
def file(content, tmp_path):
    torch.save(content, tmp_path / "model_final.pth")
    return tmp_path / "model_final.pth"


def test_a_checkpoint_alone_is_enough(content, file):
    """In a folder with nothing else in it."""
    run = open_run(file)
    assert run.origin == (str(file), 100, False)
    assert run.config.MODEL.LAMBDA_RESNET.KEY_NORM == "l2" and run.components.pixels.format == "RGB"
    network, options = recorded_network(content)
    assert (network, options["key_norm"]) == ("resnet14_slim_lambda_c5", "l2")
    assert wanted_pixels(content) == run.components.pixels
    about = run.about()
    values = [about[key] for key in ("min_size_test", "max_size_test", "input_format", "step")]
    assert values == [64, 96, "RGB", 100]
    json.dumps({**about, **content["run"]})
    predictor = Predictor(file, score_threshold=0.0)
    assert len(predictor(np.zeros((48, 64, 3), np.uint8))) > 0
    assert predictor.origin == run.origin


def test_given_keys_count(file):
    run = open_run(file, opts=["INPUT.MIN_SIZE_TEST", "80", "TEST.DETECTIONS_PER_IMAGE", "2"])
    assert run.about()["min_size_test"] == 80
    assert run.detector().roi_heads.box_predictor.test_topk_per_image == 2


def test_a_checkpoint_of_detectron2_is_described_by_what_is_beside_it(tmp_path):
    _, file = save_run(tmp_path / "run")
    assert open_run(file).config.MODEL.ROI_HEADS.NUM_CLASSES == 3
    assert open_run(tmp_path / "run").origin.file == str(file)
    alone = shutil.copy(file, tmp_path / "alone.pth")
    with pytest.raises(WeightsError, match=r"alone\.pth.*config\.yaml"):
        open_run(alone)


YAML = """
MODEL:
  BACKBONE: {{NAME: {name}, FREEZE_AT: 2}}
  FPN: {{IN_FEATURES: [res4, res5]}}
  LAMBDA_RESNET: {{NAME: lambda_resnet26_slim, STOCHASTIC_DEPTH: 0.2, SCOPE: 3}}
  RESNETS: {resnets}
  PIXEL_MEAN: [1.0, 2.0, 3.5]
"""


@pytest.mark.parametrize(
    ("name", "resnets", "options"),
    [
        ("build_lambda_resnet_fpn_backbone", "{DEPTH: 50}", {}),
        ("build_lambda_resnet_backbone", "{RES5_DILATION: 2}", {"dilation": {"res5": 2}}),
        ("build_resnet_backbone", "{DEPTH: 50}", None),
    ],
)
def test_the_backbone_of_detectron2_s_checkpoint(name, resnets, options, tmp_path):
    (tmp_path / "config.yaml").write_text(YAML.format(name=name, resnets=resnets))
    content = with_network({"model": {}}, str(tmp_path / "model.pth"))
    network, found = recorded_network(content)
    if options is None:
        assert (network, found) == (None, {})
        return
    assert network == "lambda_resnet26_slim"
    assert found == {"scope": 3, **options}
    assert wanted_pixels(content).mean == [1.0, 2.0, 3.5]


def test_options_that_no_file_can_hold_are_not_recorded():
    backbone = create_backbone("lambda_resnet26_slim", scope=3, norm=nn.BatchNorm2d)
    assert recorded_backbone(backbone) == {}


@pytest.mark.slow
def test_the_checkpoint_of_a_lazyconfig_holds_no_program(tmp_path):
    opts = f"{TINY[1]} {NARROW[1]}".split()
    task = DetectionTask(load_file(CONFIGS / "mask_rcnn_lambdaresnet50.py", opts))
    content = {"model": task.build_model().state_dict(), **task.checkpoint_content({})}
    assert content["run"]["config"] is None
    assert recorded_network(content)[0] == "lambda_resnet26_slim"
    assert wanted_pixels(content) == task.pixels
    torch.save(content, tmp_path / "model_final.pth")
    with pytest.raises(WeightsError, match=r"config\.yaml"):
        open_run(tmp_path / "model_final.pth")
    (tmp_path / "config.yaml").write_text(task.dump())
    run = open_run(tmp_path / "model_final.pth", opts=["train.test_precision=bfloat16"])
    assert run.config.train.test_precision == "bfloat16" and run.detector() is not None


# What is changed in a checkpoint, keys that are given, and what is named
REFUSED = {
    "a classifier": (lambda c: {**c, "recipe": {}}, [], "classifier"),
    "weights as a key": (lambda c: c, ["MODEL.WEIGHTS", "x.pth"], "name the checkpoint"),
    "no YAML": (lambda c: with_text(c, "a: ["), [], r"model\.pth"),
    "no mapping": (lambda c: with_text(c, "- 1"), [], r"model\.pth"),
    "a program": (
        lambda c: with_text(c, "a: !!python/object/apply:os.system ['exit 1']"),
        [],
        r"model\.pth",
    ),
    "a LazyConfig": (lambda c: with_text(c, "model: {_target_: os.system}"), [], "model"),
    "an unknown key": (lambda c: with_text(c, "MODEL: {NOTHING: 1}"), [], "MODEL.NOTHING"),
    "another model": (lambda c: {**c, "model": {}}, [], r"model\.pth does not match"),
}


def with_text(content, text):
    return {**content, "run": {**content["run"], "config": text}}


@pytest.mark.parametrize("row", REFUSED)
def test_what_cannot_be_opened(content, row, tmp_path):
    change, opts, words = REFUSED[row]
    torch.save(change(content), tmp_path / "model.pth")
    with pytest.raises((ConfigError, WeightsError), match=words):
        open_run(tmp_path / "model.pth", opts=opts).detector()


def test_a_configuration_names_its_weights(file, content):
    cfg = CfgNode.load_cfg(content["run"]["config"])
    with pytest.raises(WeightsError, match=r"MODEL\.WEIGHTS"):
        open_run(cfg)
    cfg.MODEL.WEIGHTS = str(file)
    before = copy.deepcopy(cfg)
    assert open_run(cfg).detector() is not None and cfg == before
