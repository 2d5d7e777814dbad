"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import IO

__all__ = ["replace_file", "replace_text"]


def replace_file(path: str | Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file so that a crash leaves the old one or the new one, never half of it.

    Args:
        path: in a folder that is there.
        write: called with a file opened for writing bytes.
    """
    draft = f"{path}.tmp"  # in the same folder, since a file moves at once only within a disk
    try:
        with open(draft, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())  # or a power cut may leave the new name on empty content
        os.replace(draft, path)
    finally:
        Path(draft).unlink(missing_ok=True)


def replace_text(path: str | Path, text: str) -> None:
    """Write a text file likewise; names of files in it that are not UTF-8 stay what they are."""
    replace_file(path, lambda file: file.write(text.encode("utf-8", "surrogateescape")))
