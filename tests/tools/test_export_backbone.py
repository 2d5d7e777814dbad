"""tools/export_backbone.py: a file, what is in it, and a status that says whether it holds."""

from __future__ import annotations

import pytest
import torch

from lambda_det.checkpoint import read_backbone
from tests.checkpoint.test_verify import CONFIG
from tests.checkpoint.toy import classifier_checkpoint
from tools import export_backbone as tool


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "model_best.pth"
    torch.save(classifier_checkpoint(scope=3), path)
    return str(path)


@pytest.fixture
def config(tmp_path):
    (tmp_path / "detector.yaml").write_text(CONFIG)
    return str(tmp_path / "detector.yaml")


def test_a_file_that_fits(checkpoint, config, tmp_path, capsys):
    path = str(tmp_path / "b.pth")
    assert tool.main([checkpoint, path, "--verify-config", config]) == 0
    out = capsys.readouterr().out
    content = read_backbone(path)
    count = len(content["model"])
    for words in (
        "lambda_resnet26 (norm BN, scope 3)",
        "averaged (EMA)",
        "held_out top1 2.00, top5 6.00",
        f"{count} of ",
        content["meta"]["sha256"],
        "MODEL.PIXEL_MEAN [103.53, 116.28, 123.675]",
        f"verified in {config}: {count} of {count} tensors",
    ):
        assert words in out


def test_raw_weights_that_are_not_folded(checkpoint, tmp_path, capsys):
    path = str(tmp_path / "b.pth")
    assert tool.main([checkpoint, path, "--weights", "model", "--no-fold"]) == 0
    out = capsys.readouterr().out
    assert "raw" in out and "top1 1.00" in out and "INPUT.FORMAT RGB" in out
    assert "verified in the backbone alone" in out
    assert read_backbone(path)["meta"]["folded"] is False


def test_a_file_that_does_not_fit_the_detector(checkpoint, config, tmp_path, capsys):
    path = tmp_path / "b.pth"
    assert tool.main([checkpoint, str(path), "--no-fold", "--verify-config", config]) == 1
    lines = capsys.readouterr().out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("FAILED"))
    assert "  INPUT.FORMAT is BGR; set it to RGB" in lines[start:]
    assert path.exists()


def test_nothing_is_overwritten(checkpoint, tmp_path, capsys):
    path = tmp_path / "b.pth"
    path.write_text("old")
    assert tool.main([checkpoint, str(path)]) == 2
    assert path.read_text() == "old" and "--overwrite" in capsys.readouterr().err
    assert tool.main([checkpoint, str(path), "--overwrite"]) == 0
    assert tool.main([checkpoint, checkpoint, "--overwrite"]) == 2
    assert "is the checkpoint itself" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing.pth", "b.pth"], "There is no checkpoint file nothing.pth"),
        (["{run}", "b.txt"], "ends in .pth"),
        (["{run}", "b.pth", "--verify-config", "no.yaml"], "There is no config file no.yaml"),
        (["{bare}", "b.pth"], "no checkpoint of a classifier"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(
    checkpoint, tmp_path, monkeypatch, capsys, arguments, words
):
    monkeypatch.chdir(tmp_path)
    torch.save({"model": {"a": torch.zeros(1)}}, "bare.pth")
    arguments = [a.format(run=checkpoint, bare="bare.pth") for a in arguments]
    assert tool.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and words in captured.err
    assert captured.err.count("\n") == 1 and captured.out == ""
    assert not (tmp_path / "b.pth").exists()


def test_the_backbone_of_a_detector(checkpoint, config, tmp_path, capsys):
    model = torch.load(checkpoint, weights_only=True)["model"]
    names = {n.replace("backbone.", "backbone.bottom_up."): t for n, t in model.items()}
    torch.save({"model": names, "trainer": {}}, tmp_path / "detector.pth")
    source = str(tmp_path / "detector.pth")
    assert tool.main([source, str(tmp_path / "a.pth")]) == 1
    out = capsys.readouterr().out
    assert "verified: no" in out and "as in the detector's configuration" in out
    assert tool.main([source, str(tmp_path / "b.pth"), "--verify-config", config]) == 0
