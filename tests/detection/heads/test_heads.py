"""Every shipped head trains a few steps and is evaluated, by the ordinary entry."""

import json
import math

import cv2
import pytest
import torch
from detectron2.config import CfgNode
from detectron2.utils.events import EventStorage

from lambda_det.config import CONFIGS
from lambda_det.detection import DetectionTask, parser, run
from lambda_det.detection.config_files import load_file
from lambda_det.detection.drawing import draw_predictions
from lambda_det.detection.prediction import Predictor
from lambda_det.errors import ConfigError
from lambda_det.modeling.norm import SyncBatchNorm2d
from lambda_det.training.precision import Precision
from tests.detection.heads.tiny import HEADS

pytestmark = pytest.mark.slow  # trains


def _cfg(name: str, *skipped: str) -> CfgNode:
    """The small configuration without the overrides of keys that end in one of ``skipped``."""
    head = HEADS[name]
    pairs = zip(*[iter(head.opts())] * 2, strict=True)
    opts = [word for pair in pairs if not pair[0].endswith(skipped) for word in pair]
    return load_file(CONFIGS / f"{head.config}.yaml", opts)


def test_all_shipped_heads_are_in_the_table():
    others = {path.stem for path in CONFIGS.glob("*_lambdaresnet50.yaml")}
    assert {head.config for head in HEADS.values()} == others - {"mask_rcnn_lambdaresnet50"}


@pytest.mark.parametrize("name", HEADS)
def test_it_trains_and_is_evaluated(shapes, tmp_path, name):
    head = HEADS[name]
    file = str(CONFIGS / f"{head.config}.yaml")
    run(parser().parse_args(["--config-file", file, *head.opts(), "OUTPUT_DIR", str(tmp_path)]))
    lines = (tmp_path / "metrics.json").read_text().splitlines()
    last = {key: value for line in lines for key, value in json.loads(line).items()}
    assert set(head.losses) <= set(last)
    assert all(math.isfinite(last[key]) for key in (*head.losses, *head.results))
    assert all(0 <= last[key] <= 100 for key in head.results)
    state = torch.load(tmp_path / "model_final.pth", weights_only=True)
    assert all(value.isfinite().all() for value in state["model"].values())


def test_predictions_of_a_panoptic_model_are_drawn_and_semantic_ones_refused(shapes, tmp_path):
    def predictor(name: str) -> Predictor:
        cfg = _cfg(name)
        cfg.MODEL.WEIGHTS = str(tmp_path / "model.pth")
        model = DetectionTask(cfg).build_model()
        torch.save({"model": model.state_dict()}, cfg.MODEL.WEIGHTS)
        return Predictor(cfg, score_threshold=0.0)

    image = cv2.imread(str(shapes / "shapes_panoptic/val/000000.png"))
    instances = predictor("panoptic_fpn")(image).instances
    assert draw_predictions(image, instances).shape == image.shape and instances.has("pred_masks")
    with pytest.raises(ConfigError, match="finds no instances"):
        predictor("deeplab")


@pytest.mark.parametrize("name", HEADS)
def test_its_norms_take_bfloat16_and_images_without_objects(shapes, name):
    """One step as shipped: synchronised norms, mixed precision, and a batch that holds nothing."""
    cfg = _cfg(name, "NORM", "AMP.ENABLED")
    assert cfg.SOLVER.AMP.ENABLED and cfg.MODEL.LAMBDA_RESNET.NORM == "SyncBN"
    cfg.SOLVER.AMP.DTYPE = "bfloat16"  # whatever this processor has
    task = DetectionTask(cfg)
    model = task.build_model().train()
    norms = [m for m in model.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]
    assert {type(norm) for norm in norms} <= {SyncBatchNorm2d}
    batch = next(iter(task.build_train_loader()))
    empty = [{**image, "instances": image["instances"][:0]} for image in batch]
    with EventStorage(0):
        for images in (empty[:1] + batch[1:], empty):
            with Precision.of(task.settings).autocast():
                losses = model(images)
            assert all(loss.isfinite() for loss in losses.values())
            sum(losses.values()).backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), parameter_name
