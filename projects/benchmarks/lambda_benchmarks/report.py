"""What was measured and on which machine: quartiles, ratios, tables and JSON."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tabulate import tabulate

import lambda_det
from lambda_benchmarks.measure import Group, Result
from lambda_det.files import replace_text


def quartiles(values: Sequence[float] | np.ndarray) -> list[float]:
    """Lower quartile, median and upper quartile."""
    return np.percentile(values, (25, 50, 75)).tolist()


def ratios(result: Result, base: Result, mode: str) -> list[float] | None:
    """Seconds of each round as multiples of the base's in the same round; None without both.

    Cases with images are compared by the seconds of one image, since they may have different
    numbers of images.
    """
    own, others = result.seconds.get(mode), base.seconds.get(mode)
    if not own or not others or len(own) != len(others):
        return None
    share = base.case.images / result.case.images if base.case.images and result.case.images else 1
    return (np.array(own) / np.array(others) * share).tolist()


def figures(result: Result, base: Result, mode: str) -> dict[str, Any]:
    """All of one case in one mode, or the reason why there is nothing."""
    if mode in result.reasons:
        return {"reason": result.reasons[mode]}
    seconds = result.seconds[mode]
    to_base = ratios(result, base, mode)
    found = {
        "seconds": quartiles(seconds),
        "ratio": None if to_base is None else quartiles(to_base),
        "rounds": seconds,
        "ratio_rounds": to_base,
        "peak_bytes": result.peak_bytes[mode],
    }
    if result.case.images:
        found["images_per_second"] = quartiles(result.case.images / np.array(seconds))
    return found


def group_figures(group: Group, results: Sequence[Result]) -> dict[str, Any]:
    """A group for JSON."""
    base = results[0]
    return {
        "title": group.title,
        **group.about,
        "modes": list(group.modes),
        "base": group.base,
        "cases": {
            result.case.name: {
                **result.case.columns,
                "images": result.case.images,
                "parameters": result.parameters,
                "model_bytes": result.model_bytes,
                "input_bytes": result.input_bytes,
                **{mode: figures(result, base, mode) for mode in group.modes},
            }
            for result in results
        },
    }


def group_table(group: Group, results: Sequence[Result]) -> str:
    """One row per case: ratios, times and peak memory of each mode; reasons stand below."""
    base = results[0]
    extra = list(dict.fromkeys(name for result in results for name in result.case.columns))
    with_images = any(result.case.images for result in results)
    header = ["", *(f"{mode}: ratio" for mode in group.modes)]
    for mode in group.modes:
        header += [f"{mode}: ms", *(["images/s"] if with_images else []), "peak MB"]
    header += ["model MB", "inputs MB", *extra]
    rows, notes = [], []
    for result in results:
        all_figures = [figures(result, base, mode) for mode in group.modes]
        row = [result.case.name, *(_spread(found.get("ratio"), ".2f") for found in all_figures)]
        for found in all_figures:
            row.append(_spread(found.get("seconds"), ".3g", 1e3))
            if with_images:
                rate = found.get("images_per_second")
                row.append("-" if rate is None else _short(rate[1]))
            row.append(_megabytes(found.get("peak_bytes")))
        known = any("reason" not in found for found in all_figures)
        row += [_megabytes(result.model_bytes if known else None)]
        row += [_megabytes(result.input_bytes if known else None)]
        rows.append([*row, *(result.case.columns.get(name, "") for name in extra)])
        for reason in dict.fromkeys(result.reasons.values()):
            modes = [mode for mode, given in result.reasons.items() if given == reason]
            notes.append(f"- {result.case.name}, {' and '.join(modes)}: {reason}")
    lines = [
        f"**{group.title}**; ratios to {group.base}",
        "",
        tabulate(rows, header, tablefmt="github", disable_numparse=True),
    ]
    if notes:
        lines += ["", *notes]
    return "\n".join(lines)


HOW_TO_READ = (
    "Medians of {rounds} rounds, in brackets the quartiles. A ratio is that of the times in one "
    "round. Peak MB (1e6 bytes) is beyond what model and inputs take; the optimiser's state counts."
)


def _spread(values: Sequence[float] | None, form: str, factor: float = 1) -> str:
    if values is None:
        return "-"
    low, middle, high = (
        _short(value * factor) if form == ".3g" else f"{value * factor:{form}}" for value in values
    )
    return f"{middle} ({low} to {high})"


def _short(value: float) -> str:
    """At least three digits, and all of those before the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _megabytes(count: int | None) -> str:
    return "-" if count is None else _short(count / 1e6)


def write_json(path: str | Path, content: dict[str, Any]) -> None:
    """Write the whole file or nothing, so that an interrupted run leaves a readable one."""
    replace_text(path, json.dumps(content, indent=2) + "\n")


def describe_machine(device: torch.device, libraries: tuple[str, ...] = ()) -> dict[str, Any]:
    """The machine and the versions, for JSON.

    Args:
        device: what is measured; a GPU is described as well.
        libraries: distributions whose versions matter beside torch's.
    """
    machine: dict[str, Any] = {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lambda_det": lambda_det.__version__,
        "versions": {name: installed(name) for name in libraries},
    }
    if device.type == "cuda":
        machine["gpu"] = {
            "name": torch.cuda.get_device_name(device),
            "memory": torch.cuda.get_device_properties(device).total_memory,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "tf32_convolutions": torch.backends.cudnn.allow_tf32,
            "tf32_products": torch.backends.cuda.matmul.allow_tf32,
        }
    return machine


def machine_line(machine: dict[str, Any]) -> str:
    """The same in a line; the load is that of the last minute, before we start."""
    parts = [
        f"{machine['cpu']} ({machine['instructions']})",
        f"{machine['cores']} cores",
        f"{machine['threads']} threads",
        f"torch {machine['torch']}",
        f"Python {machine['python']}",
        *(f"{name} {number}" for name, number in machine["versions"].items() if number),
    ]
    if "gpu" in machine:
        gpu = machine["gpu"]
        parts.insert(0, f"{gpu['name']}, CUDA {gpu['cuda']}, cuDNN {gpu['cudnn']}")
    if machine["load"] is not None:
        parts.append(f"load {machine['load']:.1f} before")
    return ", ".join(parts)


def cpu_name() -> str:
    """The processor's model as the system calls it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name" and value.strip():
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def installed(name: str) -> str | None:
    """The version of a distribution; None where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
