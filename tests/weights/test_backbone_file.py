"""Backbone files: content, loading by Detectron2 and by us, folding, and refusals."""

import copy
import os
from types import MappingProxyType

import pytest
import torch
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.modeling import FPN
from safetensors.torch import save_file
from torch import nn

import lambda_det
from lambda_det.errors import WeightsError
from lambda_det.export.backbone import extract_backbone
from lambda_det.weights.backbone_file import (
    fold_normalisation,
    read_backbone,
    save_backbone,
)
from lambda_det.weights.loading import load
from lambda_det.weights.provenance import PixelSettings
from tests.export.toy import Detector, classifier_checkpoint, scramble

OPTIONS = {"scope": 3}


@pytest.fixture(scope="module")
def checkpoint():
    return classifier_checkpoint(**OPTIONS)


@pytest.fixture(scope="module", params=[".pth", ".safetensors"])
def form(request):
    return request.param


@pytest.fixture(scope="module")
def written(checkpoint, form, tmp_path_factory):
    """A backbone file, to be looked at, and its content."""
    content = extract_backbone(checkpoint)
    path = tmp_path_factory.mktemp("written") / f"b{form}"
    save_backbone(content, path)
    return path, content


def test_what_is_written_is_read_and_the_same(written):
    path, content = written
    read = read_backbone(path)
    assert read["meta"] == content["meta"] and read["model"].keys() == content["model"].keys()
    assert all(
        torch.equal(tensor, content["model"][name]) for name, tensor in read["model"].items()
    )
    assert os.listdir(path.parent) == [path.name]
    assert set(map(type, content["meta"].values())) <= {str, int, float, bool, list, dict}


def test_detectron2_s_own_checkpointer_loads_all_of_it(checkpoint, tmp_path):
    path = tmp_path / "b.pth"
    content = extract_backbone(checkpoint)
    save_backbone(content, path)
    for wrap in (lambda network: FPN(network, ["res4", "res5"], 8), lambda network: network):
        network = lambda_det.create_backbone("lambda_resnet26_slim", norm="FrozenBN", **OPTIONS)
        DetectionCheckpointer(nn.ModuleDict({"backbone": wrap(network)})).load(str(path))
        _assert_whole(network, content)


def _assert_whole(network, content):
    loaded = network.state_dict()
    for name, tensor in content["model"].items():
        assert torch.equal(loaded.pop(name), tensor)
    assert all(name.endswith("num_batches_tracked") for name in loaded)


def test_it_is_loaded_without_a_configuration(written):
    path, content = written
    backbone = lambda_det.create_backbone("lambda_resnet26_slim", weights=path, **OPTIONS)
    _assert_whole(backbone, content)
    pixels = PixelSettings("BGR", [103.53, 116.28, 123.675], [1.0, 1.0, 1.0])
    assert backbone.pixel_settings == pixels


def test_a_file_of_another_model_or_options(written, form):
    path, _ = written
    words = rf"b\{form}.*lambda_resnet26_slim \(norm BN, scope 3\).*resnet50"
    with pytest.raises(WeightsError, match=words), torch.device("meta"):
        lambda_det.create_backbone("resnet50", weights=path)
    with pytest.raises(WeightsError, match=r"position\.embedding.*lambda_resnet26_slim.*scope 3"):
        lambda_det.create_backbone("lambda_resnet26_slim", weights=path)


def test_tensors_of_another_author_in_safetensors(tmp_path):
    """As timm and others write them: no metadata, or some of their own."""
    source = scramble(lambda_det.create_backbone("lambda_resnet26_slim", **OPTIONS)).state_dict()
    path = str(tmp_path / "b.safetensors")
    for metadata in (None, {"format": "pt", "model": "resnet50"}):
        save_file(source, path, metadata=metadata)
        backbone = lambda_det.create_backbone("lambda_resnet26_slim", weights=path, **OPTIONS)
        assert backbone.pixel_settings is None
        assert all(torch.equal(t, source[name]) for name, t in backbone.state_dict().items())
    with pytest.raises(WeightsError, match=r"b\.safetensors.*export_backbone"):
        read_backbone(path)
    save_file(source, path, metadata={"lambda_det": "[]"})
    with pytest.raises(WeightsError, match=r"b\.safetensors"):
        read_backbone(path)


def _changed(content, change):
    """The content with something that its checksum does not know."""
    content = copy.deepcopy(content)
    state, meta = content["model"], content["meta"]
    if change == "value":
        state["res5.1.conv3.norm.running_var"][3] += 1e-6
    elif change == "name":
        state["res5.9.weight"] = state.pop("res5.1.conv3.weight")
    elif change == "shape":
        state["stem.conv1.weight"] = state["stem.conv1.weight"].flatten()
    elif change == "mean":
        meta["pixel_mean"] = [103.53, 116.28, 123.67]
    else:
        meta["format"] = 3
    return content


@pytest.mark.parametrize("change", ["value", "name", "shape", "mean", "format"])
def test_a_file_that_is_not_what_was_written(written, tmp_path, change, form):
    path = tmp_path / f"b{form}"
    save_backbone(_changed(written[1], change), path)
    words = rf"b\{form}.*{'format 3' if change == 'format' else 'checksum'}"
    for read in (read_backbone, lambda path: load(Detector(), path)):
        with pytest.raises(WeightsError, match=words):
            read(path)


@pytest.mark.parametrize("kept", [0, 5, 1000, 0.5, -1, "missing", "a folder"])
def test_a_file_that_cannot_be_read(written, tmp_path, form, kept):
    path, data = tmp_path / f"b{form}", written[0].read_bytes()
    if kept == "a folder":
        path.mkdir()
    elif kept != "missing":
        path.write_bytes(data[: int(len(data) * kept) if isinstance(kept, float) else kept])
    with pytest.raises(WeightsError) as caught:
        read_backbone(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


# ---- folding: the folded network on BGR pixels against the original on normalised RGB pixels

MEAN, STD = [125.3, 122.9, 113.8], [20.0, 57.0, 90.0]  # far apart, so that their order matters
RGB_PIXELS = PixelSettings("RGB", MEAN, STD)


def test_folded_weights_are_as_large_as_before():
    """So that they learn as fast; which tensors are changed is in tests/export/test_extract.py."""
    backbone = scramble(lambda_det.create_backbone("lambda_resnet26_slim", scope=3))
    state, _ = fold_normalisation(backbone, MappingProxyType(backbone.state_dict()), RGB_PIXELS)
    assert 0.5 < state["stem.conv1.weight"].norm() / backbone.stem.conv1.weight.norm() < 2


def test_what_cannot_be_folded():
    network = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1))
    with pytest.raises(WeightsError, match="2 convolutions"):
        fold_normalisation(network, network.state_dict(), RGB_PIXELS)
    network = nn.Sequential(nn.Conv2d(3, 4, 1))
    with pytest.raises(WeightsError, match="YUV"):
        fold_normalisation(network, network.state_dict(), PixelSettings("YUV-BT.601", MEAN, STD))


@pytest.mark.parametrize(("bias", "var"), [(True, 1.0), (False, 1e-6)])
def test_a_bias_before_the_norm_and_a_variance_below_eps(bias, var):
    network = scramble(nn.Sequential(nn.Conv2d(3, 4, 1, bias=bias), nn.BatchNorm2d(4)))
    nn.init.constant_(network[1].running_var, var)
    state, _ = fold_normalisation(network, network.state_dict(), RGB_PIXELS)
    network.double().eval()
    image = torch.randint(0, 256, (1, 3, 5, 4)).double()
    mean, std = (torch.tensor(v).view(3, 1, 1).double() for v in (MEAN, STD))
    expected = network((image - mean) / std)
    network.load_state_dict(state)
    found = network(image.flip(1) - mean.flip(0))
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
