"""Verify that a backbone file loads completely and gives the features of its checkpoint."""

from __future__ import annotations

import argparse
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
from lambda_det.errors import ConfigError, UserError, WeightsError, reason
from lambda_det.modeling import create_backbone
from lambda_det.training.checkpointer import SafeCheckpointer
from lambda_det.weights.backbone_file import read_backbone
from lambda_det.weights.provenance import PixelSettings, wanted_pixels

__all__ = [
    "Verification",
    "build_target",
    "load_target",
    "verify_backbone",
]

TOLERANCE = 1e-5  # of features, relative to their largest absolute value
_SIZE = (96, 128)  # of the image. Multiples of 32, so that nothing is padded.
_DEFAULT_PIXELS = PixelSettings("BGR", [103.53, 116.28, 123.675], [1.0, 1.0, 1.0])  # Detectron2's
_LAYOUT = ("dilation", "multi_grid")


@dataclass
class Verification:
    """The result of verifying a backbone file.

    Attributes:
        tensors: number of tensors of the backbone, without counters.
        equal: number of tensors that equal those of the file to the bit.
        errors: for each feature map, the largest difference relative to its largest value. Empty
            if there was no checkpoint to compare with.
        offenders: one phrase for each fault.
        loaded: whether the detector accepted the file.
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
        text = f"{self.equal} of {self.tensors} tensors equal those of the file"
        if self.errors:
            errors = ", ".join(f"{name} {error:.1e}" for name, error in self.errors.items())
            text += f"; largest relative error of features: {errors}"
        return text


def verify_backbone(
    path: str | Path,
    target: CfgNode | DictConfig | None = None,
    *,
    checkpoint: Mapping[str, Any] | None = None,
) -> Verification:
    """Load a backbone file, and compare every tensor, the pixel settings and the features.

    The comparison shares no code with the loading but the reader of the file and the networks.

    Args:
        path: a file of :func:`lambda_det.weights.backbone_file.save_backbone`.
        target: configuration of a detector. The file is loaded into it as a training would. None:
            into the backbone alone, with the pixel settings of the file.
        checkpoint: that the file was made from. Without it, features are not compared.

    Raises:
        ConfigError: ``target`` describes no detector.
        WeightsError: the file is no backbone file, or was changed.
    """
    content = read_backbone(path)
    report = Verification()
    network = _alone(path, content) if target is None else _of_detector(path, target, report)
    _compare_pixels(network.pixels, content["meta"], report)
    _compare_tensors(network, content["model"], report)
    if checkpoint is not None and report.equal == report.tensors:
        _compare_features(network, checkpoint, content["meta"], report)
    return report


@dataclass
class _Loaded:
    """A network with the weights of the file, in evaluation mode.

    Attributes:
        backbone: without FPN.
        res5: the last stage of a detector that has it in its heads, else None.
        pixels: the pixel settings, None if they are not known.
        prepare: maps an RGB image [3, H, W] to the input in float64, as the detector does.
    """

    backbone: nn.Module
    res5: nn.Module | None
    pixels: PixelSettings | None
    prepare: Callable[[Tensor], Tensor]

    def state(self) -> dict[str, Tensor]:
        states = dict(self.backbone.state_dict())
        if self.res5 is not None:
            states |= {f"res5.{name}": value for name, value in self.res5.state_dict().items()}
        return states

    def features(self, images: Tensor) -> dict[str, Tensor]:
        found = dict(self.backbone.double()(images))
        if self.res5 is not None and "res4" in found:
            found["res5"] = self.res5.double()(found["res4"])
        return found


def _alone(path: str | Path, content: Mapping[str, Any]) -> _Loaded:
    meta = content["meta"]
    stages = [name for name in meta["stages"] if name != "stem"]
    backbone = create_backbone(meta["model"], stages, path, **meta["options"])
    pixels = wanted_pixels(content)
    return _Loaded(backbone.eval(), None, pixels, lambda image: _normalised(image, pixels))


def _of_detector(path: str | Path, target: CfgNode | DictConfig, report: Verification) -> _Loaded:
    detector, pixels = build_target(target)
    try:
        SafeCheckpointer(detector).load_initial_weights(str(path))
    except UserError as error:
        report.loaded = False
        report.offenders.append(f"it is refused: {error}")
    backbone = getattr(detector.backbone, "bottom_up", detector.backbone)
    res5 = None
    if not hasattr(backbone, "res5"):
        res5 = getattr(getattr(detector, "roi_heads", None), "res5", None)

    def prepare(image: Tensor) -> Tensor:
        if not hasattr(detector, "preprocess_image"):  # SemanticSegmentor
            return _normalised(image, pixels)
        order = [2, 1, 0] if pixels.format == "BGR" else [0, 1, 2]
        detector.double()
        return detector.preprocess_image([{"image": image[order]}]).tensor

    return _Loaded(backbone, res5, pixels, prepare)


def _compare_pixels(
    here: PixelSettings | None, meta: Mapping[str, Any], report: Verification
) -> None:
    if meta["input_format"] is None or here is None:  # the file does not record them
        return
    if meta["input_format"] != here.format:
        report.offenders.append(f"INPUT.FORMAT is {here.format}; set it to {meta['input_format']}")
    for key in ("mean", "std"):
        value, wanted = list(getattr(here, key)), list(meta[f"pixel_{key}"])
        if not torch.allclose(torch.tensor(value), torch.tensor(wanted), rtol=1e-5, atol=0):
            report.offenders.append(f"MODEL.PIXEL_{key.upper()} is {value}; set it to {wanted}")


def _compare_tensors(network: _Loaded, state: Mapping[str, Tensor], report: Verification) -> None:
    """Compare by name and by bytes: NaN equals NaN, and 0 differs from -0."""
    loaded = {
        name: tensor
        for name, tensor in network.state().items()
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
            continue  # its values are the initial ones, and the refusal is reported already
        elif state[name].dtype != tensor.dtype or _bytes(state[name]) != _bytes(tensor):
            report.offenders.append(f"{name} has other values than the file")
        else:
            report.equal += 1
    stages = {name.split(".")[0] for name in loaded}
    report.offenders += [
        f"{name} is only in the file"
        for name in state
        if name not in loaded and name.split(".")[0] in stages
    ]


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().numpy().tobytes()


@torch.no_grad()
def _compare_features(
    network: _Loaded, checkpoint: Mapping[str, Any], meta: Mapping[str, Any], report: Verification
) -> None:
    """Compare features in float64, where only the rounding of the folded weights differs.

    That error arises in the stem and may grow over many layers. So the stem's output is compared as
    well, and if it is within the tolerance, both networks continue from the same stem output.
    """
    generator = torch.Generator().manual_seed(0)
    # Global embeddings refuse larger maps
    largest = meta["options"].get("global_context") or max(_SIZE)
    height, width = (min(side, largest) for side in _SIZE)
    image = torch.randint(0, 256, (3, height, width), generator=generator, dtype=torch.uint8)
    found = _with_stem(network.backbone, lambda: network.features(network.prepare(image)))
    expected = _source_features(network, checkpoint, meta, image, found)
    for name, feature in found.items():
        error = report.errors[name] = _difference(feature, expected[name])
        if not error < TOLERANCE:
            report.offenders.append(f"feature {name} differs by {error:.1e} of its greatest value")


def _difference(found: Tensor, expected: Tensor) -> float:
    """The largest absolute difference, relative to the largest absolute value."""
    return (found - expected).abs().max().item() / (expected.abs().max().item() or 1.0)


def _with_stem(
    backbone: nn.Module,
    compute: Callable[[], dict[str, Tensor]],
    instead: Callable[[Tensor], Tensor] = lambda stem: stem,
) -> dict[str, Tensor]:
    """Features, and the output of the stem. ``instead`` replaces that output for later layers."""
    stem = []

    def hook(module: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
        stem.append(output)
        return instead(output)

    handle = backbone.stem.register_forward_hook(hook)
    features = compute()
    handle.remove()
    return {"stem": stem[0], **{name: x for name, x in features.items() if name != "stem"}}


def _source_features(
    network: _Loaded,
    checkpoint: Mapping[str, Any],
    meta: Mapping[str, Any],
    image: Tensor,
    found: Mapping[str, Tensor],
) -> Mapping[str, Tensor]:
    """The features that the network of the checkpoint computes from an RGB image.

    After the stem it continues from ``found["stem"]`` if that is within the tolerance.
    """
    about = checkpoint.get("recipe", meta)
    state = checkpoint["ema"] if meta["weights"] == "ema" and "ema" in checkpoint else checkpoint
    state = {name.replace("_orig_mod.", ""): t for name, t in state.get("model", state).items()}
    # Dilations do not show in the tensors; the target may have others than the checkpoint
    layout = {key: getattr(network.backbone, "created_as", ("", {}))[1].get(key) for key in _LAYOUT}
    options = {key: value for key, value in about["options"].items() if key not in _LAYOUT}
    options |= {key: value for key, value in layout.items() if value is not None}
    backbone = create_backbone(about["model"], list(found), **options)
    for name, tensor in backbone.state_dict().items():
        if not name.endswith("num_batches_tracked"):
            tensor.copy_(_ending_in(name, state))
    pixels = network.pixels
    if about["input_format"] is not None:
        keys = ("input_format", "pixel_mean", "pixel_std")
        pixels = PixelSettings(*(about[key] for key in keys))
    backbone.double().eval()

    def right_or_own(stem: Tensor) -> Tensor:
        return found["stem"] if _difference(found["stem"], stem) < TOLERANCE else stem

    return _with_stem(backbone, lambda: backbone(_normalised(image, pixels)), right_or_own)


def _ending_in(name: str, state: Mapping[str, Any]) -> Tensor:
    """The tensor whose name is ``name`` after the prefixes of enclosing modules."""
    found = [key for key in state if key == name or key.endswith(f".{name}")]
    if len(found) > 1:  # a res5 in the backbone and another in the heads
        found = [key for key in found if "roi_heads" not in key]
    if len(found) != 1:
        raise WeightsError(f"The checkpoint has {len(found)} tensors that match {name}.")
    return torch.as_tensor(state[found[0]])


def _normalised(image: Tensor, pixels: PixelSettings | None) -> Tensor:
    """An RGB image [3, H, W] as a batch [1, 3, H, W] in float64."""
    pixels = pixels or _DEFAULT_PIXELS
    image = image.double().flip(0) if pixels.format == "BGR" else image.double()
    mean, std = (
        torch.tensor(values, dtype=torch.float64)[:, None, None]
        for values in (pixels.mean, pixels.std)
    )
    return ((image - mean) / std)[None]


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
        detector = instantiate(target.model)
    except Exception as error:  # raised by any code that the configuration names
        raise ConfigError(
            f"The `model` of the LazyConfig cannot be created ({type(error).__name__}: "
            f"{reason(error)}); correct it."
        ) from error
    if not isinstance(getattr(detector, "backbone", None), nn.Module):
        raise ConfigError(
            f"The `model` of the LazyConfig is a {type(detector).__name__} without a backbone; "
            "give that of a detector."
        )
    return detector.eval(), _pixels(detector, target.model)


def _pixels(detector: Any, model: DictConfig) -> PixelSettings:
    # SemanticSegmentor does not store the order of the channels
    order = getattr(detector, "input_format", None) or model.get("input_format", "BGR")
    mean, std = (getattr(detector, name).flatten().tolist() for name in ("pixel_mean", "pixel_std"))
    return PixelSettings(order, mean, std)
