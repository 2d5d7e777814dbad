"""The network that a configuration names, and the checkpoint of a run."""

import pytest
from detectron2.config import LazyConfig

from lambda_det.errors import ConfigError, WeightsError
from lambda_det.export.backbone import extract_backbone
from lambda_det.export.sources import configured_network, find_checkpoint
from lambda_det.weights.provenance import PixelSettings
from tests.export.test_verify import detector_config
from tests.export.toy import classifier_checkpoint, in_fpn


def test_a_run_s_configuration_says_it(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(detector_config(MODEL__PIXEL_MEAN=[1.0, 2.0, 3.5]).dump())
    network = configured_network(file)
    assert network.model == "lambda_resnet26_slim" and network.known_from == "configuration"
    assert network.options == {"scope": 3, "norm": "SyncBN"}
    assert network.pixels.by_key() == {
        "INPUT.FORMAT": "BGR",
        "MODEL.PIXEL_MEAN": [1.0, 2.0, 3.5],
        "MODEL.PIXEL_STD": [1.0, 1.0, 1.0],
    }
    model = in_fpn(classifier_checkpoint(scope=3, ema=False)["model"])
    meta = extract_backbone({"model": model}, network=network)["meta"]
    assert meta["pixel_mean"] == [1.0, 2.0, 3.5] and meta["options"]["norm"] == "SyncBN"
    model = in_fpn(classifier_checkpoint(scope=5, ema=False)["model"])
    words = "w.pth.*lambda_resnet26_slim.*norm SyncBN, scope 3"
    with pytest.raises(WeightsError, match=words):
        extract_backbone({"model": model}, network=network, source="w.pth")


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({"BACKBONE": "build_lambda_resnet_backbone"}, {}),
        (
            {"BACKBONE": "build_lambda_resnet_backbone", "RESNETS": "{RES5_DILATION: 2}"},
            {"dilation": {"res5": 2}},
        ),
        (
            {
                "BACKBONE": "build_lambda_resnet_deeplab_backbone",
                "RESNETS": "{RES4_DILATION: 1, RES5_DILATION: 2, RES5_MULTI_GRID: [1, 2]}",
            },
            {"dilation": {"res4": 1, "res5": 2}, "multi_grid": [1, 2]},
        ),
    ],
)
def test_layouts_without_fpn(tmp_path, changes, options):
    """As C4 (which has no other backbone), DC5 and DeepLab ask for them."""
    text = f"""
MODEL:
  BACKBONE: {{NAME: {changes["BACKBONE"]}, FREEZE_AT: 2}}
  LAMBDA_RESNET: {{NAME: lambda_resnet26_slim, OUT_FEATURES: [res4], STOCHASTIC_DEPTH: 0.2}}
  RESNETS: {changes.get("RESNETS", "{DEPTH: 50}")}
  A_SECTION_OF_ANOTHER_PROJECT: {{KEY: 3}}
"""
    (tmp_path / "config.yaml").write_text(text)
    network = configured_network(tmp_path / "config.yaml")
    assert network.options == {"norm": "BN", **options}


LAZY = """
from detectron2.config import LazyCall as L
from detectron2.layers import ShapeSpec
from detectron2.modeling import FPN, GeneralizedRCNN
import lambda_det

model = L(GeneralizedRCNN)(
    backbone=L(FPN)(
        bottom_up=L(lambda_det.create_backbone)(
            name="lambda_resnet26_slim", scope=3, norm="${train.norm}", freeze_at=1,
            out_features=["res4", "res5"]),
        in_features="${.bottom_up.out_features}", out_channels=8),
    proposal_generator=None, roi_heads=None,
    pixel_mean=[1.0, 2, 3], pixel_std=[4.0, 5.0, 6.0], input_format="RGB")
train = {"norm": "BN", "shape": ShapeSpec(channels=8)}  # saved as a Python object
"""


def test_a_lazyconfig_and_the_file_that_a_run_saves_of_it_say_it(tmp_path):
    lazy, saved = tmp_path / "lazy.py", tmp_path / "config.yaml"
    lazy.write_text(LAZY)
    LazyConfig.save(LazyConfig.load(str(lazy)), str(saved))
    assert "!!python/object" in saved.read_text()
    for file in (lazy, saved):
        network = configured_network(file)
        assert network.model == "lambda_resnet26_slim"
        assert network.options == {"scope": 3, "norm": "BN"}
        assert network.pixels == PixelSettings("RGB", [1.0, 2.0, 3.0], [4.0, 5.0, 6.0])


# fmt: off
REFUSED = {
    "a wrong value":    ("MODEL: {BACKBONE: {NAME: build_lambda_resnet_backbone}, "
                         "LAMBDA_RESNET: {SCOPE: wide}}", "config.yaml.*wide.*LAMBDA_RESNET.SCOPE"),
    "a wrong name":     ("MODEL: {BACKBONE: {NAME: build_lambda_resnet_backbone}, "
                         "LAMBDA_RESNET: {NAME: resnet51}}", "resnet51"),
    "no configuration": ("- 1\n- 2", "config.yaml.*list"),
    "not YAML":         ("a: [", "config.yaml"),
    "a program":        ("a: !!python/object/apply:os.system ['exit 1']", "config.yaml"),
    "lazy, no mean":    ("model: {b: {_target_: lambda_det.create_backbone, name: resnet50}}",
                         "pixel_mean"),
    "lazy, dangling":   ("model: {b: '${nothing}'}", "config.yaml.*nothing"),
}
# fmt: on


@pytest.mark.parametrize("row", REFUSED)
def test_configurations_that_cannot_say_it(tmp_path, row):
    text, words = REFUSED[row]
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=words):
        configured_network(tmp_path / "config.yaml")
    with pytest.raises(ConfigError, match=r"nothing\.yaml"):
        configured_network(tmp_path / "nothing.yaml")


def test_configurations_that_leave_it_open(tmp_path):
    for text in (
        "MODEL: {BACKBONE: {NAME: my_own_builder}}",
        "MODEL: {BACKBONE: {NAME: build_resnet_fpn_backbone}}",
        "MODEL: {NAME: lambda_resnet26_slim}",  # a recipe
        "model: {a: 1}",
        "a: {b: 1}",
    ):
        (tmp_path / "config.yaml").write_text(text)
        assert configured_network(tmp_path / "config.yaml") is None


def test_the_checkpoint_of_a_run(tmp_path):
    assert find_checkpoint(tmp_path / "nothing.pth") == str(tmp_path / "nothing.pth")
    (tmp_path / "model_0000004.pth").write_text("")
    with pytest.raises(WeightsError, match=r"last_checkpoint.*model_0000004\.pth"):
        find_checkpoint(tmp_path)
    (tmp_path / "last_checkpoint").write_text("model_0000009.pth")
    with pytest.raises(WeightsError, match=r"model_0000009\.pth"):
        find_checkpoint(tmp_path)
    (tmp_path / "model_0000009.pth").write_text("")
    assert find_checkpoint(str(tmp_path)) == str(tmp_path / "model_0000009.pth")
    (tmp_path / "model_best.pth").write_text("")
    chosen = {"best": "model_best", "last": "model_0000009", "5": "model_0000004"}
    for which, name in chosen.items():
        assert find_checkpoint(tmp_path, which) == str(tmp_path / f"{name}.pth")
    for which in ("6", "worst"):
        with pytest.raises(WeightsError, match=rf"'{which}'.*best, last.* 5, 10"):
            find_checkpoint(tmp_path, which)
