"""One schedule for any number of workers: SOLVER.REFERENCE_WORLD_SIZE and accumulation."""

from __future__ import annotations

import logging

from detectron2.config import CfgNode
from detectron2.engine import DefaultTrainer

from lambda_det.errors import ConfigError

__all__ = ["images_per_batch", "scale_schedule"]

_COUNTS = (("SOLVER", "MAX_ITER"), ("TEST", "EVAL_PERIOD"))


def images_per_batch(cfg: CfgNode) -> int:
    """Images that all workers together take in one forward pass; a step may hold several."""
    return cfg.SOLVER.IMS_PER_BATCH // cfg.SOLVER.ACCUMULATE_GRADIENTS


def scale_schedule(cfg: CfgNode, world_size: int) -> CfgNode:
    """Fit batch, learning rate and all counts of steps to the workers there are.

    The rule is Detectron2's linear one, with SOLVER.ACCUMULATE_GRADIENTS batches on a worker
    counting as that many workers. A file written for 128 workers is followed to the letter by 8
    workers that accumulate 16 batches; without accumulation they take 1/16 of the batch and of the
    learning rate, and 16 times the steps.

    Args:
        cfg: as written; REFERENCE_WORLD_SIZE 0 means that nothing is scaled.
        world_size: number of processes.

    Returns:
        A scaled copy, or ``cfg`` itself where nothing changes.

    Raises:
        ConfigError: the batch cannot be divided among the workers and the accumulated batches.
    """
    solver = cfg.SOLVER
    if solver.ACCUMULATE_GRADIENTS < 1:
        raise ConfigError(
            f"SOLVER.ACCUMULATE_GRADIENTS is {solver.ACCUMULATE_GRADIENTS}; it must be 1 or more."
        )
    reference = solver.REFERENCE_WORLD_SIZE
    if reference < 0 or (reference > 0 and solver.IMS_PER_BATCH % reference):
        raise ConfigError(
            f"SOLVER.IMS_PER_BATCH {solver.IMS_PER_BATCH} does not divide by "
            f"SOLVER.REFERENCE_WORLD_SIZE {reference}, the workers that the file was written for."
        )
    shares = world_size * solver.ACCUMULATE_GRADIENTS
    scaled = DefaultTrainer.auto_scale_workers(cfg, shares)
    if scaled is not cfg:
        # Rounding must not turn "now and then" into "never", nor into a division by zero
        scaled.defrost()
        # Steps between checkpoints are what a crash may cost, in hours and not in images: times 128
        # they would be days
        scaled.SOLVER.CHECKPOINT_PERIOD = solver.CHECKPOINT_PERIOD
        for section, name in _COUNTS:
            if cfg[section][name] > 0 and scaled[section][name] < 1:
                scaled[section][name] = 1
        if cfg.is_frozen():
            scaled.freeze()
    _check_division(scaled.SOLVER.IMS_PER_BATCH, world_size, solver.ACCUMULATE_GRADIENTS)
    _log(cfg, scaled, world_size)
    return scaled


def _check_division(images: int, world_size: int, accumulate: int) -> None:
    shares = world_size * accumulate
    if images > 0 and images % shares == 0:
        return
    below = images // shares * shares
    fitting = f"{below} or {below + shares}" if below > 0 else f"{shares}"
    raise ConfigError(
        f"SOLVER.IMS_PER_BATCH {images} does not divide by {world_size} worker(s) x "
        f"{accumulate} batch(es) of SOLVER.ACCUMULATE_GRADIENTS: {fitting} images would do."
    )


def _log(cfg: CfgNode, scaled: CfgNode, world_size: int) -> None:
    def described(c: CfgNode) -> str:
        s = c.SOLVER
        return f"{s.IMS_PER_BATCH} images a step, lr {s.BASE_LR:g}, {s.MAX_ITER} steps"

    here = f"{world_size} worker(s) x {cfg.SOLVER.ACCUMULATE_GRADIENTS} batch(es) a step"
    reference = cfg.SOLVER.REFERENCE_WORLD_SIZE
    if scaled is cfg:
        text = f"Schedule not scaled: {here}: {described(cfg)}"
    else:
        text = (
            f"Schedule scaled from {reference} worker(s): {described(cfg)} to {here}: "
            f"{described(scaled)}, warm-up {cfg.SOLVER.WARMUP_ITERS} to "
            f"{scaled.SOLVER.WARMUP_ITERS}, decay at {list(scaled.SOLVER.STEPS)}"
        )
    logging.getLogger(__name__).info(text)
