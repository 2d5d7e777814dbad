"""Signals of schedulers: noted, raised at once where that is wanted, and deadly the second time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from lambda_det.distributed import preemption
from lambda_det.distributed.preemption import SIGNALS, at_once, listening, received
from lambda_det.errors import Preempted


def _tell(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_is_noted_and_forgotten_afterwards(number):
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with listening():
            assert received() == 0
            _tell(number)
            assert received() == number
            with listening():  # within itself it changes nothing
                assert received() == number
            assert received() == number
        assert received() == 0
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_where_all_is_saved_the_work_ends_at_once():
    def work():
        _tell(signal.SIGUSR1)
        pytest.fail("not heeded")

    with listening():
        assert at_once(lambda: 5) == 5
        with pytest.raises(Preempted) as caught:
            at_once(work)
        assert caught.value.args == (signal.SIGUSR1,)
        with pytest.raises(Preempted):  # it came before
            at_once(lambda: pytest.fail("not heeded"))


def _takes_it_for_an_error():
    try:
        _tell()
        pytest.fail("not heeded")
    except Exception:
        pytest.fail("taken for an error")


def _loses_it():
    class Noisy:
        def __del__(self):  # what it raises is printed and forgotten
            _tell()
            for _ in range(100):  # a handler runs between two operations of Python
                pass

    Noisy()
    return "a result"


def _makes_an_error_of_it():
    try:
        _tell()
        pytest.fail("not heeded")
    except BaseException as error:
        raise RuntimeError("the other process is gone") from error


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("work", [_takes_it_for_an_error, _loses_it, _makes_an_error_of_it])
def test_nobody_can_keep_the_wish_from_us(work):
    with listening():
        with pytest.raises(Preempted) as caught:
            at_once(work)
        assert caught.value.args == (signal.SIGTERM,)


def test_errors_of_the_work_are_its_own():
    with listening():
        with pytest.raises(ZeroDivisionError):
            at_once(lambda: 1 / 0)
        _tell()  # no longer at once
        assert received() == signal.SIGTERM


def test_the_same_wish_by_two_ways_is_one():
    with listening():
        _tell(signal.SIGUSR1)
        _tell(signal.SIGTERM)
        assert received() == signal.SIGUSR1


def test_outside_of_the_main_thread_nothing_changes():
    before, seen = signal.getsignal(signal.SIGTERM), []

    def work() -> None:
        with listening():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]


_SCRIPT = """
import importlib.util, os, signal, sys, types
errors = types.ModuleType("lambda_det.errors")
errors.Preempted = type("Preempted", (Exception,), {})
sys.modules |= {"lambda_det": types.ModuleType("lambda_det"), "lambda_det.errors": errors}
spec = importlib.util.spec_from_file_location("preemption", sys.argv[1])
preemption = importlib.util.module_from_spec(spec)
spec.loader.exec_module(preemption)
preemption._SECONDS_OF_ONE_WISH = -1
with preemption.listening():
    if sys.argv[2] == "worker":
        worker = os.fork()
        if not worker:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) + 100)
    os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.parametrize(
    ("who", "status"),
    [("itself", -signal.SIGTERM), ("worker", 100 - signal.SIGTERM)],
)
def test_the_second_signal_and_those_of_forked_workers_are_deadly(who, status):
    words = [sys.executable, "-c", _SCRIPT, preemption.__file__, who]
    assert subprocess.run(words).returncode == status
