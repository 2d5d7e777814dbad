"""A fault that was found, and how the checks look for faults."""

from __future__ import annotations

import importlib
import importlib.util
import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path


@dataclass(frozen=True)
class Finding:
    """One known fault of this installation.

    Attributes:
        problem: what is wrong and what fails by it, in a sentence.
        mend: what to do about it.
        breaks: whether something cannot run; False where it is only less, or slower.
    """

    problem: str
    mend: str
    breaks: bool = True


def version(distribution: str) -> str | None:
    """The installed version of a distribution, None where there is none."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def release(text: str) -> tuple[int, ...]:
    """The leading numbers of a version, for comparisons: (2, 4, 0) of 2.4.0a0+cu121."""
    return tuple(int(n) for n in re.match(r"\d+(?:\.\d+)*", text).group().split("."))


def import_error(module: str) -> str | None:
    """Import a module; the first line of what went wrong, None where all is well."""
    try:
        importlib.import_module(module)
    except Exception as error:  # broken libraries raise RuntimeError, AttributeError, OSError, ...
        return first_line(error)
    return None


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def is_there(module: str) -> bool:
    """Whether a top-level module can be found; it is not imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # in sys.modules without a spec, or as None, which forbids its import
        return False


def folder_of(package: str) -> Path | None:
    """Where the code of a package lies, found without importing it."""
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:
        return None
    return Path(spec.origin).parent if spec is not None and spec.origin else None
