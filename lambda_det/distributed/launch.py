"""How worker processes start: by --num-gpus, on several machines, or under torchrun."""

from __future__ import annotations

import argparse
import functools
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import TypeVar

import torch
from detectron2.utils import comm
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from lambda_det.config import option
from lambda_det.distributed.connection import run_connected
from lambda_det.distributed.parent import end_with_parent
from lambda_det.distributed.spawn import spawn
from lambda_det.errors import (
    PREEMPTED_STATUS,
    ConfigError,
    LostProcessError,
    Preempted,
    UserError,
)

__all__ = ["check_device", "launch", "on_all", "on_main_process"]

T = TypeVar("T")

_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def check_device(device: str, num_gpus: int, key: str = "MODEL.DEVICE") -> torch.device:
    """Refuse a device that does not exist.

    Args:
        device: that the configuration names.
        num_gpus: processes on this machine, each with a GPU of its own unless on the CPU.
        key: the user's key for the device.

    Raises:
        ConfigError: the device is unknown or absent, or there are fewer GPUs than processes.
    """
    try:
        parsed = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"{key} {device!r} is no device; use cuda or cpu.") from error
    if num_gpus < 1:
        raise ConfigError(
            f"--num-gpus is {num_gpus}; it counts processes and must be 1 or more. "
            f"{option(key, 'cpu')} at the end of the command line uses the CPU."
        )
    if parsed.type != "cuda":
        return parsed
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    named = parsed.index is not None
    if named and num_gpus > 1:
        raise ConfigError(
            f"{option(key, device)} is one GPU, and --num-gpus {num_gpus} wants one for each "
            f"process: set {option(key, 'cuda')} for the first ones, or leave --num-gpus out."
        )
    if num_gpus > there or (named and parsed.index >= there):
        cures = [f"add {option(key, 'cpu')} at the end of the command line"]
        if there:
            other = option(key, f"cuda:{there - 1}") + " or a lower one"
            cures.insert(0, f"set {other}" if named else f"lower --num-gpus to {there}")
        raise ConfigError(
            f"{option(key, device)} with --num-gpus {num_gpus} needs more GPUs than are here, of "
            f"which PyTorch {torch.__version__} sees {there}: {' or '.join(cures)}."
        )
    return parsed


def launch(
    main: Callable[[argparse.Namespace], None],
    args: argparse.Namespace,
    *,
    device: str,
    key: str = "MODEL.DEVICE",
) -> None:
    """Run ``main(args)`` in as many connected processes as the command line asks for.

    Under torchrun the processes exist already and are only connected. Detectron2's ``launch`` does
    not notice torchrun: N unconnected trainings would write into one folder. It also chooses NCCL
    wherever there is a GPU, even for training on the CPU.

    An attempt that torchrun has restarted continues the one before it only with --resume.

    Args:
        main: called in each process.
        args: num_gpus, num_machines, machine_rank and dist_url are used.
        device: that the configuration names.
        key: the user's key for it.

    Raises:
        ConfigError: the flags contradict each other, the device or the address.
        UserError: what ``main`` raised in one of the processes, or that one of them was killed.
        Preempted: ``main`` raised it, after a signal to this process or to one of those.
    """
    if all(name in os.environ for name in _TORCHRUN_VARIABLES):
        _join_torchrun(main, args, device, key)
        return
    parsed = check_device(device, args.num_gpus, key)
    if args.num_machines < 1 or not 0 <= args.machine_rank < args.num_machines:
        raise ConfigError(
            f"--machine-rank {args.machine_rank} does not fit --num-machines {args.num_machines}: "
            "it counts from 0 and differs on each machine."
        )
    if args.num_machines > 1 and args.dist_url == "auto":
        raise ConfigError(
            "Several machines need the same --dist-url tcp://ADDRESS:PORT, with an address of the "
            "machine of rank 0 that all can reach."
        )
    world_size = args.num_gpus * args.num_machines
    if world_size == 1:
        if parsed.type == "cuda" and parsed.index is not None:
            torch.cuda.set_device(parsed)  # seeds are set on the current device at each step
        main(args)
        return
    url = args.dist_url
    if url == "auto":
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            url = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    first = args.machine_rank * args.num_gpus
    spawn(
        functools.partial(_run_spawned, main=main, args=args, device_type=parsed.type, url=url),
        [f"Process {first + index} of {world_size}" for index in range(args.num_gpus)],
    )


def _run_spawned(local_rank: int, main, args, device_type: str, url: str) -> None:
    rank = args.machine_rank * args.num_gpus + local_rank
    world_size = args.num_gpus * args.num_machines
    run_connected(lambda: main(args), device_type, rank, world_size, local_rank, args.num_gpus, url)


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
    """The same on only the main process; the others get None."""
    return on_all(work if comm.is_main_process() else lambda: None)


# Under torchrun --------------------------------------------------------------------------------


def _join_torchrun(
    main: Callable[[argparse.Namespace], None], args: argparse.Namespace, device: str, key: str
) -> None:
    """Run ``main(args)`` in this process, one of those that torchrun has started.

    torchrun ends the others when one has failed, within ``--shutdown-timeout`` (30 s).
    """
    rank, world_size, local_rank, local_size = (int(os.environ[v]) for v in _TORCHRUN_VARIABLES)
    if "TORCHELASTIC_RUN_ID" in os.environ:  # other launchers may end before their processes
        end_with_parent(os.getppid())
    try:
        if args.num_gpus > 1 or args.num_machines > 1:
            raise ConfigError(
                f"torchrun has started {world_size} processes already: leave out --num-gpus and "
                "--num-machines, or start without torchrun."
            )
        device_type = check_device(device, local_size, key).type
        run_connected(
            lambda: main(args), device_type, rank, world_size, local_rank, local_size, "env://"
        )
    except Preempted:
        if rank > 0:
            sys.exit(PREEMPTED_STATUS)  # rank 0 prints the message
        raise
    except UserError as error:
        if "TORCHELASTIC_ERROR_FILE" in os.environ:  # for the causes that torchrun prints
            get_error_handler().record_exception(error)
        if rank > 0 and not isinstance(error, LostProcessError):
            # Mostly all processes raise the same error. torchrun ends the others soon after rank 0
            # has printed it, so only an error that no other process has gets past this line.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(10)
        raise
