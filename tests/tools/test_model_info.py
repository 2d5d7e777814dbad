"""tools/model_info.py: a row for each network, and an error for an unknown name."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import lambda_det
from lambda_det.modeling.specs import get_spec
from tests.tool import ROOT, load_tool

tool = load_tool("model_info")
KEPT = json.loads(tool.COUNTED.read_text())


def test_every_network_is_kept_at_the_size_of_its_figures():
    sizes = {name: get_spec(name).image_size for name in lambda_det.list_models()}
    assert {name: counts[0] for name, counts in KEPT.items()} == sizes


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name.startswith("lambda_resnet26") else pytest.mark.slow)
        for name in KEPT
    ],
)
def test_what_is_kept_is_what_is_counted(name):
    size, *counts = KEPT[name]
    assert counts == tool.count(name, size), "tools/model_info.py --count"


def test_networks_are_counted_anew(tmp_path, monkeypatch):
    names = ["lambda_resnet26", "resnet50"]
    monkeypatch.setattr(tool, "COUNTED", tmp_path / "counts.json")
    monkeypatch.setattr("lambda_det.modeling.specs.list_models", lambda: names)
    assert tool.main(["--count"]) == 0
    assert json.loads(tool.COUNTED.read_text()) == {name: KEPT[name] for name in names}


@pytest.mark.checkout
def test_what_is_kept_is_printed_without_pytorch():
    """Its import takes longer than all else."""
    path = str(ROOT / "tools/model_info.py")
    code = (
        f"import runpy, sys\nsys.argv = [{path!r}]\n"
        f"try:\n    runpy.run_path({path!r}, run_name='__main__')\n"
        "except SystemExit as end:\n    assert not end.code\n"
        "assert 'torch' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) == 1 + len(KEPT)


def test_rows():
    patterns = ["lambda_resnet26", "*net50*", "lambda_resnet26"]
    table = tool.rows(patterns, image_size=64)
    others = [name for name in lambda_det.list_models() if "net50" in name]
    assert [row[0] for row in table] == ["lambda_resnet26", *others] and len(others) > 1
    assert {len(row) for row in table} == {len(tool.HEADER)}
    model = lambda_det.create_classifier("lambda_resnet26")
    params = sum(p.numel() for p in model.parameters()) / 1e6
    row = next(row for row in table if row[0] == "lambda_resnet26")
    assert row[1] == f"{params:.2f}" and row[3] == "64"
    larger = tool.rows(["lambda_resnet26"], image_size=128)[0]
    assert larger[1] == row[1] and float(larger[4]) > 3.5 * float(row[4])


def test_markdown(capsys):
    assert tool.main(["lambda_resnet50", "--image-size", "64", "--markdown"]) == 0
    head, rule, row = capsys.readouterr().out.strip().splitlines()
    assert row.startswith("| lambda_resnet50 |")
    assert head.count("|") == rule.count("|") == row.count("|")


def test_unknown_name(capsys):
    assert tool.main(["lambda_resnet51"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and "lambda_resnet50" in captured.err
    assert captured.err.count("\n") == 1 and captured.out == ""
