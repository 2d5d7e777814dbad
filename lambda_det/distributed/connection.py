"""The connection between the processes of a run, the error when it breaks, and shared work."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from detectron2.utils import comm
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from lambda_det.errors import ConfigError, LostProcessError, UserError, reason

T = TypeVar("T")

# How long a collective call may take. The end of a process is noticed at once, because its
# connections close; only a machine that loses its power or network is noticed after this time.
# A loader may take ten minutes for a batch (DATALOADER.TIMEOUT), in the first step kernels are
# compiled, and in an evaluation the others wait for rank 0's results.
AT_LENGTH = timedelta(minutes=30)
# The messages of gloo and NCCL, under any of torch's exception classes, when a process is gone
_LOST = re.compile(
    r"gloo/transport|connection (was )?(closed|reset|refused)|broken pipe|remote process exited"
    r"|ncclRemoteError|communicator was aborted|time(d )?out (waiting|after) \d+ ?ms",
    re.IGNORECASE,
)


def run_connected(
    work: Callable[[], None],
    device_type: str,
    rank: int,
    world_size: int,
    local_rank: int,
    local_size: int,
) -> None:
    """Connect this process to the others and do the work.

    Args:
        work: called once all are connected.
        device_type: "cuda", for NCCL, or another, for gloo.
        rank: of this process among all ``world_size``; ``local_rank`` among the ``local_size`` on
            this machine.

    Raises:
        ConfigError: the processes could not be connected.
        LostProcessError: another process ended while this one was waiting for it.
    """
    if device_type == "cuda":
        torch.cuda.set_device(local_rank)
    try:
        dist.init_process_group(
            "nccl" if device_type == "cuda" else "gloo",
            store=_store(rank, world_size),
            rank=rank,
            world_size=world_size,
            timeout=AT_LENGTH,
        )
    except (RuntimeError, ValueError) as error:  # DistNetworkError is a RuntimeError
        raise ConfigError(
            f"The processes could not be connected ({reason(error)}): is the port free, and "
            "does the address lead to the machine of rank 0?"
        ) from error
    try:
        comm.create_local_process_group(local_size)
        comm.synchronize()
        work()
    except RuntimeError as error:  # torch's DistError is one
        if not _LOST.search(str(error)):
            raise
        raise LostProcessError(
            f"Process {rank} of {world_size} has lost the connection to another, which has ended "
            f"or no longer answers ({reason(error)}). The same command with --resume continues "
            "from the last checkpoint."
        ) from error
    # Not after an error: this would wait for processes that are in a collective call
    dist.destroy_process_group()


def on_all(work: Callable[[], T]) -> T:
    """Do ``work`` on all processes; a UserError of one is raised on all of them."""
    result = error = None
    try:
        result = work()
    except UserError as caught:
        error = caught
    for raised in comm.all_gather(error):
        if raised is not None:
            raise raised
    return result


def on_main_process(work: Callable[[], T]) -> T | None:
    """As :func:`on_all`, with ``work`` on the main process only; the others get None."""
    return on_all(work if comm.is_main_process() else lambda: None)


def distribute(
    model: nn.Module,
    device: str,
    *,
    find_unused_parameters: bool = False,
    fp16_compression: bool = False,
) -> nn.Module:
    """The model, which averages the gradients over all processes where there are several.

    Args:
        model: on its device.
        device: of the model.
        find_unused_parameters: for a model some of whose parameters take no part in some steps.
        fp16_compression: send the gradients as float16.
    """
    if comm.get_world_size() == 1:
        return model
    device_ids = [torch.cuda.current_device()] if torch.device(device).type == "cuda" else None
    # Synchronised norms have the same running statistics on every process. Other norms save those
    # of the first process, or they are estimated over all processes before they are used.
    with warnings.catch_warnings():
        # PyTorch 2.15 wants another name for it, under which buffers are also sent at the start
        warnings.filterwarnings("ignore", ".*broadcast_buffers", FutureWarning)
        distributed = DistributedDataParallel(
            model,
            device_ids=device_ids,
            broadcast_buffers=False,
            find_unused_parameters=find_unused_parameters,
        )
    if fp16_compression:
        distributed.register_comm_hook(None, fp16_compress_hook)
    return distributed


def _store(rank: int, world_size: int) -> dist.Store:
    """The store in which the processes find each other's addresses."""
    # torchrun keeps one store over its restarts, and with PyTorch 2.15 a restarted process would
    # read the address of one that was killed. So each attempt has a prefix of its own. There is
    # none where torchrun makes a store for each attempt, because a torchrun that was started later
    # than others counts fewer attempts.
    store, _, _ = next(dist.rendezvous("env://", rank, world_size, timeout=AT_LENGTH))
    is_kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_kept else "0"
    return dist.PrefixStore(f"attempt_{attempt}_of_{world_size}", store)


# ----------------------------------------------------------------------- moments over all processes
def join(means: Tensor, variances: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, biased variance and count of all values, from the same of groups of them.

    They are weighted by count as in Chan, Golub and LeVeque (1983), which forms no difference of
    large squares.

    Args:
        means: [groups, C].
        variances: [groups, C], biased.
        counts: values per channel [groups, 1], which may be 0.
    """
    count = counts.sum()
    share = counts / count.clamp(min=1)
    mean = (share * means).sum(0)
    return mean, (share * (variances + (means - mean).square())).sum(0), count


def join_processes(mean: Tensor, var: Tensor, count: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`join` of the values of all processes, by one collective call.

    Args:
        mean: [C], of this process.
        var: [C], biased.
        count: values per channel, [1] or [], which may be 0.
    """
    local = torch.cat([mean, var, count.reshape(1)])
    # A sum of rows that are zero elsewhere is an all-gather that every backend knows
    table = local.new_zeros(comm.get_world_size(), len(local))
    table[comm.get_rank()] = local
    dist.all_reduce(table)
    return join(*table.split([len(mean), len(mean), 1], dim=1))
