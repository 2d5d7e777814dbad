"""When it evaluates, which evaluation is the best, when it stops, and the table that it writes."""

import csv
from types import SimpleNamespace

import pytest
from detectron2.utils.events import EventStorage

from lambda_det.classification.evaluation import Accuracy
from lambda_det.classification.evaluator import Evaluator, append_summary, cut_summary


def _accuracy(top1):
    return Accuracy(top1, 99.0, 1.0, 10)


def _run(tops, *, period, steps, patience=0, state=None, start=0, saved=None, folder):
    """Go through steps; each evaluation brings the next of ``tops``."""
    answers = iter(tops)
    saved = {} if saved is None else saved
    evaluator = Evaluator(lambda: next(answers), period, patience)
    if state:
        evaluator.load_state_dict(state)
    trainer = SimpleNamespace(
        iter=start,
        start_iter=start,
        save_checkpoint=lambda name: saved.update({name: evaluator.state_dict()}),
        max_iter=steps,
        cfg=SimpleNamespace(OUTPUT_DIR=str(folder)),
        plan=SimpleNamespace(epochs=lambda step: step / 10),
    )
    evaluator.trainer = trainer
    with EventStorage(start) as trainer.storage:
        if start:  # as Histories has it from the checkpoint
            trainer.storage.put_scalar("lr", 0.1, cur_iter=start - 1)
        evaluator.before_train()
        while trainer.iter < trainer.max_iter:
            trainer.storage.put_scalar("total_loss", trainer.iter)
            trainer.storage.put_scalar("images_per_second", 7)
            trainer.storage.put_scalar("lr", 0.1)
            evaluator.after_step()
            trainer.iter += 1
    return evaluator, trainer


def _rows(folder):
    with (folder / "summary.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def _val(top1):
    return {"val": {"raw": _accuracy(top1)}}


def test_evaluations_keep_to_a_period_that_is_not_whole(tmp_path):
    _run([_val(n) for n in range(9)], period=2.5, steps=11, folder=tmp_path)
    rows = _rows(tmp_path)
    assert [int(row["step"]) for row in rows] == [3, 5, 8, 10, 11]  # and once more at the end
    # the mean loss since the row before
    assert [float(row["train_loss"]) for row in rows] == [1, 3.5, 6, 8.5, 10]


def test_held_out_images_and_averaged_weights_decide(tmp_path):
    def results(held_raw, held_ema, val_raw, val_ema):
        return {
            "held_out": {"raw": _accuracy(held_raw), "ema": _accuracy(held_ema)},
            "val": {"raw": _accuracy(val_raw), "ema": _accuracy(val_ema)},
        }

    tops = [results(90, 10, 90, 90), results(0, 20, 0, 0), results(99, 15, 99, 99)]
    evaluator, _ = _run(tops, period=1, steps=3, folder=tmp_path)
    assert (evaluator.best, evaluator.best_step) == (20, 2)
    tops = [_val(3), _val(5), _val(5)]
    evaluator, _ = _run(tops, period=1, steps=3, folder=tmp_path)
    assert (evaluator.best, evaluator.best_step, evaluator.without_progress) == (5, 2, 1)


def test_patience_counts_evaluations_in_a_row_over_a_resume(tmp_path):
    tops = [_val(top) for top in (5, 4, 6, 5, 5, 9)]
    evaluator, trainer = _run(tops, period=2, steps=12, patience=2, folder=tmp_path)
    assert trainer.max_iter == 10 and evaluator.best == 6
    state = evaluator.state_dict()
    _, trainer = _run([], period=2, steps=12, patience=2, state=state, folder=tmp_path)
    assert trainer.max_iter == 0  # it has stopped already
    first, _ = _run(tops[:4], period=2, steps=8, patience=2, folder=tmp_path)
    _, trainer = _run(
        tops[4:], period=2, steps=12, patience=2, state=first.state_dict(), folder=tmp_path
    )
    assert trainer.max_iter == 2  # one was left of its patience


@pytest.mark.parametrize("patience", [0, 2])
def test_a_pending_evaluation_counts_as_if_it_had_come_in_its_time(tmp_path, patience):
    tops = [_val(top) for top in (5, 4, 3, 9)]
    words = {"period": 2, "steps": 8, "patience": patience}
    for name in ("whole", "stopped"):
        (tmp_path / name).mkdir()
    one, trainer = _run(tops, **words, folder=tmp_path / "whole")
    assert trainer.max_iter == (6 if patience else 8)
    saved = {}
    with pytest.raises(StopIteration):  # within the third
        _run(tops[:2], **words, saved=saved, folder=tmp_path / "stopped")
    assert list(saved) == ["model_0000001", "model_0000003", "model_0000005"]
    state = saved["model_0000005"]
    assert (state["is_pending"], state["last_step"]) == (True, 4)
    other, resumed = _run(
        tops[2:], **words, state=state, start=6, saved=saved, folder=tmp_path / "stopped"
    )
    assert (resumed.max_iter, resumed.iter) == (trainer.max_iter, trainer.iter)
    assert other.state_dict() == one.state_dict()
    tables = [_rows(tmp_path / name) for name in ("whole", "stopped")]
    assert tables[1][2].pop("images_per_second") == ""  # of another start, on who knows what
    tables[0][2].pop("images_per_second")
    assert tables[0] == tables[1]


@pytest.mark.parametrize(("last", "left"), [(9, ["1", "9"]), (8, ["1"]), (0, [])])
def test_a_resumed_run_drops_the_rows_of_steps_to_come(tmp_path, last, left):
    path = tmp_path / "summary.csv"
    for step in (1, 9, 12):
        append_summary(path, {"epoch": step / 4, "step": step})
    with path.open("a") as file:
        file.write("4.")  # cut off by a kill
    cut_summary(path, last)
    rows = list(csv.DictReader(path.open(newline=""))) if path.exists() else []
    assert [row["step"] for row in rows] == left


def test_other_parts_after_a_resume_get_columns_of_their_own(tmp_path):
    path = tmp_path / "summary.csv"
    append_summary(path, {"step": 1, "val": 5})
    append_summary(path, {"step": 2, "held_out": 6})
    append_summary(path, {"step": 3, "val": 7})
    cut_summary(path, 3)
    rows = list(csv.DictReader(path.open(newline="")))
    assert [(row["val"], row["held_out"]) for row in rows] == [("5", ""), ("", "6"), ("7", "")]
