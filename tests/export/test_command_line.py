"""``lambda-det export``: one line from a checkpoint to a file that was compared."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lambda_det.export import FORMATS, session
from lambda_det.export import command_line as tool
from lambda_det.modeling import create_backbone
from tests.export.conftest import needs_any_size
from tests.export.tiny import scramble
from tests.export.unrecorded import record_nothing

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Of a network that records its name and options, as the checkpoint of a classifier."""
    options = {"scope": 3, "query_softmax": True}
    state = scramble(create_backbone("resnet14_slim_lambda_c5", **options)).state_dict()
    path = tmp_path_factory.mktemp("weights") / "backbone.pth"
    recipe = {"model": "resnet14_slim_lambda_c5", "options": options}
    torch.save({"model": state, "recipe": recipe}, path)
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "is_recorded", [False, pytest.param(True, marks=[pytest.mark.release, needs_any_size])]
)
def test_a_backbone_with_the_options_that_its_file_records(
    weights, is_recorded, tmp_path, capsys, monkeypatch
):
    if not is_recorded:
        record_nothing(monkeypatch)
    path = tmp_path / "b.pt2"
    assert tool.main([weights, str(path), "--sizes", "64x64,33x70"]) == 0
    out = capsys.readouterr().out
    assert f"verified: {path}" in out and "2x3x33x70: error" in out and "  res5: " in out
    about = json.loads((tmp_path / "b.pt2.json").read_text())
    assert (about["weights"], about["averaged"]) == (weights, False)
    options = {"scope": 3, "query_softmax": True}
    original = create_backbone("resnet14_slim_lambda_c5", weights=weights, **options).eval()
    x = torch.rand(1, 3, 64, 96)
    if is_recorded:
        exported = torch.export.load(path).module()(x)["res5"]
    else:
        exported = FORMATS[".pt2"].read(path, ["res5"])(x)["res5"]
    torch.testing.assert_close(exported, original(x)["res5"], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_the_backbone_of_a_run_at_the_default_sizes(run, tmp_path, capsys, monkeypatch):
    record_nothing(monkeypatch)
    assert tool.main([str(run.folder), str(tmp_path / "b.pt2"), "--backbone-only"]) == 0
    assert "  p6: " in capsys.readouterr().out


def test_the_help_has_every_format(monkeypatch, capsys):
    form = dataclasses.replace(FORMATS[".pt2"], name="Mine", suffix=".own")
    monkeypatch.setitem(FORMATS, ".own", form)
    with pytest.raises(SystemExit):
        tool.main(["--help"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [".own", "backbones", "(Mine)"] in lines
    assert [".onnx", "detectors", "and", "backbones"] in [line[:4] for line in lines]


def test_nothing_detected_is_said():
    nothing = session.Comparison((3, 64, 96), {"scores": 0.0}, detections=0)
    said = tool.report_lines(session.ExportReport(Path("d.onnx"), 1.0, 9, [nothing]))
    assert "note: nothing was detected" in said and "verified: d.onnx" in said
    proof = SimpleNamespace(passed=True)  # compared images of the run
    said = tool.report_lines(session.ExportReport(Path("d.onnx"), 1.0, 9, [nothing], proof=proof))
    assert "nothing was detected" not in said


@pytest.mark.parametrize(
    ("error", "passed", "words"),
    [(0.0, True, "verified"), (0.0, False, "more than 0.25"), (9.0, True, "does not compute")],
)
def test_an_ap_that_differs_says_what_would_take_it(error, passed, words):
    """Where the outputs agree, few images may make it, and the graph is not said to be wrong."""
    compared = [session.Comparison((3, 64, 96), {"scores": error}, detections=1)]
    proof = SimpleNamespace(passed=passed, most=0.25)
    said = tool.report_lines(session.ExportReport(Path("d.onnx"), 1.0, 9, compared, proof=proof))
    assert ("--apart" in said) != passed
    ends = ("verified", "more than 0.25", "does not compute")
    assert [end for end in ends if end in said] == [words]


REFUSED = {
    "{w} b.onnx --images no.jpg": "no.jpg",
    "{w} b.onnx --backbone-only": "backbone_only",
    "{w} b.onnx --raw": "leave raw out",
    "{w} b.onnx MODEL.DEVICE cpu": "MODEL.DEVICE",
    "{w} b.onnx --batch 2": "batch",
    "no.pth b.onnx": "no.pth",
    "{bare} b.onnx": "which detector",
    "b.onnx": "OUTPUT",
    "{run} b.pt2 --backbone-only --sizes 64x96,64x97": "64x97",
    "{run} d.onnx --sizes 64": "no size such as",
    "{run} d.onnx --fixed 64": "no size such as",
    "{run} d.onnx --batch 0": "neither a number from 1 nor 'any'",
    "{run} d.onnx --batch 2 --backbone-only": "whole detectors",
    "{run} d.onnx --fixed 64x70": "multiples of 32",
    "{run} d.onnx --fixed 64x64 --sizes 64x96": "--sizes",
    "{run} d.pt2": ".onnx holds detectors",
    "{run} d.txt": "names no format",
}


@pytest.fixture(scope="module")
def bare(run, tmp_path_factory):
    """The tensors of a run alone."""
    path = tmp_path_factory.mktemp("bare") / "bare.pth"
    torch.save(torch.load(run.folder / "model_final.pth", weights_only=True)["model"], path)
    return path


@pytest.mark.parametrize("given", REFUSED)
def test_what_cannot_be_is_refused_first(weights, run, bare, given, tmp_path, monkeypatch, capsys):
    pytest.importorskip("onnxruntime")
    monkeypatch.setattr("lambda_det.export.formats.HOLDS_ANY_SIZE", True)
    monkeypatch.chdir(tmp_path)
    try:
        assert tool.main(given.format(w=weights, run=run.folder, bare=bare).split()) == 2
    except SystemExit as stopped:
        assert stopped.code == 2
    message = capsys.readouterr().err
    assert "error: " in message and REFUSED[given] in message and not list(tmp_path.iterdir())
