"""How processes are started, and what is refused before any of them is."""

import argparse

import pytest
import torch
from detectron2.utils import comm

from lambda_det.detection import parser
from lambda_det.distributed import launch as launch_module
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


@pytest.mark.usefixtures("forked")
def test_processes_are_connected_and_agree_on_an_error(tmp_path):
    with pytest.raises(DataError, match=r"^seen by 0$"):
        launch(_note, _args("--num-gpus", "2", "FOLDER", str(tmp_path)), device="cpu")
    assert {p.read_text() for p in tmp_path.iterdir()} == {"0 0 of 2", "1 1 of 2"}


def test_one_process_is_this_one():
    seen = []
    launch(seen.append, args := _args(), device="cpu")
    assert seen == [args]


@pytest.mark.parametrize(
    ("argv", "flag"),
    [
        (["--num-machines", "2"], "--dist-url"),
        (["--num-machines", "2", "--machine-rank", "2"], "--machine-rank 2"),
        (["--num-machines", "0"], "--num-machines 0"),
        (["--num-gpus", "-1"], "--num-gpus is -1"),
    ],
)
def test_contradictory_flags(argv, flag):
    with pytest.raises(ConfigError, match=flag):
        launch(_note, _args(*argv), device="cpu")


@pytest.mark.parametrize(
    ("device", "num_gpus", "existing", "named"),
    [
        ("cuda", 1, 0, "sees 0: add MODEL.DEVICE cpu"),
        ("cuda", 4, 2, "sees 2: lower --num-gpus to 2"),
        ("cuda:3", 1, 2, "sees 2: set MODEL.DEVICE cuda:1"),
        ("cuda:0", 2, 2, "cuda:0 is one GPU"),
        ("graphics", 1, 0, "graphics"),
    ],
)
def test_device_that_does_not_exist(monkeypatch, device, num_gpus, existing, named):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: existing > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: existing)
    with pytest.raises(ConfigError, match=named):
        check_device(device, num_gpus)
    assert check_device("cpu", 4).type == "cpu"


@pytest.fixture
def torchrun(monkeypatch, tmp_path):
    """As if torchrun had started this process; connecting it is left out."""
    for name, value in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setattr(launch_module, "run_connected", lambda work, *_: work())
    return tmp_path / "error.json"


def test_a_process_of_torchrun_does_the_work_and_reports_its_error(torchrun):
    seen = []
    launch(seen.append, args := _args(), device="cpu")
    assert seen == [args] and not torchrun.exists()
    with pytest.raises(ConfigError, match="--num-gpus"):
        launch(_note, _args("--num-gpus", "2"), device="cpu")
    assert "--num-gpus" in torchrun.read_text()
