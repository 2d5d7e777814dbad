"""When it evaluates, which evaluation is the best, and when it stops early."""

import signal
from types import SimpleNamespace

import pytest
from detectron2.utils.events import EventStorage

from lambda_det.distributed.signals import StopRequest
from lambda_det.training import evaluation as evaluation_module
from lambda_det.training.evaluation import Evaluation
from tests.training.toy import settings

NAN = float("nan")
METRICS = ("segm/AP", "bbox/AP", "sem_seg/mIoU", "val/ema_top1", "val/raw_top1")


class _Trainer:
    """The parts of a trainer that the hook uses; step n has the loss n."""

    def __init__(self, folder, results, *, steps, period=1, metric="", patience=0, start=0):
        self.answers = iter(results)
        self.saved, self.links = {}, []
        self.iter = self.start_iter = start
        self.max_iter = steps
        self.settings = settings(
            output_dir=str(folder),
            eval_period=period,
            best_metric=metric,
            patience=patience,
            max_iter=steps,
        )
        self.task = SimpleNamespace(
            describe=lambda results: "",
            metrics=METRICS,
        )
        self.checkpointer = SimpleNamespace(link=lambda name, other: self.links.append(name))
        self.evaluation = Evaluation()
        self.evaluation.trainer = self

    def evaluate(self):
        return next(self.answers)

    def save_checkpoint(self):
        final = self.iter + 1 >= self.max_iter
        self.saved_as = "model_final" if final else f"model_{self.iter}"
        self.saved[self.saved_as] = self.evaluation.state_dict()

    def run(self, state=None):
        if state:
            self.evaluation.load_state_dict(state)
        with EventStorage(self.start_iter) as self.storage:
            self.evaluation.before_train()
            while self.iter < self.max_iter:
                self.storage.iter = self.iter
                self.storage.put_scalars(total_loss=self.iter)
                self.evaluation.after_step()
                self.iter += 1
            self.evaluation.after_train()
        return self


def _box(*values):
    return [{"bbox": {"AP": value, "AP50": 100 - value}} for value in values]


@pytest.mark.parametrize(
    ("results", "metric", "best"),
    [
        (_box(3, 5, 5, 4), "", [0, 1]),
        (_box(3, 5, 2), "bbox/AP50", [0, 2]),
        (_box(NAN, 2, NAN), "", [1]),
        ([{"bbox": {"AP": 1}, "segm": {"AP": v}} for v in (9, 8)], "", [0]),
        ([{"one": {"bbox": {"AP": a}}, "two": {"bbox": {"AP": -a}}} for a in (1, 2)], "", [0, 1]),
        ([{"bbox_EMA": {"AP": 1, "AP50": v}} for v in (2, 1)], "bbox/AP50", [0]),
        ([{"bbox_EMA": {"AP": v}, "bbox": {"AP": -v}} for v in (1, 2)], "bbox/AP", [0]),
        ([{"one": {"bbox_EMA": {"AP": 1, "AP50": v}}} for v in (2, 1)], "bbox_EMA/AP50", [0]),
        ([{"bbox_EMA": {"AP": 1, "AP-red/cup": v}} for v in (2, 1)], "bbox/AP-red/cup", [0]),
        ([{"val": {"raw_top1": -v, "ema_top1": v}} for v in (1, 2)], "", [0, 1]),
        ([{"val": {"raw_loss": v}} for v in (1, 2)], "val/raw_loss", [0]),
        ([{"bbox": {"AP-gloss/loss": v}} for v in (1, 2)], "bbox/AP-gloss/loss", [0, 1]),
        ([{"hall/Line-A": {"raw_loss": v}} for v in (1, 2)], "raw_loss", [0]),  # a data set
        ([{}, None], "", []),
    ],
)
def test_the_best_is_that_of_the_highest_metric(tmp_path, results, metric, best):
    trainer = _Trainer(tmp_path, results, steps=len(results), metric=metric).run()
    names = [f"model_{step}" for step in range(len(results) - 1)] + ["model_final"]
    assert trainer.links == [names[step] for step in best]


@pytest.mark.parametrize(
    ("metric", "values", "words"),
    [
        ("bbox/AP51", (3,), ("best_metric 'bbox/AP51'", "bbox/AP50")),
        ("", (NAN, NAN, NAN), ("bbox/AP is nan", "Stopping early")),
    ],
)
def test_without_a_value_of_the_metric_nothing_is_the_best(tmp_path, caplog, metric, values, words):
    caplog.set_level("INFO")
    options = {"steps": len(values), "patience": 2, "metric": metric}
    trainer = _Trainer(tmp_path, _box(*values), **options).run()
    assert trainer.links == [] and all(word in caplog.text for word in words)
    assert "step -1" not in caplog.text


@pytest.mark.parametrize(
    ("boxes", "masks", "advised"),
    [
        (0, 0, "bbox/AP, segm/AP"),
        (3, 0, "segm/AP"),
        (0, 3, "bbox/AP"),
        (3, 3, None),
    ],
)
def test_a_run_says_of_what_nothing_is_right(tmp_path, caplog, boxes, masks, advised):
    caplog.set_level("INFO")
    _Trainer(tmp_path, [{"bbox": {"AP": boxes}, "segm": {"AP": masks}}], steps=1).run()
    (line,) = [text for text in caplog.messages if "model_best.pth" in text]
    assert advised is None or f"nothing of {advised} is right" in line
    assert ("more epochs" in line) == bool(advised)


def test_nothing_right_on_one_of_two_data_sets_is_said(tmp_path, caplog):
    caplog.set_level("INFO")
    results = {"one": {"bbox": {"AP": 3}}, "two": {"bbox": {"AP": 0}}}
    _Trainer(tmp_path, [results], steps=1).run()
    assert "nothing of two/bbox/AP is right" in caplog.text


def test_a_worse_one_after_a_resume_is_not_the_best(tmp_path):
    first = _Trainer(tmp_path, _box(60), steps=1).run()
    state = first.saved["model_final"]
    # nor by another result, which is the first of the metrics
    second = _Trainer(tmp_path, [{"segm": {"AP": 70}, "bbox": {"AP": 10}}], steps=2, start=1)
    second.saved_as = "model_final"
    second.run(state)
    assert (second.evaluation.best, second.evaluation.best_step) == (60, 1)
    assert second.links == ["model_final"]  # which may not have had its second name


def test_evaluations_keep_to_a_period_that_is_not_whole(tmp_path):
    trainer = _Trainer(tmp_path, _box(*range(9)), steps=11, period=2.5).run()
    # and once more at the end
    values = trainer.storage.history("bbox/AP").values()
    assert {iteration + 1: value for value, iteration in values} == {3: 0, 5: 1, 8: 2, 10: 3, 11: 4}


def test_patience_counts_evaluations_in_a_row_over_a_resume(tmp_path):
    words = {"period": 2, "steps": 12, "patience": 2}
    trainer = _Trainer(tmp_path, _box(5, 4, 6, 5, 5, 9), **words).run()
    assert trainer.max_iter == 10 and trainer.evaluation.best == 6
    state = trainer.saved["model_final"]
    stopped = _Trainer(tmp_path, [], start=10, **words)
    stopped.saved_as = "model_final"
    assert stopped.run(state).max_iter == 10  # it has stopped already
    longer = _Trainer(tmp_path, _box(5, 5, 9), start=10, **words | {"steps": 16})
    longer.run(state)
    assert longer.max_iter == 14 and longer.evaluation.best == 6  # it counts anew
    resumed = _Trainer(tmp_path, _box(5, 9), start=8, **words)
    resumed.run(trainer.saved["model_7"])
    assert resumed.max_iter == 10  # one was left of its patience


def test_no_evaluation_begins_where_another_process_was_asked_to_stop(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation_module.comm, "all_gather", lambda own: [own, signal.SIGTERM])
    with pytest.raises(StopRequest) as caught:
        _Trainer(tmp_path, [], steps=1).run()  # an evaluation would have no results
    assert caught.value.signal == signal.SIGTERM


def test_the_first_lowest_loss_is_the_best_and_said_at_the_end(tmp_path, caplog):
    caplog.set_level("INFO")
    results = [{"validation": {"total_loss": value}} for value in (NAN, 3.0, 2.0, 2.5, 2.0)]
    trainer = _Trainer(tmp_path, results, steps=9, metric="validation/total_loss", patience=2).run()
    evaluation = trainer.evaluation
    assert (evaluation.best, evaluation.best_step, trainer.max_iter) == (2.0, 3, 5)
    stopped, best = caplog.messages[-3], caplog.messages[-1]
    assert "Stopping early" in stopped
    assert "step 3," in best and "validation/total_loss 2" in best
