"""A run that an earlier state of this package trained is opened by those of today.

``run_of_757bc69b.tar.xz`` holds what commit 757bc69b wrote when it trained a narrow Mask R-CNN on
the shapes of ``tests/shapes.py`` for 200 steps (a mask AP of 20.9 by its averaged weights),
without its pictures, its events and the momentum of the optimiser. The folder of then is called
``/yesterday`` in it.
"""

import json
import shutil
import tarfile
from pathlib import Path

import pytest
import torch

from lambda_det import cli
from lambda_det.own_data.evaluate import evaluate
from tests.shapes import make_shapes

ARCHIVE = Path(__file__).with_name("run_of_757bc69b.tar.xz")
THEN = "/yesterday"


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A folder with the run and its data, in the place of then."""
    root = tmp_path_factory.mktemp("yesterday")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(root, filter="data")
    make_shapes(root / "data", num_train=8, num_val=3, size=64)
    for file in (root / "run").rglob("*"):
        if file.suffix in (".yaml", ".json"):
            file.write_text(file.read_text().replace(THEN, str(root)))
    file = root / "run" / "model_best.pth"
    content = torch.load(file, weights_only=True)
    content["run"]["config"] = content["run"]["config"].replace(THEN, str(root))
    for name in ("model_best.pth", "model_final.pth"):
        torch.save(content, file.with_name(name))
    return root


def recorded(root: Path) -> dict[str, float]:
    """The results that the run logged last."""
    lines = (root / "run" / "metrics.json").read_text().splitlines()
    return {name: value for line in lines for name, value in json.loads(line).items()}


def test_predict(root, tmp_path):
    photo = root / "data" / "shapes" / "val" / "000000.png"
    words = ["--input", photo, "--output", tmp_path / "out", "--json", tmp_path / "found.json"]
    assert cli.main(["predict", str(root / "run"), *map(str, words)]) == 0
    assert json.loads((tmp_path / "found.json").read_text())["annotations"]
    assert [*(tmp_path / "out").iterdir()]


@pytest.mark.slow
def test_evaluate(root, tmp_path):
    """The weights, the data and the sizes of then give the AP of then."""
    found = evaluate(root / "run", part="val", output=tmp_path / "results")
    before = recorded(root)
    assert before["segm_EMA/AP"] > 20
    for name in ("bbox_EMA/AP", "segm_EMA/AP", "segm_EMA/AP50"):
        assert found.results[name].value == pytest.approx(before[name], abs=1e-3), name
        assert found.own[name].value == pytest.approx(before[name]), name


@pytest.mark.slow
def test_report(root, tmp_path):
    page = tmp_path / "page.html"
    assert cli.main(["report", str(root / "run"), "--output", str(page)]) == 0
    best = recorded(root)["segm_EMA/AP"]
    assert all(word in page.read_text() for word in ("triangle", f"{best:.1f}", "000000.png"))


@pytest.mark.slow
def test_its_training_is_continued_or_refused_in_one_sentence(root, tmp_path, capsys):
    """Its end is reached: what a checkpoint of then says of its training is read nevertheless."""
    run = shutil.copytree(root / "run", tmp_path / "run")
    words = ["--config", run / "config.yaml", "--resume", "--output", run, "SOLVER.MAX_ITER", 202]
    status = cli.main(["train", *map(str, words)])
    error = capsys.readouterr().err
    assert status == 0 or (
        status == 2 and error.startswith("error: ") and "\n" not in error.strip()
    )
    lines = map(json.loads, (run / "metrics.json").read_text().splitlines())
    of_then = [line["segm_EMA/AP"] for line in lines if line["iteration"] == 199]
    assert of_then == [recorded(root)["segm_EMA/AP"]]
