"""Checkpoints: nothing in them is run, and what does not fit is an error.

What training may start from is in tests/weights/test_loading.py.
"""

from __future__ import annotations

import os
import pickle

import pytest
import torch
from detectron2.modeling import Backbone, build_model
from torch import nn

from lambda_det.detection import DetectionTask
from lambda_det.errors import ConfigError, WeightsError
from lambda_det.training.checkpoint_files import last_checkpoint
from lambda_det.training.checkpointer import SafeCheckpointer
from lambda_det.training.trainer import Trainer
from tests.training.tiny_detector import tiny_config


class _State:
    def state_dict(self):
        return {"step": 3}

    def load_state_dict(self, state):
        assert state == {"step": 3}


class _Network(Backbone):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 3, 1)
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x):
        return {"stem": self.norm(self.stem(x))}


CLASSES = "roi_heads.box_predictor.cls_score.weight"
OTHER = "roi_heads.box_head.weight"


class _Detector(nn.Module):
    def __init__(self, classes=2):
        super().__init__()
        self.backbone = _Network()
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
    checkpointer.load(_saved(tmp_path / "good.pth", _Detector()), [])


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
        SafeCheckpointer(_Detector()).load(str(path), [])


def _load(checkpointer, path):
    checkpointer.load(path, [])


def _start_from(checkpointer, path):
    checkpointer.load_initial_weights(path)


@pytest.mark.parametrize(
    ("way", "changes", "words"),
    [
        (_load, {"backbone.stem.bias": None}, r"backbone\.stem\.bias is missing"),
        (_load, {CLASSES: torch.ones(6, 4)}, r"cls_score\.weight has shape \[6, 4\].*\[3, 4\]"),
        # A deeper network's names are a superset, and their shapes are equal
        (_load, {"backbone.more.weight": torch.ones(3)}, r"backbone\.more\.weight"),
        (
            _start_from,
            {"backbone.norm.running_var": None},
            r"1 of its 6 tensors .*running_var",
        ),
        (_start_from, {OTHER: torch.ones(4, 5)}, r"does not fit the model: roi_heads\.box_head\.w"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(tmp_path, way, changes, words):
    model = _Detector()
    model.roi_heads["box_head"] = nn.Linear(4, 4)
    path = _saved(tmp_path / "a.pth", model, **changes)
    model.backbone.stem.weight.data.fill_(7)
    with pytest.raises(WeightsError, match=words):
        way(SafeCheckpointer(model), path)
    assert (model.backbone.stem.weight == 7).all()


def test_what_need_not_be_there(tmp_path):
    model = _Detector()
    changes = {"backbone.norm.num_batches_tracked": None, "pixel_mean": None}
    # Some versions of Detectron2 keep the pixel settings in it
    changes["pixel_std"] = torch.ones(3)
    SafeCheckpointer(model).load(_saved(tmp_path / "a.pth", model, **changes), [])


@pytest.mark.parametrize("held", [(), ("trainer",)])
def test_a_run_is_not_resumed_without_all_of_its_state(tmp_path, held):
    """fvcore would leave what is missing as it is at the start, and say nothing."""
    model, source = _Detector(), _Detector()
    saved = SafeCheckpointer(source, str(tmp_path), **{name: _State() for name in held})
    saved.save("a")
    saved.wait()
    checkpointer = SafeCheckpointer(model, trainer=_State(), ema=_State())
    with pytest.raises(WeightsError, match=r"a\.pth lacks ema"):
        checkpointer.load(str(tmp_path / "a.pth"))
    assert not torch.equal(model.backbone.stem.weight, source.backbone.stem.weight)


def test_training_may_start_from_other_classes_alone(tmp_path):
    source, model = _Detector(classes=5), _Detector()
    before = model.roi_heads["box_predictor"]["cls_score"].weight.clone()
    SafeCheckpointer(model).load_initial_weights(_saved(tmp_path / "a.pth", source))
    assert torch.equal(model.backbone.stem.weight, source.backbone.stem.weight)
    assert torch.equal(model.roi_heads["box_predictor"]["cls_score"].weight, before)


def test_a_log_line_says_what_was_loaded(tmp_path, caplog):
    source = {k: v for k, v in _Detector().state_dict().items() if "cls_score" not in k}
    torch.save({"model": {**source, "extra": torch.ones(1)}}, tmp_path / "a.pth")
    with caplog.at_level("INFO"):
        SafeCheckpointer(_Detector()).load_initial_weights(str(tmp_path / "a.pth"))
    line = next(r.getMessage() for r in caplog.records if r.getMessage().startswith("Loaded"))
    assert "Loaded 6 of the model's 8 tensors from the weights of" in line
    assert "start afresh: roi_heads.box_predictor.cls_score.weight, " in line
    assert line.endswith("unused in the file: extra")


def test_a_run_compares_its_pixel_settings_with_the_file(tmp_path):
    cfg = tiny_config()
    model = build_model(cfg)
    pixels = {"input_format": "BGR", "pixel_mean": [9.0] * 3, "pixel_std": cfg.MODEL.PIXEL_STD}
    torch.save({"model": model.state_dict(), "meta": pixels}, tmp_path / "a.pth")
    cfg.MODEL.WEIGHTS = str(tmp_path / "a.pth")
    with pytest.raises(ConfigError, match=r"MODEL\.PIXEL_MEAN \[9\.0, 9\.0, 9\.0\] \(now"):
        Trainer(DetectionTask(cfg))


def test_a_checkpoint_holds_the_model_and_the_rest(tmp_path):
    model = _Detector()
    checkpointer = SafeCheckpointer(model, str(tmp_path), trainer=_State())
    checkpointer.save("model_3", iteration=3)
    checkpointer.wait()
    content = torch.load(tmp_path / "model_3.pth", weights_only=True)
    assert content["trainer"] == {"step": 3} and content["iteration"] == 3
    assert content["model"].keys() == model.state_dict().keys()
    assert content["model"]._metadata  # the versions of modules
    assert sorted(os.listdir(tmp_path)) == ["last_checkpoint", "model_3.pth"]
    for other in (
        SafeCheckpointer(model),
        SafeCheckpointer(model, str(tmp_path), save_to_disk=False),
    ):
        other.save("other")
        other.link("other", "model_best")
        other.wait()
    assert sorted(os.listdir(tmp_path)) == ["last_checkpoint", "model_3.pth"]


def test_a_checkpoint_that_is_being_written_can_be_loaded(tmp_path):
    source, model = _Detector(), _Detector()
    checkpointer = SafeCheckpointer(source, str(tmp_path))
    checkpointer.save("model_3")
    checkpointer.model = model
    checkpointer.load(str(tmp_path / "model_3.pth"), [])
    assert torch.equal(model.backbone.stem.weight, source.backbone.stem.weight)


def test_the_pointer_follows_what_was_resumed(tmp_path, monkeypatch):
    """Otherwise the pointer would call a damaged file the last good one."""
    monkeypatch.chdir(tmp_path)
    model, trainer = _Detector(), {"trainer": _State()}
    checkpointer = SafeCheckpointer(model, "./", **trainer)
    for step in (1, 2, 3):
        checkpointer.save(f"model_{step:07d}")
    checkpointer.load("model_0000002.pth")
    assert last_checkpoint("./") == "./model_0000002.pth"
    SafeCheckpointer(model, "./", **trainer).load("model_0000001.pth", [])  # evaluation
    for other in (
        SafeCheckpointer(model, **trainer),  # for a trial
        SafeCheckpointer(model, "./", save_to_disk=False, **trainer),  # in another process
    ):
        other.load("model_0000001.pth")
    assert last_checkpoint("./") == "./model_0000002.pth"
