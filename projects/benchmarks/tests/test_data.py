"""The image pipelines of the benchmarks: what is compared, and what the figures are."""

from __future__ import annotations

import io
import json

import cv2
import numpy as np
import pytest
import torch
from PIL import Image

from lambda_benchmarks import data
from lambda_det.errors import DataError
from tests.shapes import make_shapes
from tests.tool import load_tool

tool = load_tool("benchmark", "projects/benchmarks")


@pytest.fixture(autouse=True)
def _threads():
    """The data preset leaves one thread of each library."""
    before = torch.get_num_threads(), cv2.getNumThreads()
    torch.set_num_threads(2)
    cv2.setNumThreads(2)
    yield
    torch.set_num_threads(before[0])
    cv2.setNumThreads(before[1])


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    for number in range(3):
        (tmp_path / f"class {number}").mkdir()
        pixels = rng.integers(0, 256, (30, 40 + number, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"class {number}" / "image.jpg")
    return tmp_path


@pytest.fixture(scope="module")
def made():
    return data.make_files(8)


def test_pipelines_are_compared_with_pillow(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(data, "IMAGES", 3)
    monkeypatch.setattr(data, "JITTER_SIZE", 128)
    file = tmp_path / "figures.json"
    command = ["--preset", "data", "--runs", "2", "--images", str(folder), "--json", str(file)]
    assert tool.main(command) == 0
    assert torch.get_num_threads() == 1 and cv2.getNumThreads() == 1
    classes, detection, differences = capsys.readouterr().out.strip().split("\n\n")
    machine, first, *rows = classes.splitlines()
    assert f"torch {torch.__version__}" in machine
    assert first.startswith("3 images")
    figures = json.loads(file.read_text())
    assert figures["count"] == 3 and figures["images"] == str(folder)
    assert figures["mean_pixels"] == 30 * 41
    assert list(figures["pipelines"]) == list(data.pipelines())
    assert len(rows) == 2 + len(figures["pipelines"])
    for name, row in zip(figures["pipelines"], rows[2:], strict=True):
        low, median, high = figures["pipelines"][name]["images_per_second"]
        assert 0 < low <= median <= high
        assert row.startswith(f"| {name} ") and f"| {median:.0f} (" in row
        assert len(figures["pipelines"][name]["rounds"]) == 2
    assert figures["pipelines"][data.BASE]["ratio"] == [1, 1, 1]
    figures = figures["detection"]
    assert figures["annotations"] == "made on the spot" and figures["mean_objects"] == 7
    assert list(figures["pipelines"]) == list(data.mappers())
    assert figures["pipelines"][data.MAPPER_BASE]["ratio"] == [1, 1, 1]
    assert len(detection.splitlines()) == 1 + 2 + len(figures["pipelines"])
    assert len(differences.splitlines()) == 2 + len(data.SCALES)
    for scale, (mean, largest) in figures["differences"].items():
        assert mean <= largest < 50
        assert (mean > 0) == (float(scale) < 2)  # at 2 no file is twice as fine as the result


def test_records_of_a_file_are_spread_over_its_images(tmp_path):
    make_shapes(tmp_path, num_train=5, num_val=1, size=64)
    file, images = tmp_path / "shapes/annotations/instances_train.json", tmp_path / "shapes/train"
    records = data.read_records(str(file), str(images), 3)
    assert len(records) == 3 and all(record["annotations"] for record in records)
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "annotations": []}))
    with pytest.raises(DataError, match=r"instances_train\.json"):
        data.read_records(str(file), str(images), 3)


def test_image_of_each_pipeline(made):
    content = next(iter(made.values()))
    results = {name: pipeline(content, 0) for name, pipeline in data.pipelines().items()}
    width, height = results.pop(data.BASE).size
    assert results.pop("decode: lambda_det").shape == (height, width, 3)
    for name, image in results.items():
        shape = (224, 224, 3) if "lambda_det" in name else (3, 224, 224)
        kind = torch.float32 if "normalise" in name else torch.uint8
        assert torch.as_tensor(image).shape == shape, name
        assert torch.as_tensor(image).dtype == kind, name


def test_randaugment_is_on_where_named(made):
    content = next(iter(made.values()))
    crop, augment = (
        data.pipelines()[f"crop, flip{more}: lambda_det"] for more in ("", ", RandAugment(2, 15)")
    )
    changed = [not np.array_equal(crop(content, n), augment(content, n)) for n in range(20)]
    assert sum(changed) > 15  # two operations that change nothing at this strength are rare


def test_first_round_is_not_counted(monkeypatch):
    clock = [0.0]
    calls = []

    def pipeline(name, seconds):
        def work(content, number):
            calls.append((name, content, number))
            clock[0] += seconds if number >= 2 else 100

        return work

    monkeypatch.setattr(data.time, "process_time", lambda: clock[0])
    compared = {"slow": pipeline("slow", 0.5), "fast": pipeline("fast", 0.25)}
    rates = data.measure(compared, [b"a", b"b"], 2)
    order = ["slow", "fast", "fast", "slow", "fast", "slow"]
    assert [name for name, content, _ in calls if content == b"a"] == order
    assert [number for name, _, number in calls if name == "slow"] == list(range(6))
    np.testing.assert_allclose(rates["slow"], [2, 2])
    np.testing.assert_allclose(rates["fast"], [4, 4])
    summary = data.summary(rates["fast"], rates["slow"])
    assert summary["ratio"] == [2, 2, 2] and summary["images_per_second"] == [4, 4, 4]


def test_made_images_are_like_imagenet_s(made):
    assert len(made) == 8
    assert 80e3 < np.mean([len(content) for content in made.values()]) < 120e3
    assert {max(Image.open(io.BytesIO(content)).size) for content in made.values()} == {500}


def test_images_are_spread_over_a_folder(folder):
    names = [f"class {number}/image.jpg" for number in (0, 2)]
    assert list(data.read_files(str(folder), 2)) == [str(folder / name) for name in names]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--images", "{folder}/nothing"], "nothing"),
        (["--images", "{folder}/empty"], "empty"),
        (["--images", "{folder}/broken"], "a.jpg"),
        (["--annotations", "a.json"], "--images"),
        (["--images", "{folder}/class 0", "--annotations", "{folder}/no.json"], "no.json"),
    ],
)
def test_bad_images_are_refused(arguments, named, folder, capsys, monkeypatch):
    monkeypatch.setattr(data, "IMAGES", 1)
    (folder / "empty").mkdir()
    (folder / "broken").mkdir()
    (folder / "broken" / "a.jpg").write_bytes(b"no image")
    arguments = [argument.format(folder=folder) for argument in arguments]
    assert tool.main(["--preset", "data", "--runs", "1", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert named in captured.err and captured.out == ""
