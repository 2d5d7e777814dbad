"""A run killed by SIGKILL at twenty random moments is, in the end, the run that was not."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.reliability.killing import Kill, train
from tests.reliability.runs import (
    classification_words,
    content,
    detection_words,
    differences,
    metrics,
)

pytestmark = pytest.mark.slow  # trains

WORDS = {"detection": detection_words, "classification": classification_words}


def _moments(seed: int) -> list[Kill]:
    """Eight at any time, six while a checkpoint is a draft, six between operations on files."""
    rng = random.Random(seed)
    moments = [Kill("time", rng.uniform(0, 3)) for _ in range(8)]
    moments += [Kill("draft", rng.uniform(0, 0.03)) for _ in range(6)]
    moments += [Kill("operation", rng.randint(1, 12)) for _ in range(6)]
    rng.shuffle(moments)
    return moments


@pytest.mark.parametrize("tool", WORDS)
def test_twenty_kills_change_nothing(tool, tmp_path, record_property):
    words = WORDS[tool](tmp_path)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    log = tmp_path / "whole.txt"
    assert train(tool, [*words, "OUTPUT_DIR", str(whole)], log, folder=whole) == 0, log.read_text()

    words += ["OUTPUT_DIR", str(killed)]
    log = tmp_path / "killed.txt"
    statuses = [train(tool, words, log, folder=killed, kill=kill) for kill in _moments(seed=5)]
    # A late moment may come after the end of the run
    assert set(statuses) <= {-9, 0}, log.read_text()
    assert train(tool, words, log, folder=killed) == 0, log.read_text()

    assert statuses.count(-9) >= 15
    assert not list(killed.glob("*.tmp"))
    for name in ("model_final.pth", "model_best.pth"):
        assert differences(content(whole / name), content(killed / name)) == []
    assert differences(metrics(whole), metrics(killed)) == []
    assert {path.name for path in whole.glob("*.pth")} == {
        path.name for path in killed.glob("*.pth")
    }
    if tool == "classification":
        assert _table(whole) == _table(killed)


@pytest.mark.parametrize("tool", WORDS)
def test_killed_before_each_of_the_last_operations_on_files(tool, tmp_path):
    """The last checkpoint, its evaluation and the best link: no later step corrects them."""
    words = WORDS[tool](tmp_path)
    length = {"detection": "SOLVER.MAX_ITER", "classification": "SOLVER.EPOCHS"}[tool]
    words += [length, "1", "DATALOADER.NUM_WORKERS", "0"]
    whole, log = tmp_path / "whole", tmp_path / "whole.txt"
    counting = Kill("operation", 0)
    assert train(tool, [*words, "OUTPUT_DIR", str(whole)], log, folder=whole, kill=counting) == 0
    count = int(log.read_text().split()[-1])
    assert count >= 5

    for number in range(count - 4, count + 1):
        killed, log = tmp_path / f"killed{number}", tmp_path / f"killed{number}.txt"
        again = [*words, "OUTPUT_DIR", str(killed)]
        assert train(tool, again, log, folder=killed, kill=Kill("operation", number)) == -9
        assert train(tool, again, log, folder=killed) == 0, log.read_text()
        for name in ("model_final.pth", "model_best.pth"):
            assert differences(content(whole / name), content(killed / name)) == [], number
        assert differences(metrics(whole), metrics(killed)) == [], number


def _table(folder: Path) -> list[list[str]]:
    rows = [line.split(",") for line in (folder / "summary.csv").read_text().splitlines()]
    speed = rows[0].index("images_per_second")
    return [row[:speed] + row[speed + 1 :] for row in rows]
