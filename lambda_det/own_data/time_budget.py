"""``--time``: as many epochs as fit into a time, by the measured time of a step."""

from __future__ import annotations

import contextlib
import json
import math
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from detectron2.config import CfgNode

from lambda_det.errors import ConfigError, DataError

__all__ = ["STEPS", "Step", "measure_step", "seconds_of"]

STEPS = 20  # that are timed: a line of metrics.json has their median
_FORM = re.compile(
    r"(?:(?P<hours>\d+(?:\.\d+)?)\s*h(?:ours?)?)?"
    r"\s*(?:(?P<minutes>\d+(?:\.\d+)?)\s*m(?:in(?:utes?)?)?)?"
    r"\s*(?:(?P<seconds>\d+(?:\.\d+)?)\s*s(?:ec(?:onds?)?)?)?"
)


def seconds_of(text: str) -> float:
    """The seconds of a time such as 1h, 90m, 1h30m or 1.5h.

    Raises:
        ConfigError: it is no such time.
    """
    found = _FORM.fullmatch(text.strip())
    numbers = found.groupdict() if found and text.strip() else {}
    units = {"hours": 3600, "minutes": 60, "seconds": 1}
    seconds = sum(float(value) * units[unit] for unit, value in numbers.items() if value)
    if not seconds:
        raise ConfigError(f"--time is {text!r}; give hours and minutes, such as 1h, 45m or 1h30m.")
    return seconds


class Step(NamedTuple):
    """What a trial showed.

    Attributes:
        seconds: of a step.
        start: seconds that the trial took besides its steps; a training takes them as well.
    """

    seconds: float
    start: float


def measure_step(cfg: CfgNode, processes: int) -> Step:
    """Train some steps in a process and a folder of its own, and time them.

    Args:
        cfg: the configuration.
        processes: that train together.

    Raises:
        DataError: the steps failed, which the message quotes.
    """
    with tempfile.TemporaryDirectory(prefix="lambda_det_") as folder:
        keys = {
            "OUTPUT_DIR": folder,
            "RECIPE.ENABLED": False,
            "DATASETS.TEST": "()",
            "DATASETS.TEST_JSON": "",
            "DATASETS.TEST_IMAGES": "",
            "SOLVER.MAX_ITER": STEPS,
            "SOLVER.STEPS": "()",
            "SOLVER.WARMUP_ITERS": 0,
            "SOLVER.CHECKPOINT_PERIOD": 10 * STEPS,
            "TEST.EVAL_PERIOD": 0,
            "EVENT_WRITERS": "[]",
        }
        file = Path(folder, "trial.yaml")
        file.write_text(cfg.dump(), "utf-8")
        command = [sys.executable, "-m", "lambda_det", "train", "--config", str(file)]
        command += ["--no-progress", "--num-gpus", str(processes)]
        command += [str(word) for pair in keys.items() for word in pair]
        begun = time.monotonic()
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            raise DataError(f"--time: the time of a step is not known: {' '.join(lines[-1:])}")
        seconds = _median(Path(folder, "metrics.json"))
        return Step(seconds, max(time.monotonic() - begun - STEPS * seconds, 0.0))


def _median(metrics: Path) -> float:
    for line in metrics.read_text("utf-8").splitlines():
        with contextlib.suppress(KeyError):
            seconds = float(json.loads(line)["time"])
            if math.isfinite(seconds) and seconds > 0:
                return seconds
    raise DataError(f"--time: {metrics} has no time of a step; give --epochs.")
