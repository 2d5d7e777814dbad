"""The errors that a user can mend, apart from those that are ours to mend.

The text of each is one sentence that names the file, key or value and says what to do about it. The
command lines print that sentence and end with status 2; only other exceptions show a stack trace.
A run that a scheduler stopped ends with a status of its own, so that a script can start it again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable

PREEMPTED_STATUS = 75  # EX_TEMPFAIL of sysexits.h: the same command again would carry on


class UserError(Exception):
    """Something the person at the keyboard can put right."""


class ConfigError(UserError, ValueError):
    """A configuration key, command-line flag or argument has a value that cannot work."""


class DataError(UserError):
    """A data set is missing, is not in COCO format, or holds entries that cannot be trained on."""


class WeightsError(UserError):
    """A checkpoint is missing, unreadable, unsafe to read, or does not fit the model."""


class DiskError(UserError):
    """A file of a run cannot be written: the disk is full, read-only or broken."""


class NonFiniteLossError(UserError, FloatingPointError):
    """The loss became NaN or infinite, and the run stopped before the weights were touched."""


class LostProcessError(UserError):
    """Another process of the run is gone; whoever ended it, or it itself, knows why."""


class Preempted(Exception):
    """The run was told to stop from outside, has saved all that it had, and can be resumed."""


def exit_status(work: Callable[[], int | None], interrupted: str = "stopped") -> int:
    """Do the work of a command line and return the status to end with.

    Args:
        work: returns a status, or None for 0.
        interrupted: what to say after Ctrl-C.

    Returns:
        The status of ``work``; 2 after a UserError and ``PREEMPTED_STATUS`` after a ``Preempted``,
        whose sentences are printed; 130 after Ctrl-C.
    """
    try:
        return work() or 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Preempted as stop:
        print(stop, file=sys.stderr)
        return PREEMPTED_STATUS
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        return 130


def reason(error: BaseException) -> str:
    """What an error of another library says, in one line; its kind where it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__


def printable(text: str | os.PathLike) -> str:
    """A file's name in one line that every terminal and log can show, odd letters escaped."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(text))


def listed(items: Iterable[str], limit: int = 3) -> str:
    """The first few of many, for a sentence."""
    items = list(items)
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return (", ".join(items[:limit]) or "none") + more
