"""What happens every so many steps: checkpoints, statistics of batch norm, evaluations."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from detectron2.engine import HookBase
from detectron2.engine.hooks import PreciseBN
from detectron2.evaluation.testing import flatten_results_dict
from detectron2.utils import comm
from torch import nn

from lambda_det.distributed.signals import StopRequest, interruptible, received_signal
from lambda_det.errors import listed
from lambda_det.training.hooks import batches_with_objects
from lambda_det.training.loop import checkpoint_name
from lambda_det.training.randomness import Purpose, seed_all

__all__ = ["STATISTICS_SEED", "Checkpoints", "Evaluation", "PreciseStatistics", "stop_if_requested"]

logger = logging.getLogger(__name__)

STATISTICS_SEED = 1_000_003  # added to the run's, so that these images are not those of the steps
# What a checkpoint is the best in, where nobody says: the first that the results have
_METRICS = ("segm/AP", "bbox/AP", "keypoints/AP", "sem_seg/mIoU", "panoptic_seg/PQ")


def stop_if_requested() -> None:
    """Raise ``StopRequest`` on all processes if any received a signal: they must stop together.

    Call it on all processes, where all that they did is saved.
    """
    if signal := max(comm.all_gather(received_signal())):
        raise StopRequest(signal)


class PreciseStatistics(PreciseBN):
    """Detectron2's hook, on images that depend on the run's seed and the iteration alone.

    Its own goes on in one stream of images, which a resumed run would begin anew.
    :class:`Evaluation` calls it, so it need not be registered.
    """

    def __init__(self, period: int, model: nn.Module, loader: Any, num_iter: int) -> None:
        """
        Args:
            period: steps between two estimates; 0 for one at the end.
            model: its batch norms are estimated.
            loader: endless batches of training images; see ``TrainLoader``.
            num_iter: batches that are taken.
        """
        super().__init__(period, model, loader, num_iter)
        self._loader = loader

    def update_stats(self) -> None:
        trainer = self.trainer
        seed = trainer.seed + STATISTICS_SEED
        if hasattr(self._loader, "begin"):
            self._loader.begin(seed, (trainer.iter + 1) * trainer.cfg.SOLVER.ACCUMULATE_GRADIENTS)
        seed_all(Purpose.STEP, seed, trainer.iter, comm.get_rank(), device=trainer.cfg.MODEL.DEVICE)
        self._data_iter = batches_with_objects(self._loader)
        super().update_stats()
        self._data_iter = None  # with its workers


class Checkpoints(HookBase):
    """Saves every so many steps, before each evaluation and at the end."""

    def __init__(self, period: int, is_evaluated: Callable[[], bool]) -> None:
        """
        Args:
            period: steps between two checkpoints.
            is_evaluated: whether an evaluation follows on this step.
        """
        self._period = period
        self._is_evaluated = is_evaluated

    def after_step(self) -> None:
        trainer = self.trainer
        step = trainer.iter + 1
        if step >= trainer.max_iter:
            trainer.save_checkpoint("model_final")
        elif step % self._period == 0 or self._is_evaluated():
            trainer.save_checkpoint(checkpoint_name(trainer.iter))


class Evaluation(HookBase):
    """Evaluates every so many steps and at the end, and names the best checkpoint.

    The checkpoint is saved before, and says that its evaluation is still to come: a run that was
    killed in it begins with it. Precise statistics are taken first, at the same risk, and the
    checkpoint is saved once more with them.

    Attributes:
        results: of the last evaluation, by task and metric; empty on all processes but the first.
        last_step, best_step: steps done at the last and at the best evaluation; -1 for none.
        best: its metric.
    """

    def __init__(
        self, period: int, metric: str, statistics: PreciseStatistics | None = None
    ) -> None:
        """
        Args:
            period: steps between two evaluations; 0 for one at the end.
            metric: TEST.BEST_METRIC.
            statistics: are taken before; None keeps the running ones.
        """
        self._period = period
        self._metric = metric
        self._statistics = statistics
        self.results: dict[str, Any] = {}
        self.last_step = self.best_step = -1
        self.best = float("-inf")
        self._is_pending = False

    def is_due(self) -> bool:
        """Whether there is an evaluation after the step that is done."""
        step = self.trainer.iter + 1
        return step >= self.trainer.max_iter or (self._period > 0 and step % self._period == 0)

    def before_train(self) -> None:
        trainer = self.trainer
        # A checkpoint of an earlier version does not say that there was none
        unknown = self.last_step < 0 and trainer.start_iter >= trainer.max_iter
        if not self._is_pending and 0 < self.best_step == trainer.start_iter:
            # The run may have been killed before this checkpoint got its second name
            trainer.checkpointer.link(trainer.saved_as, "model_best")
        if self._is_pending or (unknown and trainer.start_iter > 0):
            logger.info(f"The evaluation after step {trainer.start_iter} is still to come")
            trainer.iter = trainer.storage.iter = trainer.start_iter - 1
            self._do()
            trainer.iter = trainer.storage.iter = trainer.start_iter

    def after_step(self) -> None:
        if self.is_due():
            self._do()

    def _do(self) -> None:
        trainer = self.trainer
        step = trainer.iter + 1
        stop_if_requested()
        self.results = interruptible(self._evaluate)
        self.last_step, self._is_pending = step, False
        is_best = comm.is_main_process() and self._keep_best(step)
        if self._statistics or step >= trainer.max_iter:
            # With the statistics that the results are of, and with the results
            trainer.save_checkpoint(trainer.saved_as)
        if is_best:
            trainer.checkpointer.link(trainer.saved_as, "model_best")
        comm.synchronize()  # the next step begins together

    def _evaluate(self) -> dict[str, Any]:
        if self._statistics:
            self._statistics.trainer = self.trainer
            self._statistics.update_stats()
        return _numbers(self.trainer.evaluate() or {})

    def _keep_best(self, step: int) -> bool:
        values = flatten_results_dict(self.results)
        self.trainer.storage.put_scalars(**values, smoothing_hint=False)
        name = self._metric or _usual_metric(values)
        if name not in values:
            if values:
                logger.warning(
                    f"TEST.BEST_METRIC {self._metric!r} is not among the results, which have "
                    f"{listed(values, 12)}: there is no model_best.pth"
                )
            return False
        if not values[name] > self.best:  # NaN is not, either
            logger.info(f"{name} {values[name]:.4g}; the best is {self.best:.4g}")
            return False
        self.best, self.best_step = values[name], step
        logger.info(f"{name} {self.best:.4g} is the best so far")
        return True

    def state_dict(self) -> dict[str, Any]:
        return {
            "last_step": self.last_step,
            "best_step": self.best_step,
            "best": self.best,
            "results": self.results,
            "pending": self.is_due() and self.last_step != self.trainer.iter + 1,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.last_step, self.best_step = state["last_step"], state["best_step"]
        self.best, self.results = state["best"], state["results"]
        self._is_pending = state["pending"]


def _numbers(results: Mapping[str, Any]) -> dict[str, Any]:
    """Results of any depth as plain dicts of floats, which a checkpoint can hold."""
    return {
        str(name): _numbers(value) if isinstance(value, Mapping) else float(value)
        for name, value in results.items()
    }


def _usual_metric(values: Mapping[str, float]) -> str:
    # Of several data sets, each names its own before: that of the first one counts
    for metric in _METRICS:
        for name in values:
            if name == metric or name.endswith(f"/{metric}"):
                return name
    return ""
