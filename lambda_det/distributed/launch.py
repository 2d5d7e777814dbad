"""How the processes of a run start: by --num-gpus, on several machines, or under torchrun.

``--num-gpus`` starts the processes of this machine itself. torchrun and PyTorch's elastic agent end
theirs 30 seconds after a signal, though one may be saving by then, at an exit status other than 0
such as 75, and in PyTorch 2.4 at SIGUSR1. Here signals are passed on, and the end is waited for.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import NoReturn

import torch
import torch.distributed as dist

from lambda_det.config import option
from lambda_det.distributed.connection import AT_LENGTH, run_connected
from lambda_det.distributed.signals import (
    die_of,
    end_with_parent,
    heeded_signals,
    is_another_request,
    restore_handlers,
    start_tracker,
)
from lambda_det.errors import (
    INTERRUPTED_STATUS,
    PREEMPTED_STATUS,
    ConfigError,
    Interrupted,
    LostProcessError,
    Preempted,
    UserError,
    reason,
)

Main = Callable[[argparse.Namespace], None]

_START_METHOD = "spawn"
_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# The process that ends first is the cause. So one that only noticed the end of another ends later
_AFTER_THE_CAUSE = 2.0
# A process does not run a handler of Python's while it waits in a collective call, and one may be
# writing a checkpoint. Those that run these seconds after the end of another, or after a second
# signal, are killed; a third signal kills them at once.
_TO_END = 30.0
MAIN_GUARD = (
    'a script that starts a training needs the line `if __name__ == "__main__":` before it, '
    "because each process that is not forked runs the script once more"
)


def end_in_import_of_main() -> None:
    """End a process that is only importing the script of the one that started it.

    Python refuses as well, once a process is to be started: until then the data are read again and
    the folder of the run is written to.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        # A forkserver does not print what sys.exit is given
        print(f"error: {MAIN_GUARD}", file=sys.stderr, flush=True)
        sys.exit(2)


def launch(main: Main, args: argparse.Namespace, *, device: str, key: str = "MODEL.DEVICE") -> None:
    """Run ``main(args)`` in as many connected processes as the command line asks for.

    Under torchrun the processes exist already and are only connected. Detectron2's ``launch`` does
    not notice torchrun: N unconnected trainings would write into one folder. It also chooses NCCL
    wherever there is a GPU, even for training on the CPU.

    An attempt that torchrun has restarted continues the one before it only with --resume.

    Args:
        main: called in each process; can be pickled where there are several.
        args: num_gpus, num_machines, machine_rank and dist_url are used.
        device: that the configuration names.
        key: the user's key for it.

    Raises:
        ConfigError: the flags contradict each other, the device or the address.
        UserError: what ``main`` raised in one of the processes, or that one of them was killed.
        Preempted, Interrupted: ``main`` raised it, after a signal to this process or to one of
            those.
    """
    if under_torchrun():
        _join_torchrun(main, args, device, key)
        return
    parsed = check_device(device, args.num_gpus, key)
    if args.num_machines < 1 or not 0 <= args.machine_rank < args.num_machines:
        raise ConfigError(
            f"--machine-rank {args.machine_rank} does not fit --num-machines {args.num_machines}: "
            "it counts from 0 and differs on each machine."
        )
    if args.num_gpus * args.num_machines > 1:
        _start_processes(main, args, parsed.type)
        return
    if parsed.type == "cuda" and parsed.index is not None:
        torch.cuda.set_device(parsed)  # seeds are set on the current device at each step
    main(args)


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
    if not there:
        raise ConfigError(
            f"{option(key, device)} needs a GPU, and PyTorch sees none here: give --device cpu in "
            f"its place, or {option(key, 'cpu')} at the end of the command line."
        )
    is_one = parsed.index is not None
    # PyTorch makes negative numbers of those above 127
    if num_gpus > there or (is_one and (num_gpus > 1 or not 0 <= parsed.index < there)):
        raise ConfigError(
            f"{option(key, device)} with --num-gpus {num_gpus} does not fit the GPUs that are "
            f"here; PyTorch sees {there}: lower --num-gpus, set "
            f"{option(key, 'cuda')} for the first ones, or add {option(key, 'cpu')} at the end of "
            "the command line."
        )
    return parsed


# --------------------------------------------------------------------------------- by --num-gpus


class _Processes:
    """The processes of this machine, to which signals are passed on.

    Attributes:
        requests: the signals that asked to end, without copies of one.
        killed_for: the signal that asked again, and for which they were killed; 0 if they ended by
            themselves.
    """

    def __init__(self, processes: list[BaseProcess]) -> None:
        self._processes = processes
        self.requests: list[int] = []
        self.killed_for = 0
        self._asked_at, self._end_at = -math.inf, math.inf

    def pass_on(self, number: int, _: object) -> None:
        now = time.monotonic()
        if is_another_request(number, now - self._asked_at):
            self.requests.append(number)
            self._asked_at = now
            if len(self.requests) > 1:
                self._end_at = now if len(self.requests) > 2 else now + _TO_END
        for process in filter(BaseProcess.is_alive, self._processes):
            with suppress(ProcessLookupError):  # it has ended since
                os.kill(process.pid, number)

    def wait(self) -> BaseProcess | None:
        """Wait for the end of all; returns the first that failed."""
        failed = None
        while living := [process for process in self._processes if process.is_alive()]:
            connection.wait([process.sentinel for process in living], timeout=0.5)
            if failed is None and (failed := self._failed()):
                self._end_at = min(self._end_at, time.monotonic() + _TO_END)
            if time.monotonic() > self._end_at:
                self.killed_for = 0 if failed else self.requests[-1]
                for process in living:
                    process.kill()
                    process.join()
        return failed or self._failed()

    def _failed(self) -> BaseProcess | None:
        return next((process for process in self._processes if process.exitcode), None)


def _start_processes(main: Main, args: argparse.Namespace, device_type: str) -> None:
    """Start the processes of this machine, and raise what they made of the run."""
    world_size = args.num_gpus * args.num_machines
    store = _meeting_place(args)
    shared = {
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": args.num_gpus,
        "MASTER_ADDR": store.host,
        "MASTER_PORT": store.port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_RESTART_COUNT": 0,
    }
    about = (main, args, device_type, os.getpid())
    start_tracker()
    context = multiprocessing.get_context(_START_METHOD)
    processes: dict[BaseProcess, connection.Connection] = {}
    try:
        for local_rank in range(args.num_gpus):
            rank = args.machine_rank * args.num_gpus + local_rank
            variables = {**shared, "RANK": rank, "LOCAL_RANK": local_rank}
            receiver, sender = context.Pipe(duplex=False)
            member = (variables, sender, *about)
            process = context.Process(target=_member, args=member, name=str(rank))
            process.start()
            processes[process] = receiver
    except BaseException:  # such as of too little memory: Python would wait for those at its end
        for process in processes:
            process.kill()
        raise
    running = _Processes([*processes])
    handlers = {number: signal.signal(number, running.pass_on) for number in heeded_signals()}
    try:
        failed = running.wait()
    finally:
        restore_handlers(handlers)
    if running.killed_for:
        _end_by(running.killed_for)
    if failed and failed.exitcode == INTERRUPTED_STATUS:
        _end_by(signal.SIGINT)
    if failed and -failed.exitcode in running.requests:  # it had not begun to train
        _end_by(-failed.exitcode)
    for pipe in [processes[failed]] if failed else processes.values():
        with suppress(EOFError):  # it was killed
            if pipe.poll() and (raised := pipe.recv()):
                raise raised
    if failed:
        raise UserError(_end_of(failed, world_size))


def _meeting_place(args: argparse.Namespace) -> dist.TCPStore:
    """The store in which all processes find each other; the first machine's command has it."""
    host, port = "localhost", 0  # so none of the processes has to find a free port
    if args.num_machines > 1:
        scheme, _, endpoint = args.dist_url.partition("://")
        host, _, digits = endpoint.rpartition(":")
        if scheme != "tcp" or not digits.isdecimal():
            raise ConfigError(
                f"--dist-url is {args.dist_url}; several machines need the same --dist-url "
                "tcp://ADDRESS:PORT, with an address of the machine of rank 0 that all can reach."
            )
        port = int(digits)
    is_first = args.machine_rank == 0
    try:
        store = dist.TCPStore(
            host, port, is_master=is_first, timeout=AT_LENGTH, wait_for_workers=False
        )
        if is_first:
            store.set("num_gpus", str(args.num_gpus))
        of_first = int(store.get("num_gpus"))
    except (RuntimeError, ValueError) as error:  # DistNetworkError is a RuntimeError
        raise ConfigError(
            f"The machines could not meet at --dist-url {args.dist_url} ({reason(error)}): is the "
            "port free, and does the address lead to the machine of rank 0?"
        ) from error
    if args.num_gpus != of_first:
        raise ConfigError(
            f"--num-gpus is {args.num_gpus} here and {of_first} on the machine of rank 0; give all "
            "machines the same number."
        )
    return store


def _end_of(process: BaseProcess, world_size: int) -> str:
    """One sentence on how a process ended that has raised nothing."""
    status = process.exitcode
    how = f"ended with status {status}"
    if status < 0:
        how = f"was killed by {signal.Signals(-status).name}"
    if how.endswith("SIGKILL"):
        how += ", as happens when the machine runs out of memory"
    return (
        f"Process {process.name} of {world_size} (pid {process.pid}) {how}, and the others were "
        "ended with it. The same command with --resume continues from the last checkpoint."
    )


def _end_by(number: int) -> NoReturn:
    """End this process as a single one would by a signal that it does not catch."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    die_of(number)
    raise AssertionError("it has ended")


def _member(
    variables: dict[str, object],
    pipe: connection.Connection,
    main: Main,
    args: argparse.Namespace,
    device_type: str,
    parent: int,
) -> None:
    """What a started process does; it sends what it raises."""
    end_with_parent(parent)
    os.environ.update({name: str(value) for name, value in variables.items()})
    try:
        _join(main, args, device_type)
    except (Preempted, Interrupted) as stop:
        pipe.send(stop)  # status 0: the others may still be saving
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED_STATUS)
    except UserError as error:
        pipe.send(error)
        sys.exit(2)
    except Exception:
        where = f"Process {variables['RANK']} of {variables['WORLD_SIZE']}"
        text = traceback.format_exc()[-20_000:]  # a pipe that nobody reads yet holds 64 KiB
        pipe.send(RuntimeError(f"{where} ended with the following error:\n{text}"))
        sys.exit(1)


def _join(main: Main, args: argparse.Namespace, device_type: str) -> None:
    """Connect this process to the others, and do the work."""
    rank, world_size, local_rank, local_size = (int(os.environ[v]) for v in _TORCHRUN_VARIABLES)
    try:
        run_connected(lambda: main(args), device_type, rank, world_size, local_rank, local_size)
    except LostProcessError:
        time.sleep(_AFTER_THE_CAUSE)
        raise


# --------------------------------------------------------------------------------- under torchrun


def under_torchrun() -> bool:
    """Whether torchrun, or a launcher like it, has started this process; some job systems set
    WORLD_SIZE, and no other variable of it.
    """
    return all(name in os.environ for name in _TORCHRUN_VARIABLES)


def _join_torchrun(main: Main, args: argparse.Namespace, device: str, key: str) -> None:
    """Run ``main(args)`` in this process, one of those that torchrun has started."""
    # torchrun ends the others when one has failed, within --shutdown-timeout (30 s)
    rank = int(os.environ["RANK"])
    if "TORCHELASTIC_RUN_ID" in os.environ:  # other launchers may end before their processes
        end_with_parent(os.getppid())
    try:
        if args.num_gpus > 1 or args.num_machines > 1:
            raise ConfigError(
                f"torchrun has started {os.environ['WORLD_SIZE']} processes already: leave out "
                "--num-gpus and --num-machines, or start without torchrun."
            )
        _join(main, args, check_device(device, int(os.environ["LOCAL_WORLD_SIZE"]), key).type)
    except (Preempted, Interrupted) as stop:
        if rank > 0:  # rank 0 prints the message
            sys.exit(PREEMPTED_STATUS if isinstance(stop, Preempted) else INTERRUPTED_STATUS)
        raise
    except UserError as error:
        if rank > 0 and not isinstance(error, LostProcessError):
            # In most cases all processes raise the same error. torchrun ends the others soon after
            # rank 0 has printed it, so only an error of a single process gets past this line.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(10)
        raise
