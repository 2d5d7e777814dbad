"""One HTML page on a run: curves, AP by class and size, errors, speed, configuration.

The page holds its pictures and needs no server, no script and no other file.
"""

from __future__ import annotations

import base64
import html
import io
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

import cv2
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pycocotools import mask as mask_util
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from lambda_det.errors import DataError
from lambda_det.visualization.results import draw_results, read_results

__all__ = ["Detections", "Page", "build_report", "evaluate_detections", "read_metrics"]

_IOU_50 = 0  # index of the threshold 0.5 in COCO's list
_POINTS = 600  # of a curve; more would only make the page larger
_CLASSES_DRAWN = 12  # in one figure of curves
_CLASSES_CONFUSED = 20  # in the confusion matrix
_SCORES = ("/AP", "/AP50", "_top1", "/mIoU", "/PQ")  # ends of the metrics that are drawn


@dataclass(frozen=True)
class ClassResult:
    """What a detector does on one class; AP in percent, NaN where the class has no such object.

    Attributes:
        name: of the class.
        objects: in the ground truth, without crowds.
        ap, ap50, small, medium, large: of boxes or masks.
        threshold: the score that gives the best F1 at an IoU of 0.5.
        precision, recall: at that score.
        curve: precision at an IoU of 0.5 for each of COCO's 101 recalls.
    """

    name: str
    objects: int
    ap: float
    ap50: float
    small: float
    medium: float
    large: float
    threshold: float
    precision: float
    recall: float
    curve: np.ndarray


@dataclass(frozen=True)
class Detections:
    """The results of one kind ("bbox" or "segm") by class, and what is taken for what.

    Attributes:
        confusion: [classes + 1, classes + 1] counts at ``score``; rows are true classes, columns
            predicted ones. The last column counts missed objects, the last row false predictions.
    """

    kind: str
    classes: list[ClassResult]
    confusion: np.ndarray
    score: float


def evaluate_detections(
    ground_truth: COCO, results: Sequence[Mapping[str, Any]], kind: str, score: float
) -> Detections:
    """Evaluate predictions with COCO's own code.

    Args:
        ground_truth: with ``iscrowd`` and ``area`` in every annotation.
        results: entries of a results file in COCO's format, with the key that ``kind`` needs.
        kind: "bbox" or "segm".
        score: predictions of a lower score are left out of the confusion matrix.
    """
    # loadRes changes what it is given
    predictions = ground_truth.loadRes([dict(entry) for entry in results])
    evaluation = COCOeval(ground_truth, predictions, kind)
    evaluation.evaluate()
    evaluation.accumulate()
    # [IoU thresholds, recalls, classes, sizes, numbers of detections], -1 where there is no object
    precision = evaluation.eval["precision"][..., -1]
    precision = np.where(precision < 0, np.nan, precision)
    classes = []
    for index, category in enumerate(evaluation.params.catIds):
        by_size = [_percent(precision[:, :, index, size]) for size in range(4)]
        objects = ground_truth.getAnnIds(catIds=[category], iscrowd=False)
        classes.append(
            ClassResult(
                ground_truth.cats[category]["name"],
                len(objects),
                by_size[0],
                _percent(precision[_IOU_50, :, index, 0]),
                *by_size[1:],
                *_best_threshold(evaluation, index, len(objects)),
                precision[_IOU_50, :, index, 0],
            )
        )
    confusion = _confusion(ground_truth, predictions, evaluation.params.catIds, kind, score)
    return Detections(kind, classes, confusion, score)


def _percent(values: np.ndarray) -> float:
    return float("nan") if np.isnan(values).all() else 100 * float(np.nanmean(values))


def _best_threshold(evaluation: COCOeval, index: int, objects: int) -> tuple[float, float, float]:
    """Score, precision and recall of the highest F1 of one class at an IoU of 0.5."""
    images = len(evaluation.params.imgIds)
    sizes = len(evaluation.params.areaRng)
    found = evaluation.evalImgs[index * sizes * images : index * sizes * images + images]
    found = [image for image in found if image is not None]
    scores = np.concatenate([image["dtScores"] for image in found] or [[]])
    right = np.concatenate([image["dtMatches"][_IOU_50] > 0 for image in found] or [[]])
    counted = np.concatenate([~image["dtIgnore"][_IOU_50].astype(bool) for image in found] or [[]])
    counted = counted.astype(bool)
    scores, right = scores[counted], right[counted]
    if not (objects and right.any()):
        return (float("nan"),) * 3
    order = np.argsort(-scores, kind="stable")
    hits = np.cumsum(right[order])
    precision, recall = hits / np.arange(1, len(hits) + 1), hits / objects
    best = int(np.argmax(2 * precision * recall / np.maximum(precision + recall, 1e-12)))
    return float(scores[order][best]), float(precision[best]), float(recall[best])


def _confusion(
    ground_truth: COCO, predictions: COCO, categories: Sequence[int], kind: str, score: float
) -> np.ndarray:
    """Count which class each object is taken for: the free prediction of the highest score.

    A prediction takes the free object, of whatever class, that it overlaps most, by an IoU of 0.5
    at least. One that lies in a crowd is not counted.
    """
    place = {category: index for index, category in enumerate(categories)}
    nothing = len(categories)
    matrix = np.zeros((nothing + 1, nothing + 1), int)
    for image in ground_truth.getImgIds():
        objects = ground_truth.loadAnns(ground_truth.getAnnIds(imgIds=[image]))
        found = predictions.loadAnns(predictions.getAnnIds(imgIds=[image]))
        found = sorted((p for p in found if p["score"] >= score), key=lambda p: -p["score"])
        crowds = np.array([bool(o["iscrowd"]) for o in objects], bool)
        overlaps = _overlaps(ground_truth, found, objects, kind)
        free = set(np.flatnonzero(~crowds).tolist())
        for row, prediction in zip(overlaps, found, strict=True):
            best = max(free, key=row.__getitem__, default=None)
            column = place[prediction["category_id"]]
            if best is not None and row[best] >= 0.5:
                free.remove(best)
                matrix[place[objects[best]["category_id"]], column] += 1
            elif not any(
                crowd and overlap >= 0.5 for crowd, overlap in zip(crowds, row, strict=True)
            ):
                matrix[nothing, column] += 1
        for left in free:
            matrix[place[objects[left]["category_id"]], nothing] += 1
    return matrix


def _overlaps(ground_truth: COCO, found: list[dict], objects: list[dict], kind: str) -> np.ndarray:
    """[predictions, objects]; of a crowd, the share of the prediction that lies in it."""
    if not (found and objects):
        return np.zeros((len(found), len(objects)))
    if kind == "bbox":
        shapes = [[entry["bbox"] for entry in part] for part in (found, objects)]
    else:
        shapes = [[ground_truth.annToRLE(e) for e in part] for part in (found, objects)]
    return np.asarray(mask_util.iou(*shapes, [int(o["iscrowd"]) for o in objects]))


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


# ---------------------------------------------------------------------------------------------
# Figures, as SVG text
# ---------------------------------------------------------------------------------------------


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _svg(figure: Figure, label: str) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    picture = text.getvalue()
    picture = picture[picture.index("<svg") :]
    return f'<div class="figure" role="img" aria-label="{html.escape(label)}">{picture}</div>'


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
        figure, axes = _figure(4.4, 3.2)
        _plot(axes, records, drawn, **({"marker": "o", "ms": 3} if "percent" in title else {}))
        axes.set(title=title, ylim=(0, 100 if "percent" in title else None))
        if drawn:
            figures.append(_svg(figure, f"{title} over the steps"))
    return figures


def draw_precision_recall(detections: Detections) -> str:
    """Precision over recall at an IoU of 0.5: the classes with most objects, and the mean."""
    figure, axes = _figure(5, 3.6)
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
    return _svg(figure, f"precision over recall of {title}")


def draw_confusion(detections: Detections) -> str:
    """What each class is taken for; of many classes those with most mistakes."""
    matrix, names = detections.confusion, [c.name for c in detections.classes]
    wrong = matrix.sum(0) + matrix.sum(1) - 2 * np.diag(matrix)
    kept = np.sort(np.argsort(-wrong[:-1], kind="stable")[:_CLASSES_CONFUSED])
    index = [*kept.tolist(), len(names)]
    part = matrix[np.ix_(index, index)]
    side = 1.6 + 0.42 * len(index)
    figure, axes = _figure(side + 0.8, side)
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
    return _svg(figure, "confusion of classes")


# ---------------------------------------------------------------------------------------------
# The page
# ---------------------------------------------------------------------------------------------

_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root { color-scheme: light; --line: #d9dde3; --soft: #5b6470; --accent: #1f5fae; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1080px; padding: 24px 20px 60px; color: #1c2128;
       font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; background: #fff; }
h1 { font-size: 24px; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 36px 0 8px; padding-top: 12px; border-top: 1px solid var(--line); }
p { margin: 4px 0 12px; color: var(--soft); max-width: 75ch; }
.numbers { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 10px;
           margin: 16px 0; }
.number { border: 1px solid var(--line); border-radius: 8px; padding: 10px 12px; }
.number b { display: block; font-size: 22px; font-weight: 600; color: var(--accent); }
.number span { color: var(--soft); font-size: 13px; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(300px, 1fr)); gap: 12px; }
.figure svg { width: 100%; height: auto; display: block; }
.single svg { width: auto; max-width: 100%; height: auto; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 10px; text-align: right; border-bottom: 1px solid var(--line);
         white-space: nowrap; }
th { font-weight: 600; font-size: 13px; color: var(--soft); }
th:first-child, td:first-child { text-align: left; }
td.text { text-align: left; white-space: normal; overflow-wrap: anywhere; }
figure { margin: 12px 0; }
figure img { width: 100%; height: auto; border: 1px solid var(--line); border-radius: 6px; }
figcaption { color: var(--soft); font-size: 13px; }
</style>
</head>
<body>
<h1>$title</h1>
<p>$subtitle</p>
$content
</body>
</html>
""")


class Page:
    """Collects the sections of the page."""

    def __init__(self, title: str, subtitle: str) -> None:
        self._title, self._subtitle = title, subtitle
        self._parts: list[str] = []

    def section(self, title: str, note: str = "") -> None:
        self._parts.append(f"<h2>{html.escape(title)}</h2>")
        if note:
            self._parts.append(f"<p>{html.escape(note)}</p>")

    def numbers(self, values: Mapping[str, str]) -> None:
        """Large figures, each with what it is."""
        cells = (
            f'<div class="number"><b>{html.escape(value)}</b><span>{html.escape(name)}</span></div>'
            for name, value in values.items()
        )
        self._parts.append(f'<div class="numbers">{"".join(cells)}</div>')

    def figures(self, *figures: str) -> None:
        """SVG figures beside each other where the window is wide enough."""
        self._parts.append(f'<div class="figures">{"".join(figures)}</div>')

    def single_figure(self, figure: str) -> None:
        """An SVG figure in its own size, smaller in a narrow window."""
        self._parts.append(f'<div class="single">{figure}</div>')

    def table(self, head: Sequence[str], rows: Iterable[Sequence[Any]], text: bool = False) -> None:
        """Numbers, or with ``text`` words, that wrap."""
        kind = ' class="text"' if text else ""
        lines = ["<tr>" + "".join(f"<th>{html.escape(name)}</th>" for name in head) + "</tr>"]
        lines += [
            "<tr>"
            + "".join(f"<td{kind}>{html.escape(_cell(value))}</td>" for value in row)
            + "</tr>"
            for row in rows
        ]
        self._parts.append(f'<div class="scroll"><table>{"".join(lines)}</table></div>')

    def picture(self, picture: np.ndarray, caption: str) -> None:
        """A picture [H, W, 3] of uint8, RGB, kept in the page as a JPEG."""
        content = cv2.imencode(".jpg", picture[:, :, ::-1], [cv2.IMWRITE_JPEG_QUALITY, 85])[1]
        data = base64.b64encode(content.tobytes()).decode("ascii")
        self._parts.append(
            f'<figure><img alt="{html.escape(caption)}" src="data:image/jpeg;base64,{data}">'
            f"<figcaption>{html.escape(caption)}</figcaption></figure>"
        )

    def text(self) -> str:
        return _PAGE.substitute(
            title=html.escape(self._title),
            subtitle=html.escape(self._subtitle),
            content="\n".join(self._parts),
        )


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return "–" if np.isnan(value) else f"{value:.3g}" if abs(value) < 1 else f"{value:.1f}"
    return str(value)


# ---------------------------------------------------------------------------------------------
# A run
# ---------------------------------------------------------------------------------------------


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
