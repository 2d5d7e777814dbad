"""Errors of a full or broken disk as one sentence for the user."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

from lambda_det.errors import DiskError, UserError, WeightsError, reason
from lambda_det.training.checkpoint_files import last_checkpoint

__all__ = ["explain_disk_errors", "writing"]

_OF_WRITING = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}  # reading raises none of them


@contextlib.contextmanager
def explain_disk_errors(folder: str) -> Iterator[None]:
    """Raise a DiskError where any file of a run meets a full or broken disk.

    It surrounds everything that a run writes to its folder: Detectron2's writers of metrics and
    events, and the results of an evaluation.

    Args:
        folder: of the run.

    Raises:
        DiskError: in place of an error of the disk. Other errors pass.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        found = _os_error(error)
        if found is None or found.errno not in _OF_WRITING:
            raise
        raise _disk_error(found.filename or f"A file in {folder}", error, folder) from error


@contextlib.contextmanager
def writing(path: str, size: int) -> Iterator[None]:
    """Raise a DiskError where a checkpoint cannot be written, or not be read back.

    Args:
        path: the file, in the folder of the run.
        size: of the file in bytes; 0 for a link, which needs no space.

    Raises:
        DiskError: names the file, the cause and the last good checkpoint.
    """
    try:
        yield
    except (OSError, RuntimeError, WeightsError) as error:
        # torch.save turns an OSError into a RuntimeError; reading back raises a WeightsError
        folder, needs = str(Path(path).parent), ""
        with contextlib.suppress(OSError):
            free = shutil.disk_usage(folder).free
            if size:
                needs = f"; it needs {size / 1e6:.1f} MB, and {free / 1e6:.1f} MB are free"
        raise _disk_error(path, error, folder, needs) from error


def _disk_error(what: str, error: BaseException, folder: str, needs: str = "") -> DiskError:
    found = _os_error(error)
    cause = found.strerror if found and found.strerror else reason(found or error).rstrip(".")
    last = last_checkpoint(folder)
    good = f"the last good checkpoint is {last}" if last else "there is no checkpoint yet"
    return DiskError(
        f"{what} could not be written: {cause}{needs}; {good}. Put that right, and start the same "
        "command again with --resume."
    )


def _os_error(error: BaseException | None) -> OSError | None:
    """The OSError that caused an error; PyTorch's own message does not name it."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error
