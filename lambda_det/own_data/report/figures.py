"""The figures of a page: curves over the steps, and the confusion of classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from lambda_det.detection.results import DRAWN
from lambda_det.own_data.report.class_results import Detections
from lambda_det.own_data.report.page import ACCENT, INK, ON_ACCENT, new_axes, to_svg
from lambda_det.own_data.report.reading import label_of
from lambda_det.training.log import is_loss

_POINTS = 600  # points of a curve; more would only make the page larger
CLASSES_CONFUSED = 20  # classes in the confusion matrix
_TOTAL = ("total_loss", "validation/total_loss")

# From nothing to the accent, so that the page is seen through it, light or dark
_SHARE = LinearSegmentedColormap.from_list("share", [(ACCENT, 0.0), (ACCENT, 1.0)])

# the metrics that are drawn together, by the title
PANELS: dict[str, Callable[[str], bool]] = {
    "total loss": lambda name: name in _TOTAL,
    "AP or accuracy, percent": lambda name: name.endswith(DRAWN),
    "losses": lambda name: is_loss(name) and name not in _TOTAL,
    "learning rate": lambda name: name.partition("/")[0] == "lr",
}


def draw_panel(axes: Axes, title: str, metrics: Sequence[Mapping[str, float]]) -> bool:
    """Draw metrics over the steps; return whether there is one.

    Args:
        axes: to draw in.
        title: one of ``PANELS``.
        metrics: of :meth:`lambda_det.training.run_folder.RunFolder.metrics`.
    """
    belongs, percent = PANELS[title], "percent" in title
    colors: dict[str, str] = {}
    shown = title
    for name in sorted({name for line in metrics for name in line if belongs(name)}):
        points = [(r["iteration"] + 1, r[name]) for r in metrics if name in r]
        points = points[:: -(-len(points) // _POINTS)]
        # A loss of held-out images has the colour of the training's, and is dashed with circles
        trained = name.removeprefix("validation/")
        is_held_out = name != trained
        axes.plot(
            *zip(*points, strict=True),
            color=colors.setdefault(trained, f"C{len(colors)}"),
            ls="--" if is_held_out else "-",
            marker="o" if percent or is_held_out or len(points) == 1 else "",
            mfc="none" if is_held_out else None,
            label=None if is_held_out else label_of(name),
            lw=1.2,
            ms=3,
            clip_on=False,  # an AP of 0 or 100 lies on the frame
        )
        if is_held_out:
            shown = f"{title} (circles: held out)"
    if axes.lines:
        # below the axes, where it covers no curve, and no wider than they are
        place = (0, -0.2)
        axes.legend(fontsize=8, ncols=2, loc="upper left", bbox_to_anchor=place, frameon=False)
    axes.set(title=shown, xlabel="step", xlim=(0, None), ylim=(0, 100 if percent else None))
    return bool(axes.lines)


def draw_curves(metrics: Sequence[Mapping[str, float]]) -> list[str]:
    """The panels for which a run has logged something, as SVG."""
    figures = []
    for title in PANELS:
        figure, axes = new_axes(5.2, 3.9)
        if draw_panel(axes, title, metrics):
            figures.append(to_svg(figure, f"{title} over the steps"))
    return figures


def draw_totals(metrics: Sequence[Mapping[str, float]]) -> Figure:
    """Draw the total loss at the left, AP or accuracy at the right, over the steps."""
    figure = Figure(figsize=(10, 3.6), layout="constrained", dpi=100)
    for axes, title in zip(figure.subplots(1, 2), PANELS, strict=False):
        draw_panel(axes, title, metrics)
    return figure


def draw_confusion(detections: Detections) -> str:
    """The confusion of classes, as SVG; with many classes, those with the most mistakes."""
    matrix, names = detections.confusion, [c.name for c in detections.classes]
    wrong = matrix.sum(0) + matrix.sum(1) - 2 * np.diag(matrix)
    kept = np.sort(np.argsort(-wrong[:-1], kind="stable")[:CLASSES_CONFUSED])
    index = [*kept.tolist(), len(names)]
    shown = matrix[np.ix_(index, index)]
    side = 1.6 + 0.4 * len(index)
    figure, axes = new_axes(side + 0.8, side)
    axes.grid(False)
    share = shown / np.maximum(matrix[index].sum(1, keepdims=True), 1)
    axes.imshow(share, cmap=_SHARE, vmin=0, vmax=1)
    for (row, column), count in np.ndenumerate(shown):
        if count:
            color = ON_ACCENT if share[row, column] > 0.6 else INK
            axes.text(column, row, count, ha="center", va="center", fontsize=8, color=color)
    labels = [names[i] for i in kept]
    ticks = range(len(index))
    axes.set_xticks(ticks, [*labels, "missed"], rotation=90, fontsize=8)
    axes.set_yticks(ticks, [*labels, "false"], fontsize=8)
    axes.set(xlabel="predicted", ylabel="true")
    return to_svg(figure, "confusion of classes", keeps_size=True)
