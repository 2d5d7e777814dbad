"""The verification: what passes, and that each kind of damage is found."""

from __future__ import annotations

import math

import pytest
import torch
from detectron2.config import CfgNode, get_cfg

import lambda_det
from lambda_det.checkpoint import extract_backbone, save_backbone, verify, verify_backbone
from lambda_det.errors import ConfigError, WeightsError
from lambda_det.modeling.provenance import checksum
from tests.checkpoint.toy import MEAN, STD, classifier_checkpoint

CONFIG = """
MODEL:
  META_ARCHITECTURE: RetinaNet
  DEVICE: cuda  # which the verification does without
  BACKBONE: {NAME: build_retinanet_lambda_resnet_fpn_backbone, FREEZE_AT: 1}
  LAMBDA_RESNET: {NAME: lambda_resnet26, SCOPE: 3, NORM: SyncBN}
  FPN: {IN_FEATURES: [res3, res4, res5], OUT_CHANNELS: 8}
  RETINANET: {NUM_CLASSES: 2, NUM_CONVS: 1}
"""


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
    assert list(report.errors) == ["res2", "res3", "res4", "res5"]
    assert 0 < max(report.errors.values()) < 1e-6
    assert f"{report.tensors} of {report.tensors} tensors" in str(report)


def test_a_file_that_is_not_folded(checkpoint, tmp_path):
    save_backbone(extract_backbone(checkpoint, fold_input=False), tmp_path / "b.pth")
    pixels = {"INPUT__FORMAT": "RGB", "MODEL__PIXEL_MEAN": MEAN, "MODEL__PIXEL_STD": STD}
    report = verify_backbone(tmp_path / "b.pth", detector_config(**pixels), checkpoint=checkpoint)
    assert report.passed and max(report.errors.values()) < 1e-6
    report = verify_backbone(tmp_path / "b.pth", detector_config(), checkpoint=checkpoint)
    words = "\n".join(report.offenders)
    assert not report.passed and report.equal == report.tensors
    for key in ("INPUT.FORMAT is BGR; set it to RGB", "PIXEL_MEAN", "PIXEL_STD", "feature res5"):
        assert key in words


def test_the_backbone_alone(checkpoint, file, tmp_path):
    report = verify_backbone(file, checkpoint=checkpoint)
    assert report.passed and 0 < max(report.errors.values()) < 1e-6
    assert verify_backbone(file).passed
    save_backbone(extract_backbone(checkpoint, fold_input=False), tmp_path / "c.pth")
    report = verify_backbone(tmp_path / "c.pth", checkpoint=checkpoint)
    assert report.passed and set(report.errors.values()) == {0.0}


def test_embeddings_of_a_whole_map_are_compared_on_one_that_they_know(tmp_path):
    """As those of the CIFAR-10 reproduction, of 32x32 pixels."""
    options = {"global_context": 32, "share_positions": True}
    small = classifier_checkpoint(**options)
    save_backbone(extract_backbone(small), tmp_path / "b.pth")
    report = verify_backbone(tmp_path / "b.pth", checkpoint=small)
    assert report.passed and len(report.errors) == 4


def test_features_of_other_weights_differ(checkpoint, file):
    other = classifier_checkpoint(scope=3)
    report = verify_backbone(file, checkpoint=other)
    assert not report.passed and report.equal == report.tensors
    assert sum("feature res" in text for text in report.offenders) == 4


def test_features_that_are_not_finite(checkpoint, file, monkeypatch):
    nan = {name: torch.full((1,), math.nan) for name in ("res2", "res3", "res4", "res5")}
    monkeypatch.setattr(verify, "_classifier_features", lambda *_: nan)
    assert len(verify_backbone(file, checkpoint=checkpoint).offenders) == 4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"MODEL__LAMBDA_RESNET__SCOPE": 5}, "position.embedding has another shape"),
        ({"MODEL__LAMBDA_RESNET__NAME": "lambda_resnet26_c4"}, "is missing in the file"),
        ({"MODEL__LAMBDA_RESNET__NAME": "resnet50"}, "is in the file and not in the backbone"),
    ],
)
def test_another_backbone(checkpoint, file, changes, words):
    cfg = detector_config(**changes)
    if changes.get("MODEL__LAMBDA_RESNET__NAME") == "resnet50":
        cfg.MODEL.LAMBDA_RESNET.SCOPE = 0
    report = verify_backbone(file, cfg, checkpoint=checkpoint)
    assert not report.passed and report.equal == 0 and report.errors == {}
    assert report.offenders[0].startswith("it is refused: ")
    assert any(words in text for text in report.offenders[1:])
    assert not any("other values" in text for text in report.offenders)


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
    assert report.offenders == [f"{name} has other values than the file"]


def test_a_detector_that_does_not_load_at_all(checkpoint, file, monkeypatch):
    monkeypatch.setattr(verify.SafeCheckpointer, "load_initial_weights", lambda *_: None)
    report = verify_backbone(file, detector_config(), checkpoint=checkpoint)
    assert not report.passed
    assert sum("other values" in text for text in report.offenders) > report.tensors / 2


def test_a_file_or_configuration_that_cannot_be_used(checkpoint, file, tmp_path):
    with pytest.raises(ConfigError, match="resnet51"):
        verify_backbone(file, detector_config(MODEL__LAMBDA_RESNET__NAME="resnet51"))
    with pytest.raises(ConfigError, match="names 'build_fpn'"):
        verify_backbone(file, detector_config(MODEL__BACKBONE__NAME="build_fpn"))
    torch.save({"model": {}}, tmp_path / "x.pth")
    with pytest.raises(WeightsError, match="no backbone file"):
        verify_backbone(tmp_path / "x.pth", detector_config())


def test_the_file_of_a_detector_in_another(checkpoint, tmp_path):
    names = {f"backbone.bottom_up.{n}": t for n, t in extract_backbone(checkpoint)["model"].items()}
    content = extract_backbone({"model": names})
    assert content["meta"]["sha256"] == checksum(content["model"])
    save_backbone(content, tmp_path / "b.pth")
    assert verify_backbone(tmp_path / "b.pth", detector_config()).passed
    alone = verify_backbone(tmp_path / "b.pth")
    assert not alone.passed and "does not say of which network" in alone.offenders[0]
