"""Compare an exported detector with the run's own on validation images: AP, differences, time."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from detectron2.data import MetadataCatalog
from detectron2.structures import Instances, pairwise_iou
from torch import Tensor

from lambda_det.detection.data import classes
from lambda_det.detection.data.records import as_input, read_image
from lambda_det.detection.data.tile_pixels import read_tile
from lambda_det.detection.evaluation import TolerantCOCOEvaluator
from lambda_det.detection.saved_run import SavedRun
from lambda_det.detection.task import DetectionTask
from lambda_det.detection.tiled import WholeImages
from lambda_det.errors import UserError, counted, duration
from lambda_det.export.detections import proposals_in_order
from lambda_det.export.exported import ExportedDetector

__all__ = ["MOST", "Proof", "prove"]

logger = logging.getLogger(__name__)

MOST = 0.1  # by which AP may differ
BATCH = 4  # images at once, for a file that takes any number
SAME = 1e-3  # instances that differ less, in pixels and in shares of scores and masks, are the same
OVERLAP = 0.5  # least IoU of a pair; NMS leaves no two boxes of a class that overlap more


@dataclass
class Proof:
    """The detections of a run's detector and of its exported file on the same images.

    Attributes:
        where: the images, or why there are none.
        rows: of the run and of the file, AP by kind and seconds an image or a tile.
        differences: the largest differences in a pair of instances, see :func:`pairs`: of boxes in
            pixels, of scores, and of masks as a share of the image's pixels.
        alone: number of instances that belong to no pair.
        most: by which AP may differ.
    """

    where: str
    rows: dict[str, tuple[float, float]] = field(default_factory=dict)
    differences: dict[str, float] = field(default_factory=dict)
    alone: int = 0
    most: float = MOST

    @property
    def passed(self) -> bool:
        if not self.alone and all(value < SAME for value in self.differences.values()):
            # AP may change nevertheless, where objects of two images have nearly the same score
            return True
        rows = [row for name, row in self.rows.items() if name.endswith("AP")]
        return all(np.allclose(*row, rtol=0, atol=self.most, equal_nan=True) for row in rows)

    def __str__(self) -> str:
        if not self.rows:
            return f"AP not compared: {self.where}"
        lines = [f"{self.where}:", f"  {'':<18}{'run':>10}{'file':>10}"]
        for name, (run, file) in self.rows.items():
            lines.append(f"  {name:<18}{run:>10.3f}{file:>10.3f}")
        differences = [f"{what} {value:.1e}" for what, value in self.differences.items()]
        lines.append(
            f"  largest differences of the same instances: {', '.join(differences) or 'none'}; "
            f"instances that only one of both finds: {self.alone}"
        )
        return "\n".join(lines)

    def add(self, run: Instances, file: Instances) -> None:
        """Compare the detections of both on one more image."""
        of_run, of_file = pairs(run, file)
        self.alone += len(run) + len(file) - 2 * len(of_run)
        if not len(of_run):
            return
        run, file = run[of_run], file[of_file]
        values = {
            "boxes": (run.pred_boxes.tensor - file.pred_boxes.tensor).abs().max(),
            "scores": (run.scores - file.scores).abs().max(),
        }
        if run.has("pred_masks"):
            differ = (run.pred_masks != file.pred_masks).flatten(1)
            values["masks"] = differ.sum(1).max() / differ.shape[1]
        for what, value in values.items():
            self.differences[what] = max(self.differences.get(what, 0.0), float(value))


def pairs(run: Instances, file: Instances) -> tuple[Tensor, Tensor]:
    """Find the instances that belong together: of one class, with boxes that overlap most.

    The order does not matter, because objects of nearly the same score may change places.

    Returns:
        The indices in both of each pair, int64 [P].
    """
    overlaps = pairwise_iou(run.pred_boxes, file.pred_boxes)
    overlaps[run.pred_classes[:, None] != file.pred_classes] = 0.0
    pairs = []
    while overlaps.numel() and overlaps.max() > OVERLAP:
        row, column = divmod(int(overlaps.argmax()), overlaps.shape[1])
        pairs.append((row, column))
        overlaps[row], overlaps[:, column] = 0.0, 0.0
    of_run, of_file = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).T
    return of_run, of_file


@torch.no_grad()
def prove(
    run: SavedRun,
    model: Callable[[list[dict[str, Any]]], list[dict[str, Any]]],
    limit: int,
    file: ExportedDetector,
    most: float = MOST,
    announce: Callable[[str], object] = logger.info,
) -> Proof:
    """Evaluate a run's detector and its file on validation images.

    Args:
        run: that was exported.
        model: its detector.
        limit: number of images, from the first ones; of tiles where the run cuts images, and then
            all tiles of the last image are there.
        file: the same detector exported. It gets as many images at once as it takes.
        most: by which AP may differ.
        announce: gets a sentence on how long it takes, after the first images.
    """
    try:
        task = DetectionTask(copy.deepcopy(run.config))
        task.register_data()
        if limit < 1 or not task.components.test_sets:
            return Proof("there are no validation images" if limit > 0 else "--proof is 0")
        data = task.components.test_sets[0]
        if (kind := MetadataCatalog.get(data).get("evaluator_type")) not in (None, "coco"):
            return Proof(f"{data} is evaluated as {kind}, and only AP as COCO has it is compared")
        classes.check(task.components.detector, [data], run.classes, "the run")
        task.check_data(train=False)
        loader = task.components.make_test_loader(data)
    except UserError as error:
        return Proof(str(error))
    if not {"input_format", "min_size_test"} <= file.about.keys():
        return Proof("the evaluation of the run does more to images than to resize them")
    proof, ids, seconds = Proof("", most=most), [], np.zeros(2)
    what = "tile" if task.components.tiling else "image"
    tasks = ("bbox", "segm") if "masks" in file.about["outputs"] else ("bbox",)
    screen = sys.stdout  # pycocotools prints, which is kept from it
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        evaluators = [
            WholeImages(TolerantCOCOEvaluator(data, tasks, output_dir=folder)) for _ in range(2)
        ]
        for evaluator in evaluators:
            evaluator.reset()
        entries = _first(chain.from_iterable(loader), limit)
        while batch := list(islice(entries, file.batch or BATCH)):
            images = [as_input(_pixels(entry, file.channels), file.resize) for entry in batch]
            times = [time.perf_counter()]
            with proposals_in_order():  # its sort is in the seconds of the run
                of_run = [model([entry])[0]["instances"].to("cpu") for entry in batch]
            times.append(time.perf_counter())
            of_file = [output["instances"].to("cpu") for output in file(images)]
            times.append(time.perf_counter())
            seconds += np.diff(times)
            for entry, *both in zip(batch, of_run, of_file, strict=True):
                for evaluator, instances in zip(evaluators, both, strict=True):
                    evaluator.process([entry], [{"instances": instances}])
                proof.add(*both)
                ids.append(entry["image_id"])
            if len(ids) == len(batch) < (total := _number(loader, limit)):
                rest = (total - len(ids)) * seconds.sum() / len(ids)
                with contextlib.redirect_stdout(screen):
                    announce(
                        f"AP of the run and of the file on {total} {what}s of {data}: about "
                        f"{duration(rest)}; --proof N takes another number, 0 none"
                    )
        results = [evaluator.evaluate(img_ids=[*dict.fromkeys(ids)]) for evaluator in evaluators]
    proof.where = f"{counted(len({*ids}), 'image')} of {data}"
    proof.rows = {f"{kind} AP": tuple(r[kind]["AP"] for r in results) for kind in tasks}
    proof.rows[f"seconds a{'n' * (what == 'image')} {what}"] = tuple(seconds / max(len(ids), 1))
    return proof


def _number(loader: Iterable[Any], limit: int) -> int:
    """The number of images, or of tiles, up to a limit that a loader without a size has."""
    dataset = getattr(loader, "dataset", None)
    return min(limit, len(dataset)) if hasattr(dataset, "__len__") else limit


def _first(entries: Iterable[dict[str, Any]], limit: int) -> Iterator[dict[str, Any]]:
    """The first images; or tiles, up to the last one of an image."""
    for number, entry in enumerate(entries):
        if number >= limit and tuple(entry.get("tile", (0, 0))[:2]) == (0, 0):
            return
        yield entry


def _pixels(entry: dict[str, Any], channels: str) -> np.ndarray:
    return read_tile(entry, channels) if "tile" in entry else read_image(entry, channels)
