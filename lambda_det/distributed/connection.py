"""The connection between the processes of a run, and what is said when it breaks."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from detectron2.utils import comm

from lambda_det.errors import ConfigError, LostProcessError, reason

__all__ = ["run_connected"]

# Of a collective call: the others wait in one while the first process evaluates its results or
# reads a large index, for minutes. A process that ends is noticed at once, as its connections
# close; only a machine that loses its power or its network is noticed as late as this.
_TIMEOUT = timedelta(minutes=30)
# What gloo and NCCL say, under whichever class of torch's, when another process is gone
_LOST = re.compile(
    r"gloo/transport|connection (was )?(closed|reset|refused)|broken pipe|remote process exited"
    r"|ncclRemoteError|communicator was aborted|time(d )?out (waiting|after) \d+ ?ms",
    re.IGNORECASE,
)


def run_connected(
    work: Callable[[], None],
    kind: str,
    rank: int,
    world_size: int,
    local_rank: int,
    local_size: int,
    url: str,
) -> None:
    """Connect this process to the others and do the work.

    Args:
        work: called once all are connected.
        kind: "cuda", for NCCL, or another device, for gloo.
        rank: of this process among all ``world_size``; ``local_rank`` of ``local_size`` on this
            machine.
        url: where they meet; "env://" under torchrun.

    Raises:
        ConfigError: they did not come together.
        LostProcessError: another process ended while this one was waiting for it.
    """
    if kind == "cuda":
        torch.cuda.set_device(local_rank)
    try:
        dist.init_process_group(
            "nccl" if kind == "cuda" else "gloo",
            store=_store(url, rank, world_size),
            rank=rank,
            world_size=world_size,
            timeout=_TIMEOUT,
        )
    except (RuntimeError, ValueError) as error:  # DistNetworkError is a RuntimeError
        raise ConfigError(
            f"The processes could not be connected over {url} ({reason(error)}): is the port free, "
            "and the address that of the machine of rank 0?"
        ) from error
    try:
        comm.create_local_process_group(local_size)
        comm.synchronize()
        work()
    except RuntimeError as error:  # torch's DistError and its kinds are RuntimeErrors
        if not _LOST.search(str(error)):
            raise
        raise LostProcessError(
            f"Process {rank} of {world_size} has lost the connection to another, which has ended "
            f"or no longer answers ({reason(error)}). The same command with --resume continues "
            "from the last checkpoint."
        ) from error
    # Not after an error: the others may be in a collective call, and this would wait for them
    dist.destroy_process_group()


def _store(url: str, rank: int, world_size: int) -> dist.Store:
    """Where the processes read each other's addresses.

    torchrun keeps one store over its restarts, and PyTorch (2.15) would have a restarted process
    read the address of one that was killed. So every attempt has names of its own there.
    """
    store, _, _ = next(dist.rendezvous(url, rank, world_size, timeout=_TIMEOUT))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"attempt_{attempt}_of_{world_size}", store)
