"""The lock of a run's folder: one training at a time writes to it."""

from __future__ import annotations

import contextlib
import errno
import inspect
import logging
import os
import socket
from pathlib import Path

from filelock import FileLock, Timeout

from lambda_det.errors import ConfigError
from lambda_det.training.settings import Settings

__all__ = ["RunLock"]

logger = logging.getLogger(__name__)

NAME = "run.lock"
# Loader processes of a run that was killed hold its lock until they are ended, too
_SECONDS = 2.0
# What file systems say that have no locks
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL}
# There, newer versions of filelock would take a file for a lock, and that of a killed run stays
_ONLY_THE_SYSTEM = (
    {"fallback_to_soft": False}
    if "fallback_to_soft" in inspect.signature(FileLock.__init__).parameters
    else {}
)


class RunLock:
    """The right to write to a folder, as a context at whose end it is given up.

    The system gives up the lock of a process that ends in whatever way; the file of one that was
    killed stays, and locks nothing.

    Args:
        settings: name the folder, which need not be there.
    """

    def __init__(self, settings: Settings) -> None:
        self._folder, self._key = settings.output_dir, settings.key("output_dir")
        self._file = Path(self._folder, NAME)
        self._lock = FileLock(self._file, **_ONLY_THE_SYSTEM)

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock.is_locked:
            with contextlib.suppress(OSError):  # Windows does not remove a file that is open
                self._file.unlink()
            self._lock.release()

    def acquire(self) -> None:
        """Take the folder, if it can be written to and is not taken by this lock already.

        Raises:
            ConfigError: another training has it.
            OSError: the file of the lock cannot be written.
        """
        writable = os.path.isdir(self._folder) and os.access(self._folder, os.W_OK)
        if self._lock.is_locked or not writable:
            return
        owner = ""
        with contextlib.suppress(OSError):  # it is not there; Windows does not show a locked one
            owner = self._file.read_text("utf-8", "replace").strip()
        try:
            self._lock.acquire(timeout=_SECONDS)
        except Timeout as error:
            raise ConfigError(
                f"Another training runs in {self._key} {self._folder} "
                f"({owner or 'another process'}): wait for its end or stop it, or give another "
                f"{self._key}. --eval-only is possible meanwhile."
            ) from error
        except (NotImplementedError, OSError) as error:
            if isinstance(error, OSError) and error.errno not in _NO_LOCKS:
                raise
            logger.warning(
                f"The file system of {self._folder} has no locks: nothing refuses a second "
                "training there"
            )
            return
        with contextlib.suppress(PermissionError):  # Windows locks it against this, too
            self._file.write_text(f"process {os.getpid()} on {socket.gethostname()}\n", "utf-8")
