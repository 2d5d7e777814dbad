"""What is chosen for a GPU, by its memory and the cores of the host."""

import itertools
from pathlib import Path

import pytest

from lambda_det.own_data import choice
from lambda_det.own_data.choice import choose
from lambda_det.own_data.machine import Machine
from lambda_det.own_data.recipe import epochs_for
from lambda_det.weights import public

CPU = Machine("cpu", cores=16)
H200 = Machine("cuda", memory=139.8, cores=16)


@pytest.fixture(autouse=True)
def without_connection(monkeypatch):
    monkeypatch.setattr(choice, "_is_connected", lambda: False)


def chosen(images, machine, given=()):
    pictures = [{"id": i, "width": 640, "height": 480} for i in range(images)]
    boxes = [{"image_id": 0, "category_id": 1, "iscrowd": 0, "bbox": [0, 0, 99, 99]}]
    return choose(pictures, boxes, dict(given), machine)


@pytest.mark.parametrize(
    ("machine", "images", "batch", "loaders"),
    [
        (H200, 5000, 64, 8),  # the GPU
        (H200, 205, 20, 8),  # 30 epochs are 300 steps
        (H200._replace(cores=4), 5000, 30, 3),  # the loader processes
        (H200._replace(cores=2), 5000, 10, 1),
        (H200._replace(cores=1), 20, 4, 1),  # the recipe's own
        (H200._replace(memory=23.7), 5000, 32, 8),
        (H200._replace(memory=14.6, has_bfloat16=False), 5000, 16, 8),
        (H200._replace(memory=8.0), 5000, 16, 8),
        (H200._replace(memory=2.0, has_bfloat16=False), 5000, 4, 8),
        (H200._replace(processes=4), 5000, 4 * 30, 3),
    ],
)
def test_a_light_recipe_fills_a_gpu(machine, images, batch, loaders):
    found = chosen(images, machine)
    assert found.file.endswith("light_mobilenet_v2_openimages.yaml")
    assert found.keys["SOLVER.IMS_PER_BATCH"] == batch
    assert found.keys["DATALOADER.NUM_WORKERS"] == loaders
    rows = {what: (value, why) for what, value, why in found.rows}
    value, why = rows["SOLVER.IMS_PER_BATCH"]
    assert value == str(batch) and str(batch // machine.processes) in why


def test_a_recipe_whose_memory_was_counted_gets_loaders_alone():
    found = chosen(205, H200, {"MODEL.WEIGHTS": "timm.pth"})
    assert found.file.endswith("mask_rcnn_resnetrs101_se.yaml")
    assert found.keys["DATALOADER.NUM_WORKERS"] == 8
    assert "SOLVER.IMS_PER_BATCH" not in found.keys


def test_a_cpu_keeps_what_its_recipe_says():
    keys = chosen(205, CPU).keys
    assert not any("BATCH" in key or "WORKERS" in key for key in keys)


@pytest.mark.slow
def test_a_step_counts_tiles_as_an_epoch_does():
    images = [{"id": i, "width": 2560, "height": 1920} for i in range(100)]
    # tiles of 320 pixels overlap by 40: 9 x 7 of an image, each with an object
    boxes = [
        {"image_id": i, "category_id": 1, "iscrowd": 0, "bbox": [100 + x, 100 + y, 20, 20]}
        for i, x, y in itertools.product(range(100), range(0, 2520, 280), range(0, 1960, 280))
    ]
    found = {
        tile: choose(images, boxes, {}, H200, tile=tile).keys["SOLVER.IMS_PER_BATCH"]
        for tile in (0, 320)
    }
    tiles = 100 * 9 * 7
    assert found == {0: 10, 320: int(epochs_for(tiles, 100) * tiles / 300)}
    assert found[320] > 10


DAMAGED = {
    "missing": None,
    "cut short": lambda data: data[:-9],
    "another byte": lambda data: data[:2_000_000] + b"\0\1" + data[2_000_002:],
    "a pointer": lambda data: b"version https://git-lfs.github.com/spec/v1",
}


@pytest.mark.parametrize("machine", [CPU, H200], ids=["cpu", "gpu"])
@pytest.mark.parametrize("how", DAMAGED)
def test_a_package_with_a_damaged_start_takes_the_next_one(how, machine, tmp_path, monkeypatch):
    """And the table says why; whole files are taken in this order."""
    kept = Path(public.__file__).with_name("files")
    monkeypatch.setattr(public, "__file__", str(tmp_path / "public.py"))
    (tmp_path / "files").mkdir()
    for file in kept.iterdir():
        (tmp_path / "files" / file.name).write_bytes(file.read_bytes())
    first = tmp_path / "files" / "mobilenet_v2_openimages.pth"
    assert chosen(205, machine).file.endswith("light_mobilenet_v2_openimages.yaml")
    first.unlink() if how == "missing" else first.write_bytes(DAMAGED[how](first.read_bytes()))
    found = chosen(205, machine)
    assert found.file.endswith("light_lambdaresnet26.yaml")
    rows = {what: (value, why) for what, value, why in found.rows}
    assert rows["start"] == ("lambda://lambda_resnet26_slim", "top-1 41.4 % on Tiny ImageNet")
    state = "missing" if how == "missing" else "damaged"
    assert f"{first} is {state}" in rows["recipe"][1]
    # what is given is taken instead of the file
    named = chosen(205, machine, {"MODEL.WEIGHTS": "mine.pth"})
    assert "light_lambdaresnet26" not in named.file


def test_the_table_says_what_the_start_is():
    rows = {what: (value, why) for what, value, why in chosen(205, CPU).rows}
    value, why = rows["start"]
    assert value == "lambda://mobilenet_v2_openimages" and "Open Images" in why
