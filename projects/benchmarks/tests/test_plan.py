"""The plan of a training: its counts beside the real thing, and its arithmetic."""

from __future__ import annotations

import argparse
import dataclasses

import pytest
import torch

from lambda_benchmarks import plan
from lambda_benchmarks.trainings import load_training
from lambda_det.detection.data import make_shapes
from lambda_det.errors import ConfigError
from tests.tool import ROOT, load_tool

SHAPES = str(ROOT / "configs/quick/shapes_lambdaresnet26_slim.yaml")
SMALLER = ("MODEL.LAMBDA_RESNET.NAME", "resnet14_slim_lambda_c5")  # where any network will do
PAPER = str(ROOT / "configs/mask_rcnn_lambdaresnet50.yaml")


def _training(file, *opts):
    words = argparse.Namespace(config_file=str(file), opts=list(map(str, opts)))
    return load_training(words)


@pytest.mark.parametrize(
    ("gpus", "fits", "expected"),
    [
        (1, [1, 2, 4], plan.Schedule(4, 64, 64)),
        (8, [1, 2], plan.Schedule(2, 16, 128)),
        (128, [1, 2, 4, 8], plan.Schedule(2, 1, 128)),
        (3, [1, 2, 4], None),
        (1, [], None),
    ],
)
def test_the_batch_of_the_file_is_kept(gpus, fits, expected):
    """And with the keys that the plan names, nothing is scaled."""
    settings = _training(PAPER).settings
    found = plan.keep_batch(settings, gpus, fits)
    assert found == expected
    if found:
        keys = {"accumulate": found.accumulate, "reference_world_size": found.reference}
        scaled = plan.scale_settings(dataclasses.replace(settings, **keys), gpus)
        assert scaled.images_per_step == 256 and scaled.max_iter == 130_000
        assert scaled.images_per_batch == found.images * gpus


RECIPE = ROOT / "configs/imagenet/lambda_resnet50_160.yaml"


def test_a_recipe_without_its_data():
    training = _training(RECIPE, "DATA.TRAIN", "nowhere")
    assert training.kind == "classifier" and training.size == (160, 160)
    settings = training.settings
    assert settings.max_iter == round(350 * 1_281_167 / 4096)
    assert settings.option("accumulate", 2) == "SOLVER.ACCUMULATE_GRADIENTS 2"
    assert any("nowhere" in note for note in training.notes)
    assert _training(RECIPE, "SOLVER.OPTIMIZER", "adam").moments == 2


def test_what_follows_from_the_data(tmp_path):
    file = ROOT / "configs/finetune/light_lambdaresnet26.yaml"
    written = _training(file)
    assert any("--train-json" in note for note in written.notes)
    make_shapes(tmp_path, num_train=20, num_val=1, size=32)
    json, images = tmp_path / "shapes/annotations/instances_train.json", tmp_path / "shapes/train"
    data = ("DATASETS.TRAIN_JSON", json, "DATASETS.TRAIN_IMAGES", images)
    found = _training(file, *data)
    assert not any("--train-json" in note for note in found.notes)
    assert found.settings.max_iter < written.settings.max_iter


@pytest.mark.slow
def test_a_lazy_config_is_counted_as_the_yaml_file():
    small = {
        ".yaml": ("INPUT.LSJ.SIZE", 128, *SMALLER),
        ".py": ("dataloader.image_size=128", f"model.backbone.bottom_up.name={SMALLER[1]}"),
    }
    yaml, lazy = (
        _training(ROOT / f"configs/mask_rcnn_lambdaresnet50{end}", *opts)
        for end, opts in small.items()
    )
    assert lazy.settings.option("accumulate", 2) == "train.accumulate_gradients=2"
    assert dataclasses.replace(lazy.settings, seed=0, keys={}) == dataclasses.replace(
        yaml.settings, seed=0, keys={}, output_dir=lazy.settings.output_dir
    )
    for checkpointing in (False, True):
        one, other = (
            plan.count_step(training, 1, checkpointing=checkpointing) for training in (yaml, lazy)
        )
        assert one == other


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_classifier(checkpointing):
    """Beside a step on the CPU."""
    training = _training(
        ROOT / "configs/quick/cifar10_slim.yaml",
        *("DATA.FORMAT", "synthetic", "MODEL.DEVICE", "cpu", "SOLVER.AMP.ENABLED", False),
        *("MODEL.NAME", "lambda_resnet26_slim"),
        *("MODEL.LAMBDA_RESNET.IMPLEMENTATION", "query_first", "SOLVER.EMA_DECAY", 0.9),
        *("MODEL.CHECKPOINT_ACTIVATIONS", checkpointing),
    )
    count = plan.count_step(training, 64, checkpointing=checkpointing, device="cpu")
    assert not count.missing and {"stem", "res5", "linear"} <= count.parts.keys()
    settings = dataclasses.replace(training.settings, ema_decay=0.0)
    raw = plan.count_step(
        dataclasses.replace(training, settings=settings), 64, checkpointing=True, device="cpu"
    )
    weights = 4 * sum(count.parameters.values())
    assert weights <= count.checkpoint - raw.checkpoint == count.fixed - raw.fixed < 1.1 * weights
    truth = plan.measure_step(training, 64)
    assert truth.peak - raw.fixed == pytest.approx(count.peak - count.fixed, rel=0.12)


def test_steps_that_are_done(tmp_path):
    assert plan._steps_done(str(tmp_path), 100) == 0
    for name in ("model_0000009.pth", "model_0000019.pth"):
        (tmp_path / name).touch()
    assert plan._steps_done(str(tmp_path), 100) == 20
    (tmp_path / "last_checkpoint").write_text("model_final.pth")
    assert plan._steps_done(str(tmp_path), 100) == 100


@pytest.mark.slow
def test_more_images_take_more_and_checkpointing_takes_less():
    size = ("INPUT.MAX_SIZE_TRAIN", 64, "INPUT.MIN_SIZE_TRAIN", (64,))
    training = _training(SHAPES, *size, *SMALLER)
    one = plan.count_step(training, 1, checkpointing=False)
    assert not one.missing
    assert one.parts.keys() == one.parameters.keys()
    two = plan.count_step(training, 2, checkpointing=False)
    assert two.fixed == one.fixed
    for name, part in two.parts.items():
        assert part.forward == pytest.approx(2 * one.parts[name].forward, rel=1e-3), name
    less = plan.count_step(training, 2, checkpointing=True)
    assert less.fixed < less.peak < two.peak
    assert plan.count_step(training, 1, checkpointing=False, processes=2).fixed > one.fixed


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_memory_is_that_of_the_allocator(checkpointing):
    """A whole step of Mask R-CNN with its losses on the CPU, whose allocator counts to the byte."""
    training = _training(
        SHAPES,
        *("MODEL.DEVICE", "cpu", "MODEL.LAMBDA_RESNET.IMPLEMENTATION", "query_first"),
        *("MODEL.LAMBDA_RESNET.CHECKPOINT_ACTIVATIONS", checkpointing),
    )
    count = plan.count_step(training, 2, checkpointing=checkpointing, device="cpu")
    truth = plan.measure_step(training, 2)
    assert truth.seconds > 0 and truth.memory is None
    assert truth.peak - count.fixed == pytest.approx(count.peak - count.fixed, rel=0.12)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "cascade_mask_rcnn",
        "deeplabv3plus",
        "keypoint_rcnn",
        "mask_rcnn_c4",
        "mask_rcnn_dc5",
        "panoptic_fpn",
        "retinanet",
    ],
)
def test_every_head_is_reached(name):
    network = "lambda_resnet50" if name == "deeplabv3plus" else "lambda_resnet26"  # blocks of res5
    opts = ("INPUT.LSJ.SIZE", 256, "MODEL.LAMBDA_RESNET.NAME", network)
    training = _training(ROOT / f"configs/{name}_lambdaresnet50.yaml", *opts)
    count = plan.count_step(training, 1, checkpointing=False)
    assert not count.missing and count.parts.keys() >= count.parameters.keys()


@pytest.mark.slow
def test_the_command(capsys, tmp_path):
    main = load_tool("plan", "projects/benchmarks").main
    keys = ["INPUT.MAX_SIZE_TRAIN", "64", "INPUT.MIN_SIZE_TRAIN", "(64,)", "OUTPUT_DIR"]
    keys += [str(tmp_path), *SMALLER]
    flags = ["--config-file", SHAPES, "--gpu-memory", "1.02", "--step-time", "3.6"]
    assert main([*flags, "--measure", "MODEL.DEVICE", "cpu", *keys]) == 0
    out = capsys.readouterr().out
    words = ("res4", "mask head", "ACCUMULATE_GRADIENTS", "GiB", "hours", "Guessed", "Counted")
    for word in (*words, "measured"):
        assert word in out
    steps = _training(SHAPES).settings.max_iter
    assert f"{steps * 3.6 / 3600:,.1f} hours" in out


def test_refusals(capsys):
    main = load_tool("plan", "projects/benchmarks").main
    for flags, named in (
        (["--gpu-memory", "0"], "--gpu-memory"),
        (["--num-gpus", "0"], "--num-gpus"),
        (["--config-file", str(RECIPE), "--train-json", "mine.json"], "DATA.TRAIN"),
    ):
        assert main(["--config-file", SHAPES, *flags]) == 2
        assert named in capsys.readouterr().err
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="--measure"):
            next(plan.make_plan(_training(PAPER, "MODEL.DEVICE", "cuda"), "x", measure=True))
