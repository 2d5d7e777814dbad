"""Loader processes that are signalled, die, hang, or are left behind."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time

import cv2
import pytest
import torch

from lambda_det.detection.data import tolerant_test_loader, tolerant_train_loader
from lambda_det.errors import DataError
from lambda_det.training import workers

RECORDS = [{"file_name": f"/data/{i}.jpg", "image_id": 100 + i} for i in range(8)]


def doing(what, at=5):
    """A mapper that does something to its process when it comes to one image."""

    def mapper(record):
        if record["image_id"] == 100 + at:
            what()
        return record

    return mapper


def killed_by(number):
    return lambda: os.kill(os.getpid(), number)


def train(mapper, **options):
    options = {"total_batch_size": 2, "num_workers": 2, **options}
    return tolerant_train_loader(RECORDS, mapper=mapper, **options)


def children():
    return set(torch.multiprocessing.active_children())


@pytest.mark.parametrize(
    ("number", "cause"),
    [
        (signal.SIGKILL, r"SIGKILL .*memory ran out: lower DATALOADER\.NUM_WORKERS"),
        (signal.SIGBUS, r"SIGBUS .*/dev/shm is full"),
        (signal.SIGSEGV, r"SIGSEGV .*image library does not bear"),
        (signal.SIGALRM, r"SIGALRM .*look for who"),
        (signal.SIGRTMIN + 3, r"signal \d+ while .*look for who"),
    ],
)
def test_a_worker_that_dies_of_an_image_is_named_with_it(number, cause):
    with pytest.raises(DataError, match=cause) as raised:
        list(itertools.islice(train(doing(killed_by(number))), 9))
    message = str(raised.value)
    assert "One of 2 processes" in message and "\n" not in message
    assert "while it read /data/5.jpg (image_id 105)" in message


def test_an_evaluation_s_worker_too():
    loader = tolerant_test_loader(RECORDS, mapper=doing(killed_by(signal.SIGKILL)), num_workers=2)
    with pytest.raises(DataError, match=r"SIGKILL while it read /data/5\.jpg \(image_id 105\)"):
        list(loader)


def test_a_worker_that_ends_by_itself():
    with pytest.raises(DataError, match=r"ended with status 3 while it read /data/5\.jpg"):
        list(itertools.islice(train(doing(lambda: os._exit(3))), 9))


class Cut:
    """A connection to a worker that breaks."""

    def __next__(self):
        raise EOFError


def test_a_worker_that_dies_as_it_hands_over_a_batch():
    """torch sees the connection break before it sees the process end."""
    worker = torch.multiprocessing.get_context("fork").Process(
        target=lambda: (time.sleep(0.3), killed_by(signal.SIGKILL)())
    )
    worker.start()
    table = torch.zeros(1, 8, dtype=torch.uint8)
    loader = train(dict)._loader
    assert "SIGKILL between two images" in str(loader._next(Cut(), [worker], table))
    with pytest.raises(EOFError):
        loader._next(Cut(), [], table)


def test_a_worker_that_is_killed_between_two_images():
    """Its finished batches are lost with it, and an error of the connection is not shown."""
    for delay in (0, 0.001, 0.01, 0.3):
        before = children()
        batches = iter(train(lambda record: {"image": torch.zeros(9)}))
        next(batches)
        os.kill(min(worker.pid for worker in children() - before), signal.SIGKILL)
        time.sleep(delay)
        with pytest.raises(DataError, match="ended by SIGKILL"):
            list(itertools.islice(batches, 99))


def test_a_file_name_of_any_length_and_letters():
    name = "/data/" + "ü" * 600 + "\udcff.jpg"
    records = [{"file_name": name}]
    loader = tolerant_test_loader(records, mapper=lambda _: os._exit(1), num_workers=1)
    with pytest.raises(DataError, match="while it read /data/üüü"):
        list(loader)


def test_a_worker_that_hangs_is_named_with_its_image_and_killed(monkeypatch):
    waited_for = []
    kind = torch.utils.data.dataloader._MultiProcessingDataLoaderIter
    shutdown = kind._shutdown_workers

    def noted(self):
        waited_for.extend(worker for worker in self._workers if worker.is_alive())
        shutdown(self)

    monkeypatch.setattr(kind, "_shutdown_workers", noted)
    monkeypatch.setattr(workers, "_POLL", 0.1)
    before = children()
    loader = train(doing(lambda: time.sleep(600)), num_workers=1, timeout=1)
    with pytest.raises(DataError) as raised:
        list(itertools.islice(loader, 9))
    message = str(raised.value)
    assert "No batch of images came for 1 seconds (DATALOADER.TIMEOUT)" in message
    assert "were reading /data/5.jpg (image_id 105)" in message
    assert not children() - before
    assert not waited_for  # torch waits ten seconds for the end of each


def test_a_slow_image_is_waited_for(monkeypatch):
    """Over several looks at the workers, and with no limit at all."""
    monkeypatch.setattr(workers, "_POLL", 0.05)
    for timeout in (20, 0):
        loader = train(doing(lambda: time.sleep(0.4)), timeout=timeout, aspect_ratio_grouping=False)
        loader.begin(0, 0)
        found = [image["image_id"] for batch in itertools.islice(loader, 4) for image in batch]
        assert sorted(found) == list(range(100, 108))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_workers_leave_the_scheduler_s_signals_to_the_main_process(number):
    """A worker that obeyed would end the run before its checkpoint is written."""

    def mapper(record):
        os.kill(os.getpid(), number)
        return {"pid": os.getpid()}

    before = children()
    batches = iter(train(mapper))
    pids = [image["pid"] for batch in itertools.islice(batches, 4) for image in batch]
    assert len(set(pids)) == 2 and len(children() - before) == 2
    del batches
    assert not children() - before


def test_a_signal_to_all_while_the_workers_start():
    """They begin as copies of the main process, with its handlers; none of them is called."""
    main, called = os.getpid(), []

    def handler(number, frame):
        called.append(os.getpid())
        if os.getpid() != main:
            os._exit(9)

    before = signal.signal(signal.SIGTERM, handler)
    start = workers.DataLoader.__iter__

    def signalled(self):
        os.kill(main, signal.SIGTERM)
        batches = start(self)
        for worker in batches._workers:
            os.kill(worker.pid, signal.SIGTERM)
        return batches

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(workers.DataLoader, "__iter__", signalled)
            found = list(itertools.islice(train(dict), 4))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert len(found) == 4
    assert called == [main]  # here alone


def test_settings_of_a_worker():
    def mapper(record):
        return {"threads": (torch.get_num_threads(), cv2.getNumThreads())}

    (batch,) = itertools.islice(train(mapper, num_workers=1), 1)
    assert [image["threads"] for image in batch] == [(1, 1), (1, 1)]


_LEFT_OPEN = """
import itertools, sys, time
from torch.utils.data import DataLoader
from lambda_det.detection.data import tolerant_train_loader

def mapper(record):
    if record["n"] == 5 and {hangs}:
        time.sleep(600)
    return record

if {foreign}:  # torch's handler, which raises when a worker dies
    foreign = iter(DataLoader(range(99), num_workers=1))
    next(foreign)
loader = tolerant_train_loader(
    [dict(n=i) for i in range(64)], mapper=mapper, total_batch_size=1, num_workers=2
)
loader.begin(1, 0)
batches = iter(loader)
next(batches)
time.sleep(0.5)
print("end")
"""


@pytest.mark.parametrize(("hangs", "foreign"), [(False, True), (True, False)])
def test_a_process_ends_though_an_iterator_is_open(hangs, foreign):
    """Its exit asks daemons to end by SIGTERM, which they ignore, and waits for them."""
    done = subprocess.run(
        [sys.executable, "-c", _LEFT_OPEN.format(hangs=hangs, foreign=foreign)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0 and done.stdout == "end\n"
    assert "Traceback" not in done.stderr
