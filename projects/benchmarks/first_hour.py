#!/usr/bin/env python
"""The first hour on a GPU: it measures what this project must know about a new one.

Parts of at most nine minutes run one after another, each in a process of its own. Every measurement
is written at once to OUTPUT/first_hour.json and to the table OUTPUT/first_hour.md. The same command
continues where it was stopped. For machines that are lent for minutes, --once runs a single part
and ends with status 75 if something is left; --list names the units of the parts, with the seconds
that each is thought to take, and --units chooses some of them.

a  pytest -m gpu
b  implementations of the position output and whole layers, on the maps of a 1024x1024 image: error
   against float64, time (also of the device alone) and memory, beside cuDNN's 3x3 convolution,
   lambda-networks and timm
c  backbones and Mask R-CNN beside Detectron2's ResNets: inference and training, with tf32, bfloat16
   and float16, with torch.compile, with activations that are computed again, and without functions
   that stand for several modules ("part by part"); squeeze-and-excitation and a shortcut likewise
d  the demo, a training with and without CUDA graphs, own data with several images a step, and BCCD
   by the default recipe (--bccd)
e  SIGKILL and --resume
f  --num-gpus, for the numbers of GPUs that there are
g  in which kernels the time of a training step goes
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lambda_det.errors import ConfigError, exit_status

if TYPE_CHECKING:
    from lambda_benchmarks.units import Unit

STATUS = "Exit status: 0 if all is measured, 75 if something is left, 2 if it cannot work here."
LEFT = 75
PARTS = "abcdefg"
OTHERS = {
    "timm": "timm",
    "lambda_networks": "lambda-networks",
}  # by module; part b has their layers
NEEDED = ("torch", "detectron2", "numpy", "tabulate", "pytest", "hypothesis")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=STATUS, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--output", type=Path, required=True, metavar="DIR", help="results, data and trainings")
    add("--parts", default=PARTS, metavar="LETTERS", help="of the list above (%(default)s)")
    add("--units", nargs="+", metavar="TEXT", help="those whose names contain one of the texts")
    add("--list", action="store_true", help="print the names of the units, and measure nothing")
    add("--bccd", type=Path, metavar="DIR", help="the data set BCCD, for part d")
    add("--minutes", type=float, default=9, metavar="N", help="of a part (%(default)s)")
    add("--once", action="store_true", help="a single part")
    add("--device", default="cuda", help="cuda or cpu (%(default)s)")
    add("--small", action="store_true", help="tiny sizes, to rehearse")
    args = parser.parse_args(argv)
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"--parts has {', '.join(sorted(unknown))}, and the parts are {PARTS}")
    return args


def check(args: argparse.Namespace) -> None:
    """Name what is missing before the first part.

    Raises:
        ConfigError: a package or a GPU that is needed.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"{', '.join(missing)}: not installed, and the first hour needs them.")
    for module, name in OTHERS.items():
        if importlib.util.find_spec(module) is None:
            print(f"note: {name} is not installed; part b goes without its layer", flush=True)
    from lambda_benchmarks.first_hour import device_problem

    if problem := device_problem(args.device):
        raise ConfigError(f"{problem} --device cpu --small rehearses without a GPU.")
    if args.bccd is not None and not args.bccd.is_dir():
        raise ConfigError(f"--bccd {args.bccd} is no folder.")


def chosen_units(args: argparse.Namespace) -> list[Unit]:
    """The units of the parts that are chosen.

    Raises:
        ConfigError: no unit has such a name.
    """
    from lambda_benchmarks.first_hour import SMALL, Place, Scale, units

    scale = SMALL if args.small else Scale()
    bccd = args.bccd and args.bccd.resolve()
    place = Place(args.device, args.output.resolve(), scale, bccd)
    texts = args.units or [""]
    chosen = [
        unit
        for unit in units(place)
        if unit.part in args.parts and any(text in unit.name for text in texts)
    ]
    if not chosen:
        raise ConfigError(
            f"No unit of the parts {args.parts} has a name with {' or '.join(texts)}; --list "
            "prints the names."
        )
    return chosen


def run_once(args: argparse.Namespace) -> int:
    """Run one part in this process."""
    import torch

    from lambda_benchmarks.first_hour import is_broken
    from lambda_benchmarks.report import describe_machine
    from lambda_benchmarks.units import Results, run_part

    chosen = chosen_units(args)
    machine = describe_machine(torch.device(args.device), ("detectron2", "cuda-bindings", "timm"))
    results = Results(args.output.resolve() / "first_hour.json", machine)
    finished = run_part(chosen, results, 60 * args.minutes, lambda: is_broken(args.device))
    return 0 if finished else LEFT


def run_all(args: argparse.Namespace, words: list[str]) -> int:
    """Run parts in separate processes, until nothing is left."""
    file = args.output / "first_hour.json"
    while True:
        before = file.read_bytes() if file.exists() else b""
        # A kernel may hang, which only the end of its process stops
        process = subprocess.Popen([sys.executable, __file__, *words, "--once"])
        try:
            status = process.wait(60 * args.minutes + 120)
        except subprocess.TimeoutExpired:
            status = LEFT
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
        if status in (0, 2):
            return status
        if not file.exists() or file.read_bytes() == before:
            raise ConfigError(f"The part ended with status {status} and has measured nothing.")


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    args = parse_args(words)

    def work() -> int:
        if args.list:
            for unit in chosen_units(args):
                print(f"{unit.part}  {unit.name}: {unit.seconds:.0f} s")
            return 0
        check(args)
        status = run_once(args) if args.once else run_all(args, words)
        print(f"{'All is' if status == 0 else 'So far is'} in {args.output / 'first_hour.md'}")
        return status

    return exit_status(work)


if __name__ == "__main__":
    sys.exit(main())
