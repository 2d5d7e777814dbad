"""A classification run that a scheduler stops goes on as if nothing were."""

import signal

import pytest

from lambda_det.classification import ClassificationTask, run
from lambda_det.errors import Preempted
from lambda_det.training.checkpointer import SafeCheckpointer
from lambda_det.training.trainer import Trainer
from lambda_det.weights.formats import read_checkpoint
from tests.reliability.ends import Killed, kill_before, signal_in, stop_evaluation
from tests.reliability.runs import assert_same_run, content, table

pytestmark = pytest.mark.slow  # trains


@pytest.mark.parametrize("step", [0, 2])  # that of step 2 is evaluated
def test_a_signal_saves_after_the_step(arguments, tmp_path, monkeypatch, step):
    words = ("DATALOADER.NUM_WORKERS", 2 if step == 0 else 0, "SOLVER.ACCUMULATE_GRADIENTS", 2)
    run(arguments(*words, "OUTPUT_DIR", tmp_path / "whole"))
    with monkeypatch.context() as patch:
        signal_in(patch, step, signal.SIGUSR1)
        with pytest.raises(Preempted, match=f"SIGUSR1 after step {step + 1}; .*model_000000{step}"):
            run(arguments(*words))
    run(arguments("--resume", *words))
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def test_the_best_checkpoint_that_had_no_second_name_yet(arguments, tmp_path, monkeypatch):
    def kill(*_):
        raise Killed

    best = tmp_path / "run/model_best.pth"
    with monkeypatch.context() as patch:
        patch.setattr(SafeCheckpointer, "link", kill)
        with pytest.raises(Killed):
            run(arguments())
    assert not best.exists()
    monkeypatch.setattr(Trainer, "run_step", kill)  # no further evaluation
    with pytest.raises(Killed):
        run(arguments("--resume"))
    assert content(best)["iteration"] == 2


def _kill_after(evaluation, monkeypatch):
    """Before a checkpoint knows the results, which are in summary.csv already."""
    original = Trainer.save_checkpoint

    def save_checkpoint(self):
        if self.evaluation.last_step == self.iter + 1 == 3 * evaluation:
            raise Killed
        original(self)

    monkeypatch.setattr(Trainer, "save_checkpoint", save_checkpoint)


# Evaluations after 3 and 6 steps, checkpoints after 2, 3, 4 and 6: killed within an epoch with and
# without a checkpoint of that very step, and at its end.
@pytest.mark.parametrize("step", [3, pytest.param(4, marks=pytest.mark.release), 5])
def test_killed_and_resumed_is_the_run_that_was_not(whole, arguments, tmp_path, monkeypatch, step):
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        kill_before(patch, step)
        with pytest.raises(Killed):
            run(arguments())
    assert not (folder / "model_final.pth").exists()
    if step == 4:  # that of step 3 was evaluated, and this one was not
        between = read_checkpoint(folder / "model_0000003.pth")
        assert (between["results"], between["precise_statistics"]) == ({}, [])
    run(arguments("--resume"))
    assert_same_run(whole, folder)
    assert table(whole) == table(folder)


# After step 3, and the last one
@pytest.mark.parametrize(
    ("evaluation", "how"),
    [
        (1, "told"),
        (2, "killed"),
        pytest.param(1, "recorded", marks=pytest.mark.release),
        (2, "recorded"),
    ],
)
def test_an_evaluation_that_did_not_end_comes_first(
    arguments, whole, tmp_path, monkeypatch, caplog, evaluation, how
):
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        if how == "recorded":
            _kill_after(evaluation, patch)
        else:
            stop_evaluation(patch, ClassificationTask, evaluation, how)
        with pytest.raises((Killed, Preempted)) as caught:
            run(arguments())
    last = folder / ("model_0000002.pth", "model_final.pth")[evaluation - 1]
    if how == "told":
        assert f"SIGTERM after step {3 * evaluation}; {last} holds" in str(caught.value)
    pending = read_checkpoint(last)
    assert (pending["results"], pending["precise_statistics"]) == ({}, [])
    caplog.set_level("INFO")
    run(arguments("--resume"))
    assert f"The evaluation after step {3 * evaluation} is still to come" in caplog.text
    assert_same_run(whole, folder)
    assert table(whole) == table(folder)
    assert sorted(p.name for p in whole.glob("*.pth")) == sorted(
        p.name for p in folder.glob("*.pth")
    )
    for name in ("model_final.pth", "model_best.pth"):
        results = [read_checkpoint(place / name)["results"] for place in (whole, folder)]
        assert results[0] == results[1] != {}
