"""study.py: each row is a training that can start; its table; a study on a few images."""

from __future__ import annotations

import os
import random
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from lambda_det.classification import load_recipe, parser
from lambda_det.classification.model import build_classifier
from lambda_paper import reproduction
from tests.tool import load_tool

tool = load_tool("study", "projects/paper")
ROWS = [(study, row) for study, rows in tool.STUDIES.items() for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize(("study", "row"), ROWS)
def test_each_row_is_a_network(study, row):
    _, pairs = tool.STUDIES[study][row]
    words = ["--config-file", tool.RECIPE, *pairs, "MODEL.DEVICE", "meta"]
    with torch.device("meta"):
        build_classifier(load_recipe(parser().parse_args(list(map(str, words)))), 10)


def test_the_table_has_means_and_the_order():
    study = {"a": (1.0, ()), "b": (2.0, ()), "c": (2.0, ()), "d": (4.0, ())}
    found = {"a": [10.0, 12.0], "b": [20.0, 20.0], "c": [20.0, 20.0], "d": [50.0, 30.0]}
    found = {name: [{5: 1.0, 9: top1} for top1 in row] for name, row in found.items()}
    lines = tool.table(study, found).splitlines()
    assert lines[2] == "| a | 10.0, 12.0 | 11.0, 1.4 | 1.0 |"
    assert lines[-1].endswith("(Spearman): 1.00")
    found["a"], found["d"] = found["d"], found["a"]
    assert tool.table(study, found).endswith(": -1.00")
    assert tool.rank_correlation([1.0, 2.0, 2.0, 4.0], [1, 5, 6, 7]) == pytest.approx(
        0.949, abs=1e-3
    )
    one = {"a": [{9: 1.0}], "b": [{9: 2.0}]}
    assert tool.table(study, one).endswith("(Spearman): 1.00")
    assert "correlation" not in tool.table({"a": (None, ()), "b": (None, ())}, one)


@pytest.fixture
def here(monkeypatch):
    """Trainings in this process, which has PyTorch and the networks of the reproduction."""

    def run(command, *, check, env):
        _, file, *words = command
        assert check and env["DETECTRON2_ENV_MODULE"] == reproduction.__name__
        assert Path(env["PYTHONPATH"].split(os.pathsep)[0], "lambda_paper").is_dir()
        status = load_tool(Path(file).stem, Path(file).parent).main(words)
        if status:
            raise subprocess.CalledProcessError(status, command)

    error = subprocess.CalledProcessError
    monkeypatch.setattr(tool, "subprocess", SimpleNamespace(run=run, CalledProcessError=error))


def test_a_failed_training_ends_the_study(here, tmp_path, capsys):
    arguments = ["placement", "--data", tmp_path / "none", "--output", tmp_path / "out"]
    assert tool.main(list(map(str, arguments))) == 2
    assert "none" in capsys.readouterr().err


@pytest.mark.slow
def test_a_small_study_and_its_second_start(here, tmp_path, monkeypatch, capsys):
    for part in ("train", "test"):
        for label in range(2):
            folder = tmp_path / part / str(label)
            folder.mkdir(parents=True)
            for number in range(4):
                grey = random.randrange(256)
                Image.new("RGB", (32, 32), (grey, 80 * label, 9)).save(folder / f"{number}.png")
    same = (50.0, ("MODEL.NAME", "resnet50_lambda_c2345"))
    monkeypatch.setattr(tool, "STUDIES", {"placement": {"small": same, "twin": same}})
    trained = []
    train = tool.train
    monkeypatch.setattr(tool, "train", lambda *a: trained.append(a) or train(*a))
    arguments = ["placement", "--data", tmp_path, "--output", tmp_path / "out", "--seeds", "1"]
    arguments += ["--network", "resnet14_slim"]
    keys = ["SOLVER.IMS_PER_BATCH", 4, "SOLVER.EPOCHS", 1, "SOLVER.WARMUP_EPOCHS", 0]
    keys += ["DATALOADER.NUM_WORKERS", 0, "DATA.FRACTION", 1.0, "TEST.PRECISE_BN_BATCHES", 0]
    for _ in range(2):
        assert tool.main(list(map(str, [*arguments, *keys]))) == 0
        printed = capsys.readouterr().out
        assert printed.count("| small | ") == printed.count("| twin | ") == 1
    results = tmp_path / "out/placement/results.csv"
    results.write_text(
        results.read_text().strip().rsplit(",", 1)[0] + ",\n"
    )  # the last is averaged
    assert tool.main(list(map(str, [*arguments, *keys, "--averaged"]))) == 2
    assert "SOLVER.EMA_DECAY" in capsys.readouterr().err
    # Of another size: nothing is continued, or taken for a result
    assert tool.main(list(map(str, [*arguments, *keys, "SOLVER.BASE_LR", 0.1]))) == 2
    assert "--output" in capsys.readouterr().err
    assert len(trained) == 1
    made = (tmp_path / "out/placement").iterdir()
    assert [path.name for path in made if path.is_dir()] == ["small_0"]
    config = (tmp_path / "out/placement/small_0/config.yaml").read_text()
    assert "NAME: resnet14_slim_lambda_c2345" in config


@pytest.mark.parametrize("study", tool.STUDIES)
def test_rows_can_be_named(study):
    rows = list(tool.STUDIES[study])
    assert tool.parse_args([study, "--data", "d", "--rows", ",".join(rows)]).rows == rows


@pytest.mark.parametrize(
    ("words", "named"),
    [("scope --rows 3x3,5x5", "5x5"), ("hybrid --network resnet14_slim", "hybrid")],
)
def test_rows_and_networks_that_there_are_not(words, named, capsys):
    with pytest.raises(SystemExit):
        tool.parse_args([*words.split(), "--data", "d"])
    assert named in capsys.readouterr().err
