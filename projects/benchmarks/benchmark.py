#!/usr/bin/env python
"""Measure what this machine does with parts of lambda_det, beside what there is elsewhere.

What a preset compares, and the options that it follows: benchmark.py --preset NAME --help
"""

from __future__ import annotations

import argparse
import inspect
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
# The profiler counts allocations here; its notes about missing devices are of no use
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch

from lambda_benchmarks.measure import Setting, limit_memory, measure_group, say
from lambda_benchmarks.presets import PEERS, PRESETS
from lambda_benchmarks.report import (
    HOW_TO_READ,
    describe_machine,
    group_figures,
    group_table,
    machine_line,
    write_json,
)
from lambda_det.distributed.devices import check_device
from lambda_det.distributed.memory import keep_memory
from lambda_det.errors import ConfigError, exit_status

DTYPES = ("float32", "bfloat16", "float16")
# options of some presets, see Preset.options
OPTIONS: dict[str, dict[str, Any]] = {
    "dtype": {
        "choices": DTYPES,
        "help": "of the products, those other than float32 by autocast (float32)",
    },
    "channels_last": {"action": "store_true", "help": "weights and maps in that memory format"},
    "batch": {"type": int, "metavar": "N", "help": "images at a time"},
    "image_size": {"type": int, "metavar": "SIDE", "help": "side of the images"},
    "implementations": {
        "nargs": "+",
        "metavar": "NAME",
        "help": "auto or names of docs/layer.md",
    },
    "peer": {
        "nargs": "+",
        "choices": PEERS,
        "help": "also measure the layer of these packages",
    },
    "checkpoint_activations": {
        "action": "store_true",
        "help": "also a LambdaResNet that keeps only each block's input for the backward pass",
    },
    "image_sizes": {
        "nargs": "+",
        "type": int,
        "metavar": "SIDE",
        "help": "of layers and networks",
    },
    "images": {"metavar": "FOLDER", "help": "64 images, spread evenly over a folder"},
    "annotations": {
        "metavar": "FILE.json",
        "help": "of these images in COCO's format, for the pipelines of detection",
    },
}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The options of the chosen preset; options of other presets are refused."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--preset", choices=PRESETS)
    name = first.parse_known_args(argv)[0].preset
    texts = {key: inspect.getdoc(preset.groups) for key, preset in PRESETS.items()}
    summaries = "\n".join(f"  {key:10} {text.splitlines()[0]}" for key, text in texts.items())
    parser = argparse.ArgumentParser(
        description=texts.get(name, __doc__),
        epilog=f"presets:\n{summaries}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--preset", choices=PRESETS, required=True, metavar="NAME", help="what is compared")
    add("--runs", type=int, metavar="N", help="rounds that are counted (5; --small: 3)")
    add("--small", action="store_true", help="a form for two cores and two minutes")
    add("--json", metavar="FILE", help="write all figures to a new file")
    add("--device", default="cpu", help="cpu, cuda or cuda:N (cpu)")
    text = "that tensors on the CPU may take before a case is out of memory (0.9 of what is free)"
    add("--memory-limit", type=float, metavar="GB", help=text)
    for option in PRESETS[name].options if name else ():
        add(f"--{option.replace('_', '-')}", default=None, **OPTIONS[option])
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> None:
    """Measure the groups of a preset. The JSON file is written after each of them.

    Raises:
        ConfigError: an option has a value that cannot work.
    """
    if args.json and (os.path.lexists(args.json) or not Path(args.json).resolve().parent.is_dir()):
        raise ConfigError(f"{args.json} exists, or its folder does not; name a new file.")
    device = check_device(args.device, 1, "--device")
    if device.type == "cpu":
        limit_memory(args.memory_limit)
        keep_memory()  # as trainings and predictions do
    setting = Setting(
        device=device,
        dtype=getattr(torch, getattr(args, "dtype", None) or "float32"),
        # The position output alone is computed in the dtype of its inputs
        autocast=args.preset != "local",
        channels_last=bool(getattr(args, "channels_last", False)),
        rounds=args.runs or (3 if args.small else 5),
    )
    preset = PRESETS[args.preset]
    groups = preset.groups(args, setting)
    content: dict[str, Any] = {
        "options": vars(args),
        "machine": describe_machine(device, preset.libraries),
        "rounds": setting.rounds,
        "groups": [],
    }
    print(machine_line(content["machine"]))
    print(HOW_TO_READ.format(rounds=setting.rounds))
    for number, group in enumerate(groups, 1):
        say(f"group {number} of {len(groups)}")
        content["groups"].append(group_figures(group, measure_group(group, setting)))
        print("\n" + group_table(content["groups"][-1]), flush=True)
        if args.json:
            write_json(args.json, content)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    return exit_status(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
