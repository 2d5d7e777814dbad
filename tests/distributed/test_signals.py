"""Signals of schedulers and Ctrl-C: noted, raised in interruptible work, deadly the second time."""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing import get_context
from types import SimpleNamespace

import pytest
from detectron2.utils import comm

from lambda_det.detection import parser
from lambda_det.distributed import signals
from lambda_det.distributed.launch import launch
from lambda_det.distributed.signals import (
    SIGNALS,
    StopRequest,
    UntilAsked,
    catch_signals,
    interruptible,
    leave_if_asked,
    received_signal,
)
from lambda_det.errors import PREEMPTED_STATUS, Preempted, duration

pytestmark = pytest.mark.posix  # elsewhere os.kill ends the process


def _send(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_signal_is_noted_and_the_handler_restored(number):
    def own(number, frame):
        pytest.fail("the handler of before")

    previous = signal.signal(number, own)
    try:
        with catch_signals():
            assert received_signal() == 0
            _send(number)
            assert received_signal() == number
            with catch_signals():  # nested: changes nothing
                assert received_signal() == number
            assert received_signal() == number
        assert received_signal() == 0
        assert signal.getsignal(number) is own
    finally:
        signal.signal(number, previous)


def test_ctrl_c_stays_ignored_in_the_background_of_a_script():
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with catch_signals():
            _send(signal.SIGINT)
            assert received_signal() == 0
            _send(signal.SIGTERM)
            assert received_signal() == signal.SIGTERM
    finally:
        signal.signal(signal.SIGINT, previous)


def test_interruptible_work():
    def work():
        _send(signal.SIGUSR1)
        pytest.fail("not interrupted")

    with catch_signals():
        assert interruptible(lambda: 5) == 5
        with pytest.raises(StopRequest) as caught:
            interruptible(work)
        assert caught.value.signal == signal.SIGUSR1
        with pytest.raises(StopRequest):  # the signal came before
            interruptible(lambda: pytest.fail("not interrupted"))


def _catches_exceptions():
    try:
        _send()
        pytest.fail("not interrupted")
    except Exception:
        pytest.fail("taken for an error")


def _is_interrupted_in_a_finalizer():
    class Noisy:
        def __del__(self):  # Python prints what it raises, and goes on
            _send()
            for _ in range(100):  # a handler runs between two operations of Python
                pass

    Noisy()
    return "a result"


def _raises_another_error():
    try:
        _send()
        pytest.fail("not interrupted")
    except BaseException as error:
        raise RuntimeError("the other process is gone") from error


@pytest.mark.parametrize(
    "work", [_catches_exceptions, _is_interrupted_in_a_finalizer, _raises_another_error]
)
def test_work_cannot_swallow_the_request(work, monkeypatch):
    printed = []
    monkeypatch.setattr(sys, "unraisablehook", printed.append)
    with catch_signals():
        with pytest.raises(StopRequest) as caught:
            interruptible(work)
        assert caught.value.signal == signal.SIGTERM
    assert sys.unraisablehook == printed.append and not printed


def test_other_errors_that_python_drops_are_printed(monkeypatch):
    class Faulty:
        def __del__(self):
            raise ZeroDivisionError

    printed = []
    monkeypatch.setattr(sys, "unraisablehook", lambda dropped: printed.append(dropped.exc_type))
    with catch_signals():
        interruptible(Faulty)
    assert printed == [ZeroDivisionError]


def test_errors_of_the_work_are_raised_and_two_signals_in_a_row_are_one_request():
    with catch_signals():
        with pytest.raises(ZeroDivisionError):
            interruptible(lambda: 1 / 0)
        _send(signal.SIGUSR1)  # no longer interruptible
        _send(signal.SIGTERM)
        assert received_signal() == signal.SIGUSR1


def test_ctrl_c_saves_and_a_second_one_stops_at_once(monkeypatch, capsys):
    """Of a terminal and a launcher come two for one press."""
    now = [0.0]
    monkeypatch.setattr(signals.time, "monotonic", lambda: now[0])
    with catch_signals():
        _send(signal.SIGINT)
        _send(signal.SIGINT)
        assert received_signal() == signal.SIGINT
        assert capsys.readouterr().err.count("press Ctrl-C again") == 1
        now[0] = 1.0
        with pytest.raises(KeyboardInterrupt):
            _send(signal.SIGINT)
        _send(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        _send(signal.SIGINT)


def test_one_process_of_several_says_that_it_saves(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    with catch_signals():
        _send(signal.SIGINT)
    assert capsys.readouterr().err == ""


def test_other_threads_change_nothing():
    previous, seen = signal.getsignal(signal.SIGTERM), []

    def work() -> None:
        with catch_signals():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [previous]


def _second_signal(of_worker: bool) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as in a process that is not forked
    signals._SECONDS_OF_ONE_REQUEST = -1
    with catch_signals():
        if of_worker:
            worker = os.fork()
            if not worker:
                _send()
                os._exit(0)
            os._exit(os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) + 100)
        _send(signal.SIGUSR1)
        _send()
    os._exit(1)


@pytest.mark.parametrize(("of_worker", "status"), [(False, -signal.SIGTERM), (True, 100)])
def test_a_second_signal_is_deadly_and_forked_workers_ignore_all(of_worker, status):
    process = get_context("fork").Process(target=_second_signal, args=(of_worker,))
    process.start()
    process.join()
    assert process.exitcode == status


# ---- all processes leave the work together, wherever each of them is when one is asked to stop

SECONDS = 60  # after which processes count as waiting for each other


def _take(batches: UntilAsked, number: int, signalled: int) -> Iterator[object]:
    """Take batches; a process gets a signal while this one works on that of a number."""
    for count, batch in enumerate(batches, 1):
        yield batch
        if count == number:
            os.kill(signalled, signal.SIGTERM)


def test_batches_end_early_where_a_signal_asks_for_it():
    batches = UntilAsked(range(9))
    assert len(batches) == len(list(batches)) == 9
    with catch_signals():
        taken = []
        with pytest.raises(StopRequest) as caught:
            taken.extend(_take(batches, 3, os.getpid()))
        assert caught.value.signal == signal.SIGTERM
        assert taken == [0, 1, 2]
        with pytest.raises(StopRequest):  # and none begins
            next(iter(batches))
        with pytest.raises(StopRequest):
            leave_if_asked()


def test_the_log_says_what_is_left_of_a_long_evaluation(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(signals, "time", clock)
    for _ in UntilAsked([None] * 20, "Losses on"):
        clock.now += 6
    of_20 = [line for line in caplog.messages if line.startswith("Losses on ")]
    assert len(of_20) == 9
    assert " 2 of 20 " in of_20[0] and duration(18 * 6) in of_20[0]
    assert " 18 of 20 " in of_20[-1] and duration(2 * 6) in of_20[-1]


def _work(args) -> None:
    """Rank 0 has few batches and waits; rank 1, which is asked, has more than end in time."""
    with catch_signals():
        try:
            if comm.get_rank() == 0:
                list(UntilAsked(range(2)))
            else:
                slow = (time.sleep(0.1) for _ in range(10 * SECONDS * 2))
                list(_take(UntilAsked(slow), 5, os.getpid()))
            raise AssertionError(f"rank {comm.get_rank()} has gone on without the other")
        except StopRequest as request:
            raise Preempted(f"rank {comm.get_rank()} has left") from request


def _command() -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    args = parser().parse_args(["--num-gpus", "2"])
    try:
        launch(_work, args, device="cpu")
    except Preempted:
        os._exit(PREEMPTED_STATUS)
    os._exit(9)


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_process_that_waits_for_another_leaves_with_it():
    process = get_context("fork").Process(target=_command)
    process.start()
    process.join(SECONDS)
    is_over = not process.is_alive()
    process.kill()
    process.join()
    assert is_over, "one process has left, and the other waits for it"
    assert process.exitcode == PREEMPTED_STATUS
