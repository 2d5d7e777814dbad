"""``lambda-det evaluate``: a trained detector on other data, beside the results of its run."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import json
import math
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from detectron2.config import CfgNode
from detectron2.evaluation.testing import flatten_results_dict
from omegaconf import DictConfig
from tabulate import tabulate

from lambda_det.detection.data.copies import REMEDY, shared_copies
from lambda_det.detection.data.ground_truth import file_report
from lambda_det.detection.data.outputs import MARK, mark_output
from lambda_det.detection.data.registration import is_coco, registered_files
from lambda_det.detection.results import columns
from lambda_det.detection.saved_run import SavedRun, open_run
from lambda_det.detection.task import DetectionTask
from lambda_det.errors import ConfigError, UserError, counted, printable
from lambda_det.files import disk_of, refuse_unwritable, replace_text
from lambda_det.own_data.coco_files import identifying_stem
from lambda_det.own_data.data_to_evaluate import choose_data
from lambda_det.own_data.layouts import Part
from lambda_det.own_data.report.class_results import Detections
from lambda_det.own_data.report.evaluated import evaluate_run
from lambda_det.own_data.report.reading import (
    EVALUATION,
    Result,
    by_label,
    label_of,
    results_of,
)
from lambda_det.own_data.run_data import keep_file
from lambda_det.training.log import BufferedLog
from lambda_det.training.run_folder import RunFolder
from lambda_det.training.task import EMA, RAW, Results
from lambda_det.weights.loading import load


@dataclass(frozen=True)
class ResultsOnData:
    """A trained detector on some data.

    Attributes:
        folder: with predictions, configuration and log, from which ``lambda-det report`` makes a
            page.
        weights: file and step, for a reader.
        data: the data of the evaluation, and the number of images; then keys that were given.
        results: by their names in metrics.json.
        own: results of the run's own evaluation after the same step; {} where there was none.
        trained_on: how many of the images are among those to train on; None where this is unknown.
        images: number of all images.
        classes: results by class for boxes and, if there are any, for masks.
        shared: how many of the images to train on are the same files or copies, and how many are
            frames of the same films.
    """

    folder: Path
    weights: str
    data: str
    results: Mapping[str, Result]
    own: Mapping[str, Result]
    trained_on: int | None
    images: int
    classes: Sequence[Detections]
    shared: str = ""

    def sentences(self) -> list[str]:
        """The weights and the data of the evaluation, and what its figures cannot show."""
        lines = [f"{self.weights}, evaluated on {self.data}."]
        if self.trained_on is None:
            lines.append("Whether these images were trained on cannot be seen.")
        elif self.trained_on:
            lines.append(
                f"{self.trained_on} of these {self.images} images are among those to train on, "
                f"{self.shared}, so results on these are too good. {REMEDY}"
            )
        return lines

    def to_dict(self) -> dict[str, float]:
        """The results by the names of :attr:`lambda_det.Run.evaluations`, such as "box AP"."""
        return by_label(self.results)

    def __repr__(self) -> str:  # which the last line of a notebook's cell shows
        rows = []
        for name, result in self.results.items():
            own = self.own.get(name)
            value = f"{result.value:.1f}{result.interval}"
            label = label_of(name, with_weights=False)
            rows.append((label, value, f"{own.value:.1f}" if own else ""))
        head = ("", "here", "at the run's own evaluation (part val of own data)")
        sections = ["\n".join(self.sentences()), tabulate(rows, head, disable_numparse=True)]
        heads = [head for head, metric in columns().items() if metric.is_drawn]
        for detections in self.classes:
            classes = [
                (printable(c.name), c.objects, *(_figure(c.values[head]) for head in heads))
                for c in sorted(detections.classes, key=lambda c: -c.objects)
            ]
            sections.append(
                tabulate(classes, (detections.shapes, "objects", *heads), disable_numparse=True)
            )
        sections.append(f"Predictions are in {self.folder}")
        return "\n\n".join(sections)


def _figure(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.1f}"


def evaluate(
    run: str | Path,
    *,
    data: str | None = None,
    part: str | None = None,
    labels: str | None = None,
    images: str | None = None,
    output: str | Path | None = None,
    checkpoint: str = "best",
    raw: bool = False,
    opts: Sequence[str] = (),
) -> ResultsOnData:
    """Evaluate a trained detector, and write the results to a separate folder.

    Args:
        run: its folder, or one of its checkpoints.
        data: the folder of a data set; None for the run's.
        part: "train", "val" or "test"; None for the test part, or the only existing one.
        labels, images: a file or folder of labels in place of ``data``, and its images.
        output: the folder for the results, new or of an earlier evaluation, whose results are
            replaced; None for one below "evaluations" of the run's, which an evaluation of other
            data, weights or keys does not take.
        checkpoint, raw, opts: of :func:`lambda_det.detection.saved_run.open_run`.

    Raises:
        UserError: one sentence on what cannot work.
    """
    saved = open_run(run, checkpoint, raw=raw, opts=opts)
    home = Path(saved.origin.file).parent
    with (
        tempfile.TemporaryDirectory(prefix="lambda_det_") as temporary,
        BufferedLog(quiet=True) as log,
    ):
        chosen = choose_data(saved, home, data, part, labels, images, Path(temporary))
        name = identifying_stem(chosen.labels) if chosen else "own"
        keys = f" with {' '.join(opts)}" if opts else ""
        default = f"{name}_step_{saved.origin.step}{'_raw' if raw else ''}"
        if keys:
            default += f"_{hashlib.sha256(keys.encode()).hexdigest()[:8]}"
        folder = Path(output or home / "evaluations" / default)
        with disk_of(folder):
            _refuse_folder(folder)
            if chosen:
                chosen = chosen._replace(labels=str(keep_file(chosen.labels, folder)))
            task = DetectionTask(_configuration(saved, folder, chosen)).prepare(train=False)
            task.check_weights(saved.content, saved.origin.file)
            task.check_data(train=False)
            mark_output(folder)
            _remove_results(folder)
            log.open(str(folder))
            RunFolder(folder).save_config(task.dump())
            values = _evaluated(task, saved)
    results = _results(saved, folder, task, values, chosen.source if chosen else "", keys)
    about = {
        "run": str(home.absolute()),
        "sentences": results.sentences(),
        "results": {name: result._asdict() for name, result in results.results.items()},
        "own": {name: result._asdict() for name, result in results.own.items()},
    }
    with disk_of(folder):
        replace_text(folder / EVALUATION, json.dumps(about, indent=1))
    return results


# ------------------------------------------------------------------------------------- its folder
def _refuse_folder(folder: Path) -> None:
    """Refuse a folder that is neither new nor of an earlier evaluation."""
    refuse_unwritable(folder)
    RunFolder(folder).refuse_other_run()
    if any(folder.glob("*")) and not (folder / MARK).is_file():
        raise ConfigError(
            f"--output {folder} was not written by an evaluation; give a new folder, or that of an "
            "earlier evaluation, whose results are replaced."
        )


def _remove_results(folder: Path) -> None:
    """Remove the results of an earlier evaluation, which may be of other weights and data."""
    for name in ("inference", "inference_EMA", "inference_TTA"):
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in (EVALUATION, "log.txt"):
        (folder / name).unlink(missing_ok=True)


# ----------------------------------------------------------------------------------- the evaluation
def _configuration(saved: SavedRun, folder: Path, data: Part | None) -> CfgNode | DictConfig:
    """The configuration of the run with other data and another folder."""
    config = copy.deepcopy(saved.config)
    if isinstance(config, DictConfig):
        config.train.output_dir = str(folder)
        return config
    config.OUTPUT_DIR, config.MODEL.WEIGHTS = str(folder), saved.origin.file
    # may have been moved since, and is not needed
    if not Path(config.DATASETS.TRAIN_IMAGES).is_dir():
        config.DATASETS.TRAIN_JSON = config.DATASETS.TRAIN_IMAGES = ""
    if data:
        config.DATASETS.TEST_JSON = os.path.abspath(data.labels)
        config.DATASETS.TEST_IMAGES = os.path.abspath(data.images)
    return config


def _evaluated(task: DetectionTask, saved: SavedRun) -> Results:
    """Evaluate the weights of a run on the data of a task."""
    model, averaged = task.build_model(), saved.origin.averaged
    load(model, saved.origin.file, saved.content, complete=True, averaged=averaged)
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints
        return task.evaluate({EMA if averaged else RAW: model}, final=True)


def _results(
    saved: SavedRun, folder: Path, task: DetectionTask, values: Results, source: str, keys: str
) -> ResultsOnData:
    """The figures of an evaluation beside the run's own; ``source`` is "" for the run's data, and
    ``keys`` say what was changed.
    """
    home, averaged = Path(saved.origin.file).parent, saved.origin.averaged
    names = [name for name in task.components.test_names if is_coco(name)]
    files = [path for name in names for path in file_report(*registered_files(name)).paths]
    trained_on, shared = None, ""
    if trained := _trained_images(saved.config):
        pairs, shared = shared_copies({"train": trained, "test": files})
        trained_on = len(pairs)
    classes: Sequence[Detections] = ()
    with contextlib.suppress(UserError):  # the model predicts semantic masks, or nothing
        classes = evaluate_run(folder).results
    where = printable((source or ", ".join(task.components.test_names)) + keys)
    metrics = [{"iteration": 0, **flatten_results_dict(values)}]
    return ResultsOnData(
        folder=folder,
        weights=str(saved.origin),
        data=f"{counted(len(files), 'image')} of {where}",
        results=results_of(metrics, averaged),
        own=results_of(RunFolder(home).metrics(), averaged, saved.origin.step),
        trained_on=trained_on,
        shared=shared,
        images=len(files),
        classes=classes,
    )


def _trained_images(config: CfgNode | DictConfig) -> list[str]:
    """The files on which a run was trained; [] where that is unknown."""
    if isinstance(config, CfgNode) and config.DATASETS.TRAIN_JSON:
        with contextlib.suppress(UserError):
            return file_report(config.DATASETS.TRAIN_JSON, config.DATASETS.TRAIN_IMAGES).paths
    return []
