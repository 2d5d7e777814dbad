"""tools/demo.py, with the training replaced."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lambda_det.errors import DataError
from tests.tool import load_tool

tool = load_tool("demo")


@pytest.fixture
def trained(monkeypatch):
    """Replace all that takes minutes; the run writes the box APs that are put into the list."""
    aps: list[float] = []

    def run(args):
        assert args.resume and Path(args.config_file).is_file()
        folder = Path(args.opts[args.opts.index("OUTPUT_DIR") + 1])
        folder.mkdir()
        records = [{"iteration": i, "bbox/AP": ap, "segm/AP": ap / 2} for i, ap in enumerate(aps)]
        records.append({"iteration": 99, "total_loss": 1.0})
        (folder / "metrics.json").write_text("".join(json.dumps(r) + "\n" for r in records))

    monkeypatch.setattr("lambda_det.detection.data.make_shapes", lambda root: None)
    monkeypatch.setattr("lambda_det.detection.run", run)
    for name in ("Predictor", "files.plan_dataset", "files.predict"):
        monkeypatch.setattr(f"lambda_det.prediction.{name}", lambda *args, **kwargs: None)
    page = Path("report.html")
    monkeypatch.setattr("lambda_det.report.run_page.write_report", lambda run: Path(run) / page)
    return aps


def test_last_metrics_are_printed(trained, tmp_path, capsys):
    trained += [3.0, 52.0]
    assert tool.main(["--output", str(tmp_path / "run")]) == 0
    captured = capsys.readouterr()
    assert "box AP 52.0, mask AP 26.0" in captured.out and captured.err == ""
    assert tool.final_metrics(str(tmp_path / "run"))["total_loss"] == 1.0


def test_detector_that_has_not_learned(trained, tmp_path, capsys):
    trained += [52.0, 39.9]
    assert tool.main(["--output", str(tmp_path / "run")]) == 1
    assert "at least 40" in capsys.readouterr().err


def test_user_error(trained, tmp_path, capsys, monkeypatch):
    def refuse(root):
        raise DataError("There is no room.")

    monkeypatch.setattr("lambda_det.detection.data.make_shapes", refuse)
    assert tool.main(["--output", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err == "error: There is no room.\n"
