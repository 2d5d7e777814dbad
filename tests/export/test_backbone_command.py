"""``lambda-det backbone``: the files it writes, what it prints, its exit status."""

from pathlib import Path

import pytest
import torch

from lambda_det.export import backbone_command as tool
from lambda_det.weights.backbone_file import read_backbone
from tests.export.toy import classifier_checkpoint, in_fpn


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "model_best.pth"
    torch.manual_seed(0)  # with some numbers half precision is not enough
    torch.save(classifier_checkpoint(scope=3), path)
    (path.parent / "last_checkpoint").write_text("model_best.pth")
    return str(path)


def test_a_file_that_fits(checkpoint, tmp_path, capsys):
    path = str(tmp_path / "b.pth")
    assert tool.main([checkpoint, path]) == 0
    out = capsys.readouterr().out
    content = read_backbone(path)
    for words in (
        "model: lambda_resnet26_slim\noptions: {'norm': 'BN', 'scope': 3}",
        "weights: ema",
        "'held_out': {'top1': 2.0, 'top5': 6.0}",
        content["meta"]["sha256"],
        "MODEL.PIXEL_MEAN [103.53, 116.28, 123.675]",
        "verified",
    ):
        assert words in out


def test_raw_weights_of_a_folder(checkpoint, tmp_path, capsys):
    """A run's folder is enough: its checkpoint says what it is of."""
    path = str(tmp_path / "new" / "b.safetensors")
    assert tool.main([str(Path(checkpoint).parent), path, "--raw"]) == 0
    out = capsys.readouterr().out
    assert checkpoint in out and "'top1': 1.0," in out and "INPUT.FORMAT BGR" in out
    assert read_backbone(path)["meta"]["weights"] == "model"


def test_a_file_that_computes_something_else(checkpoint, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("lambda_det.export.session.TOLERANCE", -1.0)
    path = tmp_path / "b.pth"
    assert tool.main([checkpoint, str(path)]) == 1
    assert "FAILED" in capsys.readouterr().out and not list(tmp_path.iterdir())
    path.write_text("old")
    assert tool.main([checkpoint, str(path), "--overwrite"]) == 1
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{run}", "b.txt"], ".pth, .safetensors"),
        (["no.pth", "b.pth"], "no.pth"),
        (["empty", "b.pth"], "no training was started"),
        (["{run}", "old.pth"], "--overwrite"),
        (["{run}", "old.pth/b.pth"], "is not a folder"),
        (["{run}", "{run}", "--overwrite"], "model_best.pth"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(
    checkpoint, tmp_path, monkeypatch, capsys, arguments, words
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "old.pth").write_text("old")
    arguments = [a.format(run=checkpoint) for a in arguments]
    assert tool.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and words in captured.err
    assert captured.err.count("\n") == 1 and captured.out == ""
    assert not (tmp_path / "b.pth").exists() and (tmp_path / "old.pth").read_text() == "old"


def test_a_file_that_records_nothing_is_named(tmp_path, capsys):
    source, path = str(tmp_path / "detector.pth"), str(tmp_path / "b.pth")
    torch.save(in_fpn(classifier_checkpoint(ema=False)["model"]), source)
    assert tool.main([source, path]) == 2
    assert "--model" in capsys.readouterr().err
    assert tool.main([source, path, "--model", "resnet51"]) == 2
    assert "resnet51" in capsys.readouterr().err
    assert tool.main([source, path, "--model", "lambda_resnet26_slim"]) == 0
    assert "not recorded" in capsys.readouterr().out
    assert read_backbone(path)["meta"]["options"] == {}
