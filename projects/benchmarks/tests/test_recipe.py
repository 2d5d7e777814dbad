"""projects/benchmarks/recipe.py: rows are trained once, in order, and a failed one stops none."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.tool import load_tool

tool = load_tool("recipe", "projects/benchmarks")
PLAN = """
[sets]
cells = "--data cells --epochs 2"
ships = "--data ships"
[[rows]]
name = "SGD"
[[rows]]
name = "AdamW"
keys = "SOLVER.OPTIMIZER adamw"
sets = ["cells"]
seeds = [1, 2]
"""


@pytest.fixture
def commands(monkeypatch):
    """The commands that are run; instead of a training, each writes its metrics, or fails for
    ships."""
    commands = []

    def run(command, stdout, **others):
        commands.append(command)
        folder = Path(command[command.index("--output") + 1])
        folder.mkdir(exist_ok=True)
        (folder / "model_final.pth").touch()
        lines = [
            {"iteration": 9, "bbox_EMA/AP": 10.0, "bbox_EMA/AP50": 20.0},
            {"iteration": 10, "total_loss": 1.0},
            {"iteration": 19, "bbox_EMA/AP": 30.0 + len(commands), "bbox_EMA/AP50": 60.0},
        ]
        (folder / "metrics.json").write_text("\n".join(map(json.dumps, lines)))
        return subprocess.CompletedProcess(command, int("ships" in command))

    monkeypatch.setattr(tool.subprocess, "run", run)
    return commands


def test_rows(tmp_path, commands, capsys):
    plan, output = tmp_path / "plan.toml", tmp_path / "output"
    plan.write_text(PLAN)
    assert tool.main([str(plan), "--output", str(output)]) == 1
    assert [command[command.index("--data") :] for command in commands] == [
        ["--data", "cells", "--epochs", "2", "SEED", "1"],
        ["--data", "ships", "SEED", "1"],
        ["--data", "cells", "--epochs", "2", "SEED", "1", "SOLVER.OPTIMIZER", "adamw"],
        ["--data", "cells", "--epochs", "2", "SEED", "2", "SOLVER.OPTIMIZER", "adamw"],
    ]
    printed = capsys.readouterr()
    assert str(output / "ships" / "SGD" / "seed1.log") in printed.err
    assert "| SGD | 31.0 / 60.0 (0.0 min) |" in printed.out
    assert "| AdamW | 33.0 / 60.0, 34.0 / 60.0 (0.0, 0.0 min) |" in printed.out
    # What is done is not repeated, and its weights are gone; the failed one is, with its weights
    tool.main([str(plan), "--output", str(output)])
    assert len(commands) == 5
    assert "ships" in commands[-1]
    assert [path.parts[-4] for path in output.rglob("*.pth")] == ["ships"]
    result = json.loads((output / "cells" / "SGD" / "seed1" / tool.RESULT).read_text())
    assert result["curve"] == {"10": [10.0, 20.0], "20": [31.0, 60.0]}
