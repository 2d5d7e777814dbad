"""The pictures below a folder, found by the names that labels have for them."""

from __future__ import annotations

import contextlib
import os
import re
import unicodedata
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

__all__ = ["PICTURES", "PictureFolder", "normal", "walk"]

PICTURES = (".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff", ".webp")


def walk(folder: str | os.PathLike) -> list[Path]:
    """The files below a folder, in the order of their paths.

    Links to folders are followed. A folder that several paths lead to is entered by the shortest of
    them, and by its own name rather than by a link. Hidden files and folders, such as
    ``.ipynb_checkpoints``, are left out.
    """
    entered: set[str] = set()
    waiting, files = deque([Path(folder)]), []
    while waiting:
        here = waiting.popleft()
        place = os.path.realpath(here)
        if place in entered:
            continue
        entered.add(place)
        with contextlib.suppress(PermissionError, FileNotFoundError), os.scandir(here) as entries:
            seen = [entry for entry in entries if not entry.name.startswith(".")]
            folders = [entry for entry in seen if entry.is_dir()]
            folders.sort(key=lambda entry: (entry.is_symlink(), entry.name))
            waiting.extend(here / entry.name for entry in folders)
            files += [here / entry.name for entry in seen if entry.is_file()]
    return sorted(files)


def normal(name: str) -> str:
    """A name in one of the forms that Unicode has for it: macOS writes "é" as two characters."""
    return unicodedata.normalize("NFC", name)


class PictureFolder:
    """The pictures below a folder, by the ends of their paths.

    Attributes:
        folder: where they are.
        paths: of all pictures, in order.
    """

    def __init__(self, folder: str | os.PathLike, paths: Iterable[Path] | None = None) -> None:
        """
        Args:
            folder: where they are.
            paths: of the pictures that are meant; None for all below the folder.
        """
        self.folder = Path(folder)
        paths = walk(folder) if paths is None else paths
        self.paths = sorted(path for path in paths if path.suffix.lower() in PICTURES)
        self._ends: dict[str, set[Path]] = {}
        self._folded: dict[str, set[Path]] = {}  # without capital letters
        self._folders: set[str] = set()
        for path in self.paths:
            parts = [normal(part) for part in path.relative_to(folder).parts]
            self._folders.update(parts[:-1])
            for start in range(len(parts)):
                end = "/".join(parts[start:])
                for key in {end, end.removesuffix(normal(path.suffix))}:
                    self._ends.setdefault(key, set()).add(path)
                    self._folded.setdefault(key.casefold(), set()).add(path)

    def named(self, name: str) -> tuple[str, set[Path]]:
        """The pictures with the longest end of a name, and that end; none: "", set().

        A name may be a path of another machine or an address. Its ending may be missing, and
        capital letters count only where two names differ by nothing else. A folder in the name is
        not dropped where the folder has pictures here: cam2/0.png is not cam1/0.png.
        """
        for text in _readings(name):
            parts = [part for part in normal(text).replace("\\", "/").split("/") if part]
            parts = [part for part in parts if part not in (".", "..")]
            for start in range(len(parts)):
                if start and parts[start - 1] in self._folders:
                    break
                end = "/".join(parts[start:])
                if pictures := self._ends.get(end) or self._folded.get(end.casefold()):
                    return end, set(pictures)
        return "", set()


# Label Studio puts a number before the names of pictures that are sent to it
_UPLOADED = re.compile(r"(?:^|[/\\])[0-9a-f]{8}-([^/\\]+)$")


def _readings(name: str) -> list[str]:
    """A name as it is written, and as the path within an address, in the order to be tried."""
    readings = [name]
    if uploaded := _UPLOADED.search(name):
        readings.append(uploaded[1])
    if "?" in name or "%" in name or "://" in name:
        try:
            address = urlsplit(name)
        except ValueError:
            return readings
        readings += parse_qs(address.query).get("d", [])  # Label Studio's own server
        readings += [unquote(name), unquote(address.path)]
    return readings
