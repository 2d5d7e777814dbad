"""One HTML page on a run: curves, AP by class and size, errors, speed, configuration."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from pycocotools.coco import COCO

from lambda_det.errors import DataError
from lambda_det.visualization.class_results import Detections, evaluate_detections
from lambda_det.visualization.page import Page, new_axes, to_svg
from lambda_det.visualization.results import draw_results, read_results

__all__ = ["build_report", "read_metrics"]

_POINTS = 600  # of a curve; more would only make the page larger
_CLASSES_DRAWN = 12  # in one figure of curves
_CLASSES_CONFUSED = 20  # in the confusion matrix
_SCORES = ("/AP", "/AP50", "_top1", "/mIoU", "/PQ")  # ends of the metrics that are drawn


def read_metrics(run: str | Path) -> list[dict[str, float]]:
    """The records of a run's metrics.json.

    Raises:
        DataError: there is none, or a line of it is no record.
    """
    path = Path(run, "metrics.json")
    try:
        return [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    except OSError as error:
        raise DataError(f"There is no {path}; name the folder of a run.") from error
    except ValueError as error:
        raise DataError(f"{path} holds a line that is not JSON ({error}).") from error


def _plot(axes: Axes, records: list[dict[str, float]], names: Iterable[str], **style: Any) -> None:
    for name in names:
        points = [(r["iteration"] + 1, r[name]) for r in records if name in r]
        step = -(-len(points) // _POINTS)
        axes.plot(*zip(*points[::step], strict=True), label=name, lw=1.2, **style)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7, frameon=False)
    axes.set_xlabel("step")


def draw_curves(records: list[dict[str, float]]) -> list[str]:
    """Losses, learning rate and, where the run was evaluated, AP or accuracy over the steps."""
    names = sorted({name for record in records for name in record})
    panels = {
        "losses": [name for name in names if "loss" in name and name != "loss_spikes"],
        "learning rate": [name for name in names if name == "lr"],
        "AP or accuracy, percent": [n for n in names if n.endswith(_SCORES)],
    }
    figures = []
    for title, drawn in panels.items():
        figure, axes = new_axes(4.4, 3.2)
        _plot(axes, records, drawn, **({"marker": "o", "ms": 3} if "percent" in title else {}))
        axes.set(title=title, ylim=(0, 100 if "percent" in title else None))
        if drawn:
            figures.append(to_svg(figure, f"{title} over the steps"))
    return figures


def draw_precision_recall(detections: Detections) -> str:
    """Precision over recall at an IoU of 0.5: the classes with most objects, and the mean."""
    figure, axes = new_axes(5, 3.6)
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
    share = part / np.maximum(part.sum(1, keepdims=True), 1)
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


# Attributes of a class's result, and the heads of their columns
_COLUMNS = {
    "name": "class",
    "objects": "objects",
    "ap": "AP",
    "ap50": "AP50",
    "small": "small",
    "medium": "medium",
    "large": "large",
    "threshold": "best score",
    "precision": "precision",
    "recall": "recall",
}


class _Collector:
    """Takes pictures as an :class:`Album` does, and keeps them."""

    def __init__(self) -> None:
        self.pictures: list[tuple[str, np.ndarray]] = []

    def check(self, names: Iterable[str]) -> None:
        pass

    def add(self, name: str, picture: np.ndarray) -> None:
        self.pictures.append((name, picture))


def build_report(
    run: str | Path,
    dataset: str,
    ground_truth: COCO,
    *,
    changed: Iterable[tuple[str, Any, Any]] = (),
    base: str = "",
    score: float = 0.5,
    pictures: int = 8,
) -> str:
    """The page of a run that has trained and evaluated a detector of instances.

    Args:
        run: its folder, with metrics.json and inference/coco_instances_results.json.
        dataset: that was evaluated, registered.
        ground_truth: of that data set, with ``iscrowd`` and ``area`` in every annotation.
        changed: keys of the configuration with their values in ``base`` and in the run.
        base: the configuration that ``changed`` is relative to.
        score: for the confusion of classes and the pictures.
        pictures: how many images, the worst first.

    Raises:
        DataError: a file of the run is missing or damaged.
    """
    run = Path(run)
    records = read_metrics(run)
    page = Page(f"Run {run.resolve().name}", f"{run}, evaluated on {dataset}")
    page.numbers(_summary(records))
    if records:
        page.section("Curves")
        page.figures(*draw_curves(records))
    results = run / "inference" / "coco_instances_results.json"
    if results.is_file():
        entries = read_results(results)
        kinds = ["bbox"] + ["segm"] * all("segmentation" in entry for entry in entries)
        found = [evaluate_detections(ground_truth, entries, kind, score) for kind in kinds]
        _add_classes(page, found)
        page.section(
            "What is taken for what",
            f"Boxes of a score of {score:g} or more, at an IoU of 0.5. Rows are the true classes; "
            "the last column counts missed objects, the last row false predictions.",
        )
        page.single_figure(draw_confusion(found[0]))
        collector = _Collector()
        draw_results(
            results, dataset, collector, score_threshold=score, limit=pictures, worst_first=True
        )
        page.section("The worst images", "Predictions at the left, the ground truth at the right.")
        for name, picture in collector.pictures:
            page.picture(picture, name)
    else:
        page.section("Detections", f"There is no {results}: the run was not evaluated yet.")
    changed = list(changed)
    page.section("Configuration", f"What differs from {base}." if changed else "")
    if changed:
        page.table(("key", base, "this run"), changed, text=True)
    return page.text()


def _summary(records: list[dict[str, float]]) -> dict[str, str]:
    """The last value of each metric that a reader looks for first."""
    last: dict[str, float] = {}
    for record in records:
        last.update(record)
    numbers = {
        name: f"{last[key]:.1f}"
        for key, name in (("bbox/AP", "box AP"), ("segm/AP", "mask AP"), ("keypoints/AP", "AP"))
        if key in last
    }
    if "iteration" in last:
        numbers["steps"] = f"{int(last['iteration']) + 1:,}"
    times = [record["time"] for record in records if "time" in record]
    if times:
        numbers["seconds a step (median)"] = f"{statistics.median(times):.3g}"
        waits = [record["data_time"] for record in records if "data_time" in record]
        if waits:
            share = statistics.median(waits) / max(statistics.median(times), 1e-9)
            numbers["of it waiting for data"] = f"{share:.0%}"
    if "peak_memory" in last:
        numbers["GB of memory at most"] = f"{last['peak_memory']:.1f}"
    if "total_loss" in last:
        numbers["last total loss"] = f"{last['total_loss']:.3g}"
    return numbers


def _add_classes(page: Page, found: list[Detections]) -> None:
    page.section("Precision and recall", "At an IoU of 0.5, for the classes with most objects.")
    page.figures(*(draw_precision_recall(detections) for detections in found))
    for detections in found:
        title = {"bbox": "Boxes", "segm": "Masks"}[detections.kind]
        page.section(
            f"{title} by class",
            "AP in percent over IoU 0.5 to 0.95. The best score is the threshold of the highest "
            "F1 at an IoU of 0.5, with its precision and recall.",
        )
        page.table(
            list(_COLUMNS.values()),
            (
                [getattr(result, name) for name in _COLUMNS]
                for result in sorted(detections.classes, key=lambda c: -c.objects)
            ),
        )
