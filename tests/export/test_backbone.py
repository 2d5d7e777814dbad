"""A backbone as ONNX: right at sizes that it was not recorded on."""

import json

import pytest
import torch
from torch import nn

from lambda_det.errors import ConfigError
from lambda_det.export import backbone_network, export_network, onnx_file, portable, session
from lambda_det.export.networks import Network
from lambda_det.export.session import TOLERANCE, differences
from lambda_det.layers import LambdaLayer
from lambda_det.modeling import LambdaResNet
from lambda_det.modeling.specs import ALL, ResNetSpec
from tests.export.conftest import needs_any_size
from tests.export.tiny import scramble
from tests.export.unrecorded import record_nothing

for package in onnx_file.PACKAGES:
    pytest.importorskip(package)
# Smaller than the scope and than a tile, odd, lying; res3 of 288 has more than one tile
SIZES = ((16, 16), (33, 97), (288, 130))


@pytest.fixture(autouse=True)
def sizes(monkeypatch):
    monkeypatch.setattr(session, "SIZES", SIZES)


def network(**options):
    """Of two stages: the others would be recorded as these are."""
    options.setdefault("scope", None if "global_context" in options else 7)
    spec = ResNetSpec((1, 1, 1, 1), width=16, lambda_blocks={"res3": ALL}, se_stages=("res2",))
    options = {"out_features": ("res2", "res3"), **options}
    return backbone_network(scramble(LambdaResNet(spec, **options)))


@needs_any_size
@pytest.mark.slow
def test_a_backbone_at_many_sizes(tmp_path):
    made, path = network(mask_padding=True), tmp_path / "backbone.onnx"
    report = export_network(made, path)
    assert report.passed and path.exists() and str(path) in str(report)
    assert list(report.errors) == ["2x3x16x16", "1x3x33x97", "2x3x288x130"]
    for errors in report.errors.values():
        assert set(errors) == {"res2", "res3"} and max(errors.values()) < 1e-5

    # Not by the package's own comparison, on sizes that it did not use, with padding
    described, run = onnx_file.read(path)
    for shape in ((3, 3, 40, 41), (1, 3, 257, 70), (1, 3, 8, 8), (2, 3, 9, 1)):
        x = torch.randn(shape)
        x[0, :, -5:] = 0
        expected, found = made.module(x), run(x)
        for name in ("res2", "res3"):
            scale = float(expected[name].abs().max())
            torch.testing.assert_close(found[name], expected[name], rtol=0, atol=2e-5 * scale)
    about = json.loads((tmp_path / "backbone.onnx.json").read_text())
    assert about["outputs"] == ["res2", "res3"] and described == about
    import onnxruntime

    (images,) = onnxruntime.InferenceSession(str(path)).get_inputs()
    assert images.shape == ["batch", 3, "height", "width"]


class _Named(nn.Sequential):
    def forward(self, x):
        return {"y": super().forward(x)}


def small_network():
    """One that takes little time to export."""
    model = _Named(nn.Conv2d(3, 4, 1)).eval()
    return Network(model, model, detector=False)


@needs_any_size
@pytest.mark.slow
def test_averages_behind_other_paddings_stay(tmp_path):
    pools = nn.ZeroPad2d(1), nn.AvgPool2d(3, 2), nn.ReplicationPad2d((1, 0, 1, 0)), nn.AvgPool2d(2)
    made = Network(*[_Named(nn.Conv2d(3, 4, 1), *pools).eval()] * 2, detector=False)
    assert export_network(made, tmp_path / "b.onnx").passed


def _raise(_):
    raise RuntimeError("no kernel\nlong")


@pytest.mark.parametrize("damage", [lambda y: {k: v * 1.001 for k, v in y.items()}, _raise])
def test_a_file_that_computes_something_else_does_not_get_its_name(damage, tmp_path, monkeypatch):
    record_nothing(monkeypatch, damage)
    report = export_network(small_network(), tmp_path / "b.onnx")
    assert not report.passed and not list(tmp_path.iterdir()) and "FAILED" in str(report)
    assert ("no kernel" in str(report)) == (damage is _raise)


@needs_any_size
@pytest.mark.slow
def test_a_graph_for_one_size_only_is_found_out(tmp_path, monkeypatch):
    """A graph with a constant crop of the embedding is right for one size of map only."""
    right = portable.portable_output

    def for_this_map(queries, values, embedding):
        cut = 15 // 2 - (6 - 1)
        return right(queries, values, embedding[..., cut : 15 - cut, :])

    monkeypatch.setattr(portable, "portable_output", for_this_map)
    monkeypatch.setattr(session, "SIZES", ((6, 10), (14, 12)))
    model = _Named(nn.Conv2d(3, 8, 1), LambdaLayer(8, query_depth=4, heads=2, scope=15)).eval()
    made = Network(portable.portable_copy(model), model, detector=False)
    report = export_network(made, tmp_path / "b.onnx")
    of_this_map, of_another = (errors["y"] for errors in report.errors.values())
    assert of_this_map < TOLERANCE < of_another
    assert not report.passed and not list(tmp_path.iterdir())


def test_global_positions_are_refused():
    with pytest.raises(ConfigError, match=r"res3\.0\.conv2.*64x64"):
        network(global_context=256)


@pytest.mark.parametrize(
    ("name", "missing", "words"),
    [
        ("file/b.onnx", "", "is not a folder"),
        ("b.onnx", "packages", "onnx onnxscript onnxruntime"),
        ("b.onnx", "any size", r"2\.7"),
        ("old.onnx", "", "--overwrite"),
    ],
)
def test_names_that_cannot_be_and_what_is_not_installed(
    name, missing, words, tmp_path, monkeypatch
):
    if missing == "packages":
        monkeypatch.setattr(onnx_file.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(onnx_file, "HOLDS_ANY_SIZE", missing != "any size")
    for there in ("file", "old.onnx"):
        (tmp_path / there).write_text("old")
    with pytest.raises(ConfigError, match=words):
        export_network(small_network(), tmp_path / name)
    assert {path.read_text() for path in tmp_path.iterdir()} == {"old"}


MAP = torch.tensor([-3.0, 0.0, 2.0])


@pytest.mark.parametrize("size", [1e-20, 1e20])
def test_the_size_of_a_map_does_not_matter(size):
    found = differences({"y": size * MAP * (1 + TOLERANCE)}, {"y": size * MAP})
    assert found == {"y": pytest.approx(TOLERANCE, rel=0.1)}


@pytest.mark.parametrize(
    ("output", "expected", "passes"),
    [
        (MAP * 0, MAP * 0, True),
        (MAP * 1e-20, MAP * 0, False),
        (MAP, MAP * torch.nan, False),
        (MAP * torch.inf, MAP * torch.inf, False),
        (MAP[1:], MAP, False),
    ],
)
def test_what_cannot_be_compared_is_far(output, expected, passes):
    (error,) = differences({"y": output, "other": MAP}, {"y": expected}).values()
    assert (error == 0) == passes and (error > TOLERANCE) != passes
    assert differences({}, {"y": MAP}) == {"y": torch.inf}
