"""A detector sent to the Hub and fetched from it, with a folder in place of the Hub."""

import pickle
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors import safe_open

import lambda_det
from lambda_det import cli
from lambda_det.errors import ConfigError, DataError
from lambda_det.own_data import hub
from lambda_det.own_data.command_line import push_main
from lambda_det.weights.public import fetch
from tests.malicious import Program
from tests.own_data.test_evaluate import run, shapes, whole  # noqa: F401
from tests.training.tiny_detector import save_run


@pytest.fixture
def hub_of_the_test(monkeypatch, tmp_path):
    """A folder in place of the Hub, and what was asked of it."""
    folder, asked = tmp_path / "sent", {}

    def create_repo(self, repository, **options):
        asked[repository] = options

    def upload_folder(self, *, repo_id, folder_path):
        if not asked.pop("is allowed", True):
            raise OSError("Invalid username or password.\nAsk for an account")
        shutil.copytree(folder_path, folder)
        return f"https://huggingface.co/{repo_id}/commit/1"

    def snapshot_download(repository, *, allow_patterns):
        if repository not in asked:
            raise OSError("404. Repository Not Found")
        assert all("/" not in pattern and "*" not in pattern for pattern in allow_patterns)
        return str(folder)

    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", create_repo)
    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", upload_folder)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return asked


def push(*words: object) -> int:
    return push_main([str(word) for word in words])


@pytest.mark.slow
def test_the_folder_has_a_card_and_nothing_of_this_machine(run, tmp_path):  # noqa: F811
    folder = tmp_path / "folder"
    assert push(run, "me/cells", "--folder", folder, "--license", "cc-by-4.0") == 0
    assert {path.name for path in folder.iterdir()} == {
        "README.md",
        "config.yaml",
        "model.safetensors",
    }
    card = huggingface_hub.ModelCard.load(folder / "README.md")
    assert card.data.license == "cc-by-4.0" and card.data.pipeline_tag == "image-segmentation"
    for part in (
        "circle, rectangle, triangle",
        'Predictor("hf://me/cells")',
        "averaged, step 40; box AP 12.5",  # of the weights that are sent
    ):
        assert part in card.text, part
    assert not any(str(tmp_path.parent) in file.read_text("latin1") for file in folder.iterdir())
    with safe_open(folder / "model.safetensors", "pt") as file:
        sent = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    averaged = torch.load(run / "model_final.pth")["ema"]["model"]
    assert sent.keys() == averaged.keys()
    assert all(torch.equal(sent[name], averaged[name]) for name in sent)
    # Again, into the same folder; but not into one with files of others
    assert push(run, "me/cells", "--folder", folder) == 0
    (folder / "mine.txt").write_text("keep")
    assert push(run, "me/cells", "--folder", folder) == 2


def test_what_cannot_be_pushed_is_said(run, tmp_path, capsys):  # noqa: F811
    for folder, name, part in (
        (run, "cells", "OWNER/NAME"),
        (tmp_path, "me/cells", str(run)),
        (run, "me/cells", "no checkpoint"),
    ):
        if part == "no checkpoint":
            (run / "model_final.pth").unlink()
            (run / "last_checkpoint").unlink()
        assert push(folder, name, "--folder", tmp_path / "new") == 2
        printed = capsys.readouterr().err
        assert part in printed and printed.count("\n") == 1
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_there_and_back(run, shapes, hub_of_the_test, tmp_path, capsys):  # noqa: F811
    hub_of_the_test["is allowed"] = False
    assert push(run, "me/cells") == 2
    printed = capsys.readouterr().err
    assert "me/cells was not sent" in printed and "hf auth whoami" in printed
    assert printed.count("\n") == 1
    assert push(run, "me/cells", "--private") == 0
    assert hub_of_the_test["me/cells"] == {"private": True, "exist_ok": True}
    assert "Sent: https://huggingface.co/me/cells" in capsys.readouterr().out
    image = next(Path(shapes["test_images"]).iterdir())
    ours, back = (
        lambda_det.Predictor(source, score_threshold=0)(image) for source in (run, "hf://me/cells")
    )
    assert len(ours) and (ours.boxes == back.boxes).all() and ours.names == back.names
    words = ["predict", "--input", str(image), "--output", str(tmp_path / "out")]
    assert cli.main([words[0], "hf://me/cells", *words[1:]]) == 0
    assert cli.main([words[0], "hf://me/nothing", *words[1:], "--overwrite"]) == 2
    assert "hf://me/nothing cannot be fetched" in capsys.readouterr().err


def test_nothing_that_could_run_is_fetched_or_opened(tmp_path, monkeypatch):
    folder = tmp_path / "snapshot"
    folder.mkdir()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(folder))
    for name in ("model.pt2", "model.pkl"):
        with pytest.raises(ConfigError, match="refused"):
            hub.of_hub(f"hf://me/cells/{name}")
    assert fetch("hf://me/cells").origin.endswith("me/cells/resolve/main/model.safetensors")
    with pytest.raises(DataError, match=r"has no model\.safetensors"):
        hub.of_hub("hf://me/cells")
    marker = tmp_path / "ran"
    (folder / "model.safetensors").write_bytes(pickle.dumps(Program(marker)))
    (folder / "config.yaml").write_text("model: {_target_: os.system, command: echo}\n")
    with pytest.raises(ConfigError, match="names programs to call"):
        lambda_det.Predictor("hf://me/cells")
    save_run(tmp_path / "run")
    (folder / "config.yaml").write_text((tmp_path / "run" / "config.yaml").read_text())
    with pytest.raises(lambda_det.errors.WeightsError, match="safetensors"):
        lambda_det.Predictor("hf://me/cells")
    assert not marker.exists()
