"""Images that cannot be read; loader processes that are signalled, die, hang or are left behind."""

import itertools
import os
import signal
import subprocess
import sys
import threading
import time

import cv2
import pytest
import torch
from torch.utils.data._utils import signal_handling

from lambda_det.detection.data import tolerant_test_loader, tolerant_train_loader
from lambda_det.errors import DataError
from lambda_det.training import workers
from lambda_det.training.workers import UnreadableImages

pytestmark = pytest.mark.posix  # kills processes, which are forked

RECORDS = [{"file_name": f"/data/{i}.jpg", "image_id": 100 + i} for i in range(8)]


@pytest.fixture(autouse=True)
def short_poll(monkeypatch):
    monkeypatch.setattr(workers, "_POLL", 0.1)


def doing(what):
    """A mapper that does something to its process when it comes to one image."""

    def mapper(record):
        if record["image_id"] == 105:
            what()
        return record

    return mapper


def killed_by(name):
    number = signal.Signals[name] if isinstance(name, str) else name
    return lambda: os.kill(os.getpid(), number)


def train(mapper, **options):
    options = {"total_batch_size": 2, "num_workers": 2, **options}
    return tolerant_train_loader(RECORDS, mapper=mapper, **options)


def children():
    return set(torch.multiprocessing.active_children())


def read_all_but(*broken):
    def read(index):
        if index in broken:
            raise DataError(f"image {index} is broken")
        return index

    return read


def test_the_count_of_unreadable_images_is_shared_by_processes():
    """Each process meets one broken image; both are more than the limit of one."""
    images = UnreadableImages(8, 1, "THE.KEY")
    worker = torch.multiprocessing.get_context("fork").Process(
        target=images.next_readable, args=(0, read_all_but(0))
    )
    worker.start()
    worker.join()
    with pytest.raises(DataError, match=r"2 unreadable.*THE\.KEY is 1.*image 3 is broken"):
        images.next_readable(3, read_all_but(0, 3))


def test_the_next_image_is_read_round_the_end():
    images = UnreadableImages(4, 2, "THE.KEY")
    assert [images.next_readable(index, read_all_but(2, 3)) for index in (1, 2, 3, 0)] == [
        *(1, 0, 0, 0)
    ]
    with pytest.raises(DataError, match="image 0 is broken"):
        UnreadableImages(3, 20, "THE.KEY").next_readable(1, read_all_but(0, 1, 2))


@pytest.mark.parametrize(
    ("end", "cause"),
    [
        (killed_by("SIGKILL"), r"SIGKILL .*memory.*num_workers"),
        (killed_by("SIGBUS"), r"SIGBUS .*/dev/shm"),
        (killed_by("SIGSEGV"), r"SIGSEGV .*image library"),
        (lambda: os._exit(3), "status 3 "),
        pytest.param(
            *(killed_by(37), r"signal 37 while .*num_workers to 0"),
            marks=pytest.mark.skipif(sys.platform != "linux", reason="it is a signal of Linux"),
        ),
    ],
    ids=["SIGKILL", "SIGBUS", "SIGSEGV", "status", "signal"],
)
@pytest.mark.parametrize("load", [tolerant_test_loader, train])
def test_a_worker_that_dies_of_an_image_is_named_with_it(load, end, cause):
    records = {} if load is train else {"dataset": RECORDS}
    loader = load(**records, mapper=doing(end), num_workers=2)
    with pytest.raises(DataError, match=cause) as raised:
        list(itertools.islice(loader, 9))
    message = str(raised.value)
    assert "One of 2 processes" in message and "\n" not in message
    assert "/data/5.jpg (image_id 105)" in message


def test_a_worker_that_dies_as_it_hands_over_a_batch(monkeypatch):
    """torch sees the connection break before it sees the process end."""

    def cut(self):
        for worker in self._workers:
            threading.Timer(0.3, worker.kill).start()
        raise EOFError

    kind = torch.utils.data.dataloader._MultiProcessingDataLoaderIter
    monkeypatch.setattr(kind, "__next__", cut)
    with pytest.raises(DataError, match="SIGKILL between two images"):
        next(iter(train(dict)))


def test_a_file_name_of_any_length_and_letters():
    name = "/data/" + "ü" * 600 + "\udcff.jpg"
    records = [{"file_name": name}]
    loader = tolerant_test_loader(records, mapper=lambda _: os._exit(1), num_workers=1)
    with pytest.raises(DataError, match="/data/üüü"):
        list(loader)


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_fault_of_the_program_keeps_its_type_and_stack(workers, slow):
    """Also after several polls, as for torch's own errors."""

    def faulty():
        time.sleep(0.35 * slow)
        raise RuntimeError("a fault of the program")

    with pytest.raises(RuntimeError, match="a fault of the program") as raised:
        list(itertools.islice(train(doing(faulty), num_workers=workers), 9))
    assert not isinstance(raised.value, DataError)
    if workers:
        assert "in faulty" in str(raised.value)  # the worker's stack


def test_a_fault_of_the_sampler_is_not_taken_for_a_poll():
    def indices():
        yield from range(4)  # more than are asked for when the workers start
        raise RuntimeError("a fault of the sampler")

    with pytest.raises(RuntimeError, match="sampler"):
        list(tolerant_test_loader(RECORDS, mapper=dict, sampler=indices(), num_workers=1))


@pytest.fixture
def new_process(monkeypatch):
    """No handler of SIGCHLD, as before the first DataLoader."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    monkeypatch.setattr(signal_handling, "_SIGCHLD_handler_set", False)
    yield
    signal.signal(signal.SIGCHLD, before)


@pytest.mark.parametrize("delay", [0, 0.001, 0.01, 0.3])
def test_a_worker_that_is_killed_breaks_nothing_but_the_loader(new_process, delay):
    """With the batch that the worker had to load, and not earlier in the main process.

    An error of the connection is not shown.
    """
    before = children()
    batches = iter(train(lambda record: {"image": torch.zeros(9)}))
    next(batches)
    worker = min(children() - before, key=lambda worker: worker.pid)
    os.kill(worker.pid, signal.SIGKILL)
    time.sleep(delay)
    with pytest.raises(DataError, match="SIGKILL"):
        list(itertools.islice(batches, 99))


def test_the_workers_end_with_the_iterator():
    """In the middle of the stream; no worker has to be killed."""
    before = children()
    batches = iter(train(dict))
    next(batches)
    workers = children() - before
    assert len(workers) == 2
    del batches
    assert not any(worker.is_alive() for worker in workers)
    assert [worker.exitcode for worker in workers] == [0, 0]


def test_the_workers_end_with_an_error_that_is_kept():
    """An error that is kept keeps its frames, and they keep the iterator."""

    def broken():
        raise DataError("broken")

    before = children()
    with pytest.raises(DataError, match=r"^broken$") as raised:
        list(tolerant_test_loader(RECORDS, mapper=doing(broken), num_workers=2))
    assert raised.tb is not None
    assert not children() - before


def test_a_worker_that_hangs_is_named_with_its_image_and_killed(monkeypatch):
    waited_for = []
    kind = torch.utils.data.dataloader._MultiProcessingDataLoaderIter
    shutdown = kind._shutdown_workers

    def noted(self):
        waited_for.extend(worker for worker in self._workers if worker.is_alive())
        shutdown(self)

    monkeypatch.setattr(kind, "_shutdown_workers", noted)
    before = children()
    loader = train(doing(lambda: time.sleep(600)), num_workers=1, timeout=1)
    with pytest.raises(DataError, match=r"1 seconds \(timeout\)") as raised:
        list(itertools.islice(loader, 9))
    assert "/data/5.jpg (image_id 105)" in str(raised.value)
    assert not children() - before
    assert not waited_for  # torch waits ten seconds for the end of each


def test_a_slow_image_is_waited_for():
    """Over several polls, and with no limit at all."""
    for timeout in (20, 0):
        loader = train(doing(lambda: time.sleep(0.4)), timeout=timeout, aspect_ratio_grouping=False)
        loader.begin(0, 0)
        found = [image["image_id"] for batch in itertools.islice(loader, 4) for image in batch]
        assert sorted(found) == list(range(100, 108))


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT"])
def test_workers_leave_the_scheduler_s_signals_to_the_main_process(name):
    """A worker that obeyed would end the run before its checkpoint is written."""

    def mapper(record):
        killed_by(name)()
        return {"pid": os.getpid()}

    before = children()
    batches = iter(train(mapper))
    pids = [image["pid"] for batch in itertools.islice(batches, 4) for image in batch]
    assert len(set(pids)) == 2 and len(children() - before) == 2
    del batches
    assert not children() - before


def test_a_signal_to_all_while_the_workers_start():
    """Workers start as copies of the main process with its handlers; no handler is called."""
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
import time
from torch.utils.data import DataLoader
from lambda_det.training.workers import WatchedLoader

class Images(list):
    def __getitem__(self, index):
        if index == 5 and {hangs}:
            time.sleep(600)
        return index

if {foreign}:  # torch's handler, which raises when a worker dies
    foreign = iter(DataLoader(range(99), num_workers=1))
    next(foreign)
loader = WatchedLoader(
    Images(range(64)), sampler=range(64), batch_size=1, collate_fn=list, timeout=600, num_workers=2
)
batches = iter(loader)
next(batches)
time.sleep(0.5)
print("end")
"""


@pytest.mark.slow
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
