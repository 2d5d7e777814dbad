"""Write a backbone file, load it again, and compare its features with those of its checkpoint."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode, instantiate
from omegaconf import DictConfig
from torch import Tensor, nn

from lambda_det.detection.config import load_config
from lambda_det.detection.lazy import is_lazy_file, load_lazy_file
from lambda_det.detection.model import build_model
from lambda_det.errors import ConfigError, UserError, reason
from lambda_det.export.backbone import extract_backbone
from lambda_det.export.sources import KnownNetwork
from lambda_det.modeling import create_backbone
from lambda_det.training.checkpointer import SafeCheckpointer
from lambda_det.weights.backbone_file import check_target, read_backbone, save_backbone
from lambda_det.weights.names import is_counter
from lambda_det.weights.provenance import PixelSettings, wanted_pixels

__all__ = ["Verification", "build_target", "export_backbone", "load_target", "verify_backbone"]

TOLERANCE = 1e-5  # of features, relative to their largest absolute value
_SIZE = (96, 128)  # of the image. Multiples of 32, so that nothing is padded.
_DEFAULT_PIXELS = PixelSettings("BGR", [103.53, 116.28, 123.675], [1.0, 1.0, 1.0])  # Detectron2's
_LAYOUT = ("dilation", "multi_grid")  # which do not show in the tensors


@dataclass
class Verification:
    """The result of verifying a backbone file.

    Attributes:
        tensors: number of tensors of the backbone, without counters.
        equal: number of tensors that equal those of the file to the bit.
        errors: for each feature map, the largest difference relative to its largest value. Empty
            if there was no checkpoint to compare with.
        offenders: one phrase for each fault.
    """

    tensors: int = 0
    equal: int = 0
    errors: dict[str, float] = field(default_factory=dict)
    offenders: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.offenders and self.tensors > 0 and self.equal == self.tensors

    def __str__(self) -> str:
        text = f"{self.equal} of {self.tensors} tensors equal those of the file"
        if self.errors:
            errors = ", ".join(f"{name} {error:.1e}" for name, error in self.errors.items())
            text += f"; largest relative error of features: {errors}"
        return text


def export_backbone(
    content: Mapping[str, Any],
    path: str | Path,
    target: CfgNode | DictConfig | None = None,
    *,
    checkpoint: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> Verification:
    """Write a backbone file under a temporary name, verify it, and rename it if it passes.

    An existing file stays until then.

    Args:
        content: made by :func:`lambda_det.export.backbone.extract_backbone`.
        path: see :func:`lambda_det.weights.backbone_file.save_backbone`.
        target, checkpoint: see :func:`verify_backbone`.
        overwrite: replace an existing file.

    Raises:
        ConfigError: the file cannot be written, or ``target`` describes no detector.
    """
    check_target(path, overwrite=overwrite)
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A folder, so that the draft has the final suffix and name
        with tempfile.TemporaryDirectory(prefix=".unverified_", dir=path.parent) as folder:
            draft = Path(folder, path.name)
            save_backbone(content, draft)
            report = verify_backbone(draft, target, checkpoint=checkpoint)
            report.offenders = [o.replace(str(draft), str(path)) for o in report.offenders]
            if report.passed:
                os.replace(draft, path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}.") from error
    return report


def verify_backbone(
    path: str | Path,
    target: CfgNode | DictConfig | None = None,
    *,
    checkpoint: Mapping[str, Any] | None = None,
) -> Verification:
    """Load a backbone file with its checksum, and compare every tensor and the features.

    Args:
        path: a file of :func:`lambda_det.weights.backbone_file.save_backbone`.
        target: configuration of a detector. The file is loaded into it as a training would, which
            compares the pixel settings. None: into only the backbone, with those of the file.
        checkpoint: that the file was made from. Without it, features are not compared.

    Raises:
        ConfigError: ``target`` describes no detector.
        WeightsError: the file is no backbone file, or was changed.
    """
    content, report = read_backbone(path), Verification()
    meta, res5 = content["meta"], None
    if target is None:
        stages = [name for name in meta["stages"] if name != "stem"]
        backbone = create_backbone(meta["model"], stages, path, **meta["options"]).eval()
        pixels = wanted_pixels(content)
    else:
        detector, pixels = build_target(target)
        try:
            SafeCheckpointer(detector).load_initial_weights(str(path), pixels)
        except UserError as error:
            report.offenders.append(f"it is refused: {error}")
            return report
        backbone = getattr(detector.backbone, "bottom_up", detector.backbone)
        if not hasattr(backbone, "res5"):
            res5 = getattr(getattr(detector, "roi_heads", None), "res5", None)
    loaded = dict(backbone.state_dict())
    if res5 is not None:
        loaded |= {f"res5.{name}": tensor for name, tensor in res5.state_dict().items()}
    loaded = {name: tensor for name, tensor in loaded.items() if not is_counter(name)}
    report.tensors = len(loaded)
    spoilt = [n for n, t in loaded.items() if not _same_bits(content["model"].get(n), t)]
    report.equal = report.tensors - len(spoilt)
    report.offenders += [f"{name} has other values than the file" for name in spoilt]
    if checkpoint is not None and not spoilt:
        _compare_features(backbone, res5, pixels, checkpoint, meta, report)
    return report


def _same_bits(one: Tensor | None, other: Tensor) -> bool:
    """NaN equals NaN, and 0 differs from -0."""
    alike = one is not None and (one.shape, one.dtype) == (other.shape, other.dtype)
    return alike and one.contiguous().numpy().tobytes() == other.contiguous().numpy().tobytes()


@torch.no_grad()
def _compare_features(
    backbone: nn.Module,
    res5: nn.Module | None,
    pixels: PixelSettings | None,
    checkpoint: Mapping[str, Any],
    meta: Mapping[str, Any],
    report: Verification,
) -> None:
    """Compare features in float64, where only the rounding of the folded weights differs.

    That error arises in the stem and may grow over many layers. So the stem's output is compared as
    well, and if it is within the tolerance, both networks continue from the same stem output.
    """
    generator = torch.Generator().manual_seed(0)
    # Global embeddings refuse larger maps
    largest = meta["options"].get("global_context") or max(_SIZE)
    size = [min(side, largest) for side in _SIZE]
    image = torch.randint(0, 256, (3, *size), generator=generator, dtype=torch.uint8)
    found = _features(backbone, image, pixels)
    if res5 is not None and "res4" in found:
        found["res5"] = res5.double()(found["res4"])
    source, about = _source(backbone, checkpoint, meta)

    def same_or_own(stem: Tensor) -> Tensor:
        return found["stem"] if _difference(found["stem"], stem) < TOLERANCE else stem

    expected = _features(source, image, wanted_pixels({"meta": about}) or pixels, same_or_own)
    for name, feature in found.items():
        error = report.errors[name] = _difference(feature, expected[name])
        if not error < TOLERANCE:
            report.offenders.append(f"feature {name} differs by {error:.1e} of its greatest value")


def _source(
    backbone: nn.Module, checkpoint: Mapping[str, Any], meta: Mapping[str, Any]
) -> tuple[nn.Module, Mapping[str, Any]]:
    """The network of the checkpoint without any folding, and its ``meta``.

    Its dilations are those of the target: they do not show in the tensors.
    """
    if meta["folded"] and checkpoint.get("meta") == meta:
        content = checkpoint  # a backbone file written in another format
    else:
        network = KnownNetwork(meta["model"], meta["options"], wanted_pixels({"meta": meta}), "")
        content = extract_backbone(
            checkpoint, weights=meta["weights"], fold_input=False, network=network
        )
    about = content["meta"]
    options = {key: value for key, value in about["options"].items() if key not in _LAYOUT}
    created = getattr(backbone, "created_as", ("", {}))[1]
    options |= {key: created[key] for key in _LAYOUT if created.get(key) is not None}
    stages = [name for name in about["stages"] if name != "stem"]
    source = create_backbone(about["model"], stages, **options)
    fitting = {k: v for k, v in content["model"].items() if k in source.state_dict()}
    source.load_state_dict({**source.state_dict(), **fitting})
    return source.eval(), about


def _difference(found: Tensor, expected: Tensor) -> float:
    """The largest absolute difference, relative to the largest absolute value."""
    return (found - expected).abs().max().item() / (expected.abs().max().item() or 1.0)


def _features(
    backbone: nn.Module,
    image: Tensor,
    pixels: PixelSettings | None,
    instead: Callable[[Tensor], Tensor] = lambda stem: stem,
) -> dict[str, Tensor]:
    """The stem's output and the features of an RGB image [3, H, W], in float64.

    ``instead`` replaces the stem's output for the layers after it.
    """
    pixels = pixels or _DEFAULT_PIXELS
    x = image.double().flip(0) if pixels.format == "BGR" else image.double()
    mean, std = (
        torch.tensor(values, dtype=torch.float64)[:, None, None]
        for values in (pixels.mean, pixels.std)
    )
    stem = []

    def hook(module: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
        stem.append(output)
        return instead(output)

    handle = backbone.stem.register_forward_hook(hook)
    features = backbone.double()(((x - mean) / std)[None])
    handle.remove()
    return {"stem": stem[0], **{name: y for name, y in features.items() if name != "stem"}}


def load_target(file: str | Path) -> CfgNode | DictConfig:
    """Read the configuration of a detector: YAML, or a LazyConfig, saved or in Python.

    Raises:
        ConfigError: the file is missing or describes no model.
    """
    if not is_lazy_file(file):
        return load_config(argparse.Namespace(config_file=str(file), opts=[]))
    loaded = load_lazy_file(file)
    if "model" not in loaded:
        raise ConfigError(f"{file} has no `model`; give the LazyConfig of a detector.")
    return loaded


def build_target(target: CfgNode | DictConfig) -> tuple[nn.Module, PixelSettings]:
    """Build the detector on the CPU, in evaluation mode.

    Returns:
        The detector and its pixel settings.

    Raises:
        ConfigError: the configuration describes no detector.
    """
    if isinstance(target, CfgNode):
        target = target.clone()
        target.defrost()
        target.MODEL.DEVICE = "cpu"
        return build_model(target).eval(), PixelSettings.from_config(target)
    try:
        detector = instantiate(target.model).eval()
        # SemanticSegmentor does not store the order of the channels
        order = getattr(detector, "input_format", None) or target.model.get("input_format", "BGR")
        mean, std = (getattr(detector, f"pixel_{n}").flatten().tolist() for n in ("mean", "std"))
        return detector, PixelSettings(order, mean, std)
    except Exception as error:  # raised by any code that the configuration names
        raise ConfigError(
            f"The `model` of the LazyConfig is no detector that can be created "
            f"({type(error).__name__}: {reason(error)}); correct it."
        ) from error
