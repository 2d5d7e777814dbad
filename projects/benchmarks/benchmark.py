#!/usr/bin/env python
"""Measure what this machine does with parts of lambda_det, beside what there is elsewhere.

What a preset compares, and the options that it follows: benchmark.py --preset NAME --help
"""

from __future__ import annotations

import argparse
import inspect
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
from tabulate import tabulate

from lambda_benchmarks.measure import Group, Seconds, Setting, measure_group
from lambda_benchmarks.presets import PEERS, PRESETS
from lambda_det.distributed.launch import check_device
from lambda_det.errors import exit_status
from lambda_det.process import keep_memory

HOW_TO_READ = (
    "Medians of {rounds} rounds, in brackets the quartiles. A ratio is that of the times in one "
    "round."
)
# options of some presets, see Preset.options
OPTIONS: dict[str, dict[str, Any]] = {
    "dtype": {
        "choices": ("float32", "bfloat16", "float16"),
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
    add("--device", default="cpu", help="cpu, cuda or cuda:N (cpu)")
    for option in PRESETS[name].options if name else ():
        add(f"--{option.replace('_', '-')}", default=None, **OPTIONS[option])
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> None:
    """Measure the groups of a preset.

    Raises:
        ConfigError: an option has a value that cannot work.
    """
    device = check_device(args.device, 1, "--device")
    keep_memory()  # as trainings and predictions do
    setting = Setting(
        device=device,
        dtype=getattr(torch, getattr(args, "dtype", None) or "float32"),
        channels_last=bool(getattr(args, "channels_last", False)),
        rounds=args.runs or (3 if args.small else 5),
    )
    preset = PRESETS[args.preset]
    groups = preset.groups(args, setting)
    print(machine_line(device, preset.libraries))
    print(HOW_TO_READ.format(rounds=setting.rounds))
    for group in groups:
        print("\n" + table(group, measure_group(group, setting)), flush=True)


def table(group: Group, seconds: Seconds) -> str:
    """A row for each case: ratios, milliseconds and images per second."""
    base, rows = seconds[group.cases[0].name], []
    for case in group.cases:
        row = [case.name]
        for mode in group.modes:
            times = np.array(seconds[case.name][mode])
            low, middle, high = np.percentile(times / base[mode], (25, 50, 75))
            row += [f"{middle:.2f} ({low:.2f} to {high:.2f})", f"{1e3 * np.median(times):.3g}"]
            row.append(f"{case.images / np.median(times):.3g}" if case.images else "")
        rows.append(row)
    head = ["", *(name for m in group.modes for name in (f"{m}: ratio", "ms", "images/s"))]
    text = tabulate(rows, head, tablefmt="github", disable_numparse=True)
    return f"**{group.title}**; ratios to {group.cases[0].name}\n\n{text}"


def machine_line(device: torch.device, libraries: tuple[str, ...]) -> str:
    """The machine and the versions in one line; the load is that of the last minute."""
    facts = {
        "cpu": _cpu_name(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else "unknown",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    for name in libraries:
        try:
            facts[name] = version(name)
        except PackageNotFoundError:
            continue
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
    return ", ".join(f"{name} {value}" for name, value in facts.items())


def _cpu_name() -> str:
    """The processor's model as the system calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    return exit_status(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
