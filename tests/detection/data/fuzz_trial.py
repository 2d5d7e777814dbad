"""What a user does with a data set, for a fuzz test: each step works or ends in a named error."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import functools
import io
import itertools
import logging
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
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
    register_json_datasets,
    truth,
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


def case_parser(
    module: str, description: str | None, kinds: Iterable[str], epilog: str | None = None
) -> argparse.ArgumentParser:
    """What the programs of cases have in common."""
    made = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("cases", type=int, metavar="CASES", help="how many")
    made.add_argument("--seed", type=int, default=0, help="of the first case (default: 0)")
    made.add_argument("--kind", choices=sorted(kinds), help="one kind alone")
    return made


def take_all(cases: Iterable[tuple[str, int]], take: Callable[[str, int], str]) -> int:
    """Take cases until Ctrl-C, print how those of each kind ended and the first of each failure.

    Args:
        cases: kinds and seeds.
        take: gives the outcome of one.

    Returns:
        The exit status of the program: 1 if a case failed.
    """
    faulthandler.enable()
    logging.disable(logging.INFO)
    logging.getLogger().addHandler(logging.NullHandler())  # the trial listens
    warnings.simplefilter("ignore")
    outcomes: dict[str, Counter[str]] = {}
    failures: dict[str, list[tuple[int, str]]] = {}  # by kind and first line
    # The commands that a case calls would take Ctrl-C for theirs
    stopped: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: stopped.append(number))
    for kind, seed in itertools.takewhile(lambda _: not stopped, cases):
        # Before the case, so that the last seed is the one that crashed Python, if one does
        print(f"\r{kind}, seed {seed}", end="", file=sys.stderr)
        try:
            outcome = take(kind, seed)
        except AssertionError as error:
            outcome, story = "FAILED", str(error)
            failures.setdefault(f"{kind}: {story.splitlines()[0]}", []).append((seed, story))
        outcomes.setdefault(kind, Counter())[outcome] += 1
    signal.signal(signal.SIGINT, before)
    for kind, counts in outcomes.items():
        print(f"\n{kind}:", *(f"{n:9,} {outcome}" for outcome, n in counts.most_common()), sep="\n")
    for way, stories in failures.items():
        print(f"\n{way}\n--seed {' or '.join(str(seed) for seed, _ in stories)}\n{stories[0][1]}")
    return int(bool(failures))


def take(case: Case, ground_truth: GroundTruth) -> str:
    """How the case ended: "used", the name of the error, or one of them in training alone.

    Raises:
        AssertionError: it ended in another way than a user may expect.
    """
    with tempfile.TemporaryDirectory() as folder, used_or_refused(), _catalogs():
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


@contextlib.contextmanager
def _catalogs() -> Iterator[None]:
    before = set(DatasetCatalog)
    truth._warned.clear()
    try:
        yield
    finally:
        for name in set(DatasetCatalog) - before:
            DatasetCatalog.remove(name)
            if name in MetadataCatalog:
                MetadataCatalog.remove(name)
