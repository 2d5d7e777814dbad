"""The connection between processes: one error when it breaks, addresses of each attempt its own."""

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from detectron2.utils import comm

from lambda_det.detection import parser
from lambda_det.distributed import connection
from lambda_det.distributed import launch as launch_module
from lambda_det.distributed.launch import launch
from lambda_det.errors import LostProcessError

TWO = parser().parse_args(["--num-gpus", "2"])


def _reduce_without_rank_1(args) -> None:
    if comm.get_rank() == 1:
        os._exit(0)
    dist.all_reduce(torch.ones(3))


@pytest.mark.slow
def test_lost_connection(forked):
    """Rank 1 ends with status 0, so that the error of gloo in rank 0 is what remains."""
    with pytest.raises(LostProcessError, match=r"^Process 0 of 2 .*gloo.* --resume"):
        launch(_reduce_without_rank_1, TWO, device="cpu")


def _fall_silent(args) -> None:
    dist.all_reduce(torch.ones(3))
    if comm.get_rank() == 1:
        time.sleep(100)  # its connections stay open, until it is ended
    dist.all_reduce(torch.ones(3))


@pytest.mark.slow
def test_a_silent_process_is_waited_for_so_long(forked, monkeypatch):
    monkeypatch.setattr(connection, "AT_LENGTH", timedelta(seconds=5))
    monkeypatch.setattr(launch_module, "_TO_END", 1.0)
    with pytest.raises(LostProcessError, match=r"^Process 0 of 2 .*5000 ?ms.* --resume"):
        launch(_fall_silent, TWO, device="cpu")


@pytest.mark.parametrize(
    ("message", "is_lost"),
    [
        # As gloo and NCCL put it
        ("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:2", True),
        ("Gloo AllReduce failed: Connection reset by peer", True),
        ("Timed out waiting 1800000ms for recv operation to complete", True),
        ("ncclRemoteError: A call failed possibly due to a network error", True),
        ("NCCL communicator was aborted on rank 0.", True),
        ("Watchdog caught a timeout: OpType=ALLREDUCE timed out after 1800000 ms", True),
        ("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)", False),
        ("DataLoader timed out after 60 seconds", False),
    ],
)
def test_messages_of_a_lost_connection(monkeypatch, message, is_lost):
    monkeypatch.setattr(connection, "_store", lambda *_: None)
    for module, name in (
        (dist, "init_process_group"),
        (comm, "create_local_process_group"),
        (comm, "synchronize"),
    ):
        monkeypatch.setattr(module, name, lambda *_, **__: None)

    def work():
        raise RuntimeError(message)

    with pytest.raises(LostProcessError if is_lost else RuntimeError) as caught:
        connection.run_connected(work, "cpu", 0, 2, 0, 2)
    assert isinstance(caught.value, LostProcessError) == is_lost and message in str(caught.value)


def test_each_attempt_of_torchrun_has_its_own_addresses(monkeypatch):
    """The store is the same, and holds addresses of processes of the attempt before."""
    shared = dist.HashStore()
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(shared, 0, 2)]))

    def store(attempt, world_size=2, is_kept=True):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(is_kept))
        return connection._store(0, world_size)

    store(0).set("address", "old")
    assert store(0).check(["address"])
    assert not store(1).check(["address"]) and not store(0, 3).check(["address"])
    # A store of this attempt alone: machines may count other numbers of attempts
    assert store(1, is_kept=False).check(["address"])
