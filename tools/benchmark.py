#!/usr/bin/env python
"""Measure what this machine does with parts of lambda_det, beside what there is elsewhere."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# The profiler counts allocations here; its notes about devices it can't find are of no use.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

from lambda_det.benchmarks import (
    attention_networks,
    data,
    families,
    layer,
    local,
    networks,
    placement,
    size,
)
from lambda_det.benchmarks.options import parse_preset
from lambda_det.errors import exit_status

PRESETS = {
    "local": local,
    "layer": layer,
    "attention": attention_networks,
    "placement": placement,
    "networks": networks,
    "families": families,
    "size": size,
    "data": data,
}

EXAMPLES = """Everything a preset can be told: tools/benchmark.py --preset NAME --help

examples:
  tools/benchmark.py --preset layer --small
  tools/benchmark.py --preset networks --device cuda --dtype bfloat16 --channels-last --json n.json
  tools/benchmark.py --preset size --plot size.png
"""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The options of the one preset that is asked for, and ``preset`` itself."""
    return parse_preset(argv, PRESETS, default="local", description=__doc__, epilog=EXAMPLES)


def main(argv: list[str] | None = None) -> int:
    def work() -> None:
        args = parse_args(argv)
        PRESETS[args.preset].run(args)

    return exit_status(work)


if __name__ == "__main__":
    sys.exit(main())
