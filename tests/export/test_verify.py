"""Verifying backbone files: good files pass, and a file of other features does not."""

import pytest

from lambda_det.export.backbone import extract_backbone, verify_backbone
from lambda_det.export.session import TOLERANCE, passes
from lambda_det.weights.backbone_file import save_backbone
from lambda_det.weights.provenance import checksum
from tests.export.toy import RUN, classifier_checkpoint, in_c4, in_fpn


def errors_of(checkpoint, path):
    save_backbone(extract_backbone(checkpoint), path)
    errors = verify_backbone(path, checkpoint)
    assert passes(errors) and max(errors.values()) < TOLERANCE / 10
    return errors


def test_embeddings_of_a_whole_map_are_compared_on_one_that_they_know(tmp_path):
    """As those of the CIFAR-10 reproduction, of 32x32 pixels."""
    small = classifier_checkpoint(global_context=32, share_positions="stage")
    errors_of(small, tmp_path / "b.pth")


@pytest.mark.parametrize("place", [in_fpn, in_c4])
def test_the_file_of_a_detector(checkpoint, tmp_path, place):
    """The last stage of C4 is in the heads."""
    errors = errors_of(
        {"model": place(checkpoint["model"]), "run": RUN}, tmp_path / "b.safetensors"
    )
    assert list(errors)[-1] == "res5"


@pytest.mark.parametrize("option", [{"key_norm": "l2"}, {"query_softmax": True}])
def test_a_network_that_computes_something_else(checkpoint, tmp_path, option):
    """The tensors are equal, so only the features differ."""
    content = extract_backbone(checkpoint)
    content["meta"]["options"] = {**content["meta"]["options"], **option}
    content["meta"]["sha256"] = checksum(content["model"], content["meta"])
    save_backbone(content, tmp_path / "b.pth")
    errors = verify_backbone(tmp_path / "b.pth", checkpoint)
    assert [name for name, e in errors.items() if e > TOLERANCE] == ["res4", "res5"]
