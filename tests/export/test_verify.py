"""Verifying backbone files: good files pass, and each kind of damage is found."""

from __future__ import annotations

import math

import pytest
import torch
from detectron2.config import CfgNode, LazyConfig, get_cfg

import lambda_det
from lambda_det.classification.config import get_classification_config
from lambda_det.classification.model import model_options
from lambda_det.detection.lazy import dump_lazy
from lambda_det.errors import ConfigError, WeightsError
from lambda_det.export import verify
from lambda_det.export.backbone import extract_backbone
from lambda_det.export.sources import KnownNetwork
from lambda_det.export.verify import load_target, verify_backbone
from lambda_det.weights.backbone_file import save_backbone
from lambda_det.weights.provenance import checksum
from tests.export.toy import MEAN, STD, classifier_checkpoint, in_c4, in_fpn, scramble

CONFIG = """
MODEL:
  META_ARCHITECTURE: RetinaNet
  DEVICE: cuda  # which the verification does without
  BACKBONE: {NAME: build_retinanet_lambda_resnet_fpn_backbone, FREEZE_AT: 1}
  LAMBDA_RESNET: {NAME: lambda_resnet26_slim, SCOPE: 3, NORM: SyncBN}
  FPN: {IN_FEATURES: [res3, res4, res5], OUT_CHANNELS: 8}
  RETINANET: {NUM_CLASSES: 2, NUM_CONVS: 1}
"""


SLIM = KnownNetwork("lambda_resnet26_slim", {"norm": "BN", "scope": 3}, None, "name")


def detector_config(**changes) -> CfgNode:
    cfg = get_cfg()
    lambda_det.add_lambda_config(cfg)
    cfg.merge_from_other_cfg(CfgNode.load_cfg(CONFIG))
    for key, value in changes.items():
        cfg.merge_from_list([key.replace("__", "."), value])
    return cfg


@pytest.fixture(scope="module")
def checkpoint():
    return classifier_checkpoint(scope=3)


@pytest.fixture
def file(checkpoint, tmp_path):
    save_backbone(extract_backbone(checkpoint), tmp_path / "b.pth")
    return tmp_path / "b.pth"


def test_a_folded_file_in_a_detector_of_detectron2_s_default_pixels(checkpoint, file):
    report = verify_backbone(file, detector_config(), checkpoint=checkpoint)
    assert report.passed and report.offenders == []
    assert report.tensors == report.equal == len(extract_backbone(checkpoint)["model"])
    assert list(report.errors) == ["stem", "res2", "res3", "res4", "res5"]
    assert 0 < max(report.errors.values()) < 1e-6
    assert f"{report.tensors} of {report.tensors} tensors" in str(report)


def test_a_file_that_is_not_folded(checkpoint, tmp_path):
    save_backbone(extract_backbone(checkpoint, fold_input=False), tmp_path / "b.pth")
    pixels = {"INPUT__FORMAT": "RGB", "MODEL__PIXEL_MEAN": MEAN, "MODEL__PIXEL_STD": STD}
    report = verify_backbone(tmp_path / "b.pth", detector_config(**pixels), checkpoint=checkpoint)
    assert report.passed and max(report.errors.values()) < 1e-6
    report = verify_backbone(tmp_path / "b.pth", detector_config(), checkpoint=checkpoint)
    assert not report.passed and "INPUT.FORMAT" in report.offenders[0]


def test_the_backbone_alone(checkpoint, file, tmp_path):
    report = verify_backbone(file, checkpoint=checkpoint)
    assert report.passed and 0 < max(report.errors.values()) < 1e-6
    assert verify_backbone(file).passed
    save_backbone(extract_backbone(checkpoint, fold_input=False), tmp_path / "c.pth")
    report = verify_backbone(tmp_path / "c.pth", checkpoint=checkpoint)
    assert report.passed and set(report.errors.values()) == {0.0}


def test_embeddings_of_a_whole_map_are_compared_on_one_that_they_know(tmp_path):
    """As those of the CIFAR-10 reproduction, of 32x32 pixels."""
    options = {"global_context": 32, "share_positions": "stage"}
    small = classifier_checkpoint(**options)
    save_backbone(extract_backbone(small), tmp_path / "b.pth")
    report = verify_backbone(tmp_path / "b.pth", checkpoint=small)
    assert report.passed and len(report.errors) == 5


LAYERS = {
    "sizes": "QUERY_DEPTH: 8, HEADS: 2, INTRA_DEPTH: 2, SCOPE: 3",
    "scopes by stage": "STAGE_SCOPES: [3, 3, 5, 7]",
    "global": "GLOBAL_CONTEXT: 96, SHARE_POSITIONS: stage",
    "shared by size": "SHARE_POSITIONS: size",
    "L2, no norms": "KEY_NORM: l2, QV_NORM: False",
    "keys as they are, softmax of queries": "KEY_NORM: none, QUERY_SOFTMAX: True",
    "content": "POSITION: False",
    "position": "CONTENT: False",
}


def _section(layers: str) -> CfgNode:
    return CfgNode.load_cfg(f"MODEL: {{LAMBDA_RESNET: {{{layers}}}}}")


@pytest.mark.slow
@pytest.mark.parametrize("layers", LAYERS.values(), ids=LAYERS)
def test_what_is_pretrained_can_be_detected_with_by_the_same_section(layers, tmp_path):
    recipe = get_classification_config()
    recipe.merge_from_other_cfg(_section(layers))
    recipe.MODEL.NAME, recipe.INPUT.SIZE = "lambda_resnet26_slim", 96
    given = classifier_checkpoint(**model_options(recipe))
    save_backbone(extract_backbone(given), tmp_path / "b.pth")
    cfg = detector_config(MODEL__LAMBDA_RESNET__SCOPE=0)
    cfg.merge_from_other_cfg(_section(layers))
    assert verify_backbone(tmp_path / "b.pth", cfg, checkpoint=given).passed


@pytest.mark.parametrize("layers", ["KEY_NORM: l2", "QUERY_SOFTMAX: True"])
def test_layers_that_differ_without_a_trace_in_the_tensors(layers, file, checkpoint):
    cfg = detector_config()
    cfg.merge_from_other_cfg(_section(layers))
    report = verify_backbone(file, cfg, checkpoint=checkpoint)
    assert not report.passed and layers.split(":")[0] in "".join(report.offenders)
    name, value = layers.lower().split(": ")
    options = {name: {"true": True}.get(value, value), "scope": 3}
    with pytest.raises(WeightsError, match=name):
        lambda_det.create_backbone("lambda_resnet26_slim", weights=file, **options)


@pytest.mark.parametrize("finite", [True, False])
def test_features_of_other_weights_or_that_are_not_finite(checkpoint, file, monkeypatch, finite):
    torch.manual_seed(1)
    if not finite:
        monkeypatch.setattr(verify, "_difference", lambda *_: math.nan)
    report = verify_backbone(file, checkpoint=classifier_checkpoint(scope=3))
    assert not report.passed and report.equal == report.tensors
    assert sum("feature " in text for text in report.offenders) == 5


@pytest.mark.parametrize(
    "changes",
    [
        {"MODEL__LAMBDA_RESNET__SCOPE": 5},
        {"MODEL__LAMBDA_RESNET__NAME": "lambda_resnet26_c4"},
        {"MODEL__LAMBDA_RESNET__NAME": "resnet50", "MODEL__LAMBDA_RESNET__SCOPE": 0},
    ],
)
def test_another_backbone(checkpoint, file, changes):
    report = verify_backbone(file, detector_config(**changes), checkpoint=checkpoint)
    assert not report.passed and report.errors == {} and str(file) in report.offenders[0]


@pytest.mark.parametrize("kind", ["weight", "running_var"])
def test_a_value_that_the_loader_spoils(checkpoint, file, monkeypatch, kind):
    name = f"res4.0.conv1.{'weight' if kind == 'weight' else 'norm.running_var'}"
    load = verify.SafeCheckpointer.load_initial_weights

    def spoil(self, path, pixels=None):
        load(self, path, pixels)
        tensor = self.model.backbone.bottom_up.state_dict()[name]
        tensor.flatten()[:1].copy_(torch.nextafter(tensor.flatten()[0], torch.tensor(9.0)))

    monkeypatch.setattr(verify.SafeCheckpointer, "load_initial_weights", spoil)
    report = verify_backbone(file, detector_config(), checkpoint=checkpoint)
    assert not report.passed and report.equal == report.tensors - 1
    assert len(report.offenders) == 1 and name in report.offenders[0]


def test_a_detector_that_does_not_load_at_all(checkpoint, file, monkeypatch):
    monkeypatch.setattr(verify.SafeCheckpointer, "load_initial_weights", lambda *_: None)
    report = verify_backbone(file, detector_config(), checkpoint=checkpoint)
    assert not report.passed
    assert len(report.offenders) > report.tensors / 2


def test_a_file_or_configuration_that_cannot_be_used(checkpoint, file, tmp_path):
    with pytest.raises(ConfigError, match="resnet51"):
        verify_backbone(file, detector_config(MODEL__LAMBDA_RESNET__NAME="resnet51"))
    with pytest.raises(ConfigError, match="build_fpn"):
        verify_backbone(file, detector_config(MODEL__BACKBONE__NAME="build_fpn"))
    torch.save({"model": {}}, tmp_path / "x.pth")
    with pytest.raises(WeightsError, match=r"x\.pth"):
        verify_backbone(tmp_path / "x.pth", detector_config())


@pytest.mark.slow
def test_the_file_of_a_detector_in_another(checkpoint, tmp_path):
    source = {"model": in_fpn(checkpoint["model"])}
    save_backbone(extract_backbone(source, network=SLIM), tmp_path / "b.pth")
    for target in (detector_config(), None):
        report = verify_backbone(tmp_path / "b.pth", target, checkpoint=source)
        assert report.passed and len(report.errors) == 5
        assert max(report.errors.values()) < 1e-6


C4 = """
MODEL:
  BACKBONE: {NAME: build_lambda_resnet_backbone}
  LAMBDA_RESNET: {NAME: lambda_resnet26_slim, SCOPE: 3, OUT_FEATURES: [res4]}
  ROI_HEADS: {NAME: LambdaRes5ROIHeads, IN_FEATURES: [res4], NUM_CLASSES: 2}
"""


@pytest.mark.slow
def test_the_file_of_a_c4_detector_in_both_places(checkpoint, tmp_path):
    """Its last stage is in the heads."""
    cfg = get_cfg()
    lambda_det.add_lambda_config(cfg)
    cfg.merge_from_other_cfg(CfgNode.load_cfg(C4))
    source = {"model": in_c4(checkpoint["model"])}
    content = extract_backbone(source, network=SLIM)
    save_backbone(content, tmp_path / "b.pkl")
    for target in (cfg, detector_config(), None):
        report = verify_backbone(tmp_path / "b.pkl", target, checkpoint=source)
        assert report.passed and report.tensors == len(content["model"])
        assert list(report.errors)[-1] == "res5" and max(report.errors.values()) < 1e-6


@pytest.mark.parametrize("dilation", [1, 2])
def test_a_dilated_target(checkpoint, file, dilation):
    cfg = detector_config(
        MODEL__META_ARCHITECTURE="ProposalNetwork",
        MODEL__BACKBONE__NAME="build_lambda_resnet_backbone",
        MODEL__LAMBDA_RESNET__OUT_FEATURES=["res4", "res5"],
        MODEL__RESNETS__RES5_DILATION=dilation,
    )
    report = verify_backbone(file, cfg, checkpoint=checkpoint)
    assert report.passed and list(report.errors) == ["stem", "res4", "res5"]
    assert 0 < max(report.errors.values()) < 1e-6


LAZY = """
from detectron2.config import LazyCall as L
from detectron2.layers import ShapeSpec
from detectron2.modeling import SemanticSegmentor
from detectron2.modeling.meta_arch.semantic_seg import SemSegFPNHead
import lambda_det

bottom_up = L(lambda_det.create_backbone)(name="lambda_resnet26_slim", scope=3, norm="BN")
model = L(SemanticSegmentor)(
    backbone=bottom_up,
    sem_seg_head=L(SemSegFPNHead)(
        input_shape={"res2": L(ShapeSpec)(channels=256, stride=4)},
        num_classes=2, conv_dims=8, common_stride=4),
    pixel_mean=[103.53, 116.28, 123.675], pixel_std=[1.0, 1.0, 1.0])
"""


@pytest.mark.slow
def test_a_lazy_target(checkpoint, file, tmp_path):
    (tmp_path / "lazy.py").write_text(LAZY)
    report = verify_backbone(file, load_target(tmp_path / "lazy.py"), checkpoint=checkpoint)
    assert report.passed and 0 < max(report.errors.values()) < 1e-6
    # What a run saves of it is known by its content
    (tmp_path / "config.yaml").write_text(dump_lazy(LazyConfig.load(str(tmp_path / "lazy.py"))))
    report = verify_backbone(file, load_target(tmp_path / "config.yaml"), checkpoint=checkpoint)
    assert report.passed
    (tmp_path / "lazy.py").write_text(LAZY.replace("1.0, 1.0, 1.0", "1.0, 1.0, 2.0"))
    report = verify_backbone(file, load_target(tmp_path / "lazy.py"), checkpoint=checkpoint)
    assert not report.passed and "PIXEL_STD" in report.offenders[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model = 1 / 0", r"lazy\.py.*ZeroDivisionError"),
        ("train = {}", "`model`"),
        (LAZY.replace("num_classes=2", "classes=2"), "classes"),
        (LAZY + "model = bottom_up", "LambdaResNet"),
    ],
)
def test_lazy_targets_that_cannot_be_used(file, tmp_path, text, words):
    (tmp_path / "lazy.py").write_text(text)
    with pytest.raises(ConfigError, match=words):
        verify_backbone(file, load_target(tmp_path / "lazy.py"))
    with pytest.raises(ConfigError, match=r"nothing\.py"):
        load_target(tmp_path / "nothing.py")


@pytest.mark.slow
def test_a_deep_network_is_as_near(tmp_path):
    """Rounding of the folded convolution would grow with the depth, if it were not for the stem."""
    deep = classifier_checkpoint("lambda_resnet101", ema=False, scope=3)
    model = scramble(lambda_det.create_classifier("lambda_resnet101", 3, scope=3))
    for norm in model.modules():
        if hasattr(norm, "running_mean"):
            norm.momentum = 1.0
    model(torch.randn(4, 3, 64, 64))  # statistics that keep the features of a deep network small
    deep["model"] = model.state_dict()
    save_backbone(extract_backbone(deep), tmp_path / "b.safetensors")
    report = verify_backbone(tmp_path / "b.safetensors", checkpoint=deep)
    assert report.passed and max(report.errors.values()) < verify.TOLERANCE / 10


@pytest.mark.parametrize("option", [{"key_norm": "l2"}, {"query_softmax": True}])
def test_a_network_that_computes_something_else(checkpoint, tmp_path, option):
    """The tensors are equal, so only the features differ."""
    content = extract_backbone(checkpoint)
    content["meta"]["options"] = {**content["meta"]["options"], **option}
    content["meta"]["sha256"] = checksum(content["model"], content["meta"])
    save_backbone(content, tmp_path / "b.pth")
    report = verify_backbone(tmp_path / "b.pth", checkpoint=checkpoint)
    assert report.equal == report.tensors and not report.passed
    wrong = [name for name, error in report.errors.items() if error > verify.TOLERANCE]
    assert wrong == ["res4", "res5"]


def test_a_stage_that_is_spoilt_on_the_way(checkpoint, file, monkeypatch):
    """Later features are compared from the same stem, and still differ."""
    features = verify._features

    def spoil(backbone, image, pixels, *instead):
        if not instead:  # the network of the file
            with torch.no_grad():
                backbone.res3[0].conv1.weight.mul_(1 + 1e-3)
        return features(backbone, image, pixels, *instead)

    monkeypatch.setattr(verify, "_features", spoil)
    report = verify_backbone(file, checkpoint=checkpoint)
    assert not report.passed
    assert report.errors["res2"] < 1e-6 < verify.TOLERANCE < report.errors["res3"]
