"""What a file records about its weights: the network, the pixel settings, the checksum."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lambda_det.config import IMAGENET_MEAN, IMAGENET_STD, LAMBDA_LAYER_KEYS
from lambda_det.errors import ConfigError, WeightsError, counted
from lambda_det.weights.names import tensors_only

if TYPE_CHECKING:
    from detectron2.config import CfgNode


logger = logging.getLogger(__name__)

AUTHOR = "lambda_det"
RUN = "run"  # what a detector's checkpoint records of its run, see detection/saved_run.py
BEST_SCORES = "best_scores"  # in it: by the weights, "raw" or "ema", the score with the best F1
FORMAT = 2  # of backbone files. Readers refuse files of another format.
_RECORDED = ("input_format", "pixel_mean", "pixel_std")  # the pixel settings in files of weights


@dataclass(frozen=True)
class PixelSettings:
    """The normalisation of images: the input of a network is (pixel - mean) / std, pixels 0 to 255.

    Attributes:
        format: order of the channels, "RGB" or "BGR".
        mean: one value for each channel, in that order.
        std: one value for each channel, in that order.
        keys: the user's keys for these three.
    """

    format: str
    mean: Sequence[float]
    std: Sequence[float]
    keys: tuple[str, str, str] = field(
        default=("INPUT.FORMAT", "MODEL.PIXEL_MEAN", "MODEL.PIXEL_STD"), compare=False, repr=False
    )

    @classmethod
    def from_config(cls, cfg: CfgNode) -> PixelSettings:
        """The pixel settings of a detector."""
        return cls(cfg.INPUT.FORMAT, cfg.MODEL.PIXEL_MEAN, cfg.MODEL.PIXEL_STD)

    def as_meta(self) -> dict[str, str | list[float]]:
        """The settings as they are recorded in files of weights."""
        return dict(zip(_RECORDED, self._values(), strict=True))

    def in_order(self, format: str) -> PixelSettings:
        """The same settings for channels in the order "RGB" or "BGR"."""
        if format == self.format:
            return self
        return replace(self, format=format, mean=self.mean[::-1], std=self.std[::-1])

    def can_fold_to(self, target: PixelSettings) -> bool:
        """Whether the first convolution can take up the difference: the means are the same.

        With another mean, the padding at the border would no longer be as in the training.
        """
        formats = {self.format, target.format} <= {"RGB", "BGR"}
        return formats and _same(target.in_order(self.format).mean, self.mean)

    def __str__(self) -> str:
        values = zip(self.keys, self._values(), strict=True)
        return ", ".join(f"{key} {value}" for key, value in values)

    def _values(self) -> tuple[str | list[float], ...]:
        return self.format, list(self.mean), list(self.std)

    def differences(self, wanted: PixelSettings) -> list[str]:
        """What to change so that these become the ``wanted`` ones, key by key."""
        return [
            f"{key} {there} (now {here})"
            for key, here, there in zip(self.keys, self._values(), wanted._values(), strict=True)
            if not _same(here, there)
        ]

    def check(self, wanted: PixelSettings | None, path: str | Path) -> None:
        """Refuse weights that were trained with other pixel settings, and warn where it is not
        known with which.

        Args:
            wanted: the settings that the weights need. None: not known.
            path: the file of the weights, named in the message.

        Raises:
            ConfigError: these settings differ from ``wanted``.
        """
        if wanted is None:
            usual = " and ".join(self.differences(IMAGENET_PIXELS))
            logger.warning(
                f"The weights {path} do not say for which pixel settings they were trained, and "
                f"the model has {self}. If theirs are others, the network sees images of another "
                "scale or order of colours: set these keys to them."
                + (f" For ImageNet's usual ones set {usual}." if usual else "")
            )
            return
        differences = self.differences(wanted)
        if differences:
            raise ConfigError(
                f"The weights {path} need other pixel settings than the model has: set "
                f"{' and '.join(differences)}."
            )


# Of all networks of timm and torchvision that are also here
IMAGENET_PIXELS = PixelSettings("RGB", list(IMAGENET_MEAN), list(IMAGENET_STD))
# Of Detectron2's configurations
DETECTRON2_PIXELS = PixelSettings("BGR", list(IMAGENET_MEAN[::-1]), [1.0, 1.0, 1.0])


def _same(one: str | Sequence[float], other: str | Sequence[float]) -> bool:
    if isinstance(one, str) or isinstance(other, str):
        return one == other
    return len(one) == len(other) and np.allclose(one, other, rtol=1e-5, atol=0)


def entry(content: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    """What a file says under the first of the keys that has a mapping; {} for none."""
    return next((content[key] for key in keys if isinstance(content.get(key), Mapping)), {})


def wanted_pixels(content: Mapping[str, Any]) -> PixelSettings | None:
    """The pixel settings that the weights of a file need. None: the file does not record them.

    Args:
        content: of any file of weights.
    """
    for key in ("meta", "recipe", RUN):
        about = entry(content, key)
        if all(about.get(name) is not None for name in _RECORDED):
            return PixelSettings(*(about[name] for name in _RECORDED))
    return None


def recorded_network(content: Mapping[str, Any]) -> tuple[str | None, Mapping[str, Any]]:
    """The name of the model that a file records, or None, and its options.

    Args:
        content: of a backbone file, or of a checkpoint of a classifier or a detector.
    """
    keys = ("meta",) if content.get("__author__") == AUTHOR else ("recipe", RUN)
    about = entry(content, *keys)
    name = about.get("model")
    return (name, entry(about, "options")) if isinstance(name, str) else (None, {})


class Origin(NamedTuple):
    """The origin of a model's weights: the file, the number of steps, and which weights of the
    file.
    """

    file: str
    step: int | None
    averaged: bool

    def __str__(self) -> str:
        step = "" if self.step is None else f"after {counted(self.step, 'step')}, "
        return f"{self.file} ({step}{'averaged' if self.averaged else 'raw'} weights)"

    @classmethod
    def of(cls, file: str, content: Mapping[str, Any], *, raw: bool = False) -> Origin:
        """The origin of the weights in ``content``, of a checkpoint or a backbone file."""
        about, iteration = entry(content, "meta"), content.get("iteration")
        step = iteration + 1 if type(iteration) is int else about.get("step")
        return cls(file, step, about.get("weights") == "ema" or ("ema" in content and not raw))

    def as_meta(self) -> dict[str, Any]:
        """What an exported file says of them."""
        return {"weights": self.file, "step": self.step, "averaged": self.averaged}


def check_layers(model: nn.Module, content: Mapping[str, Any], path: str | Path) -> None:
    """Refuse weights of lambda layers that computed something else with the same tensors.

    Args:
        model: a backbone of :func:`lambda_det.create_backbone`, or a model that holds some.
        content: of a backbone file, or of a checkpoint of a classifier or a detector.
        path: of the file, for the message.

    Raises:
        WeightsError: the file records other options than a backbone has.
    """
    recorded, options = recorded_network(content)
    if recorded is None:
        return
    networks = [module for module in model.modules() if hasattr(module, "created_as")]
    for network, (key, option) in itertools.product(networks, LAMBDA_LAYER_KEYS.items()):
        name = key.lower()
        there, here = (x.get(name, option.unseen) for x in (options, network.created_as[1]))
        if option.unseen is not None and there != here:
            raise WeightsError(
                f"{path} holds weights of lambda layers with {name} {there!r}, and the model's "
                f"have {here!r}: set MODEL.LAMBDA_RESNET.{key} (in Python and LazyConfigs {name}) "
                f"to {there!r}."
            )


def format_options(options: Mapping[str, Any]) -> str:
    """Options as text to append to the name of a model, such as " (norm BN, scope 3)"."""
    said = ", ".join(f"{name} {value}" for name, value in options.items())
    return f" ({said})" if said else ""


def initial_weights(content: Mapping[str, Any], *, raw: bool = False) -> tuple[Any, str]:
    """The weights to start a training from: the averaged (EMA) ones if the checkpoint has them.

    Args:
        content: of the checkpoint.
        raw: take the others nevertheless.

    Returns:
        The state dict, and its description for messages.
    """
    average = entry(entry(content, "ema"), "model")
    if average and not raw:
        return average, "the averaged (EMA) weights"
    return content.get("model", content), "the weights"


def checksum(state: Mapping[str, Tensor], meta: Mapping[str, Any] | None = None) -> str:
    """SHA-256 over the names, dtypes, shapes and values of all tensors, and over ``meta``.

    Args:
        state: tensors by name. Their order does not matter.
        meta: plain values. The entry "sha256" is left out.
    """
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy())
    if meta is not None:
        rest = {key: value for key, value in meta.items() if key != "sha256"}
        # a value that no export writes makes another sum
        digest.update(json.dumps(rest, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def check_provenance(content: Mapping[str, Any], path: str | Path) -> None:
    """Refuse a backbone file that was changed since it was written.

    Files of other authors are not checked.

    Raises:
        WeightsError: the checksum does not match the content, or the format is another one.
    """
    meta = entry(content, "meta")
    if content.get("__author__") != AUTHOR or not meta:
        return
    if meta.get("format") != FORMAT:
        raise WeightsError(
            f"{path} has format {meta.get('format')}, and this lambda_det reads format {FORMAT}: "
            "export the backbone again, or install the version that wrote the file."
        )
    if meta.get("sha256") != checksum(tensors_only(content.get("model"), path), meta):
        raise WeightsError(
            f"{path} was changed after it was written: its checksum does not match its content; "
            "export the backbone again."
        )
