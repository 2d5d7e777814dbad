"""One of the processes that torchrun starts, and starts again when one has failed."""

from __future__ import annotations

import argparse
import functools
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from lambda_det.distributed.connection import run_connected
from lambda_det.distributed.together import end_with_parent
from lambda_det.errors import (
    PREEMPTED_STATUS,
    ConfigError,
    LostProcessError,
    Preempted,
    UserError,
    WeightsError,
)

__all__ = ["join_torchrun", "started_by_torchrun"]

_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def started_by_torchrun() -> bool:
    """Whether this process is one of several that torchrun (or the like) has started already."""
    return all(name in os.environ for name in _TORCHRUN_VARIABLES)


def join_torchrun(
    main: Callable[[argparse.Namespace], None],
    args: argparse.Namespace,
    kind_of_device: Callable[[int], str],
) -> None:
    """Run ``main(args)`` in this process, as one of those that torchrun has started.

    torchrun ends the others when one has failed, within ``--shutdown-timeout`` (30 s).

    Args:
        main: called once; with ``args.resume`` in an attempt that torchrun has restarted.
        args: num_gpus, num_machines, eval_only and resume are used.
        kind_of_device: says "cuda" or another for the number of processes on this machine, or
            refuses.

    Raises:
        UserError, Preempted: what ``main`` raised.
    """
    rank, world_size, local_rank, local_size = (int(os.environ[v]) for v in _TORCHRUN_VARIABLES)
    if "TORCHELASTIC_RUN_ID" in os.environ:  # others that set these variables may end before us
        end_with_parent(os.getppid())
    try:
        if args.num_gpus > 1 or args.num_machines > 1:
            raise ConfigError(
                f"torchrun has started {world_size} processes already: leave out --num-gpus and "
                "--num-machines, or start without torchrun."
            )
        kind = kind_of_device(local_size)
        args = _restarted(args)
        work = functools.partial(_noting_refusals, main, args)
        run_connected(work, kind, rank, world_size, local_rank, local_size, "env://")
    except Preempted:
        if rank > 0:
            sys.exit(PREEMPTED_STATUS)  # the first process says it for all
        raise
    except LostProcessError:
        raise
    except UserError:
        if rank > 0:
            # Mostly all processes have the same to say. torchrun ends the others soon after the
            # first has spoken, so that only an error of this process alone gets past this line.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(10)
        raise


def _restarted(args: argparse.Namespace) -> argparse.Namespace:
    """With --resume, if torchrun has started us before and that attempt has got to its run."""
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) == 0 or args.eval_only:
        return args
    refusal = _refusal()
    if refusal is None:
        return args
    if refusal.exists():
        raise ConfigError(refusal.read_text("utf-8"))
    return argparse.Namespace(**{**vars(args), "resume": True})


def _noting_refusals(main: Callable[[argparse.Namespace], None], args: argparse.Namespace) -> None:
    """``main``; what it refuses is noted, as another attempt must not take up what was refused.

    That may be the folder of another run, which torchrun's restart would continue unasked.
    """
    try:
        main(args)
    except (ConfigError, WeightsError) as error:
        refusal = _refusal()
        if refusal is not None:
            refusal.write_text(str(error), "utf-8")
        raise


def _refusal() -> Path | None:
    """A file that lasts from one attempt of this torchrun to the next; None if there is no place.

    torchrun keeps a folder for each attempt beside those of the others.
    """
    report = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    return Path(report).parents[2] / "refused.txt" if report else None
