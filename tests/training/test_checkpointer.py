"""Checkpoints: what does not fit is an error, and what they hold.

Files with programs in them are in tests/tools/test_malicious_files.py, and what a training may
start from in tests/weights/test_loading.py.
"""

import os

import pytest
import torch

from lambda_det.errors import WeightsError
from lambda_det.training.checkpointer import SafeCheckpointer
from lambda_det.training.run_folder import RunFolder
from tests.export.toy import Detector


class _State:
    def state_dict(self):
        return {"step": 3}

    def load_state_dict(self, state):
        assert state == {"step": 3}


CLASSES, STEM = "roi_heads.box_predictor.cls_score.weight", "backbone.bottom_up.stem.conv1."


def _stem(model):
    return model.state_dict()[f"{STEM}weight"]


def _saved(path, model, **changes):
    state = {k: v for k, v in {**model.state_dict(), **changes}.items() if v is not None}
    torch.save({"model": state}, path)
    return str(path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({f"{STEM}weight": None}, rf"{STEM}weight is missing"),
        ({CLASSES: torch.ones(6, 4)}, r"cls_score\.weight has shape \[6, 4\].*\[3, 4\]"),
        # A deeper network's names are a superset, and their shapes are equal
        ({"backbone.more.weight": torch.ones(3)}, r"backbone\.more\.weight"),
        # Versions of PyTorch and Detectron2 differ in whether these are there
        (
            {
                f"{STEM}norm.num_batches_tracked": None,
                "pixel_mean": None,
                "pixel_std": torch.ones(3),
            },
            None,
        ),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(tmp_path, changes, words):
    model = Detector()
    path = _saved(tmp_path / "a.pth", model, **changes)
    _stem(model).fill_(7)
    if words is None:
        SafeCheckpointer(model).load(path)
        return
    with pytest.raises(WeightsError, match=words):
        SafeCheckpointer(model).load(path)
    assert (_stem(model) == 7).all()


@pytest.mark.parametrize("held", [(), ("trainer",)])
def test_a_run_is_not_resumed_without_all_of_its_state(tmp_path, held):
    """fvcore would leave what is missing as it is at the start, and say nothing."""
    model, source = Detector(), Detector()
    saved = SafeCheckpointer(source, str(tmp_path), **{name: _State() for name in held})
    saved.save("a")
    saved.wait()
    checkpointer = SafeCheckpointer(model, trainer=_State(), ema=_State())
    with pytest.raises(WeightsError, match=r"a\.pth lacks ema"):
        checkpointer.load(str(tmp_path / "a.pth"))
    assert not torch.equal(_stem(model), _stem(source))


def test_a_state_of_another_version_is_refused_in_a_sentence(tmp_path):
    class Changed(_State):
        def load_state_dict(self, state):
            self.step = state["spikes"]

    torch.save({"model": Detector().state_dict(), "trainer": {"step": 3}}, tmp_path / "a.pth")
    with pytest.raises(WeightsError, match=r"a\.pth lacks 'spikes'.*another version"):
        SafeCheckpointer(Detector(), trainer=Changed()).load(str(tmp_path / "a.pth"))


def test_a_checkpoint_holds_the_model_and_the_rest(tmp_path):
    model = Detector()
    checkpointer = SafeCheckpointer(model, str(tmp_path), trainer=_State())
    checkpointer.save("model_3", iteration=3)
    checkpointer.model = other = Detector()
    checkpointer.load(str(tmp_path / "model_3.pth"))  # which is still being written
    assert torch.equal(_stem(other), _stem(model))
    content = torch.load(tmp_path / "model_3.pth", weights_only=True)
    assert content["trainer"] == {"step": 3} and content["iteration"] == 3
    assert content["model"].keys() == model.state_dict().keys()
    assert content["model"]._metadata  # the versions of modules
    for silent in (
        SafeCheckpointer(model),
        SafeCheckpointer(model, str(tmp_path), save_to_disk=False),
    ):
        silent.save("other")
        silent.link("other", "model_best")
        silent.wait()
    assert sorted(os.listdir(tmp_path)) == ["last_checkpoint", "model_3.pth"]


def test_the_pointer_follows_what_was_resumed(tmp_path, monkeypatch):
    """Otherwise the pointer would call a damaged file the last good one."""
    monkeypatch.chdir(tmp_path)
    model, trainer = Detector(), {"trainer": _State()}
    checkpointer = SafeCheckpointer(model, "./", **trainer)
    for step in (1, 2, 3):
        checkpointer.save(f"model_{step:07d}")
    checkpointer.load("model_0000002.pth")
    assert RunFolder("./").last == "model_0000002.pth"
    for other in (
        SafeCheckpointer(model, **trainer),  # for a trial
        SafeCheckpointer(model, "./", save_to_disk=False, **trainer),  # in another process
    ):
        other.load("model_0000001.pth")
    assert RunFolder("./").last == "model_0000002.pth"
