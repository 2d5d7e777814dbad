"""A training that fits the user's own data: a function of configuration, data and machine.

:func:`fit` decides, in this order: the size of the input, or tiles; masks; detections; the batch;
the schedule; the evaluations. The architecture, its maps and its anchors stay, and so does each key
that is given. Each number stands beside the measurement that chose it, or beside the word "guess".
docs/results.md and projects/benchmarks/detectors.md have the measurements.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from operator import attrgetter

import torch
from detectron2.config import CfgNode

from lambda_det.detection.data.report import Report
from lambda_det.detection.data.tile_records import tile_records
from lambda_det.detection.evaluation import cost_of_image, number_of_images
from lambda_det.detection.registry import ARCHITECTURES
from lambda_det.detection.tiles import Tiling
from lambda_det.errors import ConfigError, UserError, counted
from lambda_det.own_data.fit_input import (
    Asked,
    Choice,
    Facts,
    Input,
    Record,
    fit_input,
    has_rpn,
    merge,
)
from lambda_det.own_data.labels.findings import EMPTY_FILE, NO_FILE
from lambda_det.own_data.start import LEAST_IMAGES, USABLE, Machine
from lambda_det.training.schedules import optimizer_of, schedule_of

_MOST_EMPTY = 1.0  # guess: images without an object for each with one. 0.65 were measured
# Guess: share of the objects. A few are none to learn from, such as boxes turned by mistake
_FEWEST_MASKS = 0.1
_BATCH = 16  # images of a step in Detectron2's baselines
_BATCH_ON_CPU = 4  # BCCD 57.6 AP after 308 such steps. A step takes a second
# A light recipe on an H200, whose host takes 0.09 s for a step of 4: these kept it busy for a
# twentieth of that. Counted, 64 images take 10 GiB. Nobody measured a smaller GPU
_FILLED_GPU, _FILLS_GPU = 40, 64  # GiB, and images
_LOADED = 10  # guess: images that a loader process reads during a step; one takes 10 ms of a core
_MOST_LOADERS = 8  # guess
_TEST_IMAGES = 8  # guess: of one size, which a GPU evaluates together
# Detectron2's own schedule, 3x, lowers the rate at 210k and 250k of 270k steps
_LR_STEPS = (210 / 270, 250 / 270)
_SHARE = 0.2  # guess: share of a run's time that evaluations may take


def fit(
    cfg: CfgNode,
    records: Sequence[Record],
    machine: Machine,
    asked: Asked,
    *,
    classes: Sequence[str],
    others: Sequence[Record],
) -> tuple[Input, list[Choice]]:
    """All keys that follow from data and machine.

    Args:
        cfg: the configuration, with the given keys. RECIPE has rules, and RECIPE.KEEP keys that
            stay.
        records: dataset dicts of the images to train on, as background as well, before they are cut
            into tiles. No other image decides anything here, but for ``others``.
        machine: where the training is to run.
        asked: what the command line says of the input.
        classes: their names.
        others: dataset dicts of the other parts, whose images may be whole where these are tiles.

    Returns:
        What follows for the input; and the other keys in the order of a configuration, also those
        that are kept.

    Raises:
        ConfigError: a key of RECIPE, the batch or the tiles cannot be, or there are no rules for
            the architecture.
    """
    check(cfg)
    cfg = cfg.clone()
    chosen = fit_input(cfg, records, asked, classes=classes, others=others)
    merge(cfg, chosen.choices, asked.given)
    if tiling := Tiling.from_config(cfg):
        records = tile_records(list(records), tiling, cfg.INPUT.TILE.EMPTY)
    facts = Facts.of(records)
    training = _of_gpu(cfg, facts, machine) if asked.is_chosen and machine.memory else []
    merge(cfg, training, cfg.RECIPE.KEEP)
    if cfg.MODEL.MASK_ON:
        why = f"{facts.masks:.1%} of the objects have a mask; {_FEWEST_MASKS:.0%} are enough"
        training.append(Choice("MODEL.MASK_ON", facts.masks >= _FEWEST_MASKS, why))
    training += [*_detections(cfg, facts), *_batch(cfg, facts, machine)]
    merge(cfg, training, cfg.RECIPE.KEEP)
    training += fit_schedule(cfg, facts.images, facts.whole_images)
    return chosen, training


def background(report: Report) -> list[Choice]:
    """Whether images of empty label files are trained on, which is decided before :func:`fit`.

    YOLO's empty label files are written by somebody who found nothing. An image without a label
    file may be one that nobody has looked at, and beside such ones all are left out.

    Kangaroos, 123 photographs, and 80 of raccoons with empty files, 256 pixels, one seed, equal
    steps: AP 51.3 with them as background, 40.4 without.

    Args:
        report: of the images to train on.
    """
    if EMPTY_FILE not in report.findings or not report.empty:
        return []
    key, what = "DATALOADER.FILTER_EMPTY_ANNOTATIONS", counted(report.empty, "image")
    if missing := report.findings.get(NO_FILE):
        why = f"{what} without an object are left out, because {missing.count} have no label file"
        return [Choice(key, True, why)]
    if report.empty > _MOST_EMPTY * (report.images - report.empty):
        return [Choice(key, True, f"{what} without an object are left out: more than the others")]
    return [Choice(key, False, f"{what} with an empty label file are background")]


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
    for key, value, least in (
        ("RECIPE.EPOCHS", recipe.EPOCHS, 0),
        ("RECIPE.EVALUATIONS", recipe.EVALUATIONS, 1),
        ("SOLVER.IMS_PER_BATCH", cfg.SOLVER.IMS_PER_BATCH, 1),
        ("SOLVER.MAX_ITER", cfg.SOLVER.MAX_ITER, 1),
    ):
        if not least <= value < math.inf:
            raise ConfigError(f"{key} is {value:g}; give {least} or more.")


# ------------------------------------------------------------------------------------- detections
def _detections(cfg: CfgNode, facts: Facts) -> list[Choice]:
    """Room for all objects of the fullest image, and for the same number of false detections."""
    least = 2 * facts.most
    keys = ["TEST.DETECTIONS_PER_IMAGE"]
    if has_rpn(cfg):
        keys += ["MODEL.RPN.POST_NMS_TOPK_TEST", "MODEL.RPN.PRE_NMS_TOPK_TEST"]
    one = "tile" if cfg.INPUT.TILE.SIZE else "image"
    reason = f"twice the {facts.most} objects of the fullest {one}"
    return [Choice(key, least, reason) for key in keys if attrgetter(key)(cfg) < least]


# --------------------------------------------------------------------------------------- the batch
def _of_gpu(cfg: CfgNode, facts: Facts, machine: Machine) -> list[Choice]:
    """What keeps a GPU busy: loader processes, and images of a step of a recipe for a CPU."""
    cores = machine.cores // machine.processes
    loaders = min(max(cores - 1, 1), _MOST_LOADERS)
    why = f"{cores} cores for each process of the training"
    choices = [Choice("DATALOADER.NUM_WORKERS", loaders, why)]
    if cfg.RECIPE.MEMORY:  # by which the batch follows
        return choices
    fills = _FILLS_GPU if machine.memory >= _FILLED_GPU else LEAST_IMAGES
    epochs = cfg.RECIPE.EPOCHS or epochs_for(facts.images, facts.whole_images)
    in_steps = int(epochs * facts.images / cfg.RECIPE.MIN_STEPS) // machine.processes
    share = max(min(fills, _LOADED * loaders, in_steps), LEAST_IMAGES)
    why = (
        f"the least of {fills} for this GPU, {_LOADED * loaders} for {loaders} loader process(es), "
        f"{in_steps} for {cfg.RECIPE.MIN_STEPS} steps; {LEAST_IMAGES} at least; on each of "
        f"{machine.processes} GPU(s)"
    )
    return [
        *choices,
        Choice("SOLVER.IMS_PER_BATCH", share * machine.processes, why),
        Choice("TEST.IMS_PER_BATCH", _TEST_IMAGES, "images of one size are evaluated together"),
    ]


def _batch(cfg: CfgNode, facts: Facts, machine: Machine) -> list[Choice]:
    """The batch that fits into the memory of the GPUs, if it is known; else the file's."""
    solver, taken = cfg.SOLVER, cfg.RECIPE.MEMORY
    if "SOLVER.IMS_PER_BATCH" in cfg.RECIPE.KEEP:
        return []
    shares = machine.processes * solver.ACCUMULATE_GRADIENTS
    if taken and machine.memory is not None:
        if len(taken) != 2 or not taken[1] > 0:
            raise ConfigError(
                f"RECIPE.MEMORY is {taken}; give the GiB that a training takes without images and "
                "for each image, such as [2.0, 1.5], or []."
            )
        share, most = int((USABLE * machine.memory - taken[0]) / taken[1]), _BATCH
        reason = (
            f"at once on each of {machine.processes} GPU(s) of {machine.memory:.1f} GiB, where a "
            f"training takes {taken[0]:g} and {taken[1]:g} an image"
        )
    else:
        reference = solver.REFERENCE_WORLD_SIZE or shares
        share, most = solver.IMS_PER_BATCH // reference, solver.IMS_PER_BATCH
        reason = "of each process, as in the file"
        if torch.device(cfg.MODEL.DEVICE).type == "cpu":
            most = min(most, _BATCH_ON_CPU)
        elif solver.REFERENCE_WORLD_SIZE:
            most = min(most, _BATCH)
    share = max(min(share, most // shares, facts.images // shares), 1)
    batch = share * shares
    if batch == solver.IMS_PER_BATCH and not taken:
        return []
    reason = f"{share} {reason}; {min(most, facts.images)} in all at most"
    return [Choice("SOLVER.IMS_PER_BATCH", batch, reason)]


# ---------------------------------------------------------------------- schedule and evaluations
def epochs_for(images: int, whole_images: int) -> float:
    """Passes over the images: 30 up to 1,000 images, falling with their logarithm to 16 at 20,000.

    More images need more steps and fewer passes. Mayaku 2.0 follows the same rule. Tiles of one
    image are alike: of n tiles an image, there are fewer passes by n to the power of 3/4, which
    is a guess between as many steps as for the images (1) and as for that many images (0).

    Args:
        images: or tiles of them.
        whole_images: that the tiles are of.
    """
    share = math.log(max(images, 1000) / 1000) / math.log(20)
    alike = (whole_images / images) ** 0.75
    return alike * (30 - 14 * min(share, 1.0))


def fit_schedule(cfg: CfgNode, images: int, whole_images: int) -> list[Choice]:
    """What follows from the number of images and of epochs: the schedule, and the evaluations.

    Args:
        cfg: with all other keys. RECIPE.EPOCHS is the number of epochs; 0 for the rule.
        images: or tiles of them.
        whole_images: that the tiles are of.

    Raises:
        ConfigError: there is no rule for the optimiser, and no rate is given.
    """
    recipe, batch = cfg.RECIPE, cfg.SOLVER.IMS_PER_BATCH
    epochs = recipe.EPOCHS or epochs_for(images, whole_images)
    # given epochs are used literally
    steps = max(math.ceil(epochs * images / batch), 1 if recipe.EPOCHS else recipe.MIN_STEPS)
    rule = f"by the rule for their number, and RECIPE.MIN_STEPS {recipe.MIN_STEPS} at least"
    one = "tile" if cfg.INPUT.TILE.SIZE else "image"
    reason = (
        f"{counted(float(f'{epochs:.3g}'), 'epoch')} of {counted(images, one)} in batches of "
        f"{batch}, {'as asked for' if recipe.EPOCHS else rule}"
    )
    if recipe.TIME:
        reason = "--time sets it after the first steps"
    if "SOLVER.MAX_ITER" in recipe.KEEP:
        steps = cfg.SOLVER.MAX_ITER  # the rest of the schedule follows it
    choices = [Choice("SOLVER.MAX_ITER", steps, reason)]
    if "STEPS" in schedule_of(cfg.SOLVER, "LR_SCHEDULER_NAME").keys:
        lowered = tuple(sorted({max(1, round(share * steps)) for share in _LR_STEPS}))
        why = "78 and 93 % of the steps, as in Detectron2's 3x schedule"
        choices.append(Choice("SOLVER.STEPS", lowered, why))
    why = "a tenth of the steps, 1000 at most"
    choices.append(Choice("SOLVER.WARMUP_ITERS", min(1000, steps // 10), why))
    choices += _learning_rate(cfg)
    test_images = 0  # or their tiles
    # the later check refuses what is missing
    with contextlib.suppress(UserError, OSError, LookupError):
        test_images = number_of_images(cfg.DATASETS.TEST, Tiling.from_config(cfg))
    cost = test_images * cost_of_image(
        has_masks=cfg.MODEL.MASK_ON,
        has_losses=cfg.TEST.LOSS,
        sets_of_weights=1 + (cfg.SOLVER.EMA_DECAY > 0 and cfg.TEST.RAW),
    )
    period = evaluations_for(steps, batch, recipe.EVALUATIONS, cost)
    number = counted(math.ceil(steps / period) if period else 1, "evaluation")
    why = (
        f"{number} of {counted(test_images, one)}; {recipe.EVALUATIONS} at most, and "
        f"{_SHARE:.0%} of the time"
    )
    saved_every = period or math.ceil(steps / recipe.EVALUATIONS)
    saved = counted(math.ceil(steps / saved_every), "checkpoint")
    if period:
        saved = "with the evaluations"
    return [
        *choices,
        Choice("TEST.EVAL_PERIOD", period, why),
        Choice("SOLVER.CHECKPOINT_PERIOD", saved_every, saved),
        Choice("SOLVER.REFERENCE_WORLD_SIZE", 0, "the schedule is not scaled to the processes"),
    ]


def takes_epochs(cfg: CfgNode) -> bool:
    """Whether ``--resume --epochs`` makes the run of a configuration longer.

    Given steps stay, and a run goes on at its own rate alone, which is the rule's where the run is
    one of a recipe.
    """
    by_rule = cfg.clone()
    with contextlib.suppress(ConfigError):
        check(cfg)
        merge(by_rule, _learning_rate(cfg), cfg.RECIPE.KEEP)
        return by_rule == cfg and "SOLVER.MAX_ITER" not in cfg.RECIPE.KEEP
    return False


def _learning_rate(cfg: CfgNode) -> list[Choice]:
    """The optimiser's usual rate."""
    batch = cfg.SOLVER.IMS_PER_BATCH
    # With clipped gradients Detectron2's for 16 images is right for 4 as well
    # (projects/benchmarks/detectors.md)
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
    factor = math.sqrt(min(1, batch / _BATCH_ON_CPU) * max(1, batch / _BATCH))
    why = (
        f"{rate} for {_BATCH_ON_CPU} to {_BATCH} images by {cfg.SOLVER.OPTIMIZER}, else by their "
        "square root"
    )
    return [Choice("SOLVER.BASE_LR", rate * factor, why)]


def evaluations_for(steps: int, batch: int, most: int, cost: float) -> int:
    """As many evaluations as fit into a fifth of the time.

    The last one always takes place, and the one before it is a whole period earlier.

    Args:
        steps: of the training.
        batch: images of a step.
        most: evaluations.
        cost: of an evaluation, in images of a step; 0 where there is none to evaluate on.

    Returns:
        The steps between two of them; 0 for a single one at the end.
    """
    if not cost:
        return math.ceil(steps / most)
    room = _SHARE / (1 - _SHARE) * steps * batch
    count = min(most, int(room / cost))
    return math.ceil(steps / count) if count > 1 else 0
