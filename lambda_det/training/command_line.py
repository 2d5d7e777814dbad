"""The flags that all trainings have, and the start of a training by them."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from lambda_det.config import find_config_file
from lambda_det.errors import CommandParser, exit_status

if TYPE_CHECKING:
    from lambda_det.training.config_file import ConfigFile
    from lambda_det.training.task import Task

_YAML_NAMES = {
    "config": "YAML file of configuration keys, read over the defaults",
    "folder": "OUTPUT_DIR",
    "weights": "MODEL.WEIGHTS",
    "device": "MODEL.DEVICE",
    "cpu": "MODEL.DEVICE cpu",
    "opts": "configuration keys and their values, such as SOLVER.BASE_LR 0.01",
}
# Examples of every training that a YAML file describes
YAML_EXAMPLES = """
Continue after a stop; evaluate the last checkpoint; evaluate some weights:
  %(prog)s --config-file FILE --resume OUTPUT_DIR output/mine
  %(prog)s --config-file FILE --eval-only --resume OUTPUT_DIR output/mine
  %(prog)s --config-file FILE --eval-only MODEL.WEIGHTS output/mine/model_best.pth

On 2 machines of 8 GPUs (the same line on the other one, with --machine-rank 1), or by torchrun:
  %(prog)s --config-file FILE --num-gpus 8 --num-machines 2 --machine-rank 0 \\
      --dist-url tcp://ADDRESS_OF_THE_FIRST:29500
  torchrun --nproc_per_node 8 %(prog)s --config-file FILE
"""
_STATUS = """
Exit status: 0 when all is done; 2 after an error, which is one sentence; 75 when SIGTERM or SIGUSR1
of a scheduler stopped a training, which saved all and goes on with --resume; 130 after Ctrl-C,
which saves likewise: a second Ctrl-C stops at once.
"""


def run_parser(
    task: str,
    description: str,
    examples: str,
    names: Mapping[str, str] = _YAML_NAMES,
    add_first: Sequence[Callable[[argparse.ArgumentParser], None]] = (),
) -> argparse.ArgumentParser:
    """Detectron2's usual flags of a training, and --debug-numerics.

    Args:
        task: the class of the :class:`~lambda_det.training.task.Task`, as "module:name", because
            the parser must not import it.
        description: one sentence.
        examples: shown after the flags; ``%(prog)s`` is the program.
        names: what "config", "folder", "weights", "device", "cpu" and "opts" are called in the
            help; by default as in YAML files.
        add_first: each adds groups of flags, which the help shows before these.
    """
    result = CommandParser(
        description=description,
        epilog=examples + _STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    # Before Python 3.14, argparse takes a value such as -1e-5 or -0.1,0,0 for a flag
    result._negative_number_matcher = re.compile(r"-(\.?\d|inf\b|nan\b)")
    # Flags may stand before, between and after the pairs KEY VALUE
    result.parse_args = result.parse_intermixed_args
    result.set_defaults(check="")  # a function of the flags, as "module:name", which imports little
    for add in add_first:
        add(result)
    run = result.add_argument_group("the run")
    add_config_flag(run, names["config"])
    run.add_argument("--output", metavar="DIR", help=f"folder of the run; {names['folder']}")
    run.add_argument("--device", metavar="D", help=f"cpu or cuda; {names['device']}")
    run.add_argument(
        "--resume",
        action="store_true",
        help=f"continue the run in {names['folder']} from its last checkpoint; start it if there "
        "is none",
    )
    run.add_argument(
        "--eval-only",
        action="store_true",
        help=f"evaluate {names['weights']}, or with --resume the last checkpoint of "
        f"{names['folder']}",
    )
    run.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        help="show a bar, and of the log only tables, the time, evaluations and warnings, which is "
        "the default on a terminal; log.txt has all",
    )
    run.add_argument(
        "--debug-numerics",
        action="store_true",
        help="stop at the first layer whose output or gradient is NaN or infinite, and name it; "
        "training is slower",
    )
    processes = result.add_argument_group("several GPUs and machines")
    processes.add_argument(
        "--num-gpus",
        type=int,
        default=1,
        help=f"GPUs to use on this machine, one process each (with {names['cpu']}: processes)",
    )
    processes.add_argument(
        "--num-machines", type=int, default=1, help="machines that train together"
    )
    processes.add_argument(
        "--machine-rank", type=int, default=0, help="which of them this is, from 0"
    )
    processes.add_argument(
        "--dist-url",
        default="auto",
        help="where the processes meet, tcp://ADDRESS:PORT of the machine of rank 0; by default a "
        "free port of this machine",
    )
    result.add_argument("opts", nargs="*", help=names["opts"])
    result.set_defaults(task=task, keys={"output": names["folder"], "device": names["device"]})
    return result


def add_config_flag(parser: argparse._ActionsContainer, what: str = "") -> None:
    """Add the flag of a configuration file, which may also be the name of one of lambda_det's."""
    parser.add_argument(
        "--config",
        "--config-file",
        dest="config_file",
        type=find_config_file,
        default="",
        metavar="FILE",
        help=f"{what}; or the name of one that lambda_det brings",
    )


def main(
    parser: argparse.ArgumentParser,
    argv: list[str] | None = None,
    file: ConfigFile | None = None,
) -> int:
    """Do what a command line says, and return the exit status; ``file`` is as of :func:`run`."""
    args = parser.parse_args(argv)
    stopped = "stopped; --resume continues from the last checkpoint"
    return exit_status(lambda: run(args, file=file), stopped)


def quoted(value: str) -> str:
    """A value of a LazyConfig's key that may hold spaces and commas."""
    return value if re.fullmatch(r"[\w./:-]+", value) else repr(value)


def run(
    args: argparse.Namespace, task: type[Task] | None = None, file: ConfigFile | None = None
) -> None:
    """Train or evaluate as a command line says, in as many processes as it says.

    Args:
        args: of :func:`run_parser`.
        task: in place of the one that the flags name.
        file: ``args.config_file``, where it was opened already.

    Raises:
        UserError: one sentence to print.
    """
    if args.check:
        resolve_name(args.check)(args)
    from lambda_det.distributed.launch import end_in_import_of_main, launch
    from lambda_det.training import start
    from lambda_det.training.log import BufferedLog

    end_in_import_of_main()
    flags = []
    for flag, key in args.keys.items():
        if value := getattr(args, flag):
            flags += [key, value] if key.isupper() else [f"{key}={quoted(value)}"]
    args.opts = [*flags, *args.opts]  # the last key that was typed may lack its value
    if args.progress is None:
        args.progress = sys.stderr.isatty()
    kind = task or resolve_name(args.task)
    # Read here, and not in the processes, so that a mistake is reported once and at once
    with BufferedLog() as log:
        made = kind.read(args, file)
        messages = log.take()
    config_file = made.config_file or args.config_file
    work = partial(start.work, task=made, config_file=config_file, messages=messages)
    device, key = made.device
    launch(work, args, device=device, key=key)
