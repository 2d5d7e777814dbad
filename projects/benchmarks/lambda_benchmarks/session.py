"""A preset from its options to the table, the JSON file and the plot."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from lambda_benchmarks.measure import Setting, duration, measure_group
from lambda_benchmarks.memory import available_memory
from lambda_benchmarks.presets import PRESETS
from lambda_benchmarks.report import (
    HOW_TO_READ,
    describe_machine,
    group_figures,
    group_table,
    machine_line,
    write_json,
)
from lambda_det.distributed.launch import check_device
from lambda_det.errors import ConfigError


def run(args: argparse.Namespace) -> None:
    """Run the preset that the command line of projects/benchmarks/benchmark.py names.

    The JSON file is written after every group, so that the figures of a stopped run are kept.

    Raises:
        ConfigError: an option has a value that cannot work.
    """
    if args.runs is not None and args.runs < 1:
        raise ConfigError(f"--runs is {args.runs}; give 1 or more.")
    check_new_files(args)
    if args.preset == "data":
        from lambda_benchmarks import data

        data.run(args)
        return
    setting = setting_of(args)
    preset = PRESETS[args.preset]
    groups = preset.groups(args, setting)
    machine = describe_machine(setting.device, preset.libraries)
    content: dict[str, Any] = {
        "preset": args.preset,
        "options": {name: value for name, value in vars(args).items() if name != "preset"},
        "machine": machine,
        "device": str(setting.device),
        "dtype": str(setting.dtype).removeprefix("torch."),
        "channels_last": setting.channels_last,
        "rounds": setting.rounds,
        "memory_limit": setting.memory_limit,
        "groups": [],
    }
    cases = sum(len(group.cases) for group in groups)
    say(f"{len(groups)} groups of {cases} cases together, {setting.rounds} rounds each")
    print(machine_line(machine))
    layout = ", channels_last" if setting.channels_last else ""
    how_to_read = HOW_TO_READ.format(rounds=setting.rounds)
    print(f"{setting.device}, {content['dtype']}{layout}. {how_to_read}")
    start = time.monotonic()
    for number, group in enumerate(groups, 1):
        place = f"[{number}/{len(groups)}]"
        results = measure_group(group, setting, lambda line, place=place: say(f"{place} {line}"))
        content["groups"].append(group_figures(group, results))
        print("\n" + group_table(group, results), flush=True)
        if args.json:
            write_json(args.json, content)
        if number < len(groups):
            # The groups differ, so this is no more than a guess
            left = duration((time.monotonic() - start) / number * (len(groups) - number))
            say(f"{number} of {len(groups)} groups done; {left} left if the rest is alike")
    preset.finish(content, setting)
    if args.json:
        write_json(args.json, content)
        say(f"written: {args.json}")
    if args.plot:
        preset.draw(content, args.plot)
        say(f"written: {args.plot}")


def say(line: str) -> None:
    """Print apart from the figures."""
    print(line, file=sys.stderr, flush=True)


def setting_of(args: argparse.Namespace) -> Setting:
    """What all cases have in common.

    Raises:
        ConfigError: there is no such device, or a number cannot work.
    """
    device = check_device(args.device, 1, "--device")
    if device.type not in ("cpu", "cuda"):  # others are not waited for before the clock is read
        raise ConfigError(f"--device is {args.device}; give cpu, cuda or cuda:N.")
    if getattr(args, "batch", None) is not None and args.batch < 1:
        raise ConfigError(f"--batch is {args.batch}; give 1 or more.")
    if device.type != "cpu" and args.memory_limit is not None:
        raise ConfigError(
            f"--memory-limit is for the CPU, but --device is {args.device}; leave it out, since a "
            "GPU reports the end of its memory itself."
        )
    limit = available_memory() if device.type == "cpu" else None
    if args.memory_limit is not None:
        if not args.memory_limit > 0:
            raise ConfigError(f"--memory-limit is {args.memory_limit:g}; give more than 0.")
        limit = int(args.memory_limit * 1e9)
    return Setting(
        device=device,
        dtype=getattr(torch, getattr(args, "dtype", "float32")),
        # The position output alone is computed in the dtype of its inputs
        autocast=args.preset != "local",
        channels_last=getattr(args, "channels_last", False),
        rounds=args.runs or (3 if args.small else 5),
        memory_limit=limit,
    )


def check_new_files(args: argparse.Namespace) -> None:
    """Refuse, before the work, files that exist or could not be written after it."""
    files = {option: getattr(args, option, None) for option in ("json", "plot")}
    for option, name in files.items():
        if name is None:
            continue
        folder = Path(name).resolve().parent
        if os.path.lexists(name):
            raise ConfigError(f"--{option} {name} exists; name a new file or move that one away.")
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            raise ConfigError(
                f"--{option} {name}: there is no folder {folder} that can be written to."
            )
    if files["plot"] is not None and Path(files["plot"]).suffix.lower() != ".png":
        raise ConfigError(f"--plot {files['plot']} is no PNG file; let its name end with .png.")
    if files["json"] is not None and files["json"] == files["plot"]:
        raise ConfigError(f"--json and --plot are both {files['json']}; name two files.")
