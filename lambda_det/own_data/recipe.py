"""A training that fits the user's own data: the keys that follow from a data set, and why.

The recipe changes batch, schedule, sampling and anchors, never the architecture: each level keeps
its number of anchors. A key that the command line sets is left as it is.
"""

from __future__ import annotations

import bisect
import contextlib
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.data import MetadataCatalog
from detectron2.structures import BoxMode

from lambda_det.detection.data.loader import training_records
from lambda_det.detection.data.predictions import Detector, predictions
from lambda_det.detection.data.tile_records import number_of_whole_images
from lambda_det.detection.evaluation_cost import cost_of_image, number_of_images
from lambda_det.detection.registry import ARCHITECTURES
from lambda_det.detection.tiles import Tiling
from lambda_det.errors import ConfigError, DataError, UserError, counted
from lambda_det.own_data.machine import Machine
from lambda_det.training.log import log_table
from lambda_det.training.schedules import optimizer_of, schedule_of

logger = logging.getLogger(__name__)

# pixels in the network's input by the square root of the area: smaller objects are hardly found
SMALL = 12
MOST = 0.5  # share of the objects above which they count as most
LEAST_BOXES = 50  # with fewer boxes anchors stay as they are
IMBALANCE = 10  # ratio of the images of the largest class to the images of the smallest
# An anchor of a level matches objects of its size only if its side has this number of strides: half
# a stride away, a square of four strides overlaps an equal one by an IoU of 0.62. A single level
# must also serve small objects: Detectron2's C4 and DC5 begin at two strides.
STRIDES_PER_ANCHOR, _STRIDES_ON_ONE_LEVEL = 4, 2
_OCTAVE_STEP = 2 ** (1 / 3)  # least ratio between anchors of one level, as in RetinaNet
# Detectron2's own schedule, 3x, lowers the rate at 210k and 250k of 270k steps
_LR_STEPS = (210 / 270, 250 / 270)
_BATCH = 16  # images of a step in Detectron2's baselines
_BATCH_ON_CPU = 4  # ours, because a step takes seconds
_MOST_EPOCHS = 1_000_000
_MOST_ROUNDS = 1000  # most steps of k-means, which ends after a few dozen
_MORE_TIME = 1.25  # factor of a proposed time: the next start may take longer
_SHARE = 0.2  # share of a run's time that evaluations may take
_FEWEST_MASKS = 0.1  # share of the objects that must have a mask so that masks are learnt
USABLE = 0.9  # share of a GPU's memory, because the memory was counted and not measured
# Keys that a recipe may change, and that the command line sets literally
FITTED_KEYS = frozenset(
    [
        "DATALOADER.REPEAT_THRESHOLD",
        "DATALOADER.SAMPLER_TRAIN",
        "MODEL.ANCHOR_GENERATOR.ASPECT_RATIOS",
        "MODEL.ANCHOR_GENERATOR.SIZES",
        "MODEL.MASK_ON",
        "MODEL.RPN.POST_NMS_TOPK_TEST",
        "MODEL.RPN.PRE_NMS_TOPK_TEST",
        "SOLVER.BASE_LR",
        "SOLVER.CHECKPOINT_PERIOD",
        "SOLVER.IMS_PER_BATCH",
        "SOLVER.MAX_ITER",
        "SOLVER.REFERENCE_WORLD_SIZE",
        "SOLVER.STEPS",
        "SOLVER.WARMUP_ITERS",
        "TEST.DETECTIONS_PER_IMAGE",
        "TEST.EVAL_PERIOD",
    ]
)


@dataclass(frozen=True)
class Statistics:
    """The facts of a data set that a recipe needs.

    Attributes:
        images: to train on, including those that are kept as background, or tiles of them.
        whole_images: the files of these images.
        images_of_class: how many images show each class that occurs.
        boxes: [N, 2] widths and heights in pixels of the input.
        has_masks: whether a tenth of the objects has one; a few are no masks to learn from, such as
            boxes that were turned by mistake.
        most_objects: the most objects of one image.
    """

    images: int
    whole_images: int
    images_of_class: Mapping[int, int]
    boxes: np.ndarray
    has_masks: bool = True
    most_objects: int = 0

    @classmethod
    def of(
        cls, records: Iterable[Mapping[str, Any]], scale: Callable[[int, int], float]
    ) -> Statistics:
        """
        Args:
            records: Detectron2's dataset dicts.
            scale: the factor by which an image of this height and width is resized.

        Raises:
            DataError: there is no image.
        """
        records = list(records)
        images, counts, boxes, masks, most = len(records), Counter(), [], 0, 0
        for record in records:
            objects = [a for a in record.get("annotations", ()) if not a.get("iscrowd")]
            counts.update({annotation["category_id"] for annotation in objects})
            most = max(most, len(objects))
            for annotation in objects:
                factor = scale(record["height"], record["width"])
                box = BoxMode.convert(
                    list(annotation["bbox"]), annotation["bbox_mode"], BoxMode.XYWH_ABS
                )
                boxes.append([factor * box[2], factor * box[3]])
                masks += bool(annotation.get("segmentation"))
        if images == 0:
            raise DataError("The training set holds no image, so no recipe can be made for it.")
        sizes = np.array(boxes, float).reshape(-1, 2)
        has_masks = masks > 0 and masks >= _FEWEST_MASKS * len(boxes)
        whole_images = number_of_whole_images(records)
        return cls(images, whole_images, dict(counts), sizes[(sizes > 0).all(1)], has_masks, most)


@dataclass(frozen=True)
class Derived:
    """A key with the value that follows from the data, and the reason."""

    key: str
    value: Any
    reason: str


def epochs_for(images: int, whole_images: int | None = None) -> float:
    """Passes over the images: 30 up to 1,000 images, falling with their logarithm to 16 at 20,000.

    More images need more steps and fewer passes. Mayaku 2.0 follows the same rule. Tiles of one
    image are alike: of n tiles an image, there are fewer passes by n to the power of 3/4, which
    is a guess between as many steps as for the images (1) and as for that many images (0).

    Args:
        images: or tiles of them.
        whole_images: that the tiles are of; None where images are not cut.
    """
    share = math.log(max(images, 1000) / 1000) / math.log(20)
    alike = ((images if whole_images is None else whole_images) / images) ** 0.75
    return alike * (30 - 14 * min(share, 1.0))


def derive(cfg: CfgNode, statistics: Statistics, machine: Machine) -> list[Derived]:
    """All keys that follow from the data and the machine, in the order of a configuration.

    Args:
        cfg: RECIPE has the rules.
        statistics: of the training set.
        machine: where the training is to run.

    Raises:
        ConfigError: a key of RECIPE or the batch cannot be, or there are no rules for the
            architecture.
    """
    check(cfg)
    architecture = cfg.MODEL.META_ARCHITECTURE
    batch = _batch(cfg, statistics.images, machine)
    images = batch[0].value if batch else cfg.SOLVER.IMS_PER_BATCH
    return [
        *_masks(cfg, statistics),
        *_anchors(cfg, statistics),
        *_detections(cfg, statistics),
        *(_sampling(statistics) if "instances" in predictions(architecture) else []),
        *batch,
        *_schedule(
            cfg, statistics.images, statistics.whole_images, images, has_masks=statistics.has_masks
        ),
    ]


def check(cfg: CfgNode) -> None:
    """
    Raises:
        ConfigError: a key of RECIPE or the batch cannot be, or there are no rules for the
            architecture.
    """
    recipe, architecture = cfg.RECIPE, cfg.MODEL.META_ARCHITECTURE
    with_rules = [name for name, entry in ARCHITECTURES.items() if entry.base_lr]
    if architecture not in with_rules:
        raise ConfigError(
            f"RECIPE.ENABLED (--epochs) has no rules for MODEL.META_ARCHITECTURE {architecture}, "
            f"only for {', '.join(with_rules)}; set RECIPE.ENABLED False, and SOLVER.MAX_ITER."
        )
    if not 0 <= recipe.EPOCHS <= _MOST_EPOCHS:
        raise ConfigError(
            f"RECIPE.EPOCHS is {recipe.EPOCHS:g}; give 0 for the rule, or up to {_MOST_EPOCHS:,}."
        )
    for key, value in (
        ("RECIPE.EVALUATIONS", recipe.EVALUATIONS),
        ("SOLVER.IMS_PER_BATCH", cfg.SOLVER.IMS_PER_BATCH),
        ("SOLVER.MAX_ITER", cfg.SOLVER.MAX_ITER),
    ):
        if not value >= 1:
            raise ConfigError(f"{key} is {value}; give 1 or more.")


def _masks(cfg: CfgNode, statistics: Statistics) -> list[Derived]:
    if not cfg.MODEL.MASK_ON or statistics.has_masks:
        return []
    return [Derived("MODEL.MASK_ON", False, "less than a tenth of the objects has a mask")]


def _batch(cfg: CfgNode, images: int, machine: Machine) -> list[Derived]:
    """The batch that fits into the memory of the GPUs, if it is known; else the file's for that
    number.
    """
    solver = cfg.SOLVER
    if "SOLVER.IMS_PER_BATCH" in cfg.RECIPE.KEEP:
        return []
    workers, memory = machine.processes, machine.memory
    shares = workers * solver.ACCUMULATE_GRADIENTS
    if cfg.RECIPE.MEMORY and memory is not None:
        if len(cfg.RECIPE.MEMORY) != 2 or not cfg.RECIPE.MEMORY[1] > 0:
            raise ConfigError(
                f"RECIPE.MEMORY is {cfg.RECIPE.MEMORY}; give the GiB that a training takes without "
                "images and for each image, such as [2.0, 1.5], or []."
            )
        fixed, each = cfg.RECIPE.MEMORY
        share, most = int((USABLE * memory - fixed) / each), _BATCH
        reason = (
            f"at once on each of {workers} GPU(s) of {memory:.1f} GiB, where a training takes "
            f"{fixed:g} and {each:g} an image"
        )
    else:
        reference = solver.REFERENCE_WORLD_SIZE or shares
        share, most = solver.IMS_PER_BATCH // reference, solver.IMS_PER_BATCH
        reason = "of each process, as in the file"
        if torch.device(cfg.MODEL.DEVICE).type == "cpu":
            most = min(most, _BATCH_ON_CPU)
        elif solver.REFERENCE_WORLD_SIZE:
            most = min(most, _BATCH)
    share = max(min(share, most // shares, images // shares), 1)
    batch = share * shares
    if batch == solver.IMS_PER_BATCH and not cfg.RECIPE.MEMORY:
        return []
    reason = f"{share} {reason}; {min(most, images)} in all at most"
    return [Derived("SOLVER.IMS_PER_BATCH", batch, reason)]


class _Evaluations(NamedTuple):
    """The evaluations of a training.

    Attributes:
        period: steps between two of them; 0 for a single one at the end.
        reason: in words.
    """

    period: int
    reason: str


def evaluations_for(steps: int, batch: int, images: int, most: int, cost: float) -> _Evaluations:
    """As many evaluations as fit into a fifth of the time.

    The last one always takes place, and the one before it is a whole period earlier.

    Args:
        steps: of the training.
        batch: images of a step.
        images: to evaluate on.
        most: evaluations.
        cost: the cost of an image in an evaluation, in images of a step.
    """
    if not images:
        return _Evaluations(math.ceil(steps / most), f"{most} evaluations")
    # in addition to the last one
    room = _SHARE / (1 - _SHARE) * steps * batch / max(cost, 1e-9) - images
    before = min(most - 1, int(room // images))
    if before < 1:
        return _Evaluations(0, f"one at the end: {images} images take long beside {steps} steps")
    period = math.ceil(steps / (before + 1))
    count = math.ceil(steps / period)
    words = f"{counted(count, 'evaluation')} of {counted(images, 'image')}"
    if count < most:
        words += f"; more would take over {_SHARE:.0%} of the time"
    return _Evaluations(period, words)


def _test_images(cfg: CfgNode, tiling: Tiling | None = None) -> int:
    """The number of test images, or of their tiles; 0 where there are none, or where they are
    missing, which the later check refuses.
    """
    with contextlib.suppress(UserError, OSError, LookupError):
        return number_of_images(cfg.DATASETS.TEST, tiling)
    return 0


def _cost_of_image(cfg: CfgNode, images: int, *, has_masks: bool) -> float:
    """The cost of an image of the test set, in images of a step; of all its tiles together.

    Args:
        cfg: of the training.
        images: of the test set.
        has_masks: whether the data have masks to learn.
    """
    cost = cost_of_image(
        has_masks=cfg.MODEL.MASK_ON and has_masks,
        has_losses=cfg.TEST.LOSS,
        sets_of_weights=1 + (cfg.SOLVER.EMA_DECAY > 0 and cfg.TEST.RAW),
    )
    if tiling := Tiling.from_config(cfg):
        cost *= _test_images(cfg, tiling) / max(images, 1)
    return cost


def epochs_within(cfg: CfgNode, seconds: float, step: float, spent: float = 0.0) -> float:
    """The epochs of a training whose steps and evaluations take a time together.

    Args:
        cfg: with the keys that follow from the data.
        seconds: of the command.
        step: seconds of a step.
        spent: seconds of the command that are not for steps and evaluations.

    Raises:
        ConfigError: not even one step fits; the message names a time that does.
    """
    images, batch = len(_records(cfg)), cfg.SOLVER.IMS_PER_BATCH
    tested = _test_images(cfg)
    cost = _cost_of_image(cfg, tested, has_masks=True)

    def total(steps: int) -> float:
        period, _ = evaluations_for(steps, batch, tested, cfg.RECIPE.EVALUATIONS, cost)
        before = math.ceil(steps / period) - 1 if period else 0
        return step * (steps + cost * (before + 1) * tested / batch)

    most = int((seconds - spent) / step)
    steps = bisect.bisect_right(range(1, most + 1), seconds - spent, key=total)
    if not steps:
        least = math.ceil(_MORE_TIME * (spent + total(1)) / 60)
        raise ConfigError(
            f"--time is too short: the start takes {spent:.0f} seconds here, and one step with its "
            f"evaluation {total(1):.0f}; give --time {least}m or more."
        )
    return steps * batch / images


def _schedule(
    cfg: CfgNode, images: int, whole_images: int, batch: int, *, has_masks: bool = True
) -> list[Derived]:
    recipe = cfg.RECIPE
    epochs = recipe.EPOCHS or epochs_for(images, whole_images)
    wanted = math.ceil(epochs * images / batch)
    # given epochs are used literally
    steps = max(wanted, 1 if recipe.EPOCHS else recipe.MIN_STEPS)
    which = "asked for" if recipe.EPOCHS else "by the rule for this number of images"
    passes = counted(float(f"{epochs:.3g}"), "epoch")
    what = counted(images, "image")
    if whole_images < images:
        what = f"{counted(images, 'tile')} of {counted(whole_images, 'image')}"
    reason = f"{passes}, {which}, of {what} in batches of {batch}"
    if steps > wanted:
        reason = f"RECIPE.MIN_STEPS, since {reason} are only {wanted} steps"
    if "SOLVER.MAX_ITER" in recipe.KEEP:
        steps = cfg.SOLVER.MAX_ITER  # the rest of the schedule follows it
    images_in_test = _test_images(cfg)
    cost = _cost_of_image(cfg, images_in_test, has_masks=has_masks)
    evaluations = evaluations_for(steps, batch, images_in_test, recipe.EVALUATIONS, cost)
    saved_every = evaluations.period or math.ceil(steps / recipe.EVALUATIONS)
    rows = [Derived("SOLVER.MAX_ITER", steps, reason)]
    if "STEPS" in schedule_of(cfg.SOLVER, "LR_SCHEDULER_NAME").keys:
        rows.append(
            Derived(
                "SOLVER.STEPS",
                tuple(sorted({max(1, round(share * steps)) for share in _LR_STEPS})),
                "78 and 93 % of the steps, as in Detectron2's 3x schedule",
            )
        )
    return [
        *rows,
        Derived(
            "SOLVER.WARMUP_ITERS", min(1000, steps // 10), "a tenth of the steps, 1000 at most"
        ),
        *_learning_rate(cfg, batch),
        Derived("TEST.EVAL_PERIOD", evaluations.period, evaluations.reason),
        Derived(
            "SOLVER.CHECKPOINT_PERIOD",
            saved_every,
            "with the evaluations"
            if evaluations.period
            else counted(math.ceil(steps / saved_every), "checkpoint"),
        ),
        Derived("SOLVER.REFERENCE_WORLD_SIZE", 0, "the schedule is not scaled to the processes"),
    ]


def _learning_rate(cfg: CfgNode, batch: int) -> list[Derived]:
    """
    Raises:
        ConfigError: there is no rule for the optimiser, and no rate is given.
    """
    rate = optimizer_of(cfg.SOLVER).base_lr
    if rate is None:
        rate = ARCHITECTURES[cfg.MODEL.META_ARCHITECTURE].base_lr
    if not rate:
        if "SOLVER.BASE_LR" in cfg.RECIPE.KEEP:
            return []
        raise ConfigError(
            f"The recipe has no learning rate for SOLVER.OPTIMIZER {cfg.SOLVER.OPTIMIZER}; add "
            "SOLVER.BASE_LR with one."
        )
    return [
        Derived(
            "SOLVER.BASE_LR",
            # With clipped gradients Detectron2's rate is right for 4 images as well
            # (projects/benchmarks/detectors.md).
            rate * math.sqrt(min(1, batch / _BATCH_ON_CPU) * max(1, batch / _BATCH)),
            f"{rate} for {_BATCH_ON_CPU} to {_BATCH} images by {cfg.SOLVER.OPTIMIZER}, else by "
            "their square root",
        )
    ]


def _sampling(statistics: Statistics) -> list[Derived]:
    counts = statistics.images_of_class.values()
    if not counts or max(counts) < IMBALANCE * min(counts):
        return []
    threshold = max(counts) / statistics.images / IMBALANCE
    reason = f"the largest class has {max(counts)} images, the smallest {min(counts)}"
    return [
        Derived("DATALOADER.SAMPLER_TRAIN", "RepeatFactorTrainingSampler", reason),
        Derived("DATALOADER.REPEAT_THRESHOLD", threshold, "a tenth of the largest class's share"),
    ]


def _anchors(cfg: CfgNode, statistics: Statistics) -> list[Derived]:
    """Anchors from the boxes at the input's size, with as many sizes for each level, and ratios, as
    in the file.

    Several levels get a cluster each, and its steps to the next octave; a single level gets all
    clusters.
    """
    generator, boxes = cfg.MODEL.ANCHOR_GENERATOR, statistics.boxes
    strides = map_strides(cfg)
    counts = {len(sizes) for sizes in generator.SIZES}
    if len(boxes) < LEAST_BOXES or not strides or len(counts) > 1:
        return []
    (count,) = counts
    several = len(strides) > 1
    centres = _clusters(np.log(boxes.prod(1)) / 2, len(strides) if several else count)
    # with too few clusters, the upper ones continue by doubling
    while len(centres) < (len(strides) if several else count):
        centres.append(2 * centres[-1])
    if several:
        sizes = [
            # from a size to below its double, as RetinaNet has three
            [least, *(round(least * 2 ** (i / count), 1) for i in range(1, count))]
            for centre, stride in zip(centres, strides, strict=True)
            for least in [max(round(centre), STRIDES_PER_ANCHOR * stride)]
        ]
    else:
        sizes, least = [[]], _STRIDES_ON_ONE_LEVEL * strides[0]
        for centre in centres:
            sizes[0].append(round(max(centre, least)))
            least = sizes[0][-1] * _OCTAVE_STEP
    reason = f"clusters of {len(boxes)} boxes at the size of the input"
    smallest = STRIDES_PER_ANCHOR * min(strides)
    small = np.mean(boxes.prod(1) < smallest**2)
    least = f"{STRIDES_PER_ANCHOR if several else _STRIDES_ON_ONE_LEVEL} strides of a map at least"
    sides = ", ".join(f"{centre:.0f}" for centre in centres)
    below = f"; {small:.0%} are below {smallest} pixels" if several else ""
    why = f"{reason}: {sides}; {least}{below}"
    derived = [Derived("MODEL.ANCHOR_GENERATOR.SIZES", sizes, why)]
    ratios = _clusters(np.log(boxes[:, 1] / boxes[:, 0]), len(generator.ASPECT_RATIOS[0]))
    # otherwise boxes show nothing about the others
    if len(ratios) == len(generator.ASPECT_RATIOS[0]):
        ratios = [[round(ratio, 2) for ratio in ratios]]
        derived.append(Derived("MODEL.ANCHOR_GENERATOR.ASPECT_RATIOS", ratios, reason))
    return derived


def _detections(cfg: CfgNode, statistics: Statistics) -> list[Derived]:
    """Room for all objects of the fullest image, and for the same number of false detections."""
    least = 2 * statistics.most_objects
    keys = ["TEST.DETECTIONS_PER_IMAGE"]
    if cfg.MODEL.PROPOSAL_GENERATOR.NAME == "RPN" and _has_proposals(cfg):
        keys += ["MODEL.RPN.POST_NMS_TOPK_TEST", "MODEL.RPN.PRE_NMS_TOPK_TEST"]
    reason = f"twice the {statistics.most_objects} objects of the fullest image"
    return [Derived(key, least, reason) for key in keys if attrgetter(key)(cfg) < least]


def _has_proposals(cfg: CfgNode) -> bool:
    return ARCHITECTURES[cfg.MODEL.META_ARCHITECTURE].anchor_maps.startswith("MODEL.RPN")


def map_strides(cfg: CfgNode) -> list[int]:
    """The strides of the maps with anchors; [] where there are none, or unusual ones."""
    maps = ARCHITECTURES[cfg.MODEL.META_ARCHITECTURE].anchor_maps
    by_rpn = _has_proposals(cfg)
    if (
        not maps
        or cfg.MODEL.ANCHOR_GENERATOR.NAME != "DefaultAnchorGenerator"
        or (by_rpn and cfg.MODEL.PROPOSAL_GENERATOR.NAME != "RPN")
    ):
        return []
    names = cfg.MODEL.RPN.IN_FEATURES if by_rpn else cfg.MODEL.RETINANET.IN_FEATURES
    levels = [re.fullmatch(r"(?:p|res)(\d)", name) for name in names]
    if not all(levels):
        return []
    dilated = {"res5": cfg.MODEL.RESNETS.RES5_DILATION}
    return [2 ** int(level[1]) // dilated.get(level[0], 1) for level in levels]


def _clusters(logarithms: np.ndarray, count: int) -> list[float]:
    """The centres, in rising order, of up to ``count`` clusters of numbers, given by their
    logarithms.

    It is k-means from the quantiles, so the same boxes give the same anchors.
    """
    rising = np.sort(logarithms)
    sums = np.concatenate([[0], np.cumsum(rising)])
    centres = np.unique(np.quantile(rising, (np.arange(count) + 0.5) / count))
    for _ in range(_MOST_ROUNDS):
        # each cluster is what lies between the middles of neighbouring centres, if anything
        ends = np.searchsorted(rising, (centres[1:] + centres[:-1]) / 2)
        ends = np.unique([0, *ends, len(rising)])
        moved = np.diff(sums[ends]) / np.diff(ends)
        if np.array_equal(moved, centres):
            break
        centres = moved
    return np.exp(centres).tolist()


def input_scale(cfg: CfgNode) -> Callable[[int, int], float]:
    """The factor by which training resizes an image, in the middle of its random range."""
    if cfg.INPUT.LSJ.ENABLED:
        jitter = cfg.INPUT.LSJ
        middle = math.sqrt(jitter.MIN_SCALE * jitter.MAX_SCALE)
        return lambda height, width: middle * jitter.SIZE / max(height, width)
    sizes = cfg.INPUT.MIN_SIZE_TRAIN
    short, longest = sum(sizes) / len(sizes), cfg.INPUT.MAX_SIZE_TRAIN

    def scale(height: int, width: int) -> float:
        return min(short / min(height, width), longest / max(height, width))

    return scale


def fit_to_data(cfg: CfgNode, machine: Machine) -> dict[str, Any]:
    """The keys that follow from the data, and one table of the log with their values and reasons.

    Args:
        cfg: names registered data. RECIPE.ENABLED is ignored; keys of RECIPE.KEEP stay.
        machine: where the training is to run.

    Returns:
        Keys with their values.

    Raises:
        ConfigError: a key of RECIPE is invalid, or no data set is named.
        DataError: a data set is missing or empty.
    """
    statistics = Statistics.of(_records(cfg), input_scale(cfg))
    values = _kept_apart(cfg, derive(cfg, statistics, machine))
    _warn_of_small_objects(cfg, statistics.boxes)
    return values


def rules_for(cfg: CfgNode, machine: Machine) -> list[Derived]:
    """The keys of :func:`fit_to_data` with their reasons, also those that are kept."""
    return derive(cfg, Statistics.of(_records(cfg), input_scale(cfg)), machine)


def _warn_of_small_objects(cfg: CfgNode, boxes: np.ndarray) -> None:
    """Warn before a long training where most objects are hardly to be seen, and no tiles are made.

    Args:
        boxes: [N, 2] widths and heights in pixels of the input.
    """
    sides = np.sqrt(boxes.prod(1))
    small = int((sides < SMALL).sum())
    if len(sides) < LEAST_BOXES or small <= MOST * len(sides) or Tiling.from_config(cfg):
        return
    logger.warning(
        f"{small} of {len(sides)} objects have less than {SMALL} pixels in the network's input, "
        f"half of all less than {np.median(sides):.0f}, so few will be found; --tile auto cuts the "
        "images into tiles, in which objects keep their pixels."
    )


def fit_schedule(cfg: CfgNode) -> dict[str, Any]:
    """The part of :func:`fit_to_data` that follows from the number of epochs, for a resumed run."""
    records = _records(cfg)
    whole_images = number_of_whole_images(records)
    return _kept_apart(cfg, _schedule(cfg, len(records), whole_images, cfg.SOLVER.IMS_PER_BATCH))


def _records(cfg: CfgNode) -> Sequence[dict[str, Any]]:
    if not cfg.DATASETS.TRAIN:
        raise ConfigError(
            "DATASETS.TRAIN names no data to fit the training to: add --data DIR, or --train-json "
            "FILE and --train-images DIR."
        )
    return training_records(cfg)


def _kept_apart(cfg: CfgNode, rules: Iterable[Derived]) -> dict[str, Any]:
    """The values of the rules without keys that are kept; log a table of all."""
    applied = {}
    rows = [(rule.key, "", rule.value, rule.reason) for rule in _known(cfg)]
    for rule in rules:
        is_kept = rule.key in cfg.RECIPE.KEEP
        why = "kept: it is given, or in RECIPE.KEEP" if is_kept else rule.reason
        rows.append((rule.key, attrgetter(rule.key)(cfg), rule.value, why))
        if not is_kept:
            applied[rule.key] = rule.value
    log_table("What follows from these data", rows)
    return applied


def _known(cfg: CfgNode) -> list[Derived]:
    """The keys that follow from the user's files when they are registered, for the table."""
    if not cfg.DATASETS.TRAIN_JSON:
        return []
    (name,) = cfg.DATASETS.TRAIN
    classes = len(MetadataCatalog.get(name).thing_classes)
    key = Detector.from_config(cfg).keys["num_classes"]
    return [Derived(key or "classes", classes, "the categories of the labels")]
