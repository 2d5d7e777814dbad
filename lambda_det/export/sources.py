"""Networks to export out of names, configurations and weights; pictures to compare them on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.data.transforms import ResizeShortestEdge
from omegaconf import DictConfig
from torch import Tensor

from lambda_det.detection.data.records import read_image
from lambda_det.detection.inference import find_weights, known_class_names, trained_detector
from lambda_det.detection.task import DetectionTask
from lambda_det.export.networks import Network, backbone_network, detector_network
from lambda_det.modeling import create_backbone
from lambda_det.weights.formats import read_checkpoint

__all__ = ["named_backbone", "network_of_config", "read_images"]


def named_backbone(name: str, weights: str) -> Network:
    """The backbone of that name with the weights of a file.

    Raises:
        ConfigError: there is no such model.
        WeightsError: the file cannot be read or does not fit.
    """
    backbone = create_backbone(name, weights=weights)
    meta = read_checkpoint(weights).get("meta")
    wanted = {"input_format", "pixel_mean", "pixel_std"}
    pixels = {k: v for k, v in meta.items() if k in wanted} if isinstance(meta, dict) else {}
    return backbone_network(backbone, {"model": name, "weights": weights, **pixels})


def network_of_config(
    cfg: CfgNode | DictConfig, config_file: str, weights: str | None, backbone_only: bool
) -> Network:
    """The detector of a configuration, or its backbone with FPN, with weights.

    Args:
        cfg: out of ``config_file``.
        weights: a checkpoint of the whole detector; None for the last of the run, if
            ``config_file`` is in the folder of one, else MODEL.WEIGHTS.

    Raises:
        ConfigError: the device is not there, or the network cannot be exported.
        WeightsError: there are no weights, or they do not fit.
    """
    weights = find_weights(cfg, config_file, weights)
    model = trained_detector(cfg, weights, "float32")
    task = DetectionTask(cfg)
    pixels: dict[str, Any] = {
        "config": config_file,
        "weights": weights,
        **(task.pixels.as_meta() if task.pixels else {}),
        **_test_size(task),
        "classes": known_class_names(cfg),
    }
    if backbone_only:
        pixels["size_divisibility"] = model.backbone.size_divisibility
        return backbone_network(model.backbone, pixels)
    return detector_network(model, pixels)


def _test_size(task: DetectionTask) -> dict[str, int]:
    """The sides that images are resized to in an evaluation; nothing where it does more to them."""
    made = task.parts.make_test_augmentations().augs
    if len(made) != 1 or not isinstance(made[0], ResizeShortestEdge):
        return {}
    return {"min_size_test": made[0].short_edge_length[0], "max_size_test": made[0].max_size}


def read_images(files: Iterable[str]) -> list[Tensor]:
    """Pictures [3, H, W], BGR.

    Raises:
        DataError: one cannot be read, or has more than 8 bits a channel.
    """
    images = (torch.from_numpy(read_image({"file_name": file})) for file in files)
    return [image.permute(2, 0, 1).float() for image in images]
