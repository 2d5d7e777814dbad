"""What a user does with a data set, for a fuzz test: each step works or ends in a named error."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import signal
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.modeling import build_model
from detectron2.structures import Boxes, Instances
from detectron2.utils.events import EventStorage

from lambda_det.detection.data import (
    build_test_loader,
    build_train_loader,
    check_datasets,
    command_line,
    mapper,
    register_json_datasets,
)
from lambda_det.detection.evaluation import build_evaluator
from lambda_det.errors import ConfigError, UserError
from tests.detection.data.fuzz_cases import Case, GroundTruth
from tests.training.tiny_detector import tiny_config

# A case that takes longer hangs; most take a twentieth of a second. On a busy machine a sound case
# may wait for long, so that the first limit is one of computing
COMPUTING = 60  # seconds of the process's CPU time
WAITING = 900  # seconds
MEMORY = 3 * 2**30  # bytes that a case may take more than the process has already

_SHOWN = 10  # ways to fail


class Hang(BaseException):
    """A case took longer than it may.

    It is no Exception, so that nothing takes it for a broken file.
    """


class Failures:
    """The stories of failed cases, with the seeds of all that failed in the same way."""

    def __init__(self) -> None:
        self._seeds: dict[str, list[int]] = {}
        self._stories: dict[str, str] = {}

    def add(self, kind: str, seed: int, story: str) -> None:
        """Keep a case that failed; the first line of its story tells the way."""
        way = f"{kind}: {story.splitlines()[0][:100]}"
        self._stories.setdefault(way, story)
        self._seeds.setdefault(way, []).append(seed)

    def tell(self) -> int:
        """Print the first of each way; the exit status of the program."""
        for way, seeds in list(self._seeds.items())[:_SHOWN]:
            print(f"\n{way}\n--seed {' or '.join(map(str, seeds))}\n{self._stories[way]}")
        return int(bool(self._seeds))


class Trial:
    """Takes cases one after the other and keeps count.

    Args:
        ground_truth: what the cases were made of, for its images.
        folder: a folder to work in; a case leaves nothing behind in it.
    """

    def __init__(self, ground_truth: GroundTruth, folder: Path) -> None:
        self.ground_truth = ground_truth
        self.folder = folder
        self.outcomes: Counter[str] = Counter()
        self._number = 0

    def take(self, case: Case) -> str:
        """How the case ended: "used", or the name of the error.

        Raises:
            AssertionError: it ended in another way than a user may expect, with the whole story.
        """
        self._number += 1
        folder = self.folder / str(self._number)
        try:
            with limits(), _catalogs():
                outcome = _take(case, *self._write(case, folder))
        except (AssertionError, Exception, Hang) as error:
            story = "".join(traceback.format_exception(error)[-12:])
            raise AssertionError(f"{type(error).__name__}: {error}\n{story}") from None
        finally:
            _remove(folder)
        self.outcomes[outcome] += 1
        return outcome

    def _write(self, case: Case, folder: Path) -> tuple[Path, Path]:
        images = folder / "images"
        images.mkdir(parents=True)
        for path in self.ground_truth.folder.iterdir() if case.images else ():
            if path.name not in case.images:
                (images / path.name).symlink_to(path)
        for name, make in case.images.items():
            # A name that no file can have stays without one
            with contextlib.suppress(OSError, ValueError):
                path = images / name
                path.parent.mkdir(parents=True, exist_ok=True)
                make(path)
        json_file = folder / "set.json"
        json_file.write_bytes(case.json)
        return json_file, images if case.images else self.ground_truth.folder


def _take(case: Case, json_file: Path, images: Path) -> str:
    cfg = config(case, json_file, images)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        status = command_line.main([str(json_file), str(images)])
    assert status in (0, 1, 2)
    outcomes = set()
    for use in (_train, _evaluate):
        logger = _Once()
        try:
            with logger.listening(), contextlib.redirect_stdout(io.StringIO()):
                use(cfg, case)
            outcomes.add("used")
        except UserError as error:
            _assert_clear(str(error), json_file, images)
            assert status or isinstance(error, ConfigError) or "no annotation" in str(error), (
                f"lambda-det check finds nothing wrong, but: {error}"
            )
            outcomes.add(type(error).__name__)
    return " and ".join(sorted(outcomes))


@functools.cache
def _base_config() -> CfgNode:
    return tiny_config()


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


def _assert_clear(sentence: str, json_file: Path, images: Path) -> None:
    """One line that names the file, or the key of the configuration."""
    named = (str(json_file), str(images), "MODEL.", "DATASETS.", "TEST.", json_file.stem + "_")
    assert any(name in sentence for name in named), f"names no file: {sentence}"
    assert sentence.isprintable(), f"not one printable line: {sentence!r}"
    assert len(sentence) < 2000, f"{len(sentence)} characters long"


class _Once(logging.Handler):
    """Checks that no message is repeated and that a log can hold each."""

    def __init__(self) -> None:
        super().__init__()
        self._said: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        message.encode()
        assert record.levelno < logging.WARNING or message not in self._said, message
        self._said.add(message)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        logger = logging.getLogger("lambda_det")
        logger.addHandler(self)
        try:
            yield
        finally:
            logger.removeHandler(self)


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


@contextlib.contextmanager
def _catalogs() -> Iterator[None]:
    before = set(DatasetCatalog)
    mapper._warned.clear()
    try:
        yield
    finally:
        for name in set(DatasetCatalog) - before:
            DatasetCatalog.remove(name)
            if name in MetadataCatalog:
                MetadataCatalog.remove(name)


def _remove(folder: Path) -> None:
    for parent, folders, files in os.walk(os.fsencode(folder), topdown=False):
        for name in (*files, *folders):
            path = os.path.join(parent, name)
            if os.path.isdir(path) and not os.path.islink(path):
                os.rmdir(path)
            else:
                os.unlink(path)
    if folder.exists():
        folder.rmdir()
