"""What a file of weights says of itself: which weights, for which images, with which checksum."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode
from torch import Tensor

from lambda_det.errors import ConfigError, WeightsError
from lambda_det.weights.names import tensors_only

__all__ = [
    "AUTHOR",
    "FORMAT",
    "PixelSettings",
    "check_provenance",
    "checksum",
    "in_words",
    "initial_weights",
    "named_network",
    "wanted_pixels",
]

AUTHOR = "lambda_det"
FORMAT = 2  # of the backbone files; a reader refuses those of a later one
_TENSORS_ALONE = 1  # the format whose checksum leaves out what the file says of them


@dataclass(frozen=True)
class PixelSettings:
    """How pixels from 0 to 255 become the input of a network: (pixel - mean) / std.

    Attributes:
        format: order of the channels, "RGB" or "BGR".
        mean: of the channels in that order.
        std: likewise.
    """

    format: str
    mean: Sequence[float]
    std: Sequence[float]

    @classmethod
    def from_config(cls, cfg: CfgNode) -> PixelSettings:
        """Those of a detector."""
        return cls(cfg.INPUT.FORMAT, cfg.MODEL.PIXEL_MEAN, cfg.MODEL.PIXEL_STD)

    def by_key(self) -> dict[str, str | list[float]]:
        """The keys of a detector's configuration and their values."""
        return {
            "INPUT.FORMAT": self.format,
            "MODEL.PIXEL_MEAN": list(self.mean),
            "MODEL.PIXEL_STD": list(self.std),
        }

    def __str__(self) -> str:
        return ", ".join(f"{key} {value}" for key, value in self.by_key().items())

    def differences(self, wanted: PixelSettings) -> list[str]:
        """What to change so that these become the ``wanted`` ones, key by key."""
        here = self.by_key()
        return [
            f"{key} {value} (now {here[key]})"
            for key, value in wanted.by_key().items()
            if not _same(here[key], value)
        ]

    def check(self, wanted: PixelSettings | None, path: str | Path) -> None:
        """Refuse weights for other images.

        Raises:
            ConfigError: these settings differ from the ``wanted`` ones of the file ``path``.
        """
        if wanted is None:
            return
        differences = self.differences(wanted)
        if differences:
            raise ConfigError(
                f"The weights {path} want other images than the model gets: set "
                f"{' and '.join(differences)}."
            )


def _same(one: str | Sequence[float], other: str | Sequence[float]) -> bool:
    if isinstance(one, str) or isinstance(other, str):
        return one == other
    return len(one) == len(other) and all(
        math.isclose(a, b, rel_tol=1e-5) for a, b in zip(one, other, strict=True)
    )


def wanted_pixels(content: Mapping[str, Any]) -> PixelSettings | None:
    """The images that the weights of a file are for, if the file says so.

    Args:
        content: of a backbone file or of a checkpoint of a classifier.
    """
    about = content.get("meta", content.get("recipe"))
    keys = ("input_format", "pixel_mean", "pixel_std")
    if not isinstance(about, Mapping) or any(about.get(key) is None for key in keys):
        return None
    return PixelSettings(*(about[key] for key in keys))


def named_network(content: Mapping[str, Any]) -> tuple[str | None, str]:
    """The name of the model that a file of weights is of, if it says so, and its options in words.

    Args:
        content: of a backbone file or of a checkpoint of a classifier.
    """
    about = content.get("meta") if content.get("__author__") == AUTHOR else content.get("recipe")
    name = about.get("model") if isinstance(about, Mapping) else None
    if not isinstance(name, str):
        return None, ""
    return name, in_words(about.get("options"))


def in_words(options: Any) -> str:
    """Options as they stand behind a model's name: " (norm BN, scope 3)"."""
    if not isinstance(options, Mapping) or not options:
        return ""
    return f" ({', '.join(f'{name} {value}' for name, value in options.items())})"


def initial_weights(content: Mapping[str, Any]) -> tuple[Any, str]:
    """What to start from: the average (EMA) in the checkpoint of a classifier, if it has one.

    Returns:
        The state dict and its description.
    """
    average = content.get("ema")
    if isinstance(average, Mapping) and isinstance(average.get("model"), Mapping):
        return average["model"], "the averaged (EMA) weights"
    return content.get("model", content), "the weights"


def checksum(state: Mapping[str, Tensor], meta: Mapping[str, Any] | None = None) -> str:
    """SHA-256 of names, types, shapes and values, in the order of the names, and then of ``meta``.

    Args:
        state: tensors.
        meta: plain values; "sha256" among them is left out.
    """
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy())
    if meta is not None:
        said = {key: value for key, value in meta.items() if key != "sha256"}
        digest.update(json.dumps(said, sort_keys=True).encode())
    return digest.hexdigest()


def check_provenance(content: Mapping[str, Any], path: str | Path) -> None:
    """Refuse a backbone file that is not what it was when it was written.

    Files of other authors are not looked at.

    Raises:
        WeightsError: its checksum is not that of its content, or its format is a later one.
    """
    meta = content.get("meta")
    if content.get("__author__") != AUTHOR or not isinstance(meta, Mapping):
        return
    if meta.get("format") not in (_TENSORS_ALONE, FORMAT):
        raise WeightsError(
            f"{path} has format {meta.get('format')}, and this lambda_det reads up to {FORMAT}: "
            "export the backbone again with this version, or install that which wrote it."
        )
    state = tensors_only(content.get("model"), path)
    said = None if meta["format"] == _TENSORS_ALONE else meta
    try:
        found = checksum(state, said)
    except TypeError:  # a value that no export writes
        found = None
    if meta.get("sha256") != found:
        raise WeightsError(
            f"{path} is not what was written: the checksum in it is not that of its content; "
            "export the backbone again."
        )
