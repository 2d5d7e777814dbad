"""One HTML page on a run: curves, AP by class and size, errors, speed, configuration."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import re
import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from detectron2.config import CfgNode
from matplotlib.axes import Axes
from pycocotools.coco import COCO

from lambda_det.classification.config import load_recipe
from lambda_det.config import read_plain
from lambda_det.detection.config import load_config
from lambda_det.detection.data import check_coco
from lambda_det.detection.data.coco_format import read_json
from lambda_det.detection.data.predictions import predictions
from lambda_det.detection.data.registration import registered_files
from lambda_det.detection.evaluation import read_ground_truth
from lambda_det.detection.inference import Taken
from lambda_det.detection.lazy import is_lazy
from lambda_det.detection.task import DetectionTask, load_any_config
from lambda_det.errors import ConfigError, DataError, UserError, listed
from lambda_det.files import replace_text, writing_to
from lambda_det.report.advice import advise
from lambda_det.report.class_results import Detections, evaluate_detections
from lambda_det.report.page import Page, new_axes, to_svg
from lambda_det.report.results import belonging, draw_worst, read_results
from lambda_det.training.checkpoint_files import choose_checkpoint, last_checkpoint
from lambda_det.training.logged import is_loss
from lambda_det.training.run_folder import changed_keys, config_origin
from lambda_det.training.trackers import send_report
from lambda_det.weights.formats import read_checkpoint

__all__ = [
    "build_report",
    "draw_panel",
    "evaluate_run",
    "label_of",
    "read_metrics",
    "read_saved",
    "results_until",
    "what_was_changed",
    "write_report",
]

logger = logging.getLogger(__name__)

_POINTS = 600  # of a curve; more would only make the page larger
_CLASSES_DRAWN = 12  # in one figure of curves
_CLASSES_CONFUSED = 20  # in the confusion matrix
_SCORES = ("/AP", "/AP50", "_top1", "/mIoU", "/PQ")  # ends of the metrics that are drawn
_CHANGES, _LEAST_GAIN = 3, 0.2  # to name at most, and by how much AP50 must rise at least
_FINAL = "model_final.pth"
_RESULTS = "coco_instances_results.json"
# Where an evaluation leaves its results; those of averaged weights first, as model_best.pth counts
_FOLDERS = {"inference_EMA": "averaged weights", "inference": "trained weights"}


def read_metrics(run: str | Path) -> list[dict[str, float]]:
    """The records of a run's metrics.json; none where there is no such file.

    A last line that a kill has cut short is left out.

    Raises:
        DataError: a line before it is no record.
    """
    path = Path(run, "metrics.json")
    if not path.is_file():
        return []
    lines = path.read_text("utf-8").splitlines()
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            record["iteration"] + 1
        except (ValueError, TypeError, KeyError) as error:
            if number == len(lines):
                break
            raise DataError(f"Line {number} of {path} is no record of a run.") from error
        records.append(record)
    return records


# Which metrics are drawn together, by the title
PANELS: dict[str, Callable[[str], bool]] = {
    "losses": is_loss,
    "learning rate": lambda name: name.partition("/")[0] == "lr",
    "AP or accuracy, percent": lambda name: name.endswith(_SCORES),
}


def draw_panel(axes: Axes, title: str, runs: Mapping[str, list[dict[str, float]]]) -> bool:
    """Draw metrics over the steps; whether there is one.

    Args:
        axes: to draw in.
        title: one of ``PANELS``.
        runs: records of :func:`read_metrics` by the beginning of their labels. Of several runs
            only the sum of the losses is drawn.
    """
    percent = "percent" in title
    style: dict[str, Any] = {"marker": "o", "ms": 3} if percent else {}
    colors: dict[str, str] = {}
    for label, records in runs.items():
        for name in sorted({name for record in records for name in record if PANELS[title](name)}):
            if len(runs) > 1 and title == "losses" and name != "total_loss":
                continue
            points = [(r["iteration"] + 1, r[name]) for r in records if name in r]
            points = points[:: -(-len(points) // _POINTS)]
            # A loss of the test set has the colour of the training's, and is dashed
            trained = label + name.removeprefix("validation/")
            style["color"] = colors.setdefault(trained, f"C{len(colors)}")
            style["ls"] = "-" if trained == label + name else "--"
            axes.plot(*zip(*points, strict=True), label=label + name, lw=1.2, **style)
    is_drawn = bool(axes.lines)
    if is_drawn:
        axes.legend(fontsize=7, frameon=False)
    axes.set(title=title, xlabel="step", ylim=(0, 100 if percent else None))
    return is_drawn


def draw_curves(runs: Mapping[str, list[dict[str, float]]]) -> list[str]:
    """Losses, learning rate and, where a run was evaluated, AP or accuracy over the steps."""
    figures = []
    for title in PANELS:
        figure, axes = new_axes(5.2, 3.4)
        if draw_panel(axes, title, runs):
            figures.append(to_svg(figure, f"{title} over the steps"))
    return figures


def draw_precision_recall(detections: Detections) -> str:
    """Precision over recall at an IoU of 0.5: the classes with most objects, and the mean."""
    figure, axes = new_axes(5.2, 3.4)
    recalls = np.linspace(0, 1, 101)
    drawn = sorted(detections.classes, key=lambda c: -c.objects)[:_CLASSES_DRAWN]
    for result in drawn:
        if not np.isnan(result.curve).all():
            axes.plot(recalls, result.curve, lw=1, label=result.name)
    curves = [c.curve for c in detections.classes if not np.isnan(c.curve).all()]
    if curves:
        axes.plot(recalls, np.mean(curves, axis=0), "k", lw=2, label="mean of all classes")
        axes.legend(fontsize=7, frameon=False)
    title = {"bbox": "boxes", "segm": "masks"}[detections.kind]
    axes.set(title=title, xlabel="recall", ylabel="precision", xlim=(0, 1), ylim=(0, 1.02))
    return to_svg(figure, f"precision over recall of {title}")


def draw_confusion(detections: Detections) -> str:
    """What each class is taken for; of many classes those with most mistakes."""
    matrix, names = detections.confusion, [c.name for c in detections.classes]
    wrong = matrix.sum(0) + matrix.sum(1) - 2 * np.diag(matrix)
    kept = np.sort(np.argsort(-wrong[:-1], kind="stable")[:_CLASSES_CONFUSED])
    index = [*kept.tolist(), len(names)]
    part = matrix[np.ix_(index, index)]
    side = 1.6 + 0.42 * len(index)
    figure, axes = new_axes(side + 0.8, side)
    axes.grid(False)
    share = part / np.maximum(matrix[index].sum(1, keepdims=True), 1)
    axes.imshow(share, cmap="Blues", vmin=0, vmax=1)
    for (row, column), count in np.ndenumerate(part):
        if count:
            color = "white" if share[row, column] > 0.6 else "black"
            axes.text(column, row, count, ha="center", va="center", fontsize=7, color=color)
    labels = [names[i] for i in kept]
    ticks = range(len(index))
    axes.set_xticks(ticks, [*labels, "missed"], rotation=90, fontsize=7)
    axes.set_yticks(ticks, [*labels, "nothing there"], fontsize=7)
    axes.set(xlabel="predicted", ylabel="true")
    return to_svg(figure, "confusion of classes")


# The heads of the columns of a class's result, but for its curve
_COLUMNS = (
    *("class", "objects", "AP", "AP50", "small", "medium", "large"),
    *("best score", "precision", "recall"),
)


def write_report(run: str | Path, output: str | Path | None = None, **options: Any) -> Path:
    """Write the page of a run, replace an earlier one, and send it to the run's trackers.

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
    _check_name(path)
    page = build_report(run, **options)
    _write(page.text(), path)
    for name in send_report(run, path, page.tables, page.pictures):
        logger.info(f"The report is at {name}, too")
    return path


def _check_name(path: Path) -> None:
    if path.suffix != ".html":
        raise ConfigError(f"The page {path} needs a name that ends in .html.")


def _write(text: str, path: Path) -> Path:
    with writing_to(path):
        replace_text(path, text)
    return path


def build_report(
    run: str | Path, *, dataset: str = "", score: float = 0.5, pictures: int = 8
) -> Page:
    """The page of a run.

    What a run does not have yet is left out, and the page says so. Of a classifier it has the
    curves, the speed and the configuration.

    Args:
        run: its folder, with config.yaml.
        dataset: of those in DATASETS.TEST; "" for the first.
        score: predictions of this score or more are in the confusion matrix and the pictures.
        pictures: number of images, the worst first.

    Raises:
        ConfigError: a value is out of range, or the run is not evaluated on ``dataset``.
        DataError: the folder is not that of a run, or a file in it is damaged.
    """
    if not 0 <= score <= 1:
        raise ConfigError(f"The score threshold is {score}; give one from 0 to 1.")
    if pictures < 1:
        raise ConfigError(f"The number of pictures is {pictures}; give at least 1.")
    run = Path(run)
    config = read_saved(run)
    records = read_metrics(run)
    steps = _steps(run, records)
    state, best = _state(run, config, steps)
    page = Page(f"Run {run.resolve().name}", f"{run}. {state}")
    if records:
        page.numbers(_summary(records, steps, best))
        page.section("Curves")
        page.figures(*draw_curves({"": records}))
    else:
        page.section("Curves", "The run has logged no step yet.")
    if "DATA" not in config:  # that of a classifier
        try:
            _add_detections(page, run, records, dataset, score, pictures)
        except UserError as error:
            if dataset:
                raise
            logger.warning(str(error))
            page.section("What is missing", str(error))
    _add_configuration(page, run, config)
    return page


def read_saved(run: Path) -> dict[str, Any]:
    """The configuration that a run saved, as plain values.

    Raises:
        DataError: the folder is not that of a run.
    """
    path = run / "config.yaml"
    try:
        config = read_plain(path.read_text("utf-8"))
    except OSError as error:
        raise DataError(
            f"{run} is not the folder of a run: it has no config.yaml; give the OUTPUT_DIR of a "
            "training or an evaluation."
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError):
        config = None
    if not isinstance(config, dict):
        raise DataError(f"{path} is not a saved configuration; mend it.")
    return config


def _state(run: Path, config: Mapping[str, Any], steps: int) -> tuple[str, int | None]:
    """How far the run is and which checkpoint counts, in words; and the step of that checkpoint."""
    last, best = last_checkpoint(str(run)), choose_checkpoint(str(run))
    if not last and not best:
        return "It has no checkpoint.", None
    words, step = [], None
    if os.path.isfile(best):
        taken = Taken.of(best, read_checkpoint(best))
        words.append(f"{'The last' if best == last else 'Its best'} checkpoint is {taken}.")
        step = None if best == last else taken.step
    name = os.path.basename(last)
    planned = config.get("SOLVER", {}).get("MAX_ITER") or config.get("train", {}).get("max_iter")
    if name != _FINAL:
        words.append(f"It has not ended: its last checkpoint is {name or 'missing'}.")
    elif planned and 0 < steps < planned:
        words.append(f"It stopped early, after {steps:,} of {planned:,} steps.")
    return " ".join(words), step


def _steps(run: Path, records: list[dict[str, float]]) -> int:
    """The steps that were done: those that are logged, or saved where a stop came between."""
    saved = re.fullmatch(r"model_(\d+)\.pth", os.path.basename(last_checkpoint(str(run))))
    iterations = [int(record["iteration"]) for record in records]
    return max([*iterations, int(saved[1]) if saved else -1], default=-1) + 1


def _summary(
    records: list[dict[str, float]], steps: int, best: int | None = None
) -> dict[str, str]:
    """What a reader looks for first: results of the best checkpoint, steps, speed, memory."""
    results, last = results_until(records, best)
    numbers = {label_of(key): f"{value:.1f}" for key, value in results.items()}
    numbers["steps"] = f"{steps:,}"
    if "total_loss" in last:
        numbers["last total loss"] = f"{last['total_loss']:.3g}"
    middle = {
        key: statistics.median(record[key] for record in records if key in record)
        for key in ("time", "data_time", "images_per_second")
        if key in last
    }
    if "time" in middle:
        numbers["seconds a step (median)"] = f"{middle['time']:.3g}"
        share = middle.get("data_time", 0.0) / max(middle["time"], 1e-9)
        numbers["of a step waiting for data"] = f"{share:.0%}"
    if "images_per_second" in middle:
        numbers["images a second (median)"] = f"{middle['images_per_second']:.3g}"
    if "peak_memory" in last:
        most = max(record.get("peak_memory", 0.0) for record in records)
        numbers["GB of memory at most, first process"] = f"{most:.1f}"
    return numbers


def results_until(
    records: list[dict[str, float]], best: int | None
) -> tuple[dict[str, float], dict[str, float]]:
    """The results after step ``best``, the last ones for None; and the last value of everything."""
    last: dict[str, float] = {}
    results: dict[str, float] = {}
    for record in records:
        last.update(record)
        if best is None or record["iteration"] < best:
            results.update(record)
    ends = ("/AP", "_top1", "/mIoU", "/PQ")
    return {key: value for key, value in results.items() if key.endswith(ends)}, last


def label_of(metric: str) -> str:
    """The name of a result for readers."""
    for kind, name in (("bbox", "box"), ("segm", "mask")):
        metric = metric.replace(f"{kind}/", f"{name} ")
        metric = metric.replace(f"{kind}_EMA/AP", f"{name} AP, averaged weights")
    return metric


class Evaluated(NamedTuple):
    """The results of a run's last evaluation.

    Attributes:
        task: of the run, with its data registered.
        dataset: the name of the data set.
        weights: "averaged weights" or "trained weights".
        ground_truth: of the data set.
        entries: the predictions on its images, as of :func:`read_results`.
        lost: number of predictions on images that the data set does not have.
        kinds: the results of boxes and, where there are some, of masks.
    """

    task: DetectionTask
    dataset: str
    weights: str
    ground_truth: COCO
    entries: list[dict[str, Any]]
    lost: int
    kinds: list[Detections]


def evaluate_run(run: Path, dataset: str = "", score: float = 0.5) -> Evaluated:
    """Compute what a detector of instances does on its test set from the results of its run.

    Args:
        run: its folder.
        dataset, score: as in :func:`build_report`.

    Raises:
        UserError: the run was not evaluated, or its data are not where they were.
    """
    task = DetectionTask(
        load_any_config(argparse.Namespace(config_file=str(run / "config.yaml"), opts=[]))
    )
    task.register_data()
    architecture = task.parts.detector.architecture
    if "instances" not in predictions(architecture):
        raise ConfigError(
            f"AP by class, errors and images: {architecture} finds no instances. The results of "
            "its evaluations are among the numbers above and in metrics.json."
        )
    names = task.parts.test_names
    if not names:
        raise ConfigError("The run names no data to evaluate on, so there are no results.")
    dataset = dataset or names[0]
    if dataset not in names:
        raise ConfigError(f"The run is evaluated on {listed(names)}, and not on {dataset}.")
    below = dataset if len(names) > 1 else ""
    found = [path for folder in _FOLDERS if (path := run / folder / below / _RESULTS).is_file()]
    if not found:
        path = run / "inference" / below / _RESULTS
        raise DataError(
            f"The run has no results of instances yet: there is no {path}; its training's command "
            "with --eval-only --resume evaluates the last checkpoint."
        )
    results = found[0]
    entries = read_results(results, dataset)
    weights = _FOLDERS[results.relative_to(run).parts[0]]
    json_file, images = registered_files(dataset)
    check_coco(json_file, images, files="none")
    kinds = ["bbox"] + ["segm"] * all("segmentation" in entry for entry in entries)
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints
        ground_truth = read_ground_truth(json_file)
        kept = belonging(entries, ground_truth.cats, ground_truth.imgs, results, dataset)
        evaluated = [evaluate_detections(ground_truth, kept, kind, score) for kind in kinds]
    lost = len(entries) - len(kept)
    return Evaluated(task, dataset, weights, ground_truth, kept, lost, evaluated)


def _add_detections(
    page: Page,
    run: Path,
    records: list[dict[str, float]],
    dataset: str,
    score: float,
    pictures: int,
) -> None:
    """What a detector of instances does on its test set.

    Raises:
        UserError: as :func:`evaluate_run`.
    """
    task, dataset, weights, ground_truth, kept, lost, evaluated = evaluate_run(run, dataset, score)
    note = f" {lost} of the {len(kept) + lost} predictions are left out: {dataset} lacks their "
    note = f"{note}images." if lost else ""
    which = f"The {weights} on {dataset}, at the last evaluation.{note}"
    _add_advice(page, task, ground_truth, kept, evaluated[-1].kind, records)
    _add_classes(page, evaluated, which)
    shown = ""
    if (classes := len(evaluated[0].classes)) > _CLASSES_CONFUSED:
        shown = f" Of {classes} classes the {_CLASSES_CONFUSED} with most mistakes are shown."
    page.section(
        "What is taken for what",
        f"Boxes of a score of {score:g} or more, at an IoU of 0.5. Rows are the true classes; "
        "the last column counts missed objects, the last row false predictions. The colour is the "
        f"share of the whole row.{shown}",
    )
    page.single_figure(draw_confusion(evaluated[0]))
    page.section(
        "The worst images",
        f"Predictions of a score of {score:g} or more at the left, the ground truth at the right.",
    )
    for name, picture in draw_worst(kept, dataset, score=score, limit=pictures):
        page.picture(picture, name)


def _add_advice(
    page: Page,
    task: DetectionTask,
    ground_truth: COCO,
    entries: list[dict[str, Any]],
    kind: str,
    records: list[dict[str, float]],
) -> None:
    """The changes that would bring most, and what shows it."""
    trained: Counter[str] = Counter()
    for name in task.parts.train_names or ():
        # The training's files may be gone since, or of another kind
        with contextlib.suppress(UserError, LookupError, TypeError):
            content = read_json(registered_files(name)[0])
            classes = {category["id"]: category["name"] for category in content["categories"]}
            trained.update(classes[entry["category_id"]] for entry in content["annotations"])
    scale = task.parts.test_scale([(i["height"], i["width"]) for i in ground_truth.imgs.values()])
    changes = advise(ground_truth, entries, kind, records, trained, scale)
    rows = [row for row in changes if row.gain >= _LEAST_GAIN][:_CHANGES]
    page.section(
        "What would bring most",
        "AP50 would rise by this number if all errors of that kind were gone, of which a change "
        "takes a part."
        if rows
        else "No kind of error stands out.",
    )
    if rows:
        head = ("change", f"AP50 of {'boxes' if kind == 'bbox' else 'masks'}", "what shows it")
        page.table(head, ((c, f"+{gain:.1f}", why) for c, gain, why in rows), text=True)


def _add_configuration(page: Page, run: Path, config: Mapping[str, Any]) -> None:
    file = config_origin(run)
    if is_lazy(config):
        page.section("Configuration", f"A LazyConfig, {file}. config.yaml has all of it.")
        return
    base, note, changes = what_was_changed(run, config)
    page.section("Configuration", f"What differs from {base}.{note}")
    page.table(("key", os.path.basename(base), "this run"), changes, text=True)


def what_was_changed(
    run: Path, config: Mapping[str, Any]
) -> tuple[str, str, list[tuple[str, Any, Any]]]:
    """How a run's configuration differs from the file that it was read from.

    Returns:
        The file, or "the defaults"; a note where the file cannot be read, or ""; and of each
        changed key the name, the file's value and the run's.
    """
    file = base = config_origin(run)
    note = ""
    try:
        before = _read_base(file, config)
    except UserError as error:
        note = f" {file}, which it was read from, cannot be read: {error}"
        base, before = "", _read_base("", config)
    changes = changed_keys(before.dump(), run / "config.yaml")
    return base or "the defaults", note, [(key, old, new) for key, new, old in changes]


def _read_base(file: str, config: Mapping[str, Any]) -> CfgNode:
    """The configuration of a file, or with "" the defaults, of the kind of ``config``."""
    flags = {"config_file": file or None, "opts": []}
    if "DATA" in config:
        return load_recipe(argparse.Namespace(**flags, synthetic_data=False, debug_numerics=False))
    return load_config(argparse.Namespace(**flags))


def _add_classes(page: Page, found: list[Detections], which: str) -> None:
    page.section(
        "Precision and recall", f"{which} At an IoU of 0.5, for the classes with most objects."
    )
    page.figures(*(draw_precision_recall(detections) for detections in found))
    for detections in found:
        title = {"bbox": "Boxes", "segm": "Masks"}[detections.kind]
        page.section(
            f"{title} by class",
            "AP in percent over IoU 0.5 to 0.95. The best score is the threshold of the highest "
            "F1 at an IoU of 0.5, with its precision and recall.",
        )
        most_first = sorted(detections.classes, key=lambda c: -c.objects)
        page.table(_COLUMNS, (result[:-1] for result in most_first))
