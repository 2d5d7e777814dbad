"""Compare an exported detector with its run: the same instances, on validation images also AP.

What can be compared is settled before a graph is recorded: validation images of the run
(:func:`validation_images`), photographs, or, where the user typed that nothing is, nothing.
"""

from __future__ import annotations

import contextlib
import copy
import io
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from operator import length_hint
from typing import Any

import numpy as np
import torch
from detectron2.data import MetadataCatalog
from detectron2.structures import Instances, pairwise_iou
from torch import Tensor

from lambda_det.detection.data import classes, registration
from lambda_det.detection.data.records import as_input, read_image
from lambda_det.detection.data.tile_pixels import read_tile
from lambda_det.detection.evaluation import TolerantCOCOEvaluator
from lambda_det.detection.saved_run import SavedRun
from lambda_det.detection.task import DetectionTask
from lambda_det.detection.tiled import WholeImages
from lambda_det.errors import ConfigError, Stage, counted, duration
from lambda_det.export import MOST
from lambda_det.export.exported import ExportedDetector

Detector = Callable[[list[dict[str, Any]]], list[dict[str, Any]]]
BATCH = 4  # images at once, for a file that takes any number
SAME = 1e-3  # instances that differ less, in pixels and in shares of scores and masks, are the same
OVERLAP = 0.5  # least IoU of a pair; NMS leaves no two boxes of a class that overlap more


@dataclass
class Proof:
    """The detections of a run's detector and of its exported file on the same images.

    Attributes:
        where: the validation images; "" for none.
        rows: of the run and of the file, AP by kind.
        differences: the largest differences in a pair of instances, see :func:`pairs`: of boxes in
            pixels, of scores, and of masks as a share of the image's pixels.
        alone: number of instances that belong to no pair.
        most: by which AP may differ.
        photographs: number of those that the user named, which are compared as well.
    """

    where: str = ""
    rows: dict[str, tuple[float, float]] = field(default_factory=dict)
    differences: dict[str, float] = field(default_factory=dict)
    alone: int = 0
    most: float = MOST
    photographs: int = 0

    @property
    def compared(self) -> bool:
        """Whether anything was detected."""
        return bool(self.differences or self.alone)

    @property
    def passed(self) -> bool:
        if not self.alone and all(value < SAME for value in self.differences.values()):
            # AP may change nevertheless, where objects of two images have nearly the same score
            return True
        return bool(self.rows) and all(
            np.allclose(*row, rtol=0, atol=self.most, equal_nan=True) for row in self.rows.values()
        )

    def __str__(self) -> str:
        if not self.compared:
            return "note: NOT COMPARED with the run"
        lines = [f"{self.where}:", f"  {'':<18}{'run':>10}{'file':>10}"] if self.rows else []
        for name, (run, file) in self.rows.items():
            lines.append(f"  {name:<18}{run:>10.3f}{file:>10.3f}")
        differences = [f"{what} {value:.1e}" for what, value in self.differences.items()]
        named = f", with {counted(self.photographs, 'photograph')} of --images"
        lines.append(
            f"  largest differences of the same instances{named if self.photographs else ''}: "
            f"{', '.join(differences) or 'none'}; "
            f"instances that only one of both finds: {self.alone}"
        )
        if not self.passed and self.rows:
            lines.append(
                f"note: AP may differ by {self.most:g}, and on few images one box may make that; "
                "--apart AP allows for more"
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


def _detections(detector: Detector, inputs: list[dict[str, Any]]) -> list[Instances]:
    """What a detector finds on each image."""
    with torch.no_grad():
        return [output["instances"].to("cpu") for output in detector(inputs)]


@dataclass(frozen=True)
class ValidationImages:
    """What a detector's file is compared on.

    Attributes:
        name: of their data set, which is registered.
        loader: of these images, or of their tiles where the run cuts them.
        limit: number of them, from the first ones; of tiles all of the last image are taken.
        most: by which AP may differ.
    """

    name: str
    loader: Iterable[list[dict[str, Any]]]
    limit: int
    most: float


def validation_images(run: SavedRun, limit: int, most: float = MOST) -> ValidationImages:
    """The validation images of a run, before its detector is exported.

    Raises:
        UserError: says why there are none on which AP can be compared.
    """
    task = DetectionTask(copy.deepcopy(run.config))
    task.register_data()
    components = task.components
    if not components.test_sets:
        raise ConfigError("The run has no validation images.")
    data = components.test_sets[0]
    if (kind := MetadataCatalog.get(data).get("evaluator_type")) not in (None, "coco"):
        raise ConfigError(f"{data} is evaluated as {kind}, and only AP as COCO has it is compared.")
    classes.check(components.detector, [data], run.classes, "the run")
    task.check_data(train=False)
    loader = components.make_test_loader(data)
    if not {"input_format", "min_size_test"} <= run.about().keys():
        raise ConfigError("The evaluation of the run does more to images than to resize them.")
    return ValidationImages(data, loader, limit, most)


def prove_on(images: Iterable[str], model: Detector, file: ExportedDetector, proof: Proof) -> None:
    """Compare a detector and its file on files of images.

    Raises:
        DataError: one cannot be read, or has more than 8 bits a channel.
    """
    both = (model, file.about.get("input_format", "BGR")), (file, file.channels)
    for name in images:
        found = []
        for detector, channels in both:
            image = as_input(read_image({"file_name": name}, channels), file.resize)
            found += _detections(detector, [image])
        proof.add(*found)
        proof.photographs += 1


def prove(images: ValidationImages, model: Detector, file: ExportedDetector, stage: Stage) -> Proof:
    """Evaluate a run's detector and its file on validation images.

    Args:
        images: of the run.
        model: its detector.
        file: the same detector exported. It gets as many images at once as it takes.
        stage: is told how long it takes, after the first images.
    """
    proof, ids, seconds = Proof(most=images.most), [], 0.0
    tasks = ("bbox", "segm") if "masks" in file.about["outputs"] else ("bbox",)
    # pycocotools prints, which is kept from the screen
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        evaluators = [
            WholeImages(TolerantCOCOEvaluator(images.name, tasks, output_dir=folder))
            for _ in range(2)
        ]
        for evaluator in evaluators:
            evaluator.reset()
        entries = _first(chain.from_iterable(images.loader), images.limit)
        dataset = getattr(images.loader, "dataset", None)
        total = min(images.limit, length_hint(dataset, images.limit))  # where it has no length
        while batch := list(islice(entries, file.batch or BATCH)):
            inputs = [as_input(_pixels(entry, file.channels), file.resize) for entry in batch]
            start = time.perf_counter()
            of_run = [_detections(model, [entry])[0] for entry in batch]
            of_file = _detections(file, inputs)
            seconds += time.perf_counter() - start
            for entry, *both in zip(batch, of_run, of_file, strict=True):
                for evaluator, instances in zip(evaluators, both, strict=True):
                    evaluator.process([entry], [{"instances": instances}])
                proof.add(*both)
                ids.append(entry["image_id"])
            rest = duration((total - len(ids)) * seconds / len(ids))
            if len(ids) == len(batch) < total:
                stage.say(
                    f"AP of the run and of the file on {total} images or tiles of "
                    f"{registration.given_name(images.name)}: "
                    f"about {rest}; --proof N takes another number"
                )
            stage.left = f"{len(ids)} of {total} images or tiles, about {rest} left"
        stage.left = "AP is computed"
        results = [evaluator.evaluate(img_ids=[*dict.fromkeys(ids)]) for evaluator in evaluators]
    proof.where = f"{counted(len({*ids}), 'image')} of {registration.given_name(images.name)}"
    proof.rows = {f"{kind} AP": tuple(r[kind]["AP"] for r in results) for kind in tasks}
    return proof


def _first(entries: Iterable[dict[str, Any]], limit: int) -> Iterator[dict[str, Any]]:
    """The first images; or tiles, up to the last one of an image."""
    for number, entry in enumerate(entries):
        if number >= limit and tuple(entry.get("tile", (0, 0))[:2]) == (0, 0):
            return
        yield entry


def _pixels(entry: dict[str, Any], channels: str) -> np.ndarray:
    return read_tile(entry, channels) if "tile" in entry else read_image(entry, channels)
