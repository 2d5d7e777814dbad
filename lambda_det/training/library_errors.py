"""Errors of PyTorch and of the system in a run get the file or key, and what to do."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lambda_det.distributed.launch import MAIN_GUARD
from lambda_det.errors import DataError, DiskError, UserError, WeightsError, disk_fault, reason
from lambda_det.training.loading import LOADERS_START_BY
from lambda_det.training.log import ONLY_IN_FILE
from lambda_det.training.refused_values import REFUSALS, refused_value
from lambda_det.training.run_folder import RunFolder
from lambda_det.training.settings import Settings

__all__ = ["explained", "naming_keys", "writing"]

logger = logging.getLogger(__name__)
Values = Callable[[], Iterable[tuple[str, Any]]]  # of a configuration: its keys with their values

# A process that dies while PyTorch's thread for pinned memory takes a batch ends that thread first
_OF_A_LOADER = re.compile(r"DataLoader (worker|timed out)|Pin memory thread exited")


@contextmanager
def naming_keys(values: Values) -> Iterator[None]:
    """Name the key whose value a library refuses.

    Args:
        values: is called where a library refused one.

    Raises:
        ConfigError: the key, its value, and what is allowed.
    """
    try:
        yield
    except UserError:
        raise
    except REFUSALS as error:
        if (refusal := refused_value(error, values())) is None:
            raise
        logger.info("What the library says:", exc_info=error, extra=ONLY_IN_FILE)
        raise refusal from error


@contextmanager
def explained(settings: Settings, values: Values = tuple) -> Iterator[None]:
    """The one place where errors of libraries get the keys and the folder of a run, and a cure.

    Args:
        settings: of the run.
        values: see :func:`naming_keys`.

    Raises:
        ConfigError: a library refused the value of a key.
        DataError: a process that loads images has ended or does not answer.
        DiskError: a file cannot be read or written.
    """
    try:
        with naming_keys(values):
            yield
    except UserError:
        raise
    except Exception as error:
        folder = settings.output_dir
        if _OF_A_LOADER.match(str(error)):
            workers, timeout = settings.key("num_workers"), settings.key("timeout")
            guard = "" if LOADERS_START_BY == "fork" else f" Or {MAIN_GUARD}."
            raise DataError(
                f"{_texts(error)} Lower {workers} where memory is short, set it to 0 to see the "
                f"image, or raise {timeout} where the disk is slow.{guard} {_continuation(folder)}"
            ) from error
        of_system = _os_error(error)
        if of_system is None:
            raise
        what = of_system.filename or f"A file of the run in {folder}"
        raise _disk_error(what, of_system, folder) from error


@contextmanager
def writing(path: str) -> Iterator[None]:
    """Name the checkpoint that cannot be written or read back.

    Raises:
        DiskError: names the file, the cause and the last good checkpoint.
    """
    try:
        yield
    except (OSError, RuntimeError, WeightsError) as error:  # torch.save hides the first in the next
        what = f"{path} could not be written"
        raise _disk_error(what, _os_error(error) or error, str(Path(path).parent)) from error


def _disk_error(what: str, error: BaseException, folder: str) -> DiskError:
    cause = getattr(error, "strerror", None) or reason(error).rstrip(".")
    return DiskError(f"{what}: {cause}. {_continuation(folder)}")


def _continuation(folder: str) -> str:
    last = RunFolder(folder).last
    good = f"The last good checkpoint is {last}" if last else "There is no checkpoint yet"
    return f"{good}; the same command with --resume continues."


def _texts(error: BaseException) -> str:
    """What torch says about a loader process, and about the cause if that is a separate error."""
    texts = [reason(error)]
    if error.__cause__ is not None and _OF_A_LOADER.match(str(error.__cause__)):
        texts.append(reason(error.__cause__))
    return " ".join(text.rstrip(".") + "." for text in texts)


def _os_error(error: BaseException) -> OSError | None:
    """The system's error: this one, or the one that a library turned into it."""
    if isinstance(error, OSError) and error.errno is not None:
        return error
    return disk_fault(error)
