"""The examples of predict, export and report in the helps and on the pages, run as they are."""

import glob
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from lambda_det import cli
from lambda_det.detection.prediction import Prediction, Predictor
from lambda_det.detection.prediction import command_line as predict
from lambda_det.detection.saved_run import open_run
from lambda_det.export import command_line as export
from lambda_det.own_data.command_line import REPORT_EXAMPLES
from tests.detection.prediction.test_files import write_video
from tests.export.conftest import needs_any_size
from tests.export.tiny import few_rounds, lambda_detector_config, save_lambda_run
from tests.export.toy import classifier_checkpoint
from tests.export.unrecorded import record_nothing
from tests.shapes import make_shapes

pytestmark = [pytest.mark.slow, pytest.mark.checkout, pytest.mark.filterwarnings("ignore")]

ROOT = Path(__file__).resolve().parents[3]
# Of tests/test_pages.py, which runs these from their first line on
OTHERS = ("own_data.md", "use_in_your_project.md")


def commands() -> list[str]:
    found = []
    of_command = {"export": export.EXAMPLES, "predict": predict.EXAMPLES, "report": REPORT_EXAMPLES}
    for name, examples in of_command.items():
        examples = examples.replace("\\\n", " ")
        found += [f"{name} {words}" for words in re.findall(r"^ +%\(prog\)s (.*)$", examples, re.M)]
    pages = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
    for page in pages:
        text = page.read_text("utf-8").replace("\\\n", " ") if page.name not in OTHERS else ""
        found += re.findall(r"^(?: {4})?lambda-det ((?:predict|export|report) [^#\n]*)", text, re.M)
        found += re.findall(r"`lambda-det ((?:predict|export|report) [^`\n]* [^`\n]*)`", text)
    here = (" ".join(command.split()) for command in found if "hf://" not in command)
    return list(dict.fromkeys(here))  # tests/own_data/test_hub.py has a stand-in for the Hub


# To record a second level takes a third longer; tests/export/test_detector.py has two
ONE_LEVEL = "FPN.IN_FEATURES ['res5'] RPN.IN_FEATURES ['p5'] ROI_HEADS.IN_FEATURES ['p5']"
ONE_LEVEL += " ANCHOR_GENERATOR.SIZES [[16]]"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """All that the examples name: runs with data, weights, images, a video, an exported file."""
    folder = tmp_path_factory.mktemp("examples")
    make_shapes(folder / "datasets", num_train=1, num_val=4, size=64)
    data = {name: str(folder / "datasets/shapes" / name) for name in ("train", "val")}
    notes = {name: folder / f"datasets/shapes/annotations/instances_{name}.json" for name in data}
    cfg = lambda_detector_config()
    cfg.MODEL.merge_from_list(ONE_LEVEL.split())
    cfg.DATASETS.TRAIN_JSON, cfg.DATASETS.TRAIN_IMAGES = str(notes["train"]), data["train"]
    cfg.DATASETS.TEST_JSON, cfg.DATASETS.TEST_IMAGES = str(notes["val"]), data["val"]
    (folder / "output").mkdir()
    run = save_lambda_run(folder / "output/run", cfg)
    records = [{"iteration": step, "total_loss": 1.0, "bbox/AP": 5.0} for step in (49, 99)]
    (run / "metrics.json").write_text("".join(json.dumps(record) + "\n" for record in records))
    for name in ("mine", "other", "twenty", "fold1", "fold2", "fold3"):
        shutil.copytree(run, folder / "output" / name)
    (folder / "configs").mkdir()
    shutil.copy(run / "config.yaml", folder / "configs/mask_rcnn_lambdaresnet50.yaml")
    for name in ("model.pth", "model_final.pth"):
        shutil.copy(run / "model_final.pth", folder / name)
    torch.save(classifier_checkpoint(ema=False), folder / "backbone.pth")
    for name in ("folder", "holiday", "new"):
        (folder / name).mkdir()
    noise = np.random.default_rng(0).integers(0, 255, (60, 200, 3), dtype=np.uint8)
    for name in ("photo.jpg", "street.jpg", "holiday/a.jpg", "folder/a.jpg", "new/a.jpg"):
        cv2.imwrite(str(folder / name), noise)
    write_video(folder / "film.mp4")
    return folder


def _export(folder: Path) -> None:
    words = ["output/run", "detector.onnx", "--overwrite"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert cli.main(["export", *words]) == 0


@pytest.mark.parametrize("command", commands())
def test_the_example_works(command, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    record_nothing(monkeypatch)
    if command.startswith("predict detector.onnx"):
        _export(folder)
        capsys.readouterr()
    name, *words = shlex.split(re.sub(r"\b(\d{2,3})\dx(\d{2,3})\d\b", r"\1x\2", command))  # a tenth
    words = [found for word in words for found in sorted(glob.glob(word)) or [word]]  # the shell's
    flags = ["--overwrite"] if name != "report" else []
    assert cli.main([name, *flags, *words]) == 0
    printed = capsys.readouterr().out
    if name == "export":
        weights = "backbone.pth" if words[0] == "backbone.pth" else "model_final.pth"
        assert weights in printed and "raw weights" in printed
    (made,) = re.findall(r"(?:verified: | in |is )(\S+)$", printed.strip(), re.M)[-1:]
    assert (folder / made).exists()
    if name == "export" and words[1].startswith("backbone"):
        assert (" p6 " in printed) == ("--backbone-only" in words)
    elif name == "export":
        assert re.search(r"segm AP +(\S+) +\1\b", printed)


@needs_any_size
def test_an_exported_file_finds_the_same(folder, monkeypatch):
    """One whose graph is recorded: in Predictor, and in the program of the page; also in tiles."""
    few_rounds(monkeypatch)
    _export(folder)
    path = folder / "detector.onnx"
    files = sorted((folder / "datasets/shapes/val").iterdir())
    images, _ = onnxruntime.InferenceSession(path).get_inputs()
    assert images.shape == [1, "32*height", "32*width", 3]
    # A file without its .json, and one that differs from it in its metadata
    alone, tiled = Path(shutil.copy(path, folder / "moved.onnx")), folder / "tiled.onnx"
    tiles = ["INPUT.TILE.SIZE", "40", "INPUT.TILE.OVERLAP", "12"]
    whole, cut = (open_run(folder / "output/run", opts=opts) for opts in ([], tiles))
    model = onnx.load(path)
    about = {entry.key: entry.value for entry in model.metadata_props}
    onnx.helper.set_model_props(model, about | {"tile": json.dumps(cut.about()["tile"])})
    onnx.save(model, tiled)
    for run, exported, images in ((whole, alone, files), (cut, tiled, files[-2:-1])):
        original = Predictor(run, score_threshold=0.3)
        predictor = Predictor(exported, score_threshold=0.3, batch_size=3)
        for image, found in zip(images, predictor(images), strict=True):
            expected = original(image)
            np.testing.assert_allclose(found.boxes, expected.boxes, rtol=1e-3, atol=1e-2)
            np.testing.assert_allclose(found.scores, expected.scores, rtol=1e-3, atol=1e-3)
            assert found.names == expected.names
            assert not found.masks.size or (found.masks == expected.masks).mean() > 0.99
        the_program_of_the_page_finds_the_same(exported, files[-2], original(files[-2]))


def the_program_of_the_page_finds_the_same(path: Path, image: Path, expected: Prediction):
    """Without lambda_det, on an image of the run, whose scores are low."""
    lean = "import sys; sys.modules.update(dict.fromkeys(('torch', 'detectron2', 'lambda_det')))\n"
    program = (ROOT / "docs/detect.py").read_text("utf-8")
    words = [sys.executable, "-c", lean + program, path, image, "--score-threshold", "0.3"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(expected) > 1
    assert re.findall(r"^(\w+) 0", done.stdout, re.M) == expected.names
    areas = [int(area) for area in re.findall(r"mask of (\d+)", done.stdout)]
    assert areas == pytest.approx(expected.masks.sum(axis=(1, 2)), rel=0.02, abs=4)
