"""How processes are started, and what is refused before any of them is."""

from __future__ import annotations

import argparse

import pytest
import torch
from detectron2.utils import comm

from lambda_det.detection import parser
from lambda_det.distributed.launch import check_device, launch, on_main_process
from lambda_det.errors import ConfigError, DataError


def _args(*argv: str) -> argparse.Namespace:
    return parser().parse_args(list(argv))


def _note(args):
    rank = comm.get_rank()
    with open(f"{args.opts[1]}/{rank}", "w") as file:
        file.write(f"{rank} {comm.get_local_rank()} of {comm.get_world_size()}")

    def check():
        raise DataError(f"seen by {rank}")

    on_main_process(check)


def test_processes_are_connected_and_an_error_is_told_once(tmp_path):
    with pytest.raises(DataError, match=r"^seen by 0$"):
        launch(_note, _args("--num-gpus", "2", "FOLDER", str(tmp_path)), device="cpu")
    assert {p.read_text() for p in tmp_path.iterdir()} == {"0 0 of 2", "1 1 of 2"}


def test_one_process_runs_here():
    seen = []
    launch(seen.append, args := _args(), device="cpu")
    assert seen == [args]


def test_torchrun_with_num_gpus_is_refused(monkeypatch):
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(ConfigError, match="torchrun has started 2 processes already"):
        launch(_note, _args("--num-gpus", "2"), device="cpu")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--num-machines", "2"], "--dist-url"),
        (["--num-machines", "2", "--machine-rank", "2"], "--machine-rank 2"),
        (["--num-machines", "0"], "--num-machines 0"),
        (["--num-gpus", "-1"], "--num-gpus is -1"),
    ],
)
def test_flags_that_contradict_each_other(argv, words):
    with pytest.raises(ConfigError, match=words):
        launch(_note, _args(*argv), device="cpu")


@pytest.mark.parametrize(
    ("device", "num_gpus", "there", "words"),
    [
        ("cuda", 1, 0, "MODEL.DEVICE cpu"),
        ("cuda", 4, 2, "this machine has 2"),
        ("cuda:3", 1, 2, "this machine has 2"),
        ("cuda:1", 2, 2, "is one GPU"),
        ("graphics", 1, 0, "no device"),
    ],
)
def test_a_device_that_is_not_there(monkeypatch, device, num_gpus, there, words):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    with pytest.raises(ConfigError, match=words):
        check_device(device, num_gpus)
    assert check_device("cpu", 4).type == "cpu"
