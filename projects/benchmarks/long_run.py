#!/usr/bin/env python
"""Train for long on small data, and report whether memory or open files grow with the steps.

A small LambdaResNet Mask R-CNN (configs/quick/shapes_lambdaresnet26.yaml, at 64x64) is trained on
generated shapes with loader workers, evaluations and checkpoints, by the trainer of
tools/train_net.py. The slope is that of a straight line through the last three quarters of the
steps, when caches are full; resources.csv in the output folder has every value. Linux only.
"""

from __future__ import annotations

import argparse
import csv
import os
import runpy
import sys
from pathlib import Path

# lambda_det and PyTorch are imported in functions, so that --help answers at once

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "quick" / "shapes_lambdaresnet26.yaml"
TABLE = "resources.csv"
PERIOD = 10  # steps between two measurements

# A few images at 64x64: steps of a tenth of a second that use all parts of a training
SMALL = """
INPUT.MIN_SIZE_TRAIN (64,)
INPUT.MIN_SIZE_TEST 64
INPUT.MAX_SIZE_TEST 64
DATALOADER.NUM_WORKERS 1
SOLVER.IMS_PER_BATCH 2
SOLVER.BASE_LR 0.01
"""


# the quantities that must not grow: the unit, and the growth in 1000 steps that may be chance
QUANTITIES = {
    "process": ("MB", 10),
    "workers": ("MB", 10),
    "files": ("open files", 1),
    "threads": ("threads", 1),
    "gpu": ("MB", 1),
}


def resources() -> dict[str, float]:
    """The present use of this process and its children, by the names of QUANTITIES."""
    import torch

    children = Path("/proc/self/task", str(os.getpid()), "children").read_text().split()
    return {
        "process": _resident(os.getpid()),
        "workers": sum(map(_resident, map(int, children))),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "gpu": torch.cuda.memory_allocated() / 1e6 if torch.cuda.is_available() else 0.0,
    }


def _resident(process: int) -> float:
    """MB of memory that a process does not share with others; 0 if it has ended."""
    try:
        pages = Path(f"/proc/{process}/statm").read_text().split()
    except OSError:
        return 0.0
    return (int(pages[1]) - int(pages[2])) * os.sysconf("SC_PAGE_SIZE") / 1e6


def watched_task() -> type:
    """The task of tools/train_net.py, which also records its use of resources."""
    from detectron2.engine import HookBase
    from detectron2.utils import comm

    from lambda_det.detection.task import DetectionTask

    class Resources(HookBase):
        def before_train(self) -> None:
            self._write(["step", *QUANTITIES])

        def after_step(self) -> None:
            step = self.trainer.iter + 1
            if step % PERIOD == 0:
                self._write([step, *resources().values()])

        def _write(self, row: list) -> None:
            with Path(self.trainer.settings.output_dir, TABLE).open("a", newline="") as file:
                csv.writer(file).writerow(row)

    class WatchedTask(DetectionTask):
        def build_hooks(self) -> list[HookBase]:
            return [Resources()] if comm.is_main_process() else []

    return WatchedTask


def report(path: Path) -> list[str]:
    """Print the slope of each quantity, and return a sentence about each that grows."""
    import numpy as np

    with path.open(newline="") as file:
        rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    rows = rows[len(rows) // 4 :]
    steps = np.array([row["step"] for row in rows])
    grown = []
    print(f"{'':<10}{'first':>10}{'last':>10}{'in 1000 steps':>16}")
    for name, (unit, allowed) in QUANTITIES.items():
        values = np.array([row[name] for row in rows])
        slope = 1000 * np.polyfit(steps, values, 1)[0]
        print(f"{name:<10}{values[0]:>10.1f}{values[-1]:>10.1f}{slope:>+16.2f} {unit}")
        if slope > allowed:
            grown.append(f"{name} grows by {slope:.1f} {unit} in 1000 steps")
    return grown


def long_run(args: argparse.Namespace) -> int:
    """Train and report; return 1 if something grows."""
    from lambda_det.detection import parser, run
    from lambda_det.errors import ConfigError

    if not Path("/proc/self/statm").exists():
        raise ConfigError("long_run.py reads /proc, which exists on Linux only.")
    output = Path(args.output)
    if output.exists():
        raise ConfigError(f"{output} exists; give another --output.")
    root = os.getenv("DETECTRON2_DATASETS", "datasets")
    if not Path(root, "shapes").exists():
        runpy.run_path(str(ROOT / "datasets" / "make_shapes.py"))["make_shapes"](root)
    quarter = str(max(args.steps // 4, 1))
    opts = SMALL.split()
    opts += ["SOLVER.MAX_ITER", str(args.steps), "SOLVER.STEPS", "()"]
    opts += ["SOLVER.CHECKPOINT_PERIOD", str(max(args.steps // 20, 1))]
    opts += ["TEST.EVAL_PERIOD", quarter, "OUTPUT_DIR", str(output), *args.opts]
    run(parser().parse_args(["--config-file", str(CONFIG), *opts]), watched_task())
    grown = report(output / TABLE)
    for sentence in grown:
        print(f"error: {sentence}", file=sys.stderr)
    return 1 if grown else 0


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--steps", type=int, default=2000, metavar="N", help="(%(default)s)")
    flags.add_argument("--output", required=True, metavar="DIR", help="a new folder of the run")
    text = "last of all: configuration keys and values"
    flags.add_argument("--opts", nargs=argparse.REMAINDER, default=[], help=text)
    args = flags.parse_args(argv)
    if args.steps < 8 * PERIOD:
        flags.error(f"--steps is {8 * PERIOD} or more, to see a slope")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    from lambda_det.errors import exit_status

    return exit_status(lambda: long_run(args))


if __name__ == "__main__":
    sys.exit(main())
