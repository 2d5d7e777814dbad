"""Errors of a full or broken disk as one sentence for the user."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from lambda_det.errors import DiskError, UserError, WeightsError, reason
from lambda_det.training.checkpoint_files import last_checkpoint

__all__ = ["explain_disk_errors", "gigabytes", "let_logs_fail", "writing"]

# What is wrong, and what to do about it
_CAUSES = {
    errno.ENOSPC: ("the disk is full", "Free some space"),
    errno.EDQUOT: ("your share of the disk is used up", "Free some space"),
    errno.EFBIG: ("files may not become that large here (see ulimit -f)", "Raise the limit"),
    errno.EROFS: ("the disk is read-only", "Make it writable again"),
    errno.EACCES: ("the rights of the folder or file forbid it", "Restore the rights"),
    errno.EPERM: ("the rights of the folder or file forbid it", "Restore the rights"),
    errno.EIO: ("the disk reports an error", "Repair it, or move the run to another"),
    errno.ESTALE: ("the network disk was lost", "Mount it again"),
}
# Reading raises these as well. They count only for a file in the folder of the run
_OF_READING_TOO = (errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE)


@contextlib.contextmanager
def writing(path: str, size: int = 0) -> Iterator[None]:
    """Raise a DiskError where a file of a run cannot be written, or not be read back.

    Args:
        path: the file, in the folder of the run.
        size: of the file in bytes; 0 if it is unknown.

    Raises:
        DiskError: names the file, the cause and the last good checkpoint.
    """
    try:
        yield
    except (OSError, RuntimeError, WeightsError) as error:
        # torch.save turns an OSError into a RuntimeError; reading back raises a WeightsError
        folder = os.path.dirname(path)
        cause, cure = _cause(error)
        if size:
            cause += f"; it needs {gigabytes(size)}, and {gigabytes(_free(folder))} are free"
        raise DiskError(_sentence(path, cause, cure, folder)) from error


@contextlib.contextmanager
def explain_disk_errors(folder: str) -> Iterator[None]:
    """Raise a DiskError where any file of a run meets a full or broken disk.

    It surrounds everything that a run writes to its folder: Detectron2's writers of metrics and
    events, and the results of an evaluation. :func:`let_logs_fail` does the same for the log.

    Args:
        folder: of the run.

    Raises:
        DiskError: in place of an error of the disk. Other errors pass.
    """
    before, threading.excepthook = threading.excepthook, _no_trace_of_events
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        found = _os_error(error)
        if found is None or found.errno not in _CAUSES:
            raise
        path = found.filename if isinstance(found.filename, str) else ""
        inside = path and Path(folder).resolve() in Path(path).resolve().parents
        if found.errno in _OF_READING_TOO and not inside:
            raise
        raise DiskError(_sentence(path or f"A file in {folder}", *_cause(found), folder)) from error
    finally:
        threading.excepthook = before


def _no_trace_of_events(error: threading.ExceptHookArgs) -> None:
    """Print no stack trace of TensorBoard's thread: the next write raises the same error."""
    number = getattr(error.exc_value, "errno", None)
    if number not in _CAUSES or number in _OF_READING_TOO:
        threading.__excepthook__(error)


def _sentence(what: str, cause: str, cure: str, folder: str) -> str:
    last = last_checkpoint(folder)
    good = f"the last good checkpoint is {last}" if last else "there is no checkpoint yet"
    return (
        f"{what} could not be written: {cause}; {good}. {cure}, and start the same command again "
        "with --resume."
    )


def _cause(error: BaseException) -> tuple[str, str]:
    found = _os_error(error)
    if found is not None and found.errno in _CAUSES:
        return _CAUSES[found.errno]
    return reason(found or error).rstrip("."), "Put that right"


def _os_error(error: BaseException | None) -> OSError | None:
    """The OSError that caused an error; PyTorch's own message does not name it."""
    while error is not None:
        if isinstance(error, OSError):
            return error
        error = error.__cause__ or error.__context__
    return None


def _free(folder: str) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0


def gigabytes(size: int) -> str:
    """A number of bytes for a message, such as "2.5 GB"."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size / 1e3:.0f} kB"


def let_logs_fail() -> None:
    """Let a log file that cannot be written end with one line on the screen.

    Without this, logging prints a stack trace for each record. Call it when the logs are set up.
    """
    for name in ("fvcore", "detectron2", "lambda_det"):
        for handler in logging.getLogger(name).handlers:
            stream = getattr(handler, "stream", None)
            if isinstance(handler, logging.StreamHandler) and stream not in (
                sys.stdout,
                sys.stderr,
            ):
                handler.handleError = _End(handler)


class _End:
    """Replaces a handler's handleError, which prints a stack trace."""

    def __init__(self, handler: logging.StreamHandler) -> None:
        self._handler = handler
        self._usual = type(handler).handleError

    def __call__(self, record: logging.LogRecord) -> None:
        stream, error = self._handler.stream, sys.exc_info()[1]
        try:
            number = stream.fileno()
        except (AttributeError, OSError, ValueError):
            number = None
        if number is None or not isinstance(error, OSError):
            self._usual(self._handler, record)
            return
        name = getattr(stream, "name", "the log")
        print(f"{name} cannot be written any more: {_cause(error)[0]}", file=sys.stderr)
        # The buffer still holds records, and closing the file would fail: they go to os.devnull
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
        os.close(nowhere)
