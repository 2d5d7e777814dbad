"""The LazyConfigs against the YAML files: the same networks, schedules, samples and losses."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from detectron2.engine import HookBase
from detectron2.utils.env import seed_all_rng
from torch import nn

from lambda_det.detection import DetectionTrainer, LazyTrainer, load_config, load_lazy_config
from lambda_det.detection.data import make_shapes
from lambda_det.detection.scaling import images_per_batch, scale_schedule
from lambda_det.training.loop import run_steps

CONFIGS = Path(__file__).parents[2] / "configs"
# Each file has its twin
PAIRS = sorted(path.stem for path in CONFIGS.glob("*.py"))
PAPER = [f"mask_rcnn_lambdaresnet{depth}" for depth in (50, 101, 152)]
# The same small changes to both: (YAML's keys, LazyConfig's)
TINY = (
    "MODEL.DEVICE cpu MODEL.LAMBDA_RESNET.NAME lambda_resnet26 MODEL.LAMBDA_RESNET.SCOPE 7 "
    "MODEL.ROI_BOX_HEAD.NUM_CONV 1 MODEL.ROI_BOX_HEAD.CONV_DIM 8 MODEL.RPN.CONV_DIMS [-1] "
    "MODEL.ROI_MASK_HEAD.NUM_CONV 1 MODEL.ROI_MASK_HEAD.CONV_DIM 8 DATALOADER.NUM_WORKERS 0 "
    "INPUT.LSJ.SIZE 64 INPUT.MIN_SIZE_TEST 64 INPUT.MAX_SIZE_TEST 64 SEED 5",
    "train.device=cpu model.backbone.bottom_up.name=lambda_resnet26 "
    "model.backbone.bottom_up.scope=7 model.roi_heads.box_head.conv_dims=[8] "
    "model.proposal_generator.head.conv_dims=[-1] model.roi_heads.mask_head.conv_dims=[8,8] "
    "dataloader.train.num_workers=0 dataloader.test.num_workers=0 dataloader.image_size=64 "
    "train.seed=5",
)


def yaml_config(name: str, options: str = "", **flags: str):
    return load_config(_arguments(f"{name}.yaml", options, flags))


def lazy_config(name: str, options: str = "", **flags: str):
    return load_lazy_config(_arguments(f"{name}.py", options, flags))


def _arguments(file: str, options: str, flags: dict[str, str]) -> argparse.Namespace:
    return argparse.Namespace(config_file=str(CONFIGS / file), opts=options.split(), **flags)


@pytest.fixture(scope="module")
def shapes(tmp_path_factory) -> dict[str, str]:
    """The flags that name a small data set of shapes."""
    folder = tmp_path_factory.mktemp("data")
    make_shapes(folder, num_train=8, num_val=2, size=64)
    flags = {}
    for part, split in (("train", "train"), ("test", "val")):
        flags[f"{part}_json"] = str(folder / "shapes" / "annotations" / f"instances_{split}.json")
        flags[f"{part}_images"] = str(folder / "shapes" / split)
    return flags


@pytest.fixture
def tiny(shapes, tmp_path):
    """Both configurations of a small detector, ready to train: [(trainer, config), ...]."""
    name = PAPER[0]
    yaml = yaml_config(name, f"{TINY[0]} OUTPUT_DIR {tmp_path / 'yaml'}", **shapes)
    lazy = lazy_config(name, f"{TINY[1]} train.output_dir={tmp_path / 'lazy'}", **shapes)
    pairs = [(DetectionTrainer, yaml), (LazyTrainer, lazy)]
    for trainer, cfg in pairs:
        trainer.register_data(cfg)
    return pairs


def _settings(value: Any, seen: set[int]) -> Any:
    """What an object is, down to its numbers and strings, for a comparison of two."""
    if isinstance(value, (bool, int, float, str, type(None), torch.dtype)):
        return value
    if isinstance(value, torch.Tensor):
        return tuple(value.shape) if value.is_meta else value.tolist()
    if isinstance(value, (list, tuple)) or type(value).__name__ == "ListConfig":
        return [_settings(item, seen) for item in value]
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {str(key): _settings(item, seen) for key, item in value.items()}
    if id(value) in seen:
        return type(value)
    seen.add(id(value))
    if callable(value) and hasattr(value, "__qualname__"):
        return value.__qualname__
    if dataclasses.is_dataclass(value):
        return _settings(dataclasses.asdict(value), seen)
    own = getattr(value, "__dict__", {})
    return type(value).__qualname__, {
        # A weight for each loss, or one for all
        name: set(item.values() if isinstance(item, dict) else [item])
        if name == "loss_weight"
        else _settings(item, seen)
        for name, item in own.items()
        if "hook" not in name
    }


def _network(model: nn.Module) -> dict[str, Any]:
    """Every module by its name with its class and settings."""
    return {name: _settings(module, set()) for name, module in model.named_modules()}


def test_every_lazyconfig_has_its_yaml_file():
    assert set(PAPER) < set(PAIRS)
    assert all((CONFIGS / f"{name}.yaml").exists() for name in PAIRS)


@pytest.mark.parametrize("name", PAIRS)
def test_the_network_is_the_same(name):
    models = [
        DetectionTrainer.build_for_trial(yaml_config(name)),
        LazyTrainer.build_for_trial(lazy_config(name)),
    ]
    one, other = ([(k, v.shape) for k, v in m.state_dict().items()] for m in models)
    assert one == other
    assert [p.requires_grad for m in models[:1] for p in m.parameters()] == [
        p.requires_grad for p in models[1].parameters()
    ]


def test_every_setting_of_the_network_is_the_same():
    """Thresholds, numbers of proposals, strides, norms: all that the modules hold."""
    yaml = _network(DetectionTrainer.build_for_trial(yaml_config(PAPER[0])))
    lazy = _network(LazyTrainer.build_for_trial(lazy_config(PAPER[0])))
    assert list(yaml) == list(lazy)
    for module in yaml:
        assert yaml[module] == lazy[module], module


@pytest.mark.parametrize("name", PAPER)
def test_the_run_is_the_same(name):
    yaml, lazy = yaml_config(name), lazy_config(name)
    for section in ("SOLVER", "TEST", "DATASETS", "DATALOADER"):
        differences = {
            key: (value, lazy[section][key])
            for key, value in yaml[section].items()
            if value != lazy[section][key]
        }
        # Two stay Detectron2's defaults there, and are compared by what they do, below
        assert differences.keys() <= {"WARMUP_FACTOR", "WEIGHT_DECAY"}, differences
    assert yaml.OUTPUT_DIR == lazy.OUTPUT_DIR
    assert yaml.MODEL.WEIGHTS == "" and lazy.MODEL.WEIGHTS == ""
    assert DetectionTrainer.pixel_settings(yaml) == LazyTrainer.pixel_settings(lazy)
    assert lazy.lazy.train.log_period == DetectionTrainer.log_period
    assert lazy.lazy.train.checkpointer.max_to_keep == DetectionTrainer.checkpoints_kept


def _schedules(world_size: int, accumulate: int = 1):
    result = []
    for trainer, cfg in (
        (DetectionTrainer, yaml_config(PAPER[0])),
        (LazyTrainer, lazy_config(PAPER[0])),
    ):
        cfg.SOLVER.ACCUMULATE_GRADIENTS = accumulate
        cfg = scale_schedule(cfg, world_size)
        weight = torch.zeros(1, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=cfg.SOLVER.BASE_LR)
        result.append((trainer.build_lr_scheduler(cfg, optimizer), cfg))
    return result


def _rate(scheduler, step: int) -> float:
    scheduler.last_epoch = step  # as the trainer's hook has it in that step
    return scheduler.get_lr()[0]


def test_the_learning_rate_is_the_same_in_all_steps():
    (yaml, cfg), (lazy, other) = _schedules(128)
    assert cfg.SOLVER.MAX_ITER == other.SOLVER.MAX_ITER
    for step in range(cfg.SOLVER.MAX_ITER):
        assert _rate(yaml, step) == _rate(lazy, step), step


@pytest.mark.parametrize(
    ("world_size", "accumulate"), [(1, 1), (3, 1), (8, 1), (9, 7), (131, 1), (256, 1)]
)
def test_the_learning_rate_is_the_same_on_other_numbers_of_workers(world_size, accumulate):
    (yaml, cfg), (lazy, other) = _schedules(world_size, accumulate)
    assert cfg.SOLVER.MAX_ITER == other.SOLVER.MAX_ITER
    assert images_per_batch(cfg) == images_per_batch(other)
    assert cfg.TEST.EVAL_PERIOD == other.TEST.EVAL_PERIOD
    last = cfg.SOLVER.MAX_ITER
    # Around each change, where rounding would show, and evenly in between
    near = [s + d for s in (*cfg.SOLVER.STEPS, cfg.SOLVER.WARMUP_ITERS) for d in range(-99, 99)]
    for step in (*near, *range(0, last, last // 5_000)):
        assert _rate(yaml, step) == _rate(lazy, step), step


def test_another_length_stretches_the_schedule(tmp_path):
    cfg = lazy_config(PAPER[0], "train.max_iter=1300 train.reference_world_size=0")
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=cfg.SOLVER.BASE_LR)
    scheduler = LazyTrainer.build_lr_scheduler(cfg, optimizer)
    rates = [_rate(scheduler, step) for step in (0, 5, 10, 1169, 1171, 1299)]
    assert rates == pytest.approx([0, 0.16, 0.32, 0.32, 0.032, 0.00032])


def test_the_optimiser_is_the_same_for_each_parameter(tiny):
    groups = []
    for trainer, cfg in tiny:
        model = trainer.build_for_trial(cfg)
        names = {parameter: name for name, parameter in model.named_parameters()}
        optimizer = trainer.build_optimizer(scale_schedule(cfg, 1), model)
        groups.append(
            {
                names[parameter]: {k: v for k, v in group.items() if k != "params"}
                for group in optimizer.param_groups
                for parameter in group["params"]
            }
        )
        assert isinstance(optimizer, torch.optim.SGD)
    assert groups[0] == groups[1]
    decays = {name: group["weight_decay"] for name, group in groups[0].items()}
    assert decays["backbone.bottom_up.stem.conv1.weight"] == 4e-5
    norms = [name for name in decays if "norm." in name]
    assert norms and not any(decays[name] for name in norms)


def _plain_sample(image: dict[str, Any]) -> dict[str, Any]:
    instances = image["instances"]
    return {
        "image": image["image"].numpy().tobytes(),
        "size": (image["width"], image["height"], instances.image_size),
        "boxes": instances.gt_boxes.tensor.tolist(),
        "classes": instances.gt_classes.tolist(),
        "masks": [[p.tolist() for p in polygons] for polygons in instances.gt_masks.polygons],
        "file": image["file_name"],
    }


def test_the_augmented_samples_are_the_same(tiny):
    batches = []
    for trainer, cfg in tiny:
        loader = trainer.build_train_loader(scale_schedule(cfg, 1))
        # As a run does. A loader that was not begun draws a seed, and how many numbers were drawn
        # before depends on Detectron2: since 2026 its samplers take theirs from the YAML config.
        loader.begin(seed=11, batches=0)
        batches.append([[_plain_sample(i) for i in b] for b in itertools.islice(loader, 8)])
    assert batches[0] == batches[1]
    samples = [sample for batch in batches[0] for sample in batch]
    assert len(samples) == 16 and sum(len(sample["boxes"]) for sample in samples) > 10
    assert len({sample["image"] for sample in samples}) > 8


def test_the_test_images_and_the_evaluator_are_the_same(tiny):
    images, evaluators = [], []
    for trainer, cfg in tiny:
        loader = trainer.build_test_loader(cfg, cfg.DATASETS.TEST[0])
        images.append([i["image"].numpy().tobytes() for batch in loader for i in batch])
        evaluator = trainer.build_evaluator(cfg, cfg.DATASETS.TEST[0])
        [evaluator] = getattr(evaluator, "_evaluators", [evaluator])
        own = vars(evaluator)
        assert Path(own["_output_dir"]) == Path(cfg.OUTPUT_DIR, "inference")
        kept = ("_tasks", "_distributed", "_max_dets_per_image", "_use_fast_impl", "_do_evaluation")
        evaluators.append((type(evaluator), [_settings(own[key], set()) for key in kept]))
    assert images[0] == images[1] and len(images[0]) == 2
    assert evaluators[0] == evaluators[1]


class _Losses(HookBase):
    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def after_step(self) -> None:
        latest = self.trainer.storage.latest()
        self.seen.append({k: v for k, (v, _) in latest.items() if "loss" in k or k == "lr"})


def test_the_first_losses_and_weights_are_the_same(tiny):
    """With large steps, so that a difference in the optimiser would show in the next loss."""
    losses, states, first, results = [], [], [], []
    for trainer, cfg in tiny:
        cfg.SOLVER.BASE_LR = 1e5  # the warm-up of 128 000 steps has hardly begun
        seed_all_rng(cfg.SEED)
        training = trainer(cfg)
        first.append({k: v.clone() for k, v in training._model.state_dict().items()})
        watch = _Losses()
        training._hooks.clear()
        training.register_hooks([watch, *training.build_hooks()[:2]])
        training.max_iter = 3
        run_steps(training)
        results.append(trainer.test(cfg, training._model))
        losses.append(watch.seen)
        states.append(training._model.state_dict())
    assert all(torch.equal(value, first[1][name]) for name, value in first[0].items())
    assert losses[0] == losses[1] and len(losses[0]) == 3
    assert losses[0][1]["lr"] > 0 or losses[0][2]["lr"] > 0
    assert {"loss_mask", "loss_box_reg", "loss_rpn_cls"} <= losses[0][0].keys()
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    assert str(results[0]) == str(results[1])  # some of them are NaN
    assert results[0]["segm"]["AP"] >= 0
    moved = [name for name in states[0] if not torch.equal(states[0][name], first[0][name])]
    assert any(name.endswith("position.embedding") for name in moved)
