"""Predictions as annotations in COCO's format, which labelling tools read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from lambda_det.detection.data.label_files import write_labels
from lambda_det.detection.prediction.predictor import Prediction
from lambda_det.detection.run_masks import RunMasks
from lambda_det.files import replace_text, writing_to


class Annotations:
    """Collects predictions, and writes them as one file of images, annotations and categories.

    Categories have the ids 1, 2, ... in the order of the detector's classes. Each annotation has a
    box, polygons where the detector has masks (run lengths for an empty mask), keypoints where it
    has them, and its score.

    Until they are written, they are kept as JSON, because polygons as Python's lists would take
    several times the memory.
    """

    def __init__(self, class_names: list[str] | None, *, for_hands: bool = False) -> None:
        """
        Args:
            class_names: of the detector.
            for_hands: polygons have few points and no specks, as
                :func:`lambda_det.detection.data.label_files.polygons` says. Otherwise they are
                the predicted masks, with all their pixels.
        """
        self._names, self._for_hands = class_names, for_hands
        self._images: list[str] = []
        self._sources: dict[str, Path] = {}
        self._annotations: list[str] = []
        self._highest = 0  # category

    def add(self, file_name: str, prediction: Prediction, source: Path | None = None) -> None:
        """Add the predictions of an image, whose file is ``source``."""
        height, width = prediction.instances.image_size
        image_id = len(self._images) + 1
        image = {"id": image_id, "file_name": file_name, "width": width, "height": height}
        self._images.append(json.dumps(image))
        if source:
            self._sources[file_name] = source
        instances, keypoints = prediction.instances, prediction.keypoints
        masks = RunMasks.of(instances.pred_masks) if instances.has("pred_masks") else None
        for index, (x0, y0, x1, y1) in enumerate(prediction.boxes.tolist()):
            annotation = {
                "id": len(self._annotations) + 1,
                "image_id": image_id,
                "category_id": int(prediction.classes[index]) + 1,
                "bbox": _rounded([x0, y0, x1 - x0, y1 - y0]),
                "area": round((x1 - x0) * (y1 - y0), 2),
                "iscrowd": 0,
                "segmentation": [],
                "score": round(float(prediction.scores[index]), 5),
            }
            if masks is not None:
                annotation["area"] = masks.area(index)
                # COCO's tools fail on an empty mask without any polygon
                outlines = masks.polygons(index, for_hands=self._for_hands)
                annotation["segmentation"] = outlines or masks.coco(index)
            if keypoints is not None:
                # COCO counts from the centre of the first pixel, Detectron2 from its corner
                points = [[x - 0.5, y - 0.5, 2] for x, y, _ in keypoints[index].tolist()]
                annotation["keypoints"] = _rounded(np.ravel(points).tolist())
                annotation["num_keypoints"] = len(points)
            self._highest = max(self._highest, annotation["category_id"])
            self._annotations.append(json.dumps(annotation))

    def save(self, path: Path, label_format: str = "coco") -> None:
        """Write the file, or a folder of another tool's labels.

        Args:
            path: of the file or folder.
            label_format: see :func:`lambda_det.detection.data.label_files.write_labels`.

        Raises:
            ConfigError: the file cannot be written.
            DataError: the folder cannot be written.
        """
        names = self._names or [str(index) for index in range(self._highest)]
        categories = [json.dumps({"id": i, "name": name}) for i, name in enumerate(names, start=1)]
        lists = {"images": self._images, "annotations": self._annotations}
        lists["categories"] = categories
        text = ", ".join(f'"{key}": [{", ".join(entries)}]' for key, entries in lists.items())
        text = f'{{"info": {{"description": "by lambda_det"}}, {text}}}'
        if label_format != "coco":
            write_labels(json.loads(text), label_format, path, Path(), self._sources)
            return
        with writing_to(path):
            replace_text(path, text)


def _rounded(values: list[float]) -> list[float]:
    return [round(value, 2) for value in values]
