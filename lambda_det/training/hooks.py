"""Hooks of every training: logged values and where they are written, checkpoints."""

from __future__ import annotations

import importlib
import logging
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from posixpath import commonpath
from typing import Any

import torch
from detectron2.engine import HookBase, hooks
from detectron2.engine.hooks import PeriodicWriter
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
from lambda_det.training.log import is_of_machine
from lambda_det.training.run_folder import RunFolder
from lambda_det.training.settings import Settings

try:
    import resource
except ImportError:  # Windows
    resource = None

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
    """Logs "lr", and each rate that differs from it as "lr/" with the name of its module.

    Detectron2's hook logs the rate of most parameters, which is the backbone's tenth in a recipe
    that trains the backbone at a tenth of the rate. Here "lr" is the rate that the optimiser was
    made with, if a group has it. Checkpoints keep the state under the name of Detectron2's hook.
    """

    def before_train(self) -> None:
        super().before_train()
        groups = self.trainer.optimizer.param_groups
        first = self._best_param_group_id
        made_with = self.trainer.optimizer.defaults.get("lr")
        rates = {group["initial_lr"]: number for number, group in reversed([*enumerate(groups)])}
        self._groups = {"lr": rates.pop(made_with, first)}
        rates.pop(groups[self._groups["lr"]]["initial_lr"], None)
        network = self.trainer.task.network(self.trainer.model)
        names = {id(p): name for name, p in network.named_parameters()}
        for rate, number in rates.items():
            own = [names[id(p)] for g in groups if g["initial_lr"] == rate for p in g["params"]]
            whose = commonpath(name.replace(".", "/") for name in own).replace("/", ".")
            # Two rates may belong to parameters below the same module.
            if not whose:
                whose = f"{rate:g} at first"
            elif f"lr/{whose}" in self._groups:
                whose = f"{whose} {rate:g} at first"
            self._groups[f"lr/{whose}"] = number

    def after_step(self) -> None:
        for name, number in self._groups.items():
            rate = self.trainer.optimizer.param_groups[number]["lr"]
            self.trainer.storage.put_scalar(name, rate, smoothing_hint=False)
        self.scheduler.step()


class SpeedAndMemory(HookBase):
    """Records the images per second of all processes, with the time of waiting, and the memory.

    The memory is the most that the first process has taken so far, in gigabytes.
    """

    def before_step(self) -> None:
        self._start = time.perf_counter()

    def after_step(self) -> None:
        # The check for finite losses has waited for the device already
        seconds = time.perf_counter() - self._start
        storage, settings = self.trainer.storage, self.trainer.settings
        if settings.images_per_step:
            storage.put_scalar("images_per_second", settings.images_per_step / seconds)
        storage.put_scalar("peak_memory", peak_gigabytes(settings.device), smoothing_hint=False)


class Forecast(HookBase):
    """Says when the run will end: after the first steps, and again after the first evaluation.

    Register it before the evaluation, whose time belongs to no step.
    """

    _STEPS = 10  # steps whose median counts, because the first steps of a process take longer

    def before_train(self) -> None:
        self._seconds: list[float] = []
        self._evaluated = False

    def before_step(self) -> None:
        self._start = time.perf_counter()

    def after_step(self) -> None:
        trainer = self.trainer
        if len(self._seconds) <= self._STEPS:
            self._seconds.append(time.perf_counter() - self._start)
        done = trainer.iter + 1 - trainer.start_iter
        measured = trainer.evaluation.seconds  # of one after an earlier step
        is_first = measured > 0 and not self._evaluated
        if done == self._STEPS or (is_first and done > self._STEPS):
            self._evaluated = measured > 0
            if comm.is_main_process() and trainer.iter + 1 + self._STEPS < trainer.max_iter:
                logger.info(self._sentence(measured))

    def _sentence(self, measured: float) -> str:
        """
        Args:
            measured: seconds of an evaluation; 0 if there was none yet.
        """
        trainer, settings, task = self.trainer, self.trainer.settings, self.trainer.task
        step, period = trainer.iter + 1, settings.eval_period
        before = int((trainer.max_iter - 1) // period - step // period) if period > 0 else 0
        each = statistics.median(self._seconds)
        image = each / (settings.images_per_step or 1)
        evaluations = (before + 1) * (measured or task.cost_of_evaluation() * image)
        total = (trainer.max_iter - step) * each + evaluations
        steps = trainer.max_iter - step
        sentence = (
            f"About {duration(total)} to the end: {duration(steps * each)} for "
            f"{counted(steps, 'step')}"
        )
        count = counted(before + 1, "evaluation")
        if not evaluations:
            return f"{sentence}, and a time that is not known yet for {count}"
        guessed = "" if measured else ", by their number of images"
        return f"{sentence} and {duration(evaluations)} for {count}{guessed}"


class Progress(HookBase):
    """Shows a bar over the steps on the screen or in a notebook, with the loss of the last step.

    Register it in the first process, which alone knows the loss.
    """

    def before_train(self) -> None:
        trainer = self.trainer
        steps = {"total": trainer.max_iter, "initial": trainer.start_iter}
        self._bar = tqdm(unit="step", dynamic_ncols=True, **steps)

    def after_step(self) -> None:
        self._bar.set_postfix(
            loss=f"{self.trainer.storage.latest()['total_loss'][0]:.3g}", refresh=False
        )
        self._bar.total = self.trainer.max_iter  # which a hook may have changed
        self._bar.update()

    def after_train(self) -> None:
        self._bar.close()


def peak_gigabytes(device: str) -> float:
    """The peak memory so far in gigabytes (1e9 bytes): of the GPU, or on a CPU of the process.

    0 for the CPU of Windows, which Python cannot ask for it.
    """
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated() / 1e9
    if resource is None:
        return 0.0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


class RunWriter(HookBase):
    """Writes the progress to the screen, to metrics.json and by event writers.

    Values are those of a step, and not smoothed over steps, so that a resumed run writes the same.
    Detectron2 opens the files when the trainer is made, before a resumed run knows where it begins,
    so its metrics.json holds repeated iterations twice. Only the first process writes.
    """

    def __init__(self) -> None:
        self._hook: PeriodicWriter | None = None
        self._json: JSONWriter | None = None
        self._files: list[EventWriter] = []  # it, and where else the numbers go
        self._resumed: Mapping[str, Any] = {}

    def before_train(self) -> None:
        if not comm.is_main_process():
            return
        trainer, settings = self.trainer, self.trainer.settings
        written = self._resumed.get("written", trainer.start_iter - 1)
        folder = RunFolder(settings.output_dir)
        # A state of commit 757bc69b has no values of the line that was due, but the file has it
        folder.cut_metrics(trainer.start_iter if self._resumed.get("due") else written + 1)
        self._json = JSONWriter(str(folder.metrics_file), window_size=1)
        self._json._last_write = written  # the file has what is older
        self._files = [self._json, *make_writers(settings, written)]
        self._printer = CommonMetricPrinter(trainer.max_iter, window_size=1)
        self._hook = PeriodicWriter([self._printer], settings.log_period)
        self._hook.trainer = trainer
        for name, (is_smoothed, values) in self._resumed.get("values", {}).items():
            for value in values:
                trainer.storage.put_scalar(
                    name, value, smoothing_hint=is_smoothed, cur_iter=trainer.start_iter - 1
                )
        if self._resumed.get("values"):
            self._write_files()

    def after_step(self) -> None:
        if self._hook:
            self._printer._max_iter = self.trainer.max_iter  # which a hook may have changed
            self._hook.after_step()
            if self._is_due():
                self._write_files()
        # Only TensorBoard's writer releases the images, and it may not be named
        if (self.trainer.iter + 1) % self.trainer.settings.log_period == 0:
            get_event_storage().clear_images()

    def after_train(self) -> None:
        if self._hook:
            self._hook.after_train()
            self._hook = None
            self._write_files()
            for writer in self._files:
                writer.close()

    def state_dict(self) -> dict[str, Any]:
        """How far metrics.json goes, and the values of this step, if they are still to be written.

        Times, speeds and memory are left out, because another machine may continue.
        """
        storage = getattr(self.trainer, "storage", None)  # there is none before training
        if storage is None or not comm.is_main_process():
            return dict(self._resumed)
        step, values = self.trainer.iter, {}
        if self._json is not None:
            written = self._json._last_write
        else:  # in an evaluation with which a resumed run begins
            written = self._resumed.get("written", step - 1)
            values.update(self._resumed.get("values", {}))
        if self._is_due() and written < step:
            for name, history in storage.histories().items():
                now = [value for value, iteration in history.values() if iteration == step]
                if now and not is_of_machine(name):
                    values[name] = storage.smoothing_hints()[name], now
        # in one order, whichever was put first: checkpoints of equal states are equal
        return {"written": written, "values": dict(sorted(values.items()))}

    def _is_due(self) -> bool:
        """Whether the files get a line for this step.

        Each evaluation has one of its own: a line has the last value of each name, and of two
        evaluations within a period of the log the first would be lost.
        """
        trainer = self.trainer
        return (trainer.iter + 1) % trainer.settings.log_period == 0 or trainer.evaluation.is_due()

    def _write_files(self) -> None:
        for writer in self._files:
            writer.write()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._resumed = state


# ------------------------------------------------------------------------------------ event writers
def check_writers(settings: Settings) -> None:
    """Refuse event writers that cannot be made, before a run begins.

    The settings name "tensorboard", or the path of a class such as "package.module.Writer".

    Raises:
        ConfigError: a name is neither.
    """
    for name in settings.event_writers:
        if name != "tensorboard":
            _class_of(name, settings.key("event_writers"))


def _class_of(name: str, key: str) -> Callable[[str], EventWriter]:
    module, _, attribute = name.rpartition(".")
    advice = "it can be tensorboard, or a class such as package.module.Writer"
    errors = (ImportError, AttributeError, TypeError, ValueError)
    with refused(ConfigError, f"{key} names {name!r}, which is not there", advice, *errors):
        writer = getattr(importlib.import_module(module), attribute)
    if not (isinstance(writer, type) and issubclass(writer, EventWriter)):
        raise ConfigError(f"{key} names {name!r}, which is no EventWriter of Detectron2.")
    return writer


def make_writers(settings: Settings, last_step: int) -> list[EventWriter]:
    """The event writers of a run; see :func:`check_writers`.

    Args:
        settings: name them; a class is called with the folder.
        last_step: the last step that was written before a resume; -1 at a start.
    """
    folder = settings.output_dir
    writers: list[EventWriter] = []
    for name in settings.event_writers:
        if name == "tensorboard":
            writers.append(TensorboardXWriter(folder, window_size=1, purge_step=last_step + 1))
        else:
            writers.append(_class_of(name, settings.key("event_writers"))(folder))
    for writer in writers:
        writer._last_write = last_step  # what is older has been written
    return writers
