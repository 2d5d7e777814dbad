#!/usr/bin/env python
"""Say what a training will take before it runs: memory, operations, steps, disk and hours."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings

# The profiler counts allocations for --measure; its notes about devices are of no use.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

# lambda_det is imported in functions, so that --help answers at once

EXAMPLES = """examples:
  %(prog)s --config-file configs/mask_rcnn_lambdaresnet152.yaml
  %(prog)s --config-file configs/mask_rcnn_lambdaresnet152.yaml --gpu-memory 80 --num-gpus 8
  %(prog)s --config-file configs/mask_rcnn_lambdaresnet50.yaml --step-time 1.3
  %(prog)s --config-file configs/mask_rcnn_lambdaresnet50.yaml INPUT.LSJ.SIZE 640
  %(prog)s --config-file configs/mask_rcnn_lambdaresnet152.py train.amp.enabled=false
  %(prog)s --config-file configs/imagenet/lambda_resnet50_160.yaml --num-gpus 8
  %(prog)s --config-file configs/finetune/mask_rcnn_resnetrs101_se.yaml \\
      --train-json my/train.json --train-images my/images
On a machine with a GPU, three steps of each size that should fit:
  %(prog)s --config-file configs/mask_rcnn_lambdaresnet50.yaml --measure

No GPU and no data are needed but for --measure. It takes about a minute.
"""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--config-file",
        metavar="FILE",
        required=True,
        help="YAML or LazyConfig, of a detector or a classifier",
    )
    parser.add_argument(
        "--gpu-memory",
        type=float,
        metavar="GIB",
        help="memory of one GPU; by default that of this machine's first, or 24",
    )
    parser.add_argument("--num-gpus", type=int, default=1, help="of all machines (1)")
    parser.add_argument(
        "--step-time",
        type=float,
        metavar="S",
        help="measured seconds of a step, 'time' in the log of a run with these settings",
    )
    parser.add_argument(
        "--train-json", metavar="FILE", help="your data, for what follows from them"
    )
    parser.add_argument("--train-images", metavar="DIR", help="folder of their images")
    parser.add_argument("--measure", action="store_true", help="run three steps of each size")
    parser.add_argument(
        "opts", nargs=argparse.REMAINDER, help="configuration keys and their values"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    from lambda_det.errors import exit_status

    logging.getLogger("lambda_det").setLevel(logging.WARNING)
    warnings.simplefilter("ignore")

    def work() -> None:
        from lambda_benchmarks.plan import make_plan
        from lambda_benchmarks.trainings import load_training

        for line in make_plan(
            load_training(args),
            args.config_file,
            gpu_memory=args.gpu_memory,
            gpus=args.num_gpus,
            step_time=args.step_time,
            measure=args.measure,
        ):
            print(line, flush=True)

    return exit_status(work)


if __name__ == "__main__":
    sys.exit(main())
