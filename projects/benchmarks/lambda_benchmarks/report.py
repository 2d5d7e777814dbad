"""Report the measurements and the machine: quartiles, ratios, tables and JSON."""

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

HOW_TO_READ = (
    "Medians of {rounds} rounds, in brackets the quartiles. A ratio is that of the times in one "
    "round. Peak MB (1e6 bytes) is beyond what model and inputs take; the optimiser's state counts."
)


def quartiles(values: Sequence[float] | np.ndarray) -> list[float]:
    """Lower quartile, median and upper quartile."""
    return np.percentile(values, (25, 50, 75)).tolist()


def figures(result: Result, base: Result, mode: str) -> dict[str, Any]:
    """All figures of one case in one mode, or the reason why there are none."""
    if mode in result.reasons:
        return {"reason": result.reasons[mode]}
    seconds = _scaled_seconds(result, mode)
    figures: dict[str, Any] = {"seconds": quartiles(seconds), "rounds": seconds.tolist()}
    if mode not in base.reasons:
        ratios = seconds / _scaled_seconds(base, mode)
        figures["ratio_rounds"] = ratios.tolist()
        figures["ratio"] = quartiles(ratios)
    figures["peak_bytes"] = result.peak_bytes[mode]
    if result.images:
        figures["images_per_second"] = quartiles(result.images / seconds)
    return figures


def _scaled_seconds(result: Result, mode: str) -> np.ndarray:
    """The seconds of each round, scaled to the images of the original case."""
    scale = result.images / result.case.images if result.case.images else 1
    return np.array(result.seconds[mode]) * scale


def group_figures(group: Group, results: Sequence[Result]) -> dict[str, Any]:
    """A group for JSON."""
    return {
        "title": group.title,
        "modes": list(group.modes),
        "base": results[0].case.name,
        "cases": {
            result.case.name: {
                **result.case.columns,
                "images": result.case.images,
                **result.sizes,
                **{mode: figures(result, results[0], mode) for mode in group.modes},
            }
            for result in results
        },
    }


def group_table(group: dict[str, Any]) -> str:
    """One row per case of :func:`group_figures`: ratios, times, peak memory; reasons below."""
    modes, cases = group["modes"], group["cases"]
    known = {"images", "parameters", "model_bytes", "input_bytes", *modes}
    extra = list(dict.fromkeys(name for case in cases.values() for name in case))
    extra = [name for name in extra if name not in known]
    header = ["", *(f"{mode}: ratio" for mode in modes)]
    with_images = ["images/s"] if any(case["images"] for case in cases.values()) else []
    for mode in modes:
        header += [f"{mode}: ms", *with_images, "peak MB"]
    rows, notes = [], []
    for name, case in cases.items():
        row = [name, *(_spread(case[mode].get("ratio"), ".2f") for mode in modes)]
        for mode in modes:
            found = case[mode]
            row.append(_spread(found.get("seconds"), ".3g", 1e3))
            row.append(
                _short(found["images_per_second"][1]) if "images_per_second" in found else ""
            )
            row.append(_megabytes(found.get("peak_bytes")))
            if "reason" in found:
                notes.append(f"- {name}, {mode}: {found['reason']}")
        row += [_megabytes(case.get("model_bytes")), _megabytes(case.get("input_bytes"))]
        rows.append([*row, *(case.get(column, "") for column in extra)])
    header += ["model MB", "inputs MB", *extra]
    table = tabulate(rows, header, tablefmt="github", disable_numparse=True)
    return "\n".join([f"**{group['title']}**; ratios to {group['base']}", "", table, *notes])


def _spread(values: Sequence[float] | None, form: str, factor: float = 1) -> str:
    if values is None:
        return "-"
    low, middle, high = (
        _short(value * factor) if form == ".3g" else f"{value * factor:{form}}" for value in values
    )
    return f"{middle} ({low} to {high})"


def _short(value: float) -> str:
    """A number with at least three digits, and all digits before the point."""
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
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lambda_det": lambda_det.__version__,
        **{name: number for name in libraries if (number := installed(name))},
    }
    if device.type == "cuda":
        machine["gpu"] = torch.cuda.get_device_name(device)
        machine["capability"] = ".".join(map(str, torch.cuda.get_device_capability(device)))
        machine["gpus"] = torch.cuda.device_count()
        machine["cuda"] = torch.version.cuda
        machine["cudnn"] = torch.backends.cudnn.version()
        machine["tf32"] = torch.backends.cuda.matmul.allow_tf32
    return machine


def machine_line(machine: dict[str, Any]) -> str:
    """The machine in one line; the load is that of the last minute before the start."""
    return ", ".join(f"{name} {value}" for name, value in machine.items() if value is not None)


def cpu_name() -> str:
    """The processor's model as the system calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def installed(name: str) -> str | None:
    """The version of a distribution; None where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
