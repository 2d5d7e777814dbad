"""When a run will end, said after its first steps and after its first evaluation."""

from types import SimpleNamespace

import pytest
from detectron2.utils.events import EventStorage

from lambda_det.training import hooks
from tests.training.toy import settings


def _said(caplog, *, steps, period, cost=8.0, start=0) -> list[str]:
    """A run whose steps take a second, and whose evaluations take three."""
    caplog.set_level("INFO", "lambda_det")
    hook = hooks.Forecast()
    hook.trainer = trainer = SimpleNamespace(
        start_iter=start,
        max_iter=steps,
        settings=settings(eval_period=period, images_per_step=4),
        evaluation=SimpleNamespace(seconds=0.0),
        task=SimpleNamespace(cost_of_evaluation=lambda: cost),
        storage=EventStorage(),
    )
    trainer.storage.put_scalar("time", 1.0)
    hook.before_train()
    for trainer.iter in range(start, steps):
        hook.after_step()
        if period and (trainer.iter + 1) % period == 0:
            trainer.evaluation.seconds = 3.0
    return caplog.messages


def test_after_the_first_steps_and_the_first_evaluation(caplog):
    first, second = _said(caplog, steps=100, period=40)
    # Each of 8 images at a quarter of a second
    for words in ("About 1.6 minutes", "1.5 minutes for 90 steps", "6 seconds for 3 evaluations"):
        assert words in first
    for words in ("About 65 seconds", "59 seconds for 59 steps", "6 seconds for 2 evaluations"):
        assert words in second


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        ({"steps": 20, "period": 0}, 0),
        ({"steps": 50, "period": 0}, 1),
        ({"steps": 40, "period": 5}, 1),
    ],
)
def test_short_runs(caplog, options, lines):
    assert len(_said(caplog, **options)) == lines


def test_a_time_that_is_not_known(caplog):
    (only,) = _said(caplog, steps=5000, period=0, cost=0.0, start=100)
    assert "82 minutes for 4,890 steps" in only and "not known yet for 1 evaluation" in only
