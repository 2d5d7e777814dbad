"""Two real processes that are killed or told to stop: the run is continued to the same end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lambda_det.detection import parser
from lambda_det.distributed import torchrun
from lambda_det.distributed.launch import launch
from lambda_det.errors import PREEMPTED_STATUS, ConfigError
from tests.reliability.runs import detection_words

ROOT = Path(__file__).parents[2]
TOOL = str(ROOT / "tools" / "train_net.py")
STEPS = 14
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> list[str]:
    result = detection_words(tmp_path_factory.mktemp("data"))
    result.remove("--resume")
    result += ["SOLVER.MAX_ITER", str(STEPS), "SOLVER.IMS_PER_BATCH", "2", "DATALOADER.NUM_WORKERS"]
    return [*result, "1", "SOLVER.ACCUMULATE_GRADIENTS", "1", "TEST.EVAL_PERIOD", "0"]


def _start(argv: list[str], output: Path) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with output.open("a") as file:
        return subprocess.Popen(argv, env=environment, stdout=file, stderr=file, cwd=output.parent)


def _until(fact: Callable[[], object], run: subprocess.Popen, output: Path) -> None:
    end = time.monotonic() + 200
    while not fact():
        assert run.poll() is None and time.monotonic() < end, output.read_text()[-5000:]
        time.sleep(0.02)


def _descendants(pid: int) -> list[int]:
    """Of the main thread of ``pid``, the nearest first."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return []
    result = [int(child) for child in children]
    return result + [pid for child in result for pid in _descendants(child)]


def _works(pid: int) -> bool:
    """Whether it is one of the processes that train, and not a helper of multiprocessing's."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_text()
    except FileNotFoundError:
        return False
    return "train_net.py" in command or "spawn_main" in command


def _records(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()]


def _check_whole(folder: Path) -> dict[str, torch.Tensor]:
    iterations = [record["iteration"] for record in _records(folder)]
    assert iterations == sorted(set(iterations)) and iterations[-1] == STEPS - 1
    state = torch.load(folder / "model_final.pth", weights_only=True)
    assert state["iteration"] == STEPS - 1
    return state["model"]


@pytest.fixture(scope="module")
def restarted(words, tmp_path_factory) -> Path:
    """The folder of a run one of whose processes was killed after a checkpoint."""
    folder, output = (
        tmp_path_factory.mktemp("restarted") / "run",
        tmp_path_factory.mktemp("o") / "o",
    )
    argv = [*TORCHRUN, "--max-restarts", "2", TOOL, *words, "OUTPUT_DIR", str(folder)]
    run = _start(argv, output)
    _until((folder / "last_checkpoint").exists, run, output)
    workers = [pid for pid in _descendants(run.pid)[:2] if _works(pid)]
    assert len(workers) == 2
    os.kill(workers[1], signal.SIGKILL)
    run.wait(300)
    said = output.read_text()
    assert run.returncode == 0, said[-9000:]
    assert "Process 0 of 2 has lost the connection to another" in said
    assert "Training from iteration 0 to" in said
    return folder


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for processes in /proc")
def test_torchrun_carries_on_after_one_was_killed(restarted):
    _check_whole(restarted)
    log = (restarted / "log.txt").read_text()
    starts = [line for line in log.splitlines() if "Training from iteration" in line]
    assert len(starts) == 2 and "Training from iteration 0 to" not in starts[1]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for processes in /proc")
def test_a_signal_stops_all_and_the_same_command_goes_on(words, restarted, tmp_path):
    folder, output = tmp_path / "run", tmp_path / "output"
    argv = [sys.executable, TOOL, "--num-gpus", "2", "--resume", *words, "OUTPUT_DIR", str(folder)]
    run = _start(argv, output)
    _until((folder / "last_checkpoint").exists, run, output)
    members = _descendants(run.pid)
    run.send_signal(signal.SIGUSR1)
    assert run.wait(100) == PREEMPTED_STATUS, output.read_text()[-5000:]
    assert "Stopped by SIGUSR1 after step" in output.read_text().splitlines()[-1]
    assert not any(_works(pid) for pid in members)
    run = _start(argv, output)
    assert run.wait(300) == 0, output.read_text()[-5000:]
    # Stopped and killed at different steps, and the same to the bit
    ours, theirs = _check_whole(folder), _check_whole(restarted)
    assert [name for name, value in ours.items() if not torch.equal(value, theirs[name])] == []
    losses = [[record["total_loss"] for record in _records(f)] for f in (folder, restarted)]
    assert losses[0] == losses[1]


def _attempt(monkeypatch, folder: Path, number: int) -> None:
    report = folder / f"attempt_{number}" / "0" / "error.json"
    report.parent.mkdir(parents=True)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(report))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(number))


@pytest.fixture
def in_torchrun(monkeypatch):
    """This process is the only one that torchrun has started, as far as it knows."""
    there = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    for name, value in there.items():
        monkeypatch.setenv(name, str(value))
    connected = lambda work, *rest: work()  # noqa: E731
    monkeypatch.setattr(torchrun, "run_connected", connected)


def _resumed(*argv: str) -> bool:
    seen = []
    launch(seen.append, parser().parse_args(list(argv)), device="cpu")
    return seen[0].resume


def test_a_restart_resumes(monkeypatch, in_torchrun, tmp_path):
    _attempt(monkeypatch, tmp_path, 0)
    assert not _resumed() and _resumed("--resume")
    _attempt(monkeypatch, tmp_path, 1)
    assert _resumed() and not _resumed("--eval-only")


def test_a_restart_does_not_take_up_what_was_refused(monkeypatch, in_torchrun, tmp_path):
    """The refusal may have been of the folder of another run, which is not to be continued."""

    def refuse(args):
        raise ConfigError("OUTPUT_DIR holds a run: add --resume")

    args = parser().parse_args([])
    _attempt(monkeypatch, tmp_path, 0)
    with pytest.raises(ConfigError):
        launch(refuse, args, device="cpu")
    _attempt(monkeypatch, tmp_path, 1)
    with pytest.raises(ConfigError, match=r"^OUTPUT_DIR holds a run: add --resume$"):
        launch(lambda args: None, args, device="cpu")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "")  # nowhere to note it
    assert not _resumed()
