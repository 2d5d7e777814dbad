"""Exported detectors, called as models of Detectron2 are."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from detectron2.data.transforms import AugInput, AugmentationList, ResizeTransform, Transform
from detectron2.modeling.postprocessing import detector_postprocess
from detectron2.structures import Boxes, Instances
from torch import Tensor
from torch.nn.functional import interpolate

from lambda_det.detection.data.jitter import ResizeShortestEdgeAtLeastOnePixel
from lambda_det.distributed.launch import check_device
from lambda_det.errors import ConfigError, DataError, WeightsError, refused
from lambda_det.export.formats import FORMATS
from lambda_det.export.networks import kept
from lambda_det.export.onnx_file import Runner

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


class ResizeInto(ResizeShortestEdgeAtLeastOnePixel):
    """The same, and smaller where an image would not fit into a height and width."""

    def __init__(self, shortest: int, longest: int, fixed: Sequence[int]) -> None:
        super().__init__([shortest] * 2, longest)
        self.fixed = fixed

    def get_transform(self, image: np.ndarray) -> Transform:
        resize = super().get_transform(image)
        sides = (
            (resize.new_h, resize.new_w) if hasattr(resize, "new_h") else image.shape[:2]
        )  # with a size of 0 it does nothing
        scale = min(1.0, *(most / side for most, side in zip(self.fixed, sides, strict=True)))
        return ResizeTransform(
            *image.shape[:2], *(max(int(side * scale + 0.5), 1) for side in sides)
        )


class ExportedDetector:
    """Finds the instances of images made by :func:`as_input`.

    Attributes:
        described: what the file, or that beside it, says.
        channels: of its images, "BGR" or "RGB".
        resize: what :func:`as_input` does to its images.
        batch: images that it takes at once: 1, another number, or 0 for any.
    """

    def __init__(
        self,
        path: Path,
        device: str | None = None,
        described: Mapping[str, Any] | None = None,
        read: Callable[[Path, list[str], torch.device], Runner] | None = None,
    ) -> None:
        """
        Args:
            path: of the detector.
            device: None for that where it was exported.
            described: None for what the file, or that beside it, says.
            read: None for the reader of its format.

        Raises:
            ConfigError: the device or a package is missing, or the file is no detector.
            DataError: the file beside it is missing or something else.
            WeightsError: it cannot be loaded.
        """
        form = FORMATS[path.suffix]
        beside = path if form.about else sidecar(path)
        what = f"{beside}, which lambda-det export writes, is missing or is something else"
        with refused(DataError, what, "give a detector with it", Exception):
            about = described or (form.about(path) if form.about else None)
            about = about or json.loads(sidecar(path).read_text("utf-8"))
            channels, shortest, longest = (
                about[key] for key in ("input_format", "min_size_test", "max_size_test")
            )
            names, where = about["outputs"], torch.device(about["device"])
        if device:
            where = check_device(device, 1, "--device")
        if not {"boxes", "pred_boxes"} & set(names):
            raise ConfigError(f"{path} is no detector: its outputs are {', '.join(names)}.")
        # Each runtime has its own
        with refused(WeightsError, f"{path} cannot be loaded", "", Exception):
            self._run = (read or form.read)(path, names, where)
        self._path, self._device, self.described = path, where, about
        self.batch, fixed = about.get("batch", 1), about.get("fixed")
        # A graph of ONNX that normalises takes RGB whatever its run takes
        self._outside = outside = about.get("outside", ())
        rgb = "batch" in about or about.get("resizes") or "resize" in outside
        self._rgb = bool(rgb) and "normalise" not in outside
        self.channels = "RGB" if self._rgb else channels
        resize = [
            ResizeInto(shortest, longest, fixed)
            if fixed
            else ResizeShortestEdgeAtLeastOnePixel([shortest] * 2, longest)
        ]
        self.resize = AugmentationList([] if about.get("resizes") else resize)

    def __call__(self, inputs: Sequence[Mapping[str, Any]]) -> list[Instances]:
        """The instances of each image, in its own pixels and with masks pasted.

        Raises:
            DataError: the file cannot compute an image of this size.
        """
        found, step = [], self.batch or max(len(inputs), 1)
        for start in range(0, len(inputs), step):
            part = inputs[start : start + step]
            size = "x".join(map(str, part[0]["image"].shape[:0:-1]))
            what = f"{self._path} cannot compute an image of {size} pixels"
            with refused(DataError, what, "", Exception):  # each runtime has its own
                outputs = self._outputs([entry["image"] for entry in part])
            for entry, values in zip(part, outputs, strict=True):
                instances = Instances(tuple(entry["image"].shape[1:]))
                for name, value in self._chosen(values).items():
                    name = name if name.startswith(("pred_", "scores")) else f"pred_{name}"
                    name = "pasted" if name == "pred_masks" and value.dim() == 3 else name
                    instances.set(name, Boxes(value) if name == "pred_boxes" else value)
                instances = detector_postprocess(instances, entry["height"], entry["width"])
                if instances.has("pasted"):
                    height, width = entry["image"].shape[1:]  # in a canvas
                    masks, size = instances.pasted[:, :height, :width], instances.image_size
                    resized = [
                        interpolate(mask[None, None].float(), size, mode="bilinear")[0] >= 0.5
                        for mask in masks
                    ]
                    instances.pred_masks = torch.cat([masks.new_zeros(0, *size), *resized])
                    instances.remove("pasted")
                found.append(instances)
        return found

    def _chosen(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Those of the candidates that NMS by class leaves, where the file has none."""
        if "nms" not in self._outside:
            return values
        there = kept(*(values[name] for name in ("boxes", "scores", "classes")), self.described)
        return {name: value[there] for name, value in values.items()}

    def _outputs(self, images: Sequence[Tensor]) -> list[dict[str, Tensor]]:
        """What the file finds on each image [3, H, W] of at most a batch."""
        if "batch" not in self.described:
            return [self._run(*self.fill([image.to(self._device)])) for image in images]
        outputs: list[dict[str, Tensor]] = [{}] * len(images)
        groups: dict[Any, list[int]] = {}  # one if the size is fixed
        for i, image in enumerate(images):
            groups.setdefault(self._sides(image), []).append(i)
        for members in groups.values():
            found = self._run(*self.fill([images[i] for i in members]))
            count = found.pop("count").tolist()
            for place, i in enumerate(members):
                outputs[i] = {name: x[place, : count[place]] for name, x in found.items()}
        return outputs

    def _sides(self, image: Tensor) -> tuple[int, ...]:
        """Of the canvas that an image [3, H, W] has by itself: more around it changes results."""
        stride, fixed = self.described["stride"], self.described["fixed"]
        return tuple(fixed or [side + -side % stride for side in image.shape[1:]])

    def fill(self, images: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What the file takes of images of one canvas, or of one: these, and of a batch sizes."""
        given = images
        if self._rgb:
            given = [image.permute(1, 2, 0).to(torch.uint8) for image in images]
        elif "normalise" in self._outside:
            mean, std = (
                images[0].new_tensor(self.described[f"pixel_{name}"])[:, None, None]
                for name in ("mean", "std")
            )
            given = [(image - mean) / std for image in images]
        if "batch" not in self.described:
            return (given[0],)
        sides = self._sides(images[0])
        sides = (*sides, 3) if self._rgb else (3, *sides)
        batch = given[0].new_zeros(self.batch or len(images), *sides)
        sizes = torch.ones(len(batch), 2, dtype=torch.int32)
        for i, image in enumerate(given):
            sizes[i] = torch.tensor(images[i].shape[1:])
            batch[i][tuple(map(slice, image.shape))] = image
        return batch, sizes
