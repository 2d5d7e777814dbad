"""The predictions of a run's last evaluation, with their ground truth."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pycocotools.coco import COCO

from lambda_det.detection.config_files import load_file
from lambda_det.detection.data.identity import check_identity
from lambda_det.detection.data.predictions import predictions
from lambda_det.detection.data.registration import has_masks
from lambda_det.detection.evaluation import ground_truth_of
from lambda_det.detection.results import MASKS_LEARNT
from lambda_det.detection.task import DetectionTask
from lambda_det.errors import ConfigError, DataError, listed, refused
from lambda_det.own_data.report.class_results import Detections, evaluate_detections

RESULTS = "coco_instances_results.json"
# The folders of an evaluation's results; averaged weights come first, as for
# model_best.pth
_FOLDERS = {"inference_EMA": "averaged weights", "inference": "trained weights"}


@dataclass(frozen=True)
class Evaluated:
    """The results of a run's last evaluation.

    Attributes:
        task: of the run, with its data registered.
        dataset: the name of the data set.
        weights: "averaged weights" or "trained weights".
        ground_truth: of the data set.
        entries: the predictions on its images, as of :func:`read_predictions`.
        score: the lowest of the predictions in the confusion matrix and in pictures.
        results: results of boxes and, if there are any, of masks. By the last ones errors are
            counted, and the score is chosen where none is given: masks, once they are learnt.
    """

    task: DetectionTask
    dataset: str
    weights: str
    ground_truth: COCO
    entries: list[dict[str, Any]]
    score: float
    results: list[Detections]


def evaluate_run(run: Path, dataset: str = "", score: float | None = None) -> Evaluated:
    """Compute the results of a detector of instances on its test set from the files of its run.

    Args:
        run: its folder.
        dataset: one of those in DATASETS.TEST; "" for the first.
        score: predictions of this score or more are in the confusion matrix; None: the score with
            the best F1 in these results, of masks once they are learnt.

    Raises:
        UserError: the run was not evaluated, or its data were moved.
    """
    task = DetectionTask(load_file(run / "config.yaml"))
    task.register_data()
    architecture = task.components.detector.architecture
    if "instances" not in predictions(architecture):
        raise ConfigError(
            f"AP by class, errors and images: {architecture} finds no instances. The results of "
            "its evaluations are among the numbers above and in metrics.json."
        )
    names = task.components.test_names
    if not names:
        raise ConfigError("The run names no data to evaluate on, so there are no results.")
    dataset = dataset or names[0]
    if dataset not in names:
        raise ConfigError(f"The run is evaluated on {listed(names)}, and not on {dataset}.")
    below = dataset if len(names) > 1 else ""
    files = [run / folder / below / RESULTS for folder in _FOLDERS]
    results = next((path for path in files if path.is_file()), None)
    if results is None:
        raise DataError(
            f"The run has no results of instances yet: there is no {files[-1]}; its training's "
            "command with --eval-only --resume evaluates the last checkpoint."
        )
    entries = read_predictions(results)
    weights = _FOLDERS[results.relative_to(run).parts[0]]
    are_masks = entries and all("segmentation" in entry for entry in entries) and has_masks(dataset)
    iou_types = ["bbox", "segm"] if are_masks else ["bbox"]
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints
        ground_truth = ground_truth_of(dataset)
        check_identity(results, dataset, ground_truth)
        _check_ids(entries, ground_truth, results, dataset)
        by_class = [evaluate_detections(ground_truth, entries, kind, score) for kind in iou_types]
    # masks decide once they are learnt; of classes without an object AP50 is NaN
    boxes, *masks = (sum(c.values["AP50"] for c in one.classes if c.objects) for one in by_class)
    if masks and not masks[0] > MASKS_LEARNT * boxes:
        by_class.reverse()
    return Evaluated(task, dataset, weights, ground_truth, entries, by_class[-1].score, by_class)


def read_predictions(path: str | Path) -> list[dict[str, Any]]:
    """Read a results file in COCO's format.

    Args:
        path: of the file.

    Raises:
        DataError: the file is missing or no JSON, or its entries are no predictions of instances.
    """
    advice = "an evaluation writes it as inference/coco_instances_results.json into its OUTPUT_DIR"
    errors = (OSError, ValueError, RecursionError, AttributeError, TypeError)
    with refused(DataError, f"The results file {path} cannot be read", advice, *errors):
        entries = json.loads(Path(path).read_text("utf-8"))
        for entry in entries:  # it has a box or a mask besides
            if not {"image_id", "category_id", "score"} < entry.keys():
                raise ValueError("its entries are no predictions of instances")
    return entries


def _check_ids(
    entries: list[dict[str, Any]], ground_truth: COCO, results: Path, dataset: str
) -> None:
    """Refuse predictions of classes or images that the data set does not have."""
    for key, known in {"category_id": ground_truth.cats, "image_id": ground_truth.imgs}.items():
        if unknown := {entry[key] for entry in entries} - known.keys():
            raise DataError(
                f"{results} does not belong to the data set {dataset} as it is now, which has no "
                f"{key} {listed(sorted(unknown, key=str))}; give the data set that was evaluated, "
                "or evaluate again."
            )
