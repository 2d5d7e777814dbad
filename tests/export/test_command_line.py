"""``lambda-det export``: one line from a checkpoint to a file that was compared."""

import json
import re
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from lambda_det.export import command_line as tool
from lambda_det.export import session
from lambda_det.modeling import create_backbone
from lambda_det.prediction import Predictor
from tests.export.conftest import needs_any_size
from tests.export.tiny import scramble

ROOT = Path(__file__).resolve().parents[2]
PT2 = (".pt2", ".onnx")  # of torch.export

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
@pytest.mark.parametrize("suffix", [".ts", *(pytest.param(s, marks=needs_any_size) for s in PT2)])
def test_the_backbone_of_a_run_at_the_default_sizes(run, suffix, tmp_path, capsys):
    path = tmp_path / f"b{suffix}"
    command = [str(path), "--config-file", str(run.folder / "config.yaml"), "--backbone-only"]
    assert tool.main(command) == 0
    assert "  p6: " in capsys.readouterr().out
    if suffix == ".onnx":
        import onnxruntime

        (images,) = onnxruntime.InferenceSession(str(path)).get_inputs()
        assert images.shape == ["batch", 3, "32*height", "32*width"]
    odd = [*command, "--overwrite", "--sizes", "64x96,64x97"]
    assert tool.main(odd) == 2 and "64x97" in capsys.readouterr().err


DOORS = {
    "d.ts": (),
    "d.pt2": (),
    "d.onnx": (),
    "three.onnx": ("--batch=3", "--fixed=64x64", "--outside=normalise", "--masks=pasted"),
    "any.onnx": ("--batch", "any"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["d.ts", *(pytest.param(n, marks=needs_any_size) for n in [*DOORS][1:])]
)
def test_a_detector_out_of_the_door(run, name, tmp_path, capsys, monkeypatch):
    """By the command, from a checkpoint, proved on four images. Then the file is moved and read.

    It finds the same on every picture, and so does the program of the page, without lambda_det. One
    side of each has more than 64 pixels when it is resized: torch.export asks whether the last map
    of the FPN has one position alone.
    """
    path, flags = tmp_path / name, DOORS[name]
    source = ["--config", str(run.folder / "config.yaml"), *flags]
    source += ["--weights", str(run.folder / "model_final.pth"), "MODEL.DEVICE", "cpu"]
    if "any" in flags:  # with an OpenVINO that cannot load it
        monkeypatch.setattr(session.importlib.util, "find_spec", lambda name: True)
        monkeypatch.setattr(session, "read_openvino", lambda *_: 1 / 0)
    assert tool.main([str(path), *source]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"segm AP +(\S+) +\1\b", printed) and "on 0 images" in printed
    assert ("trtexec --onnx=" in printed) == ("--fixed=64x64" in flags)
    assert ("OpenVINO cannot load the file (ZeroDivisionError" in printed) == ("any" in flags)
    pictures = [cv2.imread(str(file)) for file in run.images]
    if path.suffix == ".onnx":
        path = path.rename(tmp_path / "moved.onnx")  # and the .json stays
    else:
        rng = np.random.default_rng(0)
        sizes = ((60, 1000), (300, 40), (9, 1), (50, 70))
        pictures += [rng.integers(0, 255, (*size, 3), dtype=np.uint8) for size in sizes]
    original = Predictor(run.folder, score_threshold=0.3)
    exported = Predictor(path, score_threshold=0.3, batch_size=3)
    for picture, found in zip(pictures, exported(pictures), strict=True):
        expected = original(picture)
        np.testing.assert_allclose(found.boxes, expected.boxes, rtol=1e-3, atol=1e-2)
        np.testing.assert_allclose(found.scores, expected.scores, rtol=1e-3, atol=1e-3)
        assert found.names == expected.names
        assert not found.masks.size or (found.masks == expected.masks).mean() > 0.99
    assert max(map(len, exported(pictures))) > 1
    if name != "d.onnx":
        return
    lean = "import sys; sys.modules.update(dict.fromkeys(('torch', 'detectron2', 'lambda_det')))\n"
    program = lean + (ROOT / "docs/detect.py").read_text("utf-8")
    words = [sys.executable, "-c", program, path, run.images[0]]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    expected = Predictor(run.folder, score_threshold=0.5)(run.images[0])
    assert re.findall(r"^(\w+) 0", done.stdout, re.M) == expected.names
    areas = [int(area) for area in re.findall(r"mask of (\d+)", done.stdout)]
    assert areas == pytest.approx(expected.masks.sum(axis=(1, 2)), rel=0.02, abs=4)


def test_nothing_detected_is_said():
    nothing = session.Comparison((3, 64, 96), {"scores": 0.0}, detections=0)
    said = tool.describe(session.Report(Path("d.ts"), 1.0, 9, [nothing]))
    assert "note: nothing was detected" in said and "verified: d.ts" in said


def test_published_weights_by_their_url(tmp_path, capsys):
    named = ["--model", "lambda_resnet26_slim", "--weights", "lambda://lambda_resnet26_slim"]
    assert tool.main([str(tmp_path / "b.ts"), *named, "--sizes", "64x64"]) == 0
    assert "lambda://lambda_resnet26_slim" in capsys.readouterr().out


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
