"""The implementations of the local position output, compared with each other on this machine.

They take turns, so that a machine that slows down slows all of them; printed are ratios of the
medians to the first one's, forward / forward and backward.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time

import torch

from lambda_det.layers import IMPLEMENTATIONS, local_position_output

# batch, side of the map (height, width), value depth, side of the scope; k=16, h=4, u=1
SIZES = [
    (8, (8, 8), 64, 23),
    (8, (14, 14), 64, 23),
    (2, (20, 20), 64, 23),
    (8, (28, 28), 32, 23),
    (1, (13, 21), 128, 23),
    (1, (32, 32), 128, 23),
    (1, (64, 64), 64, 7),
    (1, (64, 64), 64, 23),
]


def add_arguments(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--device", default="cpu", help="cpu or cuda (%(default)s)")
    parser.add_argument("--implementations", nargs="+", default=list(IMPLEMENTATIONS))


def measure(
    size: tuple, names: list[str], runs: int, device: str
) -> dict[str, tuple[float, float]]:
    """Median seconds forward, and forward and backward, of each implementation at one size."""
    batch, (height, width), value_depth, scope = size

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, requires_grad=True)

    inputs = (
        draw(batch, height, width, 4, 16),
        draw(batch, height, width, value_depth, 1),
        draw(16, 1, scope, scope),
    )
    grad = torch.randn(batch, height, width, 4, value_depth, device=device)

    def now() -> float:
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        return time.perf_counter()

    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for run in range(runs + 1):
        for name in names:
            start = now()
            output = local_position_output(*inputs, name)
            middle = now()
            torch.autograd.grad(output, inputs, grad)
            if run > 0:  # the first one allocates, and may compile
                times[name].append((middle - start, now() - start))
    return {
        name: tuple(statistics.median(column) for column in zip(*pairs, strict=True))
        for name, pairs in times.items()
    }


def run(args: argparse.Namespace) -> None:
    """Print one row per size."""
    names, runs, device = args.implementations, args.runs, args.device
    threads = torch.get_num_threads()
    print(f"{device}, {platform.machine()}, {threads} threads, torch {torch.__version__}")
    header = ["batch, map, value depth, scope", f"{names[0]}, ms", *names[1:]]
    print("| " + " | ".join(header) + " |")
    print("|" + "---|" * len(header))
    for size in SIZES:
        batch, (height, width), value_depth, scope = size
        medians = measure(size, names, runs, device)
        base = medians[names[0]]
        cells = [f"{base[0] * 1e3:.1f} / {base[1] * 1e3:.1f}"]
        for name in names[1:]:
            cells.append(
                " / ".join(f"{t / b:.2f}" for t, b in zip(medians[name], base, strict=True))
            )
        label = f"{batch}, {height}x{width}, {value_depth}, {scope}"
        print("| " + " | ".join([label, *cells]) + " |", flush=True)
