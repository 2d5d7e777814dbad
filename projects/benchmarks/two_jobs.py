#!/usr/bin/env python
"""Time a training step alone and beside a second process, for different ways in which threads wait,
in turns.

GOMP_SPINCOUNT is the number of rounds in which a thread waits before it sleeps; none: unset.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time

SECONDS, ROUNDS, SPINS = 5, 3, ("none", "1000", "10000", "30000")
# PyTorch is imported first, so that lambda_det leaves the environment as it is
STEP = """
import sys, time, torch, torchvision, lambda_det
network = eval(sys.argv[1]).to(memory_format=torch.channels_last)
images = torch.randn(4, 3, 192, 192).to(memory_format=torch.channels_last)
end = None  # the first step is no measurement
while end is None or time.perf_counter() < end:
    start = time.perf_counter()
    network(images).sum().backward()
    end and print(1000 * (time.perf_counter() - start))
    end = end or time.perf_counter() + float(sys.argv[2])
"""


def start(network: str, spin: str, seconds: float) -> subprocess.Popen:
    ours = ("OMP_NUM_THREADS", "GOMP_SPINCOUNT")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    environment |= {} if spin == "none" else {"GOMP_SPINCOUNT": spin}
    words = [sys.executable, "-c", STEP, network, str(seconds)]
    return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True)


def median(process: subprocess.Popen) -> float:
    return statistics.median(map(float, process.communicate()[0].split()))


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    for network in (
        "torchvision.models.resnet18()",
        "lambda_det.create_classifier('lambda_resnet26', num_classes=10)",
    ):
        for turn in range(ROUNDS):
            for spin in SPINS:
                alone = median(start(network, spin, SECONDS))
                other = start(network, spin, 3 * SECONDS)
                time.sleep(SECONDS / 2)  # until the other process has begun
                beside = median(start(network, spin, SECONDS))
                other.communicate()
                print(
                    f"{network}, {turn}, spin {spin}: alone {alone:.0f} ms, beside {beside:.0f} ms"
                )


if __name__ == "__main__":
    main()
