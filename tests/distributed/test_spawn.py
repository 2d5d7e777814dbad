"""Processes that end together: which error is raised, and that none of them is left."""

import functools
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from lambda_det.distributed import signals, spawn
from lambda_det.errors import (
    PREEMPTED_STATUS,
    ConfigError,
    DataError,
    LostProcessError,
    Preempted,
    UserError,
)
from tests.processes import is_alive, wait_until

NAMES = ["Process 0 of 2", "Process 1 of 2"]


pytestmark = [pytest.mark.posix, pytest.mark.usefixtures("forked")]


def _die_of(name: str) -> None:
    number = signal.Signals[name]
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _start_worker(folder: Path) -> int:
    """Start what stands for a loader worker: it ends when the test does."""
    work = functools.partial(wait_until, (folder / "over").exists)
    worker = multiprocessing.get_context("fork").Process(target=work, daemon=True)
    worker.start()
    return worker.pid


def _one_dies(index: int, *, folder: Path, name: str) -> None:
    worker = _start_worker(folder)  # which does not notice that this process ends
    (folder / str(index)).write_text(f"{os.getpid()} {worker}")
    if index == 1:
        wait_until((folder / "0").exists)
        _die_of(name)
    with signals.catch_signals():  # which makes SIGTERM harmless
        time.sleep(600)


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("SIGKILL", r"^Process 1 of 2 \(pid \d+\) .* SIGKILL.* memory.* --resume"),
        ("SIGSEGV", r"SIGSEGV"),
        ("SIGABRT", r"SIGABRT.* collective call"),
    ],
)
def test_one_is_killed_and_the_other_hangs(tmp_path, monkeypatch, name, named):
    monkeypatch.setattr(spawn, "GRACE", 0.3)
    with pytest.raises(UserError, match=named):
        spawn.spawn(functools.partial(_one_dies, folder=tmp_path, name=name), NAMES)
    pids = [int(pid) for index in range(2) for pid in (tmp_path / str(index)).read_text().split()]
    assert [is_alive(pid) for pid in pids] == [False, True] * 2
    (tmp_path / "over").touch()


def _note_start_method(index: int, *, folder: Path) -> None:
    (folder / str(index)).write_text(multiprocessing.get_start_method())


def test_loader_workers_start_as_they_do_in_one_process(tmp_path):
    """And not as the processes do, which here are forked."""
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method("spawn", force=True)
    try:
        spawn.spawn(functools.partial(_note_start_method, folder=tmp_path), NAMES)
    finally:
        multiprocessing.set_start_method(before, force=True)
    assert {(tmp_path / str(index)).read_text() for index in range(2)} == {"spawn"}


def _raises(index: int, *, what: list[BaseException | str | None], order: list[int]) -> None:
    time.sleep(0.3 * order.index(index))
    if isinstance(what[index], str):
        _die_of(what[index])
    if what[index] is not None:
        raise what[index]


LOST = LostProcessError("has lost the connection")
DATA = DataError("a broken image")
STOP = Preempted("Stopped by SIGTERM after step 3")


@pytest.mark.parametrize(
    ("raised_by", "order", "raised", "named"),
    [
        ([LOST, DATA], [0, 1], DataError, "a broken image"),
        ([DATA, LOST], [1, 0], DataError, "a broken image"),
        ([LOST, "SIGKILL"], [0, 1], UserError, "Process 1 of 2 .* SIGKILL"),
        ([LOST, "SIGABRT"], [1, 0], LostProcessError, "has lost"),
        ([DATA, ConfigError("later")], [0, 1], DataError, "a broken image"),
        ([DATA, ConfigError("first")], [1, 0], ConfigError, "first"),
        ([STOP, STOP], [0, 1], Preempted, "after step 3"),
        ([STOP, Preempted("before it is saved")], [1, 0], Preempted, "after step 3"),
        ([LOST, STOP], [0, 1], Preempted, "after step 3"),
        ([STOP, DATA], [0, 1], DataError, "a broken image"),
        ([ZeroDivisionError("a mistake"), LOST], [0, 1], Exception, "(?s)Traceback.*a mistake"),
    ],
)
def test_the_cause_is_raised_and_not_what_followed(raised_by, order, raised, named):
    with pytest.raises(raised, match=named):
        spawn.spawn(functools.partial(_raises, what=raised_by, order=order), NAMES)


def _ended(work, names):
    """Processes that did some work and have ended, and what they have sent."""
    context = multiprocessing.get_context("fork")
    receivers, senders = zip(*(context.Pipe(duplex=False) for _ in names), strict=True)
    processes = []
    for index in range(len(names)):
        about = (index, work, senders, os.getpid(), "fork")
        processes.append(context.Process(target=spawn._run, args=about))
        processes[-1].start()
        processes[-1].join()
    return processes, receivers


def test_of_two_that_ended_the_killed_one_was_the_first():
    work = functools.partial(_raises, what=[DATA, "SIGKILL"], order=[0, 1])
    ended, passed_on = spawn._wait(*_ended(work, NAMES), [])
    assert [end.index for end in ended] == [1, 0] and passed_on == set()


def _sleeps(index: int, *, folder: Path) -> None:
    (folder / f"{index}.txt").write_text(str(os.getpid()))
    with signals.catch_signals():
        time.sleep(600)


def test_interrupted_parent_leaves_no_process(tmp_path, monkeypatch):
    """Ctrl-C reaches the processes, too, but they may ignore it."""

    def interrupted(*_):
        wait_until(lambda: all(path.read_text() for path in files))
        raise KeyboardInterrupt

    files = [tmp_path / f"{index}.txt" for index in range(2)]
    for path in files:
        path.touch()
    monkeypatch.setattr(spawn, "GRACE", 0.2)
    monkeypatch.setattr(spawn, "_wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        spawn.spawn(functools.partial(_sleeps, folder=tmp_path), NAMES)
    wait_until(lambda: not any(is_alive(int(path.read_text())) for path in files), seconds=10)


def _works_until_signal(index: int, *, folder: Path, catches: bool) -> None:
    """Stands for a training with a loader worker, before its loop or (``catches``) in it."""
    worker = _start_worker(folder)
    for number in signals.SIGNALS:
        signal.signal(number, signal.SIG_DFL)  # as in a process that is not forked
    (folder / f"{index}.txt").write_text(f"{os.getpid()} {worker}")
    if not catches:
        time.sleep(600)
    with signals.catch_signals():
        (folder / f"{index}.ready").touch()
        wait_until(signals.received_signal)
        time.sleep(0.5 * index)  # rank 1 ends later
        raise Preempted(f"Stopped by {signal.Signals(signals.received_signal()).name}")


def _start_parent(folder: Path, *, catches: bool) -> tuple[int, list[int], list[int]]:
    """A process that runs two; its id, theirs, and those of their workers."""
    parent = os.fork()
    if parent == 0:
        try:
            for number in signals.SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            work = functools.partial(_works_until_signal, folder=folder, catches=catches)
            spawn.spawn(work, NAMES)
        except Preempted as stop:
            (folder / "message").write_text(str(stop))
            os._exit(PREEMPTED_STATUS)
        finally:
            os._exit(9)
    suffix = "ready" if catches else "txt"
    wait_until(lambda: len(list(folder.glob(f"*.{suffix}"))) == 2)
    wait_until(lambda: all(len(p.read_text().split()) == 2 for p in folder.glob("*.txt")))
    pids = [int(pid) for path in folder.glob("*.txt") for pid in path.read_text().split()]
    assert all(map(is_alive, pids))
    return parent, pids[::2], pids[1::2]


def _status(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("number", signals.SIGNALS)
def test_signal_to_the_parent_preempts_all(tmp_path, number):
    parent, pids, workers = _start_parent(tmp_path, catches=True)
    os.kill(parent, number)
    assert _status(parent) == PREEMPTED_STATUS
    assert (tmp_path / "message").read_text() == f"Stopped by {signal.Signals(number).name}"
    assert not any(map(is_alive, [*pids, *workers]))


def test_signal_before_the_training_loop_ends_all(tmp_path):
    parent, pids, _ = _start_parent(tmp_path, catches=False)
    os.kill(parent, signal.SIGTERM)
    assert _status(parent) == -signal.SIGTERM
    assert not any(map(is_alive, pids))
    (tmp_path / "over").touch()


def test_signal_that_has_already_ended_the_processes():
    work = functools.partial(_raises, what=["SIGTERM"], order=[0])
    ended, passed_on = spawn._wait(*_ended(work, NAMES[:1]), [signal.SIGTERM])
    assert [end.status for end in ended] == [-signal.SIGTERM] and passed_on == {signal.SIGTERM}


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="prctl is Linux's")
def test_no_process_outlives_a_killed_parent(tmp_path):
    parent, pids, _ = _start_parent(tmp_path, catches=True)
    os.kill(parent, signal.SIGKILL)
    assert _status(parent) == -signal.SIGKILL
    wait_until(lambda: not any(map(is_alive, pids)), seconds=20)
    (tmp_path / "over").touch()
