"""The lock of a run's folder: one training at a time writes to it."""

from __future__ import annotations

import contextlib
import errno
import inspect
import logging
import os
import socket
from pathlib import Path

from detectron2.engine import HookBase
from filelock import FileLock, Timeout

from lambda_det.errors import ConfigError
from lambda_det.training.settings import Settings

__all__ = ["KeepFolder", "RunLock"]

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
        self._own: os.stat_result | None = None  # of the file, once it is locked

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock.is_locked:
            if not self._is_of_another():
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
        self._own = os.stat(self._file)

    def check(self) -> None:
        """Make sure that the folder was not removed and locked by another training since.

        Both would write checkpoints of the same names, and neither would be told.

        Raises:
            ConfigError: it was.
        """
        if self._is_of_another():
            raise ConfigError(
                f"{self._key} {self._folder} was removed, and another training runs there now: "
                f"this one, process {os.getpid()}, ends, because both would write to the same "
                f"files. Give each training an {self._key} of its own."
            )

    def _is_of_another(self) -> bool:
        if self._own is None:
            return False
        try:
            return not os.path.samestat(os.stat(self._file), self._own)
        except OSError:  # the folder was removed or moved, and nobody else has it
            return False


class KeepFolder(HookBase):
    """Ends a training whose folder another training has, before its next step.

    The checkpointer looks as well, because a step or an evaluation may be long.
    """

    def __init__(self, lock: RunLock) -> None:
        self._lock = lock

    def before_step(self) -> None:
        self._lock.check()
