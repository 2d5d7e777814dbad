"""Event writers by their names: what is refused before a run, and what a resumed run continues."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from detectron2.utils.events import EventStorage, EventWriter, TensorboardXWriter

from lambda_det.training.hooks import RunWriter
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


def _writers(named, last_step):
    """Those of a run that goes on after ``last_step``, without that of metrics.json."""
    hook = RunWriter()
    hook.trainer = SimpleNamespace(start_iter=last_step + 1, max_iter=20, settings=named)
    hook.before_train()
    metrics, *others = hook._files
    metrics.close()
    return others


def test_names_that_are_there(tmp_path):
    tensorboard, recorder = _writers(_settings(tmp_path, "tensorboard", RECORDER), 7)
    assert isinstance(tensorboard, TensorboardXWriter) and recorder.folder == str(tmp_path)
    assert tensorboard._last_write == recorder._last_write == 7
    tensorboard.close()  # else its thread writes to the folder after the test
    assert _writers(_settings(tmp_path), -1) == []


def test_tensorboard_forgets_what_a_killed_run_wrote_after_its_checkpoint(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for last_step in (-1, 3):
        (writer,) = _writers(_settings(tmp_path, "tensorboard"), last_step)
        for step in range(last_step + 1, last_step + 7):
            writer._writer.add_scalar("total_loss", last_step, step)
        writer.close()
    found = accumulator.EventAccumulator(str(tmp_path))
    found.Reload()
    steps = [(event.step, event.value) for event in found.Scalars("total_loss")]
    assert steps == [(step, -1 if step < 4 else 3) for step in range(10)]


def test_a_run_writes_to_those_that_are_named(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    hook, images = RunWriter(), []
    named = replace(_settings(tmp_path, RECORDER), log_period=2)
    trainer = SimpleNamespace(start_iter=0, iter=0, max_iter=4, settings=named)
    trainer.evaluation = SimpleNamespace(is_due=lambda: trainer.iter in (2, 3))
    hook.trainer = trainer
    with EventStorage(0) as storage:
        storage.put_scalars(total_loss=1.0, lr=0.1, time=0.1)
        hook.before_train()
        trainer.storage = storage
        for hook.trainer.iter in range(4):
            storage.iter = hook.trainer.iter
            if trainer.iter == 1:
                storage.put_scalars(smoothing_hint=False, **{"validation/total_loss": 2.0})
            storage.put_image("drawn", np.zeros((3, 1, 1)))
            hook.after_step()
            images.append(len(storage._vis_data))
        hook.after_train()
    assert images == [1, 0, 1, 0]
    assert len(caplog.records) == 3 and "validation/total_loss" not in caplog.text
    assert '"validation/total_loss": 2.0' in (tmp_path / "metrics.json").read_text()
    assert len(_MADE[-1].steps) == 4  # in each period, after each evaluation, at the end
    assert not list(tmp_path.glob("events*")) and (tmp_path / "metrics.json").exists()
