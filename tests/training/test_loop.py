"""The loop: how a training ends by the errors of others, and where it begins again."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading

import pytest
from detectron2.engine import TrainerBase
from torch import nn

from lambda_det.errors import DiskError, Preempted, WeightsError
from lambda_det.training import background, loop
from lambda_det.training.checkpointer import SafeCheckpointer, last_checkpoint
from lambda_det.training.hooks import RunWriter
from lambda_det.weights.formats import write_torch
from tests.reliability.runs import metrics


class _Trainer(TrainerBase):
    """Saves after the second of six steps, and does ``work`` in the third."""

    def __init__(self, folder, work):
        super().__init__()
        self.checkpointer = SafeCheckpointer(nn.Linear(1, 1), str(folder))
        self.start_iter, self.max_iter, self.stop_signal = 0, 6, 0
        self.work = work
        self.register_hooks([RunWriter(str(folder))])

    def run_step(self):
        self.storage.put_scalar("total_loss", self.iter)
        if self.iter == 1:
            self.save_checkpoint("model_0000001")
        if self.iter == 2:
            self.work(self)

    def save_checkpoint(self, name):
        self.checkpointer.save(name, iteration=self.iter)


def _make_a_mistake(_):
    raise ZeroDivisionError("a mistake")


def _tell_to_stop(trainer):
    trainer.stop_signal = signal.SIGTERM


@pytest.mark.parametrize("work", [_make_a_mistake, _tell_to_stop])
def test_what_led_to_the_end_is_on_record(tmp_path, work):
    """Long before the twentieth step, after which a record would be due."""
    with pytest.raises((ZeroDivisionError, Preempted)):
        loop.run_steps(_Trainer(tmp_path, work))
    assert list(metrics(tmp_path)) == [2]


@pytest.mark.parametrize("work", [lambda _: None, _make_a_mistake])
def test_the_loader_ends_with_the_run(tmp_path, work):
    ended = []

    def batches():
        try:
            yield from range(9)
        finally:
            ended.append(True)

    trainer = _Trainer(tmp_path, work)
    trainer._data_loader_iter_obj = kept = batches()
    next(kept)
    with contextlib.suppress(ZeroDivisionError):
        loop.run_steps(trainer)
    assert ended and trainer._data_loader_iter_obj is None


def _full_disk(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_checkpoint_that_cannot_be_written_ends_the_run_with_the_step(tmp_path, monkeypatch):
    """And not with the next checkpoint, which may be thousands of steps later."""
    monkeypatch.setattr(background, "write_torch", _full_disk)
    trainer = _Trainer(tmp_path, lambda self: self.checkpointer._writer._jobs[0].exception())
    with pytest.raises(DiskError, match=r"model_0000001\.pth could not be written: the disk is"):
        loop.run_steps(trainer)
    assert trainer.iter in (1, 2)  # the thread may be that fast


def test_an_error_waits_for_the_checkpoint_that_is_being_written(tmp_path, monkeypatch):
    gate = threading.Event()

    def write(content, file):
        assert gate.wait(30)
        write_torch(content, file)

    def work(_):
        threading.Timer(0.2, gate.set).start()
        _make_a_mistake(_)

    monkeypatch.setattr(background, "write_torch", write)
    with pytest.raises(ZeroDivisionError):
        loop.run_steps(_Trainer(tmp_path, work))
    assert last_checkpoint(str(tmp_path)) == str(tmp_path / "model_0000001.pth")


def test_an_error_is_not_hidden_by_that_of_its_checkpoint(tmp_path, monkeypatch, caplog):
    # Not before the step has failed, or it would be the first to be told
    monkeypatch.setattr(SafeCheckpointer, "check", lambda self: None)
    monkeypatch.setattr(background, "write_torch", _full_disk)
    with pytest.raises(ZeroDivisionError):
        loop.run_steps(_Trainer(tmp_path, _make_a_mistake))
    assert "model_0000001.pth could not be written: the disk is full" in caplog.text


def test_all_processes_take_the_checkpoint_of_the_first(tmp_path, monkeypatch):
    checkpointer = SafeCheckpointer(nn.Linear(1, 1), str(tmp_path))
    checkpointer.save("model_0000001")
    checkpointer.wait()
    path = str(tmp_path / "model_0000001.pth")
    assert loop.checkpoint_to_resume(str(tmp_path)) == path
    # This is the second one, and its folder is empty or not there
    elsewhere, first = str(tmp_path / "elsewhere"), [path]
    monkeypatch.setattr(loop.comm, "is_main_process", lambda: False)

    def all_gather(own):
        return [first if isinstance(own, list) else own is not None or None, own]

    monkeypatch.setattr(loop.comm, "all_gather", all_gather)
    assert loop.checkpoint_to_resume(elsewhere) == path
    first[0] = f"{elsewhere}/model_0000001.pth"
    with pytest.raises(WeightsError, match=r"Not every process finds the checkpoint .*elsewhere"):
        loop.checkpoint_to_resume(elsewhere)
