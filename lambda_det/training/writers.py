"""Event writers by their names: where a run's numbers go besides the screen and metrics.json."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from detectron2.utils.events import EventWriter, TensorboardXWriter
from torch.utils.tensorboard.summary import hparams

from lambda_det.config import leaves, read_plain
from lambda_det.errors import ConfigError, refused
from lambda_det.training.settings import Settings

__all__ = ["check_writers", "make_writers"]


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


def make_writers(settings: Settings, last_step: int, config: str = "") -> list[EventWriter]:
    """The event writers of a run; see :func:`check_writers`.

    Args:
        settings: name them; a class is called with the folder.
        last_step: the last step that was written before a resume; -1 at a start.
        config: of the run, as YAML.
    """
    folder = settings.output_dir
    writers: list[EventWriter] = []
    for name in settings.event_writers:
        if name == "tensorboard":
            writers.append(TensorboardXWriter(folder, window_size=1, purge_step=last_step + 1))
            for summary in hparams(_hyperparameters(config), {"total_loss": 0.0}):
                writers[-1]._writer.file_writer.add_summary(summary)
        else:
            writers.append(_class_of(name, settings.key("event_writers"))(folder))
    for writer in writers:
        writer._last_write = last_step  # what is older has been written
    return writers


def _hyperparameters(config: str) -> dict[str, Any]:
    """The keys of a configuration with their values; lists and the like as text."""
    loaded = read_plain(config)
    plain = leaves(loaded) if isinstance(loaded, dict) else ()
    return {k: v if isinstance(v, (bool, int, float, str)) else str(v) for k, v in plain}
