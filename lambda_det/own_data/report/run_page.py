"""One HTML page on a run: curves, AP by class, what would bring most, the worst images."""

from __future__ import annotations

import contextlib
import logging
import shlex
import statistics
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode
from omegaconf import DictConfig

from lambda_det.detection.data.ground_truth import file_report
from lambda_det.detection.data.loader import training_records
from lambda_det.detection.data.registration import given_name, registered_files
from lambda_det.detection.data.tile_records import number_of_whole_images
from lambda_det.detection.results import MASKS_LEARNT, columns
from lambda_det.errors import ConfigError, UserError
from lambda_det.files import replace_text, writing_to
from lambda_det.own_data.fit import epochs_for, takes_epochs
from lambda_det.own_data.report.advice import Epochs, Evidence, advise
from lambda_det.own_data.report.class_results import Detections
from lambda_det.own_data.report.evaluated import Evaluated, evaluate_run
from lambda_det.own_data.report.figures import CLASSES_CONFUSED, draw_confusion, draw_curves
from lambda_det.own_data.report.page import Page, to_figure
from lambda_det.own_data.report.reading import (
    RunState,
    evaluations_of,
    label_of,
    read_evaluation,
    read_state,
)
from lambda_det.own_data.report.worst_images import draw_worst
from lambda_det.training.run_folder import RunFolder

logger = logging.getLogger(__name__)

_CHANGES, _LEAST_GAIN = 3, 0.2  # the most changes to name, and the least rise of AP50


def write_report(run: str | Path, output: str | Path | None = None, **options: Any) -> Path:
    """Write the page of a run, and replace an earlier one.

    Args:
        run: its folder.
        output: an .html file; None for report.html in the folder.
        options: of :func:`build_report`.

    Returns:
        The file.

    Raises:
        ConfigError: the file cannot be written, or as :func:`build_report` does.
        DataError: as :func:`build_report` does.
    """
    path = Path(output) if output else Path(run, "report.html")
    if path.suffix != ".html":
        raise ConfigError(f"The page {path} needs a name that ends in .html.")
    page = build_report(run, **options)
    with writing_to(path):
        replace_text(path, page.text())
    return path


def build_report(
    run: str | Path, *, dataset: str = "", score: float | None = None, pictures: int = 8
) -> Page:
    """The page of a run.

    Parts that a run does not have yet are left out, and the page says so. The page of a classifier
    has the curves and the speed.

    Args:
        run: its folder, with config.yaml.
        dataset: one of those in DATASETS.TEST; "" for the first.
        score: predictions of this score or more are in the confusion matrix and the pictures;
            None: the score with the best F1, as a prediction takes it.
        pictures: number of images, the worst first.

    Raises:
        ConfigError: a value is out of range, or the run is not evaluated on ``dataset``.
        DataError: it is no folder of a run, or a file in it is damaged.
    """
    if score is not None and not 0 <= score <= 1:
        raise ConfigError(f"The score threshold is {score}; give one from 0 to 1.")
    run = Path(run)
    config = RunFolder(run).config()
    about = read_evaluation(run)
    # what a longer training would bring is the same on other data
    home = Path(about["run"]) if about else run
    state = read_state(home, config)
    evaluated, missing = None, ""
    try:
        if "DATA" not in config:  # else it is of a classifier
            evaluated = evaluate_run(run, dataset, score)
    except UserError as error:
        if dataset:
            raise
        missing = str(error)
        logger.warning(missing)
    page = _evaluation_head(run, about) if about else _run_head(run, state, config, evaluated)
    if missing:
        page.section("What is missing", missing)
    if evaluated is None:
        return page
    _add_advice(page, evaluated, state, home)
    _add_classes(page, evaluated)
    _add_confusion(page, evaluated.results[-1])
    page.section(
        "The worst images",
        f"Predictions of a score of {evaluated.score:.3g} or more, then the ground truth. They "
        f"find an object by their {evaluated.results[-1].shapes}, at an IoU of 0.5. One "
        "that lies within a found object is one more prediction, and counts as false.",
    )
    for pair in draw_worst(evaluated, pictures):
        predicted = to_figure(pair.predicted, f"{pair.name}: {pair.counts}")
        page.figures(predicted, to_figure(pair.truth, "ground truth"))
    return page


def _run_head(
    run: Path, state: RunState, config: Mapping[str, Any], evaluated: Evaluated | None
) -> Page:
    """The page of a training with its numbers, of the best checkpoint where there is one, and its
    curves.
    """
    origin = RunFolder(run).config_origin()
    about = f"{state.sentences()} config.yaml has its configuration"
    about += f", which began with {origin}." if origin else "."
    numbers = {
        result.label(name): f"{result.value:.1f}" for name, result in state.results().items()
    }
    numbers["steps"] = f"{state.steps:,}"
    if state.epochs:
        what = "tiles" if config.get("INPUT", {}).get("TILE", {}).get("SIZE") else "images"
        numbers["epochs"] = f"{state.epochs:.3g}"
        numbers[f"{what} to train on"] = f"{state.images:,}"
    if evaluated:
        numbers["images evaluated on"] = f"{len(evaluated.ground_truth.imgs):,}"
        rows = evaluations_of(state.metrics)
        if state.is_best and rows and rows[-1]["step"] != state.weights.step:
            about += (
                " The numbers are of the best checkpoint; what stands below the curves is of the "
                f"last evaluation, after {rows[-1]['step']:,} steps."
            )
    if times := [line["time"] for line in state.metrics if "time" in line]:
        numbers["seconds a step (median)"] = f"{statistics.median(times):.3g}"
    page = Page(f"Run {run if run.name else run.resolve()}", about)
    page.numbers(numbers)
    _add_warnings(page, run)
    page.section(
        "Curves",
        "AP or accuracy decides. Where box heads stand in a row, as in the recipes light_*, the "
        "loss may rise while AP does: the better the boxes of one head, the more of them the next "
        "one learns from."
        if state.metrics
        else "The run has logged no step yet: usually its numbers come once in 20 steps.",
    )
    page.figures(*draw_curves(state.metrics))
    return page


def _evaluation_head(folder: Path, about: Mapping[str, Any]) -> Page:
    """The page of results of ``lambda-det evaluate``, of which :func:`read_evaluation` tells."""
    page = Page(f"Evaluation {folder.resolve().name}", " ".join(about["sentences"]))
    numbers = {}
    for name, result in about["results"].items():
        numbers[result.label(name)] = f"{result.value:.1f}"
        if name in about["own"]:
            label = f"{label_of(name, with_weights=False)} at the run's own evaluation"
            numbers[label] = f"{about['own'][name].value:.1f}"
    page.numbers(numbers)
    _add_warnings(page, folder)
    return page


def _add_warnings(page: Page, run: Path) -> None:
    """Add what the log warned of, beside numbers that may be worth little then."""
    if warned := RunFolder(run).warnings():
        page.section("What the log warned of", "How often, and the first of each kind in log.txt.")
        page.table(("times", "warning"), ((count, text) for text, count in warned), text=True)


def _add_advice(page: Page, evaluated: Evaluated, state: RunState, home: Path) -> None:
    """Add the changes that would bring most, and the evidence."""
    components, ground_truth = evaluated.task.components, evaluated.ground_truth
    trained: Counter[str] = Counter()
    for name in components.train_names or ():
        # the training's files may have been removed, or be of another kind
        with contextlib.suppress(UserError, LookupError, TypeError):
            report = file_report(*registered_files(name))
            for number, count in report.counts.items():
                trained[report.categories[number]] += count
    scale = components.test_scale([(i["height"], i["width"]) for i in ground_truth.imgs.values()])
    iou_type = evaluated.results[-1].iou_type
    epochs = _epochs(evaluated.task.config, state) if state.has_ended else None
    evidence = Evidence(
        ground_truth,
        evaluated.entries,
        iou_type,
        state.metrics,
        trained,
        scale=scale,
        tile=components.tiling.size if components.tiling else 0,
        epochs=epochs,
        folder=str(home),
        score=evaluated.score,
    )
    rows = [
        row
        for row in advise(evidence)
        # a training that has not ended will be longer by itself
        if not row.gain < _LEAST_GAIN and (state.has_ended or row.error != "training")
    ]
    notes = ""
    if not state.has_ended:
        command = f"lambda-det train --output {shlex.quote(str(home))} --resume"
        notes = f"The training has not ended; if it was stopped, {command} continues it. "
    if evaluated.results[0].iou_type == "segm":
        notes += (
            f"The AP50 of masks is below {MASKS_LEARNT} of that of boxes: they are learned later, "
            "those of thin objects last. Until then boxes decide here and in what follows. "
        )
    if evidence.has_less_than(1):
        notes += f"The run had {epochs}, by the rule for its number of images. "
    if not rows:
        page.section("What would bring most", f"{notes}No kind of error stands out.")
        return
    page.section(
        "What would bring most",
        f"{notes}AP50 would rise by this number if all errors of that kind were gone. A change "
        "removes some of them, and an object may be in two rows.",
    )
    page.table(
        ("error", "change", f"rise of {label_of(f'{iou_type}/AP50')}", "what shows it"),
        (row[:4] for row in rows[:_CHANGES]),
        text=True,
    )


def _epochs(config: CfgNode | DictConfig, state: RunState) -> Epochs | None:
    """The length of a training; None where its data are gone or no recipe is for them."""
    if not (state.steps and isinstance(config, CfgNode) and config.DATASETS.TRAIN):
        return None
    try:
        records = training_records(config)
    except (UserError, LookupError):
        return None
    # checkpoints of Detectron2 alone record no images
    epochs = state.epochs or state.steps * config.SOLVER.IMS_PER_BATCH / len(records)
    by_steps = 0 if takes_epochs(config) else state.steps
    return Epochs(epochs, epochs_for(len(records), number_of_whole_images(records)), by_steps)


def _add_classes(page: Page, evaluated: Evaluated) -> None:
    """Add AP and the best score of each class."""
    for detections in evaluated.results:
        title = detections.shapes.capitalize()
        page.section(
            f"{title} by class",
            f"The last evaluation of the {evaluated.weights}, on "
            f"{given_name(evaluated.dataset)}. AP in percent over IoU 0.5 to 0.95. The best score "
            "is the threshold of the highest F1 at an IoU of 0.5, with its precision and recall.",
        )
        most_first = sorted(detections.classes, key=lambda c: -c.objects)
        rows = [(one.name, one.objects, *one.values.values()) for one in most_first]
        page.table(("class", "objects", *columns()), rows)


def _add_confusion(page: Page, detections: Detections) -> None:
    page.section(
        "Confusion of classes",
        f"Predictions of a score of {detections.score:.3g} or more, which find an object by their "
        f"{detections.shapes}, at an IoU of 0.5. Where no "
        "--score-threshold is given, it is the one with the best F1 in these results, or 0.5 "
        "where none is right. "
        "Of those on one object the one with the highest score takes it, of whatever class. "
        "Rows are the true classes; the last column counts the objects that are missed at this "
        "score, the last row false predictions. The colour is the share of the whole row. Of more "
        f"than {CLASSES_CONFUSED} classes those with most mistakes are shown.",
    )
    page.figures(draw_confusion(detections))
