"""Saving beside the training: what is written, in which order, and what a crash leaves."""

import errno
import os
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from lambda_det.errors import DiskError
from lambda_det.files import replace_file
from lambda_det.training import checkpointer as checkpointer_module
from lambda_det.training.checkpointer import SafeCheckpointer
from lambda_det.training.run_folder import RunFolder


def _model(value):
    model = nn.Linear(8, 8)
    nn.init.constant_(model.weight, value)
    return model


def _value(path):
    return torch.load(path, weights_only=True)["model"]["weight"][0, 0].item()


@pytest.fixture
def slow(monkeypatch):
    """Writing that waits for an event of the test."""
    gate, begun = threading.Event(), threading.Event()

    def write(*arguments):
        begun.set()
        assert gate.wait(30)
        replace_file(*arguments)

    monkeypatch.setattr(checkpointer_module, "replace_file", write)
    gate.begun = begun
    yield gate
    gate.set()


def test_training_goes_on_while_a_checkpoint_is_written_and_the_next_one_waits(tmp_path, slow):
    model = _model(1.0)
    checkpointer = SafeCheckpointer(model, str(tmp_path))
    checkpointer.save("model_0000001")
    checkpointer.link("model_0000001", "model_best")
    assert slow.begun.wait(30)
    nn.init.constant_(model.weight, 2.0)
    checkpointer.check()
    assert RunFolder(tmp_path).last == ""
    second = threading.Thread(target=checkpointer.save, args=("model_0000002",))
    second.start()
    second.join(0.2)
    assert second.is_alive()
    slow.set()
    second.join(30)
    checkpointer.wait()
    assert _value(tmp_path / "model_0000001.pth") == _value(tmp_path / "model_best.pth") == 1.0
    assert RunFolder(tmp_path).last == str(tmp_path / "model_0000002.pth")
    assert _value(RunFolder(tmp_path).last) == 2.0


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="tells folders by /proc")
def test_the_order_of_a_save(tmp_path, monkeypatch):
    """Contents reach the disk before a name, a name before the pointer, all before a removal."""
    steps = []
    sync, replace, unlink = os.fsync, os.replace, Path.unlink

    def synced(number):
        steps.append("sync " + ("folder" if os.path.isdir(f"/proc/self/fd/{number}") else "file"))
        sync(number)

    def unlinked(path, **options):
        if path.exists():
            steps.append(f"remove {path.name}")
        unlink(path, **options)

    checkpointer = SafeCheckpointer(_model(1.0), str(tmp_path), keep=1)
    checkpointer.save("model_0000001", iteration=1)
    checkpointer.save("model_0000002", iteration=2)
    checkpointer.wait()
    checked = checkpointer_module.check_checkpoint
    monkeypatch.setattr(
        checkpointer_module, "check_checkpoint", lambda path: (steps.append("check"), checked(path))
    )
    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(
        os, "replace", lambda a, b: (steps.append(f"name {Path(b).name}"), replace(a, b))
    )
    monkeypatch.setattr(Path, "unlink", unlinked)
    checkpointer.save("model_0000003", iteration=3)
    checkpointer.wait()
    assert steps == [
        "sync file",
        "check",
        "name model_0000003.pth",
        "sync folder",
        "sync file",
        "name last_checkpoint",
        "sync folder",
        "remove model_0000002.pth",
    ]
    checkpointer.save("model_final", iteration=4)  # which counts among the last
    checkpointer.wait()
    assert steps[-1] == "remove model_0000003.pth"


@pytest.mark.parametrize(
    ("number", "place"),
    [
        (errno.ENOSPC, (checkpointer_module, "replace_file")),
        (errno.EIO, (os, "fsync")),
        (errno.ENOSPC, (os, "replace")),
        (errno.EIO, (RunFolder, "point_to")),
    ],
    ids=["write", "fsync", "replace", "pointer"],
)
def test_an_error_is_one_sentence(tmp_path, monkeypatch, number, place):
    checkpointer = SafeCheckpointer(_model(1.0), str(tmp_path), keep=1)
    checkpointer.save("model_0000001", iteration=1)
    checkpointer.link("model_0000001", "model_best")
    checkpointer.wait()

    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(*place, fail)
    checkpointer.save("model_0000002", iteration=2)
    checkpointer.link("model_0000002", "model_best")  # not done any more
    with pytest.raises(DiskError) as caught:
        checkpointer.save("model_0000003", iteration=3)
    sentence = str(caught.value)
    good = f"The last good checkpoint is {tmp_path / 'model_0000001.pth'}"
    for words in ("model_0000002.pth could not be written", good, "--resume"):
        assert words in sentence
    assert "\n" not in sentence
    monkeypatch.undo()
    assert RunFolder(tmp_path).read_newest().path == str(tmp_path / "model_0000001.pth")
    assert not list(tmp_path.glob("*.tmp"))
    assert os.path.samefile(tmp_path / "model_0000001.pth", tmp_path / "model_best.pth")
    checkpointer.check()  # it is told once
    checkpointer.save("model_0000003", iteration=3)
    checkpointer.wait()
    assert RunFolder(tmp_path).read_newest().path == str(tmp_path / "model_0000003.pth")


def test_what_could_not_be_read_again_is_not_kept(tmp_path):
    """A state that weights_only refuses would make every checkpoint of the run useless."""
    checkpointer = SafeCheckpointer(_model(1.0), str(tmp_path))
    checkpointer.save("model_0000001", hook=threading.Event)
    with pytest.raises(DiskError, match="holds more than tensors"):
        checkpointer.wait()
    assert os.listdir(tmp_path) == []
