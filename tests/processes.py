"""Which processes a test has started, directly or not, and whether they still live; Linux only."""

import os
import re
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path


def wait_until(condition: Callable[[], object], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for_the_end_of(pids: Iterable[int], seconds: float) -> None:
    """Wait until all of these processes have ended; the others are ended, and that is a failure.

    What is left would hold the output of the tests open, and whoever reads it would wait forever.
    """
    try:
        wait_until(lambda: not any(map(is_alive, pids)), seconds)
    except AssertionError:
        left = [pid for pid in pids if is_alive(pid)]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        raise AssertionError(f"{left} were left after {seconds} s") from None


def children(pid: int) -> list[int]:
    """The processes that any thread of a process started."""
    result: list[int] = []
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            result += map(int, (task / "children").read_text().split())
    except (FileNotFoundError, ProcessLookupError):
        pass
    return result


def descendants(pid: int) -> list[int]:
    """The processes that a process started, directly or not, children before grandchildren."""
    started = children(pid)
    return started + [pid for child in started for pid in descendants(child)]


def shared_memory(pids: Iterable[int]) -> list[Path]:
    """The files in /dev/shm that processes have mapped; those of other programs are left out."""
    names: set[str] = set()
    for pid in pids:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        names.update(re.findall(r" (/dev/shm/\S+)", maps))
    return sorted(map(Path, names))
