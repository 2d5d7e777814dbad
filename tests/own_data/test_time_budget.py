"""As many epochs as fit into a time."""

import json
import math
import re
import sys
from types import SimpleNamespace

import pytest

from lambda_det import get_config
from lambda_det.errors import ConfigError, DataError
from lambda_det.own_data import prepare as preparing
from lambda_det.own_data import recipe, time_budget
from lambda_det.own_data.time_budget import Step, measure_step, seconds_of
from tests import forked
from tests.own_data.test_prepare import begun, data, keys, prepared  # noqa: F401


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1h", 3600),
        ("90m", 5400),
        ("1h30m", 5400),
        ("1.5h", 5400),
        ("2 hours", 7200),
        ("45min", 2700),
        ("1h 10m 5s", 4205),
    ],
)
def test_times(text, seconds):
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", " ", "1", "h", "0m", "-1h", "1h30", "soon"])
def test_what_is_no_time(text):
    with pytest.raises(ConfigError, match="--time"):
        seconds_of(text)


@pytest.fixture
def trial(monkeypatch):
    """A step takes two seconds, and the start ten."""
    asked = []

    def measure(cfg, processes):
        asked.append(cfg)
        return Step(2.0, 10.0)

    monkeypatch.setattr(preparing, "measure_step", measure)
    return asked


def test_the_schedule_fits_into_the_time(data, trial):  # noqa: F811
    args = prepared("--data", data, "--time", "10m", "--output", data.parent / "run")
    cfg = keys(args)
    (asked,) = trial
    assert asked.DATASETS.TRAIN_JSON == cfg.DATASETS.TRAIN_JSON
    # nearly all of the 590 seconds, with the evaluations
    assert 230 < cfg.SOLVER.MAX_ITER < 295
    assert math.ceil(cfg.RECIPE.EPOCHS * 17 / 4) == cfg.SOLVER.MAX_ITER


def test_twice_the_time_is_twice_the_steps(monkeypatch):
    monkeypatch.setattr(recipe, "_records", lambda cfg: [{}] * 100)
    monkeypatch.setattr(recipe, "_test_images", lambda cfg, tiling=None: 10)
    cfg = get_config("finetune/light_lambdaresnet26.yaml")
    epochs = [recipe.epochs_within(cfg, seconds, 2.0) for seconds in (600.0, 1200.0, 2400.0)]
    assert epochs[1] == pytest.approx(2 * epochs[0], rel=0.1)
    assert epochs[2] == pytest.approx(2 * epochs[1], rel=0.1)


@pytest.mark.parametrize(
    ("words", "named"),
    [(["--time", "1h", "--epochs", "3"], "--epochs"), (["--time", "11s"], "--time")],
)
def test_what_cannot_be(data, trial, words, named):  # noqa: F811
    with pytest.raises(ConfigError, match=named):
        prepared("--data", data, *words, "--output", data.parent / "run")


@pytest.mark.parametrize("text", ["11s", "1s"])
def test_a_time_that_is_too_short_names_one_that_works(data, trial, text):  # noqa: F811
    words = ["--data", data, "--output", data.parent / "run", "--time"]
    with pytest.raises(ConfigError, match=r"--time \d+m") as refused:
        prepared(*words, text)
    assert "-" not in re.sub("--time", "", str(refused.value))  # no negative seconds
    (enough,) = re.findall(r"--time (\d+m)", str(refused.value))
    assert keys(prepared(*words, enough)).SOLVER.MAX_ITER > 0


def test_processes_that_would_choose_alone_are_refused(data, trial, monkeypatch):  # noqa: F811
    monkeypatch.setenv("WORLD_SIZE", "1")
    config = ["--config", "finetune/light_lambdaresnet26.yaml"]
    with pytest.raises(ConfigError, match="--time is for processes"):
        prepared("--data", data, *config, "--time", "1h", "--output", data.parent / "run")


@pytest.mark.parametrize("config", [[], ["--config", "finetune/light_lambdaresnet26.yaml"]])
def test_a_run_that_goes_on_keeps_its_epochs(data, trial, config):  # noqa: F811
    words = ["--data", data, *config, "--time", "10m", "--output", data.parent / "run"]
    before = begun(prepared(*words))
    again = keys(prepared(*words, "--resume"))
    assert (again.SOLVER.MAX_ITER, len(trial)) == (before.SOLVER.MAX_ITER, 1)


@pytest.fixture
def commands(monkeypatch, tmp_path):
    """The commands of trials, of which each has a few steps in a process that is forked."""
    given = []

    def run(command, **options):
        given.append(command)
        done = forked.run(command[1:], tmp_path / "printed")
        return SimpleNamespace(returncode=done.returncode, stderr=done.stdout)

    monkeypatch.setattr(time_budget.subprocess, "run", run)
    monkeypatch.setattr(time_budget, "STEPS", 4)  # Detectron2 times none of the first three
    return given


@pytest.mark.slow
def test_steps_are_timed_in_a_process_of_their_own(data, commands):  # noqa: F811
    words = ["--data", data, "--epochs", "1", "--output", data.parent / "run"]
    args = prepared(*words)
    step = measure_step(args.config, 1)
    assert step.seconds > 0
    assert step.start > 0
    assert not (data.parent / "run" / "metrics.json").exists()
    assert [command[0] for command in commands] == [sys.executable]


@pytest.mark.slow
def test_steps_that_fail_say_why(data, commands):  # noqa: F811
    cfg = keys(prepared("--data", data, "--epochs", "1", "--output", data.parent / "run"))
    cfg.SOLVER.BASE_LR = -1.0
    with pytest.raises(DataError, match="BASE_LR"):
        measure_step(cfg, 1)


def test_no_time_is_named(tmp_path):
    (tmp_path / "metrics.json").write_text(json.dumps({"iteration": 19}) + "\n")
    with pytest.raises(DataError, match="has no time of a step"):
        time_budget._median(tmp_path / "metrics.json")
