"""Loading weights into a model: each way loads every tensor, or is an error."""

import argparse
import itertools
import pickle
from collections import OrderedDict

import numpy as np
import pytest
import torch
from detectron2.config import get_cfg
from detectron2.modeling import Backbone
from safetensors.torch import save_file
from torch import nn
from torch.optim.swa_utils import AveragedModel

import lambda_det
from lambda_det.config import add_lambda_config
from lambda_det.detection.task import DetectionTask
from lambda_det.errors import ConfigError, WeightsError
from lambda_det.training.checkpointer import SafeCheckpointer
from lambda_det.weights.loading import load
from lambda_det.weights.provenance import PixelSettings
from lambda_det.weights.public import fetch
from tests.export.toy import Detector, Model, Network, classifier_checkpoint
from tests.weights.public_networks import make


def _prefixed(state, prefix):
    return {prefix + name: tensor for name, tensor in state.items()}


def _arrays(state):
    return {name: tensor.numpy() for name, tensor in state.items()}


def _compiled_within(state):
    """Names of a model of which one stage was compiled."""
    return {name.replace("res2.", "res2._orig_mod."): tensor for name, tensor in state.items()}


def _averaged(network):
    return AveragedModel(network).state_dict()


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


def _ema_of(model, average):
    return {"model": model.state_dict(), "ema": {"model": average.state_dict(), "updates": 3}}


# What is written, and how the file is called; n is a network. All of it must arrive.
# fmt: off
LOADS = {
    "model": (lambda n: {"model": n.state_dict()}, "w.pth"),
    "bare": (lambda n: n.state_dict(), "w.pth"),
    "query": (lambda n: {"model": n.state_dict()}, "w.pth?matching_heuristics=True"),
    "heuristics": (lambda n: {"model": n.state_dict(), "matching_heuristics": True}, "w.pth"),
    "pkl": (lambda n: {"model": _arrays(n.state_dict()), "__author__": "x",
                       "matching_heuristics": True}, "w.pkl"),
    "pkl without heuristics": (lambda n: {"model": _arrays(n.state_dict()), "__author__": "x"},
                               "w.pkl"),
    "pkl flat": (lambda n: _arrays(n.state_dict()), "w.pkl"),
    "pkl of Caffe2 by name": (lambda n: {"model": _arrays(n.state_dict()), "__author__": "Caffe2",
                                         "matching_heuristics": True}, "w.pkl"),
    "pkl without author": (lambda n: {"model": _arrays(n.state_dict())}, "w.pkl"),
    "Caffe2": (lambda n: _caffe2(n.state_dict()), "w.pkl"),
    "blobs of Caffe2": (lambda n: {"blobs": {**_caffe2(n.state_dict()), "conv1_w_momentum": None}},
                        "w.pkl"),
    "classifier": (lambda n: {"model": _prefixed(n.state_dict(), "backbone."),
                              "matching_heuristics": True}, "w.pth"),
    "detector": (lambda n: {"model": _prefixed(n.state_dict(), "backbone.bottom_up.")}, "w.pth"),
    "compiled": (lambda n: {"model": _prefixed(n.state_dict(), "_orig_mod.")}, "w.pth"),
    "compiled classifier": (lambda n: {"model": _prefixed(n.state_dict(), "_orig_mod.backbone.")},
                            "w.pth"),
    "compiled backbone": (lambda n: {"model": _prefixed(n.state_dict(), "backbone._orig_mod.")},
                          "w.pth"),
    "compiled stage": (lambda n: {"model": _compiled_within(n.state_dict())}, "w.pth"),
    "averaged": (lambda n: _averaged(n), "w.pth"),
    "averaged classifier": (lambda n: {"model": _prefixed(_without(_averaged(n), "n_averaged"),
                            "module.backbone."), "n_averaged": 3}, "w.pth"),
    "distributed": (lambda n: {"model": _prefixed(n.state_dict(), "module.")}, "w.pth"),
    "distributed, heuristics": (lambda n: {"model": _prefixed(n.state_dict(), "module."),
                                           "matching_heuristics": True}, "w.pth"),
    "distributed, compiled": (lambda n: {"model": _prefixed(
        n.state_dict(), "module._orig_mod.module.backbone.bottom_up.")}, "w.pth"),
    "float16": (lambda n: {"model": {k: v.half() for k, v in n.state_dict().items()}}, "w.pth"),
    "pth.tar": (lambda n: {"model": n.state_dict()}, "w.pth.tar"),
    "pycls": (lambda n: {"model_state": n.state_dict()}, "w.pyth"),
    "without counters": (lambda n: {"model": _without(n.state_dict(), "tracked")}, "w.pth"),
}
FAILS = {
    "no statistics": (lambda n: {"model": _without(n.state_dict(), "running")}, "w.pth",
                      r"4 of its 10 .*stem\.conv1\.norm\.running_mean"),
    "no statistics, heuristics": (lambda n: {"model": _without(n.state_dict(), "running"),
                                             "matching_heuristics": True}, "w.pth", "running_mean"),
    "one kind of statistic": (lambda n: {"model": _without(n.state_dict(), "norm.running_var")},
                      "w.pth", "2 of its 10 .*running_var"),
    "Caffe2 without statistics": (lambda n: _caffe2(n.state_dict(), statistics=False), "w.pkl",
                                  "4 of its 10"),
    "timm": (lambda n: {"epoch": 3, "arch": "resnet50", "state_dict": n.state_dict()}, "w.pth",
             "'epoch'"),
    "namespace": (lambda n: {"model": n.state_dict(), "args": argparse.Namespace(a=1)}, "w.pth",
                  r"w\.pth"),
    "safetensors": (lambda n: b"\x40\0\0\0\0\0\0\0{}", "w.safetensors", r"w\.safetensors"),
    "another wrapper": (lambda n: {"model": _prefixed(n.state_dict(), "encoder.q.")}, "w.pth",
                        "stem.conv1.weight"),
    "twice": (lambda n: {"model": {**n.state_dict(), **_prefixed(n.state_dict(), "module.")}},
              "w.pth", r"stem\.conv1\.weight and module\.stem\.conv1\.weight"),
    "another option": (lambda n: n.state_dict(), "w.pth?heuristics=True", "options heuristics"),
    "no state dict": (lambda n: {"model": [1]}, "w.pth", r"list.*\"model\""),
    "deeper": (lambda n: {"model": Network(blocks=2).state_dict()}, "w.pth",
               r"5 .*res2\.1\.conv1\.weight"),
    "wider": (lambda n: {**n.state_dict(), "res2.0.conv1.weight": torch.ones(4, 5, 3, 3)}, "w.pth",
              r"weight.*\[4, 5, 3, 3\].*\[4, 4, 3, 3\]"),
}
# fmt: on


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
    _write(make(source), path)
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
    _write(make(Network()), path)
    with pytest.raises(WeightsError, match=words) as caught:
        load(target, path)
    assert path in str(caught.value) and "\n" not in str(caught.value)
    _assert_same(target.state_dict(), before)


@pytest.mark.parametrize("heuristics", [True, False])
def test_two_backbones_in_the_model(tmp_path, heuristics):
    target = nn.ModuleDict({"student": Detector(), "teacher": Detector()})
    before = _copy(target.state_dict())
    content = {"model": Network().state_dict(), "matching_heuristics": heuristics}
    torch.save(content, tmp_path / "w.pth")
    words = r"w\.pth"
    with pytest.raises(WeightsError, match=words):
        load(target, str(tmp_path / "w.pth"))
    _assert_same(target.state_dict(), before)
    # their own names leave no doubt, and both have to be there
    source = nn.ModuleDict({"student": Detector(), "teacher": Detector()})
    torch.save({"model": source.state_dict()}, tmp_path / "w.pth")
    load(target, str(tmp_path / "w.pth"))
    _assert_same(target.state_dict(), source.state_dict())
    torch.save({"model": _without(source.state_dict(), "teacher")}, tmp_path / "w.pth")
    with pytest.raises(WeightsError, match=r"teacher\.backbone\.bottom_up"):
        load(target, str(tmp_path / "w.pth"))


def test_a_detector_s_other_parts_come_along(tmp_path):
    source, target = Detector(classes=2), Detector(classes=2)
    torch.save({"model": _prefixed(source.state_dict(), "module._orig_mod.")}, tmp_path / "w.pth")
    load(target, str(tmp_path / "w.pth"))
    _assert_same(target.state_dict(), source.state_dict())


def test_stages_that_a_detector_has_in_its_heads(tmp_path):
    class C4(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = Network()
            self.roi_heads = nn.ModuleDict({"res5": nn.Conv2d(4, 4, 1)})

    source, target = Network(), C4()
    source.res5 = nn.Conv2d(4, 4, 1)
    content = {"model": source.state_dict(), "matching_heuristics": True}
    torch.save(content, tmp_path / "w.pth")
    load(target, str(tmp_path / "w.pth"))
    _assert_same(target.backbone.state_dict(), _without(source.state_dict(), "res5"))
    assert torch.equal(target.roi_heads["res5"].weight, source.res5.weight)


def test_averaged_weights_of_a_classifier_are_preferred_and_named(tmp_path, caplog):
    raw, average, target = Model(), Model(), Detector()
    path = str(tmp_path / "w.pth")
    torch.save(_ema_of(raw, average), path)
    with caplog.at_level("INFO"):
        load(target, path)
    assert "EMA" in caplog.text and path in caplog.text
    expected = _without(average.backbone.state_dict(), "linear")
    _assert_same(target.backbone.bottom_up.state_dict(), expected)
    target = Network()
    load(target, path)
    _assert_same(target.state_dict(), expected)
    # what is evaluated or resumed is the model itself
    same = Model()
    SafeCheckpointer(same).load(path, [])
    _assert_same(same.state_dict(), raw.state_dict())


def test_a_classifier_starts_from_another_with_or_without_its_last_layer(tmp_path):
    source, same, other = Model(), Model(), Model(classes=7)
    torch.save({"model": source.state_dict()}, tmp_path / "w.pth")
    load(same, str(tmp_path / "w.pth"))
    _assert_same(same.state_dict(), source.state_dict())
    before = other.backbone.linear.weight.clone()
    load(other, str(tmp_path / "w.pth"))
    _assert_same(other.state_dict(), _without(source.state_dict(), "linear"))
    assert torch.equal(other.backbone.linear.weight, before)
    torch.save({"model": Network().state_dict()}, tmp_path / "w.pth")
    load(other, str(tmp_path / "w.pth"))


def test_module_versions_are_kept(tmp_path):
    class Versioned(Backbone):
        _version = 2
        seen = None

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x):
            raise NotImplementedError

        def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
            self.seen = local_metadata.get("version")
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    source, target = nn.ModuleDict({"head": Versioned()}), nn.ModuleDict({"head": Versioned()})
    state = source.state_dict()
    torch.save({"model": state}, tmp_path / "w.pth")
    SafeCheckpointer(target).load(str(tmp_path / "w.pth"), [])
    assert target["head"].seen == 2
    wrapped = OrderedDict(_prefixed(state, "module."))
    wrapped._metadata = OrderedDict({"": {}, "module": {}, "module.head": {"version": 2}})
    target["head"].seen = None
    torch.save({"model": wrapped}, tmp_path / "w.pth")
    SafeCheckpointer(target).load(str(tmp_path / "w.pth"), [])
    assert target["head"].seen == 2


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
def test_weights_for_other_images_are_refused(tmp_path, about, words):
    key = "meta" if "input_format" in about else "recipe"
    settings = {"input_format": "BGR", "pixel_mean": PIXELS.mean, "pixel_std": PIXELS.std}
    content = {"model": Network().state_dict(), key: {**settings, **about}}
    torch.save(content, tmp_path / "w.pth")
    target = Detector()
    before = _copy(target.state_dict())
    if words is None:
        load(target, str(tmp_path / "w.pth"), pixels=PIXELS)
        _assert_same(target.backbone.bottom_up.state_dict(), content["model"])
        return
    with pytest.raises(ConfigError) as caught:
        load(target, str(tmp_path / "w.pth"), pixels=PIXELS)
    assert all(word in str(caught.value) for word in [*words, "w.pth"])
    _assert_same(target.state_dict(), before)


@pytest.mark.parametrize("pixels", [PIXELS, PixelSettings("RGB", *IMAGENET)])
def test_weights_that_record_no_pixel_settings_get_a_warning(tmp_path, caplog, pixels):
    """With the file, the keys and values in use, and ImageNet's where they are others."""
    target = Detector()
    torch.save({"model": Network().state_dict()}, tmp_path / "own.pth")
    load(target, tmp_path / "own.pth", pixels=pixels)
    (warning,) = (record.message for record in caplog.records if record.levelname == "WARNING")
    in_use = [str(tmp_path / "own.pth"), *(f"{k} {v}" for k, v in pixels.by_key().items())]
    assert all(word in warning for word in in_use)
    others = ["INPUT.FORMAT RGB (now BGR)", f"MODEL.PIXEL_STD {IMAGENET[1]} (now [1.0, 1.0, 1.0])"]
    assert all((word in warning) is (pixels is PIXELS) for word in others)
    caplog.clear()
    load(target, tmp_path / "own.pth", complete=False)  # a backbone without a configuration
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize("back", [False, True])
@torch.no_grad()
def test_weights_for_another_std_or_order_are_folded(tmp_path, caplog, back):
    """A file of the user's own starts a model of other pixel settings with the same features."""
    mean, std = IMAGENET
    theirs, ours = PixelSettings("RGB", mean, std), PIXELS
    if back:
        theirs, ours = ours, theirs
    network = lambda_det.create_backbone("lambda_resnet26_slim", scope=3).eval()
    content = {"model": network.state_dict(), "meta": theirs.as_meta()}
    torch.save(content, tmp_path / "w.pth")
    target = Detector().eval()
    target.backbone.bottom_up = lambda_det.create_backbone("lambda_resnet26_slim", scope=3).eval()
    with caplog.at_level("INFO"):
        load(target, str(tmp_path / "w.pth"), pixels=ours)
    assert "Folded into the first convolution" in caplog.text
    rgb = torch.randint(0, 256, (1, 3, 32, 32)).double()

    def features(backbone, pixels):
        image = rgb if pixels.format == "RGB" else rgb.flip(1)
        mean, std = (torch.tensor(v).view(3, 1, 1).double() for v in (pixels.mean, pixels.std))
        return backbone.double()((image - mean) / std)["res5"]

    expected = features(network, theirs)
    assert _near(features(target.backbone.bottom_up, ours), expected)
    assert not _near(features(network, ours), expected)  # the difference counts


def _near(found, expected):
    return (found - expected).abs().max() < 1e-5 * expected.abs().max()


def test_meta_of_another_project_is_left_alone(tmp_path):
    for content in ({"meta": {"epoch": 3}}, {"meta": "a note"}, {"recipe": None}):
        torch.save({"model": Network().state_dict(), **content}, tmp_path / "w.pth")
        load(Detector(), str(tmp_path / "w.pth"), pixels=PIXELS)


@pytest.mark.parametrize("complete", [False, True])
def test_different_weights_for_one_shared_tensor_are_refused(tmp_path, complete):
    path = tmp_path / "own.pth"
    own = lambda_det.create_backbone("lambda_resnet26_slim", scope=3)
    torch.save({"model": own.state_dict()}, path)
    model = lambda_det.create_backbone("lambda_resnet26_slim", scope=3, share_positions="stage")
    before = model.res5[0].conv2.position.embedding.clone()
    with pytest.raises(WeightsError, match=r"own\.pth.*res\d\.0\S+embedding.*share_positions"):
        load(model, path, complete=complete)
    assert torch.equal(model.res5[0].conv2.position.embedding, before)
    torch.save({"model": model.state_dict()}, path)
    load(model, path, complete=complete)


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


@pytest.mark.parametrize("norm", ["BN", "FrozenBN"])
def test_other_parts_of_another_shape_are_refused_and_do_not_start_afresh(tmp_path, norm):
    """Only layers made for other classes do."""
    state = Detector(classes=5).state_dict()
    target = Detector(norm)
    before = _copy(target.state_dict())
    changed = {**state, "backbone.fpn_output2.weight": torch.ones(5, 4, 3, 3)}
    torch.save({"model": changed}, tmp_path / "w.pth")
    with pytest.raises(WeightsError, match=r"w\.pth.*fpn_output2\.weight.*\[5, 4, 3, 3\]"):
        load(target, tmp_path / "w.pth")
    _assert_same(target.state_dict(), before)
    torch.save({"model": state}, tmp_path / "w.pth")
    report = load(target, tmp_path / "w.pth")
    assert {name.rpartition(".")[0] for name in report.afresh} == {
        "roi_heads.box_predictor.cls_score"
    }


def test_the_report_says_what_became_of_every_tensor(tmp_path):
    content = {"model": {**Network().state_dict(), "extra.weight": torch.ones(1)}}
    torch.save(content, tmp_path / "w.pth")
    report = load(Detector(), tmp_path / "w.pth")
    assert report.unused == ("extra.weight",) and report.pixels is None
    assert "roi_heads.box_predictor.cls_score.weight" in report.afresh
    assert str(report.wanted - len(report.afresh)) in str(report)


# ------------------------------------------------------ files with the names of timm, torchvision


def _finetuned(name, *pairs):
    """The task of a recipe for own data with another network."""
    cfg = get_cfg()
    add_lambda_config(cfg)
    cfg.merge_from_file("configs/finetune/mask_rcnn_resnetrs50_se.yaml")
    pairs = ["MODEL.DEVICE", "cpu", "MODEL.LAMBDA_RESNET.NAME", name, *pairs]
    cfg.merge_from_list(pairs)
    return DetectionTask(cfg)


def _placed(url, network, tmp_path, monkeypatch):
    """The file of ``url`` where a download would be."""
    monkeypatch.setenv("FVCORE_CACHE", str(tmp_path / "cache"))
    place = fetch(url).place
    place.parent.mkdir(parents=True)
    save_file(network.state_dict(), place)


RGB = ("INPUT.FORMAT", "RGB", "MODEL.PIXEL_MEAN", "[123.675, 116.28, 103.53]")
STD = ("MODEL.PIXEL_STD", "[58.395, 57.12, 57.375]")


@pytest.mark.parametrize(
    ("theirs", "ours", "file", "pairs"),
    [
        ("mobilenetv2_100.ra_in1k", "mobilenet_v2", "w.safetensors", (*RGB, *STD)),
        ("mobilenetv2_100.ra_in1k", "mobilenet_v2", "url", RGB),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (
                ("mobilenetv2_100.ra_in1k", "mobilenet_v2", "w.pth", ()),
                ("resnet50.a1_in1k", "resnet50", "url", STD),
            )
        ),
    ],
)
@torch.no_grad()
def test_a_detector_starts_with_the_features_of_their_network(
    theirs, ours, file, pairs, tmp_path, monkeypatch, caplog
):
    network = make("timm", theirs.partition(".")[0])
    path = str(tmp_path / file)
    if file == "url":
        path = f"timm://{theirs}"
        _placed(path, network, tmp_path, monkeypatch)
    else:
        (save_file if file.endswith("safetensors") else torch.save)(network.state_dict(), path)
    task = _finetuned(ours, *pairs)
    model = task.build_model()
    with caplog.at_level("INFO"):
        load(model, path, pixels=task.pixels)
    if file == "url":
        assert "apache-2.0" in caplog.text
    model.double().eval()
    pixels = np.random.default_rng(0).integers(0, 256, (3, 64, 96))  # RGB
    order = 1 if pairs[:2] == RGB[:2] else -1
    batch = [{"image": torch.from_numpy(pixels[::order].copy())}]
    found = model.backbone.bottom_up(model.preprocess_image(batch).tensor)["res5"]
    mean, std = [torch.tensor(v).view(3, 1, 1).double() for v in IMAGENET]
    expected = network.double().forward_features(((torch.from_numpy(pixels) - mean) / std)[None])
    assert _near(found, expected)


@pytest.fixture(scope="module")
def mobilenet():
    return make("timm", "mobilenetv2_100", num_classes=7)


@pytest.mark.slow
@torch.no_grad()
def test_a_classifier_starts_from_their_network_and_its_last_layer(mobilenet, tmp_path):
    torch.save(mobilenet.state_dict(), tmp_path / "w.pth")
    classifier = lambda_det.create_classifier("mobilenet_v2", 7).eval()
    pixels = PixelSettings("RGB", *IMAGENET)
    load(classifier, str(tmp_path / "w.pth"), pixels=pixels)
    image = torch.randn(1, 3, 64, 64)
    expected = mobilenet(image)
    assert (classifier(image) - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.slow
def test_weights_for_other_classes_say_so(mobilenet, tmp_path, caplog):
    torch.save(mobilenet.state_dict(), tmp_path / "w.pth")
    classifier = lambda_det.create_classifier("mobilenet_v2", 3)
    load(classifier, str(tmp_path / "w.pth"))
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "w.pth is for 7 classes" in warning and "3" in warning
    caplog.clear()
    caplog.set_level("INFO")
    lambda_det.create_backbone("mobilenet_v2", weights=tmp_path / "w.pth")
    assert any("w.pth is for 7 classes" in r.getMessage() for r in caplog.records)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("theirs", "ours", "pairs", "words"),
    [
        ("mobilenetv2_100", "resnet_rs50_se", (), "mobilenet_v2"),
        ("lambda_resnet26t", "lambda_resnet26t", ("MODEL.LAMBDA_RESNET.SCOPE", 7), "9x9.*7x7"),
        ("mobilenetv2_100", "mobilenet_v2", ("MODEL.PIXEL_MEAN", [1.0, 2.0, 3.0]), "PIXEL_MEAN"),
    ],
)
def test_their_weights_that_cannot_be_ours(theirs, ours, pairs, words, tmp_path, monkeypatch):
    url = f"timm://{theirs}"
    _placed(url, make("timm", theirs), tmp_path, monkeypatch)
    task = _finetuned(ours, *pairs)
    model = task.build_model()
    before = _copy(model.state_dict())
    with pytest.raises((ConfigError, WeightsError), match=f"{url}.*{words}") as caught:
        load(model, url, pixels=task.pixels)
    assert "\n" not in str(caught.value)
    _assert_same(model.state_dict(), before)
