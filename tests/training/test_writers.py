"""Event writers by their names: what is refused before a run, and what a resumed run continues."""

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from detectron2.utils.events import EventStorage, EventWriter, TensorboardXWriter

from lambda_det.errors import ConfigError
from lambda_det.training.hooks import RunWriter
from lambda_det.training.writers import check_writers, make_writers
from tests.training.toy import settings

_MADE = []  # the recorders, in the order of time


class Recorder(EventWriter):
    """Records its folder and everything that is written to it."""

    def __init__(self, folder):
        self.folder, self.steps = folder, []
        _MADE.append(self)

    def write(self):
        self.steps.append(self._last_write)


RECORDER = f"{__name__}.Recorder"


def _settings(folder, *writers):
    keys = {"event_writers": "EVENT_WRITERS"}
    return settings(output_dir=str(folder), event_writers=writers, keys=keys)


class _Wandb(ModuleType):
    """The part of wandb that is used here."""

    def __init__(self):
        super().__init__("wandb")
        self.__spec__ = SimpleNamespace(name="wandb")
        self.runs = []

    def init(self, **options):
        run = SimpleNamespace(options=options, logged=[], finish=lambda: None)
        run.log = lambda values, step: run.logged.append((step, values))
        self.runs.append(run)
        return run


@pytest.fixture
def wandb(monkeypatch):
    module = _Wandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_names_that_are_there(tmp_path):
    named = _settings(tmp_path, "tensorboard", RECORDER)
    check_writers(named)
    tensorboard, recorder = make_writers(named, 7, resumed=True)
    assert isinstance(tensorboard, TensorboardXWriter) and recorder.folder == str(tmp_path)
    assert tensorboard._last_write == recorder._last_write == 7
    assert make_writers(_settings(tmp_path), -1, resumed=False) == []


def test_wandb_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"EVENT_WRITERS.*pip install wandb"):
        check_writers(_settings("run", "wandb"))


def test_a_resumed_run_is_the_same_run_of_wandb(wandb, tmp_path):
    for start, end in ((0, 3), (3, 5), (0, 1)):
        with EventStorage(start) as storage:
            named = _settings(tmp_path, "wandb")
            (writer,) = make_writers(named, start - 1, resumed=start > 0)
            for step in range(start, end):
                storage.iter = step
                storage.put_scalar("loss", 10.0 + step)
                writer.write()
            writer.close()
    first, second, other = wandb.runs
    assert (
        other.options["id"] != first.options["id"] == second.options["id"]
        and second.options["resume"] == "allow"
    )
    assert [step for run in (first, second) for step, _ in run.logged] == [0, 1, 2, 3, 4]
    assert first.logged[0] == (0, {"loss": 10.0})


def test_a_run_writes_to_those_that_are_named(tmp_path):
    hook, pictures = RunWriter(), []
    named = replace(_settings(tmp_path, RECORDER), log_period=2)
    trainer = SimpleNamespace(start_iter=0, iter=0, max_iter=4, settings=named)
    hook.trainer = trainer
    with EventStorage(0) as storage:
        storage.put_scalars(total_loss=1.0, lr=0.1, time=0.1)
        hook.before_train()
        for hook.trainer.iter in range(4):
            storage.iter = hook.trainer.iter
            storage.put_image("drawn", np.zeros((3, 1, 1)))
            hook.after_step()
            pictures.append(len(storage._vis_data))
        hook.after_train()
    assert pictures == [1, 0, 1, 0]
    assert len(_MADE[-1].steps) == 3  # twice in the run, once at its end
    assert not list(tmp_path.glob("events*")) and (tmp_path / "metrics.json").exists()
