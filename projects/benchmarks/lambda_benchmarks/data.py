"""The preset ``data``: image pipelines of classification and of detection."""

from __future__ import annotations

import argparse
import io
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from detectron2.data import DatasetMapper
from detectron2.data import transforms as T
from detectron2.data.datasets import load_coco_json
from detectron2.structures import BoxMode
from PIL import Image
from tabulate import tabulate
from timm.data import create_transform
from torchvision import transforms
from torchvision.transforms import v2

from lambda_benchmarks.measure import take_turns
from lambda_benchmarks.report import describe_machine, machine_line, quartiles, write_json
from lambda_det.classification.config import get_classification_config
from lambda_det.classification.data.sources import decode_image, image_files
from lambda_det.classification.data.transforms import TrainTransform
from lambda_det.detection.data import TolerantMapper, large_scale_jitter
from lambda_det.detection.data.annotations import inspect_annotations
from lambda_det.errors import ConfigError, DataError

SIZE = 224
IMAGES = 64
BASE = "decode: Pillow"
JITTER_SIZE = 1024
MAPPER_BASE = "DatasetMapper: Detectron2"
SCALES = (0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0)  # of the jitter, whose pixels are compared
_LIBRARIES = ("pillow", "simplejpeg", "opencv-python-headless", "torchvision", "timm")
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

# Takes the bytes of a file, or a dataset dict, and a number, which random choices depend on
Pipeline = Callable[[Any, int], object]


def run(args: argparse.Namespace) -> None:
    """Print a row for each pipeline, and write the JSON file if one is asked for.

    Raises:
        ConfigError: ``--annotations`` comes without ``--images``.
        DataError: the images or annotations cannot be read.
    """
    if args.annotations and not args.images:
        raise ConfigError("--annotations needs --images; name the folder of their images with it.")
    rounds = args.runs or (3 if args.small else 5)
    torch.set_num_threads(1)
    cv2.setNumThreads(0)
    count = IMAGES // 4 if args.small else IMAGES
    with tempfile.TemporaryDirectory() as folder:
        files = read_files(args.images, count) if args.images else make_files(count)
        pixels = [decode_image(data, name).shape for name, data in files.items()]
        records = (
            read_records(args.annotations, args.images, count)
            if args.annotations
            else make_records(folder, count)
        )
        rates = measure(pipelines(), list(files.values()), rounds)
        mapped = measure(mappers(), records, rounds)
        compared = {scale: differences(records, scale) for scale in SCALES}
    figures = {
        "preset": args.preset,
        "machine": describe_machine(torch.device("cpu"), _LIBRARIES),
        "images": args.images or "made on the spot",
        "count": len(files),
        "mean_kilobytes": float(np.mean([len(data) for data in files.values()]) / 1e3),
        "mean_pixels": float(np.mean([height * width for height, width, _ in pixels])),
        "size": SIZE,
        "pipelines": {name: summary(values, rates[BASE]) for name, values in rates.items()},
        "detection": {
            "annotations": args.annotations or "made on the spot",
            "count": len(records),
            "mean_pixels": float(np.mean([r["height"] * r["width"] for r in records])),
            "mean_objects": float(np.mean([len(r["annotations"]) for r in records])),
            "size": JITTER_SIZE,
            "pipelines": {n: summary(v, mapped[MAPPER_BASE]) for n, v in mapped.items()},
            "differences": compared,
        },
    }
    print(machine_line(figures["machine"]))
    print(
        f"{figures['count']} images ({figures['images']}) of {figures['mean_kilobytes']:.0f} kB and"
        f" {figures['mean_pixels'] / 1e6:.2f} million pixels, to {SIZE}x{SIZE}; {rounds} rounds"
    )
    print(table(figures["pipelines"]))
    detection = figures["detection"]
    print(
        f"\n{detection['count']} images ({detection['annotations']}) of "
        f"{detection['mean_pixels'] / 1e6:.2f} million pixels and {detection['mean_objects']:.1f} "
        f"objects, jittered to {JITTER_SIZE}x{JITTER_SIZE}; {rounds} rounds"
    )
    print(table(detection["pipelines"]))
    header = ["jitter", "mean difference of pixels to Detectron2's, of 255", "largest"]
    rows = [[scale, f"{mean:.2f}", largest] for scale, (mean, largest) in compared.items()]
    print("\n" + tabulate(rows, header, tablefmt="github", disable_numparse=True))
    if args.json:
        write_json(args.json, figures)


def pipelines() -> dict[str, Pipeline]:
    """What is compared, by name; ratios are to the first."""
    classic = transforms.Compose(
        [
            transforms.RandomResizedCrop(SIZE),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(_MEAN, _STD),
        ]
    )
    tensors = v2.Compose(
        [
            v2.ToImage(),
            v2.RandomResizedCrop(SIZE, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(_MEAN, _STD),
        ]
    )
    return {
        BASE: lambda data, number: by_pillow(data),
        "decode: lambda_det": decode_image,
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
        return transform(decode_image(data, ""), np.random.default_rng((0, 0, number)))

    return load


def timm_transform(auto_augment: str | None) -> Callable[[Image.Image], object]:
    """As timm's loader makes it where it normalises on the device, as ours does."""
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
    augmentations = [*large_scale_jitter(0.1, 2.0, JITTER_SIZE), T.RandomFlip()]
    options = {
        "is_train": True,
        "augmentations": augmentations,
        "image_format": "BGR",
        "use_instance_mask": True,
        "recompute_boxes": True,
    }
    return {
        MAPPER_BASE: partial(_map, DatasetMapper(**options)),
        "TolerantMapper: lambda_det": partial(_map, TolerantMapper(**options)),
        "TolerantMapper, INPUT.EXACT_PIXELS": partial(
            _map, TolerantMapper(**options, exact_pixels=True)
        ),
    }


def differences(records: Sequence[dict[str, Any]], scale: float) -> tuple[float, int]:
    """The mean and the largest difference to Detectron2's pixels, at one scale of the jitter."""
    options = {
        "is_train": True,
        "augmentations": large_scale_jitter(scale, scale, JITTER_SIZE, pad=False),
        "image_format": "BGR",
    }
    mappers = DatasetMapper(**options), TolerantMapper(**options)
    found = []
    for number, record in enumerate(records):
        theirs, ours = (_map(mapper, record, number)["image"].int() for mapper in mappers)
        found.append((ours - theirs).abs())
    mean = float(np.mean([difference.double().mean() for difference in found]))
    return mean, max(int(difference.max()) for difference in found)


def _map(mapper: DatasetMapper, record: dict[str, Any], number: int) -> dict[str, Any]:
    np.random.seed(number)  # Detectron2's augmentations draw from the global state
    return mapper(record)


def measure(
    compared: dict[str, Pipeline], files: Sequence[Any], rounds: int
) -> dict[str, np.ndarray]:
    """Images per second of each pipeline in each round; a first round is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in compared}
    for turn, name in take_turns(list(compared), rounds + 1):
        start = time.process_time()
        for number, data in enumerate(files):
            compared[name](data, turn * len(files) + number)
        if turn > 0:
            seconds[name].append(time.process_time() - start)
    return {name: len(files) / np.array(values) for name, values in seconds.items()}


def summary(rates: np.ndarray, base: np.ndarray) -> dict[str, list[float]]:
    """Lower quartile, median and upper quartile of the rates and of their ratios to the base."""
    return {
        "images_per_second": quartiles(rates),
        "ratio": quartiles(rates / base),
        "rounds": rates.tolist(),
    }


def table(summaries: dict[str, dict[str, list[float]]]) -> str:
    """Medians, and in brackets where the middle half of the rounds lies."""
    rows = []
    for name, figures in summaries.items():
        low, rate, high = figures["images_per_second"]
        low_ratio, ratio, high_ratio = figures["ratio"]
        rows.append(
            [
                name,
                f"{ratio:.2f} ({low_ratio:.2f} to {high_ratio:.2f})",
                f"{rate:.0f} ({low:.0f} to {high:.0f})",
            ]
        )
    return tabulate(rows, ["", "ratio", "images per second"], tablefmt="github")


def read_files(folder: str, count: int) -> dict[str, bytes]:
    """Up to ``count`` files of a folder, spread evenly over it, by path."""
    paths = sorted(str(Path(folder, name)) for name in image_files(folder))
    if not paths:
        raise DataError(f"{folder} holds no images; name another folder with --images.")
    return {path: Path(path).read_bytes() for path in _spread(paths, count)}


def _spread(values: Sequence[Any], count: int) -> list[Any]:
    """Up to ``count`` of the values, from the first to the last in even steps."""
    chosen = np.unique(np.linspace(0, len(values) - 1, count).round().astype(int))
    return [values[index] for index in chosen]


def read_records(annotations: str, folder: str, count: int) -> list[dict[str, Any]]:
    """Up to ``count`` images with objects of a file in COCO's format, spread evenly over it.

    Raises:
        DataError: the file cannot be used, or has no image with objects.
    """
    if refusal := inspect_annotations(annotations).refusal():
        raise DataError(refusal)
    records = [r for r in load_coco_json(annotations, folder) if r["annotations"]]
    if not records:
        raise DataError(f"{annotations} has no image with objects; name another file.")
    return _spread(records, count)


def make_records(folder: str, count: int) -> list[dict[str, Any]]:
    """Images of COCO's size with seven objects each, and their files in a folder."""
    rng = np.random.default_rng(0)
    records = []
    for number in range(count):
        width, height = ((640, 480), (480, 640), (640, 427))[number % 3]
        path = Path(folder, f"{number}.jpg")
        path.write_bytes(_make_file(width, height, rng))
        records.append(
            {
                "file_name": str(path),
                "width": width,
                "height": height,
                "image_id": number,
                "annotations": [_make_object(width, height, rng) for _ in range(7)],
            }
        )
    return records


def _make_object(width: int, height: int, rng: np.random.Generator) -> dict[str, Any]:
    """A blob with an outline of 30 points, at most a third as large as the image."""
    angles = np.linspace(0, 2 * np.pi, 30, endpoint=False)
    radius = rng.uniform(5, min(width, height) / 6) * rng.uniform(0.6, 1, len(angles))
    middle = rng.uniform(0.2, 0.8, 2) * (width, height)
    points = middle + radius[:, None] * np.stack([np.cos(angles), np.sin(angles)], 1)
    return {
        "bbox": [*points.min(0).tolist(), *points.max(0).tolist()],
        "bbox_mode": BoxMode.XYXY_ABS,
        "category_id": 0,
        "iscrowd": 0,
        "segmentation": [points.reshape(-1).tolist()],
    }


def make_files(count: int) -> dict[str, bytes]:
    """JPEGs of the size of ImageNet's: 500 pixels long and about 90 kB each."""
    rng = np.random.default_rng(0)
    sizes = [(500, 375), (375, 500), (500, 333), (500, 400)]
    return {
        f"image {number}": _make_file(*sizes[number % len(sizes)], rng) for number in range(count)
    }


def _make_file(width: int, height: int, rng: np.random.Generator) -> bytes:
    """Noise of all wavelengths, the longer ones stronger, as in photographs."""
    pixels = np.full((height, width, 3), 128.0)
    for wavelength in (256, 128, 64, 32, 16, 8, 4, 2, 1):
        shape = (height // wavelength + 2, width // wavelength + 2)
        grey, colour = rng.normal(size=(*shape, 1)), rng.normal(size=(*shape, 3))
        strength = 12 * wavelength**0.25
        layer = (strength * (grey + 0.3 * colour)).astype(np.float32)
        pixels += cv2.resize(layer, (width, height), interpolation=cv2.INTER_CUBIC)
    buffer = io.BytesIO()
    image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
    image.save(buffer, "JPEG", quality=90)
    return buffer.getvalue()
