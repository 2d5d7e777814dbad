"""Checkpoints: nothing in them is run, and what does not fit is an error."""

from __future__ import annotations

import os
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from lambda_det.engine.checkpointer import SafeCheckpointer, last_checkpoint
from lambda_det.errors import WeightsError


class _Detector(nn.Module):
    def __init__(self, classes=2, width=3):
        super().__init__()
        self.backbone = nn.ModuleDict(
            {"stem": nn.Conv2d(3, width, 1), "norm": nn.BatchNorm2d(width)}
        )
        self.roi_heads = nn.ModuleDict(
            {"box_predictor": nn.ModuleDict({"cls_score": nn.Linear(4, classes + 1)})}
        )
        self.register_buffer("pixel_mean", torch.zeros(3))


def _saved(path, model, **changes):
    state = {k: v for k, v in {**model.state_dict(), **changes}.items() if v is not None}
    torch.save({"model": state}, path)
    return str(path)


class _Program:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("name", ["w.pth", "w.pkl", "w.pyth"])
def test_a_program_in_a_file_is_not_run(tmp_path, name):
    evil, mark = {"model": {"a": _Program(tmp_path / "ran")}, "__author__": "x"}, tmp_path / "ran"
    path = tmp_path / name
    if name.endswith(".pkl"):
        path.write_bytes(pickle.dumps(evil))
    else:
        torch.save(evil, path)
    checkpointer = SafeCheckpointer(_Detector())
    with pytest.raises(WeightsError, match="refused"):
        checkpointer.load_initial_weights(str(path))
    assert not mark.exists()
    # Detectron2's checkpointer cannot load anything any more after an error
    checkpointer.load_complete_model(_saved(tmp_path / "good.pth", _Detector()))


def test_a_pickle_of_arrays_is_read(tmp_path):
    source, target = _Detector(), _Detector()
    arrays = {k: v.numpy() for k, v in source.state_dict().items()}
    data = {"model": arrays, "__author__": "someone", "lr": np.float32(0.1)}
    for protocol in (2, 4):
        (tmp_path / "w.pkl").write_bytes(pickle.dumps(data, protocol=protocol))
        SafeCheckpointer(target).load_complete_model(str(tmp_path / "w.pkl"))
        assert torch.equal(target.backbone["stem"].weight, source.backbone["stem"].weight)


@pytest.mark.parametrize("damage", ["cut", "empty", "text", "absent", "list"])
def test_a_file_that_is_no_checkpoint(tmp_path, damage):
    path = tmp_path / "w.pth"
    _saved(path, _Detector())
    content = path.read_bytes()
    if damage == "absent":
        path.unlink()
    elif damage == "list":
        torch.save([1, 2], path)
    else:
        path.write_bytes({"cut": content[: len(content) // 2], "empty": b"", "text": b"hi"}[damage])
    with pytest.raises(WeightsError, match=str(path)):
        SafeCheckpointer(_Detector()).load_complete_model(str(path))


def test_everything_must_be_there_to_evaluate(tmp_path):
    model = _Detector()
    without = {"backbone.norm.num_batches_tracked": None, "pixel_mean": None}
    SafeCheckpointer(model).load_complete_model(_saved(tmp_path / "a.pth", model, **without))
    path = _saved(tmp_path / "b.pth", model, **{"backbone.stem.bias": None})
    with pytest.raises(WeightsError, match=r"backbone\.stem\.bias is missing"):
        SafeCheckpointer(model).load_complete_model(path)
    path = _saved(tmp_path / "c.pth", _Detector(classes=5))
    with pytest.raises(WeightsError, match=r"cls_score\.weight has shape \[6, 4\].*\[3, 4\]"):
        SafeCheckpointer(model).load_complete_model(path)


def test_a_run_is_not_resumed_from_weights_alone(tmp_path):
    model, source = _Detector(), _Detector()
    before = model.backbone["stem"].weight.clone()
    with pytest.raises(WeightsError, match=r"a\.pth holds weights alone.*MODEL\.WEIGHTS"):
        SafeCheckpointer(model).load_everything(_saved(tmp_path / "a.pth", source))
    assert torch.equal(model.backbone["stem"].weight, before)
    SafeCheckpointer(source, str(tmp_path), trainer=nn.Linear(1, 1)).save("b")
    SafeCheckpointer(model, trainer=nn.Linear(1, 1)).load_everything(str(tmp_path / "b.pth"))
    assert torch.equal(model.backbone["stem"].weight, source.backbone["stem"].weight)


def test_training_may_start_from_other_classes_alone(tmp_path):
    source, model = _Detector(classes=5), _Detector()
    before = model.roi_heads["box_predictor"]["cls_score"].weight.clone()
    SafeCheckpointer(model).load_initial_weights(_saved(tmp_path / "a.pth", source))
    assert torch.equal(model.backbone["stem"].weight, source.backbone["stem"].weight)
    assert torch.equal(model.roi_heads["box_predictor"]["cls_score"].weight, before)
    path = _saved(tmp_path / "b.pth", _Detector(width=7))
    with pytest.raises(WeightsError, match=r"backbone\.stem\.weight has shape"):
        SafeCheckpointer(model).load_initial_weights(path)


def test_a_file_with_nothing_of_the_backbone(tmp_path):
    bare = {k.removeprefix("backbone."): v for k, v in _Detector().backbone.state_dict().items()}
    torch.save(bare, tmp_path / "bare.pth")
    with pytest.raises(WeightsError) as caught:
        SafeCheckpointer(_Detector()).load_initial_weights(str(tmp_path / "bare.pth"))
    for words in ("Nothing of the backbone", "backbone.stem.weight", "the file has", "norm.weight"):
        assert words in str(caught.value)


def test_last_checkpoint(tmp_path):
    assert last_checkpoint(str(tmp_path)) == ""
    (tmp_path / "last_checkpoint").write_text("")
    assert last_checkpoint(str(tmp_path)) == ""
    SafeCheckpointer(_Detector(), str(tmp_path)).save("model_3")
    assert last_checkpoint(str(tmp_path)) == str(tmp_path / "model_3.pth")
