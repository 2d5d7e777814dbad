"""One training at a time writes to a folder, and a dead one does not keep it."""

import errno
import multiprocessing
import os
import shutil
import signal
import time

import pytest

from lambda_det.errors import ConfigError
from lambda_det.training import run_folder as locks
from lambda_det.training.run_folder import RunLock

pytestmark = pytest.mark.posix
_FORK = multiprocessing.get_context("fork")


def _hold(folder, ready, how):
    """Take the folder, with a child like a loader process, and keep it."""
    with RunLock(str(folder)) as lock:
        lock.acquire()
        process = _FORK.Process(target=time.sleep, args=(1,), daemon=True)
        process.start()
        ready.set()
        time.sleep(60 if how else 0)


@pytest.fixture
def holder(tmp_path):
    """Start a process that has the folder: one that lives, or one that has returned ("")."""
    started = []

    def start(how):
        ready = _FORK.Event()
        process = _FORK.Process(target=_hold, args=(tmp_path, ready, how))
        process.start()
        started.append(process)
        assert ready.wait(30)
        if not how:
            process.join()
        elif how != "lives":
            os.kill(process.pid, signal.Signals[how])
        return process

    yield start
    for process in started:
        process.kill()


def _acquire(folder):
    with RunLock(str(folder)) as lock:
        lock.acquire()
        assert lock._lock.is_locked


def test_nothing_is_made_before_the_folder_is_there(tmp_path):
    with RunLock(str(tmp_path / "run")) as lock:
        lock.acquire()
        assert not (tmp_path / "run").exists()
        (tmp_path / "run").mkdir()
        lock.acquire()
        lock.acquire()
        assert (tmp_path / "run" / "run.lock").exists()
    assert not list((tmp_path / "run").iterdir())


@pytest.mark.parametrize("how", ["lives", "SIGSTOP"])
def test_the_second_is_refused_while_the_first_lives(tmp_path, holder, monkeypatch, how):
    """Also beside a suspended one, and again and again."""
    monkeypatch.setattr(locks, "_SECONDS_TO_LOCK", 0.1)
    holder(how)
    for _ in range(2):
        with pytest.raises(ConfigError) as caught:
            _acquire(tmp_path)
        for words in ("--output", str(tmp_path)):
            assert words in str(caught.value)


@pytest.mark.parametrize("how", ["SIGKILL", ""])
def test_one_that_has_ended_does_not_keep_the_folder(tmp_path, holder, how):
    """Though a process that it forked lives a little longer."""
    holder(how)
    _acquire(tmp_path)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_a_file_system_without_locks_is_warned_of(tmp_path, monkeypatch, caplog, number):
    """Twice: a file that is left must not be taken for a lock."""

    def flock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", flock)
    for _ in range(2):
        caplog.clear()
        RunLock(str(tmp_path)).acquire()
        assert f"{tmp_path} cannot be locked" in caplog.text


def test_the_lock_of_a_successor_stays(tmp_path):
    """Of one that took a folder which was removed beside the first and made again."""
    folder = tmp_path / "run"
    folder.mkdir()
    with RunLock(str(folder)) as first:
        first.acquire()
        shutil.rmtree(folder)
        folder.mkdir()
        with RunLock(str(folder)) as second:
            second.acquire()
            first.__exit__()
            with pytest.raises(ConfigError, match="Another training"):
                _acquire(folder)
    assert not (folder / "run.lock").exists()


@pytest.mark.skipif(getattr(os, "geteuid", int)() == 0, reason="everything belongs to root")
def test_the_file_of_somebody_else_is_refused(tmp_path):
    (tmp_path / "run.lock").touch(0o000)
    with pytest.raises(ConfigError, match=r"run\.lock belongs to somebody"):
        _acquire(tmp_path)
