"""What happens between the steps: averaging, progress, checkpoints."""

from __future__ import annotations

import datetime
import logging
import time

from detectron2.engine import HookBase
from detectron2.utils.events import EventWriter, get_event_storage

from lambda_det.classification.evaluator import Evaluator
from lambda_det.training.memory import peak_memory

__all__ = ["Averaging", "Checkpoints", "ProgressPrinter", "Throughput"]


class Averaging(HookBase):
    """Takes the weights of each step into ``trainer.average``."""

    def after_step(self) -> None:
        self.trainer.average.update()


class Throughput(HookBase):
    """Records images per second of all processes together, waiting for data included."""

    def __init__(self, images: int) -> None:
        self._images = images  # of one step

    def before_step(self) -> None:
        self._start = time.perf_counter()

    def after_step(self) -> None:
        # The check for finite losses has waited for the device already
        seconds = time.perf_counter() - self._start
        self.trainer.storage.put_scalar("images_per_second", self._images / seconds)


class ProgressPrinter(EventWriter):
    """One line on how far the training is, how fast, and how long it will take still."""

    def __init__(self, trainer) -> None:
        self._trainer = trainer
        self._start = time.perf_counter()
        self._logger = logging.getLogger("lambda_det.progress")

    def write(self) -> None:
        storage = get_event_storage()
        trainer, step = self._trainer, storage.iter + 1
        if step > trainer.max_iter or "images_per_second" not in storage.histories():
            return  # Detectron2 writes once more when all is done, or when nothing was
        done = step - trainer.start_iter
        # Evaluations so far count as well, and so in proportion those to come
        left = (time.perf_counter() - self._start) / done * (trainer.max_iter - step)

        def recent(name: str) -> float:
            return storage.history(name).median(20)

        data_share = recent("data_time") / max(recent("time"), 1e-9) if done > 3 else 0.0
        self._logger.info(
            f"epoch {trainer.plan.epochs(step):.2f}/{trainer.cfg.SOLVER.EPOCHS:g}  "
            f"step {step}/{trainer.max_iter}  loss {recent('total_loss'):.4f}  "
            f"lr {storage.history('lr').latest():.4g}  "
            f"{recent('images_per_second'):.0f} img/s  "
            f"data {recent('data_time') * 1000:.0f} ms ({data_share:.0%})  "
            f"memory {peak_memory(trainer.cfg.MODEL.DEVICE):.1f} GB  "
            f"left {datetime.timedelta(seconds=int(left))}"
        )


class Checkpoints(HookBase):
    """Saves every so many steps, after each evaluation and at the end.

    ``model_best.pth`` is the best of all evaluations, and ``model_final.pth`` the last.
    """

    def __init__(self, period: int, evaluator: Evaluator) -> None:
        """
        Args:
            period: steps between two checkpoints.
            evaluator: the hook that ran before this one.
        """
        self._period = period
        self._evaluator = evaluator

    def before_train(self) -> None:
        trainer = self.trainer
        if self._evaluator.was_pending:
            trainer.iter = trainer.start_iter - 1  # of the state that is saved
            self._save()
            trainer.iter = trainer.start_iter

    def after_step(self) -> None:
        trainer = self.trainer
        step = trainer.iter + 1
        evaluated = self._evaluator.last_step == step
        if evaluated or step >= trainer.max_iter or step % self._period == 0:
            self._save()

    def _save(self) -> None:
        name = self._evaluator.checkpoint_name()
        self.trainer.save_checkpoint(name)
        if self._evaluator.best_step == self.trainer.iter + 1:
            self.trainer.checkpointer.link(name, "model_best")
