"""Damage files of all kinds that a run reads: each is used, or refused in words that name it.

Annotations and images of detection have a fuzz test of their own, tests/detection/data/fuzz.py.
Here are panoptic and semantic masks, configuration files and backbone files. A case takes
sound files, changes one of them at a seed's choice, and reads them as a run does. Anything but
success or one of the package's own errors is a failure.
"""

import argparse
import functools
import io
import json
import random
import re
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from detectron2.config import CfgNode
from detectron2.structures import Boxes, Instances
from omegaconf import DictConfig

import lambda_det
from lambda_det.classification import ClassificationTask
from lambda_det.classification import parser as classification_parser
from lambda_det.classification.config import check_ranges
from lambda_det.classification.data.build import Sources
from lambda_det.classification.data.sources import SyntheticSource
from lambda_det.detection import DetectionTask, lazy_parser, load_config
from lambda_det.detection import parser as detection_parser
from lambda_det.detection.data import (
    build_test_loader,
    build_train_loader,
    check_datasets,
    register_shapes,
)
from lambda_det.detection.evaluation import build_evaluator
from lambda_det.detection.lazy import dump_lazy, load_lazy_config
from lambda_det.errors import UserError
from lambda_det.export.backbone import extract_backbone
from lambda_det.training.task import Task
from lambda_det.weights.backbone_file import read_backbone, save_backbone
from lambda_det.weights.loading import load
from tests.detection.data.fuzz import assert_clear, mutate, used_or_refused
from tests.export.toy import classifier_checkpoint
from tests.shapes import make_panoptic_shapes

CONFIGS = Path(__file__).parents[2] / "configs"
_EDGE = 2000  # bytes at the beginning and the end of a file, where formats have their tables


@dataclass(frozen=True)
class Kind:
    """A kind of files.

    Attributes:
        make: write sound files into a folder.
        targets: which of them are changed, as patterns.
        use: read them as a run does; takes the folder and the file that was changed.
    """

    make: Callable[[Path], None]
    targets: tuple[str, ...]
    use: Callable[[Path, Path], None]


# ---------------------------------------------------------------------- panoptic and semantic masks
def _make_panoptic(folder: Path) -> None:
    make_panoptic_shapes(folder, num_train=2, num_val=2, size=64)


@functools.cache
def _panoptic_config() -> CfgNode:
    cfg = load_config(
        argparse.Namespace(config_file=str(CONFIGS / "panoptic_fpn_lambdaresnet50.yaml"), opts=[])
    )
    cfg.DATASETS.TRAIN, cfg.DATASETS.TEST = ("shapes_panoptic_train",), ("shapes_panoptic_val",)
    cfg.MODEL.ROI_HEADS.NUM_CLASSES, cfg.MODEL.SEM_SEG_HEAD.NUM_CLASSES = 3, 4
    cfg.INPUT.LSJ.SIZE = cfg.INPUT.MIN_SIZE_TEST = cfg.INPUT.MAX_SIZE_TEST = 64
    cfg.DATALOADER.NUM_WORKERS, cfg.DATALOADER.MAX_UNREADABLE_IMAGES = 0, 1
    return cfg


def _use_panoptic(folder: Path, file: Path) -> None:
    cfg = _panoptic_config().clone()
    cfg.OUTPUT_DIR = str(folder / "run")
    register_shapes(folder)
    check_datasets(cfg, train=True, test=True)
    loader = build_train_loader(cfg, 2)
    loader.begin(seed=0, batches=0)
    for _, batch in zip(range(2), loader, strict=False):
        assert all(sample["sem_seg"].dtype == torch.int64 for sample in batch)
    evaluator = build_evaluator(cfg, "shapes_panoptic_val")
    evaluator.reset()
    for (image,) in build_test_loader(cfg, "shapes_panoptic_val"):
        size = image["height"], image["width"]
        found = Instances(size, scores=torch.tensor([0.9]), pred_classes=torch.tensor([0]))
        found.pred_boxes = Boxes(torch.tensor([[1.0, 1.0, 20.0, 20.0]]))
        found.pred_masks = torch.ones(1, *size, dtype=torch.bool)
        segments = torch.ones(size, dtype=torch.int32)
        described = [{"id": 1, "isthing": True, "category_id": 0, "score": 0.9}]
        output = {"instances": found, "sem_seg": torch.zeros(4, *size)}
        evaluator.process([image], [{**output, "panoptic_seg": (segments, described)}])
    assert {"bbox", "segm", "sem_seg", "panoptic_seg"} <= set(evaluator.evaluate())


# ------------------------------------------------------------------------------------ configuration
class _Saved(NamedTuple):
    """A LazyConfig as a run saved it, which is read; what its nodes do is not ours."""

    config: DictConfig

    def dump(self) -> str:
        return dump_lazy(self.config)


def _lazy_config(args: argparse.Namespace) -> _Saved:
    return _Saved(load_lazy_config(args))


def _recipe_task(args: argparse.Namespace) -> Task:
    task = ClassificationTask.read(args)
    check_ranges(task.cfg)
    task.plan_for(Sources(SyntheticSource(32), None, None))
    return task


_TASKS = {
    "detector.yaml": (DetectionTask.read, detection_parser, "mask_rcnn_lambdaresnet50.yaml"),
    "lazy.yaml": (_lazy_config, lazy_parser, "mask_rcnn_lambdaresnet50.py"),
    "recipe.yaml": (_recipe_task, classification_parser, "imagenet/lambda_resnet50_128.yaml"),
}


def _make_configs(folder: Path) -> None:
    for name, (make, parser, config) in _TASKS.items():
        task = make(parser().parse_args(["--config-file", str(CONFIGS / config)]))
        (folder / name).write_text(task.dump())


def _use_config(folder: Path, file: Path) -> None:
    make, parser, _ = _TASKS[file.name]
    make(parser().parse_args(["--config-file", str(file)])).dump()


# ----------------------------------------------------------------------------------- backbone files
def _make_backbones(folder: Path) -> None:
    content = extract_backbone(classifier_checkpoint(scope=3))
    for ending in (".pth", ".safetensors"):
        save_backbone(content, folder / f"backbone{ending}")


@functools.cache
def _backbone() -> torch.nn.Module:
    return lambda_det.create_backbone("lambda_resnet26_slim", scope=3)


def _use_backbone(folder: Path, file: Path) -> None:
    read_backbone(file)
    load(_backbone(), file)


KINDS = {
    "panoptic": Kind(_make_panoptic, ("*/panoptic_*/*", "*/*/panoptic_*.json"), _use_panoptic),
    "semantic": Kind(_make_panoptic, ("*/stuff_*/*",), _use_panoptic),
    "configs": Kind(_make_configs, ("*.yaml",), _use_config),
    "backbones": Kind(_make_backbones, ("backbone.*",), _use_backbone),
}


# ------------------------------------------------------------------------------------------ changes
# fmt: off
_WORDS = (
    "null", "true", "no", "-1", "0", "1e9", "1e400", ".nan", ".inf", "9" * 20, "0x10", "2001-99-99",
    "1:2", "12:60:60", '"a"', "'b", "[", "]", "{", "}", "[1,2]", "{a:1}", "${train.seed}",
    "${nowhere}", "${env:HOME}", "!!python/name:os.system", "!!python/tuple", "!!binary", "!x",
    "*a", "&a", "<<:", "?", "|", ">", "%", "@", "`", "\t", ",", ":", "-", "#", "---", "...", "é",
    "\u2028", "_target_:", "res9", "lambda_resnet51", "cuda:9",
)
# fmt: on


def _change_bytes(content: bytes, rng: random.Random) -> bytes:
    made = bytearray(content)
    kind = rng.random()
    if kind < 0.15:
        return bytes(made[: rng.randrange(len(made))])
    if kind < 0.2:
        return rng.choice((b"", b"<html>404</html>\n", rng.randbytes(500), b"\xff\xfe"))
    for _ in range(rng.choice((1, 1, 2, 10))):
        edge = min(len(made), _EDGE)
        places = (
            rng.randrange(len(made)),
            rng.randrange(edge),
            len(made) - 1 - rng.randrange(edge),
        )
        place = rng.choice(places)
        if kind < 0.8:
            made[place] = rng.randrange(256)
        else:
            count = rng.choice((1, 8, 100))
            made[place : place + count] = bytes(count) if kind < 0.9 else b""
            made = made or bytearray(1)
    return bytes(made)


def _change_words(content: bytes, rng: random.Random) -> bytes:
    parts = re.split(r"([^\s,:\[\]{}]+)", content.decode())
    for _ in range(rng.choice((1, 1, 2, 5))):
        place = rng.randrange(len(parts))
        if rng.random() < 0.7:
            parts[place] = rng.choice(_WORDS)
        else:
            parts[place] = parts[rng.randrange(len(parts))]
    return "".join(parts).encode(errors="surrogatepass")


def _change_structure(content: bytes, rng: random.Random) -> bytes:
    loaded = json.loads(content)
    for _ in range(rng.choice((1, 1, 2))):
        mutate(loaded, rng)
    return json.dumps(loaded).encode()


def change(path: Path, rng: random.Random) -> None:
    """Change a file in place, in one of the ways that its kind has."""
    ways = {".json": _change_structure, ".yaml": _change_words}
    way = ways.get(path.suffix, _change_bytes)
    if rng.random() < 0.3:
        way = _change_bytes
    path.write_bytes(way(path.read_bytes(), rng))


def take(kind: Kind, folder: Path, seed: int) -> str:
    """How a case ended: "used", or the name of the error.

    Args:
        kind: of ``KINDS``.
        folder: with its sound files, which are put back.
        seed: of the case.

    Raises:
        AssertionError: it ended in another way, with the whole story.
    """
    rng = random.Random(seed)
    found = [path for pattern in kind.targets for path in folder.glob(pattern)]
    targets = sorted(path for path in found if path.is_file())
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    file = rng.choice(targets)
    change(file, rng)
    try:
        quiet = io.StringIO()
        with used_or_refused(), redirect_stdout(quiet), redirect_stderr(quiet):
            kind.use(folder, file)
        return "used"
    except UserError as error:
        # The folder of the file, or a key of the configuration, or one that a LazyConfig lacks
        keys = re.findall(r"\w\.\w|\b[A-Z0-9]+_[A-Z]+\b|has no \w+: a LazyConfig", str(error))
        assert_clear(error, str(folder), *keys)
        return type(error).__name__
    finally:
        for path in folder.rglob("*"):
            if path.is_file() and path not in before:
                path.unlink()
        for path, content in before.items():
            if not path.exists() or path.read_bytes() != content:
                path.write_bytes(content)
