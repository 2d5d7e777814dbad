"""From the bytes of a request to pixels, and from a prediction to JSON."""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from PIL import Image, ImageOps
from pycocotools import mask as coco_masks

from lambda_det.detection.prediction import Prediction
from lambda_det.errors import ConfigError

FORMATS = ("JPEG", "PNG", "WEBP", "BMP")


def _limit(default: float, words: str) -> Any:
    return field(default=default, metadata={"help": words})


@dataclass(frozen=True)
class Limits:
    """The limits of the server, each with a flag of ``serve.py``."""

    batch: int = _limit(8, "images computed together at most")
    wait: float = _limit(0.01, "seconds that the first image of a batch waits for others")
    queue: int = _limit(64, "open requests, before 503")
    max_bytes: int = _limit(10_000_000, "of an image as it is sent, before 413")
    max_pixels: int = _limit(16_000_000, "of an image, by its header, before 413")
    timeout: float = _limit(30.0, "seconds from a request's head to its answer, before 504")

    def __post_init__(self) -> None:
        for name in (entry.name for entry in fields(self)):
            value = getattr(self, name)
            if value < 0 or (value == 0 and name != "wait"):
                flag = name.replace("_", "-")
                raise ConfigError(f"--{flag} is {value}; give more than 0.")


class Refused(Exception):
    """A refused request: HTTP's status, and one sentence for the client."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


def decoded(data: bytes, most_pixels: int) -> np.ndarray:
    """An image as uint8 [H, W, 3], RGB, upright as its EXIF data say.

    Raises:
        Refused: 413 if its header has more pixels, before any is decoded; 415 if it is no image, or
            has more than 8 bits a channel.
    """
    try:
        with warnings.catch_warnings():  # Pillow's own limit is not the user's
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise Refused(413, f"The image would unpack to too many pixels: {error}") from error
    except Exception as error:  # Pillow may raise anything for broken data
        raise Refused(
            415, f"The {len(data)} bytes are no image; send one as {', '.join(FORMATS)}."
        ) from error
    width, height = image.size
    if width * height > most_pixels:
        raise Refused(
            413,
            f"The image is {width}x{height}, {width * height / 1e6:.0f} million pixels in "
            f"{len(data)} bytes; this server takes {most_pixels / 1e6:g} million, so make it "
            "smaller.",
        )
    if image.mode.startswith(("I", "F")):
        raise Refused(415, f"The image has more than 8 bits a channel ({image.mode}); convert it.")
    try:
        return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
    except Exception as error:
        raise Refused(415, f"The image is damaged ({error}); send it again.") from error


def as_json(found: Prediction, masks: bool) -> dict[str, Any]:
    """A prediction as JSON: boxes x0, y0, x1, y1 in pixels; with ``masks``, COCO's run lengths."""
    height, width = found.instances.image_size
    answer = {
        "width": width,
        "height": height,
        "boxes": found.boxes.astype(float).round(2).tolist(),
        "scores": found.scores.astype(float).round(5).tolist(),
        "names": found.names,
    }
    if masks and found.masks is not None:
        lengths = [coco_masks.encode(np.asfortranarray(mask, np.uint8)) for mask in found.masks]
        answer["masks"] = [
            {"size": [height, width], "counts": x["counts"].decode()} for x in lengths
        ]
    return answer
