"""An exported detector beside the run's own on validation images: AP, differences, time."""

from __future__ import annotations

import contextlib
import copy
import io
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.data import MetadataCatalog
from detectron2.structures import Instances
from omegaconf import DictConfig

from lambda_det.detection.data import classes
from lambda_det.detection.data.records import read_image
from lambda_det.detection.evaluation import TolerantCOCOEvaluator
from lambda_det.detection.task import DetectionTask
from lambda_det.errors import UserError
from lambda_det.export.exported import ExportedDetector, as_input

__all__ = ["Proof", "prove"]

MOST = 0.1  # by which AP may differ
SAME = 1e-3  # pixels, and parts of scores and masks: instances that differ less are the same


@dataclass
class Proof:
    """What a run's detector and its exported file find on the same images.

    Attributes:
        where: the images, or why there are none.
        rows: of the run and of the file, AP by kind and seconds an image.
        differences: largest ones on images with the same instances: of boxes in pixels, of scores,
            and of masks the share of pixels.
        others: number of images on which instances differ in number or class.
    """

    where: str
    rows: dict[str, tuple[float, float]] = field(default_factory=dict)
    differences: dict[str, float] = field(default_factory=dict)
    others: int = 0

    @property
    def passed(self) -> bool:
        if not self.others and all(value < SAME for value in self.differences.values()):
            return True  # AP may change all the same, where objects of two images score alike
        ap = [pair for name, pair in self.rows.items() if name.endswith("AP")]
        return all(np.allclose(*pair, rtol=0, atol=MOST, equal_nan=True) for pair in ap)

    def __str__(self) -> str:
        if not self.rows:
            return f"AP not compared: {self.where}"
        lines = [f"{self.where}:", f"  {'':<18}{'run':>10}{'file':>10}"]
        for name, (run, file) in self.rows.items():
            lines.append(f"  {name:<18}{run:>10.3f}{file:>10.3f}")
        found = ", ".join(f"{name} {value:.1e}" for name, value in self.differences.items())
        lines.append(f"  largest differences: {found}; other instances on {self.others} images")
        return "\n".join(lines)

    def add(self, run: Instances, file: Instances) -> None:
        """Compare what both find on another image."""
        if len(run) != len(file) or not torch.equal(run.pred_classes, file.pred_classes):
            self.others += 1
        elif len(run):
            found = {
                "boxes": (run.pred_boxes.tensor - file.pred_boxes.tensor).abs().max(),
                "scores": (run.scores - file.scores).abs().max(),
            }
            if run.has("pred_masks"):
                found["masks"] = (run.pred_masks != file.pred_masks).float().mean()
            for name, value in found.items():
                self.differences[name] = max(self.differences.get(name, 0.0), float(value))


@torch.no_grad()
def prove(
    cfg: CfgNode | DictConfig,
    known: Mapping[str, Any],
    model: Callable[[list[dict[str, Any]]], list[dict[str, Any]]],
    limit: int,
    file: ExportedDetector | None,
) -> Proof:
    """Evaluate a run's detector and its file on validation images.

    Args:
        cfg: of the run.
        known: what it knows of its classes.
        model: the detector.
        limit: number of images, from the first ones.
        file: the same detector exported; None where it is not known how its images are resized.
    """
    cfg = copy.deepcopy(cfg)
    if isinstance(cfg, CfgNode):
        cfg.defrost()
    try:
        task = DetectionTask(cfg)
        task.register_data()
        if limit < 1 or not task.parts.test_sets:
            return Proof("there are no validation images" if limit > 0 else "--proof is 0")
        name = task.parts.test_sets[0]
        if (kind := MetadataCatalog.get(name).get("evaluator_type")) not in (None, "coco"):
            return Proof(f"{name} is evaluated as {kind}, and only AP as COCO has it is compared")
        classes.align(task.parts.detector, [name], known, "the run")
        task.check_data(train=False)
        loader = task.parts.make_test_loader(name)
    except UserError as error:
        return Proof(str(error))
    if file is None:
        return Proof("the evaluation of the run does more to images than to resize them")
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        has_masks = {"masks", "pred_masks"}.intersection(file.described["outputs"])
        tasks = ("bbox", "segm") if has_masks else ("bbox",)
        evaluators = [TolerantCOCOEvaluator(name, tasks, output_dir=folder) for _ in range(2)]
        for evaluator in evaluators:
            evaluator.reset()
        proof, ids, seconds = Proof(""), [], np.zeros(2)
        for entry in islice(chain.from_iterable(loader), limit):
            image = read_image(entry)
            image = as_input(image if file.channels == "BGR" else image[..., ::-1], file.resize)
            times = [time.perf_counter()]
            found = [model([entry])[0]["instances"].to("cpu")]
            times.append(time.perf_counter())
            found += [instances.to("cpu") for instances in file([image])]
            seconds += np.diff([*times, time.perf_counter()])
            proof.add(*found)
            for evaluator, instances in zip(evaluators, found, strict=True):
                evaluator.process([entry], [{"instances": instances}])
            ids.append(entry["image_id"])
        results = [evaluator.evaluate(img_ids=ids) for evaluator in evaluators]
    proof.where = f"{len(ids)} images of {name}"
    proof.rows = {f"{kind} AP": tuple(r[kind]["AP"] for r in results) for kind in tasks}
    proof.rows["seconds an image"] = tuple(seconds / max(len(ids), 1))
    return proof
