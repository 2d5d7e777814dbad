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
# loader processes of a killed run hold its lock until they end as well
_SECONDS = 2.0
# The errors of file systems without locks
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL}
# There, newer versions of filelock would use a plain file as the lock, which a killed run leaves
# behind.
_ONLY_THE_SYSTEM = (
    {"fallback_to_soft": False}
    if "fallback_to_soft" in inspect.signature(FileLock.__init__).parameters
    else {}
)


class RunLock:
    """The right to write to a folder, as a context that releases it at its end.

    The system releases the lock of a process that ends in any way; the file of a killed process
    stays, and locks nothing.

    Args:
        settings: name the folder, which need not exist.
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
        """Lock the folder, if it can be written to and this object has not locked it yet.

        Raises:
            ConfigError: another training has it.
            OSError: the file of the lock cannot be written.
        """
        writable = os.path.isdir(self._folder) and os.access(self._folder, os.W_OK)
        if self._lock.is_locked or not writable:
            return
        owner = ""
        # the file does not exist; Windows does not show a locked one
        with contextlib.suppress(OSError):
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
        with contextlib.suppress(PermissionError):  # Windows locks it against reading as well
            self._file.write_text(f"process {os.getpid()} on {socket.gethostname()}\n", "utf-8")
