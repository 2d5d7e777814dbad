#!/usr/bin/env python
"""Compare the metrics and checkpoints of two runs, and name the first step and tensor that differ.

Times, speeds and memory are not compared. Values and tensors are equal if they are so to the bit,
or with --tolerance T if they differ by less than T times the larger magnitude of the two. Exit
status: 0 if nothing differs, 1 if something does, 2 after an error, which is one sentence.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from lambda_det.errors import DataError, exit_status
from lambda_det.training.log import OF_MACHINE
from lambda_det.training.run_folder import RunFolder
from lambda_det.weights.formats import read_checkpoint

_MISSING = object()


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("first", type=Path, help="folder of a run")
    parser.add_argument("second", type=Path, help="folder of another run")
    parser.add_argument("--tolerance", type=float, default=0.0, metavar="T", help="0: to the bit")
    return parser.parse_args(argv)


def leaves(value: Any, name: str = "") -> dict[str, Any]:
    """The tensors, numbers and words of a nested state in their order, by name."""
    if isinstance(value, (list, tuple)):
        value = dict(enumerate(value))
    if not isinstance(value, Mapping):
        return {name: value}
    found: dict[str, Any] = {}
    for key, item in value.items():
        found |= leaves(item, f"{name}.{key}" if name else str(key))
    return found


def difference(first: Any, second: Any) -> float:
    """The largest difference by the larger magnitude of two values; 0 if they are equal."""
    if first is _MISSING or second is _MISSING:
        return math.inf
    numbers = (torch.Tensor, int, float)
    if not (isinstance(first, numbers) and isinstance(second, numbers)):
        return 0.0 if type(first) is type(second) and first == second else math.inf
    one, other = (
        value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64)
        for value in (first, second)
    )
    if one.shape != other.shape or one.dtype != other.dtype:
        return math.inf
    one, other = one.double(), other.double()
    same = (one == other) | (one.isnan() & other.isnan())
    if same.all():
        return 0.0
    size = torch.maximum(one.abs().max(), other.abs().max())
    result = float(((one - other).abs()[~same]).max() / size)
    return math.inf if math.isnan(result) else result


def differences(
    first: Mapping[str, Any], second: Mapping[str, Any], tolerance: float
) -> dict[str, float]:
    """The values that differ, in their order, and by how much."""
    names = dict.fromkeys([*first, *second])
    found = {n: difference(first.get(n, _MISSING), second.get(n, _MISSING)) for n in names}
    return {name: by for name, by in found.items() if by > tolerance}


def steps_of(folder: Path) -> dict[int, dict[str, float]]:
    """The values of metrics.json by iteration, without times and memory.

    Raises:
        DataError: there is none.
    """
    if not (folder / "metrics.json").is_file():
        raise DataError(f"There is no {folder / 'metrics.json'}; name the folder of a run.")
    return {
        int(line["iteration"]): {name: v for name, v in line.items() if name not in OF_MACHINE}
        for line in RunFolder(folder).metrics()
    }


def state_of(path: Path) -> dict[str, Any]:
    """What follows from the training alone in a checkpoint, by name."""
    return {
        name: value
        for name, value in leaves(read_checkpoint(str(path))).items()
        # config.yaml has the configuration
        if not any(part == "config" or part in OF_MACHINE for part in name.split("."))
    }


def compare(first: Path, second: Path, tolerance: float) -> Iterator[str]:
    """Yield the first iteration that differs, and the first checkpoint that does.

    Raises:
        UserError: a folder holds no run, or a checkpoint cannot be read.
    """
    one, other = steps_of(first), steps_of(second)
    for step in sorted({*one, *other}):
        if found := differences(one.get(step, {}), other.get(step, {}), tolerance):
            values = ", ".join(
                f"{name} {one.get(step, {}).get(name, 'missing')} and "
                f"{other.get(step, {}).get(name, 'missing')}"
                for name in found
            )
            yield f"metrics: iteration {step} is the first that differs: {values}"
            break
    names = {path.name for path in first.glob("*.pth")} & {p.name for p in second.glob("*.pth")}
    if not names:
        yield "checkpoints: the runs have none of one name"
    for name in sorted(names, key=lambda n: (not n[6:13].isdigit(), n == "model_best.pth", n)):
        states = [state_of(folder / name) for folder in (first, second)]
        if found := differences(*states, tolerance):
            begin, worst = next(iter(found)), max(found, key=found.__getitem__)
            yield (
                f"{name}: {len(found)} of {len(states[0])} values differ, the first is {begin}, by "
                f"{found[begin]:.2g} of its largest number, and the worst {worst}, by "
                f"{found[worst]:.2g}"
            )
            return  # later ones follow from it and also differ


def report(args: argparse.Namespace) -> int:
    """Print the differences; return whether there are any."""
    lines = list(compare(args.first, args.second, args.tolerance))
    print("\n".join(lines) or "Metrics and checkpoints are equal")
    return int(bool(lines))


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    return exit_status(lambda: report(args))


if __name__ == "__main__":
    sys.exit(main())
