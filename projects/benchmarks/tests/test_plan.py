"""The plan of a training: its fit beside steps that are taken, its arithmetic, its refusals."""

import dataclasses

import pytest
import torch

from lambda_det.detection.schedule import scale_settings
from tests.tool import ROOT, load_tool

plan = load_tool("plan", "projects/benchmarks")

SHAPES = str(ROOT / "configs/quick/shapes_lambdaresnet26_slim.yaml")
PAPER = str(ROOT / "configs/mask_rcnn_lambdaresnet50.yaml")
RECIPE = str(ROOT / "configs/imagenet/lambda_resnet50_128.yaml")
SMALL = [
    *("MODEL.DEVICE", "cpu", "INPUT.MIN_SIZE_TRAIN", "(64,)", "INPUT.MAX_SIZE_TRAIN", "64"),
    *("MODEL.LAMBDA_RESNET.NAME", "resnet14_slim_lambda_c5"),
]
SMALL_RECIPE = ["MODEL.DEVICE", "cpu", "MODEL.NAME", "lambda_resnet26_slim", "INPUT.SIZE", "64"]
GIB = plan.GIB


def _step(images, side, seconds, peak):
    return plan.Step(images, side, seconds, update=0.5, peak=peak, state=100)


@pytest.mark.parametrize("by_image", [False, True])
def test_the_fit_goes_through_what_was_measured(by_image):
    small, large = _step(1, 10, 1.2, 1000), _step(1, 20, 1.8, 1600)
    fit = plan.LinearFit(small, large, by_image)
    for step in (small, large):
        assert fit.seconds(1, step.side) == pytest.approx(step.seconds + step.update)
        assert fit.memory(1, step.side) == step.peak + step.state
    rest = 1.0 * (3 if by_image else 1)  # seconds that do not depend on the pixels
    assert fit.seconds(3, 30, accumulate=2) == pytest.approx(2 * (rest + 0.002 * 3 * 900) + 0.5)


def test_a_fit_of_noise_does_not_fall_with_the_size():
    fit = plan.LinearFit(_step(1, 10, 2.0, 9), _step(1, 20, 1.0, 8), by_image=True)
    assert fit.seconds(2, 40) == pytest.approx(2 * 2.0 + 0.5) and fit.memory(1, 40) == 109


def _fixed_fit(monkeypatch, gigabytes):
    """Half a second and so many GiB for an image of any size."""
    step = plan.Step(1, 64, 0.5, 0.0, peak=int(gigabytes * GIB), state=0)
    fit = plan.LinearFit(step, dataclasses.replace(step, side=128), by_image=True)
    monkeypatch.setattr(plan, "fit_task", lambda task, size: fit)


@pytest.mark.parametrize(
    ("gpus", "memory", "images", "accumulate"),
    [(1, 6.0, 4, 64), (8, 3.5, 2, 16), (128, 100.0, 2, 1), (3, 6.0, None, None), (1, 1.5, None, 0)],
)
def test_the_batch_of_the_file_is_kept(monkeypatch, gpus, memory, images, accumulate):
    """And with the keys that the plan names, nothing is scaled."""
    _fixed_fit(monkeypatch, 1)
    text = "\n".join(plan.make_plan(PAPER, [], gpu_memory=memory, gpus=gpus))
    if images is None:
        assert "SOLVER.IMS_PER_BATCH 256 cannot be kept" in text
        return
    hours = 130_000 * accumulate * images * 0.5 / 3600
    assert f"{images} images at a time" in text and f"{hours:,.1f} hours" in text
    keys = {"accumulate": accumulate, "reference_world_size": accumulate * gpus}
    named = f"SOLVER.ACCUMULATE_GRADIENTS {accumulate} SOLVER.REFERENCE_WORLD_SIZE"
    assert f"{named} {accumulate * gpus}" in text
    task, *_ = plan.load_task(PAPER, [])
    scaled = scale_settings(dataclasses.replace(task.settings, **keys), gpus)
    assert (scaled.images_per_step, scaled.max_iter) == (256, 130_000)
    assert scaled.images_per_batch == images * gpus


def test_a_recipe_without_its_data():
    task, size, notes = plan.load_task(RECIPE, ["DATA.TRAIN", "nowhere"])
    assert size == (128, 128) and "nowhere" in notes[0]
    share = 1 - task.cfg.DATA.HELD_OUT if task.sources.held_out else 1
    assert task.settings.max_iter == round(350 * 1_281_167 * share / 4096)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "opts", "sizes", "others"),
    [
        # At that rate a training would diverge at once
        (SHAPES, [*SMALL, "SOLVER.BASE_LR", "1e6"], [(1, 128), (1, 256)], [(2, 256), (1, 384)]),
        (RECIPE, SMALL_RECIPE, [(2, 64), (6, 64)], [(16, 64), (4, 128)]),
    ],
    ids=["detector", "classifier"],
)
def test_memory_of_other_sizes(file, opts, sizes, others):
    """The CPU's allocator counts to the byte; times of a test machine say nothing."""
    task, *_ = plan.load_task(file, opts)
    torch.manual_seed(0)
    small, large, *truth = plan.measure(task, [*sizes, *others])
    fit = plan.LinearFit(small, large, by_image=file is SHAPES)
    for step in truth:
        expected = fit.memory(step.images, step.side)
        assert expected == pytest.approx(step.peak + step.state, rel=0.25)
        assert step.seconds > 0


@pytest.mark.slow
@pytest.mark.parametrize(("file", "opts"), [(SHAPES, SMALL), (RECIPE, SMALL_RECIPE)])
def test_the_command(capsys, file, opts):
    assert plan.main(["--config", file, "--gpu-memory", "2", *opts]) == 0
    out = capsys.readouterr().out
    for word in ("2.0 GiB", "Measured on cpu", "fits", "ACCUMULATE_GRADIENTS", "hours"):
        assert word in out


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--gpu-memory", "0"], "--gpu-memory"),
        (["--num-gpus", "0"], "--num-gpus"),
        (["SOLVER.MAX_ITERS", "3"], "SOLVER.MAX_ITERS"),
    ],
)
def test_refusals(capsys, words, named):
    assert plan.main(["--config", SHAPES, *words]) == 2
    assert named in capsys.readouterr().err
