"""Loading weights into a model: each way loads every tensor, or is an error."""

import argparse
import itertools
import pickle
from collections import OrderedDict

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import lambda_det
from lambda_det.detection.task import DetectionTask
from lambda_det.errors import ConfigError, WeightsError
from lambda_det.training.checkpointer import SafeCheckpointer
from lambda_det.weights.loading import load
from lambda_det.weights.provenance import PixelSettings
from lambda_det.weights.public import fetch
from tests.export.toy import Detector, Model, Network, classifier_checkpoint
from tests.weights.public_networks import make
from tests.weights.test_import_detectors import read


def _prefixed(state, prefix):
    return {prefix + name: tensor for name, tensor in state.items()}


def _arrays(state):
    return {name: tensor.numpy() for name, tensor in state.items()}


def _compiled_within(state):
    """Names of a model of which one stage was compiled."""
    return {name.replace("res2.", "res2._orig_mod."): tensor for name, tensor in state.items()}


_AVERAGED = {"n_averaged": torch.tensor(3)}  # as PyTorch's AveragedModel counts


def _caffe2(state, statistics=True):
    """The names that Detectron's first version gave these tensors."""
    renamed = {
        "stem.conv1.weight": "conv1_w",
        "stem.conv1.norm.weight": "res_conv1_bn_s",
        "stem.conv1.norm.bias": "res_conv1_bn_b",
        "stem.conv1.norm.running_mean": "res_conv1_bn_rm",
        "stem.conv1.norm.running_var": "res_conv1_bn_riv",
        "res2.0.conv1.weight": "res2_0_branch2a_w",
        "res2.0.conv1.norm.weight": "res2_0_branch2a_bn_s",
        "res2.0.conv1.norm.bias": "res2_0_branch2a_bn_b",
        "res2.0.conv1.norm.running_mean": "res2_0_branch2a_bn_rm",
        "res2.0.conv1.norm.running_var": "res2_0_branch2a_bn_riv",
    }
    return {
        new: state[name].numpy()
        for name, new in renamed.items()
        if statistics or "running" not in name
    }


def _without(state, *words):
    return {name: t for name, t in state.items() if not any(word in name for word in words)}


def _half(state):
    return {name: tensor.half() for name, tensor in state.items()}


_OF_ARRAYS = {"__author__": "x", "matching_heuristics": True}
# What is written of the state of a network, and how the file is called. All of it must arrive.
LOADS = {
    "bare": (lambda s: s, "w.pth"),
    "query": (lambda s: {"model": s}, "w.pth?matching_heuristics=True"),
    "pkl": (lambda s: {"model": _arrays(s), **_OF_ARRAYS}, "w.pkl"),
    "pkl flat": (_arrays, "w.pkl"),
    "pkl of Caffe2 by name": (
        lambda s: {"model": _arrays(s), **_OF_ARRAYS, "__author__": "Caffe2"},
        "w.pkl",
    ),
    "Caffe2": (_caffe2, "w.pkl"),
    "blobs of Caffe2": (lambda s: {"blobs": {**_caffe2(s), "conv1_w_momentum": None}}, "w.pkl"),
    "averaged": (lambda s: {"module." + k: t for k, t in s.items()} | _AVERAGED, "w.pth"),
    "distributed, compiled": (
        lambda s: _prefixed(_compiled_within(s), "module._orig_mod.module.backbone.bottom_up."),
        "w.pth",
    ),
    "float16": (lambda s: {"model": _half(s)}, "w.pth"),
    "pth.tar": (lambda s: {"model": s}, "w.pth.tar"),
    "pycls": (lambda s: {"model_state": s}, "w.pyth"),
    "without counters": (lambda s: {"model": _without(s, "tracked")}, "w.pth"),
}
STEM, WIDE = "stem.conv1.weight", torch.ones(4, 5, 3, 3)
# Likewise, and what is said of it
FAILS = {
    "no statistics": (
        lambda s: {"model": _without(s, "running"), "matching_heuristics": True},
        "w.pth",
        r"4 of its 10 .*stem\.conv1\.norm\.running_mean",
    ),
    "Caffe2 without statistics": (lambda s: _caffe2(s, statistics=False), "w.pkl", "4 of its 10"),
    "timm": (lambda s: {"epoch": 3, "arch": "resnet50", "state_dict": s}, "w.pth", "'epoch'"),
    "namespace": (
        lambda s: {"model": s, "args": argparse.Namespace(a=1)},
        "w.pth",
        r"w\.pth",
    ),
    "safetensors": (lambda s: b"\x40\0\0\0\0\0\0\0{}", "w.safetensors", r"w\.safetensors"),
    "another wrapper": (lambda s: _prefixed(s, "encoder.q."), "w.pth", STEM),
    "twice": (lambda s: {**s, **_prefixed(s, "module.")}, "w.pth", f"{STEM} and module.{STEM}"),
    "another option": (lambda s: s, "w.pth?heuristics=True", "options heuristics=True"),
    "no state dict": (lambda s: {"model": [1]}, "w.pth", r"list.*\"model\""),
    "deeper": (lambda s: Network(blocks=2).state_dict(), "w.pth", r"5 .*res2\.1\.conv1\.weight"),
    "wider": (lambda s: {**s, "res2.0.conv1.weight": WIDE}, "w.pth", r"\[4, 5, 3.*\[4, 4, 3"),
}


def _with_norms(rows):
    """Each row with one of the norms in turn."""
    return list(zip(rows, itertools.cycle(["BN", "FrozenBN"])))


def _write(content, path):
    path = path.split("?")[0]
    if isinstance(content, bytes):
        with open(path, "wb") as file:
            file.write(content)
    elif path.endswith(".pkl"):
        with open(path, "wb") as file:
            pickle.dump(content, file)
    else:
        torch.save(content, path)


def _copy(state):
    return {name: tensor.clone() for name, tensor in state.items()}


def _assert_same(state, expected, half=False):
    for name, tensor in expected.items():
        if not name.endswith("num_batches_tracked"):
            wanted = tensor.half().float() if half else tensor
            assert torch.equal(state[name], wanted), name


@pytest.mark.parametrize(("row", "norm"), _with_norms(LOADS))
def test_every_tensor_of_a_detector_s_backbone_is_loaded(tmp_path, row, norm):
    make, name = LOADS[row]
    source, target = Network(), Detector(norm)
    path = str(tmp_path / name)
    _write(make(source.state_dict()), path)
    heads = target.roi_heads["box_predictor"]["cls_score"].weight.clone()
    load(target, path)
    _assert_same(target.backbone.bottom_up.state_dict(), source.state_dict(), row == "float16")
    assert torch.equal(target.roi_heads["box_predictor"]["cls_score"].weight, heads)


@pytest.mark.parametrize(("row", "norm"), _with_norms(FAILS))
def test_what_does_not_load_is_an_error_and_changes_nothing(tmp_path, row, norm):
    make, name, words = FAILS[row]
    target = Detector(norm)
    before = _copy(target.state_dict())
    path = str(tmp_path / name)
    _write(make(Network().state_dict()), path)
    with pytest.raises(WeightsError, match=words) as caught:
        load(target, path)
    assert path in str(caught.value) and "\n" not in str(caught.value)
    _assert_same(target.state_dict(), before)


def test_two_backbones_in_the_model():
    """Their own names leave no doubt, and both have to be there."""
    source, target = (nn.ModuleDict({x: Detector() for x in ("one", "two")}) for _ in range(2))
    before, state = _copy(target.state_dict()), source.state_dict()
    for content, words in (
        ({"model": Network().state_dict(), "matching_heuristics": True}, r"w\.pth is ambiguous"),
        ({"model": Network().state_dict()}, r"w\.pth"),
        ({"model": _without(state, "two")}, r"two\.backbone\.bottom_up"),
    ):
        with pytest.raises(WeightsError, match=words):
            load(target, "w.pth", content)
        _assert_same(target.state_dict(), before)
    load(target, "w.pth", {"model": state})
    _assert_same(target.state_dict(), state)


def test_a_detector_s_other_parts_come_along(caplog):
    """Also those that are found by the ends of their names."""
    caplog.set_level("INFO")
    source, target = Detector(), Detector()
    state = {name.removeprefix("roi_heads."): t for name, t in source.state_dict().items()}
    state = _prefixed(state, "module._orig_mod.")
    load(target, "w.pth", {"model": state, "matching_heuristics": True})
    _assert_same(target.state_dict(), source.state_dict())
    assert "unused in the file: none" in caplog.text


def test_averaged_weights_of_a_classifier_are_preferred(tmp_path, caplog):
    raw, average, path = Model(), Model(), str(tmp_path / "w.pth")
    ema = {"model": average.state_dict(), "updates": 3}
    torch.save({"model": raw.state_dict(), "ema": ema}, path)
    expected = _without(average.backbone.state_dict(), "linear")
    detector, network, same = Detector(), Network(), Model()
    with caplog.at_level("INFO"):
        load(detector, path)
    assert f"EMA) weights of {path}" in caplog.text
    _assert_same(detector.backbone.bottom_up.state_dict(), expected)
    load(network, path)
    _assert_same(network.state_dict(), expected)
    # what is evaluated or resumed is the model itself
    SafeCheckpointer(same).load(path)
    _assert_same(same.state_dict(), raw.state_dict())


def test_a_classifier_starts_from_another_with_or_without_its_last_layer():
    source, same, other = Model(), Model(), Model(classes=7)
    load(same, "w.pth", {"model": source.state_dict()})
    _assert_same(same.state_dict(), source.state_dict())
    before = other.backbone.linear.weight.clone()
    load(other, "w.pth", {"model": source.state_dict()})
    _assert_same(other.state_dict(), _without(source.state_dict(), "linear"))
    load(other, "w.pth", {"model": Network().state_dict()})
    assert torch.equal(other.backbone.linear.weight, before)


def test_module_versions_are_kept(tmp_path):
    """Some modules of Detectron2 convert old state dicts by them."""
    seen = []
    target = nn.ModuleDict({"head": nn.Linear(1, 1)})
    target["head"].register_load_state_dict_pre_hook(
        lambda module, state, prefix, metadata, *rest: seen.append(metadata.get("version"))
    )
    state = OrderedDict(_prefixed(target.state_dict(), "module."))
    state._metadata = OrderedDict({"": {}, "module": {}, "module.head": {"version": 2}})
    torch.save({"model": state}, tmp_path / "w.pth")
    SafeCheckpointer(target).load(str(tmp_path / "w.pth"))
    assert seen == [2]


PIXELS = PixelSettings("BGR", [103.53, 116.28, 123.675], [1.0, 1.0, 1.0])
IMAGENET = ([123.675, 116.28, 103.53], [58.395, 57.12, 57.375])


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ({"input_format": "RGB"}, ["INPUT.FORMAT RGB (now BGR)"]),
        ({"pixel_mean": [103.53, 116.28, 120.0]}, ["MODEL.PIXEL_MEAN [103.53, 116.28, 120.0]"]),
        ({"pixel_mean": [103.53], "pixel_std": [1.0]}, ["PIXEL_MEAN [103.53]", "PIXEL_STD [1.0]"]),
        ({"pixel_mean": [103.530001, 116.28, 123.675]}, None),
        ({"pixel_mean": None}, None),
    ],
)
def test_weights_for_other_images_are_refused(about, words):
    key = "meta" if "input_format" in about else "recipe"
    settings = {"input_format": "BGR", "pixel_mean": PIXELS.mean, "pixel_std": PIXELS.std}
    content = {"model": Network().state_dict(), key: {**settings, **about}}
    target = Detector()
    before = _copy(target.state_dict())
    if words is None:
        load(target, "w.pth", content, pixels=PIXELS)
        return
    with pytest.raises(ConfigError) as caught:
        load(target, "w.pth", content, pixels=PIXELS)
    assert all(word in str(caught.value) for word in [*words, "w.pth"])
    _assert_same(target.state_dict(), before)


@pytest.mark.parametrize("pixels", [PIXELS, PixelSettings("RGB", *IMAGENET)])
def test_weights_that_record_no_pixel_settings_get_a_warning(caplog, pixels):
    """With the file, the keys and values in use, and ImageNet's where they are others."""
    content = {"model": Network().state_dict(), "meta": {"epoch": 3}}  # of another project
    load(Detector(), "own.pth", content, pixels=pixels)
    (warning,) = (record.message for record in caplog.records if record.levelname == "WARNING")
    assert "own.pth" in warning and str(pixels) in warning
    others = ["INPUT.FORMAT RGB (now BGR)", f"MODEL.PIXEL_STD {IMAGENET[1]} (now [1.0, 1.0, 1.0])"]
    assert all((word in warning) is (pixels is PIXELS) for word in others)
    caplog.clear()
    load(Detector(), "own.pth", content)  # a backbone without a configuration
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize("about", [{"meta": "a note"}, {"recipe": None}])
def test_what_is_said_in_another_form_is_left_alone(about):
    load(Detector(), "w.pth", {"model": Network().state_dict(), **about}, pixels=PIXELS)


@pytest.mark.parametrize("complete", [False, True])
def test_different_weights_for_one_shared_tensor_are_refused(complete):
    own = lambda_det.create_backbone("lambda_resnet26_slim", scope=3)
    model = lambda_det.create_backbone("lambda_resnet26_slim", scope=3, share_positions="stage")
    before = model.res5[0].conv2.position.embedding.clone()
    with pytest.raises(WeightsError, match=r"own\.pth.*res\d\.0\S+embedding.*share_positions"):
        load(model, "own.pth", {"model": own.state_dict()}, complete=complete)
    assert torch.equal(model.res5[0].conv2.position.embedding, before)
    model.res5[0].conv2.position.embedding.data[0] = torch.nan  # of a run that diverged
    load(model, "own.pth", {"model": model.state_dict()}, complete=complete)


@pytest.mark.parametrize("complete", [False, True])
def test_classifiers_of_other_lambda_layers_with_the_same_tensors_are_refused(complete):
    content = classifier_checkpoint(key_norm="l2", scope=3)
    other, same = (
        lambda_det.create_classifier("lambda_resnet26_slim", 3, scope=3, **options)
        for options in ({}, {"key_norm": "l2"})
    )
    with pytest.raises(WeightsError, match=r"w\.pth.*key_norm 'l2'.*'softmax'"):
        load(other, "w.pth", content, complete=complete)
    load(same, "w.pth", content, complete=complete)


def test_other_parts_of_another_shape_are_refused_and_do_not_start_afresh(caplog):
    """Only layers made for other classes do; the log names them, and what is left."""
    target, state = Detector(), Detector(classes=5).state_dict()
    before = _copy(target.state_dict())
    changed = {**state, "backbone.fpn_output2.weight": torch.ones(5, 4, 3, 3)}
    with pytest.raises(WeightsError, match=r"w\.pth.*fpn_output2\.weight.*\[5, 4, 3, 3\]"):
        load(target, "w.pth", {"model": changed})
    _assert_same(target.state_dict(), before)
    caplog.set_level("INFO")
    assert load(target, "w.pth", {"model": {**state, "extra.weight": torch.ones(1)}}) is None
    layer = "roi_heads.box_predictor.cls_score"
    classes = f"{layer}.weight, {layer}.bias"
    assert f"afresh: {classes}; unused in the file: {classes}, extra.weight;" in caplog.text


# ------------------------------------------------------ files with the names of timm, torchvision


def _finetuned(name, *pairs):
    """The task of a recipe for own data with another network."""
    return DetectionTask(read("mask_rcnn_resnetrs50_se", "MODEL.LAMBDA_RESNET.NAME", name, *pairs))


RGB = ("INPUT.FORMAT", "RGB", "MODEL.PIXEL_MEAN", "[123.675, 116.28, 103.53]")
STD = ("MODEL.PIXEL_STD", "[58.395, 57.12, 57.375]")


@pytest.mark.parametrize(
    ("theirs", "ours", "file", "pairs"),
    [
        ("mobilenetv2_100.ra_in1k", "mobilenet_v2", "w.safetensors", RGB),
        ("mobilenetv2_100.ra_in1k", "mobilenet_v2", "url", STD),
        ("mobilenetv2_100.ra_in1k", "mobilenet_v2", "w.pth", ()),
        pytest.param("resnet50.a1_in1k", "resnet50", "url", RGB + STD, marks=pytest.mark.slow),
    ],
)
@torch.no_grad()
def test_a_detector_starts_with_the_features_of_their_network(
    theirs, ours, file, pairs, tmp_path, monkeypatch
):
    network = make("timm", theirs.partition(".")[0])
    path = str(tmp_path / file)
    if file == "url":
        path = f"timm://{theirs}"
        monkeypatch.setenv("FVCORE_CACHE", str(tmp_path / "cache"))
        place = fetch(path).place  # of a download
        place.parent.mkdir(parents=True)
        save_file(network.state_dict(), place)
    else:
        (save_file if file.endswith("safetensors") else torch.save)(network.state_dict(), path)
    task = _finetuned(ours, *pairs)
    model = task.build_model()
    load(model, path, pixels=task.pixels)
    model.double().eval()
    pixels = np.random.default_rng(0).integers(0, 256, (3, 64, 96))  # RGB
    order = 1 if pairs[:2] == RGB[:2] else -1
    batch = [{"image": torch.from_numpy(pixels[::order].copy())}]
    found = model.backbone.bottom_up(model.preprocess_image(batch).tensor)["res5"]
    mean, std = [torch.tensor(v).view(3, 1, 1).double() for v in IMAGENET]
    expected = network.double().forward_features(((torch.from_numpy(pixels) - mean) / std)[None])
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
