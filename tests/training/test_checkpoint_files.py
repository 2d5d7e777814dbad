"""Which checkpoint of a run folder is taken, whatever has happened to the folder."""

import os
from pathlib import Path

import pytest
import torch

from lambda_det.errors import WeightsError
from lambda_det.training import checkpointer
from lambda_det.training.checkpointer import link_file
from lambda_det.training.run_folder import RunFolder, find_checkpoint


def _save(folder, *steps):
    for step in steps:
        name = step if isinstance(step, str) else f"model_{step:07d}.pth"
        torch.save({"model": {"w": torch.ones(99)}, "iteration": step}, folder / name)


def _damage(path):
    """weights/test_formats.py has the other ways."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.fixture
def folder(tmp_path):
    _save(tmp_path, 1, 3, 5)
    RunFolder(tmp_path).point_to("model_0000005.pth")
    return tmp_path


def _taken(folder):
    return os.path.basename(RunFolder(folder).read_newest().path)


def test_that_which_the_pointer_names(folder, caplog):
    assert _taken(folder) == "model_0000005.pth"
    RunFolder(folder).point_to("model_0000003.pth")  # somebody went back
    assert _taken(folder) == "model_0000003.pth"
    assert not caplog.records
    _damage(folder / "model_0000003.pth")
    assert _taken(folder) == "model_0000001.pth"  # and not one after it


def test_a_folder_by_another_name(folder, caplog, monkeypatch):
    for name, here in ((f"./{folder.name}", folder.parent), ("./", folder)):
        monkeypatch.chdir(here)
        RunFolder(name).remove_old(1, last=5)
        newest = str(Path(name, "model_0000005.pth"))
        assert RunFolder(name).read_newest().path == RunFolder(name).last == newest
    assert not caplog.records


def test_an_empty_folder_and_none(tmp_path):
    assert RunFolder(tmp_path).read_newest() is RunFolder(tmp_path / "none").read_newest() is None


def test_the_one_before_a_damaged_one(folder, caplog):
    for damaged, taken in ((5, 3), (3, 1)):
        _damage(folder / f"model_000000{damaged}.pth")
        assert _taken(folder) == f"model_000000{taken}.pth"
        said = caplog.messages[-1]
        assert f"_000000{damaged}.pth cannot be read" in said and f"_000000{taken}.pth is" in said
    assert "_0000005.pth cannot be read" in said  # the second time both are named
    _damage(folder / "model_0000001.pth")
    with pytest.raises(WeightsError, match=r"No checkpoint.*whole.*model_0000003\.pth"):
        RunFolder(folder).read_newest()


def test_a_file_without_a_model_is_none_of_ours(folder, caplog):
    torch.save({"weights": torch.ones(2)}, folder / "model_0000005.pth")
    assert _taken(folder) == "model_0000003.pth"
    assert "holds no model" in caplog.text


POINTERS = {
    "missing": None,
    "empty": b"",
    "gone": b"model_0000009.pth",
    "up": b"../HERE/model_0000001.pth",
    "absolute": b"FOLDER/model_0000001.pth",
    "binary": bytes(range(256)),
    "zero": b"model_0000001.pth\0",
    "long": b"m" * 5000,
}


@pytest.mark.parametrize("content", POINTERS.values(), ids=POINTERS)
def test_a_pointer_that_names_nothing(folder, caplog, content):
    path = folder / "last_checkpoint"
    path.unlink()
    if content is not None:
        content = content.replace(b"HERE", os.fsencode(folder.name))
        path.write_bytes(content.replace(b"FOLDER", os.fsencode(folder)))
    named = str(folder / "model_0000009.pth") if content == POINTERS["gone"] else ""
    assert RunFolder(folder).last == named
    assert _taken(folder) == "model_0000005.pth"
    assert len(caplog.records) == 1 and "model_0000005.pth is taken, the newest" in caplog.text


def test_a_pointer_without_any_file(tmp_path):
    RunFolder(tmp_path).point_to("model_0000005.pth")
    with pytest.raises(WeightsError, match=r"names is not there .*model_0000005\.pth"):
        RunFolder(tmp_path).read_newest()


def test_the_final_one_without_a_pointer(folder):
    (folder / "last_checkpoint").unlink()
    _save(folder, "model_final.pth", "model_best.pth")
    assert _taken(folder) == "model_final.pth"
    os.utime(folder / "model_final.pth", (1, 1))  # the run was made longer later
    assert _taken(folder) == "model_0000005.pth"


def test_old_ones_are_removed(folder):
    """Never that which the pointer names, and no file of another name."""
    others = {"model_final.pth", "model_best.pth", "model_12.pth"}
    _save(folder, 7, 12345678, *others)

    def left(keep, last):
        RunFolder(folder).remove_old(keep, last=last)
        assert others <= {path.name for path in folder.iterdir()}
        return [int(path.stem.removeprefix("model_")) for path in RunFolder(folder).numbered()]

    assert left(9, 10**9) == [1, 3, 5, 7, 12345678]  # more than there are
    assert left(2, 5) == [3, 5, 7, 12345678]
    assert left(1, 10**9) == [5, 12345678]
    RunFolder(folder).point_to("model_12345678.pth")
    assert left(0, 10**9) == [12345678]


def test_temporary_files_are_removed(folder):
    for name in ("model_0000009.pth.tmp", "last_checkpoint.tmp", "notes.tmp"):
        (folder / name).touch()
    RunFolder(folder).remove_temporary_files()
    assert [path.name for path in folder.glob("*.tmp")] == ["notes.tmp"]


@pytest.mark.parametrize("links", [True, False])
def test_a_second_name(folder, monkeypatch, links):
    if not links:

        def refuse(*_):
            raise OSError

        monkeypatch.setattr(checkpointer.os, "link", refuse)
    (folder / "model_best.pth").write_text("older")
    for _ in range(2):  # as a resumed run does
        link_file(folder / "model_0000003.pth", folder / "model_best.pth")
    assert torch.load(folder / "model_best.pth", weights_only=True)["iteration"] == 3
    RunFolder(folder).remove_old(1, last=5)
    assert torch.load(folder / "model_best.pth", weights_only=True)["iteration"] == 3
    with pytest.raises(FileNotFoundError):
        link_file(folder / "model_0000003.pth", folder / "other.pth")
    assert not list(folder.glob("*.tmp"))


def test_the_checkpoint_of_a_run(tmp_path):
    assert find_checkpoint(tmp_path / "nothing.pth") == str(tmp_path / "nothing.pth")
    (tmp_path / "data").mkdir()
    with pytest.raises(WeightsError, match="no training was started"):
        find_checkpoint(tmp_path)
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
