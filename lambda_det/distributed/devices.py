"""Check the device that a user names against the devices of this machine."""

from __future__ import annotations

import torch

from lambda_det.config import option
from lambda_det.errors import ConfigError


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
            f"{option(key, device)} with --num-gpus {num_gpus} needs more GPUs than are here; "
            f"PyTorch {torch.__version__} sees {there}: {' or '.join(cures)}."
        )
    return parsed
