"""A backbone in every format: right at sizes that it was not recorded on."""

import dataclasses
import json
import warnings
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import pytest
import torch
from torch import nn

from lambda_det.errors import ConfigError
from lambda_det.export import (
    FORMATS,
    Format,
    backbone_network,
    export_network,
    formats,
    portable,
)
from lambda_det.export.networks import Network
from lambda_det.layers import LambdaLayer
from lambda_det.modeling import LambdaResNet
from lambda_det.modeling.specs import ALL, ResNetSpec
from tests.export.conftest import needs_any_size
from tests.export.tiny import scramble
from tests.export.unrecorded import record_nothing

# Smaller than the scope and than a tile, odd, lying; res3 of 288 has more than one tile
SIZES = ((16, 16), (33, 97), (288, 130))


def network(**options):
    """Of two stages: the others would be recorded as these are."""
    options.setdefault("scope", None if "global_context" in options else 7)
    spec = ResNetSpec((1, 1, 1, 1), width=16, lambda_blocks={"res3": ALL}, se_stages=("res2",))
    options = {"out_features": ("res2", "res3"), **options}
    return backbone_network(scramble(LambdaResNet(spec, **options)))


def needs(suffix):
    for name in FORMATS[suffix].packages:
        pytest.importorskip(name)
    if FORMATS[suffix].recorded and not formats.HOLDS_ANY_SIZE:
        pytest.skip("needs PyTorch 2.7")


def test_every_format_has_a_row_in_the_docs():
    page = Path(__file__).parents[2] / "docs/use_in_your_project.md"
    if page.exists():
        assert all(f"\n| `{suffix}` " in page.read_text("utf-8") for suffix in FORMATS)


@pytest.fixture(scope="module")
def padded():
    """A network that masks padding, and what records its graph, once for all formats."""
    graphs, original = {}, formats.record

    def record(network, example, least=1):
        if least not in graphs:
            graphs[least] = original(network, example, least)
        return graphs[least]

    return SimpleNamespace(network=network(mask_padding=True), record=record)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", FORMATS)
def test_every_format_at_many_sizes(suffix, padded, tmp_path, monkeypatch):
    needs(suffix)
    monkeypatch.setattr(formats, "record", padded.record)
    made = padded.network
    path = tmp_path / f"backbone{suffix}"
    report = export_network(made, path, sizes=SIZES)
    assert report.passed and path.exists()
    assert [c.shape for c in report.comparisons] == [
        (1, 3, 16, 16),
        (2, 3, 33, 97),
        (1, 3, 288, 130),
    ]
    assert set(report.errors()) == {"res2", "res3"} and max(report.errors().values()) < 1e-5

    # Not by the package's own comparison, on sizes that it did not use, with padding
    run = FORMATS[suffix].read(path, ["res2", "res3"])
    for shape in ((3, 3, 40, 41), (1, 3, 257, 70), (1, 3, 8, 8), (2, 3, 9, 1)):
        x = torch.randn(shape)
        x[0, :, -5:] = 0
        expected, found = made.module(x), run(x)
        for name in ("res2", "res3"):
            scale = float(expected[name].abs().max())
            torch.testing.assert_close(found[name], expected[name], rtol=0, atol=2e-5 * scale)
    about = json.loads((tmp_path / f"backbone{suffix}.json").read_text())
    assert about["format"] == FORMATS[suffix].name and about["outputs"] == ["res2", "res3"]
    assert about["compared"][1]["input"] == [2, 3, 33, 97]
    if suffix == ".onnx":
        import onnxruntime

        (images,) = onnxruntime.InferenceSession(str(path)).get_inputs()
        assert images.shape == ["batch", 3, "height", "width"]
        _check_with_openvino(made, path)


def _check_with_openvino(made, path):
    """In bfloat16, at free sizes and at one; nothing where it is not installed."""
    if not find_spec("openvino"):
        return
    import openvino

    x = torch.randn(2, 3, 33, 97)
    for fixed in (False, True):
        model = openvino.Core().read_model(path)
        if fixed:
            model.reshape(list(x.shape))
        hint = {"INFERENCE_PRECISION_HINT": "bf16"}
        found = openvino.Core().compile_model(model, "CPU", hint)(x.numpy())
        for name, y in made.original(x).items():
            error = (torch.from_numpy(found[name]) - y).abs().max()
            assert error < 0.1 * y.abs().max()


def test_norms_are_folded_in_the_graph_and_stay_in_the_original():
    made = network()
    graph, original = (
        {name for name, part in module.named_modules() if isinstance(part, nn.BatchNorm2d)}
        for module in (made.module, made.original)
    )
    assert graph == {"res3.0.norm2"} < original  # which follows a lambda layer
    x = torch.randn(1, 3, 64, 96)
    for name, expected in made.original(x).items():
        scale = float(expected.abs().max())
        torch.testing.assert_close(made.module(x)[name], expected, rtol=0, atol=1e-5 * scale)


def _raise(_):
    raise RuntimeError("no kernel\nlong")


class _Named(nn.Sequential):
    def forward(self, x):
        return {"y": super().forward(x)}


@pytest.mark.slow
def test_averages_behind_other_paddings_stay(tmp_path):
    needs(".onnx")
    pools = nn.ZeroPad2d(1), nn.AvgPool2d(3, 2), nn.ReplicationPad2d((1, 0, 1, 0)), nn.AvgPool2d(2)
    made = Network(*[_Named(nn.Conv2d(3, 4, 1), *pools).eval()] * 2, detector=False)
    assert export_network(made, tmp_path / "b.onnx", sizes=SIZES).passed


DAMAGES = {"values": lambda y: {k: v * 1.001 for k, v in y.items()}, "error": _raise}


def small_network():
    """One that takes little time to export."""
    model = _Named(nn.Conv2d(3, 4, 1)).eval()
    return Network(model, model, detector=False)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_computes_something_else_does_not_get_its_name(damage, tmp_path, monkeypatch):
    record_nothing(monkeypatch)
    form = FORMATS[".pt2"]

    def read(*arguments):
        run = form.read(*arguments)
        return lambda x: DAMAGES[damage](run(x))

    monkeypatch.setitem(FORMATS, ".pt2", dataclasses.replace(form, read=read))
    report = export_network(small_network(), tmp_path / "b.pt2", sizes=SIZES[:1])
    assert not report.passed and not list(tmp_path.iterdir())
    assert ("no kernel" in (report.comparisons[0].fault or "")) == (damage == "error")


@needs_any_size
@pytest.mark.slow
def test_a_graph_for_one_size_only_is_found_out(tmp_path, monkeypatch):
    """A graph with a constant crop of the embedding is right for one size of map only."""
    right = portable.portable_output

    def for_this_map(queries, values, embedding):
        cut = 47 // 2 - (18 - 1)
        return right(queries, values, embedding[..., cut : 47 - cut, :])

    monkeypatch.setattr(portable, "portable_output", for_this_map)
    model = _Named(nn.Conv2d(3, 8, 1), LambdaLayer(8, query_depth=4, heads=2, scope=47)).eval()
    made = Network(portable.portable_copy(model), model, detector=False)
    report = export_network(made, tmp_path / "b.pt2", sizes=((18, 22), (30, 26)))
    assert report.comparisons[0].passed
    assert not report.passed and not list(tmp_path.iterdir())


def test_what_is_there_stays(tmp_path, monkeypatch):
    record_nothing(monkeypatch)
    path = tmp_path / "b.pt2"
    path.write_text("old")
    with pytest.raises(ConfigError, match="--overwrite"):
        export_network(small_network(), path)
    assert path.read_text() == "old"
    assert export_network(small_network(), path, sizes=SIZES[:1], overwrite=True).passed
    assert path.read_bytes() != b"old"


def test_a_format_that_torch_export_has_no_part_in(tmp_path, monkeypatch, recwarn):
    """It needs no PyTorch 2.7, may warn of its files, and may return more than was asked for."""
    made = small_network()

    def write(network, example, path):
        warnings.warn("written", stacklevel=1)
        path.write_bytes(b"file")

    def run(x):
        warnings.warn("run", stacklevel=1)
        return MappingProxyType({"other": x, **made.original(x)})

    def read(path, outputs):
        warnings.warn("read", stacklevel=1)
        assert path.read_bytes() == b"file" and outputs == ["y"]
        return run

    monkeypatch.setitem(FORMATS, ".own", Format("mine", ".own", write, read))
    monkeypatch.setattr(formats, "HOLDS_ANY_SIZE", False)
    assert export_network(made, tmp_path / "b.own", sizes=SIZES[:1]).passed
    assert not recwarn.list


def test_global_positions_are_refused():
    with pytest.raises(ConfigError, match=r"res3\.0\.conv2.*64x64"):
        network(global_context=256)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no/b.pt2", "no folder .*no"),
        ("b.onnx", "onnx onnxscript onnxruntime"),
        ("b.pt2", r"2\.7"),
    ],
)
def test_names_that_cannot_be_and_what_is_not_installed(name, words, tmp_path, monkeypatch):
    monkeypatch.setattr(formats.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(formats, "HOLDS_ANY_SIZE", False)
    with pytest.raises(ConfigError, match=words):
        export_network(network(), tmp_path / name)
