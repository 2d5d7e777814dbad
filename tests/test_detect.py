"""docs/detect.py, the program for an exported detector, with a stand-in for ONNX Runtime.

tests/detection/prediction/test_examples.py runs it on a file of ``lambda-det export``.
"""

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from lambda_det.detection.prediction.predictor import read_bgr

PROGRAM = Path(__file__).parents[1] / "docs" / "detect.py"
ABOUT = {"classes": '["ring", "disc"]', "min_size_test": "32", "max_size_test": "64"}
ABOUT |= {"fixed": "null", "stride": "32", "batch": "1"}


class Session:
    """Finds two classes at nearly one place of any photo."""

    def __init__(self, about):
        self.get_modelmeta = lambda: SimpleNamespace(custom_metadata_map=ABOUT | about)

    def get_outputs(self):
        return [SimpleNamespace(name=name) for name in ("boxes", "scores", "classes", "count")]

    def run(self, _, inputs):
        boxes = np.float32([[[0, 0, 16, 32], [0, 0, 16, 30]]])
        return boxes, np.float32([[0.6, 0.2]]), np.array([[0, 1]]), np.array([2])


def run(monkeypatch, *words, about=()):
    runtime = SimpleNamespace(InferenceSession=lambda _: Session(dict(about)))
    monkeypatch.setitem(sys.modules, "onnxruntime", runtime)
    monkeypatch.setattr(sys, "argv", ["detect.py", *words])
    return runpy.run_path(str(PROGRAM))


@pytest.mark.parametrize(
    ("best", "flags", "names"),
    [
        ("null", [], ["ring"]),
        ("0.125", [], ["ring", "disc"]),
        ("0.125", ["--score-threshold", "0.7"], []),
        ("0.125", ["--agnostic-nms"], ["ring"]),
    ],
)
def test_the_best_score_of_the_file_is_the_threshold(
    capsys, monkeypatch, tmp_path, best, flags, names
):
    Image.new("RGB", (64, 64)).save(tmp_path / "photo.png")
    run(monkeypatch, "d.onnx", str(tmp_path / "photo.png"), *flags, about={"best_score": best})
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == names


def test_a_file_that_is_no_onnx_is_named_with_what_is_asked_for(monkeypatch):
    with pytest.raises(SystemExit, match=r"d\.pth .*give an \.onnx"):
        run(monkeypatch, "d.pth", "photo.png", about=None)  # which the stand-in cannot load


def test_photos_of_all_modes_are_as_predictor_reads_them_or_refused(monkeypatch, tmp_path):
    """Also with a transparent colour of a palette; more than 8 bits would become white."""
    values = np.random.default_rng(0).integers(0, 255, (16, 16, 3), np.uint8)
    Image.fromarray(values).save(tmp_path / "RGB.png")
    read = run(monkeypatch, "d.onnx", str(tmp_path / "RGB.png"))["read"]
    for mode in ("RGBA", "LA", "P", "CMYK", "1", "L"):
        path, options = tmp_path / f"{mode}.tiff", {}
        if mode == "P":
            path, options = path.with_suffix(".png"), {"transparency": 3}
        Image.fromarray(values).convert(mode).save(path, **options)
        assert np.array_equal(np.asarray(read(path)), read_bgr(path)[:, :, ::-1]), mode
    for mode in ("I;16", "I", "F"):
        Image.new(mode, (16, 16)).save(tmp_path / "deep.tiff")
        with pytest.raises(SystemExit, match=r"deep\.tiff has more than 8 bits"):
            read(str(tmp_path / "deep.tiff"))
    (tmp_path / "notes.jpg").write_text("no image")
    for name in ("notes.jpg", "gone.jpg", ""):
        with pytest.raises(SystemExit, match=f"{tmp_path / name} cannot be read as an image"):
            read(str(tmp_path / name))


def test_several_photos_one_after_the_other(capsys, monkeypatch, tmp_path):
    paths = [str(tmp_path / name) for name in ("1.png", "2.png")]
    for path in paths:
        Image.new("RGB", (64, 64)).save(path)
    run(monkeypatch, "d.onnx", *paths)
    heads = [line for line in capsys.readouterr().out.splitlines() if line.endswith(":")]
    assert heads == [f"{path}:" for path in paths]
