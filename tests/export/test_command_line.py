"""``lambda-det export``: one line from a checkpoint to a file that was compared."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lambda_det.export import command_line as tool
from lambda_det.export import session
from lambda_det.modeling import create_backbone
from tests.export.conftest import needs_any_size
from tests.export.tiny import scramble

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
    about = json.loads((tmp_path / "b.ts.json").read_text())
    assert path.exists() and (about["weights"], about["averaged"]) == (weights, False)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".ts", pytest.param(".pt2", marks=needs_any_size)])
def test_the_backbone_of_a_run_at_the_default_sizes(run, suffix, tmp_path, capsys):
    path = tmp_path / f"b{suffix}"
    command = [str(path), "--model", str(run.folder), "--backbone-only"]
    assert tool.main(command) == 0
    assert "  p6: " in capsys.readouterr().out


def test_nothing_detected_is_said():
    nothing = session.Comparison((3, 64, 96), {"scores": 0.0}, detections=0)
    said = tool.describe(session.Report(Path("d.ts"), 1.0, 9, [nothing]))
    assert "note: nothing was detected" in said and "verified: d.ts" in said


def test_an_ap_that_differs_says_what_would_take_it():
    compared = [session.Comparison((3, 64, 96), {"scores": 0.0}, detections=1)]
    for passed in (False, True):
        report = session.Report(
            Path("d.ts"), 1.0, 9, compared, proof=SimpleNamespace(passed=passed)
        )
        assert ("--apart" in tool.describe(report)) != passed


def test_published_weights_by_their_url(tmp_path, capsys):
    named = ["--model", "lambda_resnet26_slim", "--weights", "lambda://lambda_resnet26_slim"]
    assert tool.main([str(tmp_path / "b.ts"), *named, "--sizes", "64x64"]) == 0
    assert "lambda://lambda_resnet26_slim" in capsys.readouterr().out


def test_a_backbone_has_the_options_that_its_file_records(tmp_path, capsys):
    options = {"scope": 3, "query_softmax": True}
    backbone = scramble(create_backbone("lambda_resnet26_slim", **options))
    recipe = {"model": "lambda_resnet26_slim", "options": options}  # as a classifier's checkpoint
    file = str(tmp_path / "backbone.pth")
    torch.save({"model": backbone.state_dict(), "recipe": recipe}, file)
    named = ["--model", "lambda_resnet26_slim", "--weights", file, "--sizes", "64x64"]
    assert tool.main([str(tmp_path / "b.ts"), *named]) == 0
    exported, x = torch.jit.load(str(tmp_path / "b.ts")), torch.rand(1, 3, 64, 64)
    torch.testing.assert_close(exported(x)["res5"], backbone.eval()(x)["res5"])


def test_file_that_computes_something_else(weights, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("lambda_det.export.session.TOLERANCE", -1.0)
    named = ["--model", "mobilenet_v2_lambda", "--weights", weights, "--sizes", "64x64"]
    assert tool.main([str(tmp_path / "b.ts"), *named]) == 1
    assert "FAILED" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


BACKBONE, DETECTOR = "b.ts --weights {w} --model ", "d.onnx --config {run}/config.yaml "
REFUSED = {
    BACKBONE + "mobilenet": "'mobilenet'",
    BACKBONE + "mobilenet_v2 --images no.jpg": "no.jpg",
    BACKBONE + "x --backbone-only": "--backbone-only",
    BACKBONE + "x --triton here": "--triton",
    BACKBONE + "x --batch 2": "whole detectors",
    BACKBONE + "x --masks pasted": "whole detectors",
    "b.ts --model lambda_resnet26_slim --weights no.pth": "no.pth",
    "b.ts --model x": "--weights",
    "b.ts --config-file no.yaml": "no.yaml",
    "b.ts": "--config",
    "b.ts --config {run}/config.yaml --backbone-only --sizes 64x96,64x97": "64x97",
    DETECTOR + "--sizes 64": "no size such as",
    DETECTOR + "--fixed 64": "no size such as",
    DETECTOR + "--batch 0": "neither a number from 1 nor 'any'",
    DETECTOR + "--batch 2 --backbone-only": "whole detectors",
    DETECTOR + "--fixed 64x70": "multiples of 32",
    DETECTOR + "--fixed 64x64 --sizes 64x96": "no other ones",
    DETECTOR.replace("onnx", "ts") + "--fixed 64x64": "only ONNX",
    DETECTOR.replace("onnx", "pt2") + "--outside resize": "only ONNX",
    DETECTOR.replace("onnx", "ts") + "--masks pasted": "only ONNX",
    DETECTOR + "--outside resize,mean": "'mean' cannot be outside; resize, normalise, nms can",
    DETECTOR + "--outside nms": "outside of a detector that has them",
}


def _refused(typed: str):
    old_torch_refuses_it_first = typed.startswith(DETECTOR + "--fixed 64x")
    return pytest.param(typed, marks=needs_any_size if old_torch_refuses_it_first else ())


@pytest.mark.parametrize("typed", [*map(_refused, REFUSED)])
def test_what_cannot_be_is_refused_first(weights, run, typed, tmp_path, monkeypatch, capsys):
    pytest.importorskip("onnxruntime")
    monkeypatch.chdir(tmp_path)
    try:
        assert tool.main(typed.format(w=weights, run=run.folder).split()) == 2
    except SystemExit as stopped:
        assert stopped.code == 2
    message = capsys.readouterr().err
    assert "error: " in message and REFUSED[typed] in message and not list(tmp_path.iterdir())
