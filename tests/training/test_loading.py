"""Images that cannot be read; loader processes that are signalled, die, hang or are left behind."""

import itertools
import multiprocessing.connection
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import torch
from torch.utils.data._utils import signal_handling

import lambda_det
from lambda_det.detection.data import tolerant_test_loader, tolerant_train_loader
from lambda_det.distributed.signals import catch_signals, received_signal
from lambda_det.errors import DataError
from lambda_det.training import library_errors
from lambda_det.training.library_errors import explained
from lambda_det.training.loading import UnreadableImages
from tests import forked
from tests.processes import is_alive, wait_until
from tests.reliability.runs import differences
from tests.training.toy import settings

pytestmark = pytest.mark.posix  # kills processes, which are forked

RECORDS = [{"file_name": f"/data/{i}.jpg", "image_id": 100 + i} for i in range(8)]


def doing(what):
    """A mapper that does something to its process when it comes to one image."""

    def mapper(record):
        if record["image_id"] == 105:
            what()
        return record

    return mapper


def killed_by(name):
    return lambda: os.kill(os.getpid(), signal.Signals[name])


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
    read = read_all_but(2, 3)
    assert [images.next_readable(index, read) for index in (1, 2, 3, 0)] == [1, 0, 0, 0]
    with pytest.raises(DataError, match="image 0 is broken"):
        UnreadableImages(3, 20, "THE.KEY").next_readable(1, read_all_but(0, 1, 2))


KEYS = {"num_workers": "LOADER.WORKERS", "timeout": "LOADER.TIMEOUT"}


@pytest.mark.parametrize("load", [tolerant_test_loader, train])
def test_a_process_that_dies_ends_the_run_with_the_keys(load):
    records = {} if load is train else {"dataset": RECORDS}
    loader = load(**records, mapper=doing(killed_by("SIGKILL")), num_workers=2)
    with (
        pytest.raises(DataError, match=r"DataLoader worker .*LOADER\.WORKERS.*LOADER\.TIMEOUT"),
        explained(settings(keys=KEYS)),
    ):
        list(itertools.islice(loader, 9))


def test_a_process_that_dies_while_it_hands_over_a_batch_is_named():
    """Its connections close before it counts as ended."""

    def end(connection, *_):
        connection.close()
        time.sleep(0.5)
        killed_by("SIGKILL")()

    def mapper(record):
        multiprocessing.connection.deliver_challenge = end  # in this process alone
        return {"image": torch.zeros(8)}

    with (
        pytest.raises(DataError, match=r"DataLoader worker .*LOADER\.WORKERS"),
        explained(settings(keys=KEYS)),
    ):
        next(iter(train(mapper)))


@pytest.mark.slow
def test_a_script_without_a_main_guard_is_told_so(monkeypatch, capsys, tmp_path):
    """A spawned process imports the script, and would start a training of its own."""
    monkeypatch.setattr(library_errors, "LOADERS_START_BY", None)
    with pytest.raises(DataError, match="__main__"), explained(settings(keys=KEYS)):
        raise RuntimeError("DataLoader worker (pid(s) 1) exited unexpectedly")
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(SystemExit):
        lambda_det.train(tmp_path, output="output")
    assert 'if __name__ == "__main__":' in capsys.readouterr().err


@pytest.mark.slow
def test_a_process_that_hangs_ends_the_run_with_the_keys():
    before = children()
    loader = train(doing(lambda: time.sleep(600)), num_workers=1, timeout=1)
    with (
        pytest.raises(DataError, match=r"timed out after 1 seconds.*LOADER\.TIMEOUT"),
        explained(settings(keys=KEYS)),
    ):
        list(itertools.islice(loader, 9))
    wait_until(lambda: not children() - before)  # it was told to end


@pytest.mark.parametrize("workers", [0, 1])
def test_a_fault_of_the_program_keeps_its_type_and_stack(workers):
    def faulty():
        raise RuntimeError("a fault of the program")

    with (
        pytest.raises(RuntimeError, match="a fault of the program") as raised,
        explained(settings()),
    ):
        list(itertools.islice(train(doing(faulty), num_workers=workers), 9))
    assert not isinstance(raised.value, DataError)
    if workers:
        assert "in faulty" in str(raised.value)  # the worker's stack


def test_an_error_that_is_kept_keeps_no_processes():
    """An error that is kept keeps its frames, and they keep the iterator."""

    def broken():
        raise DataError("broken")

    before = children()
    with pytest.raises(DataError, match=r"^broken$") as raised:
        list(tolerant_test_loader(RECORDS, mapper=doing(broken), num_workers=2))
    assert raised.tb is not None
    assert not children() - before


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT"])
def test_workers_leave_the_scheduler_s_signals_to_the_main_process(name):
    """A worker that obeyed would end the run before its checkpoint is written.

    Each computes on one thread.
    """

    def mapper(record):
        killed_by(name)()
        return {"pid": os.getpid(), "threads": (torch.get_num_threads(), cv2.getNumThreads())}

    before = children()
    batches = iter(train(mapper))
    images = [image for batch in itertools.islice(batches, 4) for image in batch]
    assert len({image["pid"] for image in images}) == 2 and len(children() - before) == 2
    assert {image["threads"] for image in images} == {(1, 1)}
    del batches
    assert not children() - before


@pytest.mark.parametrize(
    "moment",
    [(signal_handling, "_set_worker_signal_handlers"), (torch, "set_num_threads")],
    ids=["before PyTorch's handlers", "after them"],
)
def test_a_signal_to_all_while_the_processes_start(moment, monkeypatch):
    """They start as copies of the main process with its handlers, and must not obey for it.

    PyTorch then gives them handlers of its own, which obey.
    """
    before, signalled = children(), []
    # Not an Event, which waits for a process that was killed while it waited for the event
    starting, sent = multiprocessing.Semaphore(0), multiprocessing.Semaphore(0)
    call = getattr(*moment)

    def after_the_signal(*arguments):
        starting.release()
        assert sent.acquire(timeout=30)
        return call(*arguments)

    def send():
        assert starting.acquire(timeout=30)
        wait_until(lambda: len(children() - before) == 2)
        signalled.extend(str(process.pid) for process in children() - before)
        # The parent's own SIGTERM is the one that they obey
        subprocess.run(["kill", "-TERM", str(os.getpid()), *signalled], check=True)
        for _ in range(8):  # a process may pass the moment twice
            sent.release()

    monkeypatch.setattr(*moment, after_the_signal)
    with catch_signals():
        thread = threading.Thread(target=send)
        thread.start()
        assert len(list(itertools.islice(train(dict), 4))) == 4
        thread.join()
        assert received_signal() == signal.SIGTERM
    assert len(signalled) == 2


def images(record):
    """An image with objects, as a mapper makes it: two tensors of it share their memory."""
    image = torch.full((3, 64, 64), record["image_id"] % 256, dtype=torch.uint8)
    boxes = torch.arange(8.0).reshape(2, 4) + record["image_id"]
    masks = [[np.arange(6.0)], [np.arange(8.0)]]
    return {**record, "image": image, "first_row": image[:, 0], "boxes": boxes, "masks": masks}


@pytest.mark.parametrize("free", [0, 2**34])
def test_full_shared_memory(monkeypatch, caplog, free):
    """torch's loader would wait for the batch until its timeout."""
    found = []
    for options in ({"num_workers": 0}, {"timeout": 30}):
        usage = SimpleNamespace(total=2**34, used=2**34 - free, free=free)
        monkeypatch.setattr(shutil, "disk_usage", lambda _, usage=usage: usage)
        loader = train(images, **options)
        loader.begin(7, 0)
        found.append(list(itertools.islice(loader, 6)))
    assert differences(*found) == []
    told = [text for text in caplog.messages if "/dev/shm" in text]
    assert len(told) == (not free) and all("1024 MiB of /dev/shm" in text for text in told)


def test_a_batch_that_cannot_be_sent_is_an_error():
    """torch's loader would wait for it until its timeout."""
    with pytest.raises(Exception, match="pickle"):
        next(iter(train(lambda record: {"call": lambda: record}, timeout=30)))


_LEFT_OPEN = """
import time
from lambda_det.training.loading import ImageLoader

class Images(list):
    def __getitem__(self, index):
        if index == 3 and self.hangs:  # which is asked for at once
            time.sleep(600)
        return index

opened = []
for hangs in (False, True):
    images = Images(range(64))
    images.hangs = hangs
    loader = ImageLoader(
        images, sampler=range(64), batch_size=1, collate_fn=list, timeout=600, num_workers=2
    )
    opened.append(iter(loader))
    next(opened[-1])
time.sleep(0.5)
print("end")
"""


@pytest.mark.slow
def test_a_process_ends_though_iterators_are_open():
    """Its exit asks their processes to end by SIGTERM, one of which hangs, and waits for them."""
    done = subprocess.run(
        [sys.executable, "-c", _LEFT_OPEN],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0 and done.stdout == "end\n"
    assert "Traceback" not in done.stderr


_KILLED_WHILE_IT_TAKES = """
import multiprocessing
import os
import signal
from multiprocessing import connection
import torch
from lambda_det.training.loading import ImageLoader

class Images(list):
    def __getitem__(self, index):
        return torch.zeros(8)

def end(sender, _):
    if {reads}:
        sender.recv_bytes()
    print(*[process.pid for process in multiprocessing.active_children()], flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

connection.answer_challenge = end
next(iter(ImageLoader(Images(range(8)), sampler=range(8), batch_size=1, num_workers=1)))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
@pytest.mark.parametrize("reads", [False, True])  # a connection is reset, or it ends
def test_a_process_is_silent_about_its_parent_s_end(reads, tmp_path):
    """The parent is killed while it takes a batch."""
    output = tmp_path / "printed"
    done = forked.run(["-c", _KILLED_WHILE_IT_TAKES.format(reads=reads)], output)
    assert done.returncode == -signal.SIGKILL, done.stdout
    loader = int(done.stdout.splitlines()[0])
    wait_until(lambda: not is_alive(loader))
    assert output.read_text() == f"{loader}\n"
