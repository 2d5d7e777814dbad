"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO

__all__ = ["DRAFT", "replace_file", "replace_text", "sync_folder"]

DRAFT = ".tmp"  # at the end of the name of a file that is not whole yet


def replace_file(
    path: str | Path,
    write: Callable[[IO[bytes]], object],
    check: Callable[[str], object] | None = None,
) -> None:
    """Write a file so that a crash leaves the old one or the new one, never half of it.

    Args:
        path: in a folder that is there.
        write: called with a file opened for writing bytes.
        check: called with the path of the draft when that is on the disk; what it raises leaves the
            old file.
    """
    draft = f"{path}{DRAFT}"  # in the same folder, since a file moves at once only within a disk
    try:
        with open(draft, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())  # or a power cut may leave the new name on empty content
            if check is not None and hasattr(os, "posix_fadvise"):
                # What is checked shall come from the disk, and not from the memory in front of it
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if check is not None:
            check(draft)
        os.replace(draft, path)
        sync_folder(Path(path).parent)
    finally:
        Path(draft).unlink(missing_ok=True)


def sync_folder(folder: str | Path) -> None:
    """Bring the names in a folder to the disk, where the file system has a way to."""
    with contextlib.suppress(OSError):  # Windows, and some network file systems
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def replace_text(path: str | Path, text: str) -> None:
    """Write a text file likewise; names of files in it that are not UTF-8 stay what they are."""
    replace_file(path, lambda file: file.write(text.encode("utf-8", "surrogateescape")))
