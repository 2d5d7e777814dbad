"""Where a run's numbers go besides the screen and metrics.json: event writers by their names."""

from __future__ import annotations

import importlib
import importlib.util
import os
import uuid
from collections.abc import Callable
from pathlib import Path

from detectron2.utils.events import EventWriter, TensorboardXWriter, get_event_storage

from lambda_det.errors import ConfigError, reason
from lambda_det.training.settings import Settings

__all__ = ["WandbWriter", "check_writers", "make_writers"]

_RUN = "wandb_run.txt"  # in the folder of a run: its id there


class WandbWriter(EventWriter):
    """Sends the numbers to Weights & Biases; a resumed run continues the same run there.

    The project is WANDB_PROJECT, else "lambda_det". WANDB_MODE=offline keeps all on the disk.
    """

    def __init__(self, folder: str, *, resumed: bool) -> None:
        """
        Args:
            folder: of the run; it holds the id of the run there.
            resumed: continue the run of that id, if there is one; otherwise a new one begins.
        """
        import wandb

        note = Path(folder, _RUN)
        known = resumed and note.is_file()
        number = note.read_text().strip() if known else uuid.uuid4().hex[:12]
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "lambda_det"),
            name=os.path.basename(os.path.abspath(folder)),
            dir=folder,
            id=number,
            resume="allow",
        )
        note.write_text(f"{number}\n")
        self._last_write = -1

    def write(self) -> None:
        latest = get_event_storage().latest_with_smoothing_hint(20)
        steps: dict[int, dict[str, float]] = {}
        for name, (value, step) in latest.items():
            if step > self._last_write:
                steps.setdefault(step, {})[name] = value
        for step in sorted(steps):
            self._run.log(steps[step], step=step)
            self._last_write = step

    def close(self) -> None:
        self._run.finish()


def check_writers(settings: Settings) -> None:
    """Refuse event writers that cannot be made, before a run begins.

    The settings name "tensorboard", "wandb", or the path of a class such as
    "package.module.Writer".

    Raises:
        ConfigError: a name is none of these, or its package is not installed.
    """
    key = settings.key("event_writers")
    for name in settings.event_writers:
        if name == "wandb":
            if importlib.util.find_spec("wandb") is None:
                raise ConfigError(f"{key} names wandb, which is not installed: pip install wandb.")
        elif name != "tensorboard":
            _class_of(name, key)


def _class_of(name: str, key: str) -> Callable[[str], EventWriter]:
    module, _, attribute = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{key} names {name!r}, which is not there ({reason(error)}); it can be tensorboard, "
            "wandb, or the path of a class such as package.module.Writer."
        ) from error
    if not (isinstance(found, type) and issubclass(found, EventWriter)):
        raise ConfigError(f"{key} names {name!r}, which is no EventWriter of Detectron2.")
    return found


def make_writers(settings: Settings, last_step: int, *, resumed: bool) -> list[EventWriter]:
    """The event writers of a run; see :func:`check_writers`.

    Args:
        settings: name them; a class is called with the folder.
        last_step: that was written before a resume; -1 at a start.
        resumed: whether this run continues that of the folder.
    """
    folder = settings.output_dir
    writers: list[EventWriter] = []
    for name in settings.event_writers:
        if name == "tensorboard":
            writers.append(TensorboardXWriter(folder, purge_step=last_step + 1))
        elif name == "wandb":
            writers.append(WandbWriter(folder, resumed=resumed))
        else:
            writers.append(_class_of(name, settings.key("event_writers"))(folder))
    for writer in writers:
        writer._last_write = last_step  # what is older was written before
    return writers
