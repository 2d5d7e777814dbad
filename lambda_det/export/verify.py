"""Write a backbone file, load it again, and compare its features with those of its checkpoint."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from detectron2.config import instantiate
from torch import Tensor, nn

from lambda_det.detection.config import load_config
from lambda_det.detection.lazy import is_lazy_file, load_lazy_file
from lambda_det.detection.model import build_model
from lambda_det.errors import ConfigError, UserError, reason
from lambda_det.export.backbone import extract_backbone, is_backbone_file
from lambda_det.export.sources import KnownNetwork
from lambda_det.files import writing_to
from lambda_det.modeling import create_backbone
from lambda_det.training.checkpointer import SafeCheckpointer
from lambda_det.weights.backbone_file import check_target, read_backbone, save_backbone
from lambda_det.weights.names import is_counter
from lambda_det.weights.provenance import PixelSettings, wanted_pixels

__all__ = ["Verification", "build_target", "export_backbone", "verify_backbone"]

TOLERANCE = 1e-5  # of features, relative to their largest absolute value
TOLERANCE_HALF = 0.1  # of a file in float16: 0.001 is usual, untrained networks have 0.06
_SIZE = (96, 128)  # of the image. Multiples of 32, so that nothing is padded.
_DEFAULT_PIXELS = PixelSettings("BGR", [103.53, 116.28, 123.675], [1.0, 1.0, 1.0])  # Detectron2's
_LAYOUT = ("dilation", "multi_grid")  # which do not show in the tensors


@dataclass
class Verification:
    """The result of verifying a backbone file.

    Attributes:
        tensors: number of tensors of the backbone, without counters.
        errors: for each feature map, the largest difference relative to its largest value.
        offenders: one phrase for each fault.
    """

    tensors: int = 0
    errors: dict[str, float] = field(default_factory=dict)
    offenders: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return bool(self.errors) and not self.offenders

    def __str__(self) -> str:
        errors = ", ".join(f"{name} {error:.1e}" for name, error in self.errors.items())
        return f"{self.tensors} tensors; largest relative error of features: {errors or 'unknown'}"


def export_backbone(
    content: Mapping[str, Any],
    path: str | Path,
    checkpoint: Mapping[str, Any],
    target: tuple[nn.Module, PixelSettings] | None = None,
    *,
    overwrite: bool = False,
) -> Verification:
    """Write a backbone file under a temporary name, verify it, and rename it if it passes.

    An existing file stays until then.

    Args:
        content: made by :func:`lambda_det.export.backbone.extract_backbone`.
        path: see :func:`lambda_det.weights.backbone_file.save_backbone`.
        checkpoint, target: see :func:`verify_backbone`.
        overwrite: replace an existing file.

    Raises:
        ConfigError: the file cannot be written.
    """
    check_target(path, overwrite=overwrite)
    path = Path(path)
    place = {"prefix": ".unverified_", "dir": path.parent}
    # A folder, so that the draft has the final suffix and name
    with writing_to(path), tempfile.TemporaryDirectory(**place) as folder:
        draft = Path(folder, path.name)
        save_backbone(content, draft)
        report = verify_backbone(draft, checkpoint, target)
        report.offenders = [o.replace(str(draft), str(path)) for o in report.offenders]
        if report.passed:
            os.replace(draft, path)
    return report


@torch.no_grad()
def verify_backbone(
    path: str | Path,
    checkpoint: Mapping[str, Any],
    target: tuple[nn.Module, PixelSettings] | None = None,
) -> Verification:
    """Load a backbone file with its checksum, and compare every tensor and the features.

    Features are compared in float64, where only the rounding of a folded convolution differs. That
    error arises in the stem and may grow over many layers. So the checkpoint's network continues
    from the stem's output of the file, which is compared as well.

    Args:
        path: a file of :func:`lambda_det.weights.backbone_file.save_backbone`.
        checkpoint: that the file was made from.
        target: of :func:`build_target`. The file is loaded into it as a training would, which
            compares the pixel settings. None: into only the backbone, with those of the file.

    Raises:
        WeightsError: the file is no backbone file, or was changed.
    """
    content, report = read_backbone(path), Verification()
    meta, res5 = content["meta"], None
    if target is None:
        backbone = _create(meta, meta["options"], path)
        pixels = wanted_pixels(content) or _DEFAULT_PIXELS
    else:
        detector, pixels = target
        try:
            # As it is, where a training would fold the difference into the first convolution
            pixels.check(wanted_pixels(content), path)
            SafeCheckpointer(detector).load_initial_weights(str(path), pixels)
        except UserError as error:
            report.offenders.append(f"it is refused: {error}")
            return report
        backbone = getattr(detector.backbone, "bottom_up", detector.backbone)
        if not hasattr(backbone, "res5"):  # C4 has it in the heads
            res5 = getattr(getattr(detector, "roi_heads", None), "res5", None)
    loaded = dict(backbone.state_dict())
    if res5 is not None:
        loaded |= {f"res5.{name}": tensor for name, tensor in res5.state_dict().items()}
    for name, tensor in loaded.items():
        if not is_counter(name):
            report.tensors += 1
            if not torch.equal(tensor, content["model"].get(name, tensor.new_empty(0)).float()):
                report.offenders.append(f"{name} has other values than the file")
    # Global embeddings refuse larger maps, and in those the checkpoint has what the file has not
    largest = meta["options"].get("global_context"), meta.get("unseen") and meta["trained_at"]
    size = [min(side, *filter(None, largest), side) for side in _SIZE]
    generator = torch.Generator().manual_seed(0)
    image = torch.randint(0, 256, (3, *size), generator=generator, dtype=torch.uint8)
    found = _features(backbone, image, pixels)
    if res5 is not None and "res4" in found:
        found["res5"] = res5.double()(found["res4"])
    source, about = _source(backbone, checkpoint, meta)
    expected = _features(source, image, wanted_pixels({"meta": about}) or pixels, found["stem"])
    for name, feature in found.items():
        error = report.errors[name] = _difference(feature, expected[name])
        if not error < (TOLERANCE_HALF if meta.get("half") else TOLERANCE):  # NaN is not
            report.offenders.append(f"feature {name} differs by {error:.1e} of its greatest value")
    return report


def _create(
    meta: Mapping[str, Any], options: Mapping[str, Any], weights: str | Path | None = None
) -> nn.Module:
    stages = [name for name in meta["stages"] if name != "stem"]
    return create_backbone(meta["model"], stages, weights, **options).eval()


def _source(
    backbone: nn.Module, checkpoint: Mapping[str, Any], meta: Mapping[str, Any]
) -> tuple[nn.Module, Mapping[str, Any]]:
    """The network of the checkpoint without any folding, and its ``meta``.

    Its dilations are those of ``backbone``: they do not show in the tensors.
    """
    content = checkpoint  # a backbone file, written in another format
    if not is_backbone_file(checkpoint):
        network = KnownNetwork(meta["model"], meta["options"], wanted_pixels({"meta": meta}), "")
        content = extract_backbone(
            checkpoint, weights=meta["weights"], fold_input=False, network=network
        )
    about = content["meta"]
    options = {key: value for key, value in about["options"].items() if key not in _LAYOUT}
    created = getattr(backbone, "created_as", ("", {}))[1]
    options |= {key: created[key] for key in _LAYOUT if created.get(key) is not None}
    source = _create(about, options)
    source.load_state_dict({**source.state_dict(), **content["model"]})  # which lacks counters
    return source, about


def _difference(found: Tensor, expected: Tensor) -> float:
    """The largest absolute difference, relative to the largest absolute value."""
    return (found - expected).abs().max().item() / (expected.abs().max().item() or 1.0)


def _features(
    backbone: nn.Module, image: Tensor, pixels: PixelSettings, stem: Tensor | None = None
) -> dict[str, Tensor]:
    """The stem's output and the features of an RGB image [3, H, W], in float64.

    ``stem`` takes the place of the stem's output for the layers after it.
    """
    x = image.double().flip(0) if pixels.format == "BGR" else image.double()
    mean, std = (
        torch.tensor(values, dtype=torch.float64)[:, None, None]
        for values in (pixels.mean, pixels.std)
    )
    outputs = []

    def hook(module: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
        outputs.append(output)
        return output if stem is None else stem

    handle = backbone.stem.register_forward_hook(hook)
    features = backbone.double()(((x - mean) / std)[None])
    handle.remove()
    return {"stem": outputs[0], **{name: y for name, y in features.items() if name != "stem"}}


def build_target(file: str | Path) -> tuple[nn.Module, PixelSettings]:
    """The detector of a configuration on the CPU, in evaluation mode, and its pixel settings.

    Args:
        file: YAML, or a LazyConfig, saved or in Python.

    Raises:
        ConfigError: the file is missing or describes no detector.
    """
    if not is_lazy_file(file):
        cfg = load_config(argparse.Namespace(config_file=str(file), opts=["MODEL.DEVICE", "cpu"]))
        return build_model(cfg).eval(), PixelSettings.from_config(cfg)
    lazy = load_lazy_file(file)
    try:
        detector = instantiate(lazy.model).eval()
        # SemanticSegmentor does not store the order of the channels
        order = getattr(detector, "input_format", None) or lazy.model.get("input_format", "BGR")
        mean, std = (getattr(detector, f"pixel_{n}").flatten().tolist() for n in ("mean", "std"))
        return detector, PixelSettings(order, mean, std)
    except Exception as error:  # raised by any code that the configuration names
        raise ConfigError(
            f"The `model` of {file} is no detector that can be created ({type(error).__name__}: "
            f"{reason(error)}); correct it."
        ) from error
