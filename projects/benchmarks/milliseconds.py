#!/usr/bin/env python
"""Milliseconds of an image in trained detectors, and in the ONNX files that they were exported to.

    projects/benchmarks/milliseconds.py output/mine output/mine/model.onnx --images my/images/test

Each detector predicts single images by ``lambda_det.Predictor``, with pixels and post-processing,
from images that are decoded already. Each number of threads has a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
from tabulate import tabulate

WARM_UP = 5  # images, whose times are left out


def milliseconds(detector: str, images: list[str]) -> list[float]:
    """The time of each image in this process."""
    from lambda_det import Predictor

    predictor, times = Predictor(detector), []
    for image in [*images[:WARM_UP], *images]:
        pixels = cv2.imread(image)
        start = time.perf_counter()
        predictor(pixels)
        times.append(1000 * (time.perf_counter() - start))
    return times[WARM_UP:]


def rows(args: argparse.Namespace, images: list[str]) -> Iterator[list[str | int]]:
    """For each detector and number of threads their names, the median and the 95th percentile."""
    for detector in args.detectors:
        for threads in args.threads:
            command = [sys.executable, __file__, detector, "--worker", *images]
            variables = os.environ | {"OMP_NUM_THREADS": str(threads)}
            ended = subprocess.run(command, env=variables, stdout=subprocess.PIPE, check=True)
            times = json.loads(ended.stdout.splitlines()[-1])
            yield [detector, threads, *(f"{np.percentile(times, q):.0f}" for q in (50, 95))]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("detectors", nargs="+", metavar="RUN", help="folder of a run, or exported file")
    add("--images", type=Path, metavar="DIR", help="folder of images")
    add("--count", type=int, default=50, metavar="N", help="images, spread evenly (50)")
    add("--threads", type=int, nargs="+", default=[1, 2], metavar="N", help="of a process (1 2)")
    add("--worker", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker:
        print(json.dumps(milliseconds(args.detectors[0], args.worker)))
        return 0
    files = [str(file) for file in sorted(args.images.iterdir())]
    images = files[:: max(len(files) // args.count, 1)]
    print(tabulate(rows(args, images), ["detector", "threads", "median, ms", "95 %, ms"], "pipe"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
