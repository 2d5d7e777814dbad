#!/usr/bin/env python
"""The first hour on a GPU: it measures what this project must know about a new one.

Parts of at most nine minutes run one after another, each in a process of its own. Every measurement
is written at once to OUTPUT/first_hour.json and to the table OUTPUT/first_hour.md. The same command
continues where it was stopped. With --once it runs a single part and ends with status 75 if
something is left, for machines that are lent for minutes.

a  pytest -m gpu
b  implementations of the position output and whole layers, on the maps of a 1024x1024 image: error
   against float64, time and memory, beside cuDNN's 3x3 convolution, lambda-networks and timm
c  backbones and Mask R-CNN beside Detectron2's ResNets: inference and training, with tf32, bfloat16
   and float16, with torch.compile and with activations that are computed again
d  the demo, and BCCD by the default recipe (--bccd)
e  SIGKILL and --resume
f  --num-gpus, for the numbers of GPUs that there are
g  where the time of a training step goes
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lambda_det.errors import ConfigError, exit_status

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


def run_once(args: argparse.Namespace) -> int:
    """Run one part in this process."""
    import torch

    from lambda_benchmarks.first_hour import SMALL, Place, Scale, is_broken, units
    from lambda_benchmarks.report import describe_machine
    from lambda_benchmarks.units import Record, run_part

    scale = SMALL if args.small else Scale()
    bccd = args.bccd and args.bccd.resolve()
    place = Place(args.device, args.output.resolve(), scale, bccd)
    machine = describe_machine(torch.device(args.device), ("detectron2", "triton", "timm"))
    record = Record(place.folder / "first_hour.json", machine)
    chosen = [unit for unit in units(place) if unit.part in args.parts]
    finished = run_part(chosen, record, 60 * args.minutes, lambda: is_broken(args.device))
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
    # Triton's interpreter runs the kernels; it must be set before anything imports Triton
    if args.device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")

    def work() -> int:
        check(args)
        status = run_once(args) if args.once else run_all(args, words)
        print(f"{'All is' if status == 0 else 'So far is'} in {args.output / 'first_hour.md'}")
        return status

    return exit_status(work)


if __name__ == "__main__":
    sys.exit(main())
