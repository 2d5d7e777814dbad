"""The content of a run's folder: logged numbers, configuration, checkpoints."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lambda_det.detection.results import DRAWN
from lambda_det.errors import DataError, refused
from lambda_det.training.log import is_of_averaged_weights
from lambda_det.training.run_folder import FINAL, RunFolder, iteration_of
from lambda_det.weights.formats import read_checkpoint
from lambda_det.weights.provenance import Origin, entry

EVALUATION = "evaluation.json"  # in a folder of lambda-det evaluate
_LABEL = re.compile(r"(.*/)?(bbox|segm)(_EMA|_TTA)?/(\w+)")
_KINDS = {"bbox": "box", "segm": "mask"}
_WEIGHTS = {"_EMA": ", averaged weights", "_TTA": ", augmented test", None: ""}


def read_evaluation(folder: Path) -> dict[str, Any] | None:
    """The facts that ``lambda-det evaluate`` wrote about the results in a folder; None for a run.

    Returns:
        "run", its folder; "sentences"; and by their names "results" and "own", the run's, as
        :class:`Result` has them.
    """
    path = folder / EVALUATION
    if not path.is_file():
        return None
    with refused(DataError, f"{path} cannot be read", "evaluate again", OSError, ValueError):
        content = json.loads(path.read_text("utf-8"))
    for name in ("results", "own"):
        content[name] = {key: Result(**value) for key, value in content[name].items()}
    return content


class Result(NamedTuple):
    """A result of an evaluation.

    Attributes:
        value: of the metric.
        low, high: the interval in which it may lie by chance of the images; None if unknown.
    """

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def interval(self) -> str:
        """The interval for readers; "" where it is unknown."""
        if self.low is None:
            return ""
        return f" ({self.low:.1f} to {self.high:.1f} by chance of the images)"

    def label(self, name: str) -> str:
        """The name for readers of one of the weights' results, with the interval."""
        return label_of(name, with_weights=False) + self.interval


@dataclass(frozen=True)
class RunState:
    """How far a run is, and which of its checkpoints counts.

    Attributes:
        metrics: of :meth:`RunFolder.metrics`.
        steps: number of finished steps.
        planned: number of steps of the configuration; 0 if unknown.
        last: the name of the last checkpoint; "" for none.
        weights: the weights of the best checkpoint, or of the last one if none is the best; None if
            there is no file.
        is_best: whether ``weights`` are of the best checkpoint.
        images: number of training images, or of their tiles; 0 if unknown.
        epochs: passes over them; 0 if unknown.
    """

    metrics: Sequence[Mapping[str, float]]
    steps: int
    planned: int
    last: str
    weights: Origin | None
    is_best: bool
    images: int
    epochs: float

    @property
    def has_ended(self) -> bool:
        """Whether the training is over, also where it stopped early."""
        return self.last == FINAL

    def sentences(self) -> str:
        """How far the run is, for a reader who knows its folder."""
        words = []
        if self.weights is not None:
            which = "Its best" if self.is_best else "The last"
            weights = self.weights._replace(file=os.path.basename(self.weights.file))
            words.append(f"{which} checkpoint is {weights}.")
        if not self.has_ended:
            last = (
                f"its last checkpoint is {self.last}" if self.last else "it has no last checkpoint"
            )
            words.append(f"It has not ended; {last}.")
        elif 0 < self.steps < self.planned:
            words.append(f"It stopped early, after {self.steps:,} of {self.planned:,} steps.")
        return " ".join(words)

    def results(self) -> dict[str, Result]:
        """The results of the weights that count, by their names in metrics.json."""
        if self.weights is None:
            return results_of(self.metrics, averaged=False)
        step = self.weights.step if self.is_best else None
        return results_of(self.metrics, self.weights.averaged, step)


def results_of(
    metrics: Sequence[Mapping[str, float]],
    averaged: bool,
    step: int | None = None,
) -> dict[str, Result]:
    """The results of one of two kinds of weights, the trained or the averaged ones: those that are
    drawn.

    Args:
        metrics: of :meth:`RunFolder.metrics`.
        averaged: the kind. If only the other kind was evaluated, its results are given.
        step: after which the weights were saved; None for the last evaluation.

    Returns:
        Results by their names in metrics.json.
    """
    values: dict[str, float] = {}
    for line in metrics:
        if step is None or line["iteration"] < step:
            values.update(line)
    results = {
        name: Result(value, values.get(f"{name}_low"), values.get(f"{name}_high"))
        for name, value in values.items()
        if name.endswith(DRAWN)
    }
    # an augmented test is of the averaged weights, where there are any
    averaged_too = any(map(is_of_averaged_weights, results))
    own = {
        name: result
        for name, result in results.items()
        if averaged == (averaged_too if "_TTA/" in name else is_of_averaged_weights(name))
    }
    return own or results


def evaluations_of(metrics: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """A row for each evaluation: "step", and its results by names that do not depend on the recipe.

    They are of averaged weights where these were evaluated, such as "box AP", "box AP50" and
    "mask AP"; with several data sets the name of one stands before, such as "mine/box AP".

    Args:
        metrics: of :meth:`RunFolder.metrics`.
    """
    rows = []
    for line in metrics:
        if results := results_of([line], averaged=True):
            rows.append({"step": int(line["iteration"]) + 1, **by_label(results)})
    return rows


def by_label(results: Mapping[str, Result]) -> dict[str, float]:
    """The values of the weights' results by their names for readers, such as "box AP"."""
    return {label_of(name, with_weights=False): one.value for name, one in results.items()}


def read_state(run: Path, config: Mapping[str, Any]) -> RunState:
    """How far the run in a folder is.

    Args:
        run: the folder.
        config: of :meth:`RunFolder.config`.

    Raises:
        WeightsError: the checkpoint is damaged.
    """
    folder = RunFolder(run)
    metrics, last, chosen = folder.metrics(), os.path.basename(folder.last), folder.choose()
    content = read_checkpoint(chosen) if os.path.isfile(chosen) else {}
    planned = config.get("SOLVER", {}).get("MAX_ITER") or config.get("train", {}).get("max_iter")
    # the run may have stopped between the last line of the log and the checkpoint
    steps = 1 + max([iteration_of(last), *(line["iteration"] for line in metrics)])
    trainer = entry(content, "trainer")
    images = entry(trainer, "loader").get("records", 0)
    of_a_step = entry(trainer, "of_a_step").get("images_per_step") or 0
    return RunState(
        metrics,
        steps,
        planned or 0,
        last,
        Origin.of(chosen, content) if content else None,
        is_best=chosen != folder.last,
        images=images,
        epochs=steps * of_a_step / images if images else 0.0,
    )


def label_of(metric: str, *, with_weights: bool = True) -> str:
    """The name of a result for readers: "bbox_EMA/AP50" is "box AP50, averaged weights".

    Args:
        metric: the name in metrics.json. With several data sets it begins with the name of one.
        with_weights: say which weights, where they are not the trained ones.
    """
    match = _LABEL.fullmatch(metric)
    if not match:
        return metric
    dataset, kind, ending, name = match.groups()
    weights = _WEIGHTS[ending] if with_weights or ending == "_TTA" else ""
    return f"{dataset or ''}{_KINDS[kind]} {name}{weights}"
