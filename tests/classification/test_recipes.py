"""The recipes hold the paper's figures, and describe trainings that can start; ranges of keys."""

from operator import attrgetter
from pathlib import Path

import pytest
import torch
import yaml
from detectron2.config import CfgNode

from lambda_det.classification import load_recipe, parser
from lambda_det.classification.config import check_ranges, get_classification_config
from lambda_det.classification.model import build_classifier
from lambda_det.classification.schedule import EpochSchedule, Plan, peak_learning_rate
from lambda_det.classification.task import ClassificationTask
from lambda_det.config import leaves
from lambda_det.errors import ConfigError

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
    Plan(cfg, IMAGENET, 8)
    assert recipe.stem in ("base", "350_epochs") or cfg.OUTPUT_DIR.endswith(recipe.stem)


def test_every_row_of_table_20_has_a_recipe_and_no_other_has():
    found = {}
    for path in (CONFIGS / "imagenet").glob("lambda_resnet*_*.yaml"):
        cfg = load_recipe_by_name(path)
        depth, augment = int(cfg.MODEL.NAME.removeprefix("lambda_resnet")), cfg.INPUT.RANDAUGMENT
        found[depth, cfg.INPUT.SIZE] = (
            augment.MAGNITUDE,
            cfg.MODEL.DROPOUT,
            cfg.MODEL.STOCHASTIC_DEPTH,
        )
        assert path.stem == f"{cfg.MODEL.NAME}_{cfg.INPUT.SIZE}"
        assert (cfg.SOLVER.EPOCHS, cfg.SOLVER.WEIGHT_DECAY, augment.LAYERS) == (350, 4e-5, 2)
        # A run that stops early has images to be stopped by; the others train on all
        assert float(cfg.DATA.HELD_OUT) == (0.02 if cfg.TEST.PATIENCE else 0.0)
        # "early stopping ... starting with LambdaResNet-350 at resolution 288x288"
        assert bool(cfg.TEST.PATIENCE) == (depth >= 350 and cfg.INPUT.SIZE >= 288)
    assert found == TABLE_20


OF_ALL = {"SOLVER.WARMUP_EPOCHS": 5, "SOLVER.LABEL_SMOOTHING": 0.1, "INPUT.FLIP": True}
OF_IMAGENET = {
    **{"INPUT.SIZE": 224, "INPUT.CROP": "resized", "INPUT.RANDAUGMENT.LAYERS": 0},
    **{"SOLVER.IMS_PER_BATCH": 4096, "SOLVER.MOMENTUM": 0.9, "SOLVER.EMA_DECAY": 0.9999},
}
SGD = {"SOLVER.OPTIMIZER": "sgd", "SOLVER.NESTEROV": False, "SOLVER.SCHEDULE": "cosine"}
SGD |= {"SOLVER.EPOCHS": 90, "SOLVER.WEIGHT_DECAY": 1e-4, "MODEL.DROPOUT": 0}
RMSPROP = {"SOLVER.OPTIMIZER": "rmsprop", "SOLVER.EPOCHS": 350, "SOLVER.WEIGHT_DECAY": 1e-5}
RMSPROP |= {"SOLVER.SCHEDULE": "exponential", "SOLVER.DECAY": 0.99, "SOLVER.DECAY_EPOCHS": 3}
ADAM = {"SOLVER.OPTIMIZER": "adam", "SOLVER.BETAS": [0.9, 0.9999], "SOLVER.WEIGHT_DECAY": 1e-4}
ADAM |= {"SOLVER.EPOCHS": 90, "SOLVER.IMS_PER_BATCH": 128, "SOLVER.LR_BY_EPOCH": True}
ADAM |= {"INPUT.SIZE": 32, "INPUT.CROP": "padded", "INPUT.PADDING": 4}
# The highest learning rate, and keys
FIGURES = {
    "imagenet/resnet50": (1.6, OF_IMAGENET | SGD),
    "imagenet/resnet50_lambda_c2345": (1.6, OF_IMAGENET | SGD),
    "imagenet/mobilenet_v2": (0.1, OF_IMAGENET | RMSPROP | {"MODEL.DROPOUT": 0.2}),
    "imagenet/mobilenet_v2_lambda": (0.1, OF_IMAGENET | RMSPROP | {"MODEL.DROPOUT": 0.2}),
    "cifar10/resnet50": (0.0025, ADAM),
    "cifar10/resnet50_lambda": (0.0025, ADAM),
}


@pytest.mark.parametrize("name", FIGURES)
def test_other_recipes(name):
    rate, figures = FIGURES[name]
    cfg = load_recipe_by_name(f"{name}.yaml")
    assert peak_learning_rate(cfg) == pytest.approx(rate)
    figures = OF_ALL | figures
    keys = dict(leaves(cfg))
    assert {key: keys[key] for key in figures} == figures
    assert cfg.MODEL.NAME.startswith(Path(name).name)


@pytest.mark.parametrize(("name", "size"), [("resnet50", 23.5), ("resnet50_lambda", 12.8)])
def test_the_cifar10_reproduction_has_so_many_parameters(name, size):
    model = build_classifier(load_recipe_by_name(f"cifar10/{name}.yaml", "MODEL.DEVICE", "cpu"), 10)
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


# Values of keys, by section
OUTSIDE = {
    "DATA": {"FORMAT": "folders", "FRACTION": 0.0, "HELD_OUT": 0.51, "MAX_UNREADABLE_IMAGES": -1},
    "INPUT": {
        "CROP": "random",
        "MIN_AREA": 1.5,
        "PADDING": -1,
        "SIZE": 0,
        "TEST_CROP": 2.0,
        "TEST_SIZE": -1,
    },
    "MODEL": {"NORM": "LN", "PIXEL_MEAN": [1.0, 2.0], "PIXEL_STD": [1.0, 0.0, 1.0]},
    "SOLVER": {
        "ACCUMULATE_GRADIENTS": 0,
        "BASE_LR": -0.1,
        "BETAS": [0.9, 1.0],
        "DECAY": 0.0,
        "DECAY_EPOCHS": 0.0,
        "EPOCHS": float("inf"),
        "IMS_PER_BATCH": 0,
        "LABEL_SMOOTHING": 1.0,
        "LR_BATCH": 0,
        "MOMENTUM": float("nan"),
        "WARMUP_EPOCHS": -1.0,
        "WEIGHT_DECAY": -1.0,
    },
    "TEST": {"EVAL_PERIOD": 0.0, "IMS_PER_BATCH": -3, "PRECISE_BN_BATCHES": -1},
}
MORE_OUTSIDE = [
    ("DATA", "FRACTION", 1.5),
    ("DATA", "HELD_OUT", -0.1),
    ("INPUT", "MIN_AREA", 0.0),
    ("INPUT", "TEST_CROP", 0.0),
    ("INPUT.RANDAUGMENT", "LAYERS", -1),
    ("INPUT.RANDAUGMENT", "MAGNITUDE", 31),
    ("MODEL", "PIXEL_MEAN", ["a", "b", "c"]),
    ("SOLVER", "BETAS", [0.9]),
]


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [(section, *pair) for section in OUTSIDE for pair in OUTSIDE[section].items()] + MORE_OUTSIDE,
)
def test_values_that_no_training_can_have(section, name, value):
    cfg = get_classification_config()
    check_ranges(cfg)
    attrgetter(section)(cfg)[name] = value
    with pytest.raises(ConfigError, match=rf"^{section}\.{name} is "):
        check_ranges(cfg)


def test_given_keys_that_nothing_reads_are_named_with_what_they_need(caplog):
    unread = {
        "SOLVER.DECAY": ("0.9", "SOLVER.SCHEDULE"),  # of another schedule
        "SOLVER.CLIP_GRADIENTS.CLIP_VALUE": ("0.5", "SOLVER.CLIP_GRADIENTS.ENABLED"),
        "INPUT.RANDAUGMENT.MAGNITUDE": ("9", "INPUT.RANDAUGMENT.LAYERS"),
    }
    pairs = [word for key, (value, _) in unread.items() for word in (key, value)]
    ClassificationTask.read(parser().parse_args([*pairs, "SOLVER.MOMENTUM", "0.8"]))
    assert len(caplog.records) == len(unread)
    for record, (key, (_, needed)) in zip(caplog.records, unread.items(), strict=True):
        assert key in record.getMessage() and needed in record.getMessage()
