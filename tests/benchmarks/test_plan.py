"""The plan of a training: its counts beside the real thing, and its arithmetic."""

from __future__ import annotations

import argparse

import pytest
import torch

from lambda_det.benchmarks import plan
from lambda_det.detection import load_config
from lambda_det.errors import ConfigError
from tests.tool import ROOT, load_tool

SHAPES = str(ROOT / "configs/quick/shapes_lambdaresnet26.yaml")
PAPER = str(ROOT / "configs/mask_rcnn_lambdaresnet50.yaml")


def _config(file, *opts):
    return load_config(argparse.Namespace(config_file=file, opts=list(map(str, opts))))


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
    cfg = _config(PAPER)
    found = plan.keep_batch(cfg, gpus, fits)
    assert found == expected
    if found:
        cfg.SOLVER.ACCUMULATE_GRADIENTS = found.accumulate
        cfg.SOLVER.REFERENCE_WORLD_SIZE = found.reference
        scaled = plan.scale_settings(plan.read_settings(cfg), gpus)
        assert scaled.images_per_step == 256 and scaled.max_iter == 130_000
        assert scaled.images_per_batch == found.images * gpus


def test_the_largest_image():
    assert plan.training_size(_config(PAPER)) == (1024, 1024)
    keys = ("INPUT.LSJ.ENABLED", False, "INPUT.MIN_SIZE_TRAIN", (640, 800))
    assert plan.training_size(_config(PAPER, *keys)) == (800, 1344)
    keys += ("DATALOADER.ASPECT_RATIO_GROUPING", False)
    assert plan.training_size(_config(PAPER, *keys)) == (1344, 1344)


def test_steps_that_are_done(tmp_path):
    assert plan._steps_done(str(tmp_path), 100) == 0
    for name in ("model_0000009.pth", "model_0000019.pth"):
        (tmp_path / name).touch()
    assert plan._steps_done(str(tmp_path), 100) == 20
    (tmp_path / "last_checkpoint").write_text("model_final.pth")
    assert plan._steps_done(str(tmp_path), 100) == 100


@pytest.mark.slow
def test_more_images_take_more_and_checkpointing_takes_less():
    cfg = _config(SHAPES, "INPUT.MAX_SIZE_TRAIN", 64, "INPUT.MIN_SIZE_TRAIN", (64,))
    one = plan.count_step(cfg, 1, checkpointing=False)
    assert not one.missing
    assert one.parts.keys() == one.parameters.keys()
    two = plan.count_step(cfg, 2, checkpointing=False)
    assert two.fixed == one.fixed
    for name, part in two.parts.items():
        assert part.forward == pytest.approx(2 * one.parts[name].forward, rel=1e-3), name
    less = plan.count_step(cfg, 2, checkpointing=True)
    assert less.fixed < less.peak < two.peak
    assert plan.count_step(cfg, 1, checkpointing=False, processes=2).fixed > one.fixed


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_memory_is_that_of_the_allocator(checkpointing):
    """A whole step of Mask R-CNN with its losses on the CPU, whose allocator counts to the byte."""
    cfg = _config(
        SHAPES,
        *("MODEL.DEVICE", "cpu", "MODEL.LAMBDA_RESNET.IMPLEMENTATION", "query_first"),
        *("MODEL.LAMBDA_RESNET.CHECKPOINT_ACTIVATIONS", checkpointing),
    )
    count = plan.count_step(cfg, 2, checkpointing=checkpointing, device="cpu")
    truth = plan.measure_step(cfg, 2)
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
    cfg = _config(str(ROOT / f"configs/{name}_lambdaresnet50.yaml"), "INPUT.LSJ.SIZE", 256)
    count = plan.count_step(cfg, 1, checkpointing=False)
    assert not count.missing and count.parts.keys() >= count.parameters.keys()


@pytest.mark.slow
def test_the_command(capsys, tmp_path):
    main = load_tool("plan").main
    keys = ["INPUT.MAX_SIZE_TRAIN", "64", "INPUT.MIN_SIZE_TRAIN", "(64,)", "OUTPUT_DIR"]
    keys.append(str(tmp_path))
    flags = ["--config-file", SHAPES, "--gpu-memory", "1.2", "--step-time", "3.6"]
    assert main([*flags, *keys]) == 0
    out = capsys.readouterr().out
    for word in ("res4", "mask head", "ACCUMULATE_GRADIENTS", "GiB", "hours", "Guessed", "Counted"):
        assert word in out
    steps = _config(SHAPES).SOLVER.MAX_ITER
    assert f"{steps * 3.6 / 3600:,.1f} hours" in out
    assert main([*flags, "--measure", "MODEL.DEVICE", "cpu", *keys]) == 0
    assert "measured" in capsys.readouterr().out


def test_refusals(capsys):
    main = load_tool("plan").main
    for flags, named in (
        (["--gpu-memory", "0"], "--gpu-memory"),
        (["--num-gpus", "0"], "--num-gpus"),
    ):
        assert main(["--config-file", SHAPES, *flags]) == 2
        assert named in capsys.readouterr().err
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="--measure"):
            next(plan.make_plan(_config(PAPER, "MODEL.DEVICE", "cuda"), "x", measure=True))
