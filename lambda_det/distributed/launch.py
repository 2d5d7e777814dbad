"""How the processes of a run start: by --num-gpus, on several machines, or under torchrun.

``--num-gpus`` runs the agent of PyTorch's elastic launcher, which is torchrun's, in this process.
Two things in it are ours, because the agent would break two promises: it ends its processes 30
seconds after a signal, though one may be saving by then, and in PyTorch 2.4 it dies of SIGUSR1. So
the agent here passes signals on and goes on waiting (:class:`_Agent`). And its processes return
what a signal made of the run: the agent would end the others at an exit status such as 75.

PyTorch has no public place for either, so :class:`_Agent` overrides two private methods and reads
one private field of PyTorch's. Where another version changes them,
``tests/distributed/test_launch.py`` fails.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NoReturn

import torch
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure, get_error_handler
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from lambda_det import errors
from lambda_det.distributed.connection import run_connected
from lambda_det.distributed.devices import check_device
from lambda_det.distributed.parent import end_with_parent
from lambda_det.distributed.signals import (
    SIGNALS,
    die_of,
    heeded_signals,
    is_another_request,
    remove_at_signals,
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
)

__all__ = ["MAIN_GUARD", "end_in_import_of_main", "launch"]

Main = Callable[[argparse.Namespace], None]

_START_METHOD = "spawn"
_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# The agent names the process that it sees end first. So a process that only noticed the end of
# another ends these seconds later.
_AFTER_THE_CAUSE = 2.0
# A process does not run a handler of Python's while it waits in a collective call. Where no process
# of this machine has run its handler these seconds after a second signal, they wait for each other,
# and are killed. A process that has run its handler ends by itself, once the checkpoint that it
# writes is whole; so then none is killed here, and the agent ends the others after it.
_TO_END_AT_ONCE = 5.0
MAIN_GUARD = (
    'a script that starts a training needs the line `if __name__ == "__main__":` before it, '
    "because each process that is not forked runs the script once more"
)
# An error of ours says what the agent logs about an end
_LOGGERS = (
    "torch.distributed.elastic.agent.server.api",
    "torch.distributed.elastic.multiprocessing.api",
    "torch.multiprocessing.spawn",
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
    if all(name in os.environ for name in _TORCHRUN_VARIABLES):
        _join_torchrun(main, args, device, key)
        return
    parsed = check_device(device, args.num_gpus, key)
    if args.num_machines < 1 or not 0 <= args.machine_rank < args.num_machines:
        raise ConfigError(
            f"--machine-rank {args.machine_rank} does not fit --num-machines {args.num_machines}: "
            "it counts from 0 and differs on each machine."
        )
    if args.num_gpus * args.num_machines > 1:
        _run_agent(main, args, parsed.type)
        return
    if parsed.type == "cuda" and parsed.index is not None:
        torch.cuda.set_device(parsed)  # seeds are set on the current device at each step
    main(args)


# --------------------------------------------------------------------------------- by --num-gpus


class _Requests:
    """The signals that ask the processes of this machine to end.

    Attributes:
        signals: those that came.
        second: the one that asked for the second time; 0 for none.
    """

    def __init__(self, unheard: Path) -> None:
        """
        Args:
            unheard: a file that exists from a second request on until a process handles it.
        """
        self.signals: frozenset[int] = frozenset()
        self.second = 0
        self._unheard = unheard
        self._first_time = self._second_time = 0.0

    def take(self, number: int) -> None:
        now = time.monotonic()
        if not self.signals:
            self._first_time = now
        elif not self.second and is_another_request(number, now - self._first_time):
            self.second, self._second_time = number, now
            with suppress(OSError):  # then it does not exist, and none is killed
                self._unheard.touch()
        self.signals |= {number}

    def are_unheard(self) -> bool:
        """Whether no process has handled the second request in time; this is said once."""
        if not self.second or time.monotonic() <= self._second_time + _TO_END_AT_ONCE:
            return False
        try:
            self._unheard.unlink()
        except FileNotFoundError:
            return False
        return True


class _Agent(LocalElasticAgent):
    """Starts the processes of this machine, and waits for their end, also after a signal.

    Attributes:
        requests: the signals, each of which is passed on to the processes.
        killed_for: the signal that asked a second time, and for which they were killed; 0 if they
            ended by themselves.
    """

    requests: _Requests
    killed_for = 0

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:
        pids = super()._start_workers(worker_group)

        def pass_on(number: int, _: object) -> None:
            self.requests.take(number)
            for process in self._living():
                with suppress(ProcessLookupError):  # it has ended since
                    os.kill(process.pid, number)

        for number in heeded_signals():
            signal.signal(number, pass_on)
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Kill the processes if none has heard a second signal; then do what the agent does."""
        if self.requests.are_unheard():
            for process in self._living():
                self.killed_for = self.requests.second
                process.kill()
        return super()._monitor_workers(worker_group)

    def _living(self) -> list[BaseProcess]:
        """The processes that have not ended: other ones may get the numbers of those that have."""
        pids = self._pcontext.pids().values()
        return [child for child in multiprocessing.active_children() if child.pid in pids]


def _run_agent(main: Main, args: argparse.Namespace, device_type: str) -> None:
    about = (main, args, device_type, os.getpid(), multiprocessing.get_start_method())
    start_tracker()
    with tempfile.TemporaryDirectory(prefix="lambda_det_") as folder, _handlers_and_loggers():
        unheard = Path(folder, "unheard")
        spec = WorkerSpec(
            role="training",
            local_world_size=args.num_gpus,
            entrypoint=_member,
            args=(*about, unheard),
            rdzv_handler=get_rendezvous_handler(_rendezvous(args)),
            master_addr="localhost" if args.num_machines == 1 else None,
            max_restarts=0,
        )
        agent = _Agent(spec, DefaultLogsSpecs(log_dir=folder), _START_METHOD)
        agent.requests = _Requests(unheard)
        try:
            result = agent.run()
            stopped_by = agent.killed_for
        except SignalException as stop:  # the processes were only starting
            stopped_by = stop.sigval
        passed_on = agent.requests.signals
        del agent, spec  # which removes their semaphores; a signal would leave them to the system
    if stopped_by:
        _end_by(stopped_by)
    _raise_what_happened(result, passed_on, args.num_gpus * args.num_machines)


def _rendezvous(args: argparse.Namespace) -> RendezvousParameters:
    """Where the agents of all machines meet."""
    common = {"min_nodes": args.num_machines, "max_nodes": args.num_machines}
    if args.num_machines == 1:
        run_id = uuid.uuid4().hex
        return RendezvousParameters("c10d", "localhost:0", run_id, **common, local_addr="localhost")
    scheme, _, endpoint = args.dist_url.partition("://")
    if scheme != "tcp" or not endpoint.rpartition(":")[2].isdecimal():
        raise ConfigError(
            f"--dist-url is {args.dist_url}; several machines need the same --dist-url "
            "tcp://ADDRESS:PORT, with an address of the machine of rank 0 that all can reach."
        )
    rank = args.machine_rank
    return RendezvousParameters("static", endpoint, "lambda_det", **common, rank=rank)


@contextmanager
def _handlers_and_loggers() -> Iterator[None]:
    """Restore what the agent changes in this process; its loggers are silent in the meantime."""
    numbers = {getattr(signal, name, None) for name in ("SIGHUP", "SIGQUIT")} - {None}
    handlers = {number: signal.getsignal(number) for number in {*SIGNALS, *numbers}}
    levels = {name: logging.getLogger(name).level for name in _LOGGERS}
    try:
        for name in _LOGGERS:
            logging.getLogger(name).setLevel(logging.CRITICAL)
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        restore_handlers(handlers)


def _raise_what_happened(result: RunResult, signals: frozenset[int], world_size: int) -> None:
    if not result.is_failed():
        stops = [value for _, value in sorted(result.return_values.items()) if value is not None]
        if stops:
            raise stops[0]
        return
    rank, failure = next(iter(result.failures.items()))  # the agent ends the others at the first
    if -failure.exitcode in signals:  # it had not begun to train, or got a second signal
        _end_by(-failure.exitcode)
    if failure.exitcode == INTERRUPTED_STATUS:
        _end_by(signal.SIGINT)
    raise _error_of(failure, f"Process {rank} of {world_size}")


def _end_by(number: int) -> NoReturn:
    """End this process as a single one would by a signal that it does not catch."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    die_of(number)
    raise AssertionError("it has ended")


def _error_of(failure: ProcessFailure, name: str) -> Exception:
    """What a process raised; or one sentence on how it ended."""
    if isinstance(failure.message, dict):
        name_of_error, _, text = failure.message["message"].partition(": ")
        error = getattr(errors, name_of_error, None)
        if isinstance(error, type) and issubclass(error, UserError):
            return error(text)
        trace = failure.message["extraInfo"]["py_callstack"]
        return RuntimeError(f"{name} ended with the following error:\n{trace}")
    status = failure.exitcode
    how = f"was killed by {failure.signal_name()}" if status < 0 else f"ended with status {status}"
    if failure.signal_name() == "SIGKILL":  # which Windows does not have
        how += ", as happens when the machine runs out of memory"
    return UserError(
        f"{name} (pid {failure.pid}) {how}, and the others were ended with it. The same command "
        "with --resume continues from the last checkpoint."
    )


def _member(
    main: Main,
    args: argparse.Namespace,
    device_type: str,
    parent: int,
    start_method: str,
    unheard: Path,
) -> Preempted | Interrupted | None:
    """What a process of the agent does.

    Returns:
        What a signal made of the run. The agent would end the others if it were raised.
    """
    end_with_parent(parent)
    remove_at_signals(unheard)
    # Else its loader processes would be spawned as well, and each would import for seconds
    multiprocessing.set_start_method(start_method, force=True)
    try:
        _join(main, args, device_type)
    except (Preempted, Interrupted) as stop:
        return stop
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED_STATUS)
    return None


def _join(main: Main, args: argparse.Namespace, device_type: str) -> None:
    """Connect this process, which an agent has started, to the others, and do the work."""
    rank, world_size, local_rank, local_size = (int(os.environ[v]) for v in _TORCHRUN_VARIABLES)
    try:
        run_connected(lambda: main(args), device_type, rank, world_size, local_rank, local_size)
    except LostProcessError:
        time.sleep(_AFTER_THE_CAUSE)
        raise


# --------------------------------------------------------------------------------- under torchrun


def _join_torchrun(main: Main, args: argparse.Namespace, device: str, key: str) -> None:
    """Run ``main(args)`` in this process, one of those that torchrun has started.

    torchrun ends the others when one has failed, within ``--shutdown-timeout`` (30 s).
    """
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
        if "TORCHELASTIC_ERROR_FILE" in os.environ:  # for the causes that torchrun prints
            get_error_handler().record_exception(error)
        if rank > 0 and not isinstance(error, LostProcessError):
            # In most cases all processes raise the same error. torchrun ends the others soon after
            # rank 0 has printed it, so only an error of a single process gets past this line.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(10)
        raise
