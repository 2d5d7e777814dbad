"""What keeps runs of many machines beside each other: Weights & Biases, and MLflow.

Each gets the configuration, the commit, the numbers, and later the tables, pictures and page of a
report. A file in the folder of a run has its id there, by which a resumed run goes on.
"""

from __future__ import annotations

import csv
import importlib
import io
import logging
import math
import os
import re
import subprocess
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from detectron2.utils.events import EventWriter, get_event_storage

from lambda_det.config import leaves, read_plain
from lambda_det.errors import reason

__all__ = ["TRACKERS", "MlflowWriter", "WandbWriter", "hyperparameters", "send_report"]

logger = logging.getLogger(__name__)

Table = tuple[str, Sequence[str], Sequence[Sequence[Any]]]  # title, head, rows
Picture = tuple[str, np.ndarray]  # caption, uint8 RGB [H, W, 3]
_MLFLOW_VALUE = 250  # letters of a parameter, in the oldest stores


class _Tracker(EventWriter):
    """A run elsewhere, whose id is kept in the folder."""

    name = ""

    def __init__(self, folder: str, *, resumed: bool, config: str = "") -> None:
        """
        Args:
            folder: of the run; it holds the id of the run there.
            resumed: continue the run of that id, if there is one; otherwise a new one begins.
            config: of the run, as YAML; "" leaves what is there.
        """
        note = Path(folder, f"{self.name}_run.txt")
        known = note.read_text().strip() if resumed and note.is_file() else ""
        label = os.path.basename(os.path.abspath(folder))
        number = self._begin(folder, label, os.environ, known)
        note.write_text(f"{number}\n")
        self._last_write = -1
        if config:
            self._describe(config, hyperparameters(config) | {"git_commit": _commit()})

    def write(self) -> None:
        latest = get_event_storage().latest_with_smoothing_hint(20)
        steps: dict[int, dict[str, float]] = {}
        for name, (value, step) in latest.items():
            if step > self._last_write:
                steps.setdefault(step, {})[name] = value
        for step in sorted(steps):
            self._log(steps[step], step)
            self._last_write = step

    def _begin(self, folder: str, label: str, given: Mapping[str, str], known: str) -> str:
        """Begin a run, or continue the known one; its id."""
        raise NotImplementedError

    def _describe(self, config: str, values: Mapping[str, Any]) -> None: ...

    def _log(self, values: Mapping[str, float], step: int) -> None: ...

    def report(self, page: Path, tables: Iterable[Table], pictures: Iterable[Picture]) -> None:
        """Send the page of the run, and what is in it."""


class WandbWriter(_Tracker):
    """The project is WANDB_PROJECT, else "lambda_det". WANDB_MODE=offline keeps all on the disk."""

    name = "wandb"

    def _begin(self, folder: str, label: str, given: Mapping[str, str], known: str) -> str:
        self._module = importlib.import_module("wandb")
        number = known or uuid.uuid4().hex[:12]
        project = given.get("WANDB_PROJECT", "lambda_det")
        options = {"project": project, "name": label, "dir": folder, "id": number}
        self._run = self._module.init(**options, resume="allow")
        return number

    def _describe(self, config: str, values: Mapping[str, Any]) -> None:
        self._run.config.update(dict(values), allow_val_change=True)

    def _log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def report(self, page: Path, tables: Iterable[Table], pictures: Iterable[Picture]) -> None:
        make = self._module
        sent: dict[str, Any] = {"report": make.Html(page.read_text("utf-8"), inject=False)}
        sent["worst images"] = [make.Image(p, caption=caption) for caption, p in pictures]
        for title, head, rows in tables:
            cells = [[str(value) for value in row] for row in rows]
            sent[title] = make.Table(columns=list(head), data=cells)
        self._run.log(sent)

    def close(self) -> None:
        self._run.finish()


class MlflowWriter(_Tracker):
    """The server is that of MLFLOW_TRACKING_URI, the experiment as in WandbWriter the project."""

    name = "mlflow"

    def _begin(self, folder: str, label: str, given: Mapping[str, str], known: str) -> str:
        module = importlib.import_module("mlflow")
        self._metric, self._param = module.entities.Metric, module.entities.Param
        self._client = client = module.MlflowClient()
        if known:
            client.update_run(known, status="RUNNING")
            self._id = known
            return known
        experiment = given.get("MLFLOW_EXPERIMENT_NAME", "lambda_det")
        found = client.get_experiment_by_name(experiment)
        number = found.experiment_id if found else client.create_experiment(experiment)
        self._id = client.create_run(number, run_name=label).info.run_id
        return self._id

    def _describe(self, config: str, values: Mapping[str, Any]) -> None:
        self._client.log_text(self._id, config, "config.yaml")
        self._client.set_tag(self._id, "mlflow.source.git.commit", values["git_commit"])
        before = self._client.get_run(self._id).data.params  # MLflow lets none of them change
        new = [
            self._param(_plain(key), str(value)[:_MLFLOW_VALUE])
            for key, value in values.items()
            if _plain(key) not in before
        ]
        for start in range(0, len(new), 100):
            self._client.log_batch(self._id, params=new[start : start + 100])

    def _log(self, values: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        found = [
            self._metric(_plain(name), float(value), now, step)
            for name, value in values.items()
            if math.isfinite(value)
        ]
        self._client.log_batch(self._id, metrics=found)

    def report(self, page: Path, tables: Iterable[Table], pictures: Iterable[Picture]) -> None:
        self._client.log_artifact(self._id, str(page))
        for number, (caption, picture) in enumerate(pictures):
            name = f"worst images/{number:02d} {_plain(Path(caption).stem)}.png"
            self._client.log_image(self._id, picture, name)
        for title, head, rows in tables:
            text = io.StringIO()
            csv.writer(text).writerows([head, *rows])
            self._client.log_text(self._id, text.getvalue(), f"{_plain(title)}.csv")

    def close(self) -> None:
        self._client.set_terminated(self._id)


TRACKERS: dict[str, type[_Tracker]] = {kind.name: kind for kind in (WandbWriter, MlflowWriter)}


def hyperparameters(config: str) -> dict[str, Any]:
    """Settings of a configuration by their dotted keys; lists and the like as text."""
    found = read_plain(config)
    plain = leaves(found) if isinstance(found, dict) else ()
    return {k: v if isinstance(v, (bool, int, float, str)) else str(v) for k, v in plain}


def send_report(
    folder: str | os.PathLike, page: Path, tables: Sequence[Table], pictures: Sequence[Picture]
) -> list[str]:
    """Send the page of a run to the trackers that have the run.

    What cannot be sent is a warning: the page is on the disk.

    Returns:
        Their names.
    """
    sent = []
    for name, kind in TRACKERS.items():
        if not Path(folder, f"{name}_run.txt").is_file():
            continue
        try:
            run = kind(str(folder), resumed=True)
            run.report(page, tables, pictures)
            run.close()
            sent.append(name)
        except Exception as error:  # of their packages, and of the network
            logger.warning(f"The report is not sent to {name}: {reason(error)}.")
    return sent


def _commit() -> str:
    """That of the working directory, or where that has none, of this package; "" for neither."""
    for place in (Path.cwd(), Path(__file__).parent):
        command = ["git", "-C", str(place), "rev-parse", "HEAD"]
        try:
            found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return ""
        if found.returncode == 0:
            return found.stdout.strip()
    return ""


def _plain(name: str) -> str:
    """A name of the letters that MLflow takes."""
    return re.sub(r"[^\w\-. /]", "_", name, flags=re.ASCII)
