"""``--time``: the schedule of a run follows from the measured time of its own first steps."""

from __future__ import annotations

import bisect
import logging
import math
import statistics
import time

from detectron2.config import CfgNode
from detectron2.engine import HookBase
from detectron2.utils import comm

from lambda_det.detection.task import DetectionTask
from lambda_det.errors import ConfigError, counted, duration
from lambda_det.own_data import fit
from lambda_det.training.run_folder import RunFolder

logger = logging.getLogger(__name__)

_STEPS = 6  # that are timed, after three that are not: the first ones of a process take longer
_ENOUGH = 0.05  # share of the time after which fewer steps must do
_TO_SPARE = 0.05  # guess: share of the time for its start and end, and for steps that take longer


class TimeBudget(HookBase):
    """Fits the schedule into RECIPE.TIME, and ends a run in which no epoch fits.

    The schedule is set after the first steps, and its length again after each evaluation, by the
    time that steps and evaluations took. config.yaml has it, so a resumed run keeps it.
    """

    def __init__(self, task: DetectionTask) -> None:
        """
        Args:
            task: whose configuration is completed.

        Raises:
            ConfigError: there are no rules for its architecture.
        """
        fit.check(task.config)
        self._task = task
        self._time = (1 - _TO_SPARE) * task.config.RECIPE.TIME
        self._begun = time.monotonic()
        self._seconds: list[float] = []  # of the steps
        self._is_set = False

    def after_step(self) -> None:
        trainer = self.trainer
        if "time" in trainer.storage.histories():  # Detectron2 does not time the first three
            self._seconds.append(trainer.storage.history("time").latest())
        if trainer.iter + 1 >= trainer.max_iter:
            return
        if self._is_set:
            if trainer.evaluation.last_step == trainer.iter + 1:
                self._set_length()
            return
        elapsed = time.monotonic() - self._begun
        enough = 1 if elapsed > _ENOUGH * self._time else _STEPS
        if comm.all_gather(len(self._seconds) >= enough)[0]:
            self._is_set = True
            self._set_schedule()

    def _set_schedule(self) -> None:
        """Set as many epochs as fit, or refuse the time where none does."""
        cfg, images = self._task.config, self._images()
        left, step, evaluation = self._measured()
        done = self.trainer.iter + 1

        def to_end(steps: int) -> float:
            """The seconds from now to the end of a run of so many steps."""
            period = _with_steps(cfg, steps, images).TEST.EVAL_PERIOD or steps
            return (steps - done) * step + math.ceil(steps / period) * evaluation

        most = done + max(int(left / step), 0)
        steps = done + bisect.bisect_right(range(done + 1, most + 1), left, key=to_end)
        of_epoch = math.ceil(images / cfg.SOLVER.IMS_PER_BATCH)
        if steps < of_epoch:
            whole = (self._time - left + to_end(of_epoch)) / (1 - _TO_SPARE)
            raise ConfigError(
                f"--time is too short: a step takes {step:.3g} s here, and one epoch, "
                f"{counted(of_epoch, 'step')}, with the start and an evaluation about "
                f"{duration(whole)}; give --resume and --time {math.ceil(whole / 60 + 0.1)}m or "
                "more, or --epochs for less than one."
            )
        steps = max(steps, done + 1)  # at whose end the run is evaluated and saved
        changed = _with_steps(cfg, steps, images)
        changed.RECIPE.TIME = 0.0
        self._go_on_with(changed)
        epochs = steps * cfg.SOLVER.IMS_PER_BATCH / images
        logger.info(
            f"--time: a step takes {step:.3g} s, so {epochs:.3g} epochs fit, in "
            f"{counted(steps, 'step')}"
        )

    def _set_length(self) -> None:
        """Make the run longer or shorter by what its steps and evaluations took."""
        # After whole periods between evaluations fewer steps than half a period are left out,
        # because the evaluation at their end would be wasted. Where nothing fits any more, the run
        # is over.
        cfg, done = self._task.config, self.trainer.iter + 1
        left, step, evaluation = self._measured()
        period = cfg.TEST.EVAL_PERIOD
        periods, rest = divmod(max(left, 0.0), period * step + evaluation)
        steps = int(max(rest - evaluation, 0.0) / step)
        if periods and steps < period / 2:
            steps = 0
        steps += int(periods) * period
        logger.info(f"--time: {counted(steps, 'more step')} fit into what is left")
        changed = _with_steps(cfg, done + steps, self._images())
        changed.TEST.EVAL_PERIOD = period
        changed.SOLVER.CHECKPOINT_PERIOD = cfg.SOLVER.CHECKPOINT_PERIOD
        self._go_on_with(changed)
        if not steps:
            self.trainer.save_checkpoint()  # as that of the end

    def _images(self) -> int:
        """To train on, or tiles of them."""
        return self.trainer.loader.state_dict()["records"]

    def _measured(self) -> list[float]:
        """The seconds that are left, of a step and of an evaluation, the same on all processes."""
        evaluation = self.trainer.evaluation.seconds
        step = statistics.fmean(self._seconds)
        if not evaluation:
            batch = self._task.config.SOLVER.IMS_PER_BATCH
            evaluation = self._task.cost_of_evaluation() * step / batch
        left = self._time - (time.monotonic() - self._begun)
        return comm.all_gather([left, step, evaluation])[0]

    def _go_on_with(self, config: CfgNode) -> None:
        self._task.change(config)
        self.trainer.reschedule()
        if comm.is_main_process():
            folder = RunFolder(config.OUTPUT_DIR)
            folder.save_config(self._task.dump(), folder.config_origin() or None)


def _with_steps(cfg: CfgNode, steps: int, images: int) -> CfgNode:
    """A configuration with the schedule of a number of steps."""
    cfg = cfg.clone()
    # in the middle of a step, because epochs are rounded up to steps
    cfg.RECIPE.EPOCHS = (steps - 0.5) * cfg.SOLVER.IMS_PER_BATCH / images
    for key, value, _ in fit.fit_schedule(cfg, images, images):
        if key not in cfg.RECIPE.KEEP:
            cfg.merge_from_list([key, value])
    return cfg
