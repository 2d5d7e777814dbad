"""Evaluation during training: when it happens, the best checkpoint, and early stopping."""

from __future__ import annotations

import logging
import math
import operator
import time
from collections.abc import Iterable, Mapping
from typing import Any

from detectron2.engine import HookBase
from detectron2.evaluation.testing import flatten_results_dict
from detectron2.utils import comm

from lambda_det.distributed.signals import leave_if_asked
from lambda_det.errors import listed
from lambda_det.training.log import is_loss, plain_name
from lambda_det.training.task import Results

logger = logging.getLogger(__name__)

_STATE = ("last_step", "best_step", "best", "best_name", "without_progress", "results")


class Evaluation(HookBase):
    """Evaluates as the settings say and at the end, and names the best checkpoint.

    Before an evaluation a checkpoint is saved that is marked as not evaluated yet. A run that was
    killed during the evaluation begins with it when it is resumed. After the evaluation the
    checkpoint is saved again, with the results and the statistics that they were computed with.

    Attributes:
        results: of the last evaluation, the same on all processes.
        last_step, best_step: steps done at the last and at the best evaluation; -1 for none.
        best, best_name: the best value of the metric, and which result it is.
        without_progress: evaluations since the best one.
        is_pending: whether a resumed run begins with an evaluation.
        seconds: that the last evaluation of this process took; 0 before there was one.
    """

    def __init__(self) -> None:
        self.results: Results = {}
        self.last_step = self.best_step = -1
        self.best = float("-inf")
        self.best_name = ""
        self.without_progress = 0
        self.is_pending = False
        self.seconds = 0.0

    def is_due(self) -> bool:
        """Whether there is an evaluation after the step that is done."""
        step, period = self.trainer.iter + 1, self.trainer.settings.eval_period
        is_last = step >= self.trainer.max_iter
        return is_last or (period > 0 and step // period > (step - 1) // period)

    def before_train(self) -> None:
        trainer = self.trainer
        if self.is_pending:
            logger.info(f"The evaluation after step {trainer.start_iter} is still to come")
            trainer.iter = trainer.storage.iter = trainer.start_iter - 1
            self._evaluate()
            trainer.iter = trainer.storage.iter = trainer.start_iter
        elif 0 < self.best_step == trainer.start_iter:
            # The run may have been killed before this checkpoint got its second name
            trainer.checkpointer.link(trainer.saved_as, "model_best")

    def after_train(self) -> None:
        if self.best_step >= 0:
            wrong = [
                name
                for name, value in flatten_results_dict(self.results).items()
                if value == 0 and _first_of(self.trainer.task.metrics, {name: value})
            ]
            advice = f"; nothing of {listed(wrong)} is right yet: more epochs, or see the page"
            logger.info(
                f"The best evaluation is that after step {self.best_step}, in model_best.pth: "
                f"{self.best_name} {self.best:.4g}{advice if wrong else ''}"
            )

    def after_step(self) -> None:
        if self.is_due():
            self.trainer.save_checkpoint()  # whose state says that its evaluation is to come
            self._evaluate()

    def _evaluate(self) -> None:
        trainer = self.trainer
        step = trainer.iter + 1
        leave_if_asked()
        began = time.perf_counter()
        results = trainer.evaluate()
        leave_if_asked()
        self.results = _floats(comm.all_gather(results)[0] or {})  # all processes have the same
        self.seconds = time.perf_counter() - began
        values = flatten_results_dict(self.results)
        self.last_step, self.is_pending = step, False
        verdict = self._compare(values, step)
        if self._is_out_of_patience() and step < trainer.max_iter:
            logger.info(
                f"Stopping early: {self.without_progress} evaluation(s) brought nothing better"
            )
            trainer.max_iter = step
        trainer.storage.put_scalars(**values, smoothing_hint=False)
        if comm.is_main_process() and values:
            clauses = [f"step {step}", trainer.task.describe(self.results), verdict]
            logger.info("Evaluation: " + "; ".join(filter(None, clauses)))
        trainer.save_checkpoint()
        if self.best_step == step:
            trainer.checkpointer.link(trainer.saved_as, "model_best")
        comm.synchronize()  # the first process has written while the others waited

    def _compare(self, values: Mapping[str, float], step: int) -> str:
        """Keep the best; returns a clause about it for the log."""
        settings = self.trainer.settings
        # a resumed run keeps to the result that it began with
        wanted = self.best_name, *self.trainer.task.metrics
        if settings.best_metric:
            wanted = (settings.best_metric,)
        name = _first_of(wanted, values)
        if not name:
            if values:
                logger.warning(
                    f"{settings.key('best_metric')} {settings.best_metric!r} is not among the "
                    f"results, which have {listed(values, 12)}: there is no model_best.pth"
                )
            return ""
        # the lowest loss is the best
        is_better = operator.lt if is_loss(name) else operator.gt
        value = values[name]
        first = self.best_step < 0 and not math.isnan(value)
        if first or is_better(value, self.best):  # NaN is not
            self.best, self.best_step, self.best_name = value, step, name
            self.without_progress = 0
            return f"{name} {value:.4g} is the best so far"
        self.without_progress += 1
        if self.best_step < 0:  # all were NaN
            return f"{name} is {value:.4g}"
        return f"{name} {value:.4g}; the best is {self.best:.4g} of step {self.best_step}"

    def _is_out_of_patience(self) -> bool:
        return 0 < self.trainer.settings.patience <= self.without_progress

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _STATE} | {
            "pending": self.is_due() and self.last_step != self.trainer.iter + 1,
            "planned": self.trainer.settings.max_iter,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in _STATE:
            setattr(self, name, state[name])
        self.is_pending = state["pending"]
        # A longer training is not over, whatever the end of the shorter one was
        if self.trainer.settings.max_iter > state.get("planned", math.inf):
            self.without_progress = 0
        if self._is_out_of_patience() and self.last_step < self.trainer.max_iter:
            self.trainer.max_iter = self.last_step  # it has stopped early


def _floats(results: Mapping[str, Any]) -> Results:
    """Convert results of any depth to plain dicts of floats, which a checkpoint can hold."""
    return {
        str(name): _floats(value) if isinstance(value, Mapping) else float(value)
        for name, value in results.items()
    }


def _first_of(metrics: Iterable[str], values: Mapping[str, float]) -> str:
    """The first result that one of the names means; "" where there is none."""
    # It is the result of that name, or else the first one with more in its name: the data set
    # before it, or that it is of averaged weights, or both
    for metric in metrics:
        if metric in values:
            return metric
        for name in values:
            if any(f"/{form}".endswith(f"/{metric}") for form in (name, plain_name(name))):
                return name
    return ""
