"""The preset ``data``: image pipelines of classification and of detection."""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from detectron2.data import DatasetMapper
from detectron2.data import transforms as T
from PIL import Image
from timm.data import create_transform
from torchvision import transforms
from torchvision.transforms import v2

from lambda_benchmarks.measure import FORWARD, Case, Group, Setting
from lambda_det.classification.config import get_classification_config
from lambda_det.classification.data.sources import decode_image, image_files
from lambda_det.classification.data.transforms import TrainTransform
from lambda_det.detection.data import TolerantMapper, large_scale_jitter, read_coco
from lambda_det.errors import ConfigError, DataError

SIZE, JITTER_SIZE = 224, 1024
IMAGES = 64
LIBRARIES = ("pillow", "simplejpeg", "opencv-python-headless", "torchvision", "timm")
_NORMALIZE = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}

# a function of the bytes of a file, or a dataset dict, and a number on which random choices depend
Pipeline = Callable[[Any, int], object]


def groups(args: argparse.Namespace, setting: Setting) -> list[Group]:
    """How many training images one core decodes and augments in a second.

    Classification: beside timm and torchvision. All start from the bytes of JPEG files in memory
    and end with an image of 224x224; the ratios are to plain Pillow decoding. Detection, of the
    images of --annotations: from a file and its polygons to 1024x1024 with the paper's jitter of
    0.1 to 2.0; the ratios are to Detectron2's own mapper with the same augmentations, which draws
    the same numbers. One process, one thread.
    """
    if not args.images:
        raise ConfigError("--preset data needs --images, a folder of images.")
    torch.set_num_threads(1)
    cv2.setNumThreads(0)
    count = IMAGES // 4 if args.small else IMAGES
    files = read_files(args.images, count)
    pixels = np.mean([decode_image(io.BytesIO(file)).size / 3 for file in files])
    title = (
        f"{len(files)} images of {np.mean([len(file) for file in files]) / 1e3:.0f} kB and "
        f"{pixels / 1e6:.2f} million pixels, to {SIZE}x{SIZE}"
    )
    result = [Group(title, cases(pipelines(), files), (FORWARD,))]
    if args.annotations:
        records = read_records(args.annotations, args.images, count)
        objects = np.mean([len(record["annotations"]) for record in records])
        title = f"{len(records)} images with {objects:.1f} objects, jittered to {JITTER_SIZE}"
        result.append(Group(title, cases(mappers(), records), (FORWARD,)))
    return result


def cases(compared: dict[str, Pipeline], files: Sequence[Any]) -> list[Case]:
    """Each pipeline over all files, with the same random numbers in every round."""

    def make(pipeline: Pipeline) -> tuple[Callable[[], None], tuple[()]]:
        def work() -> None:
            for number, file in enumerate(files):
                pipeline(file, number)

        return work, ()

    return [Case(name, partial(make, pipeline), len(files)) for name, pipeline in compared.items()]


def pipelines() -> dict[str, Pipeline]:
    """The pipelines by name; ratios are to the first."""
    classic = transforms.Compose(
        [
            transforms.RandomResizedCrop(SIZE),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(**_NORMALIZE),
        ]
    )
    tensors = v2.Compose(
        [
            v2.ToImage(),
            v2.RandomResizedCrop(SIZE, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(**_NORMALIZE),
        ]
    )
    return {
        "decode: Pillow": lambda data, number: by_pillow(data),
        "decode: lambda_det": lambda data, number: decode_image(io.BytesIO(data)),
        "crop, flip: lambda_det": ours(layers=0),
        "crop, flip, RandAugment(2, 15): lambda_det": ours(layers=2),
        "crop, flip: timm": after_pillow(timm_transform(None)),
        "crop, flip, rand-m15-n2: timm": after_pillow(timm_transform("rand-m15-n2")),
        "crop, flip, normalise: torchvision": after_pillow(classic),
        "crop, flip, normalise: torchvision v2": after_pillow(tensors),
    }


def by_pillow(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data)).convert("RGB")


def after_pillow(transform: Callable[[Image.Image], object]) -> Pipeline:
    return lambda data, number: transform(by_pillow(data))


def ours(layers: int) -> Pipeline:
    cfg = get_classification_config()
    cfg.INPUT.SIZE = SIZE
    cfg.INPUT.RANDAUGMENT.LAYERS = layers
    cfg.INPUT.RANDAUGMENT.MAGNITUDE = 15
    transform = TrainTransform(cfg)

    def load(data: bytes, number: int) -> np.ndarray:
        return transform(decode_image(io.BytesIO(data)), np.random.default_rng((0, 0, number)))

    return load


def timm_transform(auto_augment: str | None) -> Callable[[Image.Image], object]:
    """timm's transform, as its loader makes it if it normalises on the device, as ours does."""
    return create_transform(
        SIZE,
        is_training=True,
        color_jitter=None,
        auto_augment=auto_augment,
        interpolation="bicubic",
        use_prefetcher=True,
    )


def mappers() -> dict[str, Pipeline]:
    """The mappers of detection with the paper's jitter, by name; ratios are to the first.

    Each draws the same scales, crops and flips.
    """
    options = {
        "is_train": True,
        "augmentations": [*large_scale_jitter(0.1, 2.0, JITTER_SIZE), T.RandomFlip()],
        "image_format": "BGR",
        "use_instance_mask": True,
        "recompute_boxes": True,
    }
    exact = TolerantMapper(**options, exact_pixels=True)
    return {
        "DatasetMapper: Detectron2": partial(_map, DatasetMapper(**options)),
        "TolerantMapper: lambda_det": partial(_map, TolerantMapper(**options)),
        "TolerantMapper, INPUT.EXACT_PIXELS": partial(_map, exact),
    }


def _map(mapper: DatasetMapper, record: dict[str, Any], number: int) -> dict[str, Any]:
    np.random.seed(number)  # Detectron2's augmentations draw from the global state
    return mapper(record)


def read_files(folder: str, count: int) -> list[bytes]:
    """Up to ``count`` files of a folder, spread evenly over it, by path."""
    paths = sorted(image_files(folder))
    if not paths:
        raise DataError(f"{folder} holds no images; name another folder with --images.")
    return [Path(folder, path).read_bytes() for path in _spread(paths, count)]


def read_records(annotations: str, folder: str, count: int) -> list[dict[str, Any]]:
    """Up to ``count`` images with objects of a file in COCO's format, spread evenly over it.

    Raises:
        DataError: the file cannot be used, or has no image with objects.
    """
    truth = read_coco(annotations, folder)
    if refusal := truth.report.refusal():
        raise DataError(refusal)
    records = [record for record in truth.records if record["annotations"]]
    if not records:
        raise DataError(f"{annotations} has no image with objects; name another file.")
    return _spread(records, count)


def _spread(values: Sequence[Any], count: int) -> list[Any]:
    """Up to ``count`` of the values, from the first to the last in even steps."""
    chosen = np.unique(np.linspace(0, len(values) - 1, count).round().astype(int))
    return [values[index] for index in chosen]
