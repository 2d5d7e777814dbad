"""Two real processes that are killed or get a signal: the run is continued to the same end."""

import json
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from lambda_det.errors import PREEMPTED_STATUS
from tests import forked
from tests.processes import descendants
from tests.reliability.runs import detection_words

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds processes in /proc"),
]

ROOT = Path(__file__).parents[2]
TOOL = str(ROOT / "tools" / "train_net.py")
STEPS = 14
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


@pytest.fixture(scope="module")
def arguments(tmp_path_factory) -> list[str]:
    result = detection_words(tmp_path_factory.mktemp("data"))
    result += ["SOLVER.MAX_ITER", str(STEPS), "SOLVER.IMS_PER_BATCH", "2", "DATALOADER.NUM_WORKERS"]
    return [*result, "1", "SOLVER.ACCUMULATE_GRADIENTS", "1", "TEST.EVAL_PERIOD", "0"]


def _start(words: list[str], output: Path) -> BaseProcess:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    variables = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
    return forked.start(words, output, cwd=output.parent, **variables)


def _wait_until(condition: Callable[[], object], run: BaseProcess, output: Path) -> None:
    end = time.monotonic() + 200
    while not condition():
        assert run.is_alive() and time.monotonic() < end, output.read_text()[-5000:]
        time.sleep(0.02)


def _status(run: BaseProcess, seconds: float) -> int | None:
    """The exit status of a program that ends by itself, within this time."""
    run.join(seconds)
    return run.exitcode


def _trains(pid: int) -> bool:
    """Whether the process trains; the others are helpers of multiprocessing."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_text()
    except FileNotFoundError:
        return False
    return "train_net.py" in command or "spawn_main" in command


def _records(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()]


def _final_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The final weights of a complete run."""
    iterations = [record["iteration"] for record in _records(folder)]
    assert iterations == sorted(set(iterations)) and iterations[-1] == STEPS - 1
    state = torch.load(folder / "model_final.pth", weights_only=True)
    assert state["iteration"] == STEPS - 1
    return state["model"]


@pytest.fixture(scope="module")
def restarted(arguments, tmp_path_factory) -> Path:
    """The folder of a run one of whose processes was killed after a checkpoint."""
    root = tmp_path_factory.mktemp("restarted")
    folder, output = root / "run", root / "output"
    words = [*TORCHRUN, "--max-restarts", "2", TOOL, *arguments, "OUTPUT_DIR", str(folder)]
    run = _start(words, output)
    _wait_until((folder / "last_checkpoint").exists, run, output)
    workers = [pid for pid in descendants(run.pid)[:2] if _trains(pid)]
    assert len(workers) == 2
    os.kill(workers[1], signal.SIGKILL)
    status = _status(run, 300)
    said = output.read_text()
    assert status == 0, said[-9000:]
    assert "Process 0 of 2 has lost the connection" in said
    assert "Training from iteration 0 to" in said
    return folder


def test_torchrun_continues_after_a_kill(restarted):
    _final_weights(restarted)
    log = (restarted / "log.txt").read_text()
    starts = [line for line in log.splitlines() if "Training from iteration" in line]
    assert len(starts) == 2 and "Training from iteration 0 to" not in starts[1]


def test_signal_stops_all_processes_and_resume_continues(arguments, restarted, tmp_path):
    folder, output = tmp_path / "run", tmp_path / "output"
    words = [TOOL, "--num-gpus", "2", *arguments, "OUTPUT_DIR", str(folder)]
    run = _start(words, output)
    _wait_until((folder / "last_checkpoint").exists, run, output)
    processes = descendants(run.pid)
    os.kill(run.pid, signal.SIGUSR1)
    assert _status(run, 100) == PREEMPTED_STATUS, output.read_text()[-5000:]
    # Python's resource tracker outlives the run, and may print a warning after the last message
    assert "Stopped by SIGUSR1 after step" in output.read_text()
    assert not any(_trains(pid) for pid in processes)
    # Continued by as many processes, however they are started
    del words[1:3]
    for done in forked.run_as_torchrun(words, tmp_path):
        assert done.returncode == 0, done.stdout[-5000:]
    # Stopped and killed at different steps, and the same to the bit
    ours, theirs = _final_weights(folder), _final_weights(restarted)
    assert [name for name, value in ours.items() if not torch.equal(value, theirs[name])] == []
    losses = [[record["total_loss"] for record in _records(f)] for f in (folder, restarted)]
    assert losses[0] == losses[1]
