"""A stranger's head, evaluator and architecture: each one registration, and a configuration."""

import argparse
import sys
from types import SimpleNamespace

import pytest
import torch
from detectron2.config import CfgNode
from detectron2.data import MetadataCatalog
from detectron2.evaluation import DatasetEvaluator
from detectron2.modeling import ROI_HEADS_REGISTRY
from detectron2.modeling.roi_heads import StandardROIHeads
from torch import nn

from lambda_det.detection import DetectionTask, load_config, registry
from lambda_det.detection.data.predictions import Detector, predictions
from lambda_det.detection.evaluation import build_evaluator, check_evaluators
from lambda_det.detection.registry import Architecture, Evaluator, Head, register
from lambda_det.errors import ConfigError, WeightsError
from lambda_det.export.networks import DetectorGraph
from lambda_det.weights.loading import CLASS_LAYERS, load
from tests.shapes import shapes_by_flag
from tests.training.tiny_detector import CONFIG


@pytest.fixture(autouse=True)
def as_before():
    """What is registered here is not known to other tests."""
    tables = (registry.ARCHITECTURES, registry.EVALUATORS, registry.HEADS)
    kept, layers = [dict(table) for table in tables], list(CLASS_LAYERS)
    yield
    for table, before in zip(tables, kept, strict=True):
        table.clear()
        table.update(before)
    CLASS_LAYERS[:] = layers


class CountingROIHeads(StandardROIHeads):
    """Has a layer for the number of objects of each class."""

    def __init__(self, cfg: CfgNode, shapes: dict) -> None:
        super().__init__(cfg, shapes)
        self.count = nn.Linear(2, cfg.MODEL.COUNTER.NUM_CLASSES)


def _add_keys(cfg: CfgNode) -> None:
    cfg.MODEL.COUNTER = CfgNode({"NUM_CLASSES": 80})


@pytest.fixture
def counting(monkeypatch, tmp_path):
    """A configuration with that head, which the module ``counting`` brings."""
    if "CountingROIHeads" not in ROI_HEADS_REGISTRY:
        ROI_HEADS_REGISTRY.register(CountingROIHeads)
    monkeypatch.setitem(sys.modules, "counting", SimpleNamespace(add_keys=_add_keys))
    head = Head(
        names=("Counting",),
        module="counting",
        add_config="add_keys",
        sections=("MODEL.COUNTER",),
        num_classes=("MODEL.COUNTER.NUM_CLASSES",),
        class_layers=r"roi_heads\.count",
        not_exported=(("CountingROIHeads",), "CountingROIHeads counts"),
    )
    register("counting", head)
    shapes = shapes_by_flag(tmp_path, num_train=1, num_val=1, size=64)
    data = {name: shapes[name] for name in ("train_json", "train_images")}
    file = tmp_path / "counting.yaml"
    file.write_text(CONFIG.replace("NAME: StandardROIHeads", "NAME: CountingROIHeads"))
    return argparse.Namespace(config_file=str(file), opts=[], **data)


@pytest.mark.slow
def test_a_head_of_another_project(counting):
    assert "COUNTER" not in load_config(argparse.Namespace(config_file=None, opts=[])).MODEL
    task = DetectionTask(load_config(counting))
    task.register_data()
    assert task.config.MODEL.COUNTER.NUM_CLASSES == 3
    model = task.build_model()
    assert model.roi_heads.count.out_features == 3
    with pytest.raises(ConfigError, match="CountingROIHeads counts"):
        DetectorGraph(model)


@pytest.mark.slow
@pytest.mark.parametrize("is_registered", [True, False])
def test_its_layers_start_afresh_with_other_classes(counting, tmp_path, is_registered):
    cfg = load_config(counting)
    torch.save({"model": DetectionTask(cfg).build_model().state_dict()}, tmp_path / "w.pth")
    cfg.MODEL.COUNTER.NUM_CLASSES = 5
    model = DetectionTask(cfg).build_model()
    if is_registered:
        load(model, tmp_path / "w.pth")
        return
    CLASS_LAYERS.pop()
    with pytest.raises(WeightsError, match=r"roi_heads\.count"):
        load(model, tmp_path / "w.pth")


class Silence(DatasetEvaluator):
    def __init__(self, *made_of) -> None:
        self.made_of = made_of


def test_an_evaluator_and_an_architecture_of_another_project(counting, tmp_path):
    cfg = load_config(counting)
    MetadataCatalog.get("silent").evaluator_type = "silent"
    cfg.DATASETS.TEST, cfg.OUTPUT_DIR = ("silent",), str(tmp_path)
    with pytest.raises(ConfigError, match="evaluator_type 'silent'"):
        check_evaluators(cfg)
    register("silent", Evaluator(make=Silence))
    check_evaluators(cfg)
    [made] = build_evaluator(cfg, "silent")._evaluators
    assert made.made_of == ("silent", ("bbox", "segm"), str(tmp_path / "inference"))

    assert predictions("Stranger") == ("instances",) and not Detector("Stranger").is_known
    register("Stranger", type("OfAProject", (Architecture,), {})(("semantic",)))
    assert predictions("Stranger") == ("semantic",) and Detector("Stranger").is_known
