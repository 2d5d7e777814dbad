"""Hooks of every training: logged values and where they are written, checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any

from detectron2.engine import HookBase, hooks
from detectron2.utils import comm
from detectron2.utils.events import (
    CommonMetricPrinter,
    EventWriter,
    JSONWriter,
    TensorboardXWriter,
    get_event_storage,
)
from tqdm.auto import tqdm

from lambda_det.errors import ConfigError, counted, duration, refused
from lambda_det.training.log import OF_MACHINE
from lambda_det.training.run_folder import RunFolder
from lambda_det.training.settings import Settings

logger = logging.getLogger(__name__)


class Checkpoints(HookBase):
    """Saves as often as the settings say, unless the evaluation saved; register it after the
    evaluation.
    """

    def after_step(self) -> None:
        trainer = self.trainer
        is_due = (trainer.iter + 1) % trainer.settings.checkpoint_period == 0
        if is_due and not trainer.evaluation.is_due():
            trainer.save_checkpoint()


class LRScheduler(hooks.LRScheduler):
    """Logs as "lr" the rate that the optimiser was made with, if a group of parameters has it.

    Detectron2's hook logs the rate of most parameters, which is the backbone's tenth in a recipe
    that trains the backbone at a tenth of the rate. Checkpoints keep the state under the name of
    Detectron2's hook.
    """

    def before_train(self) -> None:
        super().before_train()
        optimizer = self.trainer.optimizer
        rates = [group["initial_lr"] for group in optimizer.param_groups]
        if (usual := optimizer.defaults.get("lr")) in rates:
            self._best_param_group_id = rates.index(usual)


class Forecast(HookBase):
    """Says when the run will end: after the first steps, and again after the first evaluation.

    Register it after the timer of the steps, and before the evaluation.
    """

    _STEPS = 10  # steps whose median counts, because the first steps of a process take longer

    def before_train(self) -> None:
        self._said: set[bool] = set()  # whether with the time of an evaluation

    def after_step(self) -> None:
        trainer = self.trainer
        measured = trainer.evaluation.seconds  # of one after an earlier step; 0 for none
        done = trainer.iter + 1 - trainer.start_iter
        if done < self._STEPS or bool(measured) in self._said:
            return
        self._said.add(bool(measured))
        if comm.is_main_process() and trainer.iter + 1 + self._STEPS < trainer.max_iter:
            logger.info(self._sentence(measured))

    def _sentence(self, measured: float) -> str:
        """When the run ends, where an evaluation takes ``measured`` seconds; 0 if unknown."""
        trainer, settings = self.trainer, self.trainer.settings
        step, period = trainer.iter + 1, settings.eval_period
        before = int((trainer.max_iter - 1) // period - step // period) if period > 0 else 0
        each = trainer.storage.history("time").median(self._STEPS)
        image = each / (settings.images_per_step or 1)
        steps = trainer.max_iter - step
        evaluations = (before + 1) * (measured or trainer.task.cost_of_evaluation() * image)
        time_of_evaluations = duration(evaluations) if evaluations else "a time not known yet"
        return (
            f"About {duration(steps * each + evaluations)} to the end: {duration(steps * each)} "
            f"for {counted(steps, 'step')} and {time_of_evaluations} for "
            f"{counted(before + 1, 'evaluation')}"
        )


class Progress(HookBase):
    """Shows a bar over the steps on the screen or in a notebook, with the loss of the last step.
    :class:`BufferedLog` closes it.

    Register it in the first process, which alone knows the loss.
    """

    def before_train(self) -> None:
        trainer = self.trainer
        self._bar = tqdm(
            unit="step",
            dynamic_ncols=True,
            total=trainer.max_iter,
            initial=trainer.start_iter,
        )

    def after_step(self) -> None:
        loss, _ = self.trainer.storage.latest()["total_loss"]
        self._bar.set_postfix(loss=f"{loss:.3g}", refresh=False)
        self._bar.total = self.trainer.max_iter  # which a hook may have changed
        self._bar.update()


class RunWriter(HookBase):
    """Writes the progress to the screen, to metrics.json and by event writers.

    Values are those of a step, and not smoothed over steps, so that a resumed run writes the same.
    Detectron2 opens the files when the trainer is made, before a resumed run knows where it begins,
    so its metrics.json holds repeated iterations twice. Only the first process writes.
    """

    def __init__(self) -> None:
        self._files: list[EventWriter] = []  # metrics.json, and where else the numbers go
        self._resumed: Mapping[str, Any] = {}

    def before_train(self) -> None:
        if not comm.is_main_process():
            return
        trainer, settings = self.trainer, self.trainer.settings
        written = self._resumed.get("written", trainer.start_iter - 1)
        folder = RunFolder(settings.output_dir)
        # A state of commit 757bc69b has no values of the line that was due, but the file has it
        folder.cut_metrics(trainer.start_iter if self._resumed.get("due") else written + 1)
        self._printer = CommonMetricPrinter(trainer.max_iter, window_size=1)
        self._files = [JSONWriter(str(folder.metrics_file), window_size=1)]
        for kind in writers_of(settings):
            unsmoothed = {"window_size": 1, "purge_step": written + 1}
            options = unsmoothed if kind is TensorboardXWriter else {}
            self._files.append(kind(settings.output_dir, **options))
        for writer in self._files:
            writer._last_write = written  # what is older has been written
        for name, (is_smoothed, values) in self._resumed.get("values", {}).items():
            for value in values:
                trainer.storage.put_scalar(
                    name, value, smoothing_hint=is_smoothed, cur_iter=trainer.start_iter - 1
                )
        if self._resumed.get("values"):
            self._write_files()

    def after_step(self) -> None:
        if self._files and self._is_due():
            self._printer._max_iter = self.trainer.max_iter  # which a hook may have changed
            histories = self.trainer.storage.histories()
            # of this step; the line of the evaluation has their sum, so the printer does without
            tested = {
                name: histories.pop(name) for name in list(histories) if "validation/" in name
            }
            self._printer.write()
            histories.update(tested)
            self._write_files()
            for name in tested:
                del histories[name]
        # Only TensorBoard's writer releases the images, and it may not be named
        if (self.trainer.iter + 1) % self.trainer.settings.log_period == 0:
            get_event_storage().clear_images()

    def after_train(self) -> None:
        self._write_files()
        for writer in self._files:
            writer.close()
        self._files = []

    def state_dict(self) -> dict[str, Any]:
        """How far metrics.json goes, and the values of this step, if they are still to be written.

        Times, speeds and memory are left out, because another machine may continue.
        """
        storage = getattr(self.trainer, "storage", None)  # there is none before training
        if storage is None or not comm.is_main_process():
            return dict(self._resumed)
        step, values = self.trainer.iter, {}
        if self._files:
            written = self._files[0]._last_write
        else:  # in an evaluation with which a resumed run begins
            written = self._resumed.get("written", step - 1)
            values.update(self._resumed.get("values", {}))
        if self._is_due() and written < step:
            for name, history in storage.histories().items():
                now = [value for value, iteration in history.values() if iteration == step]
                if now and name not in OF_MACHINE:
                    values[name] = storage.smoothing_hints()[name], now
        # in one order, whichever was put first: checkpoints of equal states are equal
        return {"written": written, "values": dict(sorted(values.items()))}

    def _is_due(self) -> bool:
        """Whether there is a line for this step."""
        # Each evaluation has one of its own: a line has the last value of each name, and of two
        # evaluations within a period of the log the first would be lost
        trainer = self.trainer
        return (trainer.iter + 1) % trainer.settings.log_period == 0 or trainer.evaluation.is_due()

    def _write_files(self) -> None:
        for writer in self._files:
            writer.write()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._resumed = state


# ------------------------------------------------------------------------------------ event writers
def writers_of(settings: Settings) -> list[type[EventWriter]]:
    """The classes of a run's event writers, which are asked for before it begins.

    The settings name "tensorboard", or the path of a class such as "package.module.Writer", which
    is called with the folder of the run.

    Raises:
        ConfigError: a name is neither.
    """
    kinds: list[type[EventWriter]] = []
    key, advice = settings.key("event_writers"), "it can be tensorboard, or package.module.Writer"
    errors = (ImportError, AttributeError, ValueError)
    for name in settings.event_writers:
        with refused(ConfigError, f"{key} names {name!r}, which is not there", advice, *errors):
            kind = TensorboardXWriter if name == "tensorboard" else resolve_name(name)
        if not (isinstance(kind, type) and issubclass(kind, EventWriter)):
            raise ConfigError(f"{key} names {name!r}, which is no EventWriter of Detectron2.")
        kinds.append(kind)
    return kinds
