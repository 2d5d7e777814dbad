"""``lambda-det info``: a row for each network, and an error for an unknown name."""

import pytest

import lambda_det
from lambda_det.modeling import complexity
from lambda_det.modeling.command_line import HEADER, main, rows
from lambda_det.modeling.complexity import measure_named


@pytest.mark.slow
def test_rows():
    patterns = ["lambda_resnet26", "*net50_lambda_c*", "lambda_resnet26"]
    table = rows(patterns, image_size=64)
    others = [name for name in lambda_det.list_models() if "net50_lambda_c" in name]
    assert [row[0] for row in table] == ["lambda_resnet26", *others] and len(others) > 1
    assert {len(row) for row in table} == {len(HEADER)}
    model = lambda_det.create_classifier("lambda_resnet26")
    params = sum(p.numel() for p in model.parameters()) / 1e6
    row = next(row for row in table if row[0] == "lambda_resnet26")
    assert row[1] == f"{params:.2f}" and row[3] == 64
    larger = rows(["lambda_resnet26"], image_size=128)[0]
    assert larger[1] == row[1] and float(larger[4]) > 3.5 * float(row[4])


def test_the_paper_s_figures_are_of_the_paper_s_size():
    (own,), (other,) = rows(["lambda_resnet101"]), rows(["lambda_resnet101"], image_size=64)
    assert own[2] == other[2] == 36.9 and own[6] == 82.3 and other[6] is None


def test_all_networks(capsys, monkeypatch):
    """Their counts are those of tests/modeling/test_specs.py."""
    counted = measure_named("resnet14_slim", 32)
    monkeypatch.setattr(complexity, "measure_named", lambda name, size: counted)
    assert main([]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(lambda_det.list_models())


def test_unknown_name(capsys):
    assert main(["lambda_resnet51"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and "lambda_resnet50" in captured.err
    assert captured.err.count("\n") == 1 and captured.out == ""
