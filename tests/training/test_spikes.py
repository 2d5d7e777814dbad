"""A step whose loss stands out is named with its images, and counted."""

import pytest
import torch

from lambda_det.training import numerics
from lambda_det.training.numerics import LossSpikes
from tests.training.toy import Steps, ToyModel, batches, items


def _watch(losses):
    watch = LossSpikes()
    for loss in losses:
        watch.add(loss)
    return watch


def test_the_limit_is_ten_times_the_median():
    assert _watch([1.0] * 19).limit == float("inf")
    assert _watch([1.0] * 15 + [7.0] * 5).limit == 10.0
    assert _watch([5.0] * 100 + [1.0] * 100).limit == 10.0
    assert _watch([0.0] * 50).limit == float("inf")


def _slow():
    model = ToyModel()
    return Steps(model, (), torch.optim.SGD(model.parameters(), lr=1e-3))


def _run(caplog, spikes_at, steps, trainer=None, start=0):
    data = items(2 * steps)
    for index, item in enumerate(data):
        item["file_name"] = f"{index}.jpg"
        item["offset"] = 1.0 + (1000.0 if index // 2 in spikes_at and index % 2 else 0.0)
    trainer = trainer or _slow()
    trainer.batches = iter(batches(data[2 * start :], 2))
    with caplog.at_level("WARNING", "lambda_det.training.step"):
        return trainer, trainer.take(range(start, steps))


def test_a_spike_is_named_with_its_images(caplog):
    _, storage = _run(caplog, {5, 30}, 40)
    [record] = caplog.records
    text = record.getMessage()
    assert text.startswith("Loss spike at iteration 30 (images 60.jpg, 61.jpg): 100")
    assert "median" in text and "loss_fit 100" in text and "gradient norm" in text
    assert storage.history("loss_spikes").values()[0] == (1, 30)


def test_warnings_are_rare_and_the_count_is_not(monkeypatch, caplog):
    monkeypatch.setattr(numerics, "PAUSE", 10)
    _, storage = _run(caplog, {30, 32, 34, 45}, 50)
    said = [r.getMessage() for r in caplog.records]
    assert [text.split(" (")[0] for text in said] == [
        "Loss spike at iteration 30",
        "Loss spike at iteration 45",
    ]
    assert said[1].endswith("4 so far")
    assert storage.history("loss_spikes").latest() == 4


@pytest.mark.parametrize("stop", [10, 31, 36])
def test_a_resumed_run_counts_on(caplog, stop):
    whole, _ = _run(caplog, {30, 35}, 50)
    before = [r.getMessage() for r in caplog.records]
    caplog.clear()
    first, _ = _run(caplog, {30, 35}, stop)
    second = _slow()
    second.model.load_state_dict(first.model.state_dict())
    second.load_state_dict(first.state_dict())
    _run(caplog, {30, 35}, 50, second, stop)
    assert [r.getMessage() for r in caplog.records] == before
    assert second.state_dict()["loss_spikes"] == whole.state_dict()["loss_spikes"]
