"""benchmark.py: each preset runs in a tiny form, and wrong options are refused before."""

from functools import partial

import cv2
import numpy as np
import pytest
import torch
from PIL import Image

from lambda_benchmarks import data, detectors, measure, presets
from lambda_det import create_backbone, get_config
from tests.shapes import make_shapes
from tests.tool import load_tool

tool = load_tool("benchmark", "projects/benchmarks")


@pytest.fixture
def run(monkeypatch, capsys):
    """Run a preset with two rounds; the names of the cases of each group in what it printed."""
    monkeypatch.setattr(measure, "SHORTEST", 0)

    def run_preset(preset: str, *options: str) -> list[list[str]]:
        assert tool.main(["--preset", preset, *options, "--runs", "2"]) == 0
        machine, *groups = capsys.readouterr().out.split("\n**")
        assert f"torch {torch.__version__}" in machine
        cases = []
        for group in groups:
            rows = [line.split("|") for line in group.splitlines() if line.startswith("|")][2:]
            assert rows[0][2].strip() == "1.00 (1.00 to 1.00)"
            cases.append([row[1].strip() for row in rows])
        return cases

    return run_preset


def test_layer(run, monkeypatch):
    monkeypatch.setattr(presets, "LAYER_SIZES", [(6, 16)])
    (cases,) = run("layer", "--implementations", "auto", "--peer", "timm")
    assert cases == ["3x3 convolution", "lambda layer, auto", "timm"]


def test_peers_have_the_size_of_our_layer():
    ours, timms = presets.LambdaLayer(16), presets.PEERS["timm"](16)
    counts = [sum(p.numel() for p in layer.parameters()) for layer in (ours, timms)]
    assert counts[1] == counts[0] + 16  # timm's has a bias in its conv3d


def test_peer_that_is_not_installed(monkeypatch, capsys):
    monkeypatch.setattr(presets, "find_spec", lambda name: None)
    assert tool.main(["--preset", "layer", "--peer", "lambda-networks"]) == 2
    assert "pip install lambda-networks" in capsys.readouterr().err


@pytest.mark.benchmark
def test_networks(run, monkeypatch):
    def smaller(name, **options):
        name = "resnet14_slim_lambda_c5" if "lambda" in name else "resnet14_slim"
        return create_backbone(name, **options)

    monkeypatch.setattr(presets, "create_backbone", smaller)
    options = ("--small", "--image-size", "32", "--batch", "2", "--checkpoint-activations")
    (cases,) = run("networks", *options, "--implementations", "dense")
    ours = ["lambda_resnet101, dense", "lambda_resnet101, activation checkpointing"]
    assert cases == ["resnet_rs101", "resnet_rs101_se", *ours]


@pytest.mark.benchmark
@pytest.mark.release
def test_detectors_of_detectron2_are_accelerated(run):
    assert run("accelerate", "--small", "--image-size", "64") == [
        ["Detectron2's Faster R-CNN", "accelerated"]
    ]


@pytest.mark.benchmark
@pytest.mark.release
def test_detector(run, monkeypatch):
    tiny = "quick/shapes_lambdaresnet26_slim.yaml"
    monkeypatch.setattr(detectors, "get_config", lambda name: get_config(tiny))
    (cases,) = run("detector", "--small", "--image-size", "64", "--batch", "2")
    ours = [f"LambdaResNet-50, {title}" for title in presets.DETECTORS]
    assert cases == ["Detectron2's ResNet-50", *ours]


@pytest.mark.benchmark
@pytest.mark.release
def test_all_detectors_find_something_and_learn():
    for make in (
        partial(detectors.detectron2_detector, 101),  # the deeper, the larger its maps could grow
        partial(detectors.our_detector, 50, []),
        *(partial(detectors.zoo_detector, name, True) for name in ("RetinaNet", "Keypoint R-CNN")),
    ):
        zoo = make.func is detectors.zoo_detector
        model, images = make(side=64, **({} if zoo else {"batch": 1, "device": "cpu"}))
        # The folded copy for inference is neither trained nor counted
        assert len(list(model.parameters())) == len(list(model.model.parameters()))
        loss = model.train()(*images)
        assert loss.requires_grad and loss.isfinite()
        with torch.no_grad():
            (found,) = model.eval()(*images)
        found = found["instances"]
        assert len(found) > 20  # 100 on larger images
        assert zoo or found.pred_masks.shape[1:] == (64, 64)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Images with objects, and the threads of each library as they were after the test."""
    monkeypatch.setattr(data, "IMAGES", 3)
    monkeypatch.setattr(data, "JITTER_SIZE", 128)
    make_shapes(tmp_path, num_train=5, num_val=1, size=64)
    before = torch.get_num_threads(), cv2.getNumThreads()
    yield tmp_path / "shapes"
    torch.set_num_threads(before[0])
    cv2.setNumThreads(before[1])


@pytest.mark.benchmark
def test_data(run, folder):
    annotations = str(folder / "annotations/instances_train.json")
    options = ("--images", str(folder / "train"), "--annotations", annotations)
    assert run("data", *options) == [list(data.pipelines()), list(data.mappers())]


def test_image_of_each_pipeline(folder):
    Image.effect_noise((100, 80), 50).convert("RGB").save(folder / "noise.jpg")
    content = (folder / "noise.jpg").read_bytes()
    results = {name: pipeline(content, 0) for name, pipeline in data.pipelines().items()}
    assert results.pop("decode: Pillow").size == (100, 80)
    assert results.pop("decode: lambda_det").shape == (80, 100, 3)
    for name, image in results.items():
        shape = (224, 224, 3) if "lambda_det" in name else (3, 224, 224)
        kind = torch.float32 if "normalise" in name else torch.uint8
        assert torch.as_tensor(image).shape == shape and torch.as_tensor(image).dtype == kind, name
    crop, augment = (data.ours(layers) for layers in (0, 2))
    changed = [not np.array_equal(crop(content, n), augment(content, n)) for n in range(20)]
    assert sum(changed) > 15  # two operations that change nothing at this strength are rare


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["layer", "--images", "x"], "--images"),
        (["layer", "--imp", "dense"], "--imp"),
        (["none"], "--preset"),
        (["layer", "--dtype", "int8"], "--dtype"),
        (["layer", "--device", "cuda:999"], "cuda:999"),
        (["networks", "--implementations", "none"], "'none'"),
        (["data"], "--images"),
        (["data", "--images", "{folder}/nothing"], "nothing"),
        (["data", "--images", "{folder}"], "no images"),
    ],
)
def test_wrong_options_are_refused_before_the_work(arguments, named, tmp_path, capsys):
    try:
        status = tool.main(["--preset", *(word.format(folder=tmp_path) for word in arguments)])
    except SystemExit as stop:
        status = stop.code
    captured = capsys.readouterr()
    assert status == 2 and captured.out == ""
    assert named.format(folder=tmp_path) in captured.err
