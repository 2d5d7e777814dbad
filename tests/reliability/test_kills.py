"""A run killed by SIGKILL at random moments is, in the end, the run that was not.

LAMBDA_DET_KILLS=100 kills five runs of each kind twenty times.
Without OMP_NUM_THREADS the runs have as many threads as the machine has cores.
"""

import os
import random
from pathlib import Path

import pytest

from tests.classification.tiny import NETWORK
from tests.detection.tiny import NARROW
from tests.reliability.killing import Kill, train
from tests.reliability.runs import (
    assert_same_run,
    classification_words,
    detection_words,
    lazy_words,
)

pytestmark = pytest.mark.slow  # trains

ALL = int(os.environ.get("LAMBDA_DET_KILLS", 3))
KILLS = min(ALL, 20)  # of one run
WORDS = {
    "detection": detection_words,
    "lazy": lazy_words,
    "classification": classification_words,
}
# Fewer steps than in runs.py, and a checkpoint after each
SHORTER = {
    "detection": "SOLVER.MAX_ITER 20 SOLVER.STEPS (10,) TEST.EVAL_PERIOD 10 "
    "SOLVER.CHECKPOINT_PERIOD 1",
    "lazy": "train.checkpointer.period=1",
    "classification": "SOLVER.EPOCHS 4 TEST.EVAL_PERIOD 2 SOLVER.CHECKPOINT_PERIOD 1",
}
if KILLS <= 3:  # else the run of a small network would have ended before the last of them
    SHORTER["lazy"] += f" model.backbone.bottom_up.name=resnet14_slim_lambda_c5 {NARROW[1]}"
    SHORTER["classification"] += f" {' '.join(NETWORK)}"


def _output(tool: str, folder: Path) -> list[str]:
    return [f"train.output_dir={folder}"] if tool == "lazy" else ["OUTPUT_DIR", str(folder)]


def _moments(seed: int) -> list[Kill]:
    """At any time, or while a checkpoint has its temporary name, or between operations on files."""
    rng = random.Random(seed)
    rest = KILLS // 3
    moments = [Kill("time", rng.uniform(0, 1)) for _ in range(KILLS - 2 * rest)]
    moments += [Kill("temporary", rng.uniform(0, 0.03)) for _ in range(rest)]
    moments += [Kill("operation", rng.randint(1, 12)) for _ in range(rest)]
    rng.shuffle(moments)
    return moments


@pytest.fixture(scope="module", params=WORDS)
def uninterrupted(request, tmp_path_factory) -> tuple[str, list[str], Path]:
    """The tool, the arguments and the folder of a run to its end."""
    tool, root = request.param, tmp_path_factory.mktemp("whole")
    words = [*WORDS[tool](root), *SHORTER[tool].split()]
    whole, log = root / "whole", root / "whole.txt"
    argv = [*words, *_output(tool, whole)]
    assert train(tool, argv, log, folder=whole) == 0, log.read_text()
    return tool, words, whole


@pytest.mark.parametrize("seed", range(5, 5 + ALL // KILLS))
def test_kills_change_nothing(uninterrupted, seed, tmp_path):
    tool, words, whole = uninterrupted
    killed, log = tmp_path / "killed", tmp_path / "killed.txt"
    words = [*words, *_output(tool, killed)]
    statuses = [train(tool, words, log, folder=killed, kill=kill) for kill in _moments(seed)]
    print(f"{statuses.count(-9)} kills of {tool}")  # pytest -rP shows it
    # A late moment may come after the end of the run
    assert set(statuses) <= {-9, 0}, log.read_text()
    assert train(tool, words, log, folder=killed) == 0, log.read_text()

    assert statuses.count(-9) >= 3 * KILLS // 4
    assert not list(killed.glob("*.tmp"))
    assert_same_run(whole, killed)
    assert _checkpoints(whole) == _checkpoints(killed)


def _checkpoints(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*.pth*")}
