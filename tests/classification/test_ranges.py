import pytest

from lambda_det.classification.config import check_ranges, get_classification_config
from lambda_det.errors import ConfigError

NAN, INFINITE = float("nan"), float("inf")


def test_the_defaults_are_within():
    check_ranges(get_classification_config())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("LOG_PERIOD", 0),
        ("MODEL.PIXEL_MEAN", ["a", "b", "c"]),
        ("MODEL.PIXEL_MEAN", [1.0, 2.0]),
        ("MODEL.PIXEL_STD", [1.0, 0.0, 1.0]),
        ("MODEL.PIXEL_STD", [1.0, NAN, 1.0]),
        ("SEED", -1),
        ("SOLVER.ACCUMULATE_GRADIENTS", 0),
        ("SOLVER.BASE_LR", -0.1),
        ("SOLVER.BASE_LR", NAN),
        ("SOLVER.BASE_LR", INFINITE),
        ("SOLVER.BETAS", [0.9]),
        ("SOLVER.BETAS", [0.9, 1.0]),
        ("SOLVER.CHECKPOINTS_KEPT", 0),
        ("SOLVER.CHECKPOINT_PERIOD", 0),
        ("SOLVER.DECAY", 0.0),
        ("SOLVER.DECAY_EPOCHS", 0.0),
        ("SOLVER.EMA_DECAY", 1.0),
        ("SOLVER.EPOCHS", 0.0),
        ("SOLVER.EPOCHS", INFINITE),
        ("SOLVER.IMS_PER_BATCH", 0),
        ("SOLVER.LABEL_SMOOTHING", 1.0),
        ("SOLVER.LR_BATCH", 0),
        ("SOLVER.MOMENTUM", NAN),
        ("SOLVER.WARMUP_EPOCHS", -1.0),
        ("SOLVER.WEIGHT_DECAY", -1.0),
        ("TEST.EVAL_PERIOD", 0.0),
        ("TEST.IMS_PER_BATCH", -3),
        ("TEST.PATIENCE", -1),
        ("TEST.PRECISE_BN_BATCHES", -1),
        ("DATALOADER.NUM_WORKERS", -1),
    ],
)
def test_numbers_that_no_training_can_have(key, value):
    cfg = get_classification_config()
    section, _, name = key.rpartition(".")
    (cfg[section] if section else cfg)[name] = value
    with pytest.raises(ConfigError, match=f"^{key} is "):
        check_ranges(cfg)
