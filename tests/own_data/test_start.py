"""Where a training starts: machine, recipe and weights."""

import argparse
from pathlib import Path

import pytest

from lambda_det.own_data import start
from lambda_det.own_data.start import Machine, choose_recipe
from lambda_det.weights import public

CPU = Machine("cpu", cores=16)
H200 = Machine("cuda", memory=139.8, cores=16)
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@pytest.fixture(autouse=True)
def without_connection(monkeypatch):
    monkeypatch.setattr(start, "_is_connected", lambda: False)


@pytest.mark.parametrize(
    ("variables", "processes", "is_alone"),
    [
        ({}, 1, True),
        ({"WORLD_SIZE": "1"}, 1, True),
        ({"WORLD_SIZE": "8", "RANK": "3"}, 1, True),  # of a job system, which connects nothing
        (dict.fromkeys(TORCHRUN, "1") | {"RANK": "0", "LOCAL_RANK": "0"}, 1, True),
        (dict.fromkeys(TORCHRUN, "2"), 2, False),
    ],
)
def test_processes_are_those_that_torchrun_has_started(variables, processes, is_alone, monkeypatch):
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    machine = Machine.of(argparse.Namespace(num_gpus=1, num_machines=1), "cpu")
    assert (machine.processes, machine.is_alone) == (processes, is_alone)


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
    assert choose_recipe({}, machine).file.endswith("light_mobilenet_v2_openimages.yaml")
    first.unlink() if how == "missing" else first.write_bytes(DAMAGED[how](first.read_bytes()))
    found = choose_recipe({}, machine)
    assert found.file.endswith("light_lambdaresnet26.yaml")
    rows = {what: (value, why) for what, value, why in found.rows}
    assert rows["start"] == ("lambda://lambda_resnet26_slim", "top-1 41.4 % on Tiny ImageNet")
    assert f"{first} is damaged or missing" in rows["recipe"][1]
    # what is given is taken instead of the file
    named = choose_recipe({"MODEL.WEIGHTS": "mine.pth"}, machine)
    assert "light_lambdaresnet26" not in named.file


def test_the_table_says_what_the_start_is():
    rows = {what: (value, why) for what, value, why in choose_recipe({}, CPU).rows}
    value, why = rows["start"]
    assert value == "lambda://mobilenet_v2_openimages" and "Open Images" in why
