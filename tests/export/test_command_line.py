"""``lambda-det export``: one line from a checkpoint to a file that was compared."""

import json
import shlex
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lambda_det import errors
from lambda_det.export import ExportReport, export_network, onnx_file
from lambda_det.export import command_line as tool
from lambda_det.export.proof import Proof
from lambda_det.export.sources import network_to_export
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
    path = tmp_path / "b.onnx"
    assert tool.main([weights, str(path)]) == 0
    out = capsys.readouterr().out
    assert f"verified: {path}" in out and "1x3x193x161" in out and "res5 " in out
    assert "predict" not in out  # which finds nothing by a backbone
    about = json.loads((tmp_path / "b.onnx.json").read_text())
    assert (about["weights"], about["averaged"]) == (weights, False)
    options = {"scope": 3, "query_softmax": True}
    original = create_backbone("resnet14_slim_lambda_c5", weights=weights, **options).eval()
    x = torch.rand(1, 3, 64, 96)
    exported = onnx_file.read(path)[1](x)["res5"]
    torch.testing.assert_close(exported, original(x)["res5"], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_the_backbone_of_a_run_at_the_default_sizes(run, tmp_path, capsys, monkeypatch):
    record_nothing(monkeypatch)
    assert tool.main([str(run.folder), str(tmp_path / "b.onnx"), "--backbone-only"]) == 0
    assert " p6 " in capsys.readouterr().out


@pytest.mark.parametrize("of_file", [60.0, 60.2, 61.0])
def test_an_ap_that_differs_says_what_would_take_it(of_file):
    """On few images one box may make it, and the graph is not said to be wrong."""
    proof = Proof("9 images", {"bbox AP": (60.0, of_file)}, {"boxes": 1.0}, most=0.25)
    said = str(ExportReport(Path("d.onnx"), proof=proof))
    assert ("--apart" in said) == ("FAILED" in said) == (of_file == 61)


def test_without_a_comparison_only_by_proof_0(run, tmp_path, monkeypatch, capsys):
    record_nothing(monkeypatch)
    path = tmp_path / "new" / "d.onnx"  # whose folder is made
    words = [str(run.folder), str(path), "--proof", "0"]
    assert tool.main(words) == 0
    said = capsys.readouterr().out
    assert "NOT COMPARED" in said and "--images" not in said and path.is_file()
    # with photographs it is compared, although no AP is
    photo = str(next(Path(run.cfg.DATASETS.TEST_IMAGES).glob("*.png")))
    assert tool.main([*words, "--overwrite", "--images", photo]) == 0
    said = capsys.readouterr().out
    assert "NOT COMPARED" not in said and "only one of both finds: 0" in said and "AP" not in said
    assert "of the same instances, with 1 photograph of --images: " in said
    assert f"lambda-det predict {path}" in said and "docs/detect.py" in said


def test_a_long_export_is_never_silent(run, tmp_path, monkeypatch, capsys):
    """Its stages are said, and within one how long it has taken and what is left.

    They are printed, though pycocotools is kept from the screen.
    """
    record_nothing(monkeypatch)
    write = onnx_file.write

    def slow(*arguments):
        time.sleep(0.3)
        return write(*arguments)

    def slowly(batch):
        time.sleep(0.3)
        return detector(batch)

    monkeypatch.setattr(onnx_file, "write", slow)
    monkeypatch.setattr(errors, "_SILENCE", 0.1)
    network = network_to_export(run.folder, proof=3)
    detector = network.original
    export_network(replace(network, original=slowly), tmp_path / "d.onnx")
    said = capsys.readouterr().out.splitlines()
    graph = [line for line in said if "recording the graph" in line and "so far" in line]
    left = [line for line in said if "comparing" in line and "of 3 images" in line]
    assert len(graph) > 1 and left and "left" in left[0]


REFUSED = {
    "{run} d.onnx --images no.jpg": "no.jpg",
    "{w} b.onnx --backbone-only": "backbone_only",
    "{w} b.onnx --raw": "raw",
    "{w} b.onnx MODEL.DEVICE cpu": "keys",
    "{w} b.onnx --batch 2": "batch",
    "no.pth b.onnx": "no.pth",
    "{bare} b.onnx": "which detector",
    "b.onnx": "OUTPUT",
    "{run} d.onnx --fixed 64": "no size such as",
    "{run} d.onnx --batch 0": "neither a number from 1 nor 'any'",
    "{run} d.onnx --batch 2 --backbone-only": "whole detectors",
    "{run} d.onnx --fixed 64x70": "multiples of 32",
    "{run} d.txt": "must end in .onnx",
    "{w} b.onnx --images a.jpg": "images",
    "{run} d.onnx DATASETS.TEST_JSON gone.json": "gone.json",
    "{run} d.onnx DATASETS.TEST_JSON '' DATASETS.TEST_IMAGES ''": "--proof 0",
    "{run} d.onnx MODEL.ROI_HEADS.SCORE_THRESH_TEST 1.0": "Nothing was detected",
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
    record_nothing(monkeypatch)
    monkeypatch.chdir(tmp_path)
    try:
        assert tool.main(shlex.split(given.format(w=weights, run=run.folder, bare=bare))) == 2
    except SystemExit as stopped:
        assert stopped.code == 2
    message = capsys.readouterr().err
    assert "error: " in message and REFUSED[given] in message and not list(tmp_path.iterdir())
