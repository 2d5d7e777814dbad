"""The tables of optimisers and schedules, whichever task reads them."""

import math
from collections.abc import Callable

import pytest
from detectron2.config import CfgNode, get_cfg
from torch import nn

from lambda_det.classification.config import get_classification_config
from lambda_det.config import add_lambda_config
from lambda_det.errors import ConfigError
from lambda_det.training.schedules import OPTIMIZERS, SCHEDULES, build_optimizer, schedule_of


def _detection() -> CfgNode:
    cfg = get_cfg()
    add_lambda_config(cfg)
    return cfg


# The configuration of each task, by its key for the schedule
TASKS: dict[str, Callable[[], CfgNode]] = {
    "LR_SCHEDULER_NAME": _detection,
    "SCHEDULE": get_classification_config,
}
# Of a training of 90 steps or epochs: keys of SOLVER, and the learning rate by its definition
EXPECTED: dict[str, tuple[dict, Callable[[int], float]]] = {
    "steps": ({"STEPS": [30, 60], "GAMMA": 0.5}, lambda t: 0.5 ** sum(t >= s for s in (30, 60))),
    "cosine": (
        {"BASE_LR": 0.5, "BASE_LR_END": 0.1},
        lambda t: 0.2 + 0.8 * math.cos(math.pi * t / 90 / 2) ** 2,
    ),
    "exponential": ({"DECAY": 0.9, "DECAY_EPOCHS": 4.0}, lambda t: 0.9 ** (t // 4)),
    "equal_decays": ({"GAMMA": 0.5, "NUM_DECAYS": 5}, lambda t: 0.5 ** (t // 15)),
    "poly": (
        {"POLY_LR_POWER": 2.0, "POLY_LR_CONSTANT_ENDING": 0.04},
        lambda t: max((1 - t / 90) ** 2, 0.04),
    ),
}


def _solver(task: str, name: str, keys: dict) -> CfgNode:
    cfg = TASKS[task]()
    pairs = {task: name, **keys}
    cfg.merge_from_list([word for k, value in pairs.items() for word in (f"SOLVER.{k}", value)])
    return cfg.SOLVER


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("task", TASKS)
def test_each_schedule_is_its_definition(task, name):
    """In each task whose configuration has its keys; the others name those that they have."""
    keys, definition = EXPECTED[name]
    if not SCHEDULES[name].keys.keys() <= TASKS[task]().SOLVER.keys():
        with pytest.raises(ConfigError, match=f"SOLVER.{task} is '{name}'; .*cosine.*poly"):
            schedule_of(_solver(task, name, {}), task)
        return
    solver = _solver(task, name, keys)
    rate = schedule_of(solver, task).make(solver, 0, 90)
    for step in range(90):
        assert rate(step / 90) == pytest.approx(definition(step)), step
    assert 0 <= rate(1.0) <= 1  # PyTorch asks once more after the last step


def test_steps_count_from_the_beginning_of_the_training():
    """Also where the span begins at the end of the warm-up."""
    solver = _solver("SCHEDULE", "steps", {"STEPS": [30, 60], "GAMMA": 0.5})
    rate = schedule_of(solver, "SCHEDULE").make(solver, 10, 90)
    at = {epoch: rate((epoch - 10) / 80) for epoch in (10, 29, 30, 59, 60, 90)}
    assert at == {10: 1, 29: 1, 30: 0.5, 59: 0.5, 60: 0.25, 90: 0.25}


def test_each_task_has_all_optimisers():
    for make in TASKS.values():
        assert all(row.keys.keys() <= make().SOLVER.keys() for row in OPTIMIZERS.values())


def test_a_model_of_which_nothing_is_trained_is_refused_and_no_key_of_the_optimiser():
    cfg = get_classification_config()
    with pytest.raises(ConfigError, match="No parameter of the model is trained"):
        build_optimizer(cfg.SOLVER, nn.Linear(2, 2).requires_grad_(False), 0.1)
