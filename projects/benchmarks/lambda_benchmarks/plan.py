"""What a training will take: memory, operations, steps, disk and hours.

The model runs on tensors without data (:mod:`lambda_benchmarks.dry_run`), forward and backward,
so its operations and activations are counted and not estimated. What depends on the images cannot
be run so: how many regions, objects and anchors meet. There the largest number that the
configuration allows is taken, or a figure that is named in the output.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from detectron2.modeling.poolers import ROIPooler
from detectron2.modeling.roi_heads import CascadeROIHeads, Res5ROIHeads, StandardROIHeads
from detectron2.structures import BitMasks, Boxes, Instances, Keypoints
from detectron2.utils.events import EventStorage
from fvcore.nn import sigmoid_focal_loss
from tabulate import tabulate
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from lambda_benchmarks.dry_run import ELSEWHERE, Part, Trace, pretend_gpu
from lambda_benchmarks.memory import peak_memory, tensor_bytes
from lambda_benchmarks.trainings import Training
from lambda_det.config import option
from lambda_det.cpu.pooling import patch_pooling
from lambda_det.detection.schedule import DetectionSettings, scale_settings
from lambda_det.errors import ConfigError
from lambda_det.modeling.norm import convert_sync_norms
from lambda_det.training.checkpoint_files import last_checkpoint, numbered
from lambda_det.training.precision import Precision

GIB = 2**30
# Guesses, said with every plan
OBJECTS = 20  # of an image, for the matching of anchors; COCO has 7 on average
CONTEXT = GIB  # CUDA's context, workspaces of cuDNN and cuBLAS
FRAGMENTS = 0.08  # of all tensors, lost between them by the allocator
MOST_IMAGES = {"detector": 64, "classifier": 512}  # at once on a GPU; more are not looked at


@dataclass(frozen=True)
class Count:
    """A training step on one GPU.

    Attributes:
        images: of the batch.
        parts: by name, from the first to the last.
        parameters: their number, by part.
        fixed: bytes of weights, averaged weights, gradients and the optimiser's numbers.
        peak: the most bytes of tensors at once, with ``fixed``.
        checkpoint: bytes of one checkpoint.
        missing: modules with parameters that the count did not reach.
    """

    images: int
    parts: Mapping[str, Part]
    parameters: Mapping[str, int]
    fixed: int
    peak: int
    checkpoint: int
    missing: tuple[str, ...]

    @property
    def memory(self) -> int:
        """Bytes of a GPU's memory, guesses included."""
        return int(self.peak * (1 + FRAGMENTS)) + CONTEXT


def count_step(
    training: Training,
    images: int,
    *,
    checkpointing: bool,
    device: str = "cuda",
    processes: int = 1,
) -> Count:
    """Count a training step without doing it.

    Args:
        training: see there.
        images: of the batch.
        checkpointing: of activations.
        device: "cuda", or "cpu" to compare with what its allocator says.
        processes: of the training; with several, gradients lie in a second place to be sent.
    """
    settings = training.settings
    precision = Precision.of(replace(settings, device=device))
    with pretend_gpu(), torch.device(device):
        # Not build_model, which moves the model to the device that it is on
        model = training.make(device, checkpointing)
        model = convert_sync_norms(model, device).train()
        if precision.dtype is not None:
            patch_pooling(model, in_float32=True)
        places = _places(model)
        batch = torch.empty(images, 3, *training.size)
        if training.kind == "classifier":  # bytes, as the loader has them
            batch = torch.empty(images, *training.size, 3, dtype=torch.uint8)
        trace = Trace(device, places, [batch, *model.parameters(), *model.buffers()])
        with trace:
            with precision.autocast():
                outputs = list(_outputs(model, batch, trace))
            reached = trace.backward(outputs)
    weights = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    gradients = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    state = weights * (2 if settings.ema_decay else 1) + training.moments * gradients
    fixed = state + gradients * (2 if processes > 1 else 1)
    return Count(
        images=images,
        parts={name: part for name, part in trace.parts.items() if part != Part()},
        parameters=_parameters(model, places),
        fixed=fixed,
        peak=fixed + batch.nbytes + trace.peak,
        checkpoint=state,
        missing=_unreached(model, reached),
    )


def _places(model: nn.Module) -> dict[nn.Module, str]:
    """The parts of the backbone, by stage; the heads are called by name below."""
    places: dict[nn.Module, str] = {}
    if hasattr(model, "classifier"):
        bottom_up = model.classifier.backbone
    else:
        bottom_up = getattr(model.backbone, "bottom_up", model.backbone)
        places[model.backbone] = "backbone" if bottom_up is model.backbone else "FPN"
    for name, child in bottom_up.named_children():
        if any(True for _ in child.parameters()):
            # A stage of blocks is a list of modules that are called one by one
            for module in (child, *child.children()):
                places[module] = name
    return places


def _outputs(model: nn.Module, batch: Tensor, trace: Trace) -> Iterator[Tensor]:
    """The forward pass up to what the losses take; of a classifier with its loss."""
    if hasattr(model, "classifier"):
        labels = torch.zeros(len(batch), dtype=torch.long)
        yield model({"images": batch, "labels": labels})["loss"]
        return
    features = model.backbone(batch)
    if hasattr(model, "proposal_generator"):
        yield from _proposals(model.proposal_generator, features, trace)
        yield from _regions(model.roi_heads, features, len(batch), trace)
    if hasattr(model, "sem_seg_head"):
        with trace.part("semantic head"):
            yield from _semantic(model.sem_seg_head, features, batch)
    if hasattr(model, "head"):  # of a RetinaNet or FCOS
        with trace.part("head"):
            yield from _dense(model, features)


def _proposals(
    generator: nn.Module, features: Mapping[str, Tensor], trace: Trace
) -> Iterator[Tensor]:
    with trace.part("RPN"):
        logits, deltas = generator.rpn_head([features[name] for name in generator.in_features])
        _match(sum(level[0].numel() for level in logits), logits[0])
        yield from (*logits, *deltas)


def _match(anchors: int, like: Tensor) -> None:
    """Overlaps of the anchors of an image with its objects: corners, sides, area, ratio."""
    like.new_empty((6, OBJECTS, anchors), dtype=torch.float32)


def _regions(
    heads: nn.Module, features: Mapping[str, Tensor], images: int, trace: Trace
) -> Iterator[Tensor]:
    rows = images * heads.batch_size_per_image
    objects = images * int(heads.batch_size_per_image * heads.positive_fraction)
    if isinstance(heads, Res5ROIHeads):
        maps = [features[name] for name in heads.in_features]
        with trace.part("res5 of the regions"):
            shared = heads.res5(_pool(heads.pooler, maps, rows))
        with trace.part("box head"):
            yield from heads.box_predictor(shared.mean((2, 3)))
        if heads.mask_on:
            with trace.part("mask head"):
                yield heads.mask_head.layers(shared[:objects])
        return
    if not isinstance(heads, StandardROIHeads):
        return
    with trace.part("box head"):
        maps = [features[name] for name in heads.box_in_features]
        cascade = isinstance(heads, CascadeROIHeads)
        stages = (
            zip(heads.box_head, heads.box_predictor, strict=True)
            if cascade
            else ((heads.box_head, heads.box_predictor),)
        )
        for head, predictor in stages:
            yield from predictor(head(_pool(heads.box_pooler, maps, rows)))
    for name in ("mask", "keypoint"):
        head = getattr(heads, f"{name}_head", None)
        if getattr(heads, f"{name}_on") and hasattr(head, "layers"):
            with trace.part(f"{name} head"):
                maps = [features[level] for level in getattr(heads, f"{name}_in_features")]
                yield head.layers(_pool(getattr(heads, f"{name}_pooler"), maps, objects))


def _pool(pooler: ROIPooler, maps: list[Tensor], rows: int) -> Tensor:
    """What a pooler makes of ``rows`` regions, the same number of them on each level."""
    share = math.ceil(rows / len(maps))
    pooled = [
        align(level, level.new_empty((share, 5), dtype=torch.float32).to(level.dtype))
        for align, level in zip(pooler.level_poolers, maps, strict=True)
    ]
    return pooled[0] if len(maps) == 1 else torch.cat(pooled)[:rows]


def _semantic(head: nn.Module, features: Mapping[str, Tensor], batch: Tensor) -> Iterator[Tensor]:
    scores = head.layers(features)
    classes = torch.zeros((len(batch), *batch.shape[2:]), dtype=torch.long, device=batch.device)
    try:
        yield from head.losses(scores, classes).values()
    except (DataDependentOutputException, DynamicOutputShapeException):
        # A loss of the hardest pixels alone
        yield nn.functional.interpolate(scores.float(), batch.shape[2:], mode="bilinear")


def _dense(model: nn.Module, features: Mapping[str, Tensor]) -> Iterator[Tensor]:
    logits, *others = model.head([features[name] for name in model.head_in_features])
    anchors = sum(level[0].numel() for level in logits) // model.num_classes
    _match(anchors, logits[0])
    rows = [level.permute(0, 2, 3, 1).reshape(-1, model.num_classes) for level in logits]
    rows = torch.cat(rows)  # all of them have a loss, but the few that are ignored
    yield sigmoid_focal_loss(rows, torch.zeros_like(rows), alpha=0.25, reduction="sum")
    for levels in others:
        yield from levels


# The part that a head's parameters belong to, by the beginning of their names
_HEADS = {
    "proposal_generator.": "RPN",
    "roi_heads.res5.": "res5 of the regions",
    "roi_heads.box_": "box head",
    "roi_heads.mask_": "mask head",
    "roi_heads.keypoint_": "keypoint head",
    "sem_seg_head.": "semantic head",
    "head.": "head",
}


def _parameters(model: nn.Module, places: Mapping[nn.Module, str]) -> dict[str, int]:
    """Numbers of parameters by part."""
    parts: dict[str, str] = {}
    for name, module in model.named_modules():  # of nested modules the inner one comes last
        if module in places:
            parts.update({f"{name}.{own}": places[module] for own, _ in module.named_parameters()})
    found: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        head = next((part for start, part in _HEADS.items() if name.startswith(start)), ELSEWHERE)
        part = parts.get(name, head)
        found[part] = found.get(part, 0) + parameter.numel()
    return found


def _unreached(model: nn.Module, reached: set[Tensor]) -> tuple[str, ...]:
    """Modules with parameters that get gradients in training, and got none here."""
    names = [n for n, p in model.named_parameters() if p.requires_grad and p not in reached]
    return tuple(dict.fromkeys(".".join(name.split(".")[:2]) for name in names))


@dataclass(frozen=True)
class Schedule:
    """How a run keeps the batch of its configuration.

    Attributes:
        images: that a GPU takes at once.
        accumulate: SOLVER.ACCUMULATE_GRADIENTS.
        reference: SOLVER.REFERENCE_WORLD_SIZE, so that nothing is scaled.
    """

    images: int
    accumulate: int
    reference: int


def keep_batch(settings: DetectionSettings, gpus: int, fits: Iterable[int]) -> Schedule | None:
    """The largest share of the batch of a file that fits, with what makes up for the rest.

    Args:
        settings: as they were written, not scaled.
        gpus: of all machines.
        fits: numbers of images that a GPU has the memory for.

    Returns:
        None if no such number divides the batch.
    """
    batch = settings.images_per_step
    images = max((n for n in fits if batch % (n * gpus) == 0), default=None)
    if images is None:
        return None
    accumulate = batch // (images * gpus)
    return Schedule(images, accumulate, accumulate * gpus)


@dataclass(frozen=True)
class Measurement:
    """Three steps on the device itself, on random images.

    Attributes:
        peak: the most bytes of tensors at once, with weights, gradients and momentum.
        memory: bytes that are taken of the GPU's memory; None on the CPU.
        seconds: of the last step.
    """

    peak: int
    memory: int | None
    seconds: float


def measure_step(training: Training, images: int) -> Measurement:
    """Do three training steps on random images with ``OBJECTS`` objects each, on the device.

    Raises:
        RuntimeError: the memory is too small.
    """
    device = torch.device(training.settings.device)
    model, optimizer = training.build()
    model.train()
    precision = Precision.of(training.settings)
    batch = _random_batch(training, images)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)  # as in accumulation, where gradients are there
        with EventStorage(), precision.autocast():
            loss = sum(model(batch).values())
        loss.backward()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    step()
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    alive = [*model.parameters(), *model.buffers()]
    alive += [p.grad for p in model.parameters() if p.grad is not None]
    alive += [x for state in optimizer.state.values() for x in state.values() if x is not None]
    peak = tensor_bytes(x for x in alive if isinstance(x, Tensor)) + peak_memory(step, device)
    memory = None
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        memory = total - free
    return Measurement(peak, memory, seconds[-1])


def _random_batch(training: Training, images: int) -> Any:
    if training.kind == "classifier":
        pixels = torch.randint(0, 256, (images, *training.size, 3), dtype=torch.uint8)
        return {"images": pixels, "labels": torch.zeros(images, dtype=torch.long)}
    return [_random_sample(training) for _ in range(images)]


def _random_sample(training: Training) -> dict[str, object]:
    """An image of noise in Detectron2's format, with whatever annotations a model may want."""
    height, width = size = training.size
    corners = torch.rand(OBJECTS, 2) * torch.tensor([width, height]) / 2
    sides = 16 + torch.rand(OBJECTS, 2) * (torch.tensor([width, height]) / 2 - 16)
    objects = Instances(size)
    objects.gt_boxes = Boxes(torch.cat([corners, corners + sides], dim=1))
    objects.gt_classes = torch.zeros(OBJECTS, dtype=torch.long)
    masks = torch.zeros(OBJECTS, height, width, dtype=torch.bool)
    for mask, box in zip(masks, objects.gt_boxes.tensor.long().tolist(), strict=True):
        mask[box[1] : box[3], box[0] : box[2]] = True
    objects.gt_masks = BitMasks(masks)
    points = training.keypoints
    centres = (corners + sides / 2)[:, None].repeat(1, points, 1)
    objects.gt_keypoints = Keypoints(torch.cat([centres, torch.full_like(centres[..., :1], 2)], 2))
    return {
        "image": torch.randint(0, 256, (3, *size), dtype=torch.uint8),
        "instances": objects,
        "sem_seg": torch.zeros(size, dtype=torch.long),
        "height": height,
        "width": width,
    }


def parts_table(count: Count) -> str:
    """Parameters, operations and activations of a step by part."""
    rows = []
    for name in (*count.parts, *(n for n in count.parameters if n not in count.parts)):
        part, parameters = count.parts.get(name), count.parameters.get(name, 0)
        rows.append([name or "elsewhere", parameters / 1e6])
        if part is None:
            rows[-1] += [None, None, None]
        else:
            rows[-1] += [part.forward / 1e9, part.backward / 1e9, part.kept / 2**20]
    rows.append(["sum", *(sum(row[i] or 0 for row in rows) for i in range(1, 5))])
    cells = [[row[0], *("-" if x is None else f"{x:,.1f}" for x in row[1:])] for row in rows]
    header = ["part", "parameters, M", "forward, GFLOP", "backward, GFLOP", "kept, MiB"]
    return _table(cells, header)


def _table(rows: list[list[str]], header: list[str]) -> str:
    align = ("left", *("right",) * (len(header) - 1))
    return tabulate(rows, header, tablefmt="simple", disable_numparse=True, colalign=align)


def memory_table(
    counts: Mapping[bool, Mapping[int, Count]], measured: Mapping[int, Measurement], limit: int
) -> str:
    """Memory by the number of images, without and with activation checkpointing.

    Args:
        counts: by whether activations are checkpointed and the number of images.
        measured: by the number of images, with the configuration's own checkpointing.
        limit: bytes of the GPU.
    """
    header = ["images", "tensors", "with guesses", "fits"]
    if len(counts) > 1:
        header += ["checkpointed: tensors", "with guesses", "fits"]
    if measured:
        header += ["measured: tensors", "GPU", "s a step"]
    rows = []
    for images in sorted({n for found in counts.values() for n in found}):
        row = [str(images)]
        for found in counts.values():
            row += _memory_cells(found.get(images), limit)
        if measured:
            measurement = measured.get(images)
            row += ["-"] * 3 if measurement is None else _measured_cells(measurement)
        rows.append(row)
    return _table(rows, header)


def _memory_cells(count: Count | None, limit: int) -> list[str]:
    if count is None:
        return ["-", "-", "-"]
    fits = "yes" if count.memory <= limit else "no"
    return [f"{count.peak / GIB:.2f}", f"{count.memory / GIB:.2f}", fits]


def _measured_cells(measurement: Measurement) -> list[str]:
    memory = "-" if measurement.memory is None else f"{measurement.memory / GIB:.2f}"
    return [f"{measurement.peak / GIB:.2f}", memory, f"{measurement.seconds:.3f}"]


def make_plan(
    training: Training,
    title: str,
    *,
    gpu_memory: float | None = None,
    gpus: int = 1,
    step_time: float | None = None,
    measure: bool = False,
) -> Iterator[str]:
    """The plan of a training, line by line as it is found.

    Args:
        training: see there.
        title: what to call it.
        gpu_memory: GiB; that of the first GPU here, or 24, if None.
        gpus: of all machines.
        step_time: seconds of a step with these settings.
        measure: also run steps on the device of the settings.

    Raises:
        ConfigError: a number cannot be, or there is no device to measure on.
    """
    settings = training.settings
    device = torch.device(settings.device).type
    if measure and device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "--measure needs a GPU that PyTorch can use; leave it out to have the counts alone."
        )
    for flag, value in (("gpu-memory", gpu_memory), ("num-gpus", gpus), ("step-time", step_time)):
        if value is not None and not value > 0:
            raise ConfigError(f"--{flag} is {value}; it must be more than 0.")
    scaled = scale_settings(settings, gpus)
    limit = int((gpu_memory or _own_memory() or 24) * GIB)
    height, width = training.size
    dtype = Precision.of(settings).dtype or torch.float32
    yield (
        f"{title}\n{height}x{width}, {str(dtype).removeprefix('torch.')}, {gpus} GPU(s) with "
        f"{limit / GIB:.1f} GiB each"
    )

    counts = _count_until_full(training, device, gpus, limit)
    own = training.is_checkpointed
    one = next(iter(counts[own].values()))
    yield f"\nA training step of {one.images} image(s), by part\n\n{parts_table(one)}"
    fits = {
        checkpointing: [n for n, count in found.items() if count.memory <= limit]
        for checkpointing, found in counts.items()
    }
    measured = {n: measure_step(training, n) for n in fits[own]} if measure else {}
    yield "\nGiB of a GPU's memory, by the number of images that it takes at once\n"
    yield memory_table(counts, measured, limit)
    yield "\n" + "\n".join(_schedule_lines(training, scaled, gpus, fits))
    yield "\n".join(_run_lines(scaled, one, step_time))
    yield "\n" + "\n".join(_assumptions(training, one, measured))


def _own_memory() -> float | None:
    if not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_properties(0).total_memory / GIB


def _count_until_full(
    training: Training, device: str, gpus: int, limit: int
) -> dict[bool, dict[int, Count]]:
    """Counts for 1, 2, 4, ... images up to the first number that does not fit.

    Without and with activation checkpointing, where the network has it.
    """
    counts: dict[bool, dict[int, Count]] = {}
    for checkpointing in (False, True):
        try:
            for images in (2**power for power in itertools.count()):
                count = count_step(
                    training, images, checkpointing=checkpointing, device=device, processes=gpus
                )
                counts.setdefault(checkpointing, {})[images] = count
                if count.memory > limit or images >= MOST_IMAGES[training.kind]:
                    break
        except ConfigError:
            if checkpointing == training.is_checkpointed:
                raise  # not that the network has no checkpointing
    return counts


def _schedule_lines(
    training: Training, scaled: DetectionSettings, gpus: int, fits: Mapping[bool, list[int]]
) -> Iterator[str]:
    settings = training.settings
    share = scaled.images_per_batch // gpus
    yield (
        f"As the settings are: {scaled.images_per_step} images a step, {share} at a time on a GPU, "
        f"learning rate {scaled.base_lr:g}, {scaled.max_iter:,} steps."
    )
    if share > max(fits[training.is_checkpointed], default=0):
        yield f"  {share} images at a time do not fit, or were not counted: see the table."
    batch = settings.images_per_step
    for checkpointing, images in fits.items():
        found = keep_batch(settings, gpus, images)
        if found is not None:
            options = [settings.option("accumulate", found.accumulate)]
            if settings.reference_world_size:
                options.append(settings.option("reference_world_size", found.reference))
            if checkpointing != training.is_checkpointed:
                options.append(option(training.checkpointing, checkpointing))
            yield (
                f"The file's batch of {batch} images and its {settings.max_iter:,} steps, "
                f"{found.images} images at a time on a GPU:\n  {' '.join(options)}"
            )
            return
    yield (
        f"{settings.option('images_per_step', batch)} cannot be kept: no number of images that "
        f"fits divides it among {gpus} GPU(s)."
    )


def _run_lines(scaled: DetectionSettings, count: Count, step_time: float | None) -> Iterator[str]:
    yield f"Images in all: {scaled.max_iter * scaled.images_per_step / 1e6:,.2f} million."
    kept = scaled.checkpoints_kept + 2
    yield (
        f"A checkpoint takes {count.checkpoint / GIB:.2f} GiB, those of a run "
        f"{kept * count.checkpoint / GIB:.1f} GiB (the newest {kept - 2}, the best, and the one "
        "that is being written)."
    )
    if step_time is None:
        return
    done = _steps_done(scaled.output_dir, scaled.max_iter)
    left = scaled.max_iter - done
    hours = left * step_time / 3600
    begun = f" ({done:,} are done in {scaled.output_dir})" if done else ""
    yield (
        f"At {step_time:g} s for a step of {scaled.images_per_step} images, {left:,} steps are "
        f"left{begun}: {hours:,.1f} hours, {hours / 24:,.1f} days, without evaluations."
    )


def _steps_done(folder: str, steps: int) -> int:
    """Steps of the run in a folder, by the name of its newest checkpoint."""
    if last_checkpoint(folder).endswith("model_final.pth"):
        return steps
    found = numbered(folder)
    return min(int(found[-1].stem.removeprefix("model_")) + 1, steps) if found else 0


def _assumptions(
    training: Training, count: Count, measured: Mapping[int, Measurement]
) -> Iterator[str]:
    detector = training.kind == "detector"
    averaged = ", the averaged weights" if training.settings.ema_decay else ""
    yield (
        f"Counted on tensors without data: parameters, gradients, the optimiser's numbers{averaged}"
        ";\noperations (two for a multiply-add) and activations"
        + (
            " of backbone and heads, with the largest number of\nregions that the settings allow."
            if detector
            else "."
        )
    )
    objects = f"{OBJECTS} objects an image; " if detector else ""
    yield (
        f"Guessed: {objects}{CONTEXT / GIB:.0f} GiB for CUDA's context and the workspaces of cuDNN "
        f"and cuBLAS;\n{FRAGMENTS:.0%} of the tensors for gaps between them."
    )
    for name in count.missing:
        yield f"Not counted: activations and operations of {name}."
    yield from training.notes
    if not measured:
        yield "Not measured: no figure here comes from a GPU; --measure runs steps on one."
