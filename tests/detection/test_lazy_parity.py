"""The LazyConfigs against the YAML files: the same networks, schedules, samples and losses."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import ListConfig
from torch import nn

from lambda_det.config import CONFIGS
from lambda_det.detection import DetectionTask, lazy_parser, parser, run
from lambda_det.detection.config_files import load_file
from lambda_det.detection.data import register_shapes
from lambda_det.detection.schedule import scale_settings
from tests.detection.tiny import NARROW, TINY, on_meta
from tests.reliability.runs import metrics
from tests.shapes import make_shapes

# Each file has its twin
PAIRS = sorted(path.stem for path in CONFIGS.glob("*.py"))
PAPER = [f"mask_rcnn_lambdaresnet{depth}" for depth in (50, 101, 152)]


def tasks(name: str) -> list[DetectionTask]:
    """Of the YAML file and of the LazyConfig of a name."""
    return [DetectionTask(load_file(CONFIGS / f"{name}.{ending}")) for ending in ("yaml", "py")]


def _settings(value: Any, seen: set[int]) -> Any:
    """What an object is, down to its numbers and strings, for a comparison of two."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape) if value.is_meta else value.tolist()
    if isinstance(value, list | tuple | ListConfig | np.ndarray):
        return [_settings(item, seen) for item in value]
    if isinstance(value, dict):
        return {str(key): _settings(item, seen) for key, item in value.items()}
    if not hasattr(value, "__dict__") or isinstance(value, type):
        return value
    if id(value) in seen:
        return type(value)
    seen.add(id(value))
    own = {name: item for name, item in vars(value).items() if "hook" not in name}
    if isinstance(own.get("loss_weight"), dict):  # a weight for each loss, or one for all
        [own["loss_weight"]] = set(own["loss_weight"].values())
    return getattr(value, "__qualname__", type(value)), _settings(own, seen)


def _network(model: nn.Module) -> dict[str, Any]:
    """Every module by its name with its class and settings."""
    return {name: _settings(module, set()) for name, module in model.named_modules()}


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRS)
def test_the_network_is_the_same(name):
    models = [on_meta(task.config) for task in tasks(name)]
    one, other = ([(k, v.shape, v.requires_grad) for k, v in m.named_parameters()] for m in models)
    assert one == other
    if name != PAPER[0]:
        return
    # Thresholds, numbers of proposals, strides, norms: all that the modules hold
    yaml, lazy = map(_network, models)
    assert list(yaml) == list(lazy)
    for module in yaml:
        assert yaml[module] == lazy[module], module


@pytest.mark.slow
@pytest.mark.parametrize("name", PAPER)
def test_the_run_is_the_same(name):
    yaml, lazy = tasks(name)
    # A schedule of a LazyConfig is a node, compared below
    without = {"lr_steps": (), "warmup_iters": 0}
    assert dataclasses.replace(yaml.settings, **without) == lazy.settings
    assert yaml.pixels == lazy.pixels
    assert yaml.components.train_names == lazy.components.train_names
    sizes = [(200, 256), (64, 64), (100, 300)]
    scales = [task.components.test_scale(sizes) for task in (yaml, lazy)]
    assert scales == [4.0, 4.0]
    groups = [task.build_optimizer(on_meta(task.config)).param_groups for task in (yaml, lazy)]
    one, other = ([{**g, "params": len(g["params"])} for g in found] for found in groups)
    assert one == other and {g["weight_decay"] for g in one} == {0.0, 4e-5}


@pytest.mark.parametrize(("world_size", "accumulate"), [(128, 1), (3, 1), (9, 7), (256, 1)])
def test_the_learning_rate_is_the_same_on_any_number_of_workers(world_size, accumulate):
    """YAML rounds the steps of warm-up and decay, a node has them as shares of the training."""
    both, schedules = [], []
    for task in tasks(PAPER[0]):
        written = dataclasses.replace(task.settings, accumulate=accumulate)
        task.settings = scale_settings(written, world_size)
        both.append(task.settings)
        schedules.append(task.build_schedule())
    settings, other = both
    assert (settings.max_iter, settings.base_lr) == (other.max_iter, other.base_lr)
    last = settings.max_iter
    # Around each change, where rounding would show, and evenly in between
    changes = (*settings.lr_steps, settings.warmup_iters)
    near = [change + d for change in changes for d in range(-20, 20)]
    for step in (*near, *range(0, last, last // 500)):
        # fvcore adds a millionth, against rounding
        at_a_change = any(abs(step - change) <= 1 + 1e-6 * last for change in changes)
        yaml, lazy = (schedule(step / last) for schedule in schedules)
        assert at_a_change or lazy == pytest.approx(yaml, rel=1e-3), step


# (YAML's keys, LazyConfig's) of a training of four steps with averaged weights
_RUN = (
    "SOLVER.REFERENCE_WORLD_SIZE 0 SOLVER.IMS_PER_BATCH 2 SOLVER.MAX_ITER 4 SOLVER.STEPS (3,) "
    "SOLVER.WARMUP_ITERS 2 SOLVER.BASE_LR 0.05 SOLVER.EMA_DECAY 0.9 TEST.EVAL_PERIOD 2 "
    "MODEL.ROI_HEADS.SCORE_THRESH_TEST 0.0 MODEL.ROI_HEADS.NUM_CLASSES 3 "
    "MODEL.LAMBDA_RESNET.NAME resnet14_slim_lambda_c5 MODEL.RPN.POST_NMS_TOPK_TRAIN 100 "
    "MODEL.RPN.POST_NMS_TOPK_TEST 100 "
    "DATASETS.TRAIN ('shapes_train',) DATASETS.TEST ('shapes_val',)",
    "train.reference_world_size=0 dataloader.train.total_batch_size=2 train.max_iter=4 "
    "lr_multiplier.scheduler.milestones=[3] lr_multiplier.scheduler.values=[1.0,0.1] "
    "lr_multiplier.scheduler.num_updates=4 lr_multiplier.warmup_length=0.5 optimizer.lr=0.05 "
    "train.model_ema.enabled=True train.model_ema.decay=0.9 train.eval_period=2 "
    "model.roi_heads.box_predictor.test_score_thresh=0.0 model.roi_heads.num_classes=3 "
    "model.backbone.bottom_up.name=resnet14_slim_lambda_c5 "
    "model.proposal_generator.post_nms_topk=[100,100] "
    "dataloader.train.dataset.names=shapes_train dataloader.test.dataset.names=shapes_val",
)


@pytest.mark.slow
def test_both_train_the_same_weights_and_find_the_same(tmp_path):
    make_shapes(tmp_path, num_train=8, num_val=2, size=64)
    register_shapes(tmp_path)
    contents, tables = [], []
    for kind, (parse, ending) in enumerate([(parser, "yaml"), (lazy_parser, "py")]):
        folder = tmp_path / ending
        output = (f"OUTPUT_DIR {folder}", f"train.output_dir={folder}")[kind]
        file = ["--config-file", str(CONFIGS / f"{PAPER[0]}.{ending}")]
        words = f"{TINY[kind]} {NARROW[kind]} {_RUN[kind]} {output}".split()
        run(parse().parse_args([*file, *words]))
        contents.append(torch.load(folder / "model_final.pth", weights_only=False))
        tables.append(metrics(folder))
        files = [folder / f"inference{w}/coco_instances_results.json" for w in ("", "_EMA")]
        assert len({file.read_text() for file in files}) == 2
    yaml, lazy = contents
    for weights in (lambda content: content["model"], lambda content: content["ema"]["model"]):
        assert weights(yaml).keys() == weights(lazy).keys()
        assert all(torch.equal(value, weights(lazy)[k]) for k, value in weights(yaml).items())
    assert not all(
        torch.equal(value, yaml["ema"]["model"][k]) for k, value in yaml["model"].items()
    )
    assert tables[0] == tables[1]
    last = tables[0][max(tables[0])]
    assert {f"{kind}{w}/AP" for kind in ("bbox", "segm") for w in ("", "_EMA")} < last.keys()
