"""tools/benchmark.py: each preset runs in a tiny form, and what cannot work is one sentence."""

from __future__ import annotations

import json
import math
import struct

import pytest
import torch

from lambda_det import create_backbone, list_models
from lambda_det.benchmarks import (
    attention_networks,
    families,
    layer,
    local,
    machine,
    measure,
    networks,
    placement,
    plot,
    size,
)
from lambda_det.errors import ConfigError
from lambda_det.layers import IMPLEMENTATIONS
from tests.tool import load_tool

tool = load_tool("benchmark")


@pytest.fixture(autouse=True)
def _no_repeats(monkeypatch):
    monkeypatch.setattr(measure, "SHORTEST", 0)


@pytest.fixture
def run(tmp_path, capsys):
    """Run a preset with two rounds; returns what it printed, its JSON file and its plot's size."""

    def run_preset(*options: str):
        figures, picture = tmp_path / "figures.json", tmp_path / "picture.png"
        written = ["--json", str(figures), "--plot", str(picture)]
        assert tool.main([*options, "--runs", "2", *written]) == 0
        content = picture.read_bytes()
        assert content.startswith(b"\x89PNG")
        assert not list(tmp_path.glob("*.part"))
        captured = capsys.readouterr()
        return captured, json.loads(figures.read_text()), struct.unpack(">II", content[16:24])

    return run_preset


def check(content: dict, *, base: str, modes: list[str], cases: list[str]) -> None:
    """What every preset's JSON file must hold, in each group."""
    assert content["rounds"] == 2 and content["device"] == "cpu"
    assert content["machine"]["torch"] == torch.__version__
    assert content["machine"]["threads"] == torch.get_num_threads()
    for group in content["groups"]:
        assert group["base"] == base and group["modes"] == modes
        assert list(group["cases"]) == cases
        for name, case in group["cases"].items():
            assert case["input_bytes"] > 0, name
            for mode in modes:
                figures = case[mode]
                low, median, high = figures["seconds"]
                assert 0 < low <= median <= high
                assert len(figures["rounds"]) == 2 and figures["peak_bytes"] > 0
                own, other = figures["rounds"], group["cases"][base][mode]["rounds"]
                ratios = [a / b for a, b in zip(own, other, strict=True)]
                assert figures["ratio_rounds"] == pytest.approx(ratios)
                assert figures["ratio"][1] == pytest.approx(sum(ratios) / 2)
                if case["images"]:
                    rate = case["images"] / figures["seconds"][1]
                    assert figures["images_per_second"][1] >= rate * 0.99  # mean of two rates
        assert group["cases"][base][modes[0]]["ratio"] == [1, 1, 1]


def test_local(run, monkeypatch):
    monkeypatch.setattr(local, "SIZES", [(1, (4, 5), 8, 3), (2, (3, 3), 8, 5)])
    captured, content, _ = run()
    assert content["preset"] == "local" and len(content["groups"]) == 2
    for name, case in content["groups"][0]["cases"].items():
        usable = "reason" not in case["forward"]
        assert usable or name == "compiled"  # without g++
    others = [name for name in IMPLEMENTATIONS if name != "fused"]  # which is for GPUs
    assert list(content["groups"][0]["cases"]) == others
    lines = captured.out.splitlines()
    assert lines[0] == machine.machine_line(content["machine"])
    assert "Medians of 2 rounds" in lines[1]
    assert sum(line.startswith("| conv ") for line in lines) == 2
    assert "2 groups of" in captured.err and "left" in captured.err


def test_local_in_bfloat16_measures_bfloat16(run, monkeypatch):
    monkeypatch.setattr(local, "SIZES", [(1, (4, 5), 8, 3)])
    _, content, _ = run("--dtype", "bfloat16", "--implementations", "conv", "query_first", "conv")
    check(
        content, base="conv", modes=["forward", "forward+backward"], cases=["conv", "query_first"]
    )
    numbers = 20 * 4 * 16 + 20 * 8 + 16 * 9 + 20 * 4 * 8  # q, v, E and the output's gradient
    assert content["groups"][0]["cases"]["conv"]["input_bytes"] == 2 * numbers


def test_layer(run, monkeypatch):
    monkeypatch.setattr(layer, "SIZES", [(6, 16)])
    _, content, picture = run("--preset", "layer", "--implementations", "auto", "--peer", "timm")
    timm = f"timm {machine.installed('timm')}"
    cases = ["3x3 convolution", "lambda layer, auto", timm]
    check(content, base=cases[0], modes=["forward", "forward+backward"], cases=cases)
    found = content["groups"][0]["cases"]
    assert found[cases[0]]["parameters"] == 9 * 16 * 16
    q, k, v, norms = 16 * 64, 16 * 16, 16 * 4, 2 * 64 + 2 * 4
    assert found[cases[1]]["parameters"] == q + k + v + norms + 16 * 23 * 23
    assert found[timm]["parameters"] == q + k + v + norms + 16 * 23 * 23 + 16  # a bias in conv3d
    assert 800 < picture[0] < 3000 and 150 < picture[1] < 1000


def test_a_peer_that_is_not_installed_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(layer, "installed", lambda name: None)
    assert tool.main(["--preset", "layer", "--peer", "lambda-networks"]) == 2
    assert "pip install lambda-networks" in capsys.readouterr().err


def test_peers_refusals_are_reported(run, monkeypatch):
    """timm's layer cannot be turned to channels_last."""
    monkeypatch.setattr(layer, "SIZES", [(6, 16)])
    captured, content, _ = run(
        *("--preset", "layer", "--implementations", "query_first", "--peer", "timm"),
        "--channels-last",
    )
    *_, peer = content["groups"][0]["cases"].values()
    assert "channels_last" in peer["forward"]["reason"]
    assert "forward and forward+backward: RuntimeError" in captured.out


def test_networks(run, monkeypatch):
    made = []

    def smaller(name, **options):
        made.append(options)
        return create_backbone("lambda_resnet26" if "lambda" in name else "resnet50", **options)

    monkeypatch.setattr(networks, "create_backbone", smaller)
    options = ("--preset", "networks", "--small", "--image-size", "32", "--batch", "2")
    _, content, _ = run(*options, "--implementations", "conv", "--checkpoint-activations")
    cases = ["resnet_rs101", "resnet_rs101_se", "lambda_resnet101, conv"]
    cases.append("lambda_resnet101, activation checkpointing")
    assert made.count({"checkpoint_activations": True}) == 1
    check(content, base=cases[0], modes=["forward", "training step"], cases=cases)
    for case in content["groups"][0]["cases"].values():
        # Gradients and momentum of all parameters count in a training step
        assert case["training step"]["peak_bytes"] > 8 * case["parameters"]
        assert case["input_bytes"] > 4 * 2 * 3 * 32 * 32


def test_attention(run, monkeypatch):
    few = {name: attention_networks.LAMBDA_LAYERS[name] for name in [attention_networks.BASE]}
    monkeypatch.setattr(attention_networks, "LAMBDA_LAYERS", few)
    _, content, _ = run("--preset", "attention", "--small", "--image-size", "32", "--batch", "2")
    cases = [attention_networks.BASE, *attention_networks.ATTENTION]
    modes = ["forward", "forward+backward"]
    check(content, base=cases[0], modes=modes, cases=cases)


def test_attention_that_does_not_fit_is_out_of_memory_and_the_rest_goes_on(run, monkeypatch):
    few = {name: attention_networks.ATTENTION[name] for name in ["global self-attention"]}
    monkeypatch.setattr(attention_networks, "ATTENTION", few)
    one = {name: attention_networks.LAMBDA_LAYERS[name] for name in [attention_networks.BASE]}
    monkeypatch.setattr(attention_networks, "LAMBDA_LAYERS", one)
    options = ("--preset", "attention", "--small", "--image-size", "192", "--memory-limit", "0.4")
    captured, content, _ = run(*options)
    first, second = content["groups"][0]["cases"].values()
    assert "seconds" in first["forward+backward"]
    assert second["forward+backward"] == {"reason": "out of memory (limit 0.4 GB)"}
    assert "forward+backward: out of memory (limit 0.4 GB)" in captured.out


def test_shared_embeddings_and_small_scopes_are_what_they_say():
    counts = {}
    for name, (network, options, _, _) in attention_networks.LAMBDA_LAYERS.items():
        with torch.device("meta"):
            model, _ = attention_networks.make_lambda(network, 1, 32, **options)
        counts[name] = sum(parameter.numel() for parameter in model.parameters())
    base = counts[attention_networks.BASE]
    assert base - counts["lambda layer, shared embeddings"] == (16 - 4) * 16 * 23 * 23
    assert base - counts["lambda convolution, 7x7"] == 16 * 16 * (23 * 23 - 7 * 7)
    assert counts["lambda layer, |k|=8"] < base


def test_placement(run, monkeypatch):
    tables = {"some": {"resnet50": 300, "resnet50_lambda_c5": 100}}
    monkeypatch.setattr(placement, "TABLES", tables)
    monkeypatch.setattr(placement, "SMALL_TABLES", ("some",))
    options = ("--preset", "placement", "--small", "--image-size", "32", "--batch", "2")
    captured, content, _ = run(*options)
    cases = ["resnet50", "resnet50_lambda_c5"]
    check(content, base="resnet50", modes=["forward", "training step"], cases=cases)
    found = content["groups"][0]["cases"]
    assert [found[name]["M params"] for name in cases] == ["25.6", "18.8"]  # Table 13
    assert [found[name]["paper: ratio"] for name in cases] == ["1.00", "3.00"]
    assert [found[name]["images"] for name in cases] == [2, 2]
    assert "32x32" in captured.out


def test_families(run, monkeypatch):
    monkeypatch.setattr(
        families,
        "SMALL_FIGURE_4",
        [("lambda_resnet26", 32, 79.0), ("tf_efficientnet_b0", 32, 77.0)],
    )
    monkeypatch.setattr(families, "SMALL_TABLE_5", [("lambda_resnet26", 32, 79.0)])
    _, content, _ = run("--preset", "families", "--small", "--batch", "2")
    first, second = content["groups"]
    check(
        {**content, "groups": [first]},
        base="lambda_resnet26, 32x32",
        modes=["forward", "training step"],
        cases=["lambda_resnet26, 32x32", "tf_efficientnet_b0, 32x32"],
    )
    assert first["cases"]["tf_efficientnet_b0, 32x32"]["top-1 (paper)"] == "77"
    assert list(second["cases"]) == ["lambda_resnet26, 32x32"]


def test_size(run, monkeypatch):
    monkeypatch.setattr(size, "SMALL_LAYER_SIZES", (64, 96))
    monkeypatch.setattr(size, "SMALL_NETWORK_SIZES", (64,))
    monkeypatch.setattr(size, "NETWORKS", ("resnet50", "lambda_resnet26"))
    captured, content, _ = run("--preset", "size", "--small")
    *layers, network = content["groups"]
    cases = ["3x3 convolution", "lambda layer, auto"]
    both = ["forward+backward"]
    check({**content, "groups": layers}, base=cases[0], modes=both, cases=cases)
    check({**content, "groups": [network]}, base="resnet50", modes=both, cases=list(size.NETWORKS))
    assert [group["image_size"] for group in content["groups"]] == [64, 96, 64]
    kept = content["kept_bytes"]
    assert list(kept) == list(size.NETWORKS)
    blocks = kept["lambda_resnet26"]["64"]
    assert [name for name in blocks if "lambda" in name] == [
        "res4, lambda blocks",
        "res5, lambda blocks",
    ]
    assert all(blocks[name] > 0 for name in blocks if name != size.ELSEWHERE)
    # The stem's input, and what its convolution gives to its norm, both are kept
    assert kept["resnet50"]["64"]["stem"] >= 4 * (3 * 64 * 64 + 64 * 32 * 32)
    assert "| together" in captured.out


def test_size_at_chosen_sizes(run, monkeypatch):
    monkeypatch.setattr(size, "NETWORKS", ("lambda_resnet26",))
    _, content, _ = run("--preset", "size", "--image-sizes", "32")
    assert [group["image_size"] for group in content["groups"]] == [32, 32]


def test_kept_memory_that_does_not_fit_is_said(monkeypatch):
    setting = size.Setting(torch.device("cpu"))

    def fail(*args):
        raise MemoryError

    monkeypatch.setattr(size, "kept_for_backward", fail)
    kept = {side: size.kept_by_stage("lambda_resnet26", side, setting) for side in (32, 64)}
    assert kept == {32: "out of memory", 64: "out of memory"}
    assert "- 64x64: out of memory" in size.kept_table(kept)


def test_all_networks_of_the_tables_exist():
    names = [name for table in placement.TABLES.values() for name in table]
    names += [network for network, *_ in attention_networks.LAMBDA_LAYERS.values()]
    names += [name for name, *_ in families.FIGURE_4 + families.TABLE_5 if "lambda" in name]
    names += [
        f"{start}{depth}" for depth in networks.DEPTHS for start in ("resnet_rs", "lambda_resnet")
    ]
    assert set(names) <= set(list_models())
    others = [name for name, *_ in families.FIGURE_4 + families.TABLE_5 if "lambda" not in name]
    import timm

    assert set(others) <= set(timm.list_models())
    assert all(any(name.startswith(start) for start in families.FAMILIES) for name in others)


def test_help_has_a_line_for_each_preset(capsys):
    with pytest.raises(SystemExit, match="0"):
        tool.main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    for name in tool.PRESETS:
        assert sum(line.startswith(f"  {name} ") for line in lines) == 1
    with pytest.raises(SystemExit, match="0"):
        tool.main(["--preset", "layer", "--help"])
    assert "--peer" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--runs", "0"], "--runs is 0"),
        (
            ["--preset", "layer", "--images", "x"],
            "--images is no option of --preset layer, but of data",
        ),
        (["--preset", "data", "--device=cpu"], "--device is no option of --preset data"),
        (["--peer", "timm"], "--peer is no option of --preset local, but of layer"),
        (["--preset", "layer", "--wrong"], "knows no '--wrong'"),
        (["--preset", "layer", "--imp", "conv"], "knows no '--imp'"),
        (["--preset", "none"], "--preset"),
        (["--dtype", "int8"], "--dtype"),
        (["--device", "cuda:999"], "--device is cuda:999"),
        (["--device", "tpu"], "--device is 'tpu'"),
        (["--device", "mps"], "--device is 'mps'"),
        (["--implementations", "none"], "none"),
        (["--preset", "networks", "--implementations", "none"], "none"),
        (["--preset", "size", "--implementations", "none"], "none"),
        (["--preset", "size", "--image-sizes", "256", "16"], "--image-sizes"),
        (["--preset", "networks", "--image-size", "16"], "--image-size is 16"),
        (["--preset", "networks", "--batch", "0"], "--batch is 0"),
        (["--memory-limit", "0"], "--memory-limit is 0"),
        (["--memory-limit", "nan"], "--memory-limit is nan"),
        (["--json", "{folder}/old"], "exists"),
        (["--plot", "{folder}/old"], "exists"),
        (["--json", "{folder}/missing/new.json"], "no folder"),
        (["--preset", "data", "--json", "{folder}/missing/new.json"], "no folder"),
        (["--plot", "{folder}/new.pdf"], "PNG"),
        (["--plot", "{folder}/new.png", "--json", "{folder}/new.png"], "two files"),
    ],
)
def test_what_cannot_work_is_one_sentence_before_the_work(arguments, said, tmp_path, capsys):
    (tmp_path / "old").write_text("kept")
    assert tool.main([argument.format(folder=tmp_path) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert said in captured.err and captured.out == ""
    assert (tmp_path / "old").read_text() == "kept"
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_one_sentence(capsys):
    assert tool.main(["--device", "cuda"]) == 2
    assert "finds no GPU" in capsys.readouterr().err


def test_a_limit_of_memory_is_for_the_cpu(monkeypatch, capsys):
    from lambda_det.benchmarks import options

    monkeypatch.setattr(options, "check_device", lambda name: torch.device("cuda"))
    assert tool.main(["--device", "cuda", "--memory-limit", "1"]) == 2
    assert "--memory-limit is for the CPU" in capsys.readouterr().err


def test_a_stopped_run_keeps_what_it_has_found(tmp_path, monkeypatch, capsys):
    figures = tmp_path / "figures.json"
    monkeypatch.setattr(local, "SIZES", [(1, (4, 5), 8, 3), (1, (4, 6), 8, 3)])
    whole = local.make

    def stop(size, *rest):
        if size[1] == (4, 6):
            raise KeyboardInterrupt
        return whole(size, *rest)

    monkeypatch.setattr(local, "make", stop)
    command = ["--runs", "1", "--implementations", "conv", "--json", str(figures)]
    assert tool.main(command) == 130
    assert len(json.loads(figures.read_text())["groups"]) == 1


def test_curves_leave_out_what_was_not_measured():
    def group(side, case):
        return {"kind": "layer", "image_size": side, "cases": {"a": {"forward+backward": case}}}

    groups = [group(64, {"seconds": [1, 2, 3], "peak_bytes": 5}), group(128, {"reason": "no"})]
    assert size.curves_of(groups, "layer", "seconds", 10) == {"a": [(64, [10, 20, 30])]}
    assert size.curves_of(groups, "layer", "peak_bytes", 1) == {"a": [(64, [5, 5, 5])]}
    assert size.curves_of(groups, "network", "seconds", 1) == {}


def test_plots_survive_groups_without_figures(tmp_path):
    reason = {"reason": "out of memory"}
    groups = [{"title": "t", "modes": ["a"], "base": "x", "cases": {"x": {"a": reason}}}]
    content = {"machine": machine.describe_machine(torch.device("cpu")), "groups": groups}
    plot.draw_ratios(content, str(tmp_path / "plot.png"))
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_machine_without_known_parts():
    assert machine.installed("no-such-distribution") is None
    described = machine.describe_machine(torch.device("cpu"), ("timm", "no-such-distribution"))
    line = machine.machine_line(described)
    assert "no-such-distribution" not in line and "timm" in line
    assert described["cores"] >= 1 and math.isfinite(described["load"] or 0)


def test_config_errors_of_all_presets_name_what_they_know():
    for name, module in tool.PRESETS.items():
        with pytest.raises(ConfigError, match=f"--preset {name}"):
            tool.parse_args(["--preset", name, "--no-such-option"])
        assert module.__doc__.partition("\n\n")[0].count("\n") == 0
