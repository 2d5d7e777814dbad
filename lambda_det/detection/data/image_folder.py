"""The images below a folder, found by the names that labels have for them."""

from __future__ import annotations

import contextlib
import os
import re
import unicodedata
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from pathlib import Path
from urllib.parse import unquote, urlsplit

from lambda_det.detection.data.outputs import is_output
from lambda_det.files import SUFFIXES

# other endings of a format
_ONE_FORMAT = {".jpeg": ".jpg", ".jpe": ".jpg", ".jfif": ".jpg", ".tiff": ".tif"}

# names of folders that say nothing about their images
_GENERAL = (
    "image",
    "images",
    "img",
    "imgs",
    "jpegimages",
    "picture",
    "pictures",
    "photos",
    "frames",
    "data",
    "default",
    "obj_train_data",
    "upload",
    "uploads",
)
_HIDDEN = ("__MACOSX", "@eaDir", "$RECYCLE.BIN")  # of macOS, Synology and Windows


def walk(folder: str | os.PathLike) -> list[Path]:
    """The files below a folder, in the order of their paths.

    Links to folders are followed. A folder with several paths is entered by the shortest of them,
    and by its own name rather than by a link. Hidden files and folders, such as
    ``.ipynb_checkpoints``, are left out, and so are folders that systems make by themselves, and
    those below it that this package wrote, as :func:`.outputs.is_output` says.
    """
    return _walked(folder)[0]


def images_below(folder: str | os.PathLike) -> list[Path]:
    """The images below a folder, in the order of their paths."""
    return [path for path in walk(folder) if path.suffix.lower() in SUFFIXES]


def outputs_below(folder: str | os.PathLike) -> list[Path]:
    """The folders that :func:`walk` leaves out because this package wrote them."""
    return _walked(folder)[1]


def _walked(folder: str | os.PathLike) -> tuple[list[Path], list[Path]]:
    """See :func:`walk` and :func:`outputs_below`."""
    root = Path(folder)
    entered: set[str] = set()
    waiting, files, outputs = deque([root]), [], []
    while waiting:
        here = waiting.popleft()
        place = os.path.realpath(here)
        if place in entered:
            continue
        entered.add(place)
        with contextlib.suppress(PermissionError, FileNotFoundError), os.scandir(here) as entries:
            there = {entry.name: entry for entry in entries}
            if here != root and is_output(here, there, root):
                outputs.append(here)
                continue
            seen = [
                entry
                for name, entry in there.items()
                if not name.startswith(".") and name not in _HIDDEN
            ]
            folders = [entry for entry in seen if _leads_to(entry.is_dir)]
            folders.sort(key=lambda entry: (entry.is_symlink(), entry.name))
            waiting.extend(here / entry.name for entry in folders)
            files += [here / entry.name for entry in seen if _leads_to(entry.is_file)]
    return sorted(files), sorted(outputs)


def _leads_to(is_one: Callable[[], bool]) -> bool:
    """Whether an entry is a folder or a file; a link in a circle is neither, and an error."""
    try:
        return is_one()
    except OSError:
        return False


def normal(name: str) -> str:
    """A name in a single form of Unicode, because macOS writes "é" as two characters."""
    return unicodedata.normalize("NFC", name)


def in_any_form(path: Path) -> Path:
    """A whole path, with the existing names where these are in another form of Unicode."""
    here = Path(path.anchor)
    for name in path.parts[1:]:
        if not (here / name).exists():
            with contextlib.suppress(OSError):
                forms = (form for form in os.listdir(here) if normal(form) == normal(name))
                name = next(forms, name)
        here /= name
    return here


class ImageFolder:
    """The images below a folder, by the ends of their paths.

    Attributes:
        folder: where they are.
        paths: of all images, in order.
    """

    def __init__(self, folder: str | os.PathLike, paths: Iterable[Path] | None = None) -> None:
        """
        Args:
            folder: where they are.
            paths: of the images to consider; None for all below the folder.
        """
        self.folder = Path(folder)
        paths = walk(folder) if paths is None else paths
        self.paths = sorted(path for path in paths if path.suffix.lower() in SUFFIXES)
        self._ends: dict[str, set[Path]] = defaultdict(set)
        self._folded: dict[str, set[Path]] = defaultdict(set)  # see _folded
        self._folders: set[str] = set()
        self._in_folders: dict[tuple[str, ...], set[Path]] = defaultdict(set)  # see _telling
        for path in self.paths:
            names = [normal(name) for name in path.relative_to(folder).parts]
            self._folders.update(names[:-1])
            self._in_folders[_telling(names[:-1])].add(path)
            for start in range(len(names)):
                end = "/".join(names[start:])
                for key in {end, end.removesuffix(normal(path.suffix))}:
                    self._ends[key].add(path)
                    self._folded[_folded(key)].add(path)

    def named(self, name: str) -> tuple[str, set[Path]]:
        """The images with the longest end of a name, and that end; none: "", set().

        A name may be a path of another machine or an address. Its ending may be missing, and
        capital letters count only where two names differ by nothing else. A folder in the name
        counts where that folder has images here, or where the images are in another one:
        cam2/0.png is not cam1/0.png.
        """
        for text in _readings(name):
            written = normal(text).replace("\\", "/").split("/")
            names = [name for name in written if name not in ("", ".", "..")]
            # a path on another machine may have folders that do not exist here
            is_elsewhere = ".." in written or not written[0] or ":" in written[0]
            for start in range(len(names)):
                if start and names[start - 1] in self._folders:
                    break
                end = "/".join(names[start:])
                images = self._ends.get(end) or self._folded.get(_folded(end)) or set()
                if not is_elsewhere and _telling(names[:start]):
                    # no other folder may tell them apart
                    images = images & self._in_folders.get(_telling(names[start:-1]), set())
                if images:
                    return end, set(images)
        return "", set()


def _telling(folders: Iterable[str]) -> tuple[str, ...]:
    """Those of the names of folders that tell images apart, without capital letters."""
    folded = (folder.casefold() for folder in folders)
    return tuple(folder for folder in folded if folder not in _GENERAL)


def _folded(name: str) -> str:
    """A name without capital letters, and with the more usual of two endings for one format."""
    stem, dot, ending = name.casefold().rpartition(".")
    return stem + _ONE_FORMAT.get(dot + ending, dot + ending)


# Label Studio puts a number before the names of images that are sent to it
_UPLOADED = re.compile(r"(?:^|[/\\])[0-9a-f]{8}-([^/\\]+)$")
# and the number of the project is the folder
_OF_PROJECT = re.compile(r"(?:^|[/\\])(?:images|upload)[/\\]\d+[/\\]([^/\\]+)$")


def _readings(name: str) -> list[str]:
    """A name as it is written, and as the paths within an address; they are tried in this order."""
    name = name.replace("/?d=", "/")  # Label Studio's own server
    readings = [name]
    readings += [found[1] for form in (_UPLOADED, _OF_PROJECT) if (found := form.search(name))]
    if "?" in name or "%" in name or "://" in name:
        with contextlib.suppress(ValueError):  # it is no address
            readings += [unquote(name), unquote(urlsplit(name).path)]
    return readings
