"""benchmark.py: each preset runs in a tiny form, and wrong options are refused before."""

import json
from functools import partial

import cv2
import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch.nn import functional as F

from lambda_benchmarks import data, detectors, measure, presets, report
from lambda_det import create_backbone, get_config, list_models
from lambda_det.modeling.replacements import KINDS
from lambda_det.modeling.specs import SPECS
from tests.shapes import make_shapes
from tests.tool import load_tool

tool = load_tool("benchmark", "projects/benchmarks")
BOTH = ["forward", "forward+backward"]
STEP = ["forward", "training step"]


@pytest.fixture(autouse=True)
def _no_repeats_and_no_limit(monkeypatch):
    monkeypatch.setattr(measure, "SHORTEST", 0)
    monkeypatch.setattr(tool, "limit_memory", lambda gigabytes: None)


@pytest.fixture
def run(tmp_path, capsys):
    """Run a preset with two rounds; returns what it printed, and the groups of its JSON file."""

    def run_preset(preset: str, *options: str):
        file = tmp_path / "figures.json"
        command = ["--preset", preset, *options, "--runs", "2", "--json", str(file)]
        assert tool.main(command) == 0
        content = json.loads(file.read_text())
        assert content["rounds"] == 2 and content["machine"]["torch"] == torch.__version__
        return capsys.readouterr().out, content["groups"]

    return run_preset


def check(group: dict, modes: list[str], cases: list[str]) -> None:
    """What every group must hold; the first case is the base."""
    assert group["base"] == cases[0] and group["modes"] == modes and list(group["cases"]) == cases
    for case in group["cases"].values():
        for mode in modes:
            low, median, high = case[mode]["seconds"]
            assert 0 < low <= median <= high and len(case[mode]["ratio_rounds"]) == 2
    assert group["cases"][cases[0]][modes[0]]["ratio"] == [1, 1, 1]


@pytest.mark.slow
def test_local_in_bfloat16(run, monkeypatch):
    monkeypatch.setattr(presets, "LOCAL_SIZES", [(1, (4, 5), 8, 3), (2, (3, 3), 8, 5)])
    options = ("--dtype", "bfloat16", "--implementations", "dense", "query_first")
    out, groups = run("local", *options)
    for group in groups:
        check(group, BOTH, ["dense", "query_first", presets.PRODUCT])
    numbers = 20 * 4 * 16 + 20 * 8 + 16 * 9 + 20 * 4 * 8  # q, v, E and the output's gradient
    assert groups[0]["cases"]["dense"]["input_bytes"] == 2 * numbers
    assert out.count("| dense ") == 2


def test_the_product_has_the_multiply_adds_of_the_offsets_on_the_map():
    batch, height, width, depth, scope = 8, 20, 9, 112, 23
    _, (left, right) = presets.make_product((batch, (height, width), depth, scope), torch.float32)
    ones = torch.ones(1, 1, height, width, dtype=torch.float64)
    pairs = F.conv2d(ones, ones.new_ones(1, 1, scope, scope), padding=scope // 2).sum().item()
    found = len(left) * right.numel()
    assert found == pytest.approx(batch * pairs * 4 * (16 + depth), abs=right.numel() / 2)


def test_layer(run, monkeypatch):
    monkeypatch.setattr(presets, "LAYER_SIZES", [(6, 16)])
    options = ("--implementations", "auto", "--peer", "timm")
    _, (group,) = run("layer", *options)
    peer = f"timm {report.installed('timm')}"
    cases = ["3x3 convolution", "lambda layer, auto", peer]
    check(group, BOTH, cases)
    q, k, v, norms = 16 * 64, 16 * 16, 16 * 4, 2 * 64 + 2 * 4
    ours = q + k + v + norms + 16 * 23 * 23
    # timm's has a bias in its conv3d
    found = [group["cases"][name]["parameters"] for name in cases]
    assert found == [9 * 16 * 16, ours, ours + 16]


def test_peer_that_is_not_installed(monkeypatch, capsys):
    monkeypatch.setattr(presets, "installed", lambda name: None)
    assert tool.main(["--preset", "layer", "--peer", "lambda-networks"]) == 2
    assert "pip install lambda-networks" in capsys.readouterr().err


@pytest.mark.benchmark
def test_networks(run, monkeypatch):
    def smaller(name, **options):
        name = "resnet14_slim_lambda_c5" if "lambda" in name else "resnet14_slim"
        return create_backbone(name, **options)

    monkeypatch.setattr(presets, "create_backbone", smaller)
    options = ("--small", "--image-size", "32", "--batch", "2", "--checkpoint-activations")
    _, (group,) = run("networks", *options, "--implementations", "dense")
    cases = ["resnet_rs101", "resnet_rs101_se", "lambda_resnet101, conv"]
    check(group, STEP, [*cases, "lambda_resnet101, activation checkpointing"])
    for case in group["cases"].values():
        # Gradients and momentum of all parameters count in a training step
        assert case["training step"]["peak_bytes"] > 8 * case["parameters"]


@pytest.mark.benchmark
@pytest.mark.release
def test_detectors_of_detectron2_are_accelerated(run):
    _, (group,) = run("accelerate", "--small", "--image-size", "64")
    check(group, STEP, ["Detectron2's Faster R-CNN", "accelerated"])


@pytest.mark.benchmark
@pytest.mark.release
def test_detector(run, monkeypatch):
    tiny = "quick/shapes_lambdaresnet26_slim.yaml"
    monkeypatch.setattr(detectors, "get_config", lambda name: get_config(tiny))
    _, (group,) = run("detector", "--small", "--image-size", "64", "--batch", "2")
    ours = [f"LambdaResNet-50, {title}" for title in presets.DETECTORS]
    check(group, STEP, ["Detectron2's ResNet-50", *ours])
    plain, *ours = (case["parameters"] for case in group["cases"].values())
    assert plain > 20e6 > ours[0] > 0 and len(set(ours)) == 1


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


@pytest.mark.benchmark
def test_convert(run, monkeypatch):
    monkeypatch.setattr(presets, "CONVERTED", ("lambda_resnet26rpt_256",))
    _, (group,) = run("convert", "--image-size", "64")
    check(group, STEP, ["timm's layers", "converted"])
    theirs, ours = (case["parameters"] for case in group["cases"].values())
    assert theirs == ours


@pytest.fixture
def only_own_networks(monkeypatch):
    """Without those that a test of another project has registered in this process."""
    for name in [name for name, spec in SPECS.items() if getattr(spec, "kind", "")]:
        monkeypatch.delitem(SPECS, name)
    for kind in list(KINDS):
        monkeypatch.delitem(KINDS, kind)


@pytest.mark.benchmark
def test_attention(run, monkeypatch, only_own_networks):
    rows = {
        name: ("resnet14_slim_lambda_c5", *presets.TABLE_4[name][1:])
        for name in ("lambda layer", "lambda convolution, 7x7")
    }
    rows["axial self-attention"] = presets.TABLE_4["axial self-attention"]
    monkeypatch.setattr(presets, "TABLE_4", rows)
    out, (group,) = run("attention", "--small", "--image-size", "32", "--batch", "2")
    check(group, BOTH, ["lambda layer", "lambda convolution, 7x7"])
    assert "axial self-attention: left out" in out


@pytest.mark.slow
def test_options_of_the_lambda_layers():
    counts = {}
    ours = {n: row for n, row in presets.TABLE_4.items() if row[0] in list_models()}
    for name, (network, options, *_) in ours.items():
        with torch.device("meta"):
            model = presets.create_classifier(network, **options)
        counts[name] = sum(parameter.numel() for parameter in model.parameters())
    base = counts["lambda layer"]
    assert base - counts["lambda layer, shared embeddings"] == (16 - 4) * 16 * 23 * 23
    assert base - counts["lambda convolution, 7x7"] == 16 * 16 * (23 * 23 - 7 * 7)
    assert counts["lambda layer, |k|=8"] < base


@pytest.mark.benchmark
def test_placement(run, monkeypatch):
    rates = {"resnet14_slim": 300, "resnet14_slim_lambda_c5": 100}
    monkeypatch.setattr(presets, "PLACEMENT", {"a": rates})
    _, (group,) = run("placement", "--small", "--image-size", "32", "--batch", "2")
    check(group, STEP, list(rates))
    assert [case["paper: ratio"] for case in group["cases"].values()] == ["1.00", "3.00"]
    assert [case["images"] for case in group["cases"].values()] == [2, 2]


@pytest.mark.benchmark
def test_families(run, monkeypatch):
    few = [("lambda_resnet26_slim", 32, 79.0, 0.5), ("tf_efficientnet_b0", 32, None, None)]
    monkeypatch.setattr(presets, "SMALL_FAMILIES", {"Figure 4": few})
    _, (group,) = run("families", "--small", "--batch", "2")
    check(group, STEP, ["lambda_resnet26_slim, 32x32", "tf_efficientnet_b0, 32x32"])
    ours, theirs = group["cases"].values()
    assert ours["paper: top-1"] == "79" and ours["paper: images/s"] == "2048"
    assert theirs["paper: top-1"] == ""


@pytest.mark.benchmark
def test_size(run, monkeypatch):
    names = ["resnet14_slim", "resnet14_slim_lambda_c5"]
    monkeypatch.setattr(presets, "SIZE_NETWORKS", names)
    _, (layer, network) = run("size", "--image-sizes", "64")
    check(layer, BOTH[1:], ["3x3 convolution", "lambda layer, auto"])
    check(network, BOTH[1:], names)


def test_networks_of_the_tables_exist():
    names = {name for table in presets.PLACEMENT.values() for name in table}
    names |= {n for n, *_ in presets.TABLE_4.values() if not n.endswith("_attention")}
    families = {name for table in presets.FAMILIES.values() for name, *_ in table}
    ours = {name for name in families if name.startswith(("lambda_", "resnet_rs"))}
    assert names | ours <= set(list_models())
    assert families - ours <= set(timm.list_models())


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
    _, (classes, detection) = run("data", *options)
    check(classes, ["forward"], list(data.pipelines()))
    check(detection, ["forward"], list(data.mappers()))
    assert "3 images" in classes["title"] and "0.00 million pixels" in classes["title"]


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
        (["local", "--dtype", "int8"], "--dtype"),
        (["local", "--device", "cuda:999"], "cuda:999"),
        (["networks", "--implementations", "none"], "'none'"),
        (["local", "--json", "{folder}/old"], "{folder}/old"),
        (["local", "--json", "{folder}/missing/new.json"], "{folder}/missing"),
        (["data"], "--images"),
        (["data", "--images", "{folder}/nothing"], "nothing"),
        (["data", "--images", "{folder}"], "no images"),
    ],
)
def test_wrong_options_are_refused_before_the_work(arguments, named, tmp_path, capsys):
    (tmp_path / "old").write_text("kept")
    try:
        status = tool.main(["--preset", *(word.format(folder=tmp_path) for word in arguments)])
    except SystemExit as stop:
        status = stop.code
    captured = capsys.readouterr()
    assert status == 2 and captured.out == ""
    assert named.format(folder=tmp_path) in captured.err
    assert [path.read_text() for path in tmp_path.iterdir()] == ["kept"]


def test_stopped_run_keeps_its_figures(tmp_path, monkeypatch):
    figures = tmp_path / "figures.json"
    monkeypatch.setattr(presets, "LOCAL_SIZES", [(1, (4, 5), 8, 3), (1, (4, 6), 8, 3)])
    whole = presets.make_local

    def stop(size, *rest):
        if size[1] == (4, 6):
            raise KeyboardInterrupt
        return whole(size, *rest)

    monkeypatch.setattr(presets, "make_local", stop)
    command = ["--preset", "local", "--runs", "1", "--implementations", "dense"]
    assert tool.main([*command, "--json", str(figures)]) == 130
    assert len(json.loads(figures.read_text())["groups"]) == 1
