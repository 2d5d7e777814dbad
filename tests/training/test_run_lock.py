"""One training at a time writes to a folder, and a dead one does not keep it."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import socket
import threading
import time
import types
from pathlib import Path

import pytest

from lambda_det.errors import ConfigError
from lambda_det.training import run_lock as locks
from lambda_det.training.run_lock import RunLock, run_lock

pytest.importorskip("fcntl")
_FORK = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(locks, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(locks, "WATCH_SECONDS", 0.5)


def _hold(folder, ready, child):
    """Take the folder, with a child like a loader process, and keep it."""
    with run_lock(str(folder), "OUTPUT_DIR") as lock:
        lock.acquire()
        if child:
            process = _FORK.Process(target=time.sleep, args=(60,))
            process.start()
            ready.send(process.pid)
        ready.send(0)
        time.sleep(60)


@pytest.fixture
def holder(tmp_path):
    """Start a process that has the folder; killed in the end."""
    started = []

    def start(child=False):
        receiver, sender = _FORK.Pipe(duplex=False)
        process = _FORK.Process(target=_hold, args=(tmp_path, sender, child))
        process.start()
        started.append(process.pid)
        while pid := receiver.recv():
            started.append(pid)
        return process

    yield start
    for pid in started:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _write(folder: Path, **owner) -> None:
    content = {"host": "elsewhere", "process": 7, "count": 1, **owner}
    Path(folder, locks.NAME).write_text(json.dumps(content))


def _is_refused_elsewhere(folder: Path) -> bool:
    """Whether another process may not take it."""

    def acquire():
        with pytest.raises(ConfigError):
            RunLock(str(folder), "OUTPUT_DIR").acquire()

    process = _FORK.Process(target=acquire)
    process.start()
    process.join()
    return process.exitcode == 0


def test_nothing_is_made_before_the_folder_is_there(tmp_path):
    with run_lock(str(tmp_path / "run"), "OUTPUT_DIR") as lock:
        lock.acquire()
        assert not (tmp_path / "run").exists()
        (tmp_path / "run").mkdir()
        lock.acquire()
        assert (tmp_path / "run" / locks.NAME).exists()
    assert not list((tmp_path / "run").iterdir())


def test_the_second_is_refused_while_the_first_lives(tmp_path, holder):
    first = holder()
    with pytest.raises(ConfigError) as caught:
        RunLock(str(tmp_path), "OUTPUT_DIR").acquire()
    for words in ("OUTPUT_DIR", str(tmp_path), str(first.pid), socket.gethostname()):
        assert words in str(caught.value)


def test_a_suspended_run_keeps_its_folder(tmp_path, holder):
    first = holder()
    os.kill(first.pid, signal.SIGSTOP)
    with pytest.raises(ConfigError, match=str(first.pid)):
        RunLock(str(tmp_path), "OUTPUT_DIR").acquire()


@pytest.fixture
def no_waiting(monkeypatch):
    monkeypatch.setattr(RunLock, "_watch", lambda *_: pytest.fail("it waits"))


def test_a_kill_frees_the_folder_though_loader_processes_live(tmp_path, holder, no_waiting):
    first = holder(child=True)
    first.kill()
    first.join()
    with run_lock(str(tmp_path), "OUTPUT_DIR") as lock:
        lock.acquire()
        assert lock._file is not None


def test_the_owner_of_another_machine_is_seen_to_count(tmp_path):
    """As on a network file system that does not know the locks of other machines."""
    _write(tmp_path)
    threading.Timer(0.2, _write, (tmp_path,), {"count": 2}).start()
    with pytest.raises(ConfigError, match="process 7 on elsewhere"):
        RunLock(str(tmp_path), "OUTPUT_DIR").acquire()


@pytest.mark.parametrize("content", ['{"host": "elsewhere", "process": 7, "count": 3}', "{", "[1]"])
def test_the_file_of_a_dead_machine_is_taken_over(tmp_path, content):
    (tmp_path / locks.NAME).write_text(content)
    with run_lock(str(tmp_path), "OUTPUT_DIR") as lock:
        lock.acquire()
        own = (tmp_path / locks.NAME).read_text()
        assert json.loads(own)["process"] == os.getpid()
        # By its count: the system's lock was given up when this process read and closed the file
        assert _is_refused_elsewhere(tmp_path)


def test_a_restarted_container_has_host_and_number_of_the_last_one(tmp_path, no_waiting):
    _write(tmp_path, host=socket.gethostname(), process=os.getpid())
    with run_lock(str(tmp_path), "OUTPUT_DIR") as lock:
        lock.acquire()
        assert lock._file is not None


@pytest.mark.parametrize("alive", [True, False])
def test_a_file_system_without_locks(tmp_path, holder, alive, monkeypatch):
    monkeypatch.setattr(locks, "_lock", lambda file: True)
    first = holder()
    if not alive:
        first.kill()
        first.join()
        with run_lock(str(tmp_path), "OUTPUT_DIR") as lock:
            lock.acquire()
        return
    with pytest.raises(ConfigError, match=str(first.pid)):
        RunLock(str(tmp_path), "OUTPUT_DIR").acquire()


def test_an_owner_that_ends_is_not_waited_for_to_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "WATCH_SECONDS", 100)
    _write(tmp_path)
    threading.Timer(0.2, (tmp_path / locks.NAME).unlink).start()
    with run_lock(str(tmp_path), "OUTPUT_DIR") as lock:
        lock.acquire()
        assert lock._file is not None


class _Windows(types.ModuleType):
    """Its ``os``: a file that is not opened as binary is read and written with ends of lines."""

    O_BINARY = 1 << 40
    binary = False

    def __getattr__(self, name):
        return getattr(os, name)

    def open(self, path, flags, mode):
        self.binary = bool(flags & self.O_BINARY)
        return os.open(path, flags & ~self.O_BINARY, mode)

    def read(self, file, size):
        found = os.read(file, size)
        return found if self.binary else found.replace(b"\r\n", b"\n")

    def write(self, file, content):
        return os.write(file, content if self.binary else content.replace(b"\n", b"\r\n"))


def test_a_dead_run_does_not_keep_its_folder_on_windows(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "os", _Windows("os"))
    monkeypatch.setattr(locks, "fcntl", None)
    with monkeypatch.context() as elsewhere, run_lock(str(tmp_path), "OUTPUT_DIR") as lock:
        elsewhere.setattr(socket, "gethostname", lambda: "elsewhere")
        lock.acquire()
        left = (tmp_path / locks.NAME).read_bytes()
    (tmp_path / locks.NAME).write_bytes(left)
    with run_lock(str(tmp_path), "OUTPUT_DIR") as lock:
        lock.acquire()
        assert json.loads((tmp_path / locks.NAME).read_bytes())["process"] == os.getpid()
