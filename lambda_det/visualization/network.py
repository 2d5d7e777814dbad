"""A backbone with its weights, an image for it, and what its layers see and give."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from detectron2.config import CfgNode, instantiate
from detectron2.data.detection_utils import read_image
from detectron2.data.transforms import AugInput, AugmentationList
from detectron2.structures import ImageList
from omegaconf import OmegaConf
from torch import Tensor, nn

from lambda_det.detection.data.image_files import image_fault
from lambda_det.detection.data.jitter import ResizeShortestEdgeAtLeastOnePixel
from lambda_det.detection.lazy_config import LazyRun
from lambda_det.detection.lazy_trainer import trainer_of
from lambda_det.distributed.launch import check_device
from lambda_det.errors import DataError
from lambda_det.modeling.norm import convert_sync_norms
from lambda_det.weights.provenance import PixelSettings
from lambda_det.weights.reading import load_backbone_weights

__all__ = ["Input", "Seen", "load_image", "load_network", "watch"]


def load_network(
    cfg: CfgNode, weights: str | Path | None = None, *, file_pixels: bool = False
) -> tuple[nn.Module, PixelSettings]:
    """Build the backbone of a configuration, without an FPN around it, in evaluation mode.

    Args:
        cfg: of a detector, from YAML or a LazyConfig; MODEL.WEIGHTS is not looked at.
        weights: a checkpoint of the detector, of a classifier, or of the backbone alone; without
            it the weights are fresh, by PyTorch's seed.
        file_pixels: take the pixel settings that the file of weights says, if it says any, and not
            those of ``cfg``.

    Returns:
        The network and what becomes of an image before it.

    Raises:
        ConfigError: the device is not there, an option cannot work, or the weights are for images
            of other pixel settings.
        WeightsError: the weights cannot be read or do not fit.
    """
    check_device(cfg.MODEL.DEVICE, 1)
    backbone = trainer_of(cfg).build_backbone(cfg)
    network = getattr(backbone, "bottom_up", backbone)
    pixels = PixelSettings.from_config(cfg)
    if weights is not None:
        wanted = load_backbone_weights(network, weights)
        if file_pixels:
            pixels = wanted or pixels
        pixels.check(wanted, weights)
    network = convert_sync_norms(network, cfg.MODEL.DEVICE).to(cfg.MODEL.DEVICE)
    # A block that is computed twice would be watched twice
    if hasattr(network, "checkpoint_activations"):
        network.checkpoint_activations = False
    return network.eval().requires_grad_(False), pixels


@dataclass(frozen=True)
class Input:
    """An image as a network gets it.

    Attributes:
        tensor: [1, C, height, width], normalised and padded.
        picture: [height, width, 3] uint8, RGB, grey where padding is.
        size: (height, width) of the image without padding.
        scale: (y, x), the size over that of the file.
    """

    tensor: Tensor
    picture: np.ndarray
    size: tuple[int, int]
    scale: tuple[float, float]


def load_image(
    path: str | Path, cfg: CfgNode, pixels: PixelSettings, divisibility: int = 0
) -> Input:
    """Read an image as a detector does for a test.

    Args:
        path: of the file.
        cfg: the test sizes are used; those of a LazyConfig are in the mapper of dataloader.test.
        pixels: what the network makes of images.
        divisibility: the sides become a multiple of this.

    Raises:
        DataError: the image cannot be read.
    """
    fault = image_fault({"file_name": str(path)})
    if fault is not None:
        raise DataError(fault)
    original = read_image(str(path), format="RGB")
    resized = AugInput(original)
    _resize(cfg)(resized)
    rgb = resized.image
    channels = torch.from_numpy((rgb if pixels.format == "RGB" else rgb[:, :, ::-1]).copy())
    mean, std = (torch.tensor(v)[:, None, None] for v in (pixels.mean, pixels.std))
    normalised = (channels.permute(2, 0, 1).float() - mean) / std
    tensor = ImageList.from_tensors([normalised], divisibility).tensor
    picture = np.full((*tensor.shape[-2:], 3), 128, np.uint8)
    picture[: rgb.shape[0], : rgb.shape[1]] = rgb
    scale = (rgb.shape[0] / original.shape[0], rgb.shape[1] / original.shape[1])
    return Input(tensor.to(cfg.MODEL.DEVICE), picture, rgb.shape[:2], scale)


def _resize(cfg: CfgNode) -> AugmentationList:
    nodes = None
    if isinstance(cfg, LazyRun):
        nodes = OmegaConf.select(cfg.lazy, "dataloader.test.mapper.augmentations")
    if nodes is not None:
        return AugmentationList(list(instantiate(nodes)))
    sizes = cfg.INPUT
    return AugmentationList(
        [ResizeShortestEdgeAtLeastOnePixel([sizes.MIN_SIZE_TEST] * 2, sizes.MAX_SIZE_TEST)]
    )


@dataclass
class Seen:
    """What came into a layer and out of it."""

    inputs: tuple[Tensor | None, ...]
    output: Tensor


@contextmanager
def watch(network: nn.Module, names: list[str]) -> Iterator[dict[str, Seen]]:
    """Keep what the named modules are given and give, the first time that each is called."""
    seen: dict[str, Seen] = {}

    def keep(name: str):
        def hook(module: nn.Module, inputs: tuple, output: Tensor) -> Tensor | None:
            if name in seen:
                return None
            seen[name] = Seen(tuple(i if i is None else i.detach() for i in inputs), output)
            return output.clone()  # what follows may work in place

        return hook

    hooks = [network.get_submodule(n).register_forward_hook(keep(n)) for n in names]
    try:
        yield seen
    finally:
        for handle in hooks:
            handle.remove()
