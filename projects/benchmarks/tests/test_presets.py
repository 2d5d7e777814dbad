"""benchmark.py: each preset runs in a tiny form, and wrong options are refused before."""

from __future__ import annotations

import json
import re
import struct
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from lambda_benchmarks import detectors, measure, plot, presets, report, session
from lambda_det import create_backbone, get_config, list_models
from lambda_det.layers import IMPLEMENTATIONS
from lambda_det.modeling.replacements import KINDS
from lambda_det.modeling.specs import SPECS
from tests.tool import load_tool

tool = load_tool("benchmark", "projects/benchmarks")
FORWARD_AND_BOTH = ["forward", "forward+backward"]
FORWARD_AND_STEP = ["forward", "training step"]


@pytest.fixture(autouse=True)
def _no_repeats(monkeypatch):
    monkeypatch.setattr(measure, "SHORTEST", 0)


@pytest.fixture
def run(tmp_path, capsys):
    """Run a preset with two rounds; returns what it printed, and its JSON file."""

    def run_preset(*options: str):
        figures = tmp_path / "figures.json"
        assert tool.main([*options, "--runs", "2", "--json", str(figures)]) == 0
        return capsys.readouterr(), json.loads(figures.read_text())

    return run_preset


def size_of(picture: Path) -> tuple[int, int]:
    """Width and height of a PNG file."""
    content = picture.read_bytes()
    assert content.startswith(b"\x89PNG")
    return struct.unpack_from(">II", content, 16)


def check(content: dict, *, modes: list[str], cases: list[str]) -> None:
    """What every preset's JSON file must hold, in each group; the first case is the base."""
    assert content["rounds"] == 2 and content["device"] == "cpu"
    assert content["machine"]["torch"] == torch.__version__
    for group in content["groups"]:
        assert group["base"] == cases[0] and group["modes"] == modes
        assert list(group["cases"]) == cases
        for name, case in group["cases"].items():
            assert case["input_bytes"] > 0, name
            for mode in modes:
                figures = case[mode]
                low, median, high = figures["seconds"]
                assert 0 < low <= median <= high
                assert len(figures["rounds"]) == 2 and figures["peak_bytes"] > 0
                own, other = figures["rounds"], group["cases"][cases[0]][mode]["rounds"]
                ratios = [a / b for a, b in zip(own, other, strict=True)]
                assert figures["ratio_rounds"] == pytest.approx(ratios)
                assert figures["ratio"][1] == pytest.approx(sum(ratios) / 2)
                if case["images"]:
                    rate = case["images"] / figures["seconds"][1]
                    assert figures["images_per_second"][1] >= rate * 0.99  # mean of two rates
        assert group["cases"][cases[0]][modes[0]]["ratio"] == [1, 1, 1]


@pytest.mark.benchmark
def test_local(run, monkeypatch):
    monkeypatch.setattr(presets, "LOCAL_SIZES", [(1, (4, 5), 8, 3), (2, (3, 3), 8, 5)])
    captured, content = run()
    assert content["preset"] == "local" and len(content["groups"]) == 2
    for name, case in content["groups"][0]["cases"].items():
        assert "reason" not in case["forward"] or name == "compiled"  # without g++
    others = [name for name in IMPLEMENTATIONS if name != "fused"]  # which is for GPUs
    assert list(content["groups"][0]["cases"]) == [*others, presets.PRODUCT]
    lines = captured.out.splitlines()
    assert lines[0] == report.machine_line(content["machine"])
    assert "Medians of 2 rounds" in lines[1]
    assert sum(line.startswith("| conv ") for line in lines) == 2
    assert "2 groups of" in captured.err and "left" in captured.err


def test_local_in_bfloat16(run, monkeypatch):
    monkeypatch.setattr(presets, "LOCAL_SIZES", [(1, (4, 5), 8, 3)])
    _, content = run("--dtype", "bfloat16", "--implementations", "conv", "query_first", "conv")
    check(content, modes=FORWARD_AND_BOTH, cases=["conv", "query_first", presets.PRODUCT])
    numbers = 20 * 4 * 16 + 20 * 8 + 16 * 9 + 20 * 4 * 8  # q, v, E and the output's gradient
    assert content["groups"][0]["cases"]["conv"]["input_bytes"] == 2 * numbers


def test_the_product_has_the_multiply_adds_of_the_offsets_on_the_map():
    batch, height, width, depth, scope = 8, 20, 9, 112, 23
    _, (left, right) = presets.make_product((batch, (height, width), depth, scope), torch.float32)
    ones = torch.ones(1, 1, height, width, dtype=torch.float64)
    pairs = F.conv2d(ones, ones.new_ones(1, 1, scope, scope), padding=scope // 2).sum().item()
    found = len(left) * right.numel()
    assert found == pytest.approx(batch * pairs * 4 * (16 + depth), abs=right.numel() / 2)


def test_layer(run, monkeypatch, tmp_path):
    monkeypatch.setattr(presets, "LAYER_SIZES", [(6, 16)])
    picture = tmp_path / "picture.png"
    options = ("--preset", "layer", "--implementations", "auto", "--peer", "timm")
    _, content = run(*options, "--plot", str(picture))
    timm = f"timm {report.installed('timm')}"
    cases = ["3x3 convolution", "lambda layer, auto", timm]
    check(content, modes=FORWARD_AND_BOTH, cases=cases)
    found = content["groups"][0]["cases"]
    assert found[cases[0]]["parameters"] == 9 * 16 * 16
    q, k, v, norms = 16 * 64, 16 * 16, 16 * 4, 2 * 64 + 2 * 4
    assert found[cases[1]]["parameters"] == q + k + v + norms + 16 * 23 * 23
    assert found[timm]["parameters"] == q + k + v + norms + 16 * 23 * 23 + 16  # a bias in conv3d
    width, height = size_of(picture)
    assert 800 < width < 3000 and 150 < height < 1000


def test_peer_that_is_not_installed(monkeypatch, capsys):
    monkeypatch.setattr(presets, "installed", lambda name: None)
    assert tool.main(["--preset", "layer", "--peer", "lambda-networks"]) == 2
    assert "pip install lambda-networks" in capsys.readouterr().err


def test_case_that_fails_has_its_reason(run, monkeypatch):
    """timm's layer cannot be turned to channels_last."""
    monkeypatch.setattr(presets, "LAYER_SIZES", [(6, 16)])
    captured, content = run(
        *("--preset", "layer", "--implementations", "query_first", "--peer", "timm"),
        "--channels-last",
    )
    *_, peer = content["groups"][0]["cases"].values()
    assert "channels_last" in peer["forward"]["reason"]
    assert "forward and forward+backward: RuntimeError" in captured.out


@pytest.mark.benchmark
def test_networks(run, monkeypatch):
    made = []

    def smaller(name, **options):
        made.append(options)
        return create_backbone(
            "lambda_resnet26_slim" if "lambda" in name else "resnet50", **options
        )

    monkeypatch.setattr(presets, "create_backbone", smaller)
    options = ("--preset", "networks", "--small", "--image-size", "32", "--batch", "2")
    _, content = run(*options, "--implementations", "conv", "--checkpoint-activations")
    cases = ["resnet_rs101", "resnet_rs101_se", "lambda_resnet101, conv"]
    cases.append("lambda_resnet101, activation checkpointing")
    assert made.count({"checkpoint_activations": True}) == 1
    check(content, modes=FORWARD_AND_STEP, cases=cases)
    for case in content["groups"][0]["cases"].values():
        # Gradients and momentum of all parameters count in a training step
        assert case["training step"]["peak_bytes"] > 8 * case["parameters"]
        assert case["input_bytes"] > 4 * 2 * 3 * 32 * 32


@pytest.mark.benchmark
def test_detector(run, monkeypatch):
    tiny = "quick/shapes_lambdaresnet26_slim.yaml"
    monkeypatch.setattr(detectors, "get_config", lambda name: get_config(tiny))
    options = ("--preset", "detector", "--small", "--image-size", "64", "--batch", "2")
    _, content = run(*options)
    cases = ["Detectron2's ResNet-50", "LambdaResNet-50, default settings (float32)"]
    cases += [f"LambdaResNet-50, float32, {layout}" for layout in ("channels last", "contiguous")]
    check(content, modes=FORWARD_AND_STEP, cases=cases)
    plain, *ours = (case["parameters"] for case in content["groups"][0]["cases"].values())
    assert plain > 20e6 > ours[0] > 0 and len(set(ours)) == 1


@pytest.mark.benchmark
def test_all_detectors_find_something_and_learn():
    for make in (
        partial(detectors.detectron2_detector, 101),  # the deeper, the larger its maps could grow
        partial(detectors.our_detector, 50, []),
    ):
        model, pictures = make(batch=1, side=64, device="cpu")
        # The folded copy for inference is neither trained nor counted
        assert len(list(model.parameters())) == len(list(model.model.parameters()))
        loss = model.train()(*pictures)
        assert loss.requires_grad and loss.isfinite()
        with torch.no_grad():
            (found,) = model.eval()(*pictures)
        masks = found["instances"].pred_masks
        assert masks.shape[1:] == (64, 64) and len(masks) > 20  # 100 on larger pictures


@pytest.mark.benchmark
def test_convert(run, monkeypatch):
    networks = ("lambda_resnet26t", "lambda_resnet26rpt_256")
    monkeypatch.setattr(presets, "CONVERTED", networks)
    _, content = run("--preset", "convert", "--image-size", "64")
    cases = ["timm's layers", "converted"]
    check(content, modes=FORWARD_AND_STEP, cases=cases)
    assert [group["network"] for group in content["groups"]] == list(networks)
    for group in content["groups"]:
        theirs, ours = (group["cases"][case]["parameters"] for case in cases)
        assert theirs == ours


@pytest.fixture
def one_lambda_layer(monkeypatch):
    def keep(*names):
        names = ("lambda layer", *names)
        monkeypatch.setattr(presets, "TABLE_4", {name: presets.TABLE_4[name] for name in names})

    return keep


@pytest.fixture
def only_own_networks(monkeypatch):
    """Without those that a test of another project has registered in this process."""
    for name in [name for name, spec in SPECS.items() if getattr(spec, "kind", "")]:
        monkeypatch.delitem(SPECS, name)
    for kind in list(KINDS):
        monkeypatch.delitem(KINDS, kind)


@pytest.mark.benchmark
def test_attention(run, one_lambda_layer, only_own_networks):
    one_lambda_layer("lambda convolution, 7x7", "axial self-attention")
    options = ("--preset", "attention", "--small", "--image-size", "32", "--batch", "2")
    captured, content = run(*options)
    check(content, modes=FORWARD_AND_BOTH, cases=["lambda layer", "lambda convolution, 7x7"])
    assert "axial self-attention: left out" in captured.out


@pytest.mark.benchmark
def test_case_that_is_out_of_memory(run, monkeypatch):
    network, _, *paper = presets.TABLE_4["lambda layer"]
    cases = {"lambda layer": (network, {}, *paper)}
    cases["pairs"] = (network, {"implementation": "dense"}, *paper)
    monkeypatch.setattr(presets, "TABLE_4", cases)
    options = ("--preset", "attention", "--small", "--image-size", "192", "--memory-limit", "0.4")
    captured, content = run(*options)
    first, second = content["groups"][0]["cases"].values()
    assert "seconds" in first["forward+backward"]
    assert second["forward+backward"] == {"reason": "out of memory (limit 0.4 GB)"}
    assert "forward+backward: out of memory (limit 0.4 GB)" in captured.out


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
    monkeypatch.setattr(
        presets, "PLACEMENT", {"some": {"resnet50": 300, "resnet50_lambda_c5": 100}}
    )
    monkeypatch.setattr(presets, "SMALL_PLACEMENT", ("some",))
    options = ("--preset", "placement", "--small", "--image-size", "32", "--batch", "2")
    captured, content = run(*options)
    cases = ["resnet50", "resnet50_lambda_c5"]
    check(content, modes=FORWARD_AND_STEP, cases=cases)
    found = content["groups"][0]["cases"]
    assert [found[name]["M params"] for name in cases] == ["25.6", "18.8"]  # Table 12
    assert [found[name]["paper: ratio"] for name in cases] == ["1.00", "3.00"]
    assert [found[name]["images"] for name in cases] == [2, 2]
    assert "32x32" in captured.out


@pytest.mark.benchmark
def test_families(run, monkeypatch, tmp_path):
    ours, theirs = ("lambda_resnet26_slim", 32, 79.0), ("tf_efficientnet_b0", 32, 77.0)
    few = {"Figure 4": [ours, theirs, ("resnet_rs50_se", 32, None)], "Table 5": [ours]}
    monkeypatch.setattr(presets, "LATENCY", {ours[:2]: 0.5})
    monkeypatch.setattr(presets, "SMALL_FAMILIES", few)
    picture = tmp_path / "picture.png"
    options = ("--preset", "families", "--small", "--batch", "2")
    captured, content = run(*options, "--plot", str(picture))
    assert min(size_of(picture)) > 150
    first, second = content["groups"]
    cases = ["lambda_resnet26_slim, 32x32", "tf_efficientnet_b0, 32x32", "resnet_rs50_se, 32x32"]
    for case in first["cases"].values():
        step = case["training step"]["images_per_second"][1]
        assert case["seconds for 1024 images"] == pytest.approx(1024 / step)
    assert len(re.findall(r"\| lambda_resnet26_slim, 32x32 +\| 2 .* 0.5 ", captured.out)) == 2
    check({**content, "groups": [first]}, modes=FORWARD_AND_STEP, cases=cases)
    assert first["cases"]["tf_efficientnet_b0, 32x32"][plot.ACCURACY] == "77"
    assert list(second["cases"]) == cases[:1]


@pytest.mark.benchmark
def test_hybrid(run, only_own_networks):
    options = ("--preset", "hybrid", "--small", "--image-size", "64", "--batch", "2")
    captured, content = run(*options)
    cases = ["lambda layers", "lambda layers, shared embeddings"]
    check(content, modes=FORWARD_AND_BOTH, cases=cases)
    # 8 layers, 16 numbers for each pair of 20x20 positions, 2 bytes each; the paper has 38.4 MB
    assert re.search(r"\| 40\.96 +\| 39\.06 +\|", captured.out)


@pytest.mark.benchmark
def test_size(run, monkeypatch, tmp_path):
    networks = ("resnet50", "lambda_resnet26_slim")
    monkeypatch.setattr(presets, "SMALL_LAYER_SIZES", (64, 96))
    monkeypatch.setattr(presets, "SMALL_NETWORK_SIZES", (64,))
    monkeypatch.setattr(presets, "SIZE_NETWORKS", networks)
    picture = tmp_path / "picture.png"
    captured, content = run("--preset", "size", "--small", "--plot", str(picture))
    assert min(size_of(picture)) > 150
    *layers, network = content["groups"]
    cases = ["3x3 convolution", "lambda layer, auto"]
    check({**content, "groups": layers}, modes=["forward+backward"], cases=cases)
    check({**content, "groups": [network]}, modes=["forward+backward"], cases=list(networks))
    assert [group["image_size"] for group in content["groups"]] == [64, 96, 64]
    kept = content["kept_bytes"]
    assert list(kept) == list(networks)
    blocks = kept["lambda_resnet26_slim"]["64"]
    assert [name for name in blocks if "lambda" in name] == [
        "res4, lambda blocks",
        "res5, lambda blocks",
    ]
    assert all(blocks[name] > 0 for name in blocks if name != presets.ELSEWHERE)
    # The stem's input, and what its convolution gives to its norm, both are kept
    assert kept["resnet50"]["64"]["stem"] >= 4 * (3 * 64 * 64 + 64 * 32 * 32)
    assert "| together" in captured.out


def test_image_sizes_of_the_command_line():
    args = tool.parse_args(["--preset", "size", "--image-sizes", "32", "64"])
    groups = presets.size_groups(args, session.setting_of(args))
    assert [group.about["image_size"] for group in groups] == [32, 64, 32, 64]


def test_kept_memory_that_does_not_fit(monkeypatch):
    def fail(*args):
        raise MemoryError

    monkeypatch.setattr(presets, "kept_for_backward", fail)
    setting = measure.Setting(torch.device("cpu"))
    kept = {side: presets.kept_by_stage("lambda_resnet26_slim", side, setting) for side in (32, 64)}
    assert kept == {32: "out of memory", 64: "out of memory"}
    assert "- 64x64: out of memory" in presets.kept_table(kept)


def test_networks_of_the_tables_exist():
    names = {name for table in presets.PLACEMENT.values() for name in table}
    names |= {n for n, *_ in presets.TABLE_4.values() if not n.endswith("_attention")}
    names |= {
        f"{kind}{depth}" for depth in presets.DEPTHS for kind in ("resnet_rs", "lambda_resnet")
    }
    families = {name for table in presets.FAMILIES.values() for name, *_ in table}
    assert all(name.startswith(tuple(plot.FAMILIES)) for name in families)
    ours = {name for name in families if name.startswith(("lambda_", "resnet_rs"))}
    names |= ours
    assert names <= set(list_models())
    import timm

    assert families - ours <= set(timm.list_models())


def test_help(capsys):
    assert list(tool.PRESETS) == [*presets.PRESETS, "data"]
    with pytest.raises(SystemExit, match="0"):
        tool.main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    for name in tool.PRESETS:
        assert sum(line.startswith(f"  {name} ") for line in lines) == 1
    with pytest.raises(SystemExit, match="0"):
        tool.main(["--preset", "layer", "--help"])
    assert "--peer" in capsys.readouterr().out
    assert set(tool.PEERS) == set(presets.PEERS)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--preset", "layer", "--images", "x"], "--images is an option of data"),
        (["--preset", "data", "--device=cpu"], "--device is an option of local"),
        (["--peer", "timm"], "--peer is an option of layer"),
        (["--preset", "layer", "--wrong"], "--wrong"),
        (["--preset", "layer", "--imp", "conv"], "--imp"),
        (["--preset", "none"], "--preset"),
        (["--dtype", "int8"], "--dtype"),
        (["--runs", "0"], "--runs"),
        (["--device", "cuda:999"], "cuda:999"),
        (["--device", "tpu"], "'tpu'"),
        (["--device", "mps"], "mps"),
        (["--implementations", "none"], "'none'"),
        (["--preset", "networks", "--implementations", "none"], "'none'"),
        (["--preset", "size", "--image-sizes", "256", "16"], "--image-sizes"),
        (["--preset", "networks", "--image-size", "16"], "--image-size is 16"),
        (["--preset", "networks", "--batch", "0"], "--batch"),
        (["--memory-limit", "0"], "--memory-limit"),
        (["--memory-limit", "nan"], "--memory-limit"),
        (["--json", "{folder}/old"], "--json {folder}/old"),
        (["--plot", "{folder}/old"], "--plot {folder}/old"),
        (["--json", "{folder}/missing/new.json"], "{folder}/missing"),
        (["--preset", "data", "--json", "{folder}/missing/new.json"], "{folder}/missing"),
        (["--plot", "{folder}/new.pdf"], "PNG"),
        (["--plot", "{folder}/new.png", "--json", "{folder}/new.png"], "two files"),
    ],
)
def test_wrong_options_are_refused_before_the_work(arguments, named, tmp_path, capsys):
    (tmp_path / "old").write_text("kept")
    try:
        status = tool.main([argument.format(folder=tmp_path) for argument in arguments])
    except SystemExit as stop:
        status = stop.code
    captured = capsys.readouterr()
    assert status == 2 and captured.out == ""
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert named.format(folder=tmp_path) in captured.err
    assert [path.read_text() for path in tmp_path.iterdir()] == ["kept"]


def test_memory_limit_is_for_the_cpu(monkeypatch, capsys):
    monkeypatch.setattr(session, "check_device", lambda *_: torch.device("cuda"))
    assert tool.main(["--device", "cuda", "--memory-limit", "1"]) == 2
    assert "--memory-limit" in capsys.readouterr().err


def test_stopped_run_keeps_its_figures(tmp_path, monkeypatch):
    figures = tmp_path / "figures.json"
    monkeypatch.setattr(presets, "LOCAL_SIZES", [(1, (4, 5), 8, 3), (1, (4, 6), 8, 3)])
    whole = presets.make_local

    def stop(size, *rest):
        if size[1] == (4, 6):
            raise KeyboardInterrupt
        return whole(size, *rest)

    monkeypatch.setattr(presets, "make_local", stop)
    command = ["--runs", "1", "--implementations", "conv", "--json", str(figures)]
    assert tool.main(command) == 130
    assert len(json.loads(figures.read_text())["groups"]) == 1


def test_curves_without_figures():
    def group(side, case):
        return {"kind": "layer", "image_size": side, "cases": {"a": {"forward+backward": case}}}

    groups = [group(64, {"seconds": [1, 2, 3], "peak_bytes": 5}), group(128, {"reason": "no"})]
    assert plot.curves(groups, "layer", "seconds", 10) == {"a": [(64, [10, 20, 30])]}
    assert plot.curves(groups, "layer", "peak_bytes", 1) == {"a": [(64, [5, 5, 5])]}
    assert plot.curves(groups, "network", "seconds", 1) == {}


def test_ratios_without_figures(tmp_path):
    reason = {"reason": "out of memory"}
    groups = [{"title": "t", "modes": ["a"], "base": "x", "cases": {"x": {"a": reason}}}]
    content = {"machine": report.describe_machine(torch.device("cpu")), "groups": groups}
    plot.draw_ratios(content, str(tmp_path / "plot.png"))
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_machine_with_a_library_that_is_missing():
    assert report.installed("no-such-distribution") is None
    described = report.describe_machine(torch.device("cpu"), ("timm", "no-such-distribution"))
    line = report.machine_line(described)
    assert "no-such-distribution" not in line and "timm" in line
    assert described["cores"] >= 1
