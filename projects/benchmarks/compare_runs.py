#!/usr/bin/env python
"""Compare the metrics and checkpoints of two runs, and name the first step and tensor that differ.

Times, speeds and memory are not compared. Values and tensors are equal if they are so to the bit,
or with --tolerance T if they differ by less than T times the larger magnitude of the two.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lambda_det.errors import UserError, exit_status, listed
from lambda_det.training.logged import is_of_machine

# PyTorch is imported where it is needed, and not for --help
if TYPE_CHECKING:
    import torch

_LEFT_OUT = ("config",)  # the entry of a checkpoint with its text; config.yaml is compared instead
_STATUS = """
Exit status: 0 if nothing differs, 1 if something does, 2 after an error, which is one sentence.
"""


class NoRun(UserError):
    """The folder has nothing to compare."""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=_STATUS, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("first", type=Path, help="folder of a run")
    parser.add_argument("second", type=Path, help="folder of another run")
    parser.add_argument("--tolerance", type=float, default=0.0, metavar="T", help="0: to the bit")
    return parser.parse_args(argv)


def read_metrics(folder: Path) -> dict[int, dict[str, float]]:
    """The values of metrics.json by iteration, without times and memory."""
    path = folder / "metrics.json"
    if not path.is_file():
        raise NoRun(f"There is no {path}; name the folder of a run.")
    result = {}
    for line in path.read_text("utf-8").splitlines():
        try:
            values = json.loads(line)
            iteration = int(values.pop("iteration"))
        except (ValueError, KeyError, AttributeError):
            continue  # a line that a kill cut off
        result[iteration] = {k: v for k, v in values.items() if not is_of_machine(k)}
    return result


def relative(first: float, second: float) -> float:
    """The difference by the larger magnitude; 0 for two NaN, infinite for one."""
    if first == second or (math.isnan(first) and math.isnan(second)):
        return 0.0
    result = abs(first - second) / max(abs(first), abs(second))
    return math.inf if math.isnan(result) else result


def compare_metrics(
    first: Mapping[int, Mapping[str, float]],
    second: Mapping[int, Mapping[str, float]],
    tolerance: float,
) -> Iterator[str]:
    """Yield the differences: the first iteration with its values, then the largest difference of
    each value.
    """
    if only := sorted(set(first) ^ set(second)):
        yield f"metrics: {len(only)} iteration(s) are in one run alone, the first is {only[0]}"
    common = sorted(set(first) & set(second))
    worst: dict[str, tuple[float, int]] = {}
    began = None
    for step in common:
        one, other = first[step], second[step]
        found = {
            name: relative(one.get(name, math.nan), other.get(name, math.nan))
            for name in [*one, *(name for name in other if name not in one)]
        }
        found = {name: by for name, by in found.items() if by > tolerance}
        if found and began is None:
            began = step
            for name in found:
                values = f"{one.get(name, 'missing')} and {other.get(name, 'missing')}"
                yield f"metrics: iteration {step} is the first that differs: {name} {values}"
        for name, by in found.items():
            worst[name] = max(worst.get(name, (0.0, 0)), (by, -step))
    for name, (by, step) in sorted(worst.items(), key=lambda item: -item[1][0]):
        yield f"metrics: {name} differs most at iteration {-step}, by {by:.2g} of its value"


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the tensors, numbers and words of a nested state in their order, by name."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from leaves(item, f"{name}.{index}")
    else:
        yield name, value


def is_compared(name: str) -> bool:
    """Whether a value of a checkpoint follows from the training alone."""
    return not any(p in _LEFT_OUT or is_of_machine(p) for p in name.split("."))


def is_same(first: Any, second: Any, tolerance: float) -> bool:
    """Whether two values that are no tensors are equal, numbers within the tolerance."""
    if isinstance(first, (int, float)) and isinstance(second, (int, float)):
        return relative(first, second) <= tolerance
    return type(first) is type(second) and first == second


def tensor_difference(first: torch.Tensor, second: torch.Tensor) -> float:
    """The largest difference by the larger magnitude of the two tensors; 0 if they are equal."""
    import torch

    if first.shape != second.shape or first.dtype != second.dtype:
        return math.inf
    if torch.equal(first, second):
        return 0.0
    first, second = first.double(), second.double()
    same = (first == second) | (first.isnan() & second.isnan())
    if same.all():
        return 0.0
    size = torch.maximum(first.abs().max(), second.abs().max())
    result = float(((first - second).abs()[~same]).max() / size)
    return math.inf if math.isnan(result) else result


def compare_checkpoints(
    name: str, first: Mapping[str, Any], second: Mapping[str, Any], tolerance: float
) -> Iterator[str]:
    """Yield the differences of two checkpoints of one name: the first tensor, the worst tensor, and
    values.

    Values are the numbers and words beside the tensors, for example of the schedule and the best
    results.
    """
    import torch

    states = [dict(leaves(state)) for state in (first, second)]
    one, other = (
        {
            key: value
            for key, value in state.items()
            if is_compared(key) and not isinstance(value, torch.Tensor)
        }
        for state in states
    )
    if only := [key for key in [*one, *other] if (key in one) != (key in other)]:
        yield f"{name}: {len(only)} value(s) are in one run alone: {listed(only)}"
    changed = [k for k in one if k in other and not is_same(one[k], other[k], tolerance)]
    if changed:
        key = changed[0]
        yield (
            f"{name}: {len(changed)} of {len(one)} values differ, the first is {key}: "
            f"{one[key]!r} and {other[key]!r}"
        )
    one, other = (
        {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
        for state in states
    )
    if only := [key for key in [*one, *other] if (key in one) != (key in other)]:
        yield f"{name}: {len(only)} tensor(s) are in one run alone: {listed(only)}"
    found = {key: tensor_difference(one[key], other[key]) for key in one if key in other}
    found = {key: by for key, by in found.items() if by > tolerance}
    if not found:
        return
    begin, worst = next(iter(found)), max(found, key=found.get)
    yield (
        f"{name}: {len(found)} of {len(one)} tensors differ, the first is {begin}, by "
        f"{found[begin]:.2g} of its largest number, and the worst {worst}, by {found[worst]:.2g}"
    )


def common_checkpoints(first: Path, second: Path) -> list[str]:
    """Names of the checkpoints that both runs have, by iteration; those without one come last."""
    names = {path.name for path in first.glob("*.pth")} & {p.name for p in second.glob("*.pth")}
    return sorted(
        names, key=lambda name: (not name[6:13].isdigit(), name == "model_best.pth", name)
    )


def compare(first: Path, second: Path, tolerance: float) -> Iterator[str]:
    """Yield the differences of two runs, configuration first; checkpoints up to the first that
    differs.

    Raises:
        UserError: a folder holds no run, or a checkpoint cannot be read.
    """
    from lambda_det.training.run_folder import changed_keys
    from lambda_det.weights.formats import read_checkpoint

    metrics = [read_metrics(folder) for folder in (first, second)]
    if (first / "config.yaml").is_file():
        text = (first / "config.yaml").read_text("utf-8")
        for key, before, now in changed_keys(text, second / "config.yaml"):
            yield f"config: {key} {now!r} and {before!r}"
    yield from compare_metrics(*metrics, tolerance)
    names = common_checkpoints(first, second)
    if not names:
        yield "checkpoints: the runs have none of one name"
    for name in names:
        pair = [read_checkpoint(folder / name) for folder in (first, second)]
        found = list(compare_checkpoints(name, *pair, tolerance))
        yield from found
        if found and len(names) > 1:
            return  # later ones follow from it and also differ


def report(lines: Iterable[str]) -> int:
    """Print the differences; return whether there are any outside of the configuration."""
    status = 0
    for line in lines:
        print(line)
        status = max(status, int(not line.startswith("config:")))
    if not status:
        print("Metrics and checkpoints are equal")
    return status


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    return exit_status(lambda: report(compare(args.first, args.second, args.tolerance)))


if __name__ == "__main__":
    sys.exit(main())
