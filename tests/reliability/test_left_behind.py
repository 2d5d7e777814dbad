"""A run that is killed by SIGKILL leaves no process and no shared memory behind.

test_ends.py has those of --num-gpus.
"""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lambda_det.training.loading import ImageLoader
from tests import forked
from tests.processes import (
    descendants,
    is_alive,
    shared_memory,
    wait_for_the_end_of,
    wait_until,
)
from tests.reliability.runs import TOOL, VARIABLES, detection_words

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
SECONDS = 10  # after which nothing may be left


def _kill(pid: int) -> tuple[list[int], list[Path]]:
    """Kill a process alone; all that it had started, and the shared memory of all of them."""
    left = descendants(pid)
    files = shared_memory([pid, *left])
    os.kill(pid, signal.SIGKILL)
    return left, files


def _load(in_thread: bool, ready: Callable[[], None]) -> None:
    """Hold a loader whose workers have more batches ready than their pipes take."""
    big = [np.zeros(2**20, np.uint8)] * 64
    loader = ImageLoader(big, collate_fn=list, timeout=0, num_workers=4, batch_size=1)
    batches = iter(loader)
    if in_thread:  # the kernel may take its end for that of the parent
        thread = threading.Thread(target=next, args=(batches,))
        thread.start()
        thread.join()
    else:
        next(batches)
    time.sleep(1)
    assert len([pid for pid in descendants(os.getpid()) if is_alive(pid)]) == 4
    ready()
    time.sleep(600)


@pytest.mark.slow
@pytest.mark.parametrize("in_thread", [False, True])
def test_loader_processes_with_full_pipes_end(in_thread):
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=_load, args=(in_thread, ready.set))
    process.start()
    is_ready = ready.wait(60)
    left, files = _kill(process.pid)
    process.join()
    wait_for_the_end_of(left, SECONDS)
    assert is_ready and len(left) == 4
    assert not [file for file in files if file.exists()]


@pytest.fixture(scope="module")
def arguments(tmp_path_factory) -> list[str]:
    words = detection_words(tmp_path_factory.mktemp("data"))
    words += ["SOLVER.MAX_ITER", "1000", "DATALOADER.NUM_WORKERS", "2"]
    return [*words, "SOLVER.IMS_PER_BATCH", "2", "TEST.EVAL_PERIOD", "1000"]


_OF_TWO = ["SOLVER.ACCUMULATE_GRADIENTS", "1"]
# How the run is started, what it sets, and what it has written before it is killed
MOMENTS = {
    "evaluation": ([TOOL], ["TEST.EVAL_PERIOD", "1"], "inference"),
    "torchrun": ([*TORCHRUN, TOOL], _OF_TWO, "last_checkpoint"),
    "torchrun's launcher": (["-c", forked.LAUNCHER, TOOL], _OF_TWO, "last_checkpoint"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "moment",
    [pytest.param(m, marks=[pytest.mark.release] if m == "torchrun" else []) for m in MOMENTS],
)
def test_a_killed_run_leaves_nothing(arguments, tmp_path, moment):
    command, settings, written = MOMENTS[moment]
    folder, output = tmp_path / "run", tmp_path / "output"
    words = [*command, *arguments, *settings, "OUTPUT_DIR", str(folder)]
    run = forked.start(words, output, cwd=tmp_path, **VARIABLES)

    def is_there() -> bool:
        assert run.is_alive(), output.read_text()[-5000:]
        return bool(descendants(run.pid)) and (folder / written).exists()

    wait_until(is_there, 200)
    left, files = _kill(run.pid)
    run.join()
    assert run.exitcode == -signal.SIGKILL and left
    wait_for_the_end_of(left, SECONDS)
    wait_until(lambda: not any(file.exists() for file in files), SECONDS)
