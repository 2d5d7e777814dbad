"""Backbone files: what is in them, that Detectron2 itself can load them, and what is refused."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import pickle
from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest
import torch
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.modeling import FPN
from safetensors.torch import save_file
from torch import nn

import lambda_det
from lambda_det.errors import ConfigError, WeightsError
from lambda_det.export.backbone import extract_backbone
from lambda_det.training.checkpointer import SafeCheckpointer
from lambda_det.weights.backbone_file import load_backbone_weights, read_backbone, save_backbone
from lambda_det.weights.formats import read_checkpoint
from lambda_det.weights.provenance import PixelSettings, checksum
from tests.export.toy import Detector, classifier_checkpoint, scramble

OPTIONS = {"scope": 3}


@pytest.fixture(scope="module")
def checkpoint():
    return classifier_checkpoint(**OPTIONS)


@pytest.fixture(scope="module", params=[".pth", ".pkl", ".safetensors"])
def form(request):
    return request.param


@pytest.fixture(scope="module")
def written(checkpoint, form, tmp_path_factory):
    """A backbone file, to be looked at, and its content."""
    content = extract_backbone(checkpoint)
    path = tmp_path_factory.mktemp("written") / f"b{form}"
    save_backbone(content, path)
    return path, content


@pytest.fixture(scope="module")
def backbone():
    """To load files into, again and again: making one takes longer."""
    return lambda_det.create_backbone("lambda_resnet26", **OPTIONS)


def test_what_is_written_is_read_and_the_same(checkpoint, tmp_path, form):
    content = extract_backbone(checkpoint)
    path = tmp_path / "new" / f"b{form}"
    save_backbone(content, path)
    read = read_backbone(path)
    assert read["meta"] == content["meta"] and read["model"].keys() == content["model"].keys()
    assert all(
        torch.equal(tensor, content["model"][name]) for name, tensor in read["model"].items()
    )
    assert os.listdir(tmp_path / "new") == [path.name]
    digest = hashlib.sha256()
    for name, tensor in sorted(read["model"].items()):
        digest.update(f"{name} torch.float32 {list(tensor.shape)}\n".encode())
        digest.update(tensor.numpy().tobytes())
    meta = {key: value for key, value in content["meta"].items() if key != "sha256"}
    digest.update(json.dumps(meta, sort_keys=True).encode())
    assert digest.hexdigest() == content["meta"]["sha256"]
    assert set(map(type, content["meta"].values())) <= {str, int, float, bool, list, dict}


def test_nothing_is_overwritten_unasked(checkpoint, tmp_path):
    content = extract_backbone(checkpoint)
    path = tmp_path / "b.pth"
    path.write_text("old")
    with pytest.raises(ConfigError, match=r"b\.pth is there already.*--overwrite"):
        save_backbone(content, path)
    assert path.read_text() == "old"
    save_backbone(content, path, overwrite=True)
    read_backbone(path)
    with pytest.raises(ConfigError, match=r"ends in one of \.pth, \.pkl, \.safetensors"):
        save_backbone(content, tmp_path / "b.onnx")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written"):
        save_backbone(content, tmp_path / "file" / "b.pth")


@pytest.mark.parametrize("norm", ["BN", "FrozenBN"])
@pytest.mark.parametrize("form", [".pth", ".pkl"])
def test_detectron2_s_own_checkpointer_loads_all_of_it(checkpoint, tmp_path, norm, form):
    path = tmp_path / f"b{form}"
    content = extract_backbone(checkpoint)
    save_backbone(content, path)
    for wrap in (lambda network: FPN(network, ["res4", "res5"], 8), lambda network: network):
        network = lambda_det.create_backbone("lambda_resnet26", norm=norm, **OPTIONS)
        DetectionCheckpointer(nn.ModuleDict({"backbone": wrap(network)})).load(str(path))
        _assert_whole(network, content)


def _assert_whole(network, content):
    loaded = network.state_dict()
    for name, tensor in content["model"].items():
        assert torch.equal(loaded.pop(name), tensor)
    assert all(name.endswith("num_batches_tracked") for name in loaded)


def test_our_checkpointer_loads_all_of_it(written, form):
    path, content = written
    pixels = PixelSettings("BGR", [103.53, 116.28, 123.675], [1.0, 1.0, 1.0])
    for wrap in (lambda network: FPN(network, ["res4", "res5"], 8), lambda network: network):
        network = lambda_det.create_backbone("lambda_resnet26", **OPTIONS)
        checkpointer = SafeCheckpointer(nn.ModuleDict({"backbone": wrap(network)}))
        checkpointer.load_initial_weights(str(path), pixels)
        _assert_whole(network, content)
    with pytest.raises(ConfigError, match=rf"b\{form} want other images.*INPUT.FORMAT BGR"):
        checkpointer.load_initial_weights(str(path), replace(pixels, format="RGB"))


def test_it_is_loaded_without_a_configuration(written, form, caplog):
    path, content = written
    with caplog.at_level("INFO"):
        backbone = lambda_det.create_backbone("lambda_resnet26", weights=path, **OPTIONS)
    _assert_whole(backbone, content)
    assert backbone.pixel_settings.by_key() == {
        "INPUT.FORMAT": "BGR",
        "MODEL.PIXEL_MEAN": [103.53, 116.28, 123.675],
        "MODEL.PIXEL_STD": [1.0, 1.0, 1.0],
    }
    assert str(path) in caplog.text and "INPUT.FORMAT BGR" in caplog.text
    reference = lambda_det.create_backbone("lambda_resnet26", **OPTIONS)
    reference.load_state_dict(content["model"], strict=False)
    images = torch.randn(2, 3, 33, 47)
    expected, found = reference.eval()(images), backbone.eval()(images)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_file_of_another_model_or_options(written, form):
    path, _ = written
    words = rf"b\{form} is of lambda_resnet26 \(norm BN, scope 3\), and this is resnet50"
    with pytest.raises(WeightsError, match=words), torch.device("meta"):
        lambda_det.create_backbone("resnet50", weights=path)
    with pytest.raises(WeightsError, match=r"another shape.*It is of lambda_resnet26.*scope 3"):
        lambda_det.create_backbone("lambda_resnet26", weights=path)


def test_tensors_of_another_author_in_safetensors(tmp_path):
    """As timm and others write them: no metadata, or some of their own."""
    source = scramble(lambda_det.create_backbone("lambda_resnet26", **OPTIONS)).state_dict()
    for metadata in (None, {"format": "pt", "model": "resnet50"}):
        save_file(source, tmp_path / "b.safetensors", metadata=metadata)
        path = str(tmp_path / "b.safetensors")
        backbone = lambda_det.create_backbone("lambda_resnet26", weights=path, **OPTIONS)
        assert backbone.pixel_settings is None
        assert all(torch.equal(t, source[name]) for name, t in backbone.state_dict().items())
    with pytest.raises(WeightsError, match="no backbone file"):
        read_backbone(path)


@pytest.mark.parametrize("change", ["value", "name", "shape", "mean", "format", "author"])
def test_a_file_that_is_not_what_was_written(written, backbone, tmp_path, change, form):
    content = copy.deepcopy(written[1])
    state, words = content["model"], "checksum"
    if change == "value":
        state["res5.1.conv3.norm.running_var"][3] += 1e-6
    elif change == "name":
        state["res5.9.weight"] = state.pop("res5.1.conv3.weight")
    elif change == "shape":
        state["stem.conv1.weight"] = state["stem.conv1.weight"].flatten()
    elif change == "mean":
        content["meta"]["pixel_mean"] = [103.53, 116.28, 123.67]
    elif change == "format":
        content["meta"]["format"], words = 3, "format 3"
    else:
        content["__author__"], words = "x", "no backbone file"
    path = str(tmp_path / f"b{form}")
    save_backbone(content, path)
    with pytest.raises(WeightsError, match=words) as caught:
        read_backbone(path)
    assert path in str(caught.value) and "export" in str(caught.value)
    if change == "author":
        return
    with pytest.raises(WeightsError, match=words):
        load_backbone_weights(backbone, path)
    with pytest.raises(WeightsError, match=words):
        SafeCheckpointer(Detector()).load_initial_weights(path)


def test_a_file_of_the_format_before(checkpoint, tmp_path):
    content = extract_backbone(checkpoint)
    content["meta"] |= {"format": 1, "sha256": checksum(content["model"])}
    path = tmp_path / "b.pth"
    torch.save(content, path)
    _assert_whole(lambda_det.create_backbone("lambda_resnet26", weights=path, **OPTIONS), content)
    for read in (read_backbone, lambda path: extract_backbone(content, source=str(path))):
        with pytest.raises(WeightsError, match=r"b\.pth is of an older lambda_det"):
            read(path)
    content["model"]["res2.0.conv1.weight"][0] += 1
    torch.save(content, path)
    with pytest.raises(WeightsError, match="checksum"):
        lambda_det.create_backbone("lambda_resnet26", weights=path, **OPTIONS)


@pytest.mark.parametrize("kept", [0, 5, 1000, 0.5, -1])
def test_a_file_that_was_not_written_to_the_end(written, backbone, tmp_path, form, kept):
    path = tmp_path / f"b{form}"
    data = written[0].read_bytes()
    path.write_bytes(data[: int(len(data) * kept) if isinstance(kept, float) else kept])
    for load in (
        read_backbone,
        lambda p: load_backbone_weights(backbone, p),
        lambda p: SafeCheckpointer(Detector()).load_initial_weights(str(p)),
    ):
        with pytest.raises(WeightsError) as caught:
            load(path)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)


class _Program:
    """Runs when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (self.mark,)


@pytest.mark.parametrize("form", [".pth", ".pkl"])
@pytest.mark.parametrize("place", ["__author__", "model", "meta"])
def test_a_program_in_a_file_is_not_run(checkpoint, backbone, tmp_path, form, place):
    mark, path = str(tmp_path / "it-ran"), tmp_path / f"b{form}"
    content = extract_backbone(checkpoint)
    if place == "__author__":
        content = {**content, "__author__": _Program(mark)}
    else:
        content[place]["stem.x"] = _Program(mark)
    with open(path, "wb") as file:
        torch.save(content, file) if form == ".pth" else pickle.dump(content, file)
    for load in (
        read_backbone,
        lambda p: load_backbone_weights(backbone, p),
        lambda p: SafeCheckpointer(Detector()).load_initial_weights(str(p)),
    ):
        with pytest.raises(WeightsError, match="refused") as caught:
            load(path)
        assert str(path) in str(caught.value)
    assert not os.path.exists(mark)
    with open(path, "rb") as file:  # which it would be
        torch.load(file, weights_only=False) if form == ".pth" else pickle.load(file)
    assert os.path.exists(mark)


@pytest.mark.skipif(torch.__version__ < (2, 6), reason="such files are refused there")
def test_arrays_and_numbers_of_numpy_in_a_checkpoint_of_others(tmp_path):
    source = scramble(lambda_det.create_backbone("lambda_resnet26", **OPTIONS)).state_dict()
    metrics = {"bbox/AP": np.float64(3.5), "seen": np.int64(7), "lrs": np.ones(3, np.float32)}
    torch.save({"model": OrderedDict(source), "scheduler": metrics}, tmp_path / "m.pth")
    read = read_checkpoint(tmp_path / "m.pth")
    assert read["scheduler"]["bbox/AP"] == 3.5 and read["scheduler"]["lrs"].sum() == 3
    torch.save({"model": source, "f": np.array([_Program("x")], object)}, tmp_path / "o.pth")
    with pytest.raises(WeightsError, match="refused"):
        read_checkpoint(tmp_path / "o.pth")


def test_files_that_cannot_be_opened(tmp_path, form):
    with pytest.raises(WeightsError, match=rf"no checkpoint file \S*b\{form}"):
        read_backbone(tmp_path / f"b{form}")
    (tmp_path / f"b{form}").mkdir()
    with pytest.raises(WeightsError, match="cannot be read"):
        read_backbone(tmp_path / f"b{form}")


def test_a_byte_that_was_altered_anywhere_is_noticed_or_does_nothing(tmp_path, form):
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    state = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    meta = {"format": 2, "model": "toy", "options": {"scope": 3}, "pixel_mean": [1.5, 2.5, 3.5]}
    content = {"model": state, "__author__": "lambda_det", "matching_heuristics": True}
    content["meta"] = {**meta, "sha256": checksum(state, meta)}
    path = tmp_path / f"b{form}"
    save_backbone(content, path)
    data, rng = path.read_bytes(), np.random.default_rng(0)
    assert read_backbone(path)["meta"] == content["meta"]
    noticed = 0
    for _ in range(200):
        altered = bytearray(data)
        place = rng.integers(len(data))
        altered[place] ^= rng.integers(1, 256)
        path.write_bytes(altered)
        try:
            read = read_backbone(path)
            load_backbone_weights(network, path)
        except WeightsError:
            noticed += 1
            continue
        assert read["meta"] == content["meta"] and read["model"].keys() == state.keys(), place
        for name, tensor in network.state_dict().items():
            assert torch.equal(read["model"][name], state[name]), place
            assert torch.equal(tensor, state[name]), place
    assert noticed > 50
