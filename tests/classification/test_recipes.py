"""The recipes hold the paper's figures, and describe trainings that can start; ranges of keys."""

from pathlib import Path

import pytest
import torch
import yaml
from detectron2.config import CfgNode

from lambda_det.classification import load_recipe, parser
from lambda_det.classification.config import check_ranges, get_classification_config
from lambda_det.classification.model import build_classifier, model_options
from lambda_det.classification.schedule import EpochSchedule, peak_learning_rate, plan_training
from lambda_det.classification.task import ClassificationTask
from lambda_det.config import leaves
from lambda_det.errors import ConfigError
from lambda_det.modeling.specs import SPECS

CONFIGS = Path(__file__).parents[2] / "configs"
RECIPES = sorted(
    path.relative_to(CONFIGS)
    for pattern in ("imagenet/*.yaml", "cifar10/*.yaml", "quick/cifar10*.yaml")
    for path in CONFIGS.glob(pattern)
)
RECIPE_NAMES = {path.stem for path in RECIPES if path.parent.name == "imagenet"}
IMAGENET = 1_281_167
# Table 20 of the paper: depth, size: RandAugment's magnitude, dropout, stochastic depth
TABLE_20 = {
    (50, 128): (10, 0.2, 0),
    (50, 160): (10, 0.2, 0),
    (101, 160): (10, 0.3, 0),
    (101, 192): (15, 0.2, 0),
    (152, 192): (15, 0.3, 0),
    (152, 224): (15, 0.3, 0.1),
    (152, 256): (15, 0.3, 0.1),
    (152, 288): (15, 0.3, 0.1),
    (270, 256): (15, 0.3, 0.1),
    (350, 256): (15, 0.3, 0.2),
    (350, 288): (15, 0.3, 0.2),
    (350, 320): (15, 0.3, 0.2),
    (420, 320): (15, 0.3, 0.2),
}


def load_recipe_by_name(name, *pairs):
    return load_recipe(parser().parse_args(["--config-file", str(CONFIGS / name), *pairs]))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_recipe_describes_a_model_and_a_schedule(recipe):
    cfg = load_recipe_by_name(recipe, "MODEL.DEVICE", "meta")
    with torch.device("meta"):
        build_classifier(cfg, 1000)
    assert EpochSchedule(cfg)(cfg.SOLVER.WARMUP_EPOCHS / cfg.SOLVER.EPOCHS) == 1
    plan_training(cfg, IMAGENET, 8)
    assert recipe.stem in ("base", "350_epochs") or cfg.OUTPUT_DIR.endswith(recipe.stem)


def test_every_row_of_table_20_has_a_recipe_and_no_other_has():
    found = {}
    for path in (CONFIGS / "imagenet").glob("lambda_resnet*_*.yaml"):
        cfg = load_recipe_by_name(path)
        depth = int(cfg.MODEL.NAME.removeprefix("lambda_resnet"))
        found[depth, cfg.INPUT.SIZE] = (
            cfg.INPUT.RANDAUGMENT.MAGNITUDE,
            cfg.MODEL.DROPOUT,
            cfg.MODEL.STOCHASTIC_DEPTH,
        )
        assert path.stem == f"{cfg.MODEL.NAME}_{cfg.INPUT.SIZE}"
        assert (cfg.SOLVER.EPOCHS, cfg.SOLVER.WEIGHT_DECAY) == (350, 4e-5)
        # A run that stops early has images to be stopped by; the others train on all
        assert float(cfg.DATA.HELD_OUT) == (0.02 if cfg.TEST.PATIENCE else 0.0)
        assert cfg.INPUT.RANDAUGMENT.LAYERS == 2
        # "early stopping ... starting with LambdaResNet-350 at resolution 288x288"
        assert bool(cfg.TEST.PATIENCE) == (depth >= 350 and cfg.INPUT.SIZE >= 288)
    assert found == TABLE_20


@pytest.mark.parametrize("name", ["resnet50", "resnet50_lambda_c2345"])
def test_90_epochs(name):
    cfg = load_recipe_by_name(f"imagenet/{name}.yaml")
    solver = cfg.SOLVER
    assert (solver.EPOCHS, solver.WARMUP_EPOCHS, solver.SCHEDULE) == (90, 5, "cosine")
    assert (solver.OPTIMIZER, solver.MOMENTUM, solver.NESTEROV) == ("sgd", 0.9, False)
    assert (solver.WEIGHT_DECAY, solver.LABEL_SMOOTHING, solver.EMA_DECAY) == (1e-4, 0.1, 0.9999)
    assert (solver.IMS_PER_BATCH, peak_learning_rate(cfg)) == (4096, pytest.approx(1.6))
    assert (cfg.INPUT.SIZE, cfg.INPUT.CROP, cfg.INPUT.FLIP) == (224, "resized", True)
    assert (cfg.INPUT.RANDAUGMENT.LAYERS, cfg.MODEL.DROPOUT, cfg.DATA.HELD_OUT) == (0, 0, 0)
    assert name == cfg.MODEL.NAME


@pytest.mark.parametrize("name", [name for name in SPECS if name.startswith("resnet50")])
def test_the_90_epochs_recipe_takes_every_form_of_resnet50(name):
    model_options(load_recipe_by_name("imagenet/resnet50.yaml", "MODEL.NAME", name))


@pytest.mark.parametrize("name", ["mobilenet_v2", "mobilenet_v2_lambda"])
def test_mobilenet(name):
    cfg = load_recipe_by_name(f"imagenet/{name}.yaml")
    solver = cfg.SOLVER
    assert name == cfg.MODEL.NAME and cfg.MODEL.DROPOUT == 0.2 and cfg.INPUT.SIZE == 224
    assert (solver.OPTIMIZER, solver.MOMENTUM, solver.EPOCHS) == ("rmsprop", 0.9, 350)
    assert (solver.IMS_PER_BATCH, peak_learning_rate(cfg)) == (4096, pytest.approx(0.1))
    assert (solver.SCHEDULE, solver.DECAY, solver.DECAY_EPOCHS) == ("exponential", 0.99, 3)
    assert solver.WEIGHT_DECAY == 1e-5


@pytest.mark.parametrize(("name", "size"), [("resnet50", 23.5), ("resnet50_lambda", 12.8)])
def test_the_cifar10_reproduction(name, size):
    cfg = load_recipe_by_name(f"cifar10/{name}.yaml", "MODEL.DEVICE", "cpu")
    solver = cfg.SOLVER
    assert (solver.OPTIMIZER, solver.EPOCHS, solver.IMS_PER_BATCH) == ("adam", 90, 128)
    assert solver.LABEL_SMOOTHING == 0.1
    assert (solver.BETAS, solver.WEIGHT_DECAY) == ([0.9, 0.9999], 1e-4)
    steps = 391 * 90
    rates = [peak_learning_rate(cfg) * EpochSchedule(cfg)(391 * e / steps) for e in range(90)]
    assert rates[:5] == pytest.approx([0.0005 * (epoch + 1) for epoch in range(5)])
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert (cfg.INPUT.SIZE, cfg.INPUT.CROP, cfg.INPUT.PADDING, cfg.INPUT.FLIP) == (
        32,
        "padded",
        4,
        True,
    )
    model = build_classifier(cfg, 10)
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 1) == size


def test_each_figure_stands_in_one_file():
    """A recipe sets no key to the value that its base has already."""
    for path in RECIPES:
        own = yaml.safe_load((CONFIGS / path).read_text())
        base = own.pop("_BASE_", None)
        if base is None:
            continue
        before = CfgNode.load_yaml_with_base(str(CONFIGS / path.parent / base))
        repeated = set(map(str, leaves(own))) & set(map(str, leaves(before)))
        assert not repeated, f"{path} repeats {repeated}"


NAN, INFINITE = float("nan"), float("inf")


OUTSIDE = {
    "DATA.FRACTION": [0.0, 1.5, NAN],
    "DATA.HELD_OUT": [-0.1, 0.51],
    "DATA.MAX_UNREADABLE_IMAGES": [-1],
    "INPUT.MIN_AREA": [0.0, 1.5],
    "INPUT.PADDING": [-1],
    "INPUT.SIZE": [0],
    "INPUT.TEST_CROP": [0.0, 2.0],
    "INPUT.TEST_SIZE": [-1],
    "MODEL.PIXEL_MEAN": [["a", "b", "c"], [1.0, 2.0]],
    "MODEL.PIXEL_STD": [[1.0, 0.0, 1.0], [1.0, NAN, 1.0]],
    "SEED": [-1],
    "SOLVER.ACCUMULATE_GRADIENTS": [0],
    "SOLVER.BASE_LR": [-0.1, NAN, INFINITE],
    "SOLVER.BETAS": [[0.9], [0.9, 1.0]],
    "SOLVER.DECAY": [0.0],
    "SOLVER.DECAY_EPOCHS": [0.0],
    "SOLVER.EPOCHS": [0.0, INFINITE],
    "SOLVER.IMS_PER_BATCH": [0],
    "SOLVER.LABEL_SMOOTHING": [1.0],
    "SOLVER.LR_BATCH": [0],
    "SOLVER.MOMENTUM": [NAN],
    "SOLVER.WARMUP_EPOCHS": [-1.0],
    "SOLVER.WEIGHT_DECAY": [-1.0],
    "TEST.EVAL_PERIOD": [0.0],
    "TEST.IMS_PER_BATCH": [-3],
    "TEST.PRECISE_BN_BATCHES": [-1],
}


@pytest.mark.parametrize("key", OUTSIDE)
def test_numbers_that_no_training_can_have(key):
    cfg = get_classification_config()
    check_ranges(cfg)
    section, _, name = key.rpartition(".")
    for value in OUTSIDE[key]:
        (cfg[section] if section else cfg)[name] = value
        with pytest.raises(ConfigError, match=f"^{key} is "):
            check_ranges(cfg)


def test_given_keys_that_nothing_reads_are_named_with_what_they_need(caplog):
    unread = {
        "SOLVER.DECAY": ("0.9", "SOLVER.SCHEDULE"),  # of another schedule
        "SOLVER.CLIP_GRADIENTS.CLIP_VALUE": ("0.5", "SOLVER.CLIP_GRADIENTS.ENABLED"),
        "INPUT.RANDAUGMENT.MAGNITUDE": ("9", "INPUT.RANDAUGMENT.LAYERS"),
    }
    pairs = [word for key, (value, _) in unread.items() for word in (key, value)]
    ClassificationTask.read(parser().parse_args([*pairs, "SOLVER.MOMENTUM", "0.8"]))
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == len(unread)
    for words, (key, (_, needed)) in zip(said, unread.items(), strict=True):
        assert key in words and needed in words
