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
import json
import logging
import math
import os
import random
import signal
import struct
import tempfile
import traceback
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pycocotools.mask as mask_util
import pytest
import torch
from detectron2.config import CfgNode
from detectron2.modeling import build_model
from detectron2.structures import Boxes, Instances
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
from tests.shapes import make_panoptic_shapes
from tests.training.tiny_detector import tiny_config


@dataclass
class GroundTruth:
    """A sound data set to start from: its annotations, and its images by file name."""

    content: dict[str, Any]
    folder: Path

    @classmethod
    def made(cls, root: Path) -> GroundTruth:
        """Six images of 64x64 with boxes, polygons, run lengths of both forms, and keypoints."""
        make_panoptic_shapes(root, num_train=6, num_val=1, size=64)
        folder = root / "shapes_panoptic"
        content = json.loads((folder / "annotations" / "keypoints_train.json").read_text())
        content["categories"] = [c for c in content["categories"] if "keypoints" in c]
        for entry, compressed in zip(content["annotations"], (True, False), strict=False):
            (runs,) = mask_util.frPyObjects(entry["segmentation"], 64, 64)
            flat = mask_util.decode(runs).reshape(-1, order="F")
            edges = (np.flatnonzero(np.diff(flat)) + 1).tolist()
            counts = np.diff([0, *edges, flat.size]).tolist()
            entry["segmentation"] = {
                "size": [64, 64],
                "counts": runs["counts"].decode() if compressed else counts,
            }
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
    def drawn(cls, rng: random.Random, json: bytes, **fields: Any) -> Case:
        return cls(
            json,
            mask_on=rng.random() < 0.8,
            keypoint_on=rng.random() < 0.2,
            large_scale_jitter=rng.random() < 0.7,
            mask_format=rng.choice(("polygon", "bitmask")),
            with_step=rng.random() < 0.1,
            **fields,
        )


def mutated_structure(ground_truth: GroundTruth, seed: int) -> Case:
    """JSON of another structure: values of other types, entries removed, doubled, added."""
    rng = random.Random(seed)
    content = ground_truth.repeated(rng.choice((1, 8, 8)))
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        mutate(content, rng)
    return Case.drawn(rng, json.dumps(content).encode())


def mutated_bytes(ground_truth: GroundTruth, seed: int) -> Case:
    """A JSON file with bytes changed, or cut off."""
    rng = random.Random(seed)
    damage = BROKEN_FILES[rng.choice(("cut", "flipped", "flipped", "flipped"))]
    return Case.drawn(rng, damage(json.dumps(ground_truth.content).encode(), rng))


def mutated_images(ground_truth: GroundTruth, seed: int) -> Case:
    """Sound annotations of images of which some, or all, are not as they should be."""
    rng = random.Random(seed)
    content = copy.deepcopy(ground_truth.content)
    entries = rng.sample(content["images"], rng.randint(1, len(content["images"])))
    images = {}
    for entry in entries:
        good = (ground_truth.folder / entry["file_name"]).read_bytes()
        kind = rng.choice((*BROKEN_FILES, *BROKEN_FILES, *STRANGE_FILES, "name"))
        if kind == "name":
            entry["file_name"] = rng.choice(STRANGE_NAMES)
            kind = "mode"
        if "\0" not in entry["file_name"]:
            images[entry["file_name"]] = maker(kind, good, random.Random(rng.random()))
    return Case.drawn(rng, json.dumps(content).encode(), images=images)


def drawn_annotations(ground_truth: GroundTruth, seed: int) -> Case:
    """Boxes, masks and keypoints drawn from numbers of which most are as they should be."""
    rng = random.Random(seed)
    content = ground_truth.repeated(rng.choice((1, 8, 8)))
    annotations = content["annotations"]
    for entry in rng.sample(annotations, min(rng.choice((1, 1, 2, 20)), len(annotations))):
        for key in rng.sample(sorted(DRAWN), rng.choice((1, 1, 2, len(DRAWN)))):
            entry[key] = DRAWN[key](rng)
    return Case.drawn(rng, json.dumps(content).encode())


MUTATIONS = {
    "structure": mutated_structure,
    "bytes": mutated_bytes,
    "images": mutated_images,
    "annotations": drawn_annotations,
}


def _number(rng: random.Random) -> float:
    usual = (rng.randint(0, 64), rng.randint(0, 64), rng.randint(1, 30), rng.uniform(-70, 130))
    odd = (0, -1, 1e-9, 1e9, 1e300, math.inf, math.nan, 2**31, 2**64, 10**400, True)
    return rng.choice(odd) if rng.random() < 0.1 else rng.choice(usual)


def _numbers(rng: random.Random, fewest: int, most: int) -> list[float]:
    return [_number(rng) for _ in range(rng.randint(fewest, most))]


def _runs(rng: random.Random) -> dict[str, Any]:
    split = rng.randint(0, 4096)
    text = "".join(chr(rng.randint(48, 111)) for _ in range(rng.randint(0, 12)))
    size = rng.choice([[64, 64]] * 9 + [[64, 63], [2**31, 2**31], [0, 0]])
    return {"size": size, "counts": rng.choice(([split, 4096 - split], _numbers(rng, 0, 4), text))}


# What may be drawn for a key of an annotation
DRAWN: dict[str, Callable[[random.Random], Any]] = {
    "bbox": lambda rng: _numbers(rng, 4, 4),
    "segmentation": lambda rng: rng.choice((_runs(rng), [_numbers(rng, 6, 13)])),
    "area": _number,
    "iscrowd": lambda rng: rng.choice((0, 0, 0, 1)),
    "keypoints": lambda rng: rng.choice((_numbers(rng, 12, 12), _numbers(rng, 0, 13))),
    "num_keypoints": lambda rng: rng.randint(0, 4),
}


# What may stand in the place of any value
# fmt: off
STRANGE_VALUES = (
    None, True, False, 0, -1, 1, 2, 5, 0.5, 1e-9, 1e5, 1e9, 1e308, -1e308,
    math.nan, math.inf, -math.inf, 2**31, 2**63, 2**64, -(2**63), 10**30, 10**400,
    "", "a", "1", "\0", "ä" * 50, "a\nb", "\ud800", "../x", "/etc/passwd", "a" * 999,
    [], {}, [[]], [{}], [None], [1], [1, 2, 3], [1, 2, 3, 4], {"a": {}},
    # Boxes
    [5, 5, 1e-9, 1e-9], [60, 40, 1000, 1000], [-50, -50, 60, 60], [64, 64, 1, 1], ["5"] * 4,
    [True, True, 5, 5], [1e308] * 4, [0, 0, 10**400, 5], [1, 1, math.nan, 3],
    # Polygons
    [[1, 2, 3, 4, 5, 6]], [[0] * 6], [[1e308] * 6], [["a"] * 6], [[math.nan] * 6], [[True] * 6],
    [[0, 0, 10, 10, 0, 10, 10, 0]], [[1, 1, 1, 1, 2, 2]], [[1, 1, 10**400, 1, 2, 2]],
    [[-1e9, -1e9, 1e9, -1e9, 1e9, 1e9]], [[0, 0, 99999, 0, 99999, 99999] * 9],
    # Run lengths
    {"counts": [1]}, {"size": [64, 64]}, {"size": [60000, 60000], "counts": [3600000000]},
    *({"size": size, "counts": [4]} for size in ([-1, -1], [2 * 10**9] * 2, ["a", 1], 64, [64])),
    *({"size": [64, 64], "counts": counts} for counts in (
        "x", "\u00ff\u00fe", "\ud800", "ooooo", "~" * 99, "0" * 99,
        [], None, {}, [1], [4096], [-5, 4101], [1.5, 4094.5], [2**40], [[4096]], ["4096"],
    )),
    # Keypoints
    [1, 2, 2] * 4, [1, 2] * 6, ["1"] * 12, [math.nan] * 12, [[1, 2, 2]] * 4, [1e308] * 12,
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
    *("deep/er/x.png", "../out.png", "%s{}.png", "http://a/b.png", "-rf.png"),
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


def _zeroed(good: bytes, rng: random.Random) -> bytes:
    first, last = sorted(rng.randrange(len(good) + 1) for _ in range(2))
    return good[:first] + bytes(last - first) + good[last:]


def _of_another_mode(good: bytes, rng: random.Random) -> bytes:
    """The image in another of Pillow's modes and formats, maybe turned by its EXIF data."""
    image = Image.open(io.BytesIO(good)).convert("RGB")
    if rng.random() < 0.2:
        image = image.resize(rng.choice(((1, 1), (1, 64), (63, 64), (500, 2), (64, 65))))
    mode = rng.choice(("L", "1", "P", "RGBA", "CMYK", "I", "F", "LA", "YCbCr", "I;16", "HSV"))
    kind = rng.choice(("PNG", "TIFF", "GIF", "BMP", "WEBP", "JPEG", "PPM", "ICO"))
    options: dict[str, Any] = {}
    if rng.random() < 0.3:
        exif = Image.Exif()
        exif[0x0112] = rng.choice((0, 1, 3, 6, 8, 9, 65535))
        options["exif"] = exif.tobytes()
        if rng.random() < 0.3:
            options["exif"] = options["exif"][:-1] + rng.randbytes(9)
    if rng.random() < 0.2 and kind in ("GIF", "TIFF", "WEBP", "PNG"):
        options |= {"save_all": True, "append_images": [image.rotate(90)]}
    content = io.BytesIO()
    try:
        image.convert(mode).save(content, kind, **options)
    except Exception:  # not every format has every mode
        content = io.BytesIO()
        image.save(content, "JPEG")
    return content.getvalue()


def _bomb(good: bytes, rng: random.Random) -> bytes:
    """A PNG or BMP file of a few bytes that says it is an image of gigabytes."""
    width, height = rng.choice(((60000, 60000), (2**31 - 1, 1), (1, 2**31 - 1), (14000, 14000)))
    if rng.random() < 0.3:
        return b"BM" + struct.pack("<IIIIiiHHIIiiII", 66, 0, 54, 40, width, height, 1, 24, *[0] * 6)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(bytes(1000))), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )


# Files with other bytes: (those of a sound file, random numbers) -> bytes
BROKEN_FILES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "cut": lambda good, rng: good[: rng.randrange(len(good))],
    "flipped": _flipped,
    "zeroed": _zeroed,
    "noise": lambda good, rng: rng.randbytes(rng.randrange(2000)),
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
    "dangling": lambda path: path.symlink_to(path.parent / "not there"),
    "pipe": lambda path: os.mkfifo(path),
    "zeros": lambda path: path.symlink_to("/dev/zero"),
    "nothing": lambda path: path.symlink_to("/dev/null"),
    "forbidden": _unreadable,
}


# ------------------------------------------------------------------------------------- the trial
# A case that takes longer hangs; most take a twentieth of a second. On a busy machine a sound case
# may wait for long, so that the first limit is one of computing
COMPUTING = 60  # seconds of the process's CPU time
WAITING = 900  # seconds
MEMORY = 3 * 2**30  # bytes that a case may take more than the process has already


class Hang(BaseException):
    """A case took longer than it may.

    It is no Exception, so that nothing takes it for a broken file.
    """


@contextlib.contextmanager
def used_or_refused() -> Iterator[None]:
    """Let a case end well or in one of the package's own errors, within the limits.

    Raises:
        AssertionError: it ended in another way, with the whole story.
    """
    try:
        with limits():
            yield
    except UserError:
        raise
    except (Exception, Hang) as error:
        story = "".join(traceback.format_exception(error)[-12:])
        raise AssertionError(f"{type(error).__name__}: {error}\n{story}") from None


def assert_clear(error: UserError, *names: str) -> None:
    """One line that has one of the names, as of the file or of keys of the configuration."""
    sentence = str(error)
    assert any(name in sentence for name in names), f"names none of {names}: {sentence}"
    assert sentence.isprintable(), f"not one printable line: {sentence!r}"
    assert len(sentence) < 2000, f"{len(sentence)} characters long"


def take(case: Case, ground_truth: GroundTruth) -> str:
    """How the case ended: "used", the name of the error, or one of them in training alone.

    Raises:
        AssertionError: it ended in another way than a user may expect.
    """
    with tempfile.TemporaryDirectory() as folder, used_or_refused():
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
    batches = iter(loader)
    for _ in range(3):
        batch = next(batches)
        for sample in batch:
            _assert_sound(sample, cfg)
        if case.with_step:
            with EventStorage():
                losses = _model(*_switches(cfg))(batch)
            assert all(loss.isfinite() for loss in losses.values()), losses
            sum(losses.values()).backward()


def _assert_sound(sample: dict[str, Any], cfg: CfgNode) -> None:
    instances = sample["instances"]
    assert sample["image"].dtype == torch.uint8 and sample["image"].ndim == 3
    assert instances.gt_boxes.tensor.isfinite().all() and (instances.gt_boxes.area() > 0).all()
    assert all(0 <= c < cfg.MODEL.ROI_HEADS.NUM_CLASSES for c in instances.gt_classes.tolist())
    assert instances.has("gt_masks") == cfg.MODEL.MASK_ON


def _switches(cfg: CfgNode) -> tuple[bool, bool, int]:
    return cfg.MODEL.MASK_ON, cfg.MODEL.KEYPOINT_ON, cfg.MODEL.ROI_HEADS.NUM_CLASSES


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
        size = image["height"], image["width"]
        found = Instances(size, scores=torch.tensor([0.9]), pred_classes=torch.tensor([0]))
        found.pred_boxes = Boxes(torch.tensor([[1.0, 1.0, 20.0, 20.0]]))
        if cfg.MODEL.MASK_ON:
            found.pred_masks = torch.zeros(1, *size, dtype=torch.bool)
            found.pred_masks[:, 1:20, 1:20] = True
        if cfg.MODEL.KEYPOINT_ON:
            found.pred_keypoints = torch.ones(1, 4, 3)
        evaluator.process([image], [{"instances": found}])
    results = evaluator.evaluate()
    tasks = ["bbox"] + ["segm"] * cfg.MODEL.MASK_ON + ["keypoints"] * cfg.MODEL.KEYPOINT_ON
    assert sorted(results) == sorted(tasks)


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
        computed = number == signal.SIGPROF
        raise Hang(f"computes for over {COMPUTING} s" if computed else f"waits for {WAITING} s")

    limits = resource.getrlimit(resource.RLIMIT_AS)
    before = {number: signal.signal(number, hang) for number in (signal.SIGPROF, signal.SIGALRM)}
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, limits[1]))
    signal.setitimer(signal.ITIMER_PROF, COMPUTING)
    signal.setitimer(signal.ITIMER_REAL, WAITING)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
        resource.setrlimit(resource.RLIMIT_AS, limits)
