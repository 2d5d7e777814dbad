"""Extracting backbones from checkpoints: tensors, metadata, refusals."""

import pytest
import torch

import lambda_det
from lambda_det.errors import WeightsError
from lambda_det.export.backbone import extract_backbone, forget_unseen
from lambda_det.layers import RelativePosition
from lambda_det.weights.provenance import checksum
from tests.export.toy import RUN, classifier_checkpoint, in_c4, in_fpn


def _wanted(state):
    return {
        name.removeprefix("backbone."): tensor
        for name, tensor in state.items()
        if "linear" not in name and "num_batches_tracked" not in name
    }


def _is_folded(name):
    """Whether the input normalisation changes a tensor."""
    first = "stem.conv1."
    return name.startswith(first) and name not in (f"{first}norm.weight", f"{first}norm.bias")


@pytest.mark.parametrize("raw", [False, True])
def test_all_tensors_of_the_backbone_and_nothing_else(checkpoint, raw):
    content = extract_backbone(checkpoint, raw=raw)
    source = checkpoint if raw else checkpoint["ema"]
    expected = _wanted(source["model"])
    assert content["model"].keys() == expected.keys()
    for name, tensor in content["model"].items():
        assert torch.equal(tensor, expected[name]) != _is_folded(name)
        assert tensor.dtype == torch.float32
        assert tensor.data_ptr() != expected[name].data_ptr() and tensor.is_contiguous()
    meta, top1 = content["meta"], 1.0 if raw else 2.0
    assert meta["weights"] == ("model" if raw else "ema")
    assert meta["accuracy"] == {"held_out": {"top1": top1, "top5": top1 + 4}}
    assert meta["pixel_std"] == [1.0] * 3 and meta["folded"] is True
    assert meta["recipe"] == "SEED: 3\n" and meta["lambda_det"] == lambda_det.__version__


@torch.no_grad()
def test_offsets_that_no_image_of_the_training_had_are_0():
    """Of 64 pixels c4 has maps of 4x4, the first block of c5 too, and the last ones 2x2."""
    checkpoint = classifier_checkpoint()
    checkpoint["recipe"]["config"] = "INPUT: {SIZE: 64}"
    content = extract_backbone(checkpoint)
    given = _wanted(checkpoint["ema"]["model"])
    given |= {name: tensor for name, tensor in content["model"].items() if _is_folded(name)}
    reach = {"res4.1": 3, "res5.0": 3, "res5.1": 1}
    embeddings = {f"{block}.conv2.position.embedding": n for block, n in reach.items()}
    assert set(content["meta"]["unseen"]) == set(embeddings)
    assert content["meta"]["trained_at"] == 64
    for name, tensor in given.items():
        expected = tensor
        if name in embeddings:
            offset = (torch.arange(23) - 11).abs() <= embeddings[name]
            expected = tensor * (offset[:, None] & offset)
            assert not torch.equal(expected, tensor)
        assert torch.equal(content["model"][name], expected)
    before, after = (lambda_det.create_backbone("lambda_resnet26_slim").eval() for _ in range(2))
    before.load_state_dict(given, strict=False)
    after.load_state_dict(content["model"], strict=False)
    for side, same in ((64, True), (128, False)):
        image = torch.randn(1, 3, side, side)
        pairs = zip(before(image).values(), after(image).values(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs) is same


class _Computed(RelativePosition):
    """Embeddings that are computed, of other parameters than a table."""

    def __init__(self, table):
        super().__init__(*table.shape[:2], scope=tuple(table.shape[2:]))
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.register_buffer("offsets", table.detach().clone())
        del self.embedding

    def table(self, head=0):
        return self.offsets * self.scale


def test_embeddings_that_are_computed_are_kept():
    backbone = lambda_det.create_backbone("lambda_resnet26_slim")
    layer = backbone.res5[1].conv2
    layer.position = _Computed(layer.position.table())
    state = backbone.state_dict()
    after, changed = forget_unseen(state, backbone, 64)
    assert "res5.0.conv2.position.embedding" in changed and "res5.1" not in str(changed)
    assert after.keys() == state.keys()


@pytest.mark.parametrize("config", ["INPUT: {SIZE: 512}", "SEED: 3"])
def test_offsets_stay_where_all_were_seen_or_nothing_says_so(config):
    checkpoint = classifier_checkpoint(scope=3)
    checkpoint["recipe"]["config"] = config
    content = extract_backbone(checkpoint)
    assert content["meta"]["unseen"] == []
    expected = _wanted(checkpoint["ema"]["model"])
    own = {name: tensor for name, tensor in content["model"].items() if not _is_folded(name)}
    assert all(torch.equal(tensor, expected[name]) for name, tensor in own.items())


def _fresh(state):
    norm = "backbone.res3.0.conv1.norm.running"
    return {**state, f"{norm}_mean": torch.zeros(128), f"{norm}_var": torch.ones(128) - 1e-5}


def _nan(state):
    return {**state, "backbone.res5.0.conv3.weight": torch.full((512, 128, 1, 1), torch.nan)}


# What is changed of a checkpoint with raw weights alone, and what is said of it
REFUSED = {
    "never trained": (
        lambda c: {"model": _fresh(c["model"])},
        "res3.0.conv1.norm.running_var",
    ),
    "nan": (lambda c: {"model": _nan(c["model"])}, r"NaN.*res5\.0\.conv3\.weight"),
    "unknown model": (lambda c: _recipe(c, model="resnet51"), "resnet51"),
    "unknown option": (lambda c: _recipe(c, options={"depth": 3}), "depth"),
    "another name": (lambda c: {"recipe": None}, "does not hold this backbone"),
    "nothing": (lambda c: {"model": [3]}, "model"),
}


def _recipe(checkpoint, **changes):
    return {"recipe": {**checkpoint["recipe"], **changes}}


@pytest.mark.parametrize(("change", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_exported(checkpoint, change, words):
    raw = {key: value for key, value in checkpoint.items() if key != "ema"}
    with pytest.raises(WeightsError, match=words) as caught:
        extract_backbone({**raw, **change(raw)}, model="lambda_resnet50", source="a.pth")
    assert "a.pth" in str(caught.value) and "\n" not in str(caught.value)


def _without(state, stage):
    return {name: tensor for name, tensor in state.items() if stage not in name}


def _own(state):
    return {name.removeprefix("backbone."): tensor for name, tensor in state.items()}


HEADS = {"roi_heads.res5.0.conv1.weight": torch.ones(128, 256, 1, 1)}  # of convolutions
# How a file of a detector with this backbone calls its tensors, and the last stage that it has
HOLDERS = {
    "fpn": (in_fpn, "res5"),
    "plain": (dict, "res5"),
    "c4": (in_c4, "res5"),
    "backbone": (_own, "res5"),
    "short": (lambda s: _without(s, "res5"), "res4"),
    "short, with heads": (lambda s: {**_without(s, "res5"), **HEADS}, "res4"),
}


@pytest.mark.parametrize(("named", "last"), HOLDERS.values(), ids=HOLDERS)
def test_the_backbone_of_whatever_holds_it(checkpoint, named, last):
    content = extract_backbone({"model": named(checkpoint["model"]), "run": RUN})
    expected = _wanted(
        checkpoint["model"] if last == "res5" else _without(checkpoint["model"], "res5")
    )
    assert content["model"].keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in content["model"].items())
    meta = content["meta"]
    assert (meta["model"], meta["options"]["scope"]) == ("lambda_resnet26_slim", 3)
    assert meta["stages"] == ["stem", "res2", "res3", "res4", "res5"][: int(last[-1])]
    assert not meta.keys() & {"input_format", "pixel_mean", "folded"}
    assert meta["sha256"] == checksum(content["model"], meta)


def test_a_backbone_file_is_written_anew_as_it_is(checkpoint):
    content = extract_backbone(checkpoint)
    again = extract_backbone(content, source="b.pth")
    assert again["meta"] == content["meta"] and again["model"].keys() == content["model"].keys()
    with pytest.raises(WeightsError, match=r"b\.pth.*'ema'"):
        extract_backbone(content, source="b.pth", raw=True)
    content["model"]["res2.0.conv1.weight"] += 1
    with pytest.raises(WeightsError, match=r"b\.pth.*checksum"):
        extract_backbone(content, source="b.pth")
