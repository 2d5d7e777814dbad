"""``lambda-det export``: one line from a checkpoint to a file that was compared."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from lambda_det.export import command_line as tool
from lambda_det.modeling import create_backbone
from tests.export.tiny import scramble
from tests.training.tiny_detector import save_run

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "backbone.pth"
    torch.save({"model": scramble(create_backbone("mobilenet_v2_lambda")).state_dict()}, path)
    return str(path)


def test_backbone_by_name(weights, tmp_path, capsys):
    path = tmp_path / "b.ts"
    named = ["--model", "mobilenet_v2_lambda", "--weights", weights, "--sizes", "64x64,33x70"]
    assert tool.main([str(path), *named]) == 0
    out = capsys.readouterr().out
    assert f"verified: {path}" in out and "2x3x33x70: error" in out and "  res5: " in out
    assert path.exists() and (tmp_path / "b.ts.json").exists()
    assert tool.main([str(path), *named]) == 2
    assert "--overwrite" in capsys.readouterr().err


@pytest.mark.slow
def test_detector_and_its_backbone(tmp_path, capsys):
    config, _ = save_run(tmp_path / "run")
    whole, part = ["--sizes", "64x96"], ["--backbone-only"]
    for name, extra in (("d.ts", whole), ("b.ts", part)):
        path = str(tmp_path / name)
        arguments = [path, "--config-file", str(config), *extra]
        assert tool.main([*arguments, "MODEL.ROI_HEADS.SCORE_THRESH_TEST", "1.0"]) == 0
        out = capsys.readouterr().out
        assert ("note: nothing was detected" in out) == (extra == whole)
        assert (tmp_path / f"{name}.json").exists()
    odd = [str(tmp_path / "odd.ts"), "--config-file", str(config), *part, "--sizes", "64x96,64x97"]
    assert tool.main(odd) == 2 and "64x97" in capsys.readouterr().err


def test_file_that_computes_something_else(weights, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("lambda_det.export.session.TOLERANCE", -1.0)
    named = ["--model", "mobilenet_v2_lambda", "--weights", weights, "--sizes", "64x64"]
    assert tool.main([str(tmp_path / "b.ts"), *named]) == 1
    assert "FAILED" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["b.txt", "--model", "mobilenet_v2_lambda", "--weights", "{w}"], "b.txt"),
        (["b.ts", "--model", "mobilenet", "--weights", "{w}"], "'mobilenet'"),
        (["b.ts", "--model", "lambda_resnet26_slim", "--weights", "no.pth"], "no.pth"),
        (["b.ts", "--config-file", "no.yaml"], "no.yaml"),
        (
            ["b.ts", "--model", "mobilenet_v2", "--weights", "{w}", "--images", "no.jpg"],
            "no.jpg",
        ),
        (
            ["b.ts", "--model", "mobilenet_v2", "--weights", "{w}", "--images", "{deep}"],
            "8 bits",
        ),
    ],
)
def test_refusals(weights, arguments, named, tmp_path, tmp_path_factory, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    deep = tmp_path_factory.mktemp("images") / "deep.png"
    Image.fromarray(np.full((8, 8), 3000, np.uint16)).save(deep)
    assert tool.main([a.format(w=weights, deep=deep) for a in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and named in captured.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments",
    [["b.ts"], ["b.ts", "--model", "x"], ["b.ts", "--config-file", "c", "--sizes", "64"]],
)
def test_wrong_command_line(arguments):
    with pytest.raises(SystemExit, match="2"):
        tool.main(arguments)
