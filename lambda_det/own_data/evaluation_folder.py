"""The folder of an evaluation, new or of an earlier one, whose results are replaced."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lambda_det.detection.data.outputs import mark_output
from lambda_det.errors import ConfigError
from lambda_det.files import replace_text
from lambda_det.own_data.report.reading import EVALUATION
from lambda_det.training.run_folder import refuse_other_run

__all__ = ["empty_folder", "keep_facts", "take_folder"]

_RESULTS = ("inference", "inference_EMA", "inference_TTA")  # folders of an evaluation's results
_UNFINISHED = {"sentences": ["The evaluation has not ended."], "results": {}, "own": {}}


def take_folder(folder: Path, *, is_named: bool) -> None:
    """Make the folder of an evaluation; the folder of an earlier one is taken as it is.

    Raises:
        ConfigError: the folder holds a run, or was named and has other files.
    """
    refuse_other_run(folder, "--output", resumes=False)
    if is_named:
        _refuse_other_files(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if not _is_evaluation(folder):
        mark_output(folder)
        _begin(folder)


def _refuse_other_files(folder: Path) -> None:
    """
    Raises:
        ConfigError: the folder for the results has files that no evaluation wrote.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--output {folder} is a file; give a folder.")
    if folder.is_dir() and any(folder.iterdir()) and not _is_evaluation(folder):
        raise ConfigError(
            f"--output {folder} has files that no evaluation wrote; give a new folder, or that "
            "of an earlier evaluation, whose results are replaced."
        )


def _is_evaluation(folder: Path) -> bool:
    """Whether a folder has the facts of an evaluation, which may not have ended."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return set(json.loads((folder / EVALUATION).read_text("utf-8"))) >= _UNFINISHED.keys()
    return False


def _begin(folder: Path) -> None:
    """Mark a folder as one of an evaluation that has no results yet."""
    keep_facts(folder, _UNFINISHED)


def empty_folder(folder: Path) -> None:
    """Remove the results of an earlier evaluation, which may be of other weights and data."""
    for name in _RESULTS:
        if (folder / name).exists():
            shutil.rmtree(folder / name)
    _begin(folder)
    (folder / "log.txt").unlink(missing_ok=True)


def keep_facts(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write the facts for the page of an evaluation."""
    replace_text(folder / EVALUATION, json.dumps(facts, indent=1))
