"""The lock of a run's folder: one training at a time writes to it."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
from pathlib import Path

from filelock import FileLock, Timeout

from lambda_det.errors import ConfigError
from lambda_det.training.settings import Settings

__all__ = ["RunLock"]

logger = logging.getLogger(__name__)

NAME = "run.lock"
# loader processes of a killed run hold its lock until they end as well
_SECONDS = 2.0
# On file systems without locks, newer versions of filelock would use a plain file as the lock,
# which a killed run leaves behind.
_IS_NEW = "fallback_to_soft" in inspect.signature(FileLock.__init__).parameters


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
        self._lock = FileLock(self._file, **({"fallback_to_soft": False} if _IS_NEW else {}))

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
        """
        writable = os.path.isdir(self._folder) and os.access(self._folder, os.W_OK)
        if self._lock.is_locked or not writable:
            return
        try:
            self._lock.acquire(timeout=_SECONDS)
        except Timeout as error:
            raise ConfigError(
                f"Another training runs in {self._key} {self._folder}: wait for its end or stop "
                f"it, or give another {self._key}. --eval-only is possible meanwhile."
            ) from error
        except (NotImplementedError, OSError) as error:
            logger.warning(
                f"{self._folder} cannot be locked ({error}): nothing refuses a second training "
                "there"
            )
