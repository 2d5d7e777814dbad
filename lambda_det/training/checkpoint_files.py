"""The checkpoints in a run folder: which exist, which is the newest, which may be removed."""

from __future__ import annotations

import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from lambda_det.errors import WeightsError, listed
from lambda_det.files import TEMPORARY, replace_text, sync_folder
from lambda_det.weights.formats import check_torch_file, read_checkpoint

__all__ = [
    "Checkpoint",
    "candidates",
    "check_checkpoint",
    "choose_checkpoint",
    "find_checkpoint",
    "is_numbered",
    "last_checkpoint",
    "link_file",
    "numbered",
    "point_to",
    "read_newest",
    "refuse_no_run",
    "remove_old",
    "remove_temporary_files",
]

logger = logging.getLogger(__name__)

_POINTER = "last_checkpoint"
_FINAL = "model_final.pth"
_BEST = "model_best.pth"
PUSHED = "model.safetensors"  # the only weights in a folder that lambda-det push wrote
_NUMBERED = re.compile(r"model_(\d{7,})\.pth")


class Checkpoint(NamedTuple):
    """A checkpoint of a run, read and verified.

    Attributes:
        path: of the file.
        content: the network's state dict under "model", the states of training beside it.
    """

    path: str
    content: dict[str, Any]


def last_checkpoint(folder: str) -> str:
    """Path of the checkpoint that the pointer of a run folder names; "" where it names none.

    The file need be neither there nor whole: :func:`read_newest` looks.
    """
    try:
        name = Path(folder, _POINTER).read_bytes().decode("utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
    # Detectron2 and we write the name of a file beside it, and nothing else
    plain = name.isprintable() and os.path.basename(name) == name and name not in (".", "..")
    return os.path.join(folder, name) if name and plain and len(name) < 256 else ""


def choose_checkpoint(folder: str, which: str = "best") -> str:
    """Path of the checkpoint of a run that a user asks for; "" where the folder has none.

    Args:
        folder: of the run.
        which: "best" for the best at the evaluations, or the last one where there is no
            model_best.pth (in a folder of ``lambda-det push``, its weights); "last"; or the number
            of steps after which it was saved.

    Raises:
        WeightsError: there is no checkpoint of that step, or ``which`` is something else.
    """
    if which == "last":
        return last_checkpoint(folder)
    if which == "best":
        best, pushed = (os.path.join(folder, name) for name in (_BEST, PUSHED))
        if not os.path.isfile(best):
            best = last_checkpoint(folder)
        return best or (pushed if os.path.isfile(pushed) else "")
    # model_0000099.pth is saved after 100 steps
    steps = {str(int(path.stem[6:]) + 1): path for path in numbered(folder)}
    if which not in steps:
        raise WeightsError(
            f"{folder or '.'} has no checkpoint {which!r}; choose best, last, or one of the steps "
            f"{listed(steps, 10)}."
        )
    return str(steps[which])


def find_checkpoint(path: str | Path, which: str = "best") -> str:
    """The path itself if it is a file; the checkpoint of a run if it is the folder of one.

    Args:
        which: see :func:`choose_checkpoint`.

    Raises:
        WeightsError: the folder has no such checkpoint.
    """
    if not Path(path).is_dir():
        return str(path)
    refuse_no_run(path)
    checkpoint = choose_checkpoint(str(path), which)
    if Path(checkpoint).is_file():
        return checkpoint
    there = listed(file.name for file in sorted(Path(path).glob("*.pth")))
    what = "names no file"
    if checkpoint:
        what = f"names {Path(checkpoint).name}, which is not there"
    raise WeightsError(
        f"The last_checkpoint of {path} {what}; name a file of the folder ({there})."
    )


def refuse_no_run(folder: str | Path) -> None:
    """
    Raises:
        WeightsError: the folder has no checkpoint of any kind, so there is no run to go on with.
    """
    folder = Path(folder)
    if not (last_checkpoint(str(folder)) or [*folder.glob("*.pth")] or (folder / PUSHED).is_file()):
        raise WeightsError(
            f"{folder} has no checkpoint: no training was started there, or it has saved none yet; "
            f"start one with lambda-det train --data DIR --output {folder}."
        )


def is_numbered(name: str) -> bool:
    """Whether the name of a file is a checkpoint's with its iteration."""
    return _NUMBERED.fullmatch(name) is not None


def numbered(folder: str | Path, last: int | None = None) -> list[Path]:
    """Checkpoints by their iteration, oldest first; up to iteration ``last`` if it is given.

    Later ones are there when somebody went back to an older one.
    """
    if not os.path.isdir(folder):
        return []
    matches = ((path, _NUMBERED.fullmatch(path.name)) for path in Path(folder).iterdir())
    steps = {path: int(match[1]) for path, match in matches if match}
    kept = [path for path, step in steps.items() if last is None or step <= last]
    return sorted(kept, key=steps.get)


def candidates(folder: str) -> list[Path]:
    """The checkpoints from which a run may be continued, best first.

    These are the one that the pointer names, and those before it. Where the pointer names no
    existing file, they are all of the run, the last written first.
    """
    named = last_checkpoint(folder)
    if named and os.path.isfile(named):
        match = _NUMBERED.fullmatch(os.path.basename(named))
        before = numbered(folder, int(match[1]) if match else None)
        return [Path(named), *(path for path in reversed(before) if path.name != Path(named).name)]
    checkpoints = numbered(folder)[::-1]
    final = Path(folder, _FINAL)
    if final.is_file():
        # A run that was made longer has numbered checkpoints that are newer.
        newer = [path for path in checkpoints if path.stat().st_mtime > final.stat().st_mtime]
        checkpoints = [*newer, final, *checkpoints[len(newer) :]]
    return checkpoints


def read_newest(folder: str) -> Checkpoint | None:
    """Read the newest checkpoint of a run that is whole; None where the run has none.

    That is the one the pointer names, or the newest numbered one before it. A warning names each
    checkpoint that is refused.

    Raises:
        WeightsError: there are checkpoints, or the pointer says so, and none is whole.
    """
    refused: list[str] = []
    checkpoints = candidates(folder)
    for path in checkpoints:
        try:
            content = read_checkpoint(path)
            _check_model(content, path)
        except WeightsError as error:
            refused.append(str(error))
            continue
        for sentence in refused:
            logger.warning(f"{sentence} Instead {path} is taken, which is whole")
        named = os.path.basename(last_checkpoint(folder))
        if not refused and named != path.name:
            what = f"names {named}, which is not there" if named else "is missing or names none"
            logger.warning(
                f"{Path(folder, _POINTER)} {what}: {path}, the newest in the folder that is whole, "
                "is taken"
            )
        return Checkpoint(os.path.join(folder, path.name), content)
    if checkpoints:
        others = [
            path.name for path in sorted(Path(folder).glob("*.pth")) if path not in checkpoints
        ]
        raise WeightsError(
            f"No checkpoint in {folder} is whole ({listed(path.name for path in checkpoints)} were "
            f"tried; {refused[0]}) Write the name of another file of the folder ({listed(others)}) "
            f"into {Path(folder, _POINTER)}, or start again in another folder."
        )
    if named := last_checkpoint(folder):
        raise WeightsError(
            f"{Path(folder, _POINTER)} names {Path(named).name}, which is not there, nor is any "
            "other checkpoint: bring it back, or start again in another folder."
        )
    return None


def check_checkpoint(path: str | Path) -> None:
    """Read a checkpoint of ours from end to end, and keep nothing of it.

    Raises:
        WeightsError: it is damaged, or is something else.
        OSError: it is not there or cannot be read.
    """
    _check_model(check_torch_file(path), path)


def _check_model(content: Any, path: str | Path) -> None:
    if not isinstance(content, dict) or "model" not in content:
        raise WeightsError(f"{path} holds no model, so it is no checkpoint of a run.")


def point_to(folder: str, name: str) -> None:
    """Let the pointer of a run folder name a file of it."""
    replace_text(Path(folder, _POINTER), name)


def remove_temporary_files(folder: str) -> None:
    """Remove the temporary files of a process that was killed while it wrote a checkpoint."""
    for path in (*Path(folder).glob(f"*.pth{TEMPORARY}"), Path(folder, _POINTER + TEMPORARY)):
        path.unlink(missing_ok=True)


def remove_old(folder: str, kept: int, last: int) -> None:
    """Remove the oldest numbered checkpoints up to iteration ``last``, so that ``kept`` stay.

    The checkpoint that the pointer names stays in any case.
    """
    checkpoints = numbered(folder, last)
    named = os.path.basename(last_checkpoint(folder))
    for path in checkpoints[: max(len(checkpoints) - kept, 0)]:
        if path.name != named:
            path.unlink(missing_ok=True)


def link_file(path: str | Path, link: str | Path) -> None:
    """Give a file a second name, and replace what had that name; copy it where links are
    impossible.
    """
    temporary = Path(f"{link}{TEMPORARY}")
    temporary.unlink(missing_ok=True)
    try:
        try:
            os.link(path, temporary)
        except OSError:
            shutil.copyfile(path, temporary)
            with open(temporary, "rb+") as file:
                os.fsync(file.fileno())
        os.replace(temporary, link)
        sync_folder(Path(link).parent)
    finally:
        temporary.unlink(missing_ok=True)
