"""Verifying backbone files: good files pass, and each kind of damage is found."""

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
from lambda_det.export.verify import build_target, verify_backbone
from lambda_det.weights.backbone_file import save_backbone
from lambda_det.weights.provenance import checksum
from tests.export.toy import MEAN, STD, classifier_checkpoint, in_c4, in_fpn

CONFIG = """
MODEL:
  META_ARCHITECTURE: RetinaNet
  DEVICE: cuda  # which the verification does without
  BACKBONE: {NAME: build_retinanet_lambda_resnet_fpn_backbone, FREEZE_AT: 1}
  LAMBDA_RESNET: {NAME: lambda_resnet26_slim, SCOPE: 3, NORM: SyncBN}
  FPN: {IN_FEATURES: [res3, res4, res5], OUT_CHANNELS: 8}
  RETINANET: {NUM_CLASSES: 2, NUM_CONVS: 1}
"""
C4 = """
MODEL:
  BACKBONE: {NAME: build_lambda_resnet_backbone}
  LAMBDA_RESNET: {NAME: lambda_resnet26_slim, SCOPE: 3, OUT_FEATURES: [res4]}
  ROI_HEADS: {NAME: LambdaRes5ROIHeads, IN_FEATURES: [res4], NUM_CLASSES: 2}
"""
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
SLIM = KnownNetwork("lambda_resnet26_slim", {"norm": "BN", "scope": 3}, None, "name")


def detector_config(text: str = CONFIG, **changes) -> CfgNode:
    cfg = get_cfg()
    lambda_det.add_lambda_config(cfg)
    cfg.merge_from_other_cfg(CfgNode.load_cfg(text))
    for key, value in changes.items():
        cfg.merge_from_list([key.replace("__", "."), value])
    return cfg


@pytest.fixture
def target(tmp_path):
    """Builds a detector of the file of a configuration."""

    def build(text: str = CONFIG, **changes):
        (tmp_path / "detector.yaml").write_text(detector_config(text, **changes).dump())
        return build_target(tmp_path / "detector.yaml")

    return build


@pytest.fixture(scope="module")
def checkpoint():
    return classifier_checkpoint(scope=3)


@pytest.fixture
def file(checkpoint, tmp_path):
    save_backbone(extract_backbone(checkpoint), tmp_path / "b.pth")
    return tmp_path / "b.pth"


def assert_as_near(report, stages=("res2", "res3", "res4", "res5")):
    assert report.passed and report.offenders == []
    assert list(report.errors) == ["stem", *stages]
    assert max(report.errors.values()) < verify.TOLERANCE / 10


PIXELS = {"INPUT__FORMAT": "RGB", "MODEL__PIXEL_MEAN": MEAN, "MODEL__PIXEL_STD": STD}


@pytest.mark.parametrize("fold, pixels", [(True, {}), (False, PIXELS)])
def test_a_file_folded_or_not_in_a_detector_of_its_pixels_and_alone(
    checkpoint, target, tmp_path, fold, pixels
):
    content = extract_backbone(checkpoint, fold_input=fold)
    save_backbone(content, tmp_path / "b.pth")
    for detector in (target(**pixels), None):
        report = verify_backbone(tmp_path / "b.pth", checkpoint, detector)
        assert_as_near(report)
        assert report.tensors == len(content["model"])
        assert (max(report.errors.values()) > 1e-12) == fold


@pytest.mark.parametrize("dilation", [1, 2])
def test_a_dilated_target(checkpoint, file, target, dilation):
    detector = target(
        MODEL__META_ARCHITECTURE="ProposalNetwork",
        MODEL__BACKBONE__NAME="build_lambda_resnet_backbone",
        MODEL__LAMBDA_RESNET__OUT_FEATURES=["res4", "res5"],
        MODEL__RESNETS__RES5_DILATION=dilation,
    )
    assert_as_near(verify_backbone(file, checkpoint, detector), ("res4", "res5"))


def test_embeddings_of_a_whole_map_are_compared_on_one_that_they_know(tmp_path):
    """As those of the CIFAR-10 reproduction, of 32x32 pixels."""
    small = classifier_checkpoint(global_context=32, share_positions="stage")
    save_backbone(extract_backbone(small), tmp_path / "b.pth")
    assert_as_near(verify_backbone(tmp_path / "b.pth", small))


@pytest.mark.slow
@pytest.mark.parametrize("place, text", [(in_fpn, CONFIG), (in_c4, C4)])
def test_the_file_of_a_detector_in_another(checkpoint, target, tmp_path, place, text):
    """The last stage of C4 is in the heads."""
    source = {"model": place(checkpoint["model"])}
    save_backbone(extract_backbone(source, network=SLIM), tmp_path / "b.pkl")
    for detector in (target(text), target(), None):
        report = verify_backbone(tmp_path / "b.pkl", source, detector)
        assert report.passed and list(report.errors)[-1] == "res5"
        assert max(report.errors.values()) < 1e-6


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
    (tmp_path / "detector.yaml").write_text(cfg.dump())
    detector = build_target(tmp_path / "detector.yaml")
    assert verify_backbone(tmp_path / "b.pth", given, detector).passed


@pytest.mark.parametrize(
    "key, value",
    [
        ("MODEL.LAMBDA_RESNET.KEY_NORM", "l2"),  # without a trace in the tensors
        ("MODEL.LAMBDA_RESNET.QUERY_SOFTMAX", True),
        ("MODEL.LAMBDA_RESNET.SCOPE", 5),
        ("MODEL.LAMBDA_RESNET.NAME", "lambda_resnet26_c4"),
        ("INPUT.FORMAT", "RGB"),
    ],
)
def test_a_detector_that_is_another_refuses_the_file(checkpoint, file, target, key, value):
    report = verify_backbone(file, checkpoint, target(**{key.replace(".", "__"): value}))
    (offender,) = report.offenders
    assert not report.passed and report.errors == {} and str(file) in offender
    name = key.rpartition(".")[2].lower()
    if name in ("key_norm", "query_softmax"):
        assert name.upper() in offender
        with pytest.raises(WeightsError, match=name):
            lambda_det.create_backbone(
                "lambda_resnet26_slim", weights=file, scope=3, **{name: value}
            )


@pytest.mark.parametrize("finite", [True, False])
def test_features_of_other_weights_or_that_are_not_finite(checkpoint, file, monkeypatch, finite):
    torch.manual_seed(1)
    if not finite:
        monkeypatch.setattr(verify, "_difference", lambda *_: math.nan)
    report = verify_backbone(file, classifier_checkpoint(scope=3))
    assert not report.passed and sum("feature " in text for text in report.offenders) == 5


@pytest.mark.parametrize("kind", ["weight", "norm.running_var", None])
def test_values_that_the_loader_spoils_or_does_not_load(
    checkpoint, file, target, monkeypatch, kind
):
    name = f"res4.0.conv1.{kind}"
    load = verify.SafeCheckpointer.load_initial_weights

    def spoil(self, path, pixels=None):
        load(self, path, pixels)
        tensor = self.model.backbone.bottom_up.state_dict()[name]
        tensor.flatten()[:1].copy_(torch.nextafter(tensor.flatten()[0], torch.tensor(9.0)))

    instead = spoil if kind else lambda *_: None
    monkeypatch.setattr(verify.SafeCheckpointer, "load_initial_weights", instead)
    report = verify_backbone(file, checkpoint, target())
    wrong = [text for text in report.offenders if "feature" not in text]
    assert not report.passed and (wrong[0].startswith(name) if kind else len(wrong) > 100)
    assert len(wrong) == 1 or not kind


@pytest.mark.slow
def test_a_lazy_target(checkpoint, file, tmp_path):
    lazy, saved = tmp_path / "lazy.py", tmp_path / "config.yaml"
    lazy.write_text(LAZY)
    saved.write_text(dump_lazy(LazyConfig.load(str(lazy))))  # known by its content
    for path in (lazy, saved):
        assert_as_near(verify_backbone(file, checkpoint, build_target(path)))
    lazy.write_text(LAZY.replace("1.0, 1.0, 1.0", "1.0, 1.0, 2.0"))
    report = verify_backbone(file, checkpoint, build_target(lazy))
    assert not report.passed and "PIXEL_STD" in report.offenders[0]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("lazy.py", "train = {}", "`model`"),
        ("lazy.py", LAZY.replace("num_classes=2", "classes=2"), "classes"),
        ("lazy.py", LAZY + "model = bottom_up", "LambdaResNet"),
        ("nothing.py", None, r"nothing\.py"),
        ("d.yaml", CONFIG.replace("26_slim", "26_broad"), "lambda_resnet26_broad"),
        ("d.yaml", CONFIG.replace("build_retina", "build_retino"), "build_retinonet"),
    ],
)
def test_targets_that_cannot_be_used(tmp_path, name, text, words):
    if text:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=words):
        build_target(tmp_path / name)


@pytest.mark.parametrize("option", [{"key_norm": "l2"}, {"query_softmax": True}])
def test_a_network_that_computes_something_else(checkpoint, tmp_path, option):
    """The tensors are equal, so only the features differ."""
    content = extract_backbone(checkpoint)
    content["meta"]["options"] = {**content["meta"]["options"], **option}
    content["meta"]["sha256"] = checksum(content["model"], content["meta"])
    save_backbone(content, tmp_path / "b.pth")
    report = verify_backbone(tmp_path / "b.pth", checkpoint)
    assert [text.split()[1] for text in report.offenders] == ["res4", "res5"]
