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

__all__ = ["MOST", "Proof", "prove"]

MOST = 0.1  # by which AP may differ
BATCH = 4  # of a file that takes any number
SAME = 1e-3  # pixels, and parts of scores and masks: instances that differ less are the same


@dataclass
class Proof:
    """What a run's detector and its exported file find on the same images.

    Attributes:
        where: the images, or why there are none.
        names: of the runtimes that ran the file.
        rows: of the run, and of the file in each runtime, AP by kind and seconds an image.
        differences: by runtime, largest ones on images with the same instances: of boxes in pixels,
            of scores, and of masks the share of pixels.
        others: by runtime, number of images on which instances differ in number or class.
        most: by which AP may differ.
    """

    where: str
    names: list[str] = field(default_factory=list)
    rows: dict[str, list[float]] = field(default_factory=dict)
    differences: dict[str, dict[str, float]] = field(default_factory=dict)
    others: dict[str, int] = field(default_factory=dict)
    most: float = MOST

    @property
    def passed(self) -> bool:
        return all(self._passed(index) for index in range(len(self.names)))

    def _passed(self, index: int) -> bool:
        name = self.names[index]
        largest = self.differences.get(name, {}).values()
        if not self.others.get(name) and all(value < SAME for value in largest):
            return True  # AP may change all the same, where objects of two images score alike
        pairs = [(row[0], row[index + 1]) for key, row in self.rows.items() if key.endswith("AP")]
        return all(np.allclose(*pair, rtol=0, atol=self.most, equal_nan=True) for pair in pairs)

    def __str__(self) -> str:
        if not self.rows:
            return f"AP not compared: {self.where}"
        lines = [
            f"{self.where}:",
            f"  {'':<18}{'run':>10}" + "".join(f"{name:>16}" for name in self.names),
        ]
        for name, (run, *files) in self.rows.items():
            lines.append(f"  {name:<18}{run:>10.3f}" + "".join(f"{ap:>16.3f}" for ap in files))
        for name in self.names:
            found = self.differences.get(name, {}).items()
            found = ", ".join(f"{what} {value:.1e}" for what, value in found) or "none"
            lines.append(
                f"  largest differences, {name}: {found}; other instances on "
                f"{self.others.get(name, 0)} images"
            )
        return "\n".join(lines)

    def add(self, name: str, run: Instances, file: Instances) -> None:
        """Compare what both find on another image."""
        if len(run) != len(file) or not torch.equal(run.pred_classes, file.pred_classes):
            self.others[name] = self.others.get(name, 0) + 1
        elif len(run):
            found = {
                "boxes": (run.pred_boxes.tensor - file.pred_boxes.tensor).abs().max(),
                "scores": (run.scores - file.scores).abs().max(),
            }
            if run.has("pred_masks"):
                found["masks"] = (run.pred_masks != file.pred_masks).float().mean()
            largest = self.differences.setdefault(name, {})
            for what, value in found.items():
                largest[what] = max(largest.get(what, 0.0), float(value))


@torch.no_grad()
def prove(
    cfg: CfgNode | DictConfig,
    known: Mapping[str, Any],
    model: Callable[[list[dict[str, Any]]], list[dict[str, Any]]],
    limit: int,
    files: Mapping[str, ExportedDetector],
    most: float = MOST,
) -> Proof:
    """Evaluate a run's detector and its file on validation images.

    Args:
        cfg: of the run.
        known: what it knows of its classes.
        model: the detector.
        limit: number of images, from the first ones.
        files: the same detector exported, by the name of what runs it; none where it is not known
            how its images are resized. A file for batches gets as many images at once.
        most: by which AP may differ.
    """
    cfg = copy.deepcopy(cfg)
    if isinstance(cfg, CfgNode):
        cfg.defrost()
    try:
        task = DetectionTask(cfg)
        task.register_data()
        if limit < 1 or not task.parts.test_sets:
            return Proof("there are no validation images" if limit > 0 else "--proof is 0")
        data = task.parts.test_sets[0]
        if (kind := MetadataCatalog.get(data).get("evaluator_type")) not in (None, "coco"):
            return Proof(f"{data} is evaluated as {kind}, and only AP as COCO has it is compared")
        classes.align(task.parts.detector, [data], known, "the run")
        task.check_data(train=False)
        loader = task.parts.make_test_loader(data)
    except UserError as error:
        return Proof(str(error))
    if not files:
        return Proof("the evaluation of the run does more to images than to resize them")
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        first = next(iter(files.values()))
        has_masks = {"masks", "pred_masks"}.intersection(first.described["outputs"])
        tasks = ("bbox", "segm") if has_masks else ("bbox",)
        names = ["run", *files]
        evaluators = [TolerantCOCOEvaluator(data, tasks, output_dir=folder) for _ in names]
        for evaluator in evaluators:
            evaluator.reset()
        proof, ids, seconds = Proof("", list(files), most=most), [], np.zeros(len(names))
        entries = islice(chain.from_iterable(loader), limit)
        while batch := list(islice(entries, first.batch or BATCH)):
            images = [read_image(entry) for entry in batch]
            if first.channels == "RGB":
                images = [image[..., ::-1] for image in images]
            images = [as_input(image, first.resize) for image in images]
            times, found = [time.perf_counter()], []
            found.append([model([entry])[0]["instances"].to("cpu") for entry in batch])
            times.append(time.perf_counter())
            for file in files.values():
                found.append([instances.to("cpu") for instances in file(images)])
                times.append(time.perf_counter())
            seconds += np.diff(times)
            for i, entry in enumerate(batch):
                for evaluator, name, instances in zip(evaluators, names, found, strict=True):
                    evaluator.process([entry], [{"instances": instances[i]}])
                    if name != "run":
                        proof.add(name, found[0][i], instances[i])
                ids.append(entry["image_id"])
        results = [evaluator.evaluate(img_ids=ids) for evaluator in evaluators]
    proof.where = f"{len(ids)} images of {data}"
    proof.rows = {f"{kind} AP": [r[kind]["AP"] for r in results] for kind in tasks}
    proof.rows["seconds an image"] = list(seconds / max(len(ids), 1))
    return proof
