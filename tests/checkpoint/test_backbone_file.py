"""Backbone files: what is in them, that Detectron2 itself can load them, and what is refused."""

from __future__ import annotations

import hashlib
import os

import pytest
import torch
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.modeling import FPN
from torch import nn

import lambda_det
from lambda_det.checkpoint import extract_backbone, read_backbone, save_backbone
from lambda_det.engine.checkpointer import SafeCheckpointer
from lambda_det.errors import ConfigError, WeightsError
from tests.checkpoint.toy import MEAN, STD, Detector, classifier_checkpoint, scramble

OPTIONS = {"scope": 3}


@pytest.fixture(scope="module")
def checkpoint():
    return classifier_checkpoint(**OPTIONS)


def _wanted(state):
    return {
        name.removeprefix("backbone."): tensor
        for name, tensor in state.items()
        if "linear" not in name and "num_batches_tracked" not in name
    }


@pytest.mark.parametrize("weights", [None, "ema", "model"])
def test_all_tensors_of_the_backbone_and_nothing_else(checkpoint, weights):
    content = extract_backbone(checkpoint, weights=weights, fold_input=False)
    source = checkpoint if weights == "model" else checkpoint["ema"]
    expected = _wanted(source["model"])
    assert content["model"].keys() == expected.keys()
    for name, tensor in content["model"].items():
        assert torch.equal(tensor, expected[name]) and tensor.dtype == torch.float32
        assert tensor.data_ptr() != expected[name].data_ptr() and tensor.is_contiguous()
    assert content["meta"]["weights"] == ("model" if weights == "model" else "ema")
    top1 = 1.0 if weights == "model" else 2.0
    assert content["meta"]["accuracy"] == {"held_out": {"top1": top1, "top5": top1 + 4}}


def test_meta_says_what_a_user_must_know(checkpoint):
    meta = extract_backbone(checkpoint)["meta"]
    assert meta["model"] == "lambda_resnet26" and meta["options"] == {"norm": "BN", "scope": 3}
    assert meta["input_format"] == "BGR" and meta["folded"] is True
    assert meta["pixel_mean"] == [103.53, 116.28, 123.675] and meta["pixel_std"] == [1.0] * 3
    assert meta["recipe"] == "SEED: 3\n" and meta["lambda_det"] == lambda_det.__version__
    meta = extract_backbone(checkpoint, fold_input=False)["meta"]
    assert meta["input_format"] == "RGB" and meta["folded"] is False
    assert meta["pixel_mean"] == MEAN and meta["pixel_std"] == STD


def test_the_raw_weights_where_there_is_no_average():
    checkpoint = classifier_checkpoint(ema=False, **OPTIONS)
    assert extract_backbone(checkpoint)["meta"]["weights"] == "model"
    with pytest.raises(WeightsError, match=r"run\.pth has no 'ema' weights; it has model"):
        extract_backbone(checkpoint, weights="ema", source="run.pth")
    assert extract_backbone(checkpoint)["meta"]["statistics"] == "precise"
    del checkpoint["results"], checkpoint["statistics"]
    assert extract_backbone(checkpoint)["meta"]["accuracy"] == {}
    assert extract_backbone(checkpoint)["meta"]["statistics"] is None


def test_what_is_written_is_read_and_the_same(checkpoint, tmp_path):
    content = extract_backbone(checkpoint)
    save_backbone(content, tmp_path / "new" / "b.pth")
    read = read_backbone(tmp_path / "new" / "b.pth")
    assert read["meta"] == content["meta"]
    assert os.listdir(tmp_path / "new") == ["b.pth"]
    digest = hashlib.sha256()
    for name, tensor in sorted(read["model"].items()):
        digest.update(f"{name} torch.float32 {list(tensor.shape)}\n".encode())
        digest.update(tensor.numpy().tobytes())
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
    with pytest.raises(ConfigError, match=r"ends in \.pth"):
        save_backbone(content, tmp_path / "b.pkl")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written"):
        save_backbone(content, tmp_path / "file" / "b.pth")


@pytest.mark.parametrize("norm", ["BN", "FrozenBN"])
def test_detectron2_s_own_checkpointer_loads_all_of_it(checkpoint, tmp_path, norm):
    save_backbone(extract_backbone(checkpoint), tmp_path / "b.pth")
    network = lambda_det.create_backbone("lambda_resnet26", norm=norm, **OPTIONS)
    detector = nn.ModuleDict({"backbone": FPN(network, ["res4", "res5"], 8)})
    DetectionCheckpointer(detector).load(str(tmp_path / "b.pth"))
    loaded, expected = network.state_dict(), torch.load(tmp_path / "b.pth", weights_only=True)
    for name, tensor in expected["model"].items():
        assert torch.equal(loaded.pop(name), tensor)
    assert all(name.endswith("num_batches_tracked") for name in loaded)


def test_it_is_loaded_without_a_configuration(checkpoint, tmp_path):
    content = extract_backbone(checkpoint)
    save_backbone(content, tmp_path / "b.pth")
    path = tmp_path / "b.pth"
    backbone = lambda_det.create_backbone("lambda_resnet26", weights=path, **OPTIONS)
    for name, tensor in content["model"].items():
        assert torch.equal(backbone.state_dict()[name], tensor)


@pytest.mark.parametrize("change", ["value", "name", "shape", "format", "author"])
def test_a_file_that_is_not_what_was_written(checkpoint, tmp_path, change):
    content = extract_backbone(checkpoint)
    state, words = content["model"], "checksum"
    if change == "value":
        state["res5.1.conv3.norm.running_var"][3] += 1e-6
    elif change == "name":
        state["res5.9.weight"] = state.pop("res5.1.conv3.weight")
    elif change == "shape":
        state["stem.conv1.weight"] = state["stem.conv1.weight"].flatten()
    elif change == "format":
        content["meta"]["format"], words = 2, "format 2"
    else:
        content["__author__"], words = "x", "no backbone file"
    path = str(tmp_path / "b.pth")
    save_backbone(content, path)
    with pytest.raises(WeightsError, match=words):
        read_backbone(path)
    if change == "author":
        return
    with pytest.raises(WeightsError, match=words):
        lambda_det.create_backbone("lambda_resnet26", weights=path, **OPTIONS)
    with pytest.raises(WeightsError, match=words):
        SafeCheckpointer(Detector()).load_initial_weights(path)


def _change(checkpoint, **changes):
    return {**checkpoint, **changes}


def _state(checkpoint, change):
    return _change(checkpoint, model=change(dict(checkpoint["model"])))


def _fresh(state):
    state["backbone.res3.0.conv1.norm.running_mean"] = torch.zeros(128)
    state["backbone.res3.0.conv1.norm.running_var"] = torch.ones(128) - 1e-5
    return state


def _nan(state):
    return {**state, "backbone.res5.0.conv3.weight": torch.full((2048, 512, 1, 1), torch.nan)}


# fmt: off
REFUSED = {
    "distributed": (lambda c: _state(c, lambda s: {f"module.{k}": v for k, v in s.items()}),
                    "wrapper"),
    "compiled": (lambda c: _state(c, lambda s: {f"_orig_mod.{k}": v for k, v in s.items()}),
                 "wrapper"),
    "no statistics": (lambda c: _state(c, lambda s: {k: s[k] for k in s if "_var" not in k}),
                      r"stem\.conv1\.norm\.running_var is missing"),
    "never trained": (lambda c: _state(c, _fresh), r"res3\.0\.conv1\.norm.*never trained"),
    "nan": (lambda c: _state(c, _nan), r"NaN or infinity in res5\.0\.conv3\.weight"),
    "another model": (lambda c: _change(c, recipe={**c["recipe"], "model": "lambda_resnet50"}),
                      "recipe names: .*tensors don't match"),
    "a smaller model": (lambda c: _change(c, recipe={**c["recipe"], "options": {"scope": 5}}),
                        "another shape"),
    "unknown model": (lambda c: _change(c, recipe={**c["recipe"], "model": "resnet51"}),
                      r"cannot be made here: There is no model named 'resnet51'"),
    "unknown option": (lambda c: _change(c, recipe={**c["recipe"], "options": {"depth": 3}}),
                       "cannot be made here"),
    "half a recipe": (lambda c: _change(c, recipe={"model": "resnet50"}), "lacks options"),
    "no recipe": (lambda c: {"model": c["model"]}, "no checkpoint of a classifier"),
    "bare": (lambda c: c["model"], "no 'model' weights"),
    "no tensors": (lambda c: _change(c, model={"a": 1}), "'a' in it is a int"),
    "exported": (lambda c: extract_backbone(c), "is a backbone file already"),
}
# fmt: on


@pytest.mark.parametrize("row", REFUSED)
def test_what_cannot_be_exported(checkpoint, row):
    make, words = REFUSED[row]
    with pytest.raises(WeightsError, match=words) as caught:
        extract_backbone(make({k: v for k, v in checkpoint.items() if k != "ema"}), source="a.pth")
    assert "a.pth" in str(caught.value) and "\n" not in str(caught.value)


def test_types_and_layouts_of_training_are_not_those_of_the_file(checkpoint):
    name, norm = "res2.0.conv2.weight", "res2.0.conv2.norm"
    model = dict(checkpoint["model"])
    layout = {"memory_format": torch.channels_last}
    model[f"backbone.{name}"] = model[f"backbone.{name}"].bfloat16().to(**layout)
    model[f"backbone.{norm}.running_var"] = torch.ones(64)  # beside means that are not 0: trained
    content = extract_backbone({**checkpoint, "model": model}, weights="model")["model"]
    assert content[name].dtype == torch.float32 and content[name].is_contiguous()
    assert torch.equal(content[name], model[f"backbone.{name}"].float())


def test_another_input_format_is_not_folded(checkpoint):
    recipe = {**checkpoint["recipe"], "input_format": "L"}
    with pytest.raises(WeightsError, match="--no-fold"):
        extract_backbone({**checkpoint, "recipe": recipe})


def test_the_backbone_of_a_detector(tmp_path):
    source = Detector()
    content = extract_backbone({"model": source.state_dict(), "trainer": {}})
    expected = source.backbone.bottom_up.state_dict()
    assert len(content["model"]) == 10
    assert all(torch.equal(t, expected[name]) for name, t in content["model"].items())
    meta = content["meta"]
    assert meta["pixel_mean"] is None and meta["input_format"] is None and not meta["folded"]
    save_backbone(content, tmp_path / "b.pth")
    target = Detector()
    SafeCheckpointer(target).load_initial_weights(str(tmp_path / "b.pth"))
    for name, tensor in content["model"].items():
        assert torch.equal(target.backbone.bottom_up.state_dict()[name], tensor)


def test_shared_embeddings_are_kept_under_each_name():
    checkpoint = classifier_checkpoint(share_positions=True, **OPTIONS)
    names = [n for n in extract_backbone(checkpoint)["model"] if n.endswith("embedding")]
    assert len(names) > 1
    model = lambda_det.create_classifier("lambda_resnet26", share_positions=True, **OPTIONS)
    assert len(names) == sum(n.endswith("embedding") for n in scramble(model).state_dict())
