"""OUTPUT_DIR: an older run is not overwritten, and resumed only as what it was."""

import json
import os
from functools import partial
from pathlib import Path

import pytest

from lambda_det.config import FIXED, FREE, on_resume
from lambda_det.detection.task import DetectionTask
from lambda_det.errors import ConfigError, UserError, WeightsError
from lambda_det.files import refuse_unwritable
from lambda_det.training.run_folder import CONFIG, FINAL, RunFolder
from lambda_det.training.start import check_evaluation_folder, check_run_folder
from tests.training.tiny_detector import tiny_config


@pytest.fixture
def cfg(tmp_path):
    cfg = tiny_config()
    cfg.OUTPUT_DIR = str(tmp_path / "run")
    return cfg


def _save(cfg, file=None):
    RunFolder(cfg.OUTPUT_DIR).save_config(cfg.dump(), file)


def _check(cfg, *, resume):
    check_run_folder(DetectionTask(cfg), resume=resume)


def _check_evaluation(cfg, weights):
    check_evaluation_folder(DetectionTask(cfg), weights)


@pytest.fixture
def started(cfg):
    """The configuration of a run that has come to its first checkpoint."""
    os.mkdir(cfg.OUTPUT_DIR)
    _save(cfg)
    RunFolder(cfg.OUTPUT_DIR).point_to("model_0000004.pth")
    return cfg


def test_a_new_folder_is_fine_and_not_made(cfg):
    for resume in (False, True):
        _check(cfg, resume=resume)
    assert not os.path.exists(cfg.OUTPUT_DIR)
    os.mkdir(cfg.OUTPUT_DIR)
    _save(cfg)  # a start that was refused later leaves no run
    _check(cfg, resume=False)


@pytest.mark.parametrize("name", ["last_checkpoint", "metrics.json", "model_0000004.pth"])
def test_a_folder_with_a_run(cfg, name):
    os.mkdir(cfg.OUTPUT_DIR)
    Path(cfg.OUTPUT_DIR, name).touch()
    with pytest.raises(ConfigError) as caught:
        _check(cfg, resume=False)
    for words in (cfg.OUTPUT_DIR, "--resume", "another --output"):
        assert words in str(caught.value)
    _check(cfg, resume=True)  # checkpoints are found by their names, too


def test_other_weights_in_the_folder_are_not_trained_over(cfg):
    os.mkdir(cfg.OUTPUT_DIR)
    Path(cfg.OUTPUT_DIR, "mine.pth").touch()
    with pytest.raises(WeightsError, match=r"last_checkpoint .*mine\.pth"):
        RunFolder(cfg.OUTPUT_DIR).read_newest()


@pytest.mark.parametrize(
    ("changes", "fixed"),
    [
        (["MODEL.FPN.OUT_CHANNELS", 64], r"MODEL\.FPN\.OUT_CHANNELS"),
        (["MODEL.ANCHOR_GENERATOR.SIZES", [[1.0]]], r"MODEL\.ANCHOR_GENERATOR\.SIZES"),
        (["INPUT.FORMAT", "RGB"], r"INPUT\.FORMAT"),
        (["MODEL.COMPILE", True], r"MODEL\.COMPILE"),
        (["SOLVER.BASE_LR", 0.5], r"SOLVER\.BASE_LR"),
        (["SOLVER.EMA_DECAY", 0.5], r"SOLVER\.EMA_DECAY"),  # its average would not be in the file
        (["MODEL.WEIGHTS", "b.pth", "SOLVER.MAX_ITER", 9, "MODEL.DEVICE", "cpu"], None),
        (["MODEL.LAMBDA_RESNET.IMPLEMENTATION", "dense", "TEST.EVAL_PERIOD", 7], None),
    ],
)
def test_what_the_weights_depend_on_stays(started, changes, fixed):
    started.merge_from_list(changes)
    if fixed is None:
        _check(started, resume=True)
        return
    with pytest.raises(ConfigError, match=fixed):
        _check(started, resume=True)


def test_a_run_whose_paths_are_not_utf_8_is_continued(started):
    """Linux names files by bytes; Python has those that are no character as half a character."""
    started.DATASETS.TRAIN = ("a\udcff.json",)
    _save(started)
    _check(started, resume=True)
    started.SOLVER.BASE_LR = 0.5
    with pytest.raises(ConfigError, match=r"SOLVER\.BASE_LR"):
        _check(started, resume=True)


def test_of_a_folder_that_holds_runs_these_are_named(tmp_path):
    (tmp_path / "mine").mkdir()
    for name in (CONFIG, FINAL):
        (tmp_path / "mine" / name).touch()
    above = RunFolder(tmp_path)
    for opening in (above.config, above.refuse_no_run):
        with pytest.raises(UserError, match=str(tmp_path / "mine")):
            opening()


def test_a_file_is_no_folder(cfg, tmp_path):
    refuse_unwritable(tmp_path / ("a" * 300))  # for which a Path raises an error
    (tmp_path / "run").write_text("")
    for check in (partial(_check, cfg, resume=True), partial(_check_evaluation, cfg, "w.pth")):
        with pytest.raises(ConfigError, match="is not a folder"):
            check()
    cfg.OUTPUT_DIR = ""  # the folder in which the command runs, which nobody named
    for check in (partial(_check, cfg, resume=False), partial(_check_evaluation, cfg, "w.pth")):
        with pytest.raises(ConfigError, match="OUTPUT_DIR is ''"):
            check()


def test_weights_are_evaluated_in_the_folder_of_their_own_run(started, tmp_path, monkeypatch):
    _check_evaluation(started, f"{started.OUTPUT_DIR}/model_0000004.pth")
    monkeypatch.chdir(started.OUTPUT_DIR)
    _check_evaluation(started, "model_0000004.pth")
    for other in (tmp_path / "other.pth", tmp_path / "run2" / "a.pth", "https://host/a.pth"):
        with pytest.raises(ConfigError, match="give another --output"):
            _check_evaluation(started, str(other))
    Path("last_checkpoint").unlink()  # an earlier evaluation, and no run
    _check_evaluation(started, str(tmp_path / "other.pth"))


@pytest.mark.parametrize("changed", ["TEST_JSON", "TEST_IMAGES", "TEST"])
def test_a_run_keeps_the_results_of_its_own_data(started, changed):
    """With files it is they that count, and not the name that is made of them."""
    weights = f"{started.OUTPUT_DIR}/model_0000004.pth"
    if changed != "TEST":
        started.DATASETS.TEST_JSON, started.DATASETS.TEST_IMAGES = "val.json", "images"
        _save(started)
        started.DATASETS.TEST = ("val_0123",)
        _check_evaluation(started, weights)
    started.INPUT.MIN_SIZE_TEST = 512
    _check_evaluation(started, weights)
    started.DATASETS[changed] = ("other",) if changed == "TEST" else "other"
    with pytest.raises(ConfigError, match=rf"DATASETS.{changed} .*lambda-det evaluate"):
        _check_evaluation(started, weights)


def test_labels_that_were_moved_with_the_run_are_its_own(started):
    folder = Path(started.OUTPUT_DIR)
    (folder / "data").mkdir()
    for name in ("test.json", "other.json"):
        (folder / "data" / name).write_text("{}")
    started.DATASETS.TEST_JSON, started.DATASETS.TEST_IMAGES = "/gone/run/data/test.json", "images"
    _save(started)
    weights = str(folder / "model_0000004.pth")
    started.DATASETS.TEST_JSON = str(folder / "data" / "test.json")
    _check_evaluation(started, weights)
    started.DATASETS.TEST_JSON = str(folder / "data" / "other.json")
    with pytest.raises(ConfigError, match=r"TEST_JSON .*lambda-det evaluate"):
        _check_evaluation(started, weights)


def test_a_saved_configuration_names_the_file_it_is_from(cfg, tmp_path, monkeypatch):
    folder = Path(cfg.OUTPUT_DIR)
    folder.mkdir()
    _save(cfg)
    assert RunFolder(folder).config_origin() == ""
    monkeypatch.chdir(tmp_path)
    _save(cfg, "mine.yaml")
    assert RunFolder(folder).config_origin() == str(tmp_path / "mine.yaml")
    _save(cfg, "run/config.yaml")  # resumed with its own
    assert RunFolder(folder).config_origin() == str(tmp_path / "mine.yaml")
    cfg.RECIPE.KEEP = ["SEED"]  # which key was typed, and no other value
    assert list(RunFolder(folder).changed_keys(cfg.dump())) == []


def test_cut_metrics(tmp_path, caplog):
    path = tmp_path / "metrics.json"
    RunFolder(tmp_path).cut_metrics(3)
    assert not path.exists()
    lines = [json.dumps({"iteration": i, "total_loss": 1.0}) for i in (0, 1, 2, 3, 4)]
    path.write_text("\n".join(lines) + '\n{"iteration": 1, "tot')
    RunFolder(tmp_path).cut_metrics(3)
    assert [json.loads(line)["iteration"] for line in path.read_text().splitlines()] == [0, 1, 2]
    assert path.read_text().endswith("\n") and not caplog.messages
    path.write_text('[]\n{"iteration": 1}\n{"itera\n{"iteration": 2}\n')
    assert [line["iteration"] for line in RunFolder(tmp_path).metrics()] == [1, 2]
    said = [f"Line {number} of {path} is damaged, and left out" for number in (1, 3)]
    assert caplog.messages == said


def test_a_key_is_fixed_by_its_whole_name():
    keys = {"SOLVER.WEIGHT_DECAY": FIXED}
    assert (
        on_resume(keys, "SOLVER.WEIGHT_DECAY") == on_resume(keys, "SOLVER.WEIGHT_DECAY.X") == FIXED
    )
    assert on_resume(keys, "SOLVER.WEIGHT_DECAY_NORM") == on_resume(keys, "SOLVER") == FREE
