"""Proof that a backbone file arrives in a detector whole, and computes there what it did before."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode
from torch import Tensor, nn

from lambda_det.checkpoint.backbone_file import read_backbone
from lambda_det.engine.checkpointer import SafeCheckpointer
from lambda_det.engine.model_check import build_for_trial
from lambda_det.engine.trainer import DetectionTrainer
from lambda_det.errors import UserError
from lambda_det.modeling import create_backbone

__all__ = ["Report", "verify_backbone"]

TOLERANCE = 1e-4  # of features, relative to their greatest value
_SIZE = (96, 128)  # of the image; whole strides, so that nothing is padded


@dataclass
class Report:
    """What became of a backbone file.

    Attributes:
        tensors: of the backbone, counters left out.
        equal: those that are bit for bit the file's.
        errors: of each feature map, the greatest difference relative to its greatest value; empty
            where there is nothing to compare with.
        offenders: everything that is wrong, in words.
        loaded: whether the detector took the file at all.
    """

    tensors: int = 0
    equal: int = 0
    errors: dict[str, float] = field(default_factory=dict)
    offenders: list[str] = field(default_factory=list)
    loaded: bool = True

    @property
    def passed(self) -> bool:
        return not self.offenders and self.tensors > 0 and self.equal == self.tensors

    def __str__(self) -> str:
        text = f"{self.equal} of {self.tensors} tensors are those of the file"
        if self.errors:
            errors = ", ".join(f"{name} {error:.1e}" for name, error in self.errors.items())
            text += f"; greatest relative error of features: {errors}"
        return text


def verify_backbone(
    path: str | Path, cfg: CfgNode | None = None, *, checkpoint: Mapping[str, Any] | None = None
) -> Report:
    """Load a backbone file and look at every tensor, the pixel settings and the features.

    What loads and what looks share no code but the reading of the file.

    Args:
        path: a file of :func:`lambda_det.checkpoint.save_backbone`.
        cfg: of the detector to load it into as a training would; None for the backbone alone, with
            the pixel settings that the file names.
        checkpoint: of the classifier that the file was made from, to compare features with. They
            are not compared without it.

    Raises:
        ConfigError: ``cfg`` describes no detector.
        WeightsError: the file is no backbone file, or not what was written.
    """
    content = read_backbone(path)
    report = Report()
    if cfg is None:
        loaded = _load_alone(path, content, report)
    else:
        loaded = _load_into_detector(path, cfg, content, report)
    if loaded is None:
        return report
    backbone, prepare = loaded
    _compare_tensors(backbone, content["model"], report)
    if checkpoint is not None and report.equal == report.tensors:
        _compare_features(backbone, prepare, checkpoint, content["meta"]["weights"], report)
    return report


# The network that has the weights, and what makes an RGB image its input
_Loaded = tuple[nn.Module, Callable[[Tensor], Tensor]]


def _load_alone(path: str | Path, content: Mapping[str, Any], report: Report) -> _Loaded | None:
    meta = content["meta"]
    if meta["model"] is None:
        report.offenders.append(
            f"{path} is of a detector, and does not say of which network: name its configuration"
        )
        return None
    backbone = create_backbone(meta["model"], weights=path, **meta["options"])

    def prepare(image: Tensor) -> Tensor:
        return _normalised(image, meta["input_format"], meta["pixel_mean"], meta["pixel_std"])

    return backbone.eval(), prepare


def _load_into_detector(
    path: str | Path, cfg: CfgNode, content: Mapping[str, Any], report: Report
) -> _Loaded:
    build_for_trial(cfg)  # which has a word for each mistake in the configuration
    cfg = cfg.clone()
    cfg.defrost()
    cfg.MODEL.DEVICE = "cpu"
    detector = DetectionTrainer.build_model(cfg).eval()
    try:
        SafeCheckpointer(detector).load_initial_weights(str(path))
    except UserError as error:
        report.loaded = False
        report.offenders.append(f"it is refused: {error}")
    _compare_pixels(cfg, content["meta"], report)
    backbone = getattr(detector.backbone, "bottom_up", detector.backbone)

    def prepare(image: Tensor) -> Tensor:
        order = [2, 1, 0] if cfg.INPUT.FORMAT == "BGR" else [0, 1, 2]
        detector.double()
        return detector.preprocess_image([{"image": image[order]}]).tensor

    return backbone, prepare


def _compare_pixels(cfg: CfgNode, meta: Mapping[str, Any], report: Report) -> None:
    if meta["input_format"] is None:  # of a detector, whose configuration has them
        return
    if meta["input_format"] != cfg.INPUT.FORMAT:
        report.offenders.append(
            f"INPUT.FORMAT is {cfg.INPUT.FORMAT}; set it to {meta['input_format']}"
        )
    for key in ("PIXEL_MEAN", "PIXEL_STD"):
        here, wanted = list(cfg.MODEL[key]), list(meta[key.lower()])
        if not torch.allclose(torch.tensor(here), torch.tensor(wanted), rtol=1e-5, atol=0):
            report.offenders.append(f"MODEL.{key} is {here}; set it to {wanted}")


def _compare_tensors(backbone: nn.Module, state: Mapping[str, Tensor], report: Report) -> None:
    """By name, on the bits: NaN equals NaN, and 0 is not -0."""
    loaded = {
        name: tensor
        for name, tensor in backbone.state_dict().items()
        if not name.endswith("num_batches_tracked")
    }
    report.tensors = len(loaded)
    for name, tensor in loaded.items():
        if name not in state:
            report.offenders.append(f"{name} is missing in the file")
        elif state[name].shape != tensor.shape:
            shapes = f"{list(state[name].shape)} in the file, {list(tensor.shape)} in the backbone"
            report.offenders.append(f"{name} has another shape: {shapes}")
        elif not report.loaded:
            continue  # its values are those of a fresh network, as the first sentence says
        elif state[name].dtype != tensor.dtype or _bytes(state[name]) != _bytes(tensor):
            report.offenders.append(f"{name} has other values than the file")
        else:
            report.equal += 1
    stages = {name.split(".")[0] for name in loaded}
    report.offenders += [
        f"{name} is in the file and not in the backbone"
        for name in state
        if name not in loaded and name.split(".")[0] in stages
    ]


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().numpy().tobytes()


@torch.no_grad()
def _compare_features(
    backbone: nn.Module,
    prepare: Callable[[Tensor], Tensor],
    checkpoint: Mapping[str, Any],
    weights: str,
    report: Report,
) -> None:
    """In float64, in which nothing but the rounding of folded weights is left to differ."""
    generator = torch.Generator().manual_seed(0)
    # Embeddings of the whole map know no larger one
    largest = checkpoint["recipe"]["options"].get("global_context") or max(_SIZE)
    height, width = (min(side, largest) for side in _SIZE)
    image = torch.randint(0, 256, (3, height, width), generator=generator, dtype=torch.uint8)
    found = backbone.double()(prepare(image))
    expected = _classifier_features(checkpoint, weights, image, list(found))
    for name, feature in found.items():
        greatest = expected[name].abs().max().item()
        error = (feature - expected[name]).abs().max().item() / (greatest or 1.0)
        report.errors[name] = error
        if not error < TOLERANCE:
            report.offenders.append(f"feature {name} differs by {error:.1e} of its greatest value")


def _classifier_features(
    checkpoint: Mapping[str, Any], weights: str, image: Tensor, names: Sequence[str]
) -> Mapping[str, Tensor]:
    """What the classifier's backbone makes of an RGB image with its own preprocessing."""
    recipe = checkpoint["recipe"]
    state = (checkpoint["ema"] if weights == "ema" else checkpoint)["model"]
    backbone = create_backbone(recipe["model"], names, **recipe["options"])
    backbone.load_state_dict({name: state[f"backbone.{name}"] for name in backbone.state_dict()})
    backbone.double().eval()
    return backbone(
        _normalised(image, recipe["input_format"], recipe["pixel_mean"], recipe["pixel_std"])
    )


def _normalised(
    image: Tensor, channels: str, mean: Sequence[float], std: Sequence[float]
) -> Tensor:
    """An RGB image [3, H, W] as a batch [1, 3, H, W] in float64."""
    image = image.double().flip(0) if channels == "BGR" else image.double()
    mean, std = (torch.tensor(values, dtype=torch.float64)[:, None, None] for values in (mean, std))
    return ((image - mean) / std)[None]
