"""try_heads.py: a head is trained by the ordinary command and judged by its metrics."""

from __future__ import annotations

import argparse
import dataclasses

import pytest

from lambda_det.detection import load_config
from lambda_det.detection.data import make_panoptic_shapes, make_shapes
from tests.tool import load_tool

tool = load_tool("try_heads", "tests/detection/heads")

SMALL = ["INPUT.MIN_SIZE_TRAIN", "(64,)", "INPUT.MIN_SIZE_TEST", "64"]


@pytest.fixture
def shapes(tmp_path, monkeypatch):
    make_shapes(tmp_path, num_train=4, num_val=2, size=64)
    make_panoptic_shapes(tmp_path, num_train=4, num_val=2, size=64)
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path))
    return tmp_path


@pytest.mark.slow
def test_head_that_has_not_learned_in_one_step(shapes, capsys):
    flags = ["--heads", "deeplab", "--steps", "1", "--output", str(shapes / "out")]
    assert tool.main([*flags, "--opts", *SMALL]) == 1
    captured = capsys.readouterr()
    assert captured.out.split()[:3] == ["deeplab", "1", "steps"]
    assert "sem_seg/mIoU" in captured.out
    assert captured.err.startswith("error: deeplab's sem_seg/mIoU") and "50" in captured.err
    assert tool.main(flags) == 2  # nothing is overwritten
    assert str(shapes / "out") in capsys.readouterr().err


@pytest.mark.slow
def test_training_that_fails(shapes, capsys):
    flags = ["--heads", "faster_rcnn", "--output", str(shapes / "out"), "--opts"]
    assert tool.main([*flags, "MODEL.LAMBDA_RESNET.SCOPE", "8"]) == 2
    message = capsys.readouterr().err
    assert "status 2" in message and "odd" in message and message.count("\n") == 1


@pytest.mark.parametrize("figure, status", [(19.9, 1), (20.0, 0), (float("nan"), 1)])
def test_metric_decides(shapes, monkeypatch, capsys, figure, status):
    head = dataclasses.replace(tool.HEADS["faster_rcnn"], reaches={"bbox/AP": 20.0})
    monkeypatch.setitem(tool.HEADS, "faster_rcnn", head)
    monkeypatch.setattr(tool, "train", lambda *args: {"bbox/AP": figure})
    flags = ["--heads", "faster_rcnn", "--output", str(shapes / "out")]
    assert tool.main(flags) == status
    assert ("at least 20" in capsys.readouterr().err) is bool(status)


@pytest.mark.parametrize("name", tool.HEADS)
def test_quick_sizes_fit_the_shipped_file(name):
    head = tool.HEADS[name]
    file = str(tool.CONFIGS / f"{head.config}.yaml")
    cfg = load_config(argparse.Namespace(config_file=file, opts=head.opts()))
    assert cfg.MODEL.LAMBDA_RESNET.NAME == "lambda_resnet26" and not cfg.INPUT.LSJ.ENABLED
    assert (*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST) == (f"{head.data}_train", f"{head.data}_val")


def test_all_shipped_heads_are_in_the_table():
    others = {path.stem for path in tool.CONFIGS.glob("*_lambdaresnet50.yaml")}
    assert {head.config for head in tool.HEADS.values()} == others - {"mask_rcnn_lambdaresnet50"}


def test_help_answers(capsys):
    with pytest.raises(SystemExit, match="0"):
        tool.main(["--help"])
    assert "keypoint_rcnn" in capsys.readouterr().out
