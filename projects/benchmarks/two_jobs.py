#!/usr/bin/env python
"""Time a training step alone and beside another process that does the same, by how threads wait.

Each process has as many threads as PyTorch gives it. GOMP_SPINCOUNT is the number of rounds in
which a thread waits before it sleeps; "none" leaves it unset. The cases take turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

SPINS = ("none", "1000", "10000", "30000")
NETWORKS = {
    "ResNet-18": "torchvision.models.resnet18()",
    "LambdaResNet-26": "lambda_det.create_classifier('lambda_resnet26', num_classes=10)",
}
# PyTorch is imported first, so that lambda_det leaves the environment as it is
STEP = """
import sys, time, torch, torchvision
if "lambda_det" in sys.argv[1]:
    import lambda_det
network = eval(sys.argv[1]).to(memory_format=torch.channels_last)
images = torch.randn(4, 3, 192, 192).to(memory_format=torch.channels_last)
end = None
while end is None or time.perf_counter() < end:
    start = time.perf_counter()
    network(images).sum().backward()
    if end is None:  # the first step is no measurement
        end = time.perf_counter() + float(sys.argv[2])
    else:
        print(1000 * (time.perf_counter() - start))
"""


def start(network: str, spin: str, seconds: float) -> subprocess.Popen:
    ours = ("OMP_NUM_THREADS", "GOMP_SPINCOUNT")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    if spin != "none":
        environment["GOMP_SPINCOUNT"] = spin
    words = [sys.executable, "-c", STEP, NETWORKS[network], str(seconds)]
    return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True)


def median(process: subprocess.Popen) -> float:
    return statistics.median(map(float, process.communicate()[0].split()))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="(%(default)s)")
    parser.add_argument("--seconds", type=float, default=5, metavar="S", help="(%(default)s)")
    parser.add_argument("--spins", nargs="+", default=SPINS, metavar="N")
    args = parser.parse_args(argv)
    for network in NETWORKS:
        times: dict[tuple[str, str], list[float]] = {}
        for _ in range(args.rounds):
            for spin in args.spins:
                alone = median(start(network, spin, args.seconds))
                other = start(network, spin, 3 * args.seconds)
                time.sleep(args.seconds / 2)  # until the other one has begun
                beside = median(start(network, spin, args.seconds))
                other.communicate()
                times.setdefault((spin, "alone"), []).append(alone)
                times.setdefault((spin, "beside"), []).append(beside)
        for (spin, where), values in times.items():
            print(f"{network}, spin {spin}, {where}: {statistics.median(values):.0f} ms {values}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
