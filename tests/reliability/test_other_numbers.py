"""A run that goes on with other numbers of processes and loader workers takes the same steps."""

import pytest
import torch

from tests import forked
from tests.reliability.killing import train
from tests.reliability.runs import TOOL, content, detection_words, metrics

pytestmark = pytest.mark.slow  # trains


def test_two_processes_take_up_the_run_of_one(tmp_path):
    words = detection_words(tmp_path)
    # A schedule that does not depend on its end
    words += ["SOLVER.REFERENCE_WORLD_SIZE", "0", "SOLVER.WARMUP_ITERS", "0", "SOLVER.STEPS", "()"]
    words += ["SOLVER.CHECKPOINT_PERIOD", "4", "TEST.EVAL_PERIOD", "0"]

    def words_of(name: str, steps: int, batches: int, workers: int) -> list[str]:
        numbers = ["SOLVER.MAX_ITER", steps, "SOLVER.ACCUMULATE_GRADIENTS", batches]
        numbers += ["DATALOADER.NUM_WORKERS", workers, "OUTPUT_DIR", tmp_path / name]
        return [*words, *map(str, numbers)]

    for name, *numbers in (("one", 8, 2, 2), ("two", 4, 2, 0)):
        log = tmp_path / f"{name}.txt"
        argv = words_of(name, *numbers)
        assert train("detection", argv, log, folder=tmp_path / name) == 0, log.read_text()
    # With a bar, which the first process shows
    words_of_two = ["--progress", *words_of("two", 8, 1, 2)]
    for done in forked.run_as_torchrun([TOOL, *words_of_two], tmp_path):
        assert done.returncode == 0, done.stdout[-5000:]
    assert "Process 1 of 2" in (tmp_path / "two" / "log.txt.rank1").read_text()

    for step, line in metrics(tmp_path / "one").items():
        other = metrics(tmp_path / "two")[step]
        for name in (name for name in line if "loss" in name):
            assert other[name] == pytest.approx(line[name], rel=1e-5), (step, name)
    one, two = (content(tmp_path / name / "model_final.pth")["model"] for name in ("one", "two"))
    for name, value in one.items():
        # Batch norm's statistics are each process's own; those of the first are saved
        if value.is_floating_point() and "running" not in name:
            torch.testing.assert_close(two[name], value, rtol=1e-4, atol=1e-6)
