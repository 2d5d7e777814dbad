"""What the page of a run shows, as pictures for a notebook."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image

from lambda_det.detection.drawing import captioned
from lambda_det.errors import ConfigError, DataError
from lambda_det.own_data.report.evaluated import evaluate_run
from lambda_det.own_data.report.figures import draw_totals
from lambda_det.own_data.report.worst_images import draw_worst
from lambda_det.training.run_folder import RunFolder

_GAP = 8  # pixels between two images


def plot_curves(run: str | Path) -> Image.Image:
    """Draw the total loss and AP of a run over the steps.

    Raises:
        DataError: the run has logged no step yet.
    """
    if not (metrics := RunFolder(run).metrics()):
        raise DataError(f"{run} has logged no step yet.")
    content = io.BytesIO()
    draw_totals(metrics).savefig(content, format="png")
    return Image.open(content).convert("RGB")


def plot_worst(
    run: str | Path, number: int = 4, *, dataset: str = "", score: float | None = None
) -> Image.Image:
    """Draw the images with the worst results at the last evaluation below each other: predictions
    at the left, the ground truth at the right, and their counts above.

    Args:
        run: its folder.
        number: of images.
        dataset, score: as for :func:`lambda_det.own_data.report.run_page.build_report`.

    Raises:
        UserError: the run was not evaluated, or its data were moved.
    """
    if number < 1:
        raise ConfigError(f"The number of images is {number}; give at least 1.")
    rows = []
    for pair in draw_worst(evaluate_run(Path(run), dataset, score), number):
        row = np.hstack([_wider(pair.predicted, _GAP), pair.truth])
        rows.append(captioned(row, f"{pair.name}: {pair.counts}"))
    width = max(row.shape[1] for row in rows)
    return Image.fromarray(
        np.vstack([_wider(row, width - row.shape[1]) for row in rows])[:, :, ::-1]
    )


def _wider(picture: np.ndarray, pixels: int) -> np.ndarray:
    """A picture [H, W, 3] with so many white pixels at its right."""
    return np.pad(picture, ((0, 0), (0, pixels), (0, 0)), constant_values=255)
