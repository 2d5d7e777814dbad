"""How processes are started, what is refused before any of them is, and how they end together.

tests/reliability/test_ends.py has the signals to a command with several processes.
"""

import argparse
import functools
import multiprocessing
import os
import signal
import socket
from multiprocessing import resource_tracker

import pytest
import torch
from detectron2.utils import comm

from lambda_det.detection import parser
from lambda_det.distributed import launch as launch_module
from lambda_det.distributed.connection import on_main_process
from lambda_det.distributed.launch import check_device, launch
from lambda_det.distributed.signals import SIGNALS, start_tracker
from lambda_det.errors import ConfigError, DataError, UserError


def _args(*argv: str) -> argparse.Namespace:
    return parser().parse_args(list(argv))


def _note(args):
    rank = comm.get_rank()
    with open(f"{args.opts[1]}/{rank}", "w") as file:
        file.write(f"{rank} {comm.get_local_rank()} of {comm.get_world_size()}")

    def check():
        raise DataError(f"seen by {rank}")

    on_main_process(check)


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_processes_are_connected_and_agree_on_an_error(tmp_path):
    with pytest.raises(DataError, match=r"^seen by 0$"):
        launch(_note, _args("--num-gpus", "2", "FOLDER", str(tmp_path)), device="cpu")
    assert {p.read_text() for p in tmp_path.iterdir()} == {"0 0 of 2", "1 1 of 2"}


def _end(args, *, how):
    if comm.get_rank() == 1:
        how()
    torch.distributed.all_reduce(torch.ones(1))


def _make_a_mistake():
    raise ZeroDivisionError("a mistake")


def _kill_itself():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.posix
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        (_kill_itself, UserError, r"Process 1 of 2 \(pid \d+\) .* SIGKILL.* memory.* --resume"),
        (_make_a_mistake, RuntimeError, r"Process 1 of 2 .*\n(.*\n)+ZeroDivisionError: a mistake"),
        (functools.partial(os._exit, 3), UserError, r"Process 1 of 2 .* status 3,.* --resume"),
    ],
    ids=["killed", "mistake", "status"],
)
def test_the_cause_is_named_and_not_what_followed(how, error, words):
    before = {*multiprocessing.active_children()}
    with pytest.raises(error, match=words):
        launch(functools.partial(_end, how=how), _args("--num-gpus", "2"), device="cpu")
    assert not {*multiprocessing.active_children()} - before


def _machine(folder, rank, port, num_gpus):
    """The command of one of two machines."""
    words = ["--num-gpus", str(num_gpus), "--num-machines", "2", "--machine-rank", str(rank)]
    words += ["--dist-url", f"tcp://localhost:{port}", "FOLDER", str(folder)]
    try:
        launch(_note, _args(*words), device="cpu")
    except UserError as error:
        (folder / f"machine {rank}").write_text(str(error))


@pytest.mark.slow
@pytest.mark.posix
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("of_second", [1, 2])
def test_two_machines_meet_and_have_the_same_number_of_processes(tmp_path, of_second):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    start = multiprocessing.get_context("fork").Process
    machines = [
        start(target=_machine, args=(tmp_path, rank, port, num_gpus))
        for rank, num_gpus in ((0, 1), (1, of_second))
    ]
    for machine in machines:
        machine.start()
    if of_second == 1:
        for machine in machines:
            machine.join(60)
        assert (tmp_path / "0").read_text() == "0 0 of 2"
        assert (tmp_path / "1").read_text() == "1 0 of 2"
        assert {(tmp_path / f"machine {r}").read_text() for r in (0, 1)} == {"seen by 0"}
    else:
        machines[1].join(60)
        machines[0].kill()  # it waits for the second
        assert "--num-gpus is 2 here and 1 on" in (tmp_path / "machine 1").read_text()


@pytest.mark.posix
@pytest.mark.usefixtures("forked")
def test_those_that_started_end_where_another_cannot(monkeypatch):
    started, start = [], multiprocessing.process.BaseProcess.start

    def second_fails(process):
        if started:
            raise OSError(12, "Cannot allocate memory")
        start(process)
        started.append(process)

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", second_fails)
    with pytest.raises(OSError, match="allocate"):
        launch(_note, _args("--num-gpus", "2"), device="cpu")
    started[0].join(30)
    assert started[0].exitcode == -signal.SIGKILL


@pytest.mark.posix
def test_python_s_tracker_of_shared_memory_outlives_a_scheduler_s_signals(monkeypatch):
    """It would print a stack trace for each semaphore when it dies."""
    tracker = resource_tracker.ResourceTracker()
    monkeypatch.setattr(resource_tracker, "ensure_running", tracker.ensure_running)
    start_tracker()
    for number in SIGNALS:
        os.kill(tracker._pid, number)
    os.close(tracker._fd)  # after which it ends by itself
    assert os.waitpid(tracker._pid, 0)[1] == 0
    tracker._fd = tracker._pid = None  # its destructor has nothing left to do


def test_one_process_is_this_one():
    seen = []
    launch(seen.append, args := _args(), device="cpu")
    assert seen == [args]


@pytest.mark.parametrize(
    ("device", "num_gpus", "existing", "named"),
    [
        ("cuda", 1, 0, "sees none here: give --device cpu in its place, or MODEL.DEVICE cpu"),
        ("cuda", 4, 2, "--num-gpus 4 .*sees 2"),
        ("cuda:3", 1, 2, "cuda:3 .*sees 2"),
        ("cuda:999", 1, 2, "cuda:999 .*sees 2"),
        ("cuda:0", 2, 2, "cuda:0 with --num-gpus 2"),
        ("graphics", 1, 0, "graphics"),
    ],
)
def test_device_that_does_not_exist(monkeypatch, device, num_gpus, existing, named):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: existing > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: existing)
    with pytest.raises(ConfigError, match=named):
        check_device(device, num_gpus)
    assert check_device("cpu", 4).type == "cpu"


@pytest.fixture
def torchrun(monkeypatch):
    """As if torchrun had started this process; connecting it is left out."""
    for name, value in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(launch_module, "run_connected", lambda work, *_: work())


def test_a_process_of_torchrun_does_the_work(torchrun):
    seen = []
    launch(seen.append, args := _args(), device="cpu")
    assert seen == [args]
    with pytest.raises(ConfigError, match="--num-gpus"):
        launch(_note, _args("--num-gpus", "2"), device="cpu")
