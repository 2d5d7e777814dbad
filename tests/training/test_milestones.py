"""Which evaluation is the best, and what is said where the metric is not among the results."""

from __future__ import annotations

import signal
from types import SimpleNamespace

import pytest
import torch
from detectron2.structures import Boxes, Instances
from detectron2.utils.events import EventStorage
from torch import nn

from lambda_det.distributed.signals import StopRequest
from lambda_det.training import milestones
from lambda_det.training.hooks import Histories
from lambda_det.training.milestones import STATISTICS_SEED, Evaluation, PreciseStatistics

NAN = float("nan")


def _run(results, metric="", *, period=1, steps=None, state=None, count=None):
    """Evaluate in ``count`` steps; returns the hook and what got the name model_best."""
    count = count or len(results)
    answers, links, saved = iter(results), [], []
    trainer = SimpleNamespace(start_iter=0, iter=0, max_iter=steps or len(results) + 1)
    trainer.evaluate = lambda: next(answers)
    trainer.save_checkpoint = saved.append
    trainer.checkpointer = SimpleNamespace(link=lambda name, other: links.append((name, other)))
    hook = Evaluation(period, metric)
    hook.trainer = trainer
    if state:
        hook.load_state_dict(state)
        trainer.start_iter = trainer.iter = 1
    with EventStorage() as trainer.storage:
        for iteration in range(trainer.start_iter, trainer.start_iter + count):
            trainer.iter, trainer.saved_as = iteration, f"model_{iteration}"
            hook.after_step()
    assert all(other == "model_best" for _, other in links)
    return hook, [name for name, _ in links]


def _box(*values):
    return [{"bbox": {"AP": value, "AP50": 100 - value}} for value in values]


@pytest.mark.parametrize(
    ("results", "metric", "best"),
    [
        (_box(3, 5, 5, 4), "", ["model_0", "model_1"]),
        (_box(3, 5, 2), "bbox/AP50", ["model_0", "model_2"]),
        (_box(NAN, 2, NAN), "", ["model_1"]),
        ([{"bbox": {"AP": 1}, "segm": {"AP": v}} for v in (9, 8)], "", ["model_0"]),
        ([{"one": {"bbox": {"AP": 1}}, "two": {"bbox": {"AP": 9}}}], "", ["model_0"]),
        ([{"sem_seg": {"mIoU": v}} for v in (1, 2)], "", ["model_0", "model_1"]),
        ([{}, None], "", []),
    ],
)
def test_the_best_is_that_of_the_highest_metric(results, metric, best):
    assert _run(results, metric)[1] == best


def test_of_several_data_sets_the_first_one_counts():
    results = [{"one": {"bbox": {"AP": a}}, "two": {"bbox": {"AP": -a}}} for a in (1, 2)]
    assert _run(results)[1] == ["model_0", "model_1"]


def test_a_metric_that_is_not_there_is_said_and_nothing_is_the_best(caplog):
    _, best = _run(_box(3), "bbox/AP51")
    assert best == [] and "'bbox/AP51' is not among the results" in caplog.text
    assert "bbox/AP50" in caplog.text


def test_a_worse_one_after_a_resume_is_not_the_best():
    hook, _ = _run(_box(60))
    state = hook.state_dict()
    hook, best = _run(_box(10), state=state, steps=9)
    assert best == [] and (hook.best, hook.best_step) == (60, 1)


def test_the_last_step_is_evaluated_whatever_the_period():
    results = _box(3, 5)
    assert _run(results, period=2, steps=3, count=3)[1] == ["model_1", "model_2"]
    assert _run(results[1:], period=0, steps=3, count=3)[1] == ["model_2"]


def test_no_evaluation_begins_where_another_process_was_told_to_stop(monkeypatch):
    monkeypatch.setattr(milestones.comm, "all_gather", lambda own: [own, signal.SIGUSR1])
    with pytest.raises(StopRequest) as caught:
        _run([], count=1)  # an evaluation would have no results
    assert caught.value.signal == signal.SIGUSR1


def test_histories_keep_what_the_log_is_smoothed_over():
    hook, other = Histories(), Histories()
    hook.trainer, other.trainer = SimpleNamespace(), SimpleNamespace()
    assert hook.state_dict() == {}
    with EventStorage() as hook.trainer.storage:
        storage = hook.trainer.storage
        for storage.iter in range(50):
            storage.put_scalars(total_loss=storage.iter**2, time=7.0)
            storage.put_scalar("accuracy", storage.iter)
            storage.put_scalar("accuracy", storage.iter + 0.5)  # accumulated batches
            if storage.iter == 9:
                storage.put_scalar("bbox/AP", 3.0, smoothing_hint=False)
    other.load_state_dict(hook.state_dict())
    with EventStorage(50) as other.trainer.storage:
        other.before_train()
    expected = storage.latest_with_smoothing_hint(20)
    del expected["time"]
    assert other.trainer.storage.latest_with_smoothing_hint(20) == expected
    assert len(other.trainer.storage.history("accuracy").values()) == 40


class _Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(2))

    def forward(self, batch):
        return self.layers(torch.stack([image["image"] for image in batch]))


class _Loader:
    def begin(self, *place):
        self.place = place

    def __iter__(self):
        objects = Instances((1, 1), gt_boxes=Boxes(torch.ones(1, 4)))
        while True:
            yield [{"image": torch.ones(2), "instances": objects}] * 16


@pytest.mark.parametrize("accumulate", [1, 3])
def test_precise_statistics_depend_on_seed_and_iteration_alone(accumulate):
    solver = SimpleNamespace(ACCUMULATE_GRADIENTS=accumulate)
    cfg = SimpleNamespace(SOLVER=solver, MODEL=SimpleNamespace(DEVICE="cpu"))

    def statistics(seed, iteration, drawn_before):
        torch.manual_seed(drawn_before)
        model, loader = _Noisy(), _Loader()
        hook = PreciseStatistics(0, model, loader, 2)
        hook.trainer = SimpleNamespace(
            seed=seed, iter=iteration, max_iter=iteration + 1, cfg=cfg, storage=None
        )
        with EventStorage() as hook.trainer.storage:
            hook.update_stats()
        # Images of the statistics' own order, not those of the steps
        assert loader.place == (seed + STATISTICS_SEED, (iteration + 1) * accumulate)
        return model.layers[1].running_mean.tolist()

    found = statistics(5, 7, 0)
    assert found == statistics(5, 7, 1)
    assert found != statistics(6, 7, 0) and found != statistics(5, 8, 0)
