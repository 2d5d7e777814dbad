"""Run a preset from its groups to the table, the JSON file and the plot."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from lambda_det.benchmarks.machine import describe_machine, machine_line
from lambda_det.benchmarks.measure import Group, Result, Setting, duration, measure_group
from lambda_det.benchmarks.plot import Draw, draw_ratios
from lambda_det.benchmarks.report import HOW_TO_READ, group_figures, group_table, write_json


def say(line: str) -> None:
    """Tell the person at the keyboard, apart from the figures."""
    print(line, file=sys.stderr, flush=True)


def run_groups(
    args: argparse.Namespace,
    setting: Setting,
    groups: Sequence[Group],
    *,
    libraries: tuple[str, ...] = (),
    draw: Draw = draw_ratios,
    finish: Callable[[dict[str, Any]], None] = lambda content: None,
) -> list[list[Result]]:
    """Measure the groups one after the other, and print each as soon as it is there.

    The JSON file is written after every group, so that what a stopped run has found is kept.

    Args:
        args: of the preset, with ``json`` and ``plot``.
        setting: what all cases have in common.
        groups: to measure.
        libraries: distributions whose versions belong beside the figures.
        draw: makes the plot.
        finish: adds to the content, and may print, when all groups are done.
    """
    machine = describe_machine(setting.device, libraries)
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
    print(
        f"{setting.device}, {content['dtype']}{layout}. "
        + HOW_TO_READ.format(rounds=setting.rounds)
    )
    found = []
    start = time.monotonic()
    for number, group in enumerate(groups, 1):
        results = measure_group(
            group, setting, lambda line, n=number: say(f"[{n}/{len(groups)}] {line}")
        )
        found.append(results)
        content["groups"].append(group_figures(group, results))
        print("\n" + group_table(group, results), flush=True)
        if args.json:
            write_json(args.json, content)
        if number < len(groups):
            # The groups differ, so this is no more than a guess
            left = (time.monotonic() - start) / number * (len(groups) - number)
            say(
                f"{number} of {len(groups)} groups done; {duration(left)} left if the rest is alike"
            )
    finish(content)
    if args.json:
        write_json(args.json, content)
        say(f"written: {args.json}")
    if args.plot:
        draw(content, args.plot)
        say(f"written: {args.plot}")
    return found
