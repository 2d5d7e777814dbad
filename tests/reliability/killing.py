"""Runs of the command lines in processes of their own that are killed at a chosen moment.

They are forked from a process that has imported everything, so that twenty starts take the time of
one. OMP_NUM_THREADS gives the number of threads.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.forked import CONTEXT, as_started, print_into

_LIMIT = 600  # seconds, after which a run counts as hanging
_FILE_EVENTS = ("open", "os.rename", "os.remove", "os.link")


@dataclass(frozen=True)
class Kill:
    """When to send SIGKILL.

    Attributes:
        at: "time", so many seconds after training has begun; "operation", just before the process
            opens, renames, links or removes files of checkpoints for the n-th time; "temporary", so
            many seconds after a checkpoint that is not complete yet is seen in the folder.
        amount: those seconds, or that n.
    """

    at: str
    amount: float


def train(
    tool: str, words: Sequence[str], log: Path, *, folder: Path, kill: Kill | None = None
) -> int:
    """Run a command line in another process.

    Args:
        tool: "detection", "lazy" or "classification".
        words: its arguments.
        log: what it prints is added to this file.
        folder: of the run.
        kill: when to kill it; None lets it go to its end.

    Returns:
        Its exit status; -9 if it was killed.
    """
    left = _temporary_files(folder)  # by a run that was killed before
    process = CONTEXT.Process(target=_main, args=(tool, list(words), str(log), kill))
    process.start()
    end = time.monotonic() + _LIMIT
    if kill and kill.at == "temporary":
        while process.is_alive() and _temporary_files(folder) <= left:
            time.sleep(0.0005)
            assert time.monotonic() < end, f"no temporary file and no end; see {log}"
        time.sleep(kill.amount)
        process.kill()
    process.join(max(end - time.monotonic(), 1))
    if process.is_alive():
        process.kill()
        raise AssertionError(f"the run hangs; see {log}")
    return process.exitcode


def _temporary_files(folder: Path) -> set[tuple[int, int]]:
    """Incomplete checkpoints, by inode and time, which another file of that name does not share."""
    found = set()
    for path in folder.glob("*.tmp"):
        with contextlib.suppress(OSError):  # it was just completed
            about = path.stat()
            found.add((about.st_ino, about.st_ctime_ns))
    return found


def _main(tool: str, words: list[str], log: str, kill: Kill | None) -> None:
    print_into(Path(log))
    as_started()
    if kill and kill.at == "time":
        threading.Thread(target=_kill_after, args=(kill.amount,), daemon=True).start()
    if kill and kill.at == "operation":
        _kill_before_operation(int(kill.amount))

    from lambda_det import classification, detection
    from lambda_det.errors import exit_status

    room, parser = {
        "detection": (detection, detection.parser),
        "lazy": (detection, detection.lazy_parser),
        "classification": (classification, classification.parser),
    }[tool]
    sys.exit(exit_status(lambda: room.run(parser().parse_args(words))))


def _kill_after(seconds: float) -> None:
    from detectron2.utils import events

    while not events._CURRENT_STORAGE_STACK:  # it has one from the first step on
        time.sleep(0.001)
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)


def _kill_before_operation(number: int) -> None:
    seen = 0

    def count(event: str, args: tuple) -> None:
        nonlocal seen
        if event not in _FILE_EVENTS or not isinstance(args[0], (str, os.PathLike)):
            return
        name = os.path.basename(os.fspath(args[0]))
        is_written = event != "open" or bool(set(args[1] or "") & set("wax+"))
        if is_written and (name.startswith("last_checkpoint") or ".pth" in name):
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
