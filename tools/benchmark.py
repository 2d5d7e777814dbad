#!/usr/bin/env python
"""Measure what this machine does with parts of lambda_det, beside what there is elsewhere."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lambda_det.errors import exit_status
from tools.benchmarks import data, local

PRESETS = {"local": local, "data": data}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--preset", choices=PRESETS, default="local", help="what to measure (%(default)s)"
    )
    parser.add_argument("--runs", type=int, default=5, help="of each, after one more (%(default)s)")
    for name, module in PRESETS.items():
        summary, _, _ = module.__doc__.partition("\n\n")
        module.add_arguments(parser.add_argument_group(f"--preset {name}", summary))
    args = parser.parse_args(argv)
    if args.runs < 1:
        parser.error(f"--runs is {args.runs}; give 1 or more")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    return exit_status(lambda: PRESETS[args.preset].run(args))


if __name__ == "__main__":
    sys.exit(main())
