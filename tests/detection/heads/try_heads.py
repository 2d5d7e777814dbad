"""Show that every shipped head learns: train each on generated shapes for minutes, and measure it.

    python -m tests.detection.heads.try_heads --heads retinanet deeplab --output output/heads

A row for each head has its metrics on held-out images; one that stays below what it should reach
is a failure. The data go to $DETECTRON2_DATASETS, else datasets; shapes that exist are used.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

from lambda_det.detection import parser, run
from tests.detection.heads.tiny import CONFIGS, HEADS
from tests.shapes import make_panoptic_shapes, make_shapes


def train(name: str, folder: Path, steps: int, more: list[str]) -> dict[str, float]:
    """Train and evaluate by the ordinary command; returns the last value of each metric."""
    opts = [*HEADS[name].quick_opts(), "SOLVER.MAX_ITER", str(steps), "OUTPUT_DIR", str(folder)]
    # The learning rate falls where it does in the quick schedule
    opts += ["SOLVER.STEPS", f"({int(0.73 * steps)}, {int(0.92 * steps)})", *more]
    run(parser().parse_args(["--config-file", str(CONFIGS / f"{HEADS[name].config}.yaml"), *opts]))
    lines = (folder / "metrics.json").read_text("utf-8").splitlines()
    return {key: value for line in lines for key, value in json.loads(line).items()}


def main(argv: list[str] | None = None) -> int:
    command = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.add_argument("--heads", nargs="+", choices=HEADS, default=list(HEADS), metavar="NAME")
    command.add_argument("--steps", type=int, default=200, metavar="N", help="of 8 images (200)")
    command.add_argument("--output", required=True, metavar="DIR", help="a folder for each in it")
    command.add_argument("--opts", nargs=argparse.REMAINDER, default=[], help="KEY VALUE pairs")
    args = command.parse_args(argv)
    root = os.getenv("DETECTRON2_DATASETS", "datasets")
    for folder, make in (("shapes", make_shapes), ("shapes_panoptic", make_panoptic_shapes)):
        if not Path(root, folder).exists():
            make(root)
    low = []
    for name in args.heads:
        start = time.perf_counter()
        metrics = train(name, Path(args.output, name), args.steps, args.opts)
        reaches = HEADS[name].reaches
        figures = "  ".join(f"{key} {metrics[key]:5.1f}" for key in reaches)
        seconds = time.perf_counter() - start
        print(f"{name:<18}{args.steps:>5} steps {seconds:>6.0f} s  {figures}", flush=True)
        low += [
            f"{name}'s {key} should be at least {least:.0f}"
            for key, least in reaches.items()
            if not metrics[key] >= least  # NaN, too
        ]
    print("\n".join(low), file=sys.stderr)
    return 1 if low else 0


if __name__ == "__main__":
    sys.exit(main())
