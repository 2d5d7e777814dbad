"""A run keeps its classes: data that come later have the same in the same order, or are refused."""

import json
import shutil
from pathlib import Path

import pytest

from lambda_det.detection import parser, run
from lambda_det.detection.prediction import Predictor
from lambda_det.errors import DataError
from lambda_det.export.sources import network_to_export
from lambda_det.own_data.report.run_page import build_report
from tests.detection.test_resume import CONFIG
from tests.reliability.runs import content, differences
from tests.shapes import data_words

pytestmark = pytest.mark.slow  # trains

NAMES = ["circle", "rectangle", "triangle"]
RESULTS = "inference/coco_instances_results.json"


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[list[str], Path]:
    """A command line without its OUTPUT_DIR, and the folder of two steps that it took."""
    root = tmp_path_factory.mktemp("classes")
    (root / "config.yaml").write_text(CONFIG)
    flags = ["--config-file", str(root / "config.yaml")]
    flags += data_words(root, num_train=4, num_val=2, size=48)
    run(parser().parse_args([*flags, "OUTPUT_DIR", str(root / "run"), *words(2)]))
    return flags, root / "run"


@pytest.fixture(scope="module")
def evaluated(trained) -> Path:
    """A copy of the run that was evaluated, which nobody may change."""
    flags, folder = trained
    copy = shutil.copytree(folder, folder.with_name("evaluated"))
    evaluate = ["--resume", "--eval-only", "OUTPUT_DIR", str(copy), *words(4)]
    run(parser().parse_args([*flags, *evaluate]))
    return copy


@pytest.fixture
def again(trained, tmp_path):
    """Resume or evaluate a copy of the run; returns the copy."""
    flags, folder = trained

    def call(name: str, *more: str) -> Path:
        copy = tmp_path / name
        if not copy.exists():
            shutil.copytree(folder, copy)
        run(parser().parse_args([*flags, "--resume", *more, "OUTPUT_DIR", str(copy), *words(4)]))
        return copy

    return call


def words(steps: int) -> list[str]:
    return f"SOLVER.MAX_ITER {steps} TEST.EVAL_PERIOD 0 SOLVER.STEPS (4,)".split()


@pytest.fixture
def change(trained):
    """Give the categories of both splits other ids and names; they are as before in the end."""
    files = sorted(Path(trained[0][3]).parent.glob("*.json"))
    before = [file.read_text() for file in files]

    def change(rename: dict[str, str] | None = None, new_id=lambda number: 10 * number) -> None:
        for file in files:
            data = json.loads(file.read_text())
            for category in data["categories"]:
                category["id"] = new_id(category["id"])
                category["name"] = (rename or {}).get(category["name"], category["name"])
            for entry in data["annotations"]:
                entry["category_id"] = new_id(entry["category_id"])
            file.write_text(json.dumps(data))

    yield change
    for file, text in zip(files, before, strict=True):
        file.write_text(text)


def found(folder: Path, names: dict[int, str]) -> list[tuple]:
    """What an evaluation found, by the names of the classes with these ids."""
    entries = json.loads((folder / RESULTS).read_text())
    return sorted((e["image_id"], names[e["category_id"]], e["bbox"], e["score"]) for e in entries)


def test_other_ids_change_nothing(evaluated, again, change):
    """Neither what a resumed training learns nor what an evaluation finds."""
    resumed = again("resumed")
    change()
    other = again("other-eval", "--eval-only")
    before, after = ({n * k: name for k, name in enumerate(NAMES, 1)} for n in (1, 10))
    assert found(other, after) == found(evaluated, before) != []
    one, two = (content(folder / "model_final.pth") for folder in (resumed, again("other")))
    ids = [end["dataset"].pop("thing_ids") for end in (one, two)]
    assert ids == [[1, 2, 3], [10, 20, 30]] and differences(one, two) == []


def test_another_order_is_refused_with_nothing_written(evaluated, again, change, tmp_path):
    folder = shutil.copytree(evaluated, tmp_path / "eval")

    def times() -> dict[Path, int]:  # without the lock, and the log that is still open here
        files = [p for p in folder.rglob("*.*") if p.name not in ("log.txt", "run.lock")]
        return {p: p.stat().st_mtime_ns for p in files}

    before = times()
    change(new_id=lambda number: 4 - number)
    for more in ([], ["--eval-only"]):
        with pytest.raises(DataError, match=r"model_final\.pth.*triangle for circle"):
            again("eval", *more)
    assert times() == before


def test_names_are_those_of_the_checkpoint(trained, change):
    """For images and exported files, not those of the data as they are now."""
    folder = trained[1]
    for rename in (None, {"circle": "disc"}):
        change(rename)
        assert Predictor(folder).class_names == NAMES
        about = network_to_export(folder).about
        assert about["classes"] == about["dataset"]["thing_classes"] == NAMES


def test_a_report_reads_no_results_of_other_ids(evaluated, change, tmp_path):
    folder, words = shutil.copytree(evaluated, tmp_path / "report"), "evaluate the run again"
    assert words not in build_report(folder, pictures=1).text()
    change()
    assert words in build_report(folder, pictures=1).text()
