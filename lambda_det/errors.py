"""Errors that a user can correct. Any other exception is a fault of this package.

The text of each error is one sentence. It names the file, key or value, and says what to do. The
command lines print the sentence and end with status 2. Other exceptions show a stack trace.
A run that a scheduler stopped ends with its own status, so a script can start it again.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import errno
import logging
import os
import re
import select
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NoReturn, TextIO

PREEMPTED_STATUS = 75  # EX_TEMPFAIL of sysexits.h: the same command continues the run
INTERRUPTED_STATUS = 130  # the status of a program that Ctrl-C ended, as in shells
CLOSED_STATUS = 141  # the status of a program whose output nobody reads any more, as in shells

_SILENCE = 9.0  # seconds after which a stage says that it goes on


class UserError(Exception):
    """An error that the user can correct."""


class ConfigError(UserError, ValueError):
    """A configuration key, command-line flag or argument has a value that cannot work."""


class DataError(UserError):
    """A data set is missing, is not in COCO format, or holds entries that cannot be trained on."""


class WeightsError(UserError):
    """A checkpoint is missing, unreadable, unsafe to read, or does not fit the model."""


class DiskError(UserError):
    """A file of a run cannot be written: the disk is full, read-only or broken."""


class NonFiniteLossError(UserError, FloatingPointError):
    """The loss became NaN or infinite; the run stopped before it changed the weights."""


class LostProcessError(UserError):
    """Another process of the run ended. The cause is in the output of that process."""


class Preempted(Exception):
    """A signal stopped the run. Everything is saved, and the run can be resumed."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C stopped the run. Everything is saved, and the run can be resumed."""


@contextlib.contextmanager
def importing_detectron2() -> Iterator[None]:
    """Keep quiet that Detectron2 scripts some functions when it is imported, which PyTorch has
    deprecated.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r".*torch\.jit\.script", FutureWarning)
        yield


class CommandParser(argparse.ArgumentParser):
    """Suggests a flag in the place of one that does not exist, and says errors in one line."""

    def error(self, message: str) -> NoReturn:
        if unknown := re.match(r"unrecognized arguments: --([^ =]+)", message):
            # without their dashes, which make short words alike
            flags = [flag.lstrip("-") for flag in self._option_string_actions]
            keys = "".join(f"; there are also {a.help}" for a in self._actions if a.dest == "opts")
            near = difflib.get_close_matches(unknown[1], flags, n=1, cutoff=0.5)
            message += f"; did you mean --{near[0]}?" if near else keys
        elif wrong := re.match(r"argument (--[\w-]+).*: invalid (int|float) value: (.*)", message):
            number = "a whole number" if wrong[2] == "int" else "a number"
            message = f"{wrong[1]} is {wrong[3]}; give {number}."
        self.refuse(message)

    def refuse(self, message: str) -> NoReturn:
        """End the program with a message."""
        self.exit(2, f"error: {message}\n{self.prog} --help shows the flags.\n")


def command_parser(name: str, description: str, examples: str) -> CommandParser:
    """The parser of a command, whose examples keep their lines.

    Args:
        name: of the command, as in ``lambda-det NAME``.
        description: the first lines of its help.
        examples: the last lines of its help.
    """
    return CommandParser(
        f"lambda-det {name}",
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def exit_status(work: Callable[[], int | None], interrupted: str = "stopped") -> int:
    """Run a command line and return its exit status.

    The text of a UserError, a ``Preempted`` or an ``Interrupted`` is printed.

    Args:
        work: returns a status, or None for 0.
        interrupted: the text to print after a Ctrl-C that stopped everything at once.

    Returns:
        The status of ``work``; 2 after a UserError, or where the disk is full or too many files are
        open; ``PREEMPTED_STATUS`` after a ``Preempted``; 130 after Ctrl-C; ``CLOSED_STATUS`` as
        :func:`printing` says.
    """
    return printing(lambda: _status(work, interrupted))


def printing(work: Callable[[], int]) -> int:
    """Run what prints: to a terminal that lacks some letters, or to a pipe that may be closed.

    Letters that the encoding of the output lacks are printed as escapes. ``| head`` closes its pipe
    before the end, which ends the work without a stack trace.

    Returns:
        The status of ``work``; ``CLOSED_STATUS`` where a closed pipe ended it.
    """
    for stream in (sys.stdout, sys.stderr):
        # there is none, or it is another program's
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="backslashreplace")
    try:
        return work()
    except BrokenPipeError:
        if not _leave_closed_pipes():
            raise
        return CLOSED_STATUS
    finally:
        _leave_closed_pipes()


def _leave_closed_pipes() -> bool:
    """Write what is left for a closed pipe to nowhere; return whether there is such a pipe."""
    # Python's end would print a stack trace about it
    found = False
    for stream in (sys.stdout, sys.stderr):
        # as in printing(); and a full disk
        with contextlib.suppress(AttributeError, ValueError, OSError):
            number = stream.fileno()
            with contextlib.suppress(BrokenPipeError):
                stream.flush()
            if _has_no_reader(number):
                with open(os.devnull, "wb") as nowhere:
                    os.dup2(nowhere.fileno(), number)
                found = True
    return found


def _has_no_reader(number: int) -> bool:
    """Whether nobody reads a pipe."""
    if not hasattr(select, "poll"):  # Windows
        return False
    poll = select.poll()
    poll.register(number, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _status(work: Callable[[], int | None], interrupted: str) -> int:
    try:
        return work() or 0
    except UserError as error:
        print(f"error: {printable_text(str(error))}", file=sys.stderr)
        return 2
    except Preempted as stop:
        print(printable_text(str(stop)), file=sys.stderr)
        return PREEMPTED_STATUS
    except KeyboardInterrupt as stop:
        print(str(stop) or interrupted, file=sys.stderr)
        return INTERRUPTED_STATUS
    except Exception as error:
        if is_out_of_files(error):
            print(f"error: {OUT_OF_FILES} DATALOADER.NUM_WORKERS.", file=sys.stderr)
            return 2
        if (cause := disk_fault(error)) is None:
            raise
        file = printable(cause.filename or "A file")
        print(f"error: {file}: {cause.strerror}; look at the disk, and repeat.", file=sys.stderr)
        return 2


# Only writing raises these, within any error of a library
_OF_WRITING = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO}


def disk_fault(error: BaseException) -> OSError | None:
    """The system's error of a disk that is full, read-only or broken, which a library may have
    turned into another one; None if there is none.
    """
    cause: BaseException | None = error
    while cause is not None and getattr(cause, "errno", None) not in _OF_WRITING:
        cause = cause.__cause__ or cause.__context__
    return cause if isinstance(cause, OSError) else None


OUT_OF_FILES = "Too many files are open; allow more of them by `ulimit -n 4096`, or lower"
# The second is what Python says where one process hands a file to another
_OUT_OF_FILES = re.compile(f"{os.strerror(errno.EMFILE)}|items of ancdata")


def is_out_of_files(error: BaseException) -> bool:
    """Whether the process may open no more files, also where a library, or a loader process, says
    so in another error.
    """
    return bool(_OUT_OF_FILES.search(f"{error!r} {error.__cause__!r} {error.__context__!r}"))


@contextlib.contextmanager
def refused(
    kind: type[UserError], what: str, advice: str, *errors: type[Exception]
) -> Iterator[None]:
    """Turn errors of libraries into one of ours: "WHAT (REASON); ADVICE."

    Args:
        kind: of the error that is raised. An error of this package stays as it is.
        what: went wrong, with the name of the file, key or value.
        advice: what to do; "" for none.
        errors: the classes to turn.

    Raises:
        UserError: of this ``kind``, where one of ``errors`` was raised.
    """
    try:
        yield
    except UserError:
        raise
    except errors as error:
        is_named = isinstance(error, OSError) and f" {error.filename} " in f" {what} "
        why = error.strerror if is_named else reason(error)
        ending = f"; {advice}" if advice else ""
        raise kind(f"{what} ({why}){ending}.") from error


def reason(error: BaseException) -> str:
    """The message of another library's error in one line; its type where there is no message."""
    return printable(" ".join(str(error).split())) or type(error).__name__


def first_line(error: BaseException) -> str:
    """The type of a library's error, and the first line of its message, which may have many."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]


def printable(text: str | os.PathLike) -> str:
    """The name of a file in one line, with characters escaped that a terminal cannot show."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(text))


# A colour; and what else a terminal obeys, or reorders
_CONTROL = re.compile(r"(\x1b\[[\d;]*m)|[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable_text(text: str) -> str:
    """A text that keeps its lines and colours, with characters escaped that a terminal obeys."""
    return _CONTROL.sub(lambda match: match[1] or printable(match[0]), text)


def escape_record(record: logging.LogRecord) -> bool:
    """A filter of a log's handlers: the message as :func:`printable_text` has it."""
    with contextlib.suppress(Exception):  # of its arguments; the handler reports it
        record.msg, record.args = printable_text(record.getMessage()), None
    return True


def log_to_terminal(level: int, stream: TextIO | None = None) -> None:
    """Let a command print what is logged from ``level`` on, each message on its own.

    Args:
        level: of the logging module.
        stream: None for stderr.
    """
    handler = logging.StreamHandler(stream)
    handler.addFilter(escape_record)
    logging.basicConfig(level=level, format="%(message)s", handlers=[handler])


@dataclass
class Stage:
    """A part of a long work, about which its user hears at least every ten seconds.

    Attributes:
        say: gets each sentence.
        left: what is left of it, where that is known.
    """

    say: Callable[[str], object]
    left: str = ""


@contextlib.contextmanager
def stage(what: str, say: Callable[[str], object]) -> Iterator[Stage]:
    """Say what is done, and then how long it has taken, and what is left.

    Args:
        what: is done, such as "recording the graph".
        say: gets each sentence, in a thread of its own.
    """
    result, done, start = Stage(say), threading.Event(), time.perf_counter()

    def tick() -> None:
        while not done.wait(_SILENCE):
            left = f"; {result.left}" if result.left else ""
            # in seconds, because a minute that stands for several lines looks stuck
            say(f"  {what}: {time.perf_counter() - start:.0f} seconds so far{left}")

    say(what)
    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield result
    finally:
        done.set()
        thread.join()


# A command of a shell, which stays as it is; or a flag, and none within a path: its name, and the
# value that follows it if it is one
_FLAG = re.compile(
    r"(?:lambda-det|python|pip) [^`;,]*"
    r"|(?<![^\s\"'(`])--([a-z][a-z0-9-]*)(?:[ =]([A-Z]+\b|auto\b|\d(?:[\w.]*\w)?))?"
)
# What Python calls a flag of the command otherwise; a switch has no value
_ARGUMENTS = {"config": "recipe", "json": "labels"}
_SWITCHES = ("agnostic-nms", "no-images", "overwrite", "raw", "resume", "single-class")


def _argument(found: re.Match) -> str:
    name, value = found.groups()
    if name is None:
        return found[0]
    argument = _ARGUMENTS.get(name, name.replace("-", "_"))
    if name in _SWITCHES:
        rest = f" {value}" if value else ""
        return ("open_images=False" if name == "no-images" else f"{argument}=True") + rest
    if value is None:
        return argument
    return f"{argument}={value if value.isupper() or value.isdecimal() else repr(value)}"


@contextlib.contextmanager
def naming_arguments() -> Iterator[None]:
    """Let errors that the user can correct name arguments of Python in the place of flags."""
    try:
        yield
    except UserError as error:
        text = _FLAG.sub(_argument, str(error))
        if text == str(error):
            raise
        raise type(error)(text) from error


def listed(items: Iterable[object], limit: int = 3) -> str:
    """The first few of many names for a sentence, each through :func:`printable`."""
    items = [printable(str(item)) for item in items]
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return (", ".join(items[:limit]) or "none") + more


def counted(count: float, noun: str) -> str:
    """A number and what it counts, such as "1 class", "2,000 classes" and "0.5 epochs"."""
    if count != 1 and noun.endswith("y"):
        noun = f"{noun[:-1]}ies"
    elif count != 1:
        noun += "es" if noun.endswith("s") else "s"
    return f"{count:,.12g} {noun}"


def duration(seconds: float) -> str:
    """A time for a sentence: "80 seconds", "4.2 minutes", "42 minutes", "1.5 hours"."""
    if seconds < 90:
        return counted(round(seconds), "second")
    return f"{seconds / 60:.2g} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


def suggest(name: str, known: Iterable[str], folder: str = "") -> str:
    """The end of a sentence about an unknown name: similar known names, or the first few, each
    within a folder.
    """
    known = list(known)
    near = difflib.get_close_matches(name, known, cutoff=0.5)
    paths = [os.path.join(folder, each) for each in near or known]
    if near:
        return f"; did you mean {' or '.join(paths)}?"
    return f"; choose from {listed(paths, 5)}." if paths else "."
