"""projects/benchmarks/milliseconds.py: a row for each detector and number of threads."""

import json
import subprocess

import pytest
from PIL import Image

import lambda_det
from tests.tool import load_tool

tool = load_tool("milliseconds", "projects/benchmarks")


@pytest.fixture
def images(tmp_path):
    for number in range(6):
        Image.new("RGB", (4, 3)).save(tmp_path / f"{number}.png")
    return tmp_path


def test_rows(images, monkeypatch, capsys):
    def run(command, env, **others):
        times = [float(env["OMP_NUM_THREADS"])] * len(command[command.index("--worker") + 1 :])
        return subprocess.CompletedProcess(command, 0, f"a line\n{json.dumps(times)}\n")

    monkeypatch.setattr(tool.subprocess, "run", run)
    assert tool.main(["mine", "mine.onnx", "--images", str(images), "--count", "3"]) == 0
    table = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines()[2:]]
    assert [[cell.strip() for cell in row] for row in table] == [
        [name, threads, threads, threads] for name in ("mine", "mine.onnx") for threads in "12"
    ]


def test_a_process_predicts_each_image(images, monkeypatch, capsys):
    shapes = []
    monkeypatch.setattr(lambda_det, "Predictor", lambda detector: lambda x: shapes.append(x.shape))
    tool.main(["mine", "--worker", *(str(file) for file in sorted(images.iterdir()))])
    assert len(json.loads(capsys.readouterr().out)) == 6
    assert shapes == [(3, 4, 3)] * (6 + tool.WARM_UP)
