from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
from detectron2.config import get_cfg
from detectron2.structures import BoxMode

from lambda_det.config import add_lambda_config
from lambda_det.detection import recipe
from lambda_det.detection.command_line import parser
from lambda_det.detection.config import FITTED_KEYS, load_config
from lambda_det.detection.model import build_on_meta
from lambda_det.detection.recipe import (
    Derived,
    Statistics,
    apply_recipe,
    derive,
    epochs_for,
    input_scale,
)
from lambda_det.errors import ConfigError, DataError
from lambda_det.weights.provenance import PixelSettings
from lambda_det.weights.public import fetch


@pytest.fixture
def cfg():
    cfg = get_cfg()
    add_lambda_config(cfg)
    cfg.SOLVER.IMS_PER_BATCH = 4
    cfg.MODEL.RPN.IN_FEATURES = ["p2", "p3", "p4", "p5", "p6"]
    cfg.INPUT.MIN_SIZE_TRAIN, cfg.INPUT.MAX_SIZE_TRAIN = (300, 500), 10_000
    return cfg


def make_records(images: int, sizes=((50, 50),), classes=(0,)) -> list[dict]:
    """Images of 200 x 200 with one object of each size, the classes in turn over the images."""
    return [
        {
            "height": 200,
            "width": 200,
            "annotations": [
                {
                    "bbox": [1, 1, *size],
                    "bbox_mode": BoxMode.XYWH_ABS,
                    "category_id": classes[index % len(classes)],
                }
                for size in sizes
            ],
        }
        for index in range(images)
    ]


def derived(cfg, records) -> dict:
    return {d.key: d.value for d in derive(cfg, Statistics.of(records, input_scale(cfg)))}


@pytest.mark.parametrize(("images", "epochs"), [(1, 30), (1000, 30), (20_000, 16), (1_000_000, 16)])
def test_epochs_at_the_ends_of_the_rule(images, epochs):
    assert epochs_for(images) == pytest.approx(epochs)


def test_epochs_fall_as_images_grow():
    epochs = [epochs_for(n) for n in (1000, 2000, 5000, 10_000, 20_000)]
    assert epochs == sorted(epochs, reverse=True) and len(set(epochs)) == 5
    # By the logarithm: the square root of 20 is half way
    assert epochs_for(round(1000 * 20**0.5)) == pytest.approx(23, abs=0.01)


def test_schedule_follows_the_epochs(cfg):
    cfg.RECIPE.EPOCHS, cfg.RECIPE.EVALUATIONS = 20.0, 5
    found = derived(cfg, make_records(101))
    assert found["SOLVER.MAX_ITER"] == 505  # 20 * 101 / 4
    assert found["SOLVER.STEPS"] == (393, 468)
    assert found["SOLVER.WARMUP_ITERS"] == 50
    assert found["SOLVER.BASE_LR"] == pytest.approx(0.005)
    assert found["TEST.EVAL_PERIOD"] == found["SOLVER.CHECKPOINT_PERIOD"] == 101


def test_few_images_have_a_floor_of_steps_unless_epochs_are_asked_for(cfg):
    records = make_records(12)
    assert derived(cfg, records)["SOLVER.MAX_ITER"] == cfg.RECIPE.MIN_STEPS
    cfg.RECIPE.EPOCHS = 2.0
    assert derived(cfg, records)["SOLVER.MAX_ITER"] == 6


def test_boxes_are_measured_at_the_size_of_the_input(cfg):
    # The shorter side, 200, becomes 400 in the mean
    statistics = Statistics.of(make_records(60, [(10, 40)]), input_scale(cfg))
    assert np.allclose(statistics.boxes, [20, 80])
    cfg.INPUT.LSJ.ENABLED, cfg.INPUT.LSJ.SIZE = True, 1000
    cfg.INPUT.LSJ.MIN_SCALE, cfg.INPUT.LSJ.MAX_SCALE = 0.5, 2.0
    statistics = Statistics.of(make_records(60, [(10, 40)]), input_scale(cfg))
    assert np.allclose(statistics.boxes, [50, 200])


def test_anchors_meet_the_boxes(cfg):
    sides = (20, 40, 70, 150, 160)
    found = derived(cfg, make_records(60, [(side, side) for side in sides]))
    # Twice as large in the input, one for each level, and no smaller than four strides
    assert found["MODEL.ANCHOR_GENERATOR.SIZES"] == [[40], [80], [140], [300], [320]]
    tall = derived(cfg, make_records(60, [(20, 20), (20, 60), (60, 20)]))
    ratios = tall["MODEL.ANCHOR_GENERATOR.ASPECT_RATIOS"][0]
    assert ratios == pytest.approx([1 / 3, 1, 3], rel=0.02)


def test_anchors_of_upper_levels_stay_above_their_strides(cfg):
    [sizes] = np.array(
        derived(cfg, make_records(60, [(8, 8)]))["MODEL.ANCHOR_GENERATOR.SIZES"]
    ).T.tolist()
    assert sizes == [16, 32, 64, 128, 256]


def test_few_boxes_keep_the_usual_anchors(cfg):
    assert not any("ANCHOR" in key for key in derived(cfg, make_records(49)))


def test_rare_classes_are_repeated(cfg):
    balanced = make_records(90, classes=(0, 1, 2))
    assert not any(key.startswith("DATALOADER") for key in derived(cfg, balanced))
    found = derived(cfg, make_records(88, classes=(0,) * 10 + (1,)))
    assert found["DATALOADER.SAMPLER_TRAIN"] == "RepeatFactorTrainingSampler"
    assert found["DATALOADER.REPEAT_THRESHOLD"] == pytest.approx(80 / 88 / 10)


def test_what_is_typed_stays(cfg, caplog):
    cfg.SOLVER.MAX_ITER = 7
    cfg.SOLVER.REFERENCE_WORLD_SIZE = 8
    cfg.RECIPE.KEEP = ["SOLVER.MAX_ITER"]
    with caplog.at_level(logging.INFO):
        applied = apply_recipe(cfg, make_records(60))
    assert cfg.SOLVER.MAX_ITER == 7 and "SOLVER.MAX_ITER" not in {d.key for d in applied}
    assert cfg.SOLVER.REFERENCE_WORLD_SIZE == 0
    assert cfg.SOLVER.STEPS == (5, 6)  # the rest of the schedule follows what is typed
    for rule in applied:
        assert rule.key in caplog.text and rule.reason in caplog.text


def test_all_that_a_recipe_sets_can_be_typed(cfg, monkeypatch):
    monkeypatch.setattr(recipe, "gpu_memory", lambda device: 8.0)
    cfg.RECIPE.MEMORY = [1.0, 1.0]
    records = make_records(88, [(20, 20), (40, 60)], classes=(0,) * 10 + (1,))
    assert set(derived(cfg, records)) <= FITTED_KEYS


def test_flags_of_the_command_line():
    args = parser().parse_args(["--epochs", "12", "--batch", "6", "SOLVER.MAX_ITER", "40"])
    cfg = load_config(args)
    assert cfg.RECIPE.ENABLED and cfg.RECIPE.EPOCHS == 12 and cfg.SOLVER.IMS_PER_BATCH == 6
    assert cfg.RECIPE.KEEP == ["SOLVER.IMS_PER_BATCH", "SOLVER.MAX_ITER"]
    in_file = dict(cfg.RECIPE.WRITTEN)
    assert in_file == {"SOLVER.IMS_PER_BATCH": 16, "SOLVER.MAX_ITER": 40_000}


def test_the_table_has_the_file_s_value_beside_what_is_typed(cfg, caplog):
    cfg.SOLVER.MAX_ITER, cfg.RECIPE.KEEP = 7, ["SOLVER.MAX_ITER"]
    cfg.RECIPE.WRITTEN = [["SOLVER.MAX_ITER", 1234]]
    with caplog.at_level(logging.INFO):
        apply_recipe(cfg, make_records(60), [Derived("MODEL.A", 5, "as was known")])
    (table,) = (r.getMessage() for r in caplog.records if "SOLVER.MAX_ITER" in r.getMessage())
    (row,) = (line.split() for line in table.splitlines() if line.startswith("SOLVER.MAX_ITER"))
    assert row[1] == "1234" and row[3] == "7"
    assert "as was known" in table


@pytest.mark.parametrize(
    ("total", "workers", "accumulate", "batch"),
    [(12.0, 1, 1, 5), (80.0, 1, 1, 16), (1.0, 1, 1, 1), (9.0, 3, 1, 12), (80.0, 3, 2, 12)],
)
def test_the_batch_follows_the_memory(cfg, monkeypatch, total, workers, accumulate, batch):
    monkeypatch.setattr(recipe, "gpu_memory", lambda device: total)
    monkeypatch.setattr(recipe.comm, "get_world_size", lambda: workers)
    cfg.RECIPE.MEMORY, cfg.SOLVER.ACCUMULATE_GRADIENTS = [2.0, 1.5], accumulate
    cfg.RECIPE.EPOCHS = 24.0
    found = derived(cfg, make_records(100))
    assert found["SOLVER.IMS_PER_BATCH"] == batch
    assert found["SOLVER.MAX_ITER"] == -(-2400 // batch)
    assert found["SOLVER.BASE_LR"] == pytest.approx(0.02 * batch / 16)
    cfg.RECIPE.KEEP = ["SOLVER.IMS_PER_BATCH"]
    assert derived(cfg, make_records(100))["SOLVER.MAX_ITER"] == 600
    cfg.RECIPE.MEMORY = []
    assert "SOLVER.IMS_PER_BATCH" not in derived(cfg, make_records(100))


def test_memory_that_is_none(cfg, monkeypatch):
    cfg.RECIPE.MEMORY = [1.0]
    assert derived(cfg, make_records(60))["SOLVER.BASE_LR"] == pytest.approx(0.005)  # on the CPU
    monkeypatch.setattr(recipe, "gpu_memory", lambda device: 8.0)
    with pytest.raises(ConfigError, match=r"RECIPE\.MEMORY"):
        derived(cfg, make_records(60))


def test_crowds_and_empty_boxes_do_not_count(cfg):
    records = make_records(60, [(8, 8), (0, 8)])
    for record in records:
        record["annotations"][0]["iscrowd"] = 1
    statistics = Statistics.of(records, input_scale(cfg))
    assert len(statistics.boxes) == 0 and statistics.images_of_class == {0: 60}


def test_too_few_images_change_nothing(cfg, caplog):
    before = cfg.dump()
    assert apply_recipe(cfg, make_records(9)) == []
    assert cfg.dump() == before and "9 training images" in caplog.text
    assert "only the schedule follows" not in caplog.text
    cfg.RECIPE.EPOCHS = 4.0  # which is asked for
    apply_recipe(cfg, make_records(9, [(20, 20)] * 9))
    assert "only the schedule follows, from --epochs" in caplog.text
    assert cfg.SOLVER.MAX_ITER == 9 and cfg.MODEL.ANCHOR_GENERATOR.SIZES == [
        [32, 64, 128, 256, 512]
    ]


def test_bad_input(cfg):
    with pytest.raises(DataError, match="no image"):
        apply_recipe(cfg, [])
    cfg.RECIPE.EPOCHS = -1.0
    with pytest.raises(ConfigError, match=r"RECIPE\.EPOCHS"):
        apply_recipe(cfg, make_records(60))


@pytest.mark.parametrize(
    "file", sorted(Path("configs/finetune").glob("*.yaml")), ids=lambda f: f.stem
)
def test_the_recipes_files(file):
    """Each is a detector, with the weights of its own network if any."""
    cfg = load_config(parser().parse_args(["--config-file", str(file)]))
    assert cfg.RECIPE.ENABLED and cfg.SOLVER.REFERENCE_WORLD_SIZE == 0
    model = build_on_meta(cfg)
    assert hasattr(model.roi_heads, "mask_head") == (not file.stem.startswith("faster"))
    on_gpu = cfg.MODEL.DEVICE == "cuda"
    if not cfg.MODEL.WEIGHTS:
        assert not on_gpu or file.stem == "base"
        return
    public = fetch(cfg.MODEL.WEIGHTS)
    assert public.model == cfg.MODEL.LAMBDA_RESNET.NAME
    assert public.pixels.can_fold_to(PixelSettings.from_config(cfg))
    assert bool(cfg.RECIPE.MEMORY) == on_gpu
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert any(".stem." in name for name in frozen) and not any(".res4." in n for n in frozen)
