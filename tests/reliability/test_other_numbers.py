"""A run that goes on with other numbers of processes and loader workers takes the same steps."""

from __future__ import annotations

import pytest
import torch

from tests.reliability.killing import train
from tests.reliability.runs import content, detection_words, metrics

pytestmark = pytest.mark.slow  # trains


def test_two_processes_take_up_the_run_of_one(tmp_path):
    words = detection_words(tmp_path)
    # A schedule that does not depend on its end
    words += ["SOLVER.REFERENCE_WORLD_SIZE", "0", "SOLVER.WARMUP_ITERS", "0", "SOLVER.STEPS", "()"]
    words += ["SOLVER.CHECKPOINT_PERIOD", "4", "TEST.EVAL_PERIOD", "0", "SOLVER.MAX_ITER"]

    def run(name: str, steps: int, *more: str) -> None:
        folder, log = tmp_path / name, tmp_path / f"{name}.txt"
        flags, pairs = (more[:2], more[2:]) if more[0].startswith("--") else ((), more)
        argv = [*words[:2], *flags, *words[2:], str(steps), *pairs, "OUTPUT_DIR", str(folder)]
        assert train("detection", argv, log, folder=folder) == 0, log.read_text()

    run("one", 8, "SOLVER.ACCUMULATE_GRADIENTS", "2")
    run("two", 4, "SOLVER.ACCUMULATE_GRADIENTS", "2", "DATALOADER.NUM_WORKERS", "0")
    run("two", 8, "--num-gpus", "2", "SOLVER.ACCUMULATE_GRADIENTS", "1")

    for step, line in metrics(tmp_path / "one").items():
        other = metrics(tmp_path / "two")[step]
        for name in (name for name in line if "loss" in name):
            assert other[name] == pytest.approx(line[name], rel=1e-5), (step, name)
    one, two = (content(tmp_path / name / "model_final.pth")["model"] for name in ("one", "two"))
    for name, value in one.items():
        # Batch norm's statistics are each process's own; those of the first are saved
        if value.is_floating_point() and "running" not in name:
            torch.testing.assert_close(two[name], value, rtol=1e-4, atol=1e-6)
