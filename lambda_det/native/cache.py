"""Where compiled kernels are kept, so that others cannot put theirs there."""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import tempfile
from pathlib import Path

_logger = logging.getLogger(__name__)


_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def cache_folder() -> Path:
    """Where compiled kernels are kept, for this user alone."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.path.abspath(base)) / "lambda_det"


def exposed(folder: Path) -> Path | None:
    """The path by which another user than root could put a file into ``folder``, or None.

    It is the folder itself, one of its parents, or a link on the way to it. In a folder with the
    sticky bit, such as /tmp, nobody can replace files of others.
    """
    for path in dict.fromkeys((folder, folder.resolve())):
        for place in (path, *path.parents):
            about = place.lstat()
            is_own, is_link = about.st_uid == os.geteuid(), stat.S_ISLNK(about.st_mode)
            is_safe = is_link or not about.st_mode & _BY_OTHERS
            if place == path:
                is_safe &= is_own
            elif about.st_mode & stat.S_ISVTX:
                is_safe = True
            if not is_safe or not (is_own or about.st_uid == 0):
                return place
    return None


def own_folder() -> Path | None:
    """The cache; None where others could put something into it, which the log says.

    Raises:
        OSError: it cannot be made.
        RuntimeError: there is no home.
    """
    folder = cache_folder()
    for place in reversed((folder, *folder.parents)):
        if not place.exists():
            place.mkdir(mode=0o700, exist_ok=True)
    if (place := exposed(folder)) is None:
        return folder
    _logger.warning(
        f"Other users can change {place}, so no kernels are taken from {folder}; they are compiled "
        "for this process alone. Take that right away (chmod go-w), or name another folder by "
        "XDG_CACHE_HOME."
    )
    return None


def private_folder() -> Path:
    """The cache, or a new folder where others could put something into the cache.

    Raises:
        OSError: it cannot be made, or others could put something into the new one, too.
        RuntimeError: there is no home.
    """
    if folder := own_folder():
        return folder
    private = Path(tempfile.mkdtemp())
    if (place := exposed(private)) is not None:
        private.rmdir()
        raise OSError(f"other users can change {place}; name another folder by TMPDIR")
    return private


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def find(folder: Path, name: str, suffix: str) -> Path | None:
    """The file that :func:`keep` wrote, if it is whole and this user's own.

    Its name has a digest of the content, because half a file would end the process that loads it.
    """
    for file in folder.glob(f"{name}_*{suffix}"):
        about = file.lstat()
        is_own = about.st_uid == os.geteuid() and stat.S_ISREG(about.st_mode)
        is_private = is_own and not about.st_mode & _BY_OTHERS
        if is_private and file.stem.endswith(digest(file.read_bytes())):
            return file
    return None


def keep(folder: Path, name: str, suffix: str, content: bytes) -> Path:
    """Write a file, of which other processes see all or nothing.

    Raises:
        OSError: the folder cannot be written.
    """
    handle, written = tempfile.mkstemp(dir=folder)  # which only this user can read or write
    try:
        with open(handle, "wb") as file:
            file.write(content)
        kept = folder / f"{name}_{digest(content)}{suffix}"
        os.replace(written, kept)
    except BaseException:
        os.unlink(written)
        raise
    return kept
