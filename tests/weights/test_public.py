"""URLs of published weights: what they name, and what happens without a connection."""

import huggingface_hub
import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file

from lambda_det.errors import ConfigError, WeightsError
from lambda_det.weights import public
from lambda_det.weights.loading import read_weights
from lambda_det.weights.public import fetch, is_public, read_public

TIMM, TORCHVISION = "timm://mobilenetv2_100.ra_in1k", "torchvision://MobileNet_V2_Weights."
RETINANET = "torchvision://RetinaNet_ResNet50_FPN_"


@pytest.fixture(autouse=True)
def no_connection(tmp_path, monkeypatch):
    """Empty caches, and every download fails."""

    def fail(*_, **__):
        raise ConnectionError("no route\nto host")

    monkeypatch.setenv("FVCORE_CACHE", str(tmp_path / "iopath"))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    monkeypatch.setattr(torch.hub, "download_url_to_file", fail)
    monkeypatch.setattr("iopath.common.file_io.download", fail)


@pytest.mark.parametrize(
    ("url", "model", "license"),
    [
        (TIMM, "mobilenet_v2", "apache-2.0"),
        ("timm://resnetrs101", "resnet_rs101_se", "apache-2.0"),
        ("torchvision://ResNet50_Weights.IMAGENET1K_V2", "resnet50", "BSD-3"),
    ],
)
def test_what_is_known_before_the_download(url, model, license):
    public = fetch(url)
    assert is_public(url) and public.model == model and license in public.license
    assert str(public.pixels) == (
        "INPUT.FORMAT RGB, MODEL.PIXEL_MEAN [123.675, 116.28, 103.53], "
        "MODEL.PIXEL_STD [58.395, 57.12, 57.375]"
    )
    assert url in public.describe() and license in public.describe()


def test_timm_s_files_are_those_of_timm():
    """The table here is read without importing timm, which takes seconds."""
    listed = timm.models.list_pretrained()
    for name in (*public._TIMM_FILES, *public._TIMM):
        ours, theirs = fetch(f"timm://{name}"), timm.models.get_pretrained_cfg(name)
        full = next(full for full in listed if full == name or full.startswith(f"{name}."))
        assert theirs.hf_hub_id == f"timm/{full}" and f"/timm/{full}/" in ours.origin
        assert ours.license == theirs.license
        assert np.allclose(ours.pixels.mean, np.multiply(theirs.mean, 255))
        assert np.allclose(ours.pixels.std, np.multiply(theirs.std, 255))
    ours = {name for name in listed if name.partition(".")[0] in public._TIMM}
    assert ours - {*public._TIMM_FILES} == {"resnet50.bamboo"}  # without a licence


@pytest.mark.parametrize(
    ("url", "near"),
    [
        ("timm://resnetrs10l.tf_in1k", "timm://resnetrs101.tf_in1k"),
        ("timm://vit_base_patch16_224", "timm://"),
        ("torchvision://ResNet50_Weights.V3", "torchvision://ResNet50_Weights.IMAGENET1K_V"),
        (f"{RETINANET}Weights.COCO_V1", f"{RETINANET}V2_Weights.COCO_V1"),
        ("lambda://lambda_resnet26", "lambda://lambda_resnet26_slim"),
        ("hf://repository", "hf://OWNER/REPOSITORY/FILE"),
    ],
)
def test_unknown_names(url, near):
    with pytest.raises(ConfigError) as caught:
        fetch(url)
    assert url in str(caught.value) and near in str(caught.value).replace(url, "", 1)


@pytest.mark.parametrize(
    ("url", "origin", "place"),
    [
        (TIMM, "https://huggingface.co/timm/mobilenetv2_100.ra_in1k/", "timm/mobilenetv2_100"),
        (f"{TORCHVISION}IMAGENET1K_V1", "https://download.pytorch.org/models/", "mobilenet_v2-"),
        (
            f"{RETINANET}V2_Weights.COCO_V1",
            "https://download.pytorch.org/models/",
            "retinanet_resnet",
        ),
        ("hf://owner/name/sub/w.pkl", "https://huggingface.co/owner/name/", "hf/owner/name/sub/w"),
    ],
)
def test_without_a_connection_the_file_and_its_place_are_named(url, origin, place, tmp_path):
    with pytest.raises(WeightsError) as caught:
        read_public(url)
    message = str(caught.value)
    assert all(part in message for part in (url, origin, str(tmp_path), place))
    assert "\n" not in message


def test_a_file_of_something_else_in_its_place():
    public = fetch(TIMM)
    public.place.parent.mkdir(parents=True)
    save_file({"a": torch.zeros(1)}, public.place)
    with pytest.raises(WeightsError, match=r"mobilenetv2_100\.ra_in1k\.safetensors"):
        read_public(TIMM)


# And whether it may be a file of torch.save
ADDRESSES = {
    "hf://owner/name/w.pth": True,
    "hf://owner/name/sub/pytorch_model.bin": True,
    "https://example.org/w.pth?download=true": True,
    "https://example.org/files/17": True,
    "detectron2://X/w.pyth": True,
    "hf://owner/name": False,
    "https://example.org/w.pkl": False,
    "https://example.org/w.safetensors": False,
}


@pytest.mark.parametrize("number", ["2.4.1", "2.9.1", "2.10.0"])
@pytest.mark.parametrize("url", ADDRESSES)
def test_an_older_pytorch_takes_no_file_of_torch_save_from_an_address(url, number, monkeypatch):
    monkeypatch.setattr("torch.__version__", torch.torch_version.TorchVersion(number))
    with pytest.raises(WeightsError) as caught:
        read_weights(url)  # without a connection, it is no file that could be read
    assert ("CVE-2026-24747" in str(caught.value)) == (ADDRESSES[url] and number != "2.10.0")
