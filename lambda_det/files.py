"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
from codecs import BOM_UTF16_BE, BOM_UTF16_LE, BOM_UTF32_BE, BOM_UTF32_LE
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from lambda_det.errors import (
    ConfigError,
    DataError,
    DiskError,
    UserError,
    disk_fault,
    refused,
    suggest,
)

# The endings of images: formats of photographs and cameras that Pillow reads
SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"),
    *(".avif", ".jp2", ".j2k", ".jpx", ".ppm", ".pgm", ".pbm", ".pnm", ".tga"),
)
# Those of phones and cameras that it does not read
UNREAD_SUFFIXES = (
    *(".heic", ".heif", ".hif", ".dng", ".nef", ".cr2", ".cr3", ".arw", ".orf", ".rw2", ".raf"),
)
TEMPORARY = ".tmp"  # ends the name of a file until it is complete


def relative_path(path: str | Path, start: str | Path) -> str:
    """The path relative to the folder ``start``; absolute where Windows has them on different
    drives.
    """
    try:
        return os.path.relpath(path, start)
    except ValueError:
        return os.path.abspath(path)


def refuse_existing(path: str | Path, overwrite: bool, *, folder: bool = False) -> None:
    """Refuse a path that must not be written to.

    Args:
        path: to write.
        overwrite: what is there may be replaced.
        folder: the path may be a folder.

    Raises:
        ConfigError: it is a folder, exists and must not be replaced, or cannot be written.
    """
    if not folder and os.path.isdir(path):
        raise ConfigError(f"{path} is a folder; give the name of a file.")
    if os.path.exists(path) and not overwrite:
        raise ConfigError(f"{path} exists already; give another name, or add --overwrite.")
    refuse_unwritable(Path(path) if folder else Path(path).parent)


def refuse_unwritable(folder: Path) -> None:
    """Refuse a folder to which nothing can be written, before the work for what is written to it.

    Raises:
        ConfigError: it is a file or in one, or is read-only.
    """
    # a Path raises an error where one may not look; such a place does not exist here
    parent = next(filter(os.path.exists, (folder, *folder.absolute().parents)))
    if not (parent.is_dir() and os.access(parent, os.W_OK)):
        raise ConfigError(f"{folder}: {parent} is not a folder, or is read-only; name another one.")


def refuse_missing(*paths: str | Path | None) -> None:
    """Refuse a path where nothing is. Addresses such as ``hf://OWNER/NAME`` pass.

    Raises:
        DataError: there is no such file or folder; it says which others there are.
    """
    for path in filter(None, paths):
        if "://" not in str(path) and not os.path.exists(path):
            # by names alone: all paths of one folder are alike
            there = sorted(other.name for other in Path(path).parent.glob("[!.]*"))
            folder = os.path.dirname(str(path).rstrip("/"))
            ending = suggest(Path(path).name, there, folder)
            raise DataError(f"There is no file or folder {path}{ending}")


def expanded(path: str | os.PathLike | None) -> str | None:
    """A path as a shell passes it on: ``~`` is the home folder, which Python does not know."""
    return None if path is None else os.path.expanduser(os.fspath(path))


# Byte order marks; the mark of UTF-32 begins with the mark of UTF-16
_MARKS = {
    BOM_UTF32_LE: "UTF-32",
    BOM_UTF32_BE: "UTF-32",
    BOM_UTF16_LE: "UTF-16",
    BOM_UTF16_BE: "UTF-16",
}


def read_text(path: str | Path) -> str:
    """The text of a file in UTF-8, with or without a byte order mark.

    Raises:
        DataError: it cannot be read, or is in another encoding.
    """
    with refused(DataError, f"{path} cannot be read", "make it readable", OSError):
        content = Path(path).read_bytes()
    if encoding := _wide_encoding(content):
        raise DataError(f"{path} is text in {encoding}; save it as UTF-8.")
    what = f"{path} is not text in UTF-8"
    with refused(DataError, what, "save it as UTF-8", UnicodeDecodeError):
        return content.decode("utf-8-sig")


def decoded(content: bytes) -> str:
    """Decode bytes in the encoding that they seem to be in; bytes that do not fit are replaced."""
    return content.decode(_wide_encoding(content) or "utf-8-sig", "replace")


def _wide_encoding(content: bytes) -> str | None:
    """The encoding of text that is marked as UTF-16 or UTF-32, or has the zeros of UTF-16."""
    for mark, name in _MARKS.items():
        if content.startswith(mark):
            return name
    start = content[:1000]
    for name, zeros in (("UTF-16-LE", start[1::2]), ("UTF-16-BE", start[::2])):
        if zeros.count(0) > len(start) / 4:
            return name
    return None


@contextlib.contextmanager
def writing_to(path: str | Path) -> Iterator[None]:
    """Make the folder of a file that is about to be written.

    Raises:
        ConfigError: it cannot be written.
    """
    with refused(ConfigError, f"{path} cannot be written", "", OSError):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        yield


@contextlib.contextmanager
def disk_of(folder: str | Path) -> Iterator[None]:
    """Name a folder of results in the error of a disk that is full, read-only or broken.

    Raises:
        DiskError: names the folder and the cause.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if (cause := disk_fault(error)) is None:
            raise
        raise DiskError(
            f"The results in {folder} are not complete: {cause.strerror}; look at the disk of that "
            "folder, or name another one, and repeat."
        ) from error


def replace_file(
    path: str | Path,
    write: Callable[[IO[bytes]], object],
    check: Callable[[str], object] | None = None,
) -> None:
    """Write a file so that a crash leaves the old one or the new one, never half of it.

    Args:
        path: of the file; its folder must exist.
        write: called with a file that is open for writing bytes.
        check: called with the path of the temporary file when that is on the disk. If it raises,
            the old file stays.
    """
    # In the same folder, because a move is atomic only within one disk
    temporary = f"{path}{TEMPORARY}"
    own = None
    try:
        with open(temporary, "wb") as file:
            own = os.fstat(file.fileno())
            write(file)
            file.flush()
            # otherwise a power failure may leave an empty file of that name
            os.fsync(file.fileno())
            if check is not None:
                if hasattr(os, "posix_fadvise"):
                    # Let the check read from the disk, not from the cache in memory
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                # While the file is open, no other can get its number, by which it is known below
                check(temporary)
        os.replace(temporary, path)
        sync_folder(Path(path).parent)
    finally:
        # Where the folder was removed, another run may write the same file in a new one by now
        with contextlib.suppress(FileNotFoundError):
            if own is not None and os.path.samestat(own, os.stat(temporary)):
                os.unlink(temporary)


def sync_folder(folder: str | Path) -> None:
    """Write the names in a folder to the disk, where the file system can."""
    with contextlib.suppress(OSError):  # Windows, and some network file systems
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def replace_text(path: str | Path, text: str) -> None:
    """Write a text as :func:`replace_file` does; names in it that are not UTF-8 are kept."""
    replace_file(path, lambda file: file.write(text.encode("utf-8", "surrogateescape")))
