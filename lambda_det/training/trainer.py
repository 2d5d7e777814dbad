"""The trainer: what a run consists of, the loop over its steps, and how it ends."""

from __future__ import annotations

import contextlib
import logging
import signal
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from detectron2.engine import HookBase, TrainerBase, hooks
from detectron2.solver import LRMultiplier
from detectron2.utils import comm
from detectron2.utils.events import EventStorage
from torch import nn

from lambda_det.distributed.connection import on_main_process
from lambda_det.distributed.signals import StopRequest, catch_signals
from lambda_det.errors import ConfigError, Interrupted, Preempted, UserError
from lambda_det.native.calls import copied
from lambda_det.training.checkpointer import SafeCheckpointer
from lambda_det.training.evaluation import Evaluation
from lambda_det.training.hooks import (
    Checkpoints,
    Forecast,
    LRScheduler,
    RunWriter,
)
from lambda_det.training.loading import BatchesAhead
from lambda_det.training.randomness import Purpose, seed_all
from lambda_det.training.run_folder import Checkpoint, RunFolder
from lambda_det.training.statistics import (
    ExponentialAverage,
    batch_norms,
    estimate_statistics,
    images_of_norms,
)
from lambda_det.training.step import TrainStep
from lambda_det.training.task import EMA, RAW, Results, Task
from lambda_det.weights.loading import load

logger = logging.getLogger(__name__)

# added to the run's seed, so these images differ from the steps'
STATISTICS_SEED = 1_000_003


class Trainer(TrainerBase):
    """Trains a task, checkpoints and evaluates it, and can be resumed to the bit.

    Attributes:
        task: says what is trained.
        settings: of the task.
        model: what is trained, without wrappers, on its device.
        averaged: a copy of it with the moving average of its weights; None without.
        average: keeps the weights of ``averaged``; None without.
        step: takes the optimiser steps.
        optimizer, scheduler: of the weights, and of the learning rate.
        loader: of the training images.
        checkpointer: of the network, the average and the training state.
        saved_as: name of the checkpoint that was saved or loaded last, without its ending.
        evaluation: the hook that evaluates, with the results.
        seed: of all random numbers; a resumed run has the seed of its checkpoint.
        start_iter, iter, max_iter: the first step of this process, the current one, counted from 0,
            and the number of all; an early stop lowers the last.
    """

    def __init__(
        self, task: Task, checkpoint: Checkpoint | None = None, *, debug_numerics: bool = False
    ) -> None:
        """Build what a run consists of, and load the checkpoint or the initial weights.

        Nothing is written.

        Args:
            task: builds model, optimiser, schedule and loader.
            checkpoint: to continue from; None for a start from ``settings.weights``, or from
                random ones.
            debug_numerics: stop at the first layer whose output or gradient is not finite.

        Raises:
            UserError: the model cannot be built, weights or checkpoint do not fit, or the data are
                missing.
        """
        super().__init__()
        self.task = task
        self.settings = settings = task.settings
        self.max_iter = settings.max_iter
        self.seed = settings.seed if settings.seed >= 0 else comm.shared_random_seed()
        # The schedule comes before the model, and the model before the data: a mistake in its
        # configuration is then refused in seconds, while the annotations of a large data set take a
        # minute to read.
        schedule = task.build_schedule()
        self.model = task.build_model()
        # from here on all processes have the weights of the first one
        distributed = task.distribute(self.model)
        self.averaged = self.average = None
        if settings.ema_decay:
            self.averaged = copied(self.model)
            self.average = ExponentialAverage(
                task.network(self.model), task.network(self.averaged), settings.ema_decay
            )
        self.optimizer = task.build_optimizer(self.model)
        self.scheduler = LRMultiplier(self.optimizer, schedule, self.max_iter)
        self.step = TrainStep(
            distributed,
            self.optimizer,
            task,
            seed=self.seed,
            last_checkpoint=self._last_saved,
            debug_numerics=debug_numerics,
        )
        self.evaluation, self._writer = Evaluation(), RunWriter()
        self.register_hooks(self.build_hooks())
        self.checkpointer = SafeCheckpointer(
            task.network(self.model),
            settings.output_dir,
            keep=settings.checkpoints_kept,
            trainer=weakref.proxy(self),
            **({"ema": self.average} if self.average else {}),
        )
        self.saved_as = ""
        self._loading: Iterator[Any] | None = None
        self._loader_state: Mapping[str, Any] | None = None
        self._load(checkpoint)
        on_main_process(lambda: task.check_data(train=True))
        self.loader = task.build_train_loader()
        if self._loader_state and hasattr(self.loader, "load_state_dict"):
            self.loader.load_state_dict(self._loader_state)
        self._statistics_loader = None
        if settings.precise_bn_batches and batch_norms(self.model):
            self._statistics_loader = task.build_train_loader(for_statistics=True)

    def build_hooks(self) -> list[HookBase]:
        """The hooks around each step, in this order; the task's hooks come last.

        Override it, or ``build_hooks`` of the task, to do more. What a hook may touch stands in the
        loop of :meth:`train`.
        """
        return [
            hooks.IterationTimer(),
            LRScheduler(),
            Forecast(),
            self.evaluation,
            Checkpoints(),
            self._writer,
            *self.task.build_hooks(),
        ]

    # ----------------------------------------------------------------------- start and checkpoints
    def _load(self, checkpoint: Checkpoint | None) -> None:
        weights = self.settings.weights
        if checkpoint is not None:
            self.task.check_weights(checkpoint.content, checkpoint.path)
            self.checkpointer.load(checkpoint.path, content=checkpoint.content)
            self.iter = self.start_iter = self.iter + 1
            self.saved_as = Path(checkpoint.path).stem
            if self.start_iter < self.max_iter:
                # if the schedule is new, the rate that was saved is of the former schedule
                self._set_rates()
            logger.info(f"Continuing {checkpoint.path} after step {self.start_iter}")
        elif weights:
            load(self.checkpointer.model, weights, pixels=self.task.pixels)
            if self.average:
                network = self.task.network(self.model)
                self.average.average.load_state_dict(network.state_dict())
        else:
            logger.info("No weights are named: training from scratch")

    def _set_rates(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.scheduler.get_lr(), strict=True):
            group["lr"] = rate

    def reschedule(self) -> None:
        """Go on with the settings that the task has now, by which steps, periods and learning rates
        may be others.
        """
        self.settings = self.task.settings
        self.max_iter = self.settings.max_iter
        state = self.scheduler.state_dict()
        self.scheduler = LRMultiplier(self.optimizer, self.task.build_schedule(), self.max_iter)
        self.scheduler.load_state_dict(state)
        self._set_rates()

    def save_checkpoint(self) -> None:
        """Save network, average and training state as they are after this step."""
        evaluated = self.evaluation.last_step == self.iter + 1
        precise = evaluated and self._statistics_loader is not None
        name = "model_final" if self.iter + 1 >= self.max_iter else f"model_{self.iter:07d}"
        self.checkpointer.save(
            name,
            iteration=self.iter,
            # models whose batch norms have statistics of their own weights instead of the average
            # over the training
            precise_statistics=sorted(self._evaluated_models()) if precise else [],
            **self.task.checkpoint_content(self.evaluation.results if evaluated else {}),
        )
        self.saved_as = name

    def _last_saved(self) -> str:
        """The last good checkpoint, once what is being written is; "" where there is none."""
        try:
            self.checkpointer.wait()
        except UserError as error:
            logger.error(str(error))
        return RunFolder(self.settings.output_dir).last

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict() | {  # of the iteration, and the hooks
            "seed": self.seed,
            "of_a_step": self.settings.of_a_step(),
            "images_of_norms": self._images_of_norms(),
            "step": self.step.state_dict(),
        }
        if hasattr(self.loader, "state_dict"):
            state["loader"] = self.loader.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, now in self.settings.of_a_step().items():
            before = state["of_a_step"][name]
            if before != now:
                raise ConfigError(
                    f"The run in {self.settings.output_dir} takes its steps with "
                    f"{self.settings.key(name)} {before}. This would be {now}, and its count of "
                    f"steps would be wrong: keep processes x {self.settings.key('accumulate')} as "
                    "it was."
                )
        for whose, now in self._images_of_norms().items():
            before = state["images_of_norms"].get(whose, now)
            if before != now:
                logger.warning(
                    f"Batch norms normalise by the images that {whose} takes at once: {now} from "
                    f"here on, and {before} before. So the steps differ from those before; keep "
                    f"processes and {self.settings.key('accumulate')} as they were."
                )
        super().load_state_dict(state)
        self.step.load_state_dict(state["step"])
        self.seed = self.step.seed = state["seed"]
        self._loader_state = state.get("loader")

    def _images_of_norms(self) -> dict[str, int]:
        images = self.settings.images_per_batch
        return {} if images is None else images_of_norms(self.model, images)

    # ------------------------------------------------------------------------------------ the loop
    def train(self) -> Results:
        """Run from ``start_iter`` to ``max_iter``, with the hooks.

        This replaces TrainerBase.train, which would print the stack trace of an error a second
        time, and run the final evaluation after an error in the last step.

        Returns:
            The results of the last evaluation.

        Raises:
            NonFiniteLossError: see :class:`TrainStep`.
            Preempted: a scheduler's signal ended the run, and all steps are saved.
            Interrupted: Ctrl-C ended the run, and all steps are saved.
            UserError: a checkpoint could not be written, or images could not be read.
        """
        if self.start_iter < self.max_iter:
            logger.info(
                f"Training from iteration {self.start_iter} to {self.max_iter}; random numbers and "
                f"the order of images are drawn from seed {self.seed}"
            )
        with catch_signals(), EventStorage(self.start_iter) as self.storage:
            try:
                self._begin(self.loader, self.seed, self.start_iter)
                self._loading = iter(self.loader)
                self._batches = self._loading
                if self.step.precision.device == "cuda":
                    self._batches = BatchesAhead(self._loading, self.settings.device)
                self.before_train()
                # What a hook may touch. It may read everything. Its ``before_step`` sees the
                # weights and gradients of the step before, its ``after_step`` those of this step.
                # It may put numbers into ``storage`` and, in the same way on every process, save a
                # checkpoint, lower ``max_iter``, ``reschedule``, set learning rates and change
                # weights. It must leave the model in training mode, ``iter`` as it is, and the
                # batches to the loader. Random numbers that it draws change no step, because each
                # batch has its own seed. Its ``state_dict`` is saved and restored with the run. A
                # loss of a head is a class of that head; for one of the whole model, wrap the model
                # in ``Task.build_model``.
                while self.iter < self.max_iter:
                    self.before_step()
                    self.run_step()
                    self.after_step()
                    self.checkpointer.check()
                    if self.step.stop_signal and self.iter + 1 < self.max_iter:
                        logger.info("A signal asks to stop: saving a checkpoint")
                        self.save_checkpoint()
                        raise StopRequest(self.step.stop_signal)
                    self.iter += 1
                self.iter = self.max_iter
                self.after_train()
            except StopRequest as request:
                self.checkpointer.wait()
                self._record()
                by_hand = request.signal == signal.SIGINT
                name = "Ctrl-C" if by_hand else signal.Signals(request.signal).name
                # the first process may write it yet
                saved = Path(self.settings.output_dir, f"{self.saved_as}.pth")
                raise (Interrupted if by_hand else Preempted)(
                    f"Stopped by {name} after step {self.iter + 1}; {saved} holds all of it: the "
                    "same command with --resume continues."
                ) from None
            except BaseException:
                self._last_saved()  # another error must not cost a good checkpoint
                self._record()
                raise
            finally:
                if hasattr(self._loading, "close"):  # another project's loader may have none
                    self._loading.close()  # and with it the processes that load images
            self.checkpointer.wait()
        if comm.is_main_process():
            self.task.finish(self.evaluation.results)
        return self.evaluation.results

    def run_step(self) -> None:
        """Take one optimiser step, and add the weights after it to the average."""
        self.step.run(self._batches, self.iter)
        if self.average:
            self.average.update()

    def evaluate(self) -> Results:
        """The results of the weights as they are, or of their average, or of both.

        Batch norm's statistics are estimated before, on images that depend only on the run's seed
        and the iteration.
        """
        models = self._evaluated_models()
        if self._statistics_loader is not None:
            seed = self.seed + STATISTICS_SEED
            self._begin(self._statistics_loader, seed, self.iter + 1)
            precision = self.step.precision
            seed_all(Purpose.STEP, seed, self.iter, comm.get_rank(), device=precision.device)
            batches = iter(self._statistics_loader)
            count = self.settings.precise_bn_batches
            with EventStorage():  # what the heads count there is not of a training step
                estimate_statistics(list(models.values()), batches, count, precision)
            del batches  # with its workers
        results = self.task.evaluate(models, final=self.iter + 1 >= self.max_iter)
        self.step.model.train()
        return results

    def _evaluated_models(self) -> dict[str, nn.Module]:
        """The models without wrappers: processes have unequal numbers of batches to evaluate."""
        if self.averaged is None:
            return {RAW: self.model}
        raw = {RAW: self.model} if self.settings.evaluate_raw else {}
        return raw | {EMA: self.averaged}

    def _begin(self, loader: Any, seed: int, step: int) -> None:
        if hasattr(loader, "begin"):
            loader.begin(seed, step * self.settings.accumulate)
        elif step > 0 and loader is self.loader:
            logger.warning(
                f"The training loader, a {type(loader).__name__}, cannot begin in the middle of "
                "its images, so their order starts again"
            )

    def _record(self) -> None:
        """Write the last steps to metrics.json before the run ends, if the disk has room."""
        with contextlib.suppress(OSError):
            self._writer.after_train()
