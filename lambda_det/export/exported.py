"""Exported detectors, called as models of Detectron2 are."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from detectron2.data.transforms import AugInput, AugmentationList
from detectron2.modeling.postprocessing import detector_postprocess
from detectron2.structures import Boxes, Instances

from lambda_det.detection.data.jitter import ResizeShortestEdgeAtLeastOnePixel
from lambda_det.distributed.launch import check_device
from lambda_det.errors import ConfigError, DataError, WeightsError, reason
from lambda_det.export.formats import format_of

__all__ = ["ExportedDetector", "as_input", "sidecar"]


def sidecar(path: Path) -> Path:
    """The JSON file beside an exported network."""
    return path.with_name(f"{path.name}.json")


def as_input(image: np.ndarray, augmentations: AugmentationList) -> dict[str, Any]:
    """An image [H, W, 3] as Detectron2's models take it, resized."""
    resized = AugInput(image)
    augmentations(resized)
    tensor = torch.as_tensor(resized.image.astype("float32").transpose(2, 0, 1))
    return {"image": tensor, "height": image.shape[0], "width": image.shape[1]}


class ExportedDetector:
    """Finds the instances of images made by :func:`as_input`.

    Attributes:
        described: what the file beside it says.
        channels: of its images, "BGR" or "RGB".
        resize: what :func:`as_input` does to its images.
    """

    def __init__(
        self,
        path: Path,
        device: str | None = None,
        described: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            path: of the detector.
            device: None for that where it was exported.
            described: None for what the file beside it says.

        Raises:
            ConfigError: the device is missing, or the file is no detector.
            DataError: the file beside it is missing or something else.
            WeightsError: it cannot be loaded.
        """
        beside = sidecar(path)
        try:
            about = described or json.loads(beside.read_text("utf-8"))
            channels, shortest, longest = (
                about[key] for key in ("input_format", "min_size_test", "max_size_test")
            )
            names, where = about["outputs"], torch.device(about["device"])
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise DataError(
                f"{beside}, which lambda-det export writes beside a detector, is missing or "
                f"is something else ({reason(error)}); give a detector with it."
            ) from error
        if device:
            where = check_device(device, 1, "--device")
        if not {"boxes", "pred_boxes"} & set(names):
            raise ConfigError(f"{path} is no detector: its outputs are {', '.join(names)}.")
        try:
            self._run = format_of(path).read(path, names, where)
        except Exception as error:  # each runtime has its own
            raise WeightsError(f"{path} cannot be loaded ({reason(error)}).") from error
        self._path, self._device, self.described = path, where, about
        # The graph of ONNX resizes, and takes RGB whatever its run takes
        resize = [ResizeShortestEdgeAtLeastOnePixel([shortest] * 2, longest)]
        self.channels, self.resize = channels, AugmentationList(resize)
        if about.get("resizes"):
            self.channels, self.resize = "RGB", AugmentationList([])

    def __call__(self, inputs: Sequence[Mapping[str, Any]]) -> list[Instances]:
        """The instances of each image, in its own pixels and with masks pasted.

        Raises:
            DataError: the file cannot compute an image of this size.
        """
        found = []
        for entry in inputs:
            image = entry["image"]
            try:
                outputs = self._run(image.to(self._device))
            except Exception as error:  # a guard of its graph; each runtime has its own
                size = "x".join(map(str, image.shape[:0:-1]))
                raise DataError(
                    f"{self._path} cannot compute an image of {size} pixels ({reason(error)})."
                ) from error
            instances = Instances(tuple(image.shape[1:]))
            for name, value in outputs.items():
                name = name if name.startswith(("pred_", "scores")) else f"pred_{name}"
                instances.set(name, Boxes(value) if name == "pred_boxes" else value)
            found.append(detector_postprocess(instances, entry["height"], entry["width"]))
        return found
