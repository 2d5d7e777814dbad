"""projects/benchmarks/compare_runs.py: the first step and tensor that differ between two runs."""

import json

import pytest
import torch

from tests.tool import load_tool

tool = load_tool("compare_runs", "projects/benchmarks")


@pytest.fixture
def runs(tmp_path):
    """Two equal runs of 40 steps, and what writes one with changes."""

    def write(name, change=lambda lines, states: None):
        folder = tmp_path / name
        folder.mkdir()
        lines = [
            {
                "iteration": i,
                "total_loss": 3.0 - i / 100,
                "lr": 0.1,
                "time": len(name) + i,
                "data_time": len(name) + i,
            }
            for i in (9, 19, 29, 39)
        ]
        states = {
            file: {
                "model": {"a": torch.ones(3) + i, "b": torch.tensor([1, i])},
                "optimizer": {"state": [{"momentum": torch.full((2,), float("nan"))}]},
            }
            for i, file in enumerate(("model_0000019.pth", "model_final.pth", "model_best.pth"))
        }
        change(lines, states)
        (folder / "metrics.json").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (folder / "config.yaml").write_text(f"SEED: {1}\nOUTPUT_DIR: {name}\n")
        for file, state in states.items():
            torch.save(state, folder / file)
        return str(folder)

    return write


def test_equal_runs(runs, capsys):
    assert tool.main([runs("first"), runs("the_second")]) == 0
    assert "are equal" in capsys.readouterr().out


def test_the_first_step_and_tensor_are_named(runs, capsys):
    def change(lines, states):
        lines[1]["total_loss"] += 1e-12
        lines[2]["total_loss"] += 1e-1
        states["model_final.pth"]["model"]["b"][1] = 4  # was 1
        states["model_best.pth"]["model"]["a"] *= 2

    first, second = runs("first"), runs("second", change)
    assert tool.main([first, second]) == 1
    said = capsys.readouterr().out
    assert "iteration 19 is the first" in said and "2.81 and 2.810000000001" in said
    assert "model_final.pth: 1 of 3 values differ, the first is model.b, by 0.75" in said
    assert "model_best" not in said and "lr" not in said and "time" not in said

    assert tool.main([first, second, "--tolerance", "0.01"]) == 1
    said = capsys.readouterr().out
    assert "iteration 29 is the first" in said and "iteration 19" not in said
    assert tool.main([first, second, "--tolerance", "0.8"]) == 0


def test_values_beside_the_tensors_are_compared(runs, capsys):
    def add(**values):
        def change(lines, states):
            states["model_final.pth"]["trainer"] = {"time": 1.0, "best": 40.0, **values}

        return change

    first = runs("first", add())
    left_out = {"time": 2.0, "config": "OUTPUT_DIR: same"}
    assert tool.main([runs("zeroth", add(config="")), runs("same", add(**left_out))]) == 0
    capsys.readouterr()
    second = runs("second", add(best=41.0, last="b"))
    assert tool.main([first, second]) == 1
    said = capsys.readouterr().out
    assert "2 of 4 values differ, the first is trainer.best, by 0.024" in said
    assert "the worst trainer.last, by inf" in said
    assert tool.main([first, runs("third", add(best=41.0)), "--tolerance", "0.1"]) == 0


def test_what_one_run_alone_has(runs, capsys):
    def change(lines, states):
        lines[0]["grad_norm"] = 2.0
        states["model_0000019.pth"]["model"]["new"] = torch.zeros(1)
        states["model_0000019.pth"]["model"]["a"] = torch.ones(4)

    assert tool.main([runs("first"), runs("second", change)]) == 1
    said = capsys.readouterr().out
    assert "iteration 9 is the first" in said and "grad_norm missing and 2.0" in said
    assert "2 of 3 values differ, the first is model.a, by inf" in said
    assert tool.main([runs("third"), runs("fourth", lambda lines, states: lines.pop())]) == 1
    assert "iteration 39 is the first" in capsys.readouterr().out


def test_runs_without_a_common_checkpoint(runs, capsys):
    assert tool.main([runs("first"), runs("second", lambda lines, states: states.clear())]) == 1
    assert "checkpoints" in capsys.readouterr().out


def test_a_line_that_a_kill_cut_off(runs):
    first, second = runs("first"), runs("second")
    with open(f"{first}/metrics.json", "a") as file:
        file.write('{"iteration": 49, "total_lo')
    assert tool.main([first, second]) == 0


def test_a_folder_without_a_run(runs, tmp_path, capsys):
    assert tool.main([runs("first"), str(tmp_path)]) == 2
    assert str(tmp_path / "metrics.json") in capsys.readouterr().err
