"""The facts of a machine and its processes on which a recipe depends."""

from __future__ import annotations

import argparse
import os
from typing import NamedTuple

import torch

from lambda_det.distributed.devices import check_device
from lambda_det.threads import usable_cores
from lambda_det.training.precision import has_bfloat16

__all__ = ["Machine"]


class Machine(NamedTuple):
    """The machine of a training.

    Attributes:
        device: the one that PyTorch finds, or the given one.
        processes: of the training, on all machines together.
        memory: GiB of the smallest GPU that is used on this machine; None without one. It is not
            the free memory, because a run that is started again must get the same batch.
        is_alone: whether this process is the only one, on one machine, that chooses.
        cores: of the processor, which the processes on this machine share.
        has_bfloat16: whether the GPUs have instructions for it.
    """

    device: str
    processes: int = 1
    memory: float | None = None
    is_alone: bool = True
    cores: int = 1
    has_bfloat16: bool = True

    @classmethod
    def of(cls, args: argparse.Namespace, device: str | None) -> Machine:
        """
        Args:
            args: of the command line.
            device: the given one; None for the best that PyTorch finds here.

        Raises:
            ConfigError: there is no such device.
        """
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        processes = int(os.environ.get("WORLD_SIZE", args.num_gpus * args.num_machines))
        here = int(os.environ.get("LOCAL_WORLD_SIZE", args.num_gpus))
        parsed, memory = check_device(device, here), None
        if parsed.type == "cuda":
            used = [parsed.index] if parsed.index is not None else range(here)
            memory = min(map(_gibibytes, used))
        is_alone = args.num_machines == 1 and "WORLD_SIZE" not in os.environ
        return cls(device, processes, memory, is_alone, usable_cores(), has_bfloat16(parsed.type))


def _gibibytes(gpu: int) -> float:
    return torch.cuda.get_device_properties(gpu).total_memory / 2**30
