"""Start of the worker processes: by --num-gpus, on several machines, or under torchrun."""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from detectron2.utils import comm

from lambda_det.errors import ConfigError, UserError

__all__ = ["check_device", "launch", "on_main_process", "started_by_torchrun"]

_TIMEOUT = timedelta(minutes=30)
_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def started_by_torchrun() -> bool:
    """Whether this process is one of several that torchrun (or the like) has started already."""
    return all(name in os.environ for name in _TORCHRUN_VARIABLES)


def check_device(device: str, num_gpus: int) -> torch.device:
    """Refuse a device that is not there.

    Args:
        device: MODEL.DEVICE.
        num_gpus: processes on this machine, each with a GPU of its own unless on the CPU.

    Raises:
        ConfigError: the device is unknown or absent, or there are fewer GPUs than processes.
    """
    try:
        parsed = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"MODEL.DEVICE {device!r} is no device; use cuda or cpu.") from error
    if num_gpus < 1:
        raise ConfigError(
            f"--num-gpus is {num_gpus}; it counts processes and must be 1 or more. To train on the "
            "CPU, add MODEL.DEVICE cpu at the end of the command line."
        )
    if parsed.type != "cuda":
        return parsed
    if not torch.cuda.is_available():
        raise ConfigError(
            f"MODEL.DEVICE is {device}, but PyTorch {torch.__version__} sees no CUDA GPU here: add "
            "MODEL.DEVICE cpu at the end of the command line to use the CPU."
        )
    count = torch.cuda.device_count()
    if num_gpus > 1 and parsed.index is not None:
        raise ConfigError(
            f"MODEL.DEVICE {device} is one GPU, and {num_gpus} processes were asked for; set "
            "MODEL.DEVICE cuda."
        )
    if num_gpus > count or (parsed.index or 0) >= count:
        raise ConfigError(
            f"{num_gpus} GPU(s) with MODEL.DEVICE {device} were asked for, and this machine has "
            f"{count}: lower --num-gpus or the index."
        )
    return parsed


def launch(
    main: Callable[[argparse.Namespace], None], args: argparse.Namespace, *, device: str
) -> None:
    """Run ``main(args)`` in as many connected processes as were asked for.

    Under torchrun the processes are there and only get connected: Detectron2's ``launch`` would not
    notice them, and N trainings without a connection would write into one folder. Besides, that
    one chooses NCCL wherever there is a GPU, even for training on the CPU.

    Args:
        main: called in each process.
        args: num_gpus, num_machines, machine_rank and dist_url are used.
        device: MODEL.DEVICE.

    Raises:
        ConfigError: the flags contradict each other, the device or the address.
        UserError: what ``main`` raised in one of the processes.
    """
    if started_by_torchrun():
        _join_torchrun(main, args, device)
        return
    kind = check_device(device, args.num_gpus).type
    _check_machines(args)
    world_size = args.num_gpus * args.num_machines
    if world_size == 1:
        main(args)
        return
    url = f"tcp://127.0.0.1:{_free_port()}" if args.dist_url == "auto" else args.dist_url
    errors = mp.get_context("spawn").SimpleQueue()
    try:
        mp.start_processes(
            _spawned,
            args=(main, args, kind, world_size, url, errors),
            nprocs=args.num_gpus,
            start_method="spawn",
        )
    except (mp.ProcessExitedException, mp.ProcessRaisedException):
        # The second when another process noticed first that one had gone
        if errors.empty():
            raise
        raise errors.get() from None


def _check_machines(args: argparse.Namespace) -> None:
    if args.num_machines < 1 or not 0 <= args.machine_rank < args.num_machines:
        raise ConfigError(
            f"--machine-rank {args.machine_rank} does not fit --num-machines {args.num_machines}: "
            "it counts from 0 and is another one on each machine."
        )
    if args.num_machines > 1 and args.dist_url == "auto":
        raise ConfigError(
            "Several machines need the same --dist-url tcp://ADDRESS:PORT, with an address of the "
            "machine of rank 0 that all can reach."
        )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _spawned(local_rank, main, args, kind, world_size, url, errors) -> None:
    rank = args.machine_rank * args.num_gpus + local_rank
    try:
        _run_connected(main, args, kind, rank, world_size, local_rank, args.num_gpus, url)
    except UserError as error:
        errors.put(error)  # for the parent, who says it once
        sys.exit(2)
    # The work is done. In an orderly end a thread of PyTorch's may still abort the process, and the
    # parent would take that for a failure.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _join_torchrun(main, args, device) -> None:
    rank, world_size, local_rank, local_size = (int(os.environ[v]) for v in _TORCHRUN_VARIABLES)
    try:
        if args.num_gpus > 1 or args.num_machines > 1:
            raise ConfigError(
                f"torchrun has started {world_size} processes already: leave out --num-gpus and "
                "--num-machines, or start without torchrun."
            )
        kind = check_device(device, local_size).type
        _run_connected(main, args, kind, rank, world_size, local_rank, local_size, "env://")
    except UserError:
        if rank > 0:
            # Mostly all processes have the same to say. torchrun ends the others soon after the
            # first has spoken, so that only an error of this process alone gets past this line.
            time.sleep(10)
        raise


def _run_connected(main, args, kind, rank, world_size, local_rank, local_size, url) -> None:
    if kind == "cuda":
        torch.cuda.set_device(local_rank)
    try:
        dist.init_process_group(
            "nccl" if kind == "cuda" else "gloo",
            init_method=url,
            rank=rank,
            world_size=world_size,
            timeout=_TIMEOUT,
        )
    except (RuntimeError, ValueError) as error:  # DistNetworkError is a RuntimeError
        raise ConfigError(
            f"The processes could not be connected over {url} ({str(error).splitlines()[0]}): is "
            "the port free, and the address that of the machine of rank 0?"
        ) from error
    comm.create_local_process_group(local_size)
    comm.synchronize()
    main(args)
    # Not after an error: the others may be in a collective call, and this would wait for them
    dist.destroy_process_group()


def on_main_process(check: Callable[[], None]) -> None:
    """Run ``check`` on the first process; a UserError of it is raised on all of them."""
    error = None
    if comm.is_main_process():
        try:
            check()
        except UserError as caught:
            error = caught
    error = comm.all_gather(error)[0]
    if error is not None:
        raise error
