"""Broken data sets for fuzz tests, and what a user does with one.

A case is a whole data set: the bytes of an annotation file, what lies in the place of some images,
and the switches of the run that meets them. It depends on its seed alone. It is looked over,
registered, loaded, trained on and evaluated on; each step works or ends in one of our own errors.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import itertools
import json
import logging
import math
import os
import random
import signal
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pycocotools.mask as mask_util
import pytest
import torch
from detectron2.config import CfgNode
from detectron2.modeling import build_model
from detectron2.utils.events import EventStorage
from PIL import Image

from lambda_det.detection.data import (
    build_test_loader,
    build_train_loader,
    check_datasets,
    register_json_datasets,
)
from lambda_det.detection.evaluation import build_evaluator
from lambda_det.errors import ConfigError, UserError
from lambda_det.own_data import command_line
from tests.coco import found
from tests.shapes import make_panoptic_shapes
from tests.training.tiny_detector import tiny_config


@dataclass
class GroundTruth:
    """A sound data set to start from: its annotations, and its images by file name."""

    content: dict[str, Any]
    folder: Path

    @classmethod
    def made(cls, root: Path) -> GroundTruth:
        """Six images of 64x64 with boxes, polygons, a mask in run lengths, and keypoints."""
        make_panoptic_shapes(root, num_train=6, num_val=1, size=64)
        folder = root / "shapes_panoptic"
        content = json.loads((folder / "annotations" / "keypoints_train.json").read_text())
        content["categories"] = [c for c in content["categories"] if "keypoints" in c]
        mask = content["annotations"][0]
        (runs,) = mask_util.frPyObjects(mask["segmentation"], 64, 64)
        mask["segmentation"] = {**runs, "counts": runs["counts"].decode()}
        content["annotations"][2]["iscrowd"] = 1
        return cls(content, folder / "train")

    @classmethod
    def read(cls, json_file: Path, folder: Path, images: int = 6) -> GroundTruth:
        """The first few images of somebody's data set and their annotations."""
        content = json.loads(json_file.read_text(encoding="utf-8"))
        content["images"] = content["images"][:images]
        kept = {image["id"] for image in content["images"]}
        content["annotations"] = [a for a in content["annotations"] if a["image_id"] in kept]
        return cls(content, folder)

    def repeated(self, times: int) -> dict[str, Any]:
        """The annotations several times: one bad box in a hundred is allowed."""
        content = copy.deepcopy(self.content)
        number = max((a["id"] for a in content["annotations"]), default=0)
        for entry in content["annotations"] * (times - 1):
            number += 1
            content["annotations"].append({**copy.deepcopy(entry), "id": number})
        return content


@dataclass
class Case:
    """One data set with faults, and how it is used."""

    json: bytes
    images: dict[str, Callable[[Path], None]] = field(default_factory=dict)  # what makes the file
    mask_on: bool = True
    keypoint_on: bool = False
    large_scale_jitter: bool = True
    mask_format: str = "polygon"
    with_step: bool = False  # a step of training too, which takes longer than all else

    @classmethod
    def drawn(cls, rng: random.Random, content: Any, **fields: Any) -> Case:
        return cls(
            content if isinstance(content, bytes) else json.dumps(content).encode(),
            mask_on=rng.random() < 0.8,
            keypoint_on=rng.random() < 0.2,
            large_scale_jitter=rng.random() < 0.7,
            mask_format=rng.choice(("polygon", "bitmask")),
            with_step=rng.random() < 0.1,
            **fields,
        )


def mutated_structure(ground_truth: GroundTruth, rng: random.Random) -> Case:
    """JSON of another structure: values of other types, entries removed, doubled, added."""
    content = ground_truth.repeated(rng.choice((1, 8, 8)))
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        mutate(content, rng)
    return Case.drawn(rng, content)


def mutated_bytes(ground_truth: GroundTruth, rng: random.Random) -> Case:
    """A JSON file with bytes changed, or cut off."""
    damage = BROKEN_FILES[rng.choice(("cut", "flipped", "flipped", "flipped"))]
    return Case.drawn(rng, damage(json.dumps(ground_truth.content).encode(), rng))


def mutated_images(ground_truth: GroundTruth, rng: random.Random) -> Case:
    """Sound annotations of images of which some, or all, are not as they should be."""
    content = copy.deepcopy(ground_truth.content)
    entries = rng.sample(content["images"], rng.randint(1, len(content["images"])))
    images = {}
    for entry in entries:
        good = (ground_truth.folder / entry["file_name"]).read_bytes()
        kind = rng.choice((*BROKEN_FILES, *STRANGE_FILES))
        images[entry["file_name"]] = maker(kind, good, random.Random(rng.random()))
    return Case.drawn(rng, content, images=images)


def drawn_annotations(ground_truth: GroundTruth, rng: random.Random) -> Case:
    """Boxes, polygons and keypoints drawn from numbers of which most are as they should be."""
    content = ground_truth.repeated(rng.choice((1, 8, 8)))
    annotations = content["annotations"]
    for entry in rng.sample(annotations, min(rng.choice((1, 1, 2, 20)), len(annotations))):
        for key, fewest, most in rng.sample(DRAWN, rng.randint(1, len(DRAWN))):
            numbers = _numbers(rng, rng.randint(fewest, most))
            entry[key] = [numbers] if key == "segmentation" else numbers
    return Case.drawn(rng, content)


MUTATIONS = {
    "structure": mutated_structure,
    "bytes": mutated_bytes,
    "images": mutated_images,
    "annotations": drawn_annotations,
}


def _numbers(rng: random.Random, count: int) -> list[float]:
    odd = (0, -1, 1e-9, 1e9, 1e300, math.inf, math.nan, 2**31, 2**64, 10**400, True)
    usual = (lambda: rng.randint(0, 30), lambda: rng.uniform(-70, 130))
    return [rng.choice(odd) if rng.random() < 0.1 else rng.choice(usual)() for _ in range(count)]


# Keys of an annotation that hold numbers: the fewest and the most of them
DRAWN = (("bbox", 4, 4), ("segmentation", 6, 13), ("keypoints", 12, 12), ("keypoints", 0, 13))


# What may stand in the place of any value
# fmt: off
STRANGE_VALUES = (
    None, True, False, 0, -1, 1, 5, 0.5, 1e-9, 1e9, 1e308, -1e308,
    math.nan, math.inf, -math.inf, 2**31, 2**63, 2**64, -(2**63), 10**400,
    "", "1", "\0", "ä" * 50, "a\nb", "\ud800", "../x", "/etc/passwd", "a" * 999,
    [], {}, [[]], [{}], [None], [1], [1, 2, 3], {"a": {}},
    # Boxes, polygons, run lengths and keypoints; test_coco.py has more
    [1e308] * 4, [0, 0, 10**400, 5], [[1, 2, 3, 4, 5, 6]], [[-1e9, -1e9, 1e9, -1e9, 1e9, 1e9]],
    {"counts": [1]}, {"size": [60000, 60000], "counts": [3600000000]},
    {"size": [64, 64], "counts": "ooooo"}, {"size": [64, 64], "counts": [2**40]}, [1, 2, 2] * 4,
)
# fmt: on
_KEYS = ("iscrowd", "keypoints", "num_keypoints", "ignore", "segmentation", "bbox", "area", "id")


def mutate(content: Any, rng: random.Random) -> None:
    """One change at a place anywhere in ``content``."""
    places = list(_places(content))
    if not places:
        return
    parent, key = rng.choice(places)
    value, kind = parent[key], rng.random()
    if kind < 0.55:
        parent[key] = copy.deepcopy(rng.choice(STRANGE_VALUES))
    elif kind < 0.7:
        del parent[key]
    elif kind < 0.8 and isinstance(parent, list):
        parent.insert(0, copy.deepcopy(value))
    elif kind < 0.95 and isinstance(value, (int, float)) and abs(value) < 1e300:
        parent[key] = value * rng.choice((-1, 0, 1e-3, 0.5, 1e3, 10**9, 10**12))
    elif isinstance(parent, dict):
        parent[rng.choice(_KEYS)] = copy.deepcopy(rng.choice(STRANGE_VALUES))
    else:
        other, place = rng.choice(places)
        parent[key] = copy.deepcopy(other[place])


def _places(node: Any) -> Iterator[tuple[Any, Any]]:
    """The parent and key of each value, at any depth."""
    items = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in items:
        yield node, key
        if isinstance(value, (dict, list)):
            yield from _places(value)


STRANGE_NAMES = (
    *("", ".", "..", "a\nb.png", "caf\udce9.png", "\ud800.png", "a\0b.png", "ä ö.png", "a" * 300),
    *("../out.png", "%s{}.png", "http://a/b.png"),
)


def maker(kind: str, good: bytes, rng: random.Random) -> Callable[[Path], None]:
    """A function that writes one image of a kind of ``BROKEN_FILES`` or ``STRANGE_FILES``."""
    if kind in STRANGE_FILES:
        return STRANGE_FILES[kind]
    content = BROKEN_FILES[kind](good, rng)
    return lambda path: path.write_bytes(content)


def _flipped(good: bytes, rng: random.Random) -> bytes:
    content = bytearray(good)
    for _ in range(rng.choice((1, 5, 50))):
        content[rng.randrange(len(content))] = rng.choice((rng.randrange(256), *b'09-e."[]{}'))
    return bytes(content)


def _of_another_mode(good: bytes, rng: random.Random) -> bytes:
    """The image in another of Pillow's modes and formats, maybe of another size or turned."""
    image = Image.open(io.BytesIO(good)).convert("RGB")
    if rng.random() < 0.2:
        image = image.resize(rng.choice(((1, 1), (1, 64), (63, 64), (500, 2))))
    mode = rng.choice(("L", "1", "P", "RGBA", "CMYK", "I", "F", "LA", "YCbCr", "I;16", "HSV"))
    exif = Image.Exif()
    exif[0x0112] = rng.choice((0, 1, 3, 6, 9, 65535))
    content = io.BytesIO()
    try:
        kind = rng.choice(("PNG", "TIFF", "GIF", "BMP", "WEBP", "JPEG"))
        image.convert(mode).save(content, kind, exif=exif.tobytes())
    except Exception:  # not every format has every mode
        content = io.BytesIO()
        image.save(content, "JPEG")
    return content.getvalue()


def _bomb(good: bytes, rng: random.Random) -> bytes:
    """A PNG file of a few bytes whose head says that it is an image of gigabytes."""
    content = io.BytesIO()
    Image.new("RGB", (1, 1)).save(content, "PNG")
    pixel, size = content.getvalue(), rng.choice(((60000, 60000), (2**31 - 1, 1), (14000, 14000)))
    head = b"IHDR" + struct.pack(">II", *size) + pixel[24:29]
    return pixel[:12] + head + struct.pack(">I", zlib.crc32(head)) + pixel[33:]


# Files with other bytes: (those of a sound file, random numbers) -> bytes
BROKEN_FILES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "cut": lambda good, rng: good[: rng.randrange(len(good))],
    "flipped": _flipped,
    "mode": _of_another_mode,
    "bomb": _bomb,
    "text": lambda good, rng: b"<html>404 Not Found</html>\n",
    "empty": lambda good, rng: b"",
}


def _unreadable(path: Path) -> None:
    path.write_bytes(b"secret")
    path.chmod(0)


# What is no file that could be read
STRANGE_FILES: dict[str, Callable[[Path], None]] = {
    "absent": lambda path: None,
    "folder": lambda path: path.mkdir(),
    "loop": lambda path: path.symlink_to(path),
    "pipe": lambda path: os.mkfifo(path),
    "zeros": lambda path: path.symlink_to("/dev/zero"),
    "forbidden": _unreadable,
}


# ------------------------------------------------------------------------------------- the trial
SECONDS = 900  # most cases take a twentieth of one; on a busy machine a sound case may wait
MEMORY = 3 * 2**30  # bytes that a case may take more than the process has already


class Hang(BaseException):
    """A case took longer than it may.

    It is no Exception, so that nothing takes it for a broken file.
    """


def assert_clear(error: UserError, *names: str) -> None:
    """One line that has one of the names, as of the file or of keys of the configuration."""
    sentence = str(error)
    assert any(name in sentence for name in names), f"names none of {names}: {sentence}"
    assert sentence.isprintable(), f"not one printable line: {sentence!r}"
    assert len(sentence) < 2000, f"{len(sentence)} characters long"


def take(case: Case, ground_truth: GroundTruth) -> str:
    """How the case ended: "used", the name of the error, or one of them in training alone.

    Raises:
        Exception: it ended in another way than a user may expect.
    """
    with tempfile.TemporaryDirectory() as folder, limits():
        return _take(case, *_write(case, ground_truth, Path(folder)))


def _write(case: Case, ground_truth: GroundTruth, folder: Path) -> tuple[Path, Path]:
    json_file = folder / "set.json"
    json_file.write_bytes(case.json)
    if not case.images:
        return json_file, ground_truth.folder
    images = folder / "images"
    images.mkdir()
    for path in ground_truth.folder.iterdir():
        if path.name not in case.images:
            (images / path.name).symlink_to(path)
    for name, make in case.images.items():
        # A name that no file can have stays without one
        with contextlib.suppress(OSError, ValueError):
            path = images / name
            path.parent.mkdir(parents=True, exist_ok=True)
            make(path)
    return json_file, images


def _take(case: Case, json_file: Path, images: Path) -> str:
    cfg = config(case, json_file, images)
    names = (str(json_file), str(images), "MODEL.", "DATASETS.", "TEST.", json_file.stem + "_")
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        status = command_line.main([str(json_file), str(images)])
    assert status in (0, 1, 2)
    outcomes = set()
    for use in (_train, _evaluate):
        try:
            with _each_said_once(), contextlib.redirect_stdout(io.StringIO()):
                use(cfg, case)
            outcomes.add("used")
        except UserError as error:
            assert_clear(error, *names)
            assert status or isinstance(error, ConfigError) or "no annotation" in str(error), (
                f"lambda-det check finds nothing wrong, but: {error}"
            )
            outcomes.add(type(error).__name__)
    return " and ".join(sorted(outcomes))


_base_config = functools.cache(tiny_config)


def config(case: Case, json_file: Path, images: Path) -> CfgNode:
    cfg = _base_config().clone()
    cfg.MODEL.MASK_ON = case.mask_on
    cfg.MODEL.KEYPOINT_ON = case.keypoint_on
    cfg.MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS = 4
    cfg.MODEL.ROI_KEYPOINT_HEAD.CONV_DIMS = [16]
    cfg.TEST.KEYPOINT_OKS_SIGMAS = [0.05] * 4
    cfg.MODEL.RPN.PRE_NMS_TOPK_TRAIN = 50
    cfg.MODEL.RPN.POST_NMS_TOPK_TRAIN = 20
    cfg.MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE = 8
    cfg.DATALOADER.NUM_WORKERS = 0
    cfg.DATALOADER.MAX_UNREADABLE_IMAGES = 2
    cfg.INPUT.MASK_FORMAT = case.mask_format
    cfg.INPUT.LSJ.ENABLED = case.large_scale_jitter
    cfg.INPUT.LSJ.SIZE = 64
    cfg.INPUT.MIN_SIZE_TRAIN = (64,)
    cfg.INPUT.MAX_SIZE_TRAIN = 96
    for split in ("TRAIN", "TEST"):
        cfg.DATASETS[f"{split}_JSON"] = str(json_file)
        cfg.DATASETS[f"{split}_IMAGES"] = str(images)
    cfg.OUTPUT_DIR = str(json_file.parent / "run")
    return cfg


def _train(cfg: CfgNode, case: Case) -> None:
    """As a run begins, and one pass over the images."""
    cfg = cfg.clone()
    register_json_datasets(cfg)
    check_datasets(cfg, train=True, test=False)
    loader = build_train_loader(cfg, 2)
    loader.begin(seed=0, batches=0)
    for batch in itertools.islice(loader, 3):
        for sample in batch:
            _assert_sound(sample, cfg)
        if case.with_step:
            model = _model(case.mask_on, case.keypoint_on, cfg.MODEL.ROI_HEADS.NUM_CLASSES)
            with EventStorage():
                losses = model(batch)
            assert all(loss.isfinite() for loss in losses.values()), losses
            sum(losses.values()).backward()


def _assert_sound(sample: dict[str, Any], cfg: CfgNode) -> None:
    instances = sample["instances"]
    assert sample["image"].dtype == torch.uint8 and sample["image"].ndim == 3
    assert instances.gt_boxes.tensor.isfinite().all() and (instances.gt_boxes.area() > 0).all()
    assert all(0 <= c < cfg.MODEL.ROI_HEADS.NUM_CLASSES for c in instances.gt_classes.tolist())
    assert instances.has("gt_masks") == cfg.MODEL.MASK_ON


@functools.lru_cache(maxsize=8)
def _model(mask_on: bool, keypoint_on: bool, classes: int) -> torch.nn.Module:
    cfg = config(Case(b"", mask_on=mask_on, keypoint_on=keypoint_on), Path("a"), Path("a"))
    cfg.MODEL.ROI_HEADS.NUM_CLASSES = classes
    return build_model(cfg)


def _evaluate(cfg: CfgNode, case: Case) -> None:
    """As an evaluation of a model that finds the same square in every image."""
    cfg = cfg.clone()
    register_json_datasets(cfg)
    check_datasets(cfg, train=False, test=True)
    (name,) = cfg.DATASETS.TEST
    evaluator = build_evaluator(cfg, name)
    evaluator.reset()
    for (image,) in build_test_loader(cfg, name):
        predictions = found((image["height"], image["width"]), [[1, 1, 20, 20]], masks=case.mask_on)
        if case.keypoint_on:
            predictions.pred_keypoints = torch.ones(1, 4, 3)
        evaluator.process([image], [{"instances": predictions}])
    tasks = ["bbox"] + ["segm"] * case.mask_on + ["keypoints"] * case.keypoint_on
    assert sorted(evaluator.evaluate()) == sorted(tasks)


@contextlib.contextmanager
def _each_said_once() -> Iterator[None]:
    """Check that no warning is repeated and that a log can hold each message."""
    said: set[str] = set()

    def hear(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        message.encode()
        assert record.levelno < logging.WARNING or message not in said, message
        said.add(message)
        return False

    handler = logging.NullHandler()
    handler.handle = hear
    logging.getLogger("lambda_det").addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger("lambda_det").removeHandler(handler)


@contextlib.contextmanager
def limits() -> Iterator[None]:
    """Let a case fail that hangs or takes all memory, without stopping the others."""
    if not Path("/proc/self/statm").exists():
        pytest.skip("the limits need /proc")
    import resource

    def hang(number: int, _: object) -> None:
        raise Hang(f"takes over {SECONDS} s")

    before, handler = resource.getrlimit(resource.RLIMIT_AS), signal.signal(signal.SIGALRM, hang)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, before[1]))
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)
