"""The lock of a run's folder: one training at a time writes to it.

The system locks the file ``run.lock`` for as long as the process lives, so that a kill leaves no
lock behind. The file also says whose it is, with a count that its owner raises every few seconds:
not every network file system knows the locks of other machines, and Windows has no such locks. A
file that another machine left is watched until the count moves or its owner is taken for dead.
Clocks are not compared.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from lambda_det.errors import ConfigError
from lambda_det.training.disk_errors import explain_disk_errors

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

__all__ = ["RunLock", "run_lock"]

logger = logging.getLogger(__name__)

NAME = "run.lock"
BEAT_SECONDS = 10.0
# Longer than a network file system may show an old state of a file
WATCH_SECONDS = 45.0
_SIZE = 256  # bytes of the file, which is written in place


class RunLock:
    """The right to write to a folder.

    Args:
        folder: of the run; it need not be there.
        key: the user's key for it.
    """

    def __init__(self, folder: str, key: str) -> None:
        self._folder = folder
        self._key = key
        self._path = Path(folder, NAME)
        self._file: int | None = None
        self._count = 0
        self._released = threading.Event()
        self._beats = threading.Thread(target=self._keep_beating, name="run lock", daemon=True)

    def acquire(self) -> None:
        """Take the folder, if it can be written to and is not taken by this lock already.

        Raises:
            ConfigError: another training has it.
            DiskError: the file of the lock cannot be written.
        """
        writable = os.path.isdir(self._folder) and os.access(self._folder, os.W_OK)
        if self._file is not None or not writable:
            return
        with explain_disk_errors(self._folder):
            self._file = self._open()
            self._beats.start()
            self._beat()

    def _open(self) -> int:
        """The file, locked where the file system can."""
        dead = b""  # content of a lock whose owner has stopped counting
        while True:
            # As text, Windows would write another end of the line than it reads
            flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0)
            file = os.open(self._path, flags, 0o666)
            try:
                os.lseek(file, 0, os.SEEK_SET)
                owner = os.read(file, _SIZE)
                if not _lock(file):
                    raise self._refusal(owner)
                is_free = owner in (b"", dead) or _is_gone(owner)
                # It is another file where the owner ended, and removed it, in the lines above
                if is_free and os.path.samestat(os.fstat(file), os.stat(self._path)):
                    return file
            except FileNotFoundError:
                owner = b""
            except BaseException:
                os.close(file)
                raise
            os.close(file)
            if owner:
                self._watch(owner)
                dead = owner

    def _watch(self, owner: bytes) -> None:
        """Wait until the owner is seen to live, or long enough to take it for dead."""
        logger.warning(
            f"{self._path} is of {_describe(owner)}: waiting up to {WATCH_SECONDS:.0f} s to see "
            "whether it lives"
        )
        end = time.monotonic() + WATCH_SECONDS
        while time.monotonic() < end:
            time.sleep(BEAT_SECONDS / 10)
            # Opened anew, which is when a network file system asks for the newest state
            try:
                now = self._path.read_bytes()
            except FileNotFoundError:
                return  # it has ended
            if now != owner:
                raise self._refusal(now)

    def _refusal(self, owner: bytes) -> ConfigError:
        return ConfigError(
            f"{self._key} {self._folder} is being trained in by {_describe(owner)}: wait for its "
            f"end or stop it, or give another {self._key}. --eval-only is possible meanwhile."
        )

    def _beat(self) -> None:
        self._count += 1
        owner = {"host": socket.gethostname(), "process": os.getpid(), "count": self._count}
        os.lseek(self._file, 0, os.SEEK_SET)
        os.write(self._file, json.dumps(owner).ljust(_SIZE - 1).encode() + b"\n")
        os.fsync(self._file)

    def _keep_beating(self) -> None:
        while not self._released.wait(BEAT_SECONDS):
            with contextlib.suppress(OSError):  # a full disk is reported by what matters
                self._beat()

    def release(self) -> None:
        """Give the folder up; nothing if it was not taken."""
        if self._file is None:
            return
        self._released.set()
        self._beats.join()
        with contextlib.suppress(OSError):
            os.ftruncate(self._file, 0)  # Windows does not remove a file that is open
            self._path.unlink()
        os.close(self._file)
        self._file = None


@contextlib.contextmanager
def run_lock(folder: str, key: str) -> Iterator[RunLock]:
    """A lock that is released in the end; see :class:`RunLock`."""
    lock = RunLock(folder, key)
    try:
        yield lock
    finally:
        lock.release()


def _lock(file: int) -> bool:
    """Lock a file for this process; True as well where the file system has no locks.

    A record lock, and not flock: children that the process forked do not hold it when it is killed.
    """
    if fcntl is None:
        return True
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN)
    return True


def _is_gone(owner: bytes) -> bool:
    """Whether the owner was a process of this machine, and has ended."""
    host, process = _parse(owner)
    if host != socket.gethostname():
        return False
    if process == os.getpid():
        return True  # a restarted container: this process has the number of the last one
    if os.name != "posix":
        return False  # on Windows, signal 0 would end the process
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass
    return False


def _parse(owner: bytes) -> tuple[str, int]:
    """Host and process; ("", 0) where they are not, or not yet, in the file."""
    try:
        written = json.loads(owner)
        return str(written["host"]), int(written["process"])
    except (ValueError, KeyError, TypeError):
        return "", 0


def _describe(owner: bytes) -> str:
    host, process = _parse(owner)
    return f"process {process} on {host}" if host else "a run that is just starting"
