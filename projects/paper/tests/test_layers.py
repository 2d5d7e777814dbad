from __future__ import annotations

import cv2
import numpy as np
import pytest
import torch
from detectron2.config import CfgNode, get_cfg
from matplotlib.layout_engine import ConstrainedLayoutEngine
from PIL import Image

from lambda_det import add_lambda_config, create_backbone
from lambda_det.errors import ConfigError, DataError, WeightsError
from lambda_det.weights.provenance import PixelSettings
from lambda_paper import figures
from lambda_paper.layers import (
    Input,
    choose_layers,
    draw_layers,
    load_image,
    load_network,
    pictures_of,
    watch,
    write_pictures,
)


def backbone_config(name: str = "lambda_resnet26_slim", **options) -> CfgNode:
    cfg = get_cfg()
    add_lambda_config(cfg)
    cfg.MODEL.DEVICE = "cpu"
    cfg.MODEL.BACKBONE.NAME = "build_lambda_resnet_backbone"
    cfg.MODEL.LAMBDA_RESNET.NAME = name
    for key, value in options.items():
        cfg.MODEL.LAMBDA_RESNET[key] = value
    cfg.INPUT.MIN_SIZE_TEST = 64
    return cfg


@pytest.fixture
def unarranged(monkeypatch):
    """Small figures whose parts stand where they are; to arrange them takes most of the drawing."""
    monkeypatch.setattr(ConstrainedLayoutEngine, "execute", lambda *_: None)
    monkeypatch.setattr(figures, "_DPI", 25)


@pytest.fixture
def image(tmp_path):
    """A photo of 32 rows and 40 columns."""
    path = tmp_path / "photo.png"
    cv2.imwrite(str(path), np.random.default_rng(0).integers(0, 255, (32, 40, 3), dtype=np.uint8))
    return path


def drawn(files):
    """The pictures by name, each of which shows something."""
    pictures = {path.stem: cv2.imread(str(path)) for path in files}
    assert all(picture.std() > 5 for picture in pictures.values())
    return pictures


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        (
            "lambda_resnet26_slim",
            {"SCOPE": 7},
            [f"res5.1.conv2.{k}" for k in ("embeddings", "reach", "context")],
        ),
        pytest.param(
            "resnet50_lambda_content",
            {},
            ["res4.5.conv2.reach", "res4.5.conv2.context"],
            marks=pytest.mark.release,
        ),
        pytest.param(
            "resnet50_lambda_position",
            {},
            ["res4.5.conv2.embeddings", "res4.5.conv2.context"],
            marks=pytest.mark.release,
        ),
        (
            "resnet50_lambda_k16_h4_u4",
            {},
            [f"res4.5.conv2.{k}" for k in ("embeddings", "reach", "context")],
        ),
        (
            "mobilenet_v2_lambda",
            {},
            [f"res4.3.conv2.{k}" for k in ("embeddings", "reach", "context")],
        ),
        pytest.param("resnet50", {}, [], marks=pytest.mark.release),
    ],
)
def test_each_kind_of_layer_has_the_pictures_of_its_parts(
    name, options, expected, image, tmp_path, request
):
    if name != "lambda_resnet26_slim":
        request.getfixturevalue("unarranged")
    layers = [n.rsplit(".", 1)[0] for n in expected[:1]]
    cfg = backbone_config(name, **options)
    chosen, files = draw_layers(cfg, image, tmp_path / "out", layers=layers, draws=1)
    assert list(drawn(files)) == ["receptive_field", *expected]
    assert chosen == list(dict.fromkeys(n.rsplit(".", 1)[0] for n in expected))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"global_context": 64},
        {"multi_head": True, "scope": 3},
        {"dilation": {"res5": 2}, "key_norm": "l2", "scope": 3},
    ],
)
def test_global_positions_heads_of_their_own_and_dilation(options, tmp_path, unarranged):
    network = create_backbone("lambda_resnet26_slim", **options).eval()
    given = Input(torch.randn(1, 3, 64, 64), np.zeros((64, 64, 3), np.uint8), (64, 64), (1, 1))
    made = pictures_of(network, given, (20.0, 50.0), ["res5.1.conv2"], state="", draws=1)
    assert len(drawn(write_pictures(tmp_path, made))) == 4


def test_layers_are_chosen_by_name_and_pattern():
    network = create_backbone("resnet50_lambda_c45")
    assert choose_layers(network) == ["res4.5.conv2", "res5.2.conv2"]
    assert choose_layers(network, ["res5.*"]) == [f"res5.{i}.conv2" for i in range(3)]
    assert choose_layers(network, ["res5.0.conv2", "res4.1.conv2"]) == [
        "res4.1.conv2",
        "res5.0.conv2",
    ]
    with pytest.raises(ConfigError, match=r"'res3\.\*'.*res4\.0\.conv2"):
        choose_layers(network, ["res3.*"])
    with pytest.raises(ConfigError, match="none"):
        choose_layers(create_backbone("resnet50"), ["res5.0.conv2"])


def test_what_is_watched_is_what_the_layer_is_given_and_gives():
    network = create_backbone("lambda_resnet26_slim", scope=5).eval()
    image = torch.randn(1, 3, 64, 64)
    expected = network(image)
    with watch(network, ["res5.0.conv2"]) as seen:
        found = network(image)
        network(2 * image)  # only the first call is kept
    layer, (inputs, output) = network.get_submodule("res5.0.conv2"), seen["res5.0.conv2"]
    torch.testing.assert_close(layer(*inputs), output)
    assert output.shape == (1, 128, 4, 4)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name])
    assert not layer._forward_hooks


def test_what_was_given_is_kept_from_work_in_place_that_follows():
    network = torch.nn.Sequential(torch.nn.Identity(), torch.nn.ReLU(inplace=True))
    with watch(network, ["0"]) as seen:
        assert network(torch.tensor([-1.0, 2.0])).tolist() == [0, 2]
    assert seen["0"][1].tolist() == [-1, 2]


def test_images_come_as_a_detector_gets_them(image):
    cfg = backbone_config()
    cfg.MODEL.PIXEL_MEAN, cfg.MODEL.PIXEL_STD = [1.0, 2.0, 3.0], [2.0, 4.0, 8.0]
    given = load_image(image, cfg, PixelSettings.from_config(cfg), 32)
    assert given.tensor.shape == (1, 3, 64, 96) and given.picture.shape == (64, 96, 3)
    assert given.size == (64, 80) and given.scale == (2, 2)
    bgr = given.picture[:64, :80, ::-1].astype(np.float32)
    expected = torch.from_numpy((bgr - [1, 2, 3]) / [2, 4, 8]).permute(2, 0, 1).float()
    torch.testing.assert_close(given.tensor[0, :, :, :80], expected)
    assert not given.tensor[0, :, :, 80:].any() and (given.picture[:, 80:] == 128).all()
    cfg.INPUT.FORMAT = "RGB"
    rgb = load_image(image, cfg, PixelSettings.from_config(cfg)).tensor[0]
    torch.testing.assert_close(rgb[0] * 2 + 1, expected[2] * 8 + 3)


def test_weights_are_those_of_the_file(tmp_path):
    cfg = backbone_config(SCOPE=5)
    torch.manual_seed(5)
    trained = create_backbone("lambda_resnet26_slim", scope=5)
    path = tmp_path / "detector.pth"
    state = {f"backbone.bottom_up.{k}": v for k, v in trained.state_dict().items()}
    torch.save({"model": state}, path)
    loaded, _ = load_network(cfg, path)
    assert not loaded.training
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, trained.state_dict()[name])
    with pytest.raises(WeightsError, match=r"none\.pth"):
        load_network(cfg, tmp_path / "none.pth")
    with pytest.raises(WeightsError, match=r"detector\.pth"):
        load_network(backbone_config(SCOPE=7), path)
    meta = {"input_format": "RGB", "pixel_mean": [0.0] * 3, "pixel_std": [1.0] * 3}
    torch.save({"model": state, "recipe": meta}, path)
    with pytest.raises(ConfigError, match=r"INPUT\.FORMAT RGB"):
        load_network(cfg, path)
    assert load_network(cfg)[1] == PixelSettings.from_config(cfg)
    assert load_network(cfg, path, file_pixels=True)[1] == PixelSettings(*meta.values())


def test_an_fpn_around_the_network_is_left_out():
    cfg = backbone_config(SCOPE=5)
    cfg.MODEL.BACKBONE.NAME = "build_lambda_resnet_fpn_backbone"
    cfg.MODEL.FPN.IN_FEATURES = ["res4", "res5"]
    assert list(load_network(cfg)[0].output_shape()) == ["res2", "res3", "res4", "res5"]


def test_the_field_is_at_the_position_of_the_file(image, tmp_path, monkeypatch):
    fields = {}
    monkeypatch.setattr(
        figures,
        "receptive_fields",
        lambda picture, given, pixel, title: (
            fields.update(given, pixel=pixel) or np.zeros((8, 8, 3), np.uint8)
        ),
    )
    cfg = backbone_config("resnet50")
    draw_layers(cfg, image, tmp_path / "out", position=(30, 4), draws=2)
    assert fields["pixel"] == (61, 9)
    assert fields["res2"].position == (15, 2) and fields["res2"].size == (16, 24)
    assert fields["res5"].position == (1, 0)
    ys, xs = np.nonzero(fields["res2"].values > 0.01 * fields["res2"].values.max())
    assert abs(ys.mean() - 61) < 4 and abs(xs.mean() - 9) < 4 and len(ys) < 400


@pytest.mark.slow
def test_mistakes_end_before_anything_is_written(image, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match="32 0"):
        draw_layers(backbone_config("resnet50"), image, out, position=(32, 0))
    with pytest.raises(DataError, match=r"none\.png"):
        draw_layers(backbone_config("resnet50"), tmp_path / "none.png", out)
    deep = tmp_path / "deep.jpg"
    Image.fromarray(np.full((32, 40), 3000, np.uint16)).save(deep, "PNG")
    with pytest.raises(DataError, match=r"deep\.jpg .*8 bits"):
        draw_layers(backbone_config("resnet50"), deep, out)
    with pytest.raises(ConfigError, match=r"(?i)cuda"):
        cfg = backbone_config("resnet50")
        cfg.MODEL.DEVICE = "cuda:9"
        draw_layers(cfg, image, out)
    assert not out.exists()
    out.mkdir()
    (out / "res5.1.conv2.context.png").write_text("kept")
    with pytest.raises(ConfigError, match=r"res5\.1\.conv2\.context\.png"):
        draw_layers(backbone_config(), image, out)


def test_pictures_keep_their_colours_and_are_not_replaced_without_leave(tmp_path):
    picture = np.zeros((4, 6, 3), np.uint8)
    picture[:, :3, 0] = picture[:, 3:, 2] = 255
    folder = tmp_path / "new" / "folder"
    assert write_pictures(folder, {"a": lambda: picture}) == [folder / "a.png"]
    assert np.array_equal(cv2.imread(str(folder / "a.png"))[:, :, ::-1], picture)
    assert [path.name for path in folder.iterdir()] == ["a.png"]
    drawn = []
    more = {"b": lambda: drawn.append("b") or picture, "a": lambda: 255 - picture}
    with pytest.raises(ConfigError, match=r"a\.png.*--overwrite"):
        write_pictures(folder, more)
    assert not drawn
    write_pictures(folder, more, overwrite=True)
    assert np.array_equal(cv2.imread(str(folder / "a.png"))[:, :, ::-1], 255 - picture)
    with pytest.raises(ConfigError, match=r"a\.png cannot"):
        write_pictures(folder / "a.png", more)
