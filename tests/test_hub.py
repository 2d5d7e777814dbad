"""A detector sent to the Hub and fetched from it, with a stand-in of its API on this machine."""

import base64
import hashlib
import json
import os
import pickle
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import cv2
import huggingface_hub
import numpy as np
import pytest
import torch
import yaml
from safetensors import safe_open

import lambda_det
from lambda_det import hub
from lambda_det.config import read_plain
from lambda_det.errors import ConfigError, DataError
from lambda_det.weights.public import fetch
from tests.coco import annotation, coco_content
from tests.malicious import Program
from tests.training.tiny_detector import save_run, tiny_config

ROOT = Path(__file__).resolve().parents[1]
NAMES = {2: "red cell", 7: "white cell", 9: "platelet"}
TOKEN = "hf_ofthistest"


class Hub(BaseHTTPRequestHandler):
    """What huggingface_hub asks for when it makes a repository, sends a folder and fetches one."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, content=b"", status=200, **headers):
        self.send_response(status)
        for name, value in {"Content-Length": len(content), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def answer_json(self, content, status=200):
        self.answer(json.dumps(content).encode(), status, Content_Type="application/json")

    def body(self):
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def do_PUT(self):
        content = self.body()
        assert hashlib.sha256(content).hexdigest() == self.path.removeprefix("/lfs/")
        self.server.large[self.path.removeprefix("/lfs/")] = content
        self.answer()

    def do_POST(self):
        body, path = self.body(), self.path
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.answer_json({"error": "Invalid username or password."}, 401)
        elif path == "/api/repos/create":
            self.server.made.append(json.loads(body))
            self.answer_json({"url": f"{self.server.url}/me/cells"})
        elif path == "/api/validate-yaml":
            self.answer_json({"errors": [], "warnings": []})
        elif "/preupload/" in path:
            modes = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(body)["files"]
            ]
            self.answer_json({"files": modes})
        elif path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            for entry in objects:
                href = f"{self.server.url}/lfs/{entry['oid']}"
                entry["actions"] = {"upload": {"href": href}}
            self.answer_json({"transfer": "basic", "objects": objects})
        else:
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    self.server.files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    self.server.files[value["path"]] = self.server.large[value["oid"]]
            self.answer_json(
                {"commitUrl": f"{self.server.url}/me/cells/commit/1", "commitOid": 40 * "1"}
            )

    def do_GET(self):
        name = self.path.partition("?")[0].partition("/resolve/")[2].partition("/")[2]
        if self.path.startswith("/api/models/me/cells/tree/"):
            entries = self.server.files.items()
            tree = [{"type": "file", "path": k, "size": len(v), "oid": k} for k, v in entries]
            self.answer_json(tree)
        elif self.path.startswith("/api/models/me/cells"):
            siblings = [{"rfilename": file} for file in self.server.files]
            self.answer_json({"id": "me/cells", "sha": 40 * "1", "siblings": siblings})
        elif self.path.startswith("/me/cells/") and name in self.server.files:
            content = self.server.files[name]
            about = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X_Repo_Commit": 40 * "1"}
            self.answer(content, **about)
        else:
            self.answer(b"", 404, X_Error_Code="RepoNotFound")

    do_HEAD = do_GET


@pytest.fixture
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        server.url = f"http://127.0.0.1:{server.server_port}"
        server.files, server.large, server.made = {}, {}, []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def run(tmp_path) -> Path:
    """A finished run with averaged weights, its data, and what its evaluation found."""
    folder, data = tmp_path / "run", tmp_path / "data"
    config, checkpoint = save_run(folder)
    data.mkdir()
    picture = np.random.default_rng(0).integers(0, 255, (48, 64, 3), dtype=np.uint8)
    cv2.imwrite(str(data / "a.png"), picture)
    objects = [
        annotation(1, 1, [10, 10, 30, 20], category_id=7),
        annotation(2, 1, [40, 5, 10, 9], category_id=2),
    ]
    (data / "cells.json").write_text(json.dumps(coco_content({1: "a.png"}, objects, NAMES)))
    saved = read_plain(tiny_config().dump())
    names = ("TRAIN_JSON", "TRAIN_IMAGES", "TEST_JSON", "TEST_IMAGES")
    places = [str(data / "cells.json"), str(data)] * 2
    saved["DATASETS"] |= dict(zip(names, places, strict=True))
    saved["OUTPUT_DIR"] = str(folder)
    config.write_text(yaml.safe_dump(saved))
    content = torch.load(checkpoint)
    averaged = {
        name: 1.01 * t if t.is_floating_point() else t for name, t in content["model"].items()
    }
    dataset = {"thing_classes": list(NAMES.values()), "thing_ids": list(NAMES)}
    content |= {"ema": {"model": averaged}, "iteration": 99, "dataset": dataset}
    torch.save(content, checkpoint)
    (folder / "inference").mkdir()
    found = {"image_id": 1, "category_id": 7, "bbox": [10, 10, 30, 20], "score": 0.9}
    (folder / "inference" / "coco_instances_results.json").write_text(json.dumps([found]))
    logged = {"iteration": 99, "bbox/AP": 12.3, "bbox_EMA/AP": 45.6}
    (folder / "metrics.json").write_text(json.dumps(logged) + "\n")
    return folder


def push(*words: object) -> int:
    return hub.main([str(word) for word in words])


def test_the_folder_has_a_card_and_nothing_of_this_machine(run, tmp_path):
    folder = tmp_path / "folder"
    assert push(run, "me/cells", "--folder", folder, "--license", "cc-by-4.0") == 0
    assert {path.name for path in folder.iterdir()} == {
        *("README.md", "config.yaml", "model.safetensors", "picture.jpg")
    }
    card = (folder / "README.md").read_text("utf-8")
    front = yaml.safe_load(card.split("---")[1])
    assert front["license"] == "cc-by-4.0" and front["pipeline_tag"] == "image-segmentation"
    for part in (
        *(
            "red cell, white cell, platelet",
            "averaged weights: 45.6",
            "| white cell |",
            "cells.json",
        ),
        *('Predictor("hf://me/cells")', "after 100 steps", "2 objects", "averaged weights after"),
    ):
        assert part in card, part
    assert "12.3" not in card  # of the weights that are not sent
    assert not any(str(tmp_path) in file.read_text("latin1") for file in folder.iterdir())
    with safe_open(folder / "model.safetensors", "pt") as file:
        sent = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    averaged = torch.load(run / "model_final.pth")["ema"]["model"]
    assert sent.keys() == averaged.keys()
    assert all(torch.equal(sent[name], averaged[name]) for name in sent)
    # Again, into the same folder; but not into one with files of others
    assert push(run, "me/cells", "--folder", folder, "--no-picture") == 0
    assert not (folder / "picture.jpg").exists()
    (folder / "mine.txt").write_text("keep")
    assert push(run, "me/cells", "--folder", folder) == 2


def test_the_folder_predicts_as_the_run_does(run, tmp_path):
    assert push(run, "me/cells", "--dry-run") == 0
    image = cv2.imread(str(tmp_path / "data" / "a.png"))
    ours, theirs = (
        lambda_det.Predictor(folder, score_threshold=0)(image) for folder in (run, run / "hub")
    )
    assert len(ours) and theirs.names == ours.names
    assert np.array_equal(ours.boxes, theirs.boxes) and np.array_equal(ours.scores, theirs.scores)


def test_an_exported_detector_goes_with_its_checkpoint_only(run, tmp_path, capsys):
    checkpoint = hashlib.sha256((run / "model_final.pth").read_bytes()).hexdigest()
    (run / "mine.onnx").write_bytes(b"graph")
    about = {"sha256": checkpoint, "outputs": ["boxes", "scores"], "config": str(run)}
    (run / "mine.onnx.json").write_text(json.dumps(about))
    folder = tmp_path / "folder"
    assert push(run, "me/cells", "--folder", folder) == 0
    assert (folder / "detector.onnx").read_bytes() == b"graph"
    assert json.loads((folder / "detector.onnx.json").read_text())["config"] == "run"
    assert "hf://me/cells/detector.onnx" in (folder / "README.md").read_text("utf-8")
    (run / "mine.onnx.json").write_text(json.dumps({**about, "sha256": "of another"}))
    assert push(run, "me/cells", "--folder", folder) == 0
    assert not (folder / "detector.onnx").exists() and "mine.onnx" in capsys.readouterr().out


def test_what_cannot_be_pushed_is_said(run, tmp_path, capsys):
    for folder, name, part in (
        (run, "cells", "OWNER/NAME"),
        (tmp_path / "data", "me/cells", "config.yaml"),
    ):
        assert push(folder, name, "--folder", tmp_path / "new") == 2
        printed = capsys.readouterr().err
        assert part in printed and printed.count("\n") == 1
    (run / "model_final.pth").unlink()
    (run / "last_checkpoint").unlink()
    assert push(run, "me/cells", "--folder", tmp_path / "new") == 2
    assert "has no checkpoint" in capsys.readouterr().err
    (run / "config.yaml").write_text("model: {_target_: os.system}\n")
    assert push(run, "me/cells", "--folder", tmp_path / "new") == 2
    assert "LazyConfig" in capsys.readouterr().err and not (tmp_path / "new").exists()


def test_a_run_without_its_data_has_a_card(run, tmp_path, capsys):
    (tmp_path / "data" / "cells.json").unlink()
    assert push(run, "me/cells", "--folder", tmp_path / "folder") == 0
    assert "cells.json" in capsys.readouterr().out
    assert "45.6" in (tmp_path / "folder" / "README.md").read_text("utf-8")


@pytest.mark.slow
def test_there_and_back(run, server, tmp_path):
    """With the real huggingface_hub, which reads the address of the Hub at its import."""
    environment = {
        **os.environ,
        "HF_ENDPOINT": server.url,
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_DISABLE_XET": "1",
        "FVCORE_CACHE": str(tmp_path / "cache"),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    for name in ("HF_HUB_OFFLINE", "HF_TOKEN"):
        environment.pop(name, None)
    picture = str(tmp_path / "data" / "a.png")
    code = f"""
import os
import lambda_det
from lambda_det.cli import main
from lambda_det.weights.loading import read_weights

push = ["push", {str(run)!r}, "me/cells", "--private"]
assert main(push) == 2
os.environ["HF_TOKEN"] = {TOKEN!r}
assert main(push) == 0
sources = {str(run)!r}, "hf://me/cells"
ours, back = (lambda_det.Predictor(s, score_threshold=0)({picture!r}) for s in sources)
assert len(ours) and (ours.boxes == back.boxes).all() and ours.names == back.names
assert len(read_weights("hf://me/cells")["model"]) > 9
predict = ["predict", "--input", {picture!r}, "--output", {str(tmp_path / "out")!r}]
assert main([*predict, "--model", "hf://me/cells"]) == 0
assert main([*predict, "--model", "hf://me/nothing", "--overwrite"]) == 2
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"Sent: {server.url}/me/cells" in done.stdout
    assert "private" in json.dumps(server.made[0]) and len(server.files) == 4
    for part in ("me/cells was not sent", "hf auth whoami", "hf://me/nothing cannot be fetched"):
        assert part in done.stderr


def test_a_name_is_that_of_its_safetensors():
    assert fetch("hf://me/cells").origin.endswith("me/cells/resolve/main/model.safetensors")


def test_nothing_that_could_run_is_fetched_or_opened(tmp_path, monkeypatch):
    folder = tmp_path / "snapshot"
    folder.mkdir()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(folder))
    for name in ("model.pt2", "model.pkl"):
        with pytest.raises(ConfigError, match="refused"):
            hub.of_hub(f"hf://me/cells/{name}")
    with pytest.raises(DataError, match=r"has no config\.yaml"):
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
