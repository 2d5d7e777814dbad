"""All processes leave the work together, wherever each of them is when one is asked to stop."""

import logging
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing import get_context
from types import SimpleNamespace

import pytest
from detectron2.utils import comm

from lambda_det.detection import parser
from lambda_det.distributed import leaving
from lambda_det.distributed.launch import launch
from lambda_det.distributed.leaving import UntilAsked, leave_if_asked
from lambda_det.distributed.signals import SIGNALS, StopRequest, catch_signals
from lambda_det.errors import PREEMPTED_STATUS, Preempted, duration

pytestmark = pytest.mark.posix  # elsewhere os.kill ends the process

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
    monkeypatch.setattr(leaving, "time", clock)
    for _ in UntilAsked([None] * 20):
        clock.now += 6
    of_20 = [line for line in caplog.messages if "of 20" in line]
    assert len(of_20) == 3
    assert " 5 " in of_20[0] and duration(15 * 6) in of_20[0]
    assert " 15 " in of_20[-1] and duration(5 * 6) in of_20[-1]


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
