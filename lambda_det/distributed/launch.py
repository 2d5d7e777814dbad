"""Start of the worker processes: by --num-gpus, on several machines, or under torchrun."""

from __future__ import annotations

import argparse
import functools
import socket
from collections.abc import Callable

import torch
from detectron2.utils import comm

from lambda_det.distributed.connection import run_connected
from lambda_det.distributed.together import run_together
from lambda_det.distributed.torchrun import join_torchrun, started_by_torchrun
from lambda_det.errors import ConfigError, UserError

__all__ = ["check_device", "launch", "on_main_process"]


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

    Under torchrun a restarted attempt goes on where the one before it was, as with --resume.

    Raises:
        ConfigError: the flags contradict each other, the device or the address.
        UserError: what ``main`` raised in one of the processes, or that one of them was killed.
        Preempted: ``main`` raised it, after a signal that came to this process or to those.
    """
    if started_by_torchrun():
        join_torchrun(main, args, lambda count: check_device(device, count).type)
        return
    parsed = check_device(device, args.num_gpus)
    _check_machines(args)
    world_size = args.num_gpus * args.num_machines
    if world_size == 1:
        if parsed.type == "cuda" and parsed.index is not None:
            torch.cuda.set_device(parsed)  # whose random numbers are seeded at each step
        main(args)
        return
    url = f"tcp://127.0.0.1:{_free_port()}" if args.dist_url == "auto" else args.dist_url
    first = args.machine_rank * args.num_gpus
    run_together(
        functools.partial(_spawned, main=main, args=args, kind=parsed.type, url=url),
        [f"Process {first + index} of {world_size}" for index in range(args.num_gpus)],
    )


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


def _spawned(local_rank: int, main, args, kind: str, url: str) -> None:
    rank = args.machine_rank * args.num_gpus + local_rank
    world_size = args.num_gpus * args.num_machines
    run_connected(lambda: main(args), kind, rank, world_size, local_rank, args.num_gpus, url)


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
