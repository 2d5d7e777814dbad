from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from detectron2.config import LazyConfig
from matplotlib.layout_engine import ConstrainedLayoutEngine

from lambda_det import create_backbone
from lambda_det.detection.lazy import dump_lazy
from lambda_det.export.backbone import extract_backbone
from lambda_det.weights.backbone_file import save_backbone
from lambda_paper import figures
from tests import forked
from tests.export.toy import classifier_checkpoint
from tests.malicious import write_malicious
from tests.tool import load_tool
from tests.training.tiny_detector import CONFIG

pytestmark = pytest.mark.slow  # trains

tool = load_tool("visualize", "projects/paper")

ROOT = Path(__file__).parents[3]
LAZY = """
import lambda_det

base = lambda_det.get_config("mask_rcnn_lambdaresnet50.py")
model, dataloader, optimizer = base.model, base.dataloader, base.optimizer
lr_multiplier, train = base.lr_multiplier, base.train
del base

model.backbone.bottom_up.name = "resnet14_slim_lambda_c5"
model.backbone.bottom_up.scope = 7
model.backbone.bottom_up.out_features = ["res4", "res5"]
dataloader.train.num_workers = 0
train.device = "cpu"
train.seed = 1
"""

C4 = """
MODEL:
  BACKBONE: {NAME: build_lambda_resnet_backbone}
  LAMBDA_RESNET: {NAME: resnet14_slim_lambda_c5, SCOPE: 3, OUT_FEATURES: [res4]}
  ROI_HEADS: {NAME: LambdaRes5ROIHeads, IN_FEATURES: [res4], NUM_CLASSES: 2}
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    return path


@pytest.fixture
def photo(tmp_path):
    path = tmp_path / "photo.png"
    cv2.imwrite(str(path), np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8))
    return path


@pytest.fixture(autouse=True)
def unarranged(monkeypatch):
    """Small figures whose parts stand where they are; to arrange them takes most of the drawing."""
    monkeypatch.setattr(ConstrainedLayoutEngine, "execute", lambda *_: None)
    monkeypatch.setattr(figures, "_DPI", 25)


def call(tmp_path, *words):
    return tool.main(["--output", str(tmp_path / "out"), *map(str, words)])


def pictures(tmp_path):
    return sorted(path.name for path in (tmp_path / "out").glob("*.png"))


SLIM = ["--model", "lambda_resnet26_slim", "--draws", 1]


def test_layers_of_a_model_by_name(photo, tmp_path, capsys):
    weights = tmp_path / "backbone.pth"
    torch.save(create_backbone("lambda_resnet26_slim", scope=5).state_dict(), weights)
    words = [*SLIM, "--weights", weights, "--image", photo]
    words += ["--position", 10, 20, "--layer", "res5.0.conv2"]
    words += ["MODEL.LAMBDA_RESNET.SCOPE", 5, "INPUT.MIN_SIZE_TEST", 64]
    # KEY VALUE pairs would be taken for layers
    words.insert(words.index("MODEL.LAMBDA_RESNET.SCOPE"), "--seed")
    words.insert(words.index("MODEL.LAMBDA_RESNET.SCOPE"), 3)
    assert call(tmp_path, *words) == 0
    output = capsys.readouterr().out
    assert str(weights) in output and "res5.0.conv2" in output
    parts = [f"res5.0.conv2.{part}.png" for part in ("context", "embeddings", "reach")]
    assert pictures(tmp_path) == ["receptive_field.png", *parts]


def test_a_network_without_lambda_layers_has_its_receptive_field(config, photo, tmp_path, capsys):
    words = ["--config-file", config, "--image", photo, "--draws", 1]
    assert call(tmp_path, *words) == 0
    output = capsys.readouterr().out
    assert "no lambda layers" in output
    assert pictures(tmp_path) == ["receptive_field.png"]


def test_layers_takes_the_last_checkpoint_of_the_run_unless_fresh(config, photo, tmp_path, capsys):
    (tmp_path / "last_checkpoint").write_text("gone.pth")
    words = ["--config-file", config, "--image", photo, "--draws", 1]
    assert call(tmp_path, *words) == 2
    assert "gone.pth" in capsys.readouterr().err
    (tmp_path / "gone.pth").write_text("no checkpoint")
    assert call(tmp_path, *words) == 2
    assert "gone.pth" in capsys.readouterr().err
    assert call(tmp_path, *words, "--fresh") == 0


def test_a_lazyconfig_and_what_its_run_saves(photo, tmp_path, capsys, monkeypatch):
    """Images of layers come at the size of the configuration's tests."""
    program, saved = tmp_path / "mine.py", tmp_path / "run" / "config.yaml"
    program.write_text(LAZY)
    saved.parent.mkdir()
    saved.write_text(dump_lazy(LazyConfig.load(str(program))))
    sizes = []
    monkeypatch.setattr(
        figures,
        "receptive_fields",
        lambda picture, *_, **__: sizes.append(picture.shape) or np.zeros((8, 8, 3), np.uint8),
    )
    for file in (program, saved):
        words = ["--config-file", file, "--overwrite", "--image", photo, "--draws", 1]
        assert call(tmp_path, *words, "dataloader.image_size=32") == 0
        output = capsys.readouterr().out
        assert "res5.0.conv2" in output
    assert sizes == [(32, 32, 3)] * 2
    words = ["--config-file", program, "--image", photo, "model.backbone.bottom_up.scope=6"]
    assert call(tmp_path, "--overwrite", *words) == 2
    assert "odd" in capsys.readouterr().err


def test_a_backbone_by_name_gets_the_images_that_its_file_says(photo, tmp_path, capsys):
    weights = tmp_path / "backbone.pth"
    content = extract_backbone(classifier_checkpoint(scope=3), fold_input=False)
    save_backbone(content, weights)
    words = [*SLIM, "--weights", weights, "--image", photo]
    words += ["--layer", "res4.1.conv2"]
    keys = ["MODEL.LAMBDA_RESNET.SCOPE", 3, "INPUT.MIN_SIZE_TEST", 64]
    assert call(tmp_path, *words, *keys) == 0
    capsys.readouterr()
    # Said by the user, they must be those of the file
    keys += ["INPUT.FORMAT", "BGR"]
    assert call(tmp_path, "--overwrite", *words, *keys) == 2
    assert "set INPUT.FORMAT RGB (now BGR)" in capsys.readouterr().err


def test_a_last_stage_in_the_heads_is_said_not_to_be_drawn(photo, tmp_path, caplog):
    config = tmp_path / "c4.yaml"
    config.write_text(C4)
    words = ["--config-file", config, "--fresh", "--image", photo, "--draws", 1]
    words += ["MODEL.DEVICE", "cpu", "INPUT.MIN_SIZE_TEST", 64]
    assert call(tmp_path, *words) == 0
    assert "roi_heads.res5, works on regions of interest" in caplog.text
    assert not any(name.startswith("res5") for name in pictures(tmp_path))
    caplog.clear()
    words += ["MODEL.ROI_HEADS.NAME", "StandardROIHeads"]
    assert call(tmp_path, "--overwrite", *words) == 0 and not caplog.text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config-file", "none.yaml", "--image", "a.png"], "none.yaml"),
        (["--model", "lambda_resnet51", "--image", "a.png"], "lambda_resnet50"),
    ],
)
def test_mistakes_end_in_one_sentence(words, message, tmp_path, capsys):
    assert call(tmp_path, *words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error
    assert not (tmp_path / "out").exists()


def test_works_as_a_command_from_another_folder(tmp_path):
    words = [ROOT / "projects" / "paper" / "visualize.py", "--help"]
    done = forked.run(words, tmp_path / "printed", cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == 0 and "--position Y X" in done.stdout


@pytest.mark.parametrize("ending", [".pth", ".pkl"])
def test_a_program_in_a_file_of_weights_does_not_run(tmp_path, capsys, ending):
    photo, mark = tmp_path / "photo.png", tmp_path / "the-program-ran"
    cv2.imwrite(str(photo), np.zeros((64, 64, 3), np.uint8))
    evil = write_malicious(tmp_path / f"evil{ending}", mark)
    words = ["--model", "lambda_resnet26_slim", "--weights", str(evil)]
    words += ["--image", str(photo), "--output", str(tmp_path / "out")]
    assert tool.main(words) == 2
    error = capsys.readouterr().err
    assert str(evil) in error and "refused" in error and not mark.exists()
