"""The flags that all trainings have."""

from __future__ import annotations

import argparse

__all__ = ["run_parser"]

_STATUS = """
Exit status: 0 when all is done; 2 after an error, which is one sentence; 75 when SIGTERM or SIGUSR1
of a scheduler stopped a training, which saved all and goes on with --resume; 130 after Ctrl-C.
"""


def run_parser(description: str, examples: str, keys: dict[str, str]) -> argparse.ArgumentParser:
    """Detectron2's usual flags of a training, and --debug-numerics.

    Args:
        description: one sentence.
        examples: shown after the flags; ``%(prog)s`` is the program.
        keys: how the configuration names "config", "folder", "weights", "cpu" and "opts" in the
            help.
    """
    result = argparse.ArgumentParser(
        description=description,
        epilog=examples + _STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("--config-file", default="", metavar="FILE", help=keys["config"])
    result.add_argument(
        "--resume",
        action="store_true",
        help=f"continue the run in {keys['folder']} from its last checkpoint; start it if there is "
        "none",
    )
    result.add_argument(
        "--eval-only",
        action="store_true",
        help=f"evaluate {keys['weights']}, or with --resume the last checkpoint of "
        f"{keys['folder']}",
    )
    result.add_argument(
        "--num-gpus",
        type=int,
        default=1,
        help=f"GPUs to use on this machine, one process each (with {keys['cpu']}: processes)",
    )
    result.add_argument("--num-machines", type=int, default=1, help="machines that train together")
    result.add_argument("--machine-rank", type=int, default=0, help="which of them this is, from 0")
    result.add_argument(
        "--dist-url",
        default="auto",
        help="where the processes meet, tcp://ADDRESS:PORT of the machine of rank 0; by default a "
        "free port of this machine",
    )
    result.add_argument(
        "--debug-numerics",
        action="store_true",
        help="stop at the first layer whose output or gradient is NaN or infinite, and name it; "
        "training is slower",
    )
    result.add_argument("opts", nargs=argparse.REMAINDER, help=keys["opts"])
    return result
