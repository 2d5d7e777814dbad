"""The folder of a run: it holds one run, and nothing of an older run is overwritten."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from lambda_det.config import FIXED, leaves, on_resume, read_plain
from lambda_det.errors import ConfigError, listed, printable
from lambda_det.files import replace_text
from lambda_det.training.checkpoint_files import candidates, last_checkpoint
from lambda_det.training.settings import Settings
from lambda_det.training.task import Task

__all__ = [
    "changed_keys",
    "check_evaluation_folder",
    "check_run_folder",
    "config_origin",
    "cut_metrics",
    "describe_run",
    "refuse_other_run",
    "save_config",
]

Change = tuple[str, Any, Any]  # key, value in the saved config.yaml, value now


def check_run_folder(task: Task, *, resume: bool) -> list[Change]:
    """Refuse to train in the folder of another run; write nothing.

    Args:
        task: gives the folder, and its configuration as it would be saved there.
        resume: continue the run in the folder; a folder without a run is also accepted.

    Returns:
        What has changed in the configuration since the run was started.

    Raises:
        ConfigError: the folder cannot be written to, holds a run and ``resume`` is not set, or
            holds a run of another configuration.
    """
    key, folder = task.settings.key("output_dir"), _writable_folder(task.settings)
    if not resume:
        refuse_other_run(folder, key)
    if not _holds_run(folder):
        return []
    weights = sorted(folder.glob("*.pth"), key=lambda path: path.stat().st_mtime)
    if weights and not candidates(str(folder)):
        # the checkpoints of a run have names by which they are found even if the pointer is lost
        raise ConfigError(
            f"{folder} holds {listed(path.name for path in weights)}, but no last_checkpoint that "
            "names one to continue, and --resume would start over their run: write a name into "
            f"{folder / 'last_checkpoint'}, or give another {key}."
        )
    changes = list(changed_keys(task.dump(), folder / "config.yaml"))
    for changed, before, now in changes:
        if on_resume(task.on_resume, changed) == FIXED:
            raise ConfigError(
                f"--resume continues the run in {folder}, which has {changed} {before!r}; now it "
                f"is {now!r}. Set it back, or give another {key}."
            )
    return changes


def refuse_other_run(folder: Path, key: str = "OUTPUT_DIR", *, resumes: bool = True) -> None:
    """Refuse to begin a run in a folder that holds one.

    Args:
        folder: that may exist.
        key: that names it.
        resumes: whether the command has --resume.

    Raises:
        ConfigError: it holds a run.
    """
    if _holds_run(folder):
        advice = f"add --resume to continue it, or give another {key}"
        if not resumes:
            advice = f"give another {key}"
        raise ConfigError(f"{key} {folder} already holds a run: {advice}.")


def check_evaluation_folder(task: Task, weights: str) -> None:
    """Refuse to overwrite the results of another run, or of other data; write nothing.

    Args:
        task: names the folder for the results, and the data.
        weights: the file to evaluate.

    Raises:
        ConfigError: the folder cannot be written to, holds a run to which ``weights`` does not
            belong, or holds results of other data.
    """
    key, folder = task.settings.key("output_dir"), _writable_folder(task.settings)
    own = "://" not in weights and folder.resolve() in Path(weights).resolve().parents
    if _holds_run(folder) and not own:
        raise ConfigError(
            f"{key} {folder} holds another run, whose results would be overwritten: {weights} is "
            f"not of it; give another {key}."
        )
    for changed, before, now in changed_keys(task.dump(), folder / "config.yaml"):
        if f"{changed}.".startswith(task.test_keys) and not _are_one_file(before, now, folder):
            raise ConfigError(
                f"The results in {key} {folder} belong to {changed} {before!r}, and would be mixed "
                f"with results of {now!r}: lambda-det evaluate {folder} evaluates on other "
                f"data in a folder of their own; or give another {key}, with "
                f"{task.settings.option('weights', weights)}."
            )


def _are_one_file(before: object, now: object, folder: Path) -> bool:
    """Whether two places name one file: in another spelling, or moved together with the folder."""
    if not (isinstance(before, str) and isinstance(now, str)):
        return False
    then, here = Path(before), Path(now)
    if then.exists() and here.exists():
        return then.samefile(here)
    is_inside = here.resolve().is_relative_to(folder.resolve())
    return is_inside and here.parts[-2:] == then.parts[-2:]


def _writable_folder(settings: Settings) -> Path:
    key, output_dir = settings.key("output_dir"), settings.output_dir
    folder = Path(output_dir)
    if not output_dir or (folder.exists() and not folder.is_dir()):
        raise ConfigError(f"{key} {output_dir!r} is not a folder; name one to write to.")
    parent = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not os.access(parent, os.W_OK):
        raise ConfigError(f"{key} {folder} cannot be written to: {parent} is read-only.")
    return folder


def _holds_run(folder: Path) -> bool:
    names = ("last_checkpoint", "metrics.json")
    return any((folder / name).exists() for name in names) or any(folder.glob("*.pth"))


def changed_keys(config: str, saved: Path) -> Iterator[Change]:
    """Yield the keys that differ between a configuration and a saved one.

    A key that only one of them has is a setting with its default, as of another version. Only in a
    node of a LazyConfig, which calls its ``_target_``, it is an argument and so a difference.

    Args:
        config: as YAML.
        saved: a file, which need not be there.

    Raises:
        ConfigError: the file is not a configuration.
    """
    if not saved.exists():
        return
    try:
        before = dict(leaves(read_plain(saved.read_text("utf-8"))))
    except (yaml.YAMLError, UnicodeDecodeError, AttributeError) as error:
        raise ConfigError(f"{saved} is not a saved configuration; fix or remove it.") from error
    after = dict(leaves(read_plain(config)))
    for key in after | before:
        then, now = before.get(key, _NOT_SET), after.get(key, _NOT_SET)
        if then != now and (_NOT_SET not in (then, now) or _is_argument(key, before | after)):
            yield key, then, now


class _NotSet:
    def __repr__(self) -> str:
        return "not set"


_NOT_SET = _NotSet()


def _is_argument(key: str, values: Mapping[str, Any]) -> bool:
    """Whether one of the sections that a key lies in is a node of a LazyConfig."""
    names = key.split(".")
    return any(".".join((*names[:end], "_target_")) in values for end in range(1, len(names)))


_ORIGIN = "# --config-file "  # the first line of a config.yaml


def save_config(task: Task, file: str | None = None) -> None:
    """Write the configuration to config.yaml of the run's folder, which must be there.

    Args:
        task: the run's.
        file: that the configuration was read from, which the first line names.
    """
    path = Path(task.settings.output_dir, "config.yaml")
    if file and path.exists() and os.path.realpath(path) == os.path.realpath(file):
        file = config_origin(path.parent)  # this is --resume with the run's own configuration
    origin = f"{_ORIGIN}{printable(os.path.abspath(file))}\n" if file else ""
    replace_text(path, origin + task.dump())


def config_origin(folder: str | Path) -> str:
    """The file that a run's configuration was read from; "" where config.yaml names none."""
    with Path(folder, "config.yaml").open(encoding="utf-8") as file:
        first = file.readline().rstrip("\n")
    return first.removeprefix(_ORIGIN) if first.startswith(_ORIGIN) else ""


def cut_metrics(folder: str, first_iteration: int) -> None:
    """Drop from metrics.json the iterations that a resumed run computes again.

    An incomplete last line is also dropped.
    """
    path = Path(folder) / "metrics.json"
    if not path.exists():
        return
    kept = []
    for line in path.read_text("utf-8").splitlines():
        try:
            iteration = json.loads(line)["iteration"]
        except (ValueError, KeyError, TypeError):
            continue
        if iteration < first_iteration:
            kept.append(line + "\n")
    replace_text(path, "".join(kept))


def describe_run(folder: str) -> str:
    """One line on where the results of a run are, and how to look at them."""
    where = (
        f"Log, configuration, metrics and results are in {folder}; lambda-det report {folder} "
        "makes a page of them"
    )
    checkpoint = last_checkpoint(folder)
    return f"{where}; the last checkpoint is {checkpoint}" if checkpoint else where
