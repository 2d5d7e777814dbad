"""Processes that end together: what the others do, and what is said, when one is gone."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from detectron2.utils import comm

from lambda_det.detection import parser
from lambda_det.distributed import connection, preemption, together
from lambda_det.distributed.launch import launch
from lambda_det.errors import (
    PREEMPTED_STATUS,
    ConfigError,
    DataError,
    LostProcessError,
    Preempted,
    UserError,
)

NAMES = ["Process 0 of 2", "Process 1 of 2"]


@pytest.fixture(autouse=True)
def forked(monkeypatch):
    """Forked processes import nothing, which a spawned one takes seconds for."""
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr(together.mp, "get_context", lambda _: fork)


def _die_of(number: int) -> None:
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _wait_until(fact: Callable[[], object], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not fact():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.02)


def _start_worker(folder: Path) -> int:
    """A loader's worker, that ends when the test does."""
    work = functools.partial(_wait_until, (folder / "over").exists)
    worker = multiprocessing.get_context("fork").Process(target=work, daemon=True)
    worker.start()
    return worker.pid


def _one_dies(index: int, *, folder: Path, number: int) -> None:
    worker = _start_worker(folder)  # which knows nothing yet of the end of its process
    (folder / str(index)).write_text(f"{os.getpid()} {worker}")
    if index == 1:
        _wait_until((folder / "0").exists)
        _die_of(number)
    with preemption.listening():  # which SIGTERM does not end
        time.sleep(600)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGKILL, r"^Process 1 of 2 \(pid \d+\) was killed by SIGKILL, as a machine does"),
        (signal.SIGSEGV, r"was killed by SIGSEGV, and the others were ended with it\. .*--resume"),
        (signal.SIGABRT, r"as PyTorch does when a collective call takes too long"),
    ],
)
def test_one_is_killed_and_the_other_hangs(tmp_path, monkeypatch, number, words):
    monkeypatch.setattr(together, "GRACE", 0.3)
    with pytest.raises(UserError, match=words):
        together.run_together(functools.partial(_one_dies, folder=tmp_path, number=number), NAMES)
    pids = [int(pid) for index in range(2) for pid in (tmp_path / str(index)).read_text().split()]
    assert [_alive(pid) for pid in pids] == [False, True] * 2
    (tmp_path / "over").touch()


def _raises(index: int, *, what: list[BaseException | int | None], order: list[int]) -> None:
    time.sleep(0.3 * order.index(index))
    if isinstance(what[index], int):
        _die_of(what[index])
    if what[index] is not None:
        raise what[index]


LOST = LostProcessError("has lost the connection")
DATA = DataError("a broken image")
STOP = Preempted("Stopped by SIGTERM after step 3")


@pytest.mark.parametrize(
    ("what", "order", "raised", "words"),
    [
        ([LOST, DATA], [0, 1], DataError, "a broken image"),
        ([DATA, LOST], [1, 0], DataError, "a broken image"),
        ([LOST, signal.SIGKILL], [0, 1], UserError, "Process 1 of 2 .* SIGKILL"),
        ([LOST, signal.SIGABRT], [1, 0], LostProcessError, "has lost"),
        ([DATA, ConfigError("later")], [0, 1], DataError, "a broken image"),
        ([DATA, ConfigError("first")], [1, 0], ConfigError, "first"),
        ([STOP, STOP], [0, 1], Preempted, "after step 3"),
        ([STOP, Preempted("before it is saved")], [1, 0], Preempted, "after step 3"),
        ([LOST, STOP], [0, 1], Preempted, "after step 3"),
        ([STOP, DATA], [0, 1], DataError, "a broken image"),
        ([ZeroDivisionError("a mistake"), LOST], [0, 1], Exception, "(?s)Traceback.*a mistake"),
    ],
)
def test_the_cause_is_told_and_not_what_followed(what, order, raised, words):
    with pytest.raises(raised, match=words):
        together.run_together(functools.partial(_raises, what=what, order=order), NAMES)


def test_of_two_found_at_once_the_one_without_a_word_was_the_first():
    context, members = multiprocessing.get_context("fork"), []
    work = functools.partial(_raises, what=[DATA, signal.SIGKILL], order=[0, 1])
    for index, name in enumerate(NAMES):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=together._member, args=(work, index, sender, os.getpid()))
        process.start()
        process.join()
        members.append(together._Member(index, name, process, receiver))
    assert together._wait(members, []) == (members[::-1], set())


def _sleeps(index: int, *, folder: Path) -> None:
    (folder / f"{index}.txt").write_text(str(os.getpid()))
    with preemption.listening():
        time.sleep(600)


def test_an_interrupted_parent_leaves_nobody(tmp_path, monkeypatch):
    """Ctrl-C reaches the processes by themselves, but they may not heed it."""

    def interrupted(*_):
        _wait_until(lambda: all(path.read_text() for path in files))
        raise KeyboardInterrupt

    files = [tmp_path / f"{index}.txt" for index in range(2)]
    for path in files:
        path.touch()
    monkeypatch.setattr(together, "GRACE", 0.2)
    monkeypatch.setattr(together, "_wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        together.run_together(functools.partial(_sleeps, folder=tmp_path), NAMES)
    _wait_until(lambda: not any(_alive(int(path.read_text())) for path in files), seconds=10)


def test_all_return(tmp_path):
    together.run_together(functools.partial(_raises, what=[None, None], order=[0, 1]), NAMES)


def _works_until_told(index: int, *, folder: Path, heeds: bool) -> None:
    """Like a training with a loader worker; a signal stops it where ``heeds``."""
    worker = _start_worker(folder)
    for number in preemption.SIGNALS:
        signal.signal(number, signal.SIG_DFL)  # as in a process that is not forked
    (folder / f"{index}.txt").write_text(f"{os.getpid()} {worker}")
    if not heeds:
        time.sleep(600)
    with preemption.listening():
        (folder / f"{index}.ready").touch()
        _wait_until(preemption.received)
        time.sleep(0.5 * index)  # the other one is still saving
        raise Preempted(f"Stopped by {signal.Signals(preemption.received()).name}")


def _start_parent(folder: Path, *, heeds: bool) -> tuple[int, list[int], list[int]]:
    """A process that runs two; its id, theirs, and those of their workers."""
    parent = os.fork()
    if parent == 0:
        try:
            for number in preemption.SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            work = functools.partial(_works_until_told, folder=folder, heeds=heeds)
            together.run_together(work, NAMES)
        except Preempted as stop:
            (folder / "said").write_text(str(stop))
            os._exit(PREEMPTED_STATUS)
        finally:
            os._exit(9)
    suffix = "ready" if heeds else "txt"
    _wait_until(lambda: len(list(folder.glob(f"*.{suffix}"))) == 2)
    _wait_until(lambda: all(len(p.read_text().split()) == 2 for p in folder.glob("*.txt")))
    pids = [int(pid) for path in folder.glob("*.txt") for pid in path.read_text().split()]
    assert all(map(_alive, pids))
    return parent, pids[::2], pids[1::2]


def _status(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("number", preemption.SIGNALS)
def test_a_signal_to_the_parent_reaches_all_who_save_and_stop(tmp_path, number):
    parent, pids, workers = _start_parent(tmp_path, heeds=True)
    os.kill(parent, number)
    assert _status(parent) == PREEMPTED_STATUS
    assert (tmp_path / "said").read_text() == f"Stopped by {signal.Signals(number).name}"
    assert not any(map(_alive, [*pids, *workers]))


def test_a_signal_before_there_is_anything_to_save_ends_all_as_it_would_one(tmp_path):
    parent, pids, _ = _start_parent(tmp_path, heeds=False)
    os.kill(parent, signal.SIGTERM)
    assert _status(parent) == -signal.SIGTERM
    assert not any(map(_alive, pids))
    (tmp_path / "over").touch()


def test_a_signal_that_has_ended_the_processes_already_finds_nobody():
    gone = multiprocessing.get_context("fork").Process(target=_die_of, args=(signal.SIGTERM,))
    gone.start()
    gone.join()
    receiver, _ = multiprocessing.Pipe(duplex=False)
    member = together._Member(0, "Process 0 of 1", gone, receiver)
    assert together._wait([member], [signal.SIGTERM]) == ([member], {signal.SIGTERM})


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="prctl is Linux's")
def test_nobody_outlives_a_parent_that_is_killed(tmp_path):
    parent, pids, _ = _start_parent(tmp_path, heeds=True)
    os.kill(parent, signal.SIGKILL)
    assert _status(parent) == -signal.SIGKILL
    _wait_until(lambda: not any(map(_alive, pids)), seconds=20)
    (tmp_path / "over").touch()


def _collective(args) -> None:
    if comm.get_rank() == 1:
        os._exit(0)
    dist.all_reduce(torch.ones(3))


def test_a_lost_connection_is_one_sentence():
    """The one that went says nothing and is no failure to the parent: what gloo raised is left."""
    args = parser().parse_args(["--num-gpus", "2"])
    words = r"^Process 0 of 2 has lost the connection to another.*gloo.* --resume continues"
    with pytest.raises(LostProcessError, match=words):
        launch(_collective, args, device="cpu")


@pytest.mark.parametrize(
    ("message", "is_lost"),
    [
        # As gloo and NCCL put it
        ("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:2", True),
        ("[/pytorch/gloo/transport/tcp/pair.cc:152] Application timeout caused pair closure", True),
        ("Gloo AllReduce failed: Connection reset by peer", True),
        ("Timed out waiting 1800000ms for recv operation to complete", True),
        ("ncclRemoteError: A call failed possibly due to a network error", True),
        ("NCCL communicator was aborted on rank 0.", True),
        ("Watchdog caught a timeout: OpType=ALLREDUCE timed out after 1800000 ms", True),
        ("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)", False),
        ("CUDA error: an illegal memory access was encountered", False),
        ("DataLoader timed out after 60 seconds", False),
    ],
)
def test_a_lost_connection_is_told_from_a_mistake(monkeypatch, message, is_lost):
    monkeypatch.setattr(connection, "_store", lambda *_: None)
    for module, name in (
        (dist, "init_process_group"),
        (comm, "create_local_process_group"),
        (comm, "synchronize"),
    ):
        monkeypatch.setattr(module, name, lambda *_, **__: None)

    def work():
        raise RuntimeError(message)

    with pytest.raises(LostProcessError if is_lost else RuntimeError) as caught:
        connection.run_connected(work, "cpu", 0, 2, 0, 2, "env://")
    assert isinstance(caught.value, LostProcessError) == is_lost and message in str(caught.value)


def test_each_attempt_of_torchrun_reads_its_own_addresses_alone(monkeypatch):
    """Those of the attempt before are of processes that are gone; its store is the same."""
    shared = dist.HashStore()
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(shared, 0, 2)]))

    def store(attempt, world_size=2):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        return connection._store("env://", 0, world_size)

    store(0).set("address", "old")
    assert store(0).check(["address"])
    assert not store(1).check(["address"]) and not store(0, 3).check(["address"])
