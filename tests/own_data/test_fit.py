from pathlib import Path

import pytest
from detectron2.config import get_cfg

from lambda_det.config import add_lambda_config
from lambda_det.detection.command_line import parser
from lambda_det.detection.config import load_config
from lambda_det.detection.config_files import get_config
from lambda_det.detection.data import (
    register_coco_files,
)
from lambda_det.errors import ConfigError
from lambda_det.own_data import fit as fitting
from lambda_det.own_data.fit import epochs_for, evaluations_for
from lambda_det.own_data.fit_input import Asked
from lambda_det.own_data.start import Machine
from lambda_det.weights.loading import read_weights
from lambda_det.weights.provenance import PixelSettings, wanted_pixels
from lambda_det.weights.public import fetch
from tests.detection.tiny import on_meta
from tests.own_data.parts import record

CPU = Machine("cpu")


@pytest.fixture
def cfg():
    cfg = get_cfg()
    add_lambda_config(cfg)
    cfg.SOLVER.IMS_PER_BATCH = 4
    cfg.MODEL.DEVICE = "cpu"
    cfg.MODEL.RPN.IN_FEATURES = ["p2", "p3", "p4", "p5", "p6"]
    cfg.MODEL.ANCHOR_GENERATOR.SIZES = [[32], [64], [128], [256], [512]]
    cfg.INPUT.MIN_SIZE_TRAIN, cfg.INPUT.MAX_SIZE_TRAIN = (300, 500), 10_000
    return cfg


def make_records(images, sizes=((50, 50),), classes=(0,)):
    """Images with one object of each size, the classes in turn over the images."""
    return [
        record(sizes, classes=[classes[n % len(classes)]], name=f"{n}.png") for n in range(images)
    ]


def derived(cfg, records, machine=CPU):
    """What follows from records, also keys that are kept."""
    _, choices = fitting.fit(cfg, records, machine, Asked(), classes=(), others=())
    return {key: value for key, value, _ in choices}


def fit(cfg, records):
    """What follows from records, which is set in the configuration."""
    keys = {k: v for k, v in derived(cfg, records).items() if k not in cfg.RECIPE.KEEP}
    for key, value in keys.items():
        cfg.merge_from_list([key, value])
    return keys


@pytest.mark.parametrize(
    ("images", "whole", "epochs"),
    [
        (1, 1, 30),
        (1000, 1000, 30),
        (4472, 4472, 23),  # half way by the logarithm
        (20_000, 20_000, 16),
        (1_000_000, 1_000_000, 16),
        (1000, 10, 0.9487),  # tiles of an image are alike
        (1000, 62.5, 3.75),
        (20_000, 1250, 2),
    ],
)
def test_epochs_fall_as_images_grow(images, whole, epochs):
    assert epochs_for(images, whole) == pytest.approx(epochs, rel=1e-3)


def _rate(rate, batch):
    """Detectron2's from 4 to 16 images."""
    return rate * (batch / 4 if batch < 4 else max(16, batch) / 16) ** 0.5


def test_schedule_follows_the_epochs(cfg):
    cfg.RECIPE.EPOCHS, cfg.RECIPE.EVALUATIONS = 20.0, 5
    found = derived(cfg, make_records(101))
    assert found["SOLVER.MAX_ITER"] == 505  # 20 * 101 / 4
    assert found["SOLVER.STEPS"] == (393, 468)
    assert found["SOLVER.WARMUP_ITERS"] == 50
    assert found["SOLVER.BASE_LR"] == 0.02
    assert found["TEST.EVAL_PERIOD"] == found["SOLVER.CHECKPOINT_PERIOD"] == 101
    assert found["SOLVER.REFERENCE_WORLD_SIZE"] == 0
    cfg.RECIPE.EPOCHS = 0.0  # the rule has no number of images below which it does not hold
    assert derived(cfg, make_records(1))["SOLVER.MAX_ITER"] == cfg.RECIPE.MIN_STEPS
    cfg.SOLVER.MAX_ITER, cfg.RECIPE.KEEP = 7, ["SOLVER.MAX_ITER"]
    assert derived(cfg, make_records(60))["SOLVER.STEPS"] == (5, 6)
    for name in ("WarmupCosineLR", "WarmupStepWithFixedGammaLR"):  # which have no steps
        cfg.SOLVER.LR_SCHEDULER_NAME = name
        assert "SOLVER.STEPS" not in derived(cfg, make_records(101))


def test_each_optimiser_has_a_learning_rate_of_its_own(cfg):
    cfg.SOLVER.OPTIMIZER = "AdamW"
    assert derived(cfg, make_records(60))["SOLVER.BASE_LR"] == 5e-4
    cfg.SOLVER.OPTIMIZER, cfg.RECIPE.KEEP = "rmsprop", ["SOLVER.BASE_LR"]
    cfg.RECIPE.MEMORY = [1.0]  # which counts on a GPU alone
    assert "SOLVER.BASE_LR" not in derived(cfg, make_records(60))


@pytest.mark.parametrize(
    ("steps", "images", "cost", "count"),
    [
        (1000, 20, 1.4, 5),
        (1000, 200, 1.4, 3),  # 1,000 steps have room for 714 images
        (1000, 300, 1.4, 2),
        (1000, 900, 1.4, 1),
        (100, 1, 3.0, 5),
        (1, 1, 0.7, 1),
        (1000, 0, 1.4, 5),
    ],
)
def test_evaluations_take_a_fifth_of_the_time_at_most(steps, images, cost, count):
    period = evaluations_for(steps, 4, 5, cost * images)
    period = period or steps
    due = [*range(period, steps, period), steps]
    assert len(due) == count
    # None is just before the last one
    assert len(due) < 2 or due[-1] - due[-2] > period / 2 or period <= 2
    assert count == 1 or cost * images * len(due) <= 0.25 * 4 * steps


def test_evaluations_of_a_configuration(cfg, content, write):
    """With what the detector and the configuration add to their cost."""
    name = register_coco_files(*write(content), "test")  # four images
    cfg.DATASETS.TEST, cfg.RECIPE.EVALUATIONS, cfg.RECIPE.EPOCHS = (name,), 5, 4.0
    records = make_records(40)
    assert derived(cfg, records)["TEST.EVAL_PERIOD"] == 8
    cfg.TEST.LOSS, cfg.SOLVER.EMA_DECAY = True, 0.9
    assert derived(cfg, records)["TEST.EVAL_PERIOD"] == 10
    cfg.TEST.RAW = False
    assert derived(cfg, records)["TEST.EVAL_PERIOD"] == 8
    cfg.MODEL.MASK_ON = True
    for one in records:
        one["annotations"][0]["segmentation"] = [[1, 1, 51, 1, 51, 51]]
    assert derived(cfg, records)["TEST.EVAL_PERIOD"] == 20
    cfg.RECIPE.EPOCHS = 0.3  # three steps
    reasons = {key: why for key, _, why in fitting.fit_schedule(cfg, 40, 40)}
    assert reasons["SOLVER.CHECKPOINT_PERIOD"] == "3 checkpoints"


def test_a_detector_keeps_all_objects_of_the_fullest_image(cfg):
    keys = ["MODEL.RPN.POST_NMS_TOPK_TEST", "MODEL.RPN.PRE_NMS_TOPK_TEST"]
    for key in keys:
        cfg.merge_from_list([key, 200])
    keys.append("TEST.DETECTIONS_PER_IMAGE")
    assert not set(keys) & set(derived(cfg, make_records(3, [(9, 9)] * 50)))
    found = derived(cfg, [*make_records(3), *make_records(1, [(9, 9)] * 150)])
    assert [found[key] for key in keys] == [300] * 3


@pytest.mark.parametrize(
    ("total", "workers", "accumulate", "batch"),
    [(12.0, 1, 1, 5), (80.0, 1, 1, 16), (1.0, 1, 1, 1), (9.0, 3, 1, 12), (80.0, 3, 2, 12)],
)
def test_the_batch_follows_the_memory(cfg, total, workers, accumulate, batch):
    machine, records = Machine("cuda", workers, total), make_records(100)
    cfg.RECIPE.MEMORY, cfg.SOLVER.ACCUMULATE_GRADIENTS = [2.0, 1.5], accumulate
    cfg.RECIPE.EPOCHS = 24.0
    found = derived(cfg, records, machine)
    assert found["SOLVER.IMS_PER_BATCH"] == batch
    assert found["SOLVER.MAX_ITER"] == -(-2400 // batch)
    assert found["SOLVER.BASE_LR"] == pytest.approx(_rate(0.02, batch))
    few = derived(cfg, make_records(7), Machine("cuda", 3, 80.0))
    assert few["SOLVER.IMS_PER_BATCH"] == 6  # as many on each
    cfg.RECIPE.KEEP = ["SOLVER.IMS_PER_BATCH"]
    assert derived(cfg, records, machine)["SOLVER.MAX_ITER"] == 600
    cfg.RECIPE.MEMORY = []
    assert "SOLVER.IMS_PER_BATCH" not in derived(cfg, records, machine)


H200 = Machine("cuda", memory=139.8, cores=16)


LIGHT = "light_mobilenet_v2"


def of_gpu(file, records, machine, tile=None, epochs=0.0):
    """What follows for the input and the machine from a recipe that was chosen."""
    cfg, asked = get_config(f"finetune/{file}.yaml"), Asked(tile=tile, is_chosen=True)
    cfg.RECIPE.EPOCHS, cfg.MODEL.DEVICE = epochs, machine.device
    found, training = fitting.fit(cfg, records, machine, asked, classes=(), others=())
    return {key: value for key, value, _ in (*found.choices, *training)}


@pytest.mark.parametrize(
    ("file", "machine", "images", "batch", "loaders"),
    [
        (LIGHT, H200, 5000, 64, 8),  # the GPU
        (LIGHT, H200, 205, 20, 8),  # 30 epochs are 300 steps
        (LIGHT, H200._replace(cores=4), 5000, 30, 3),  # the loader processes
        (LIGHT, H200._replace(cores=2), 5000, 10, 1),
        (LIGHT, H200._replace(cores=1), 20, 4, 1),  # the recipe's own
        (LIGHT, H200._replace(memory=23.7), 5000, 4, 8),  # of which nothing was measured
        (LIGHT, H200._replace(processes=4), 5000, 4 * 30, 3),
        (LIGHT, CPU, 205, None, None),
        ("mask_rcnn_resnetrs101_se", H200, 205, 16, 8),  # its memory was counted
    ],
)
def test_a_light_recipe_fills_a_gpu(file, machine, images, batch, loaders):
    found = of_gpu(file, make_records(images), machine)
    assert found.get("SOLVER.IMS_PER_BATCH") == batch
    assert found.get("DATALOADER.NUM_WORKERS") == loaders


@pytest.mark.slow
def test_a_step_counts_tiles_as_an_epoch_does():
    # tiles of 320 pixels overlap by 40: 9 x 7 of an image, each with an object
    one = record([(20, 20)] * 9 * 7, (2560, 1920))
    places = ((x, y) for x in range(100, 2620, 280) for y in range(100, 2060, 280))
    for entry, place in zip(one["annotations"], places, strict=True):
        entry["bbox"][:2] = place
    records = [one | {"file_name": f"{number}.png"} for number in range(100)]
    whole, cut = (of_gpu(LIGHT, records, H200, tile)["SOLVER.IMS_PER_BATCH"] for tile in (0, 320))
    tiles = 100 * 9 * 7
    asked = of_gpu(LIGHT, records, H200, 0, epochs=60.0)["SOLVER.IMS_PER_BATCH"]
    assert asked == 60 * 100 // 300
    assert whole == 10 < cut == int(epochs_for(tiles, 100) * tiles / 300)


@pytest.mark.parametrize(
    ("file", "words", "batch", "lr"),
    [
        ("mask_rcnn_lambdaresnet50", "", 2, 0.02),
        ("retinanet_lambdaresnet50", "", 2, 0.01),
        ("mask_rcnn_c4_lambdaresnet50", "", 2, 0.02),
        ("mask_rcnn_dc5_lambdaresnet50", "", 2, 0.02),
        ("deeplabv3plus_lambdaresnet50", "", 2, 0.01),
        ("finetune/light_lambdaresnet26", "", 4, 0.02),
        ("mask_rcnn_lambdaresnet50", "SOLVER.ACCUMULATE_GRADIENTS 2", 4, 0.02),
        ("mask_rcnn_lambdaresnet50", "SOLVER.REFERENCE_WORLD_SIZE 0", 4, 0.02),
    ],
)
def test_each_structure_has_its_rules(file, words, batch, lr):
    """On a CPU: batch and learning rate; and the anchors are those of the file."""
    arguments = ["--config-file", f"configs/{file}.yaml", "RECIPE.EPOCHS", "3"]
    cfg = load_config(parser().parse_args([*arguments, "MODEL.DEVICE", "cpu", *words.split()]))
    cfg.RECIPE.KEEP = ["MODEL.MASK_ON"]
    records = make_records(60, [(side, side) for side in (3, 20, 40, 70, 150, 160)])
    if cfg.MODEL.META_ARCHITECTURE == "SemanticSegmentor":
        records = [{"file_name": "a.png", "sem_seg_file_name": "b.png"}] * 60
    keys = fit(cfg, records)
    solver = (cfg.SOLVER.IMS_PER_BATCH, cfg.SOLVER.MAX_ITER, cfg.SOLVER.BASE_LR)
    assert solver == (batch, 180 / batch, pytest.approx(_rate(lr, batch)))
    assert not any("ANCHOR" in key for key in keys)


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("RECIPE.EPOCHS", -1.0, "is -1"),
        ("RECIPE.EPOCHS", float("inf"), "is inf"),
        ("RECIPE.EVALUATIONS", 0, "is 0"),
        ("RECIPE.MEMORY", [1.0], ""),
        ("SOLVER.IMS_PER_BATCH", 0, "is 0"),
        ("SOLVER.MAX_ITER", 0, "is 0"),
        ("SOLVER.OPTIMIZER", "rmsprop", r"rmsprop; add SOLVER\.BASE_LR"),  # there is no rule
        ("MODEL.META_ARCHITECTURE", "MyDetector", "MyDetector.*RetinaNet"),
    ],
)
def test_what_cannot_be(cfg, key, value, named):
    cfg.merge_from_list([key, value])
    with pytest.raises(ConfigError, match=f"{key} {named}"):
        derived(cfg, make_records(60), Machine("cuda", memory=8.0))


@pytest.mark.parametrize(
    "file", sorted(Path("configs/finetune").glob("*.yaml")), ids=lambda f: f.stem
)
def test_the_recipes_files(file):
    """Each is a detector, with the weights of its own network if any."""
    cfg = load_config(parser().parse_args(["--config-file", str(file)]))
    assert cfg.RECIPE.ENABLED and cfg.SOLVER.REFERENCE_WORLD_SIZE == 0
    model = on_meta(cfg)
    masks = hasattr(getattr(model, "roi_heads", None), "mask_head")
    assert masks == (not file.stem.startswith(("faster", "retinanet")))
    on_gpu = cfg.MODEL.DEVICE == "cuda"
    if not cfg.MODEL.WEIGHTS:
        assert not on_gpu or file.stem == "base"
        return
    public = fetch(cfg.MODEL.WEIGHTS)
    assert public.model == cfg.MODEL.LAMBDA_RESNET.NAME
    assert bool(cfg.RECIPE.MEMORY) == on_gpu
    pixels = public.pixels or wanted_pixels(read_weights(cfg.MODEL.WEIGHTS))
    assert pixels.can_fold_to(PixelSettings.from_config(cfg))
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    if public.model == "lambda_resnet26_slim":  # all of which is trained
        assert not frozen
        return
    assert any(".stem." in name for name in frozen) and not any(".res4." in n for n in frozen)


@pytest.mark.parametrize(
    ("masks", "kept", "learnt"),
    [
        (6, [], True),
        (5, [], False),  # of 60 objects, such as boxes that were turned by mistake
        (0, [], False),
        (0, ["MODEL.MASK_ON"], True),  # and refused by the check of the data
    ],
)
def test_masks_are_learnt_where_the_data_have_some(cfg, masks, kept, learnt):
    records = make_records(60)
    for one in records[:masks]:
        one["annotations"][0]["segmentation"] = [[1, 1, 21, 1, 21, 21]]
    cfg.MODEL.MASK_ON, cfg.RECIPE.KEEP = True, kept
    assert derived(cfg, records)["MODEL.MASK_ON"] == (masks == 6)  # which the log has a row of
    fit(cfg, records)
    assert learnt == cfg.MODEL.MASK_ON
