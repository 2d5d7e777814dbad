"""projects/benchmarks/long_run.py: what grows is found, and what does not grow passes."""

import csv
import mmap

import numpy as np
import pytest

from tests.shapes import make_shapes
from tests.tool import load_tool

tool = load_tool("long_run", "projects/benchmarks")


def _write(path, **slopes: float) -> None:
    """A table of 100 measurements: noise around 50, and what ``slopes`` add in 1000 steps."""
    rng = np.random.default_rng(0)
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, ["step", *tool.QUANTITIES])
        table.writeheader()
        for step in range(10, 1010, 10):
            start = 40.0 if step < 200 else 0.0  # caches that fill at first are no growth
            row = {
                name: 50 - start + rng.normal() * 0.1 + slopes.get(name, 0) * step / 1000
                for name in tool.QUANTITIES
            }
            table.writerow({"step": step, **row})


def test_nothing_grows(tmp_path, capsys):
    _write(tmp_path / "table.csv")
    assert tool.report(tmp_path / "table.csv") == []
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(tool.QUANTITIES)


@pytest.mark.parametrize("name", tool.QUANTITIES)
def test_each_quantity_that_grows_is_named(tmp_path, name):
    _write(tmp_path / "table.csv", **{name: 30})
    (sentence,) = tool.report(tmp_path / "table.csv")
    assert sentence.startswith(f"{name} grows by ")
    assert float(sentence.split()[3]) == pytest.approx(30, abs=0.5)


def test_resources(tmp_path):
    before = tool.resources()
    # New pages, where an array might get some that were freed
    with mmap.mmap(-1, 30_000_000, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as held:
        held.write(b"1" * len(held))
        with (tmp_path / "file").open("w"):
            now = tool.resources()
    assert now["files"] == before["files"] + 1
    assert now["process"] - before["process"] >= 29


@pytest.mark.slow
@pytest.mark.release
def test_run(tmp_path, monkeypatch, capsys):
    make_shapes(tmp_path, num_train=4, num_val=2, size=64)
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path))
    out = tmp_path / "out"
    small = ["MODEL.LAMBDA_RESNET.SCOPE", "3", "INPUT.MIN_SIZE_TRAIN", "(32,)"]
    for part, split in (("TRAIN", "train"), ("TEST", "val")):
        small += [f"DATASETS.{part}_JSON", f"{tmp_path}/shapes/annotations/instances_{split}.json"]
        small += [f"DATASETS.{part}_IMAGES", f"{tmp_path}/shapes/{split}"]
    monkeypatch.setattr(tool, "PERIOD", 1)
    # So few steps may show a slope
    assert tool.main(["--steps", "8", "--output", str(out), "--opts", *small]) in (0, 1)
    rows = (out / tool.TABLE).read_text().splitlines()
    assert len(rows) == 1 + 8
    assert "in 1000 steps" in capsys.readouterr().out
    assert tool.main(["--steps", "8", "--output", str(out)]) == 2
    assert str(out) in capsys.readouterr().err
