"""tools/plot_metrics.py: a picture of a run's curves."""

from __future__ import annotations

import json

import cv2

from tests.tool import load_tool

tool = load_tool("plot_metrics")


RECORDS = [
    {"iteration": 19, "total_loss": 3.0, "loss_mask": 1.0, "lr": 0.01},
    {"iteration": 39, "total_loss": 2.0, "loss_mask": 0.5, "lr": 0.01, "bbox/AP": 40.0},
]


def test_picture(tmp_path, capsys):
    lines = [json.dumps(record) for record in RECORDS]
    (tmp_path / "metrics.json").write_text("\n".join(lines) + "\n")
    picture = tmp_path / "curve.png"
    assert tool.main([str(tmp_path), str(picture)]) == 0
    assert capsys.readouterr().out.strip() == str(picture)
    image = cv2.imread(str(picture))
    left, right = image[:, : image.shape[1] // 2], image[:, image.shape[1] // 2 :]
    for half in (left, right):  # lines and points are coloured, axes and text are not
        assert (half.max(2).astype(int) - half.min(2) > 100).sum() > 10


def test_folder_without_a_run(tmp_path, capsys):
    assert tool.main([str(tmp_path), str(tmp_path / "curve.png")]) == 2
    assert "metrics.json" in capsys.readouterr().err
    assert not (tmp_path / "curve.png").exists()
