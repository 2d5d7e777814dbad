"""A classification run that a scheduler stops goes on as if nothing were."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lambda_det.classification import run
from lambda_det.classification.trainer import ClassificationTrainer
from lambda_det.errors import PREEMPTED_STATUS, Preempted
from tests.classification.tiny import RECIPE, make_pictures
from tests.reliability.runs import content, differences, metrics

TOOL = Path(__file__).parents[2] / "tools/train_imagenet.py"


def _assert_same_run(one, other):
    for name in ("model_final.pth", "model_best.pth"):
        assert differences(content(one / name), content(other / name)) == []
    assert differences(metrics(one), metrics(other)) == []


@pytest.mark.parametrize("step", [0, 2, 4])  # that of step 2 is evaluated
def test_a_signal_saves_after_the_step(arguments, tmp_path, monkeypatch, step):
    words = ("DATALOADER.NUM_WORKERS", 2 if step == 0 else 0, "SOLVER.ACCUMULATE_GRADIENTS", 2)
    run(arguments(*words, "OUTPUT_DIR", tmp_path / "whole"))
    original = ClassificationTrainer.run_step

    def run_step(self):
        if self.iter == step:
            os.kill(os.getpid(), signal.SIGUSR1)
        original(self)

    with monkeypatch.context() as patch:
        patch.setattr(ClassificationTrainer, "run_step", run_step)
        with pytest.raises(Preempted, match=f"SIGUSR1 after step {step + 1}; .*model_000000{step}"):
            run(arguments(*words))
    run(arguments("--resume", *words))
    _assert_same_run(tmp_path / "whole", tmp_path / "run")


def test_a_process_that_is_told_to_stop(tmp_path):
    make_pictures(tmp_path)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    words = [
        "--config-file",
        tmp_path / "recipe.yaml",
        "--resume",
        "DATA.TRAIN",
        tmp_path / "train",
    ]
    words += ["DATA.VAL", tmp_path / "val", "SOLVER.CHECKPOINT_PERIOD", 1, "SOLVER.EPOCHS", 4]
    folder = tmp_path / "run"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def start():
        return subprocess.Popen(
            [sys.executable, TOOL, *map(str, words), "OUTPUT_DIR", folder],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=environment,
            text=True,
        )

    process = start()
    while not (folder / "last_checkpoint").exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    process.send_signal(signal.SIGUSR1)
    error = process.communicate()[1]
    assert process.returncode == PREEMPTED_STATUS, error
    assert "Traceback" not in error
    assert error.strip().splitlines()[-1].startswith("Stopped by SIGUSR1 after step")
    process = start()
    assert process.communicate() and process.returncode == 0
    assert content(folder / "model_final.pth")["iteration"] == 11
    assert set(range(1, 12, 2)) <= set(metrics(folder))
