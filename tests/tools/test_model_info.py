"""tools/model_info.py: a row for each network, and an error for an unknown name."""

from __future__ import annotations

import lambda_det
from tests.tool import load_tool

tool = load_tool("model_info")


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
