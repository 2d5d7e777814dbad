#!/usr/bin/env python
"""Estimate time and memory of a training from two small steps that are measured here.

A detector computes one image of a quarter and one of half the side of its training images, a
classifier two and six images of their size. Seconds and bytes are assumed to be linear in the
pixels of all images, plus a constant for each image (of a detector) or each pass (of a classifier).
Weights, gradients and the optimiser's numbers are counted. README.md has the error of the estimate
for steps of other sizes.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from detectron2.structures import BitMasks, Boxes, Instances, Keypoints
from detectron2.utils.events import EventStorage
from tabulate import tabulate
from torch import Tensor

from lambda_benchmarks.memory import GIB, peak_memory, tensor_bytes
from lambda_det.classification.config import check_ranges, load_recipe
from lambda_det.classification.data import Sources, build_sources
from lambda_det.classification.data.sources import SyntheticSource
from lambda_det.classification.task import ClassificationTask
from lambda_det.detection import load_config
from lambda_det.detection.task import DetectionTask
from lambda_det.errors import ConfigError, DataError, exit_status
from lambda_det.training.command_line import add_config_flag
from lambda_det.training.config_file import CLASSIFIER, ConfigFile, kind_of
from lambda_det.training.precision import Precision
from lambda_det.training.settings import Settings
from lambda_det.training.task import Task

FRAGMENTS = 1.08  # share of all tensors that the allocator loses between them
OBJECTS = 20  # objects in an image of a detector; COCO has 7 on average
CONTEXT = GIB  # memory of CUDA, cuDNN and cuBLAS on a GPU
MOST_IMAGES = 512  # the most images at once that are considered
_KNOWN = {"cifar10": (10, 50_000)}  # classes and images of a DATA.FORMAT; else ImageNet's

_EXAMPLES = """examples:
  %(prog)s --config configs/mask_rcnn_lambdaresnet152.yaml --gpu-memory 80 --num-gpus 8
  %(prog)s --config configs/imagenet/lambda_resnet50_160.yaml --num-gpus 8

Data are not needed. Times are those of this machine, which takes four steps or so of each size.
"""


# ------------------------------------------------------------------------------------- measurements
@dataclass(frozen=True)
class Step:
    """A measured training step.

    Attributes:
        images, side: of the batch; images are squares.
        seconds: of forward and backward pass.
        update: seconds of the optimiser.
        peak: bytes of tensors at once, beyond ``state``.
        state: bytes of weights, gradients and the optimiser's numbers.
    """

    images: int
    side: int
    seconds: float
    update: float
    peak: int
    state: int


@dataclass(frozen=True)
class LinearFit:
    """The cost of steps of other sizes, from two measured steps.

    Attributes:
        small, large: the steps.
        by_image: whether the constant is for each image, or for each pass.
    """

    small: Step
    large: Step
    by_image: bool

    def _fitted(self, name: str, images: int, side: int) -> float:
        rows = [(self._units(s.images), s.images * s.side**2, s) for s in (self.small, self.large)]
        (units, first, small), (_, second, large) = rows
        slope = max(getattr(large, name) - getattr(small, name), 0) / (second - first)
        rest = max(getattr(small, name) - slope * first, 0) / units
        return rest * self._units(images) + slope * images * side**2

    def _units(self, images: int) -> int:
        return images if self.by_image else 1

    def seconds(self, images: int, side: int, accumulate: int = 1) -> float:
        """Seconds of an optimiser step with a number of batches."""
        return accumulate * self._fitted("seconds", images, side) + self.large.update

    def memory(self, images: int, side: int) -> int:
        """Bytes of all tensors at once."""
        return int(self.large.state + self._fitted("peak", images, side))


def measure(task: Task, sizes: Iterable[tuple[int, int]]) -> list[Step]:
    """Take training steps on noise for each (images, side of an image), on the task's device."""
    device = torch.device(task.settings.device)
    model = task.build_model().train()
    optimizer = task.build_optimizer(model)
    for group in optimizer.param_groups:
        group["lr"] = 0.0  # random weights behind frozen norms would diverge on noise
    precision = Precision.of(task.settings)

    def timed(work: Callable[[], object]) -> float:
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    steps = []
    for images, side in sizes:
        batch = _noise(task, images, side)

        def gradients(batch: Any = batch) -> None:
            optimizer.zero_grad(set_to_none=False)  # as in accumulation, where gradients exist
            with EventStorage(), precision.autocast():
                loss = sum(model(batch).values())
            loss.backward()

        timed(gradients), timed(optimizer.step)  # the first steps take longer
        times = [(timed(gradients), timed(optimizer.step)) for _ in range(2)]
        held = [value for state in optimizer.state.values() for value in state.values()]
        held += [p.grad for p in model.parameters() if p.grad is not None]
        held += [*model.parameters(), *model.buffers()]
        steps.append(
            Step(
                images,
                side,
                seconds=min(seconds for seconds, _ in times),
                update=min(update for _, update in times),
                peak=peak_memory(gradients, device),
                state=tensor_bytes(tensor for tensor in held if isinstance(tensor, Tensor)),
            )
        )
    return steps


def _noise(task: Task, images: int, side: int) -> Any:
    if isinstance(task, ClassificationTask):
        pixels = torch.randint(0, 256, (images, side, side, 3), dtype=torch.uint8)
        return {"images": pixels, "labels": torch.zeros(images, dtype=torch.long)}
    return [_noisy_sample(side, task.components.detector.keypoints or 17) for _ in range(images)]


def _noisy_sample(side: int, keypoints: int) -> dict[str, object]:
    """An image of noise in Detectron2's format, with all annotations that a model may need."""
    corners = torch.rand(OBJECTS, 2) * side / 2
    sides = 16 + torch.rand(OBJECTS, 2) * (side / 2 - 16)
    objects = Instances((side, side))
    objects.gt_boxes = Boxes(torch.cat([corners, corners + sides], dim=1))
    objects.gt_classes = torch.zeros(OBJECTS, dtype=torch.long)
    masks = torch.zeros(OBJECTS, side, side, dtype=torch.bool)
    for mask, (left, top, right, bottom) in zip(masks, objects.gt_boxes.tensor.long(), strict=True):
        mask[top:bottom, left:right] = True
    objects.gt_masks = BitMasks(masks)
    centres = (corners + sides / 2)[:, None].repeat(1, keypoints, 1)
    objects.gt_keypoints = Keypoints(torch.cat([centres, torch.full_like(centres[..., :1], 2)], 2))
    return {
        "image": torch.randint(0, 256, (3, side, side), dtype=torch.uint8),
        "instances": objects,
        "sem_seg": torch.zeros(side, side, dtype=torch.long),
        "height": side,
        "width": side,
    }


# --------------------------------------------------------------------------------------- the plan
def load_task(file: str, opts: list[str]) -> tuple[Task, tuple[int, int], list[str]]:
    """The task of a file, the largest size of its images, and notes for the user.

    Raises:
        ConfigError: the file, a key or a value is invalid.
    """
    words = argparse.Namespace(
        config_file=file, opts=list(opts), synthetic_data=False, debug_numerics=False
    )
    notes = []
    if kind_of(ConfigFile(file)) != CLASSIFIER:
        task = DetectionTask(load_config(words))
        task.register_data()
        if task.config.RECIPE.ENABLED:
            notes.append(
                "Batch and steps are the file's; in the training they follow from the data."
            )
        return task, task.components.training_size, notes
    cfg = load_recipe(words)
    check_ranges(cfg)
    try:
        sources = build_sources(cfg)
    except DataError:
        classes, images = _KNOWN.get(cfg.DATA.FORMAT, (1000, 1_281_167))
        sources = Sources(SyntheticSource(cfg.INPUT.SIZE, classes, images), None, None)
        notes.append(
            f"Guessed, since DATA.TRAIN {cfg.DATA.TRAIN} is not here: {images:,} images of "
            f"{classes:,} classes."
        )
    task = ClassificationTask(cfg)
    task.plan_for(sources)
    return task, (cfg.INPUT.SIZE, cfg.INPUT.SIZE), notes


def fit_task(task: Task, size: tuple[int, int]) -> LinearFit:
    """Measure the two steps of a task on its device; ``size`` is that of its images."""
    side = round((size[0] * size[1]) ** 0.5)
    if isinstance(task, ClassificationTask):
        return LinearFit(*measure(task, [(2, side), (6, side)]), by_image=False)
    small = max(side // 128 * 32, 64)
    large = max(side // 64 * 32, small + 64)
    return LinearFit(*measure(task, [(1, small), (1, large)]), by_image=True)


def make_plan(
    file: str, opts: list[str], *, gpu_memory: float | None = None, gpus: int = 1
) -> Iterator[str]:
    """The plan of a training, line by line as it is computed.

    Args:
        file: a configuration of a detector or a classifier.
        opts: keys and values that are read over it.
        gpu_memory: GiB of one GPU; by default that of this machine's first, or 24.
        gpus: of all machines.

    Raises:
        ConfigError: a key or value cannot be.
    """
    for flag, value in (("gpu-memory", gpu_memory), ("num-gpus", gpus)):
        if value is not None and not value > 0:
            raise ConfigError(f"--{flag} is {value}; it must be more than 0.")
    task, size, notes = load_task(file, opts)
    settings = task.settings
    here = settings.device
    if torch.device(here).type == "cuda" and not torch.cuda.is_available():
        here = "cpu"
        task, *_ = load_task(file, [*opts, "MODEL.DEVICE", "cpu"])
    if gpu_memory is None and torch.cuda.is_available():
        gpu_memory = torch.cuda.get_device_properties(0).total_memory / GIB
    limit = int((gpu_memory or 24) * GIB)
    yield (
        f"{file}\n{size[0]}x{size[1]}, {Precision.of(settings)}, {gpus} GPU(s) with "
        f"{limit / GIB:.1f} GiB each"
    )
    fit = fit_task(task, size)
    for step in (fit.small, fit.large):
        yield (
            f"Measured on {here} in {Precision.of(task.settings)}: {step.images} image(s) of "
            f"{step.side}x{step.side} take {step.seconds + step.update:.3g} s and "
            f"{step.peak / GIB:.2f} GiB, beside {step.state / GIB:.2f} GiB of weights, gradients "
            "and the optimiser's numbers"
        )
    yield from _plan_lines(settings, fit, size, limit, gpus)
    yield from notes
    if torch.device(settings.device).type != torch.device(here).type:
        yield f"No figure comes from a GPU: times are those of {here}, where other kernels run."


def _plan_lines(
    settings: Settings, fit: LinearFit, size: tuple[int, int], limit: int, gpus: int
) -> Iterator[str]:
    side = round((size[0] * size[1]) ** 0.5)
    batch = settings.images_per_step
    more = fit.large.state // 3 if settings.ema_decay else 0  # averaged weights
    more += fit.large.state // 3 if gpus > 1 else 0  # gradients are copied once more to be sent
    rows, fitting = [], None
    for images in (2**power for power in itertools.count()):
        memory = int(FRAGMENTS * (fit.memory(images, side) + more)) + CONTEXT
        fits, accumulate = memory <= limit, batch // (images * gpus)
        divides = batch % (images * gpus) == 0
        seconds = f"{fit.seconds(images, side, accumulate):.3g}" if divides else "-"
        rows.append([images, f"{memory / GIB:.2f}", "yes" if fits else "no", seconds])
        if fits and divides:
            fitting = images
        if not fits or images >= MOST_IMAGES:
            break
    header = ["images at once", "GiB of a GPU", "fits", f"s for {batch} images"]
    yield "\n" + tabulate(rows, header, tablefmt="simple", disable_numparse=True) + "\n"
    if fitting is None:
        yield (
            f"{settings.option('images_per_step', batch)} cannot be kept: no number of images that "
            f"fits divides it among {gpus} GPU(s)."
        )
        return
    accumulate = batch // (fitting * gpus)
    options = [settings.option("accumulate", accumulate)]
    if getattr(settings, "reference_world_size", 0):
        options.append(settings.option("reference_world_size", accumulate * gpus))
    hours = settings.max_iter * fit.seconds(fitting, side, accumulate) / 3600
    yield (
        f"The file's batch of {batch} images and its {settings.max_iter:,} steps, {fitting} images "
        f"at a time on a GPU, in {hours:,.1f} hours ({hours / 24:,.1f} days) without evaluations:\n"
        f"  {' '.join(options)}"
    )


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        description="Estimate memory, steps and hours of a training before it runs.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_config_flag(result, "YAML file of a detector, or recipe of a classifier")
    result.add_argument(
        "--gpu-memory",
        type=float,
        metavar="GIB",
        help="of one GPU; by default that of this machine's first, or 24",
    )
    result.add_argument("--num-gpus", type=int, default=1, metavar="N", help="of all machines (1)")
    result.add_argument("opts", nargs=argparse.REMAINDER, help="configuration keys and values")
    return result


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)

    # The profiler counts allocations; its notes about devices are of no use
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    warnings.simplefilter("ignore")

    def work() -> None:
        options = {"gpu_memory": args.gpu_memory, "gpus": args.num_gpus}
        for line in make_plan(args.config_file, args.opts, **options):
            print(line, flush=True)

    return exit_status(work)


if __name__ == "__main__":
    sys.exit(main())
