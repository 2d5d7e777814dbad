#!/usr/bin/env python
"""Label images with a teacher, to train on them; --help shows how."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

# lambda_det is imported in functions, so that --help answers at once

_EXAMPLES = """
With a checkpoint of tools/train_imagenet.py as the teacher:
  %(prog)s output/teacher/model_best.pth datasets/unlabelled/images datasets/unlabelled/labels.tsv

With a model of timm (its weights are downloaded, or read from the file of --weights). It keeps the
10000 most confident images of each class, and repeats images of classes with fewer:
  %(prog)s timm:tf_efficientnet_l2.ns_jft_in1k IMAGES LABELS --per-class 10000 --fill

After an interruption, the same command continues. The predictions of all images are kept in
LABELS.predictions, so another --threshold or --per-class takes seconds (with --overwrite).

Then train on both kinds of images:
  projects/noisy_student/train.py --config-file projects/noisy_student/semi_supervised.yaml \\
      DATA.PSEUDO_LABELS LABELS DATA.PSEUDO_IMAGES IMAGES
"""


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        description="Label images with a teacher, and choose the labels to train on.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("teacher", help="a checkpoint of tools/train_imagenet.py, or timm:NAME")
    result.add_argument("images", help="folder of images, at any depth")
    result.add_argument("labels", type=Path, help="file to write")
    result.add_argument(
        "--threshold", type=float, default=0.3, help="lowest confidence, 0 to 1 (%(default)s)"
    )
    result.add_argument(
        "--per-class",
        type=int,
        default=0,
        metavar="N",
        help="the N most confident of each class (all)",
    )
    result.add_argument(
        "--fill", action="store_true", help="repeat images of classes with fewer than --per-class"
    )
    result.add_argument("--batch-size", type=int, default=64, help="%(default)s")
    result.add_argument("--workers", type=int, default=4, help="loader processes (%(default)s)")
    result.add_argument(
        "--device", help="cpu, cuda, cuda:1, ... (cuda where PyTorch sees a GPU, else cpu)"
    )
    result.add_argument("--overwrite", action="store_true", help="replace the file of labels")
    return result


def _check_outputs(labels: Path, predictions: Path, overwrite: bool) -> None:
    """Make the folder of the outputs, and refuse early what could not be written later."""
    from lambda_det.errors import ConfigError
    from lambda_det.files import refuse_existing

    try:
        labels.parent.mkdir(parents=True, exist_ok=True)
        refuse_existing(predictions, overwrite=True)
        refuse_existing(labels, overwrite)
    except OSError as error:
        raise ConfigError(
            f"{labels} cannot be written ({error.strerror}): name another file for the labels."
        ) from error
    if not os.access(labels.parent, os.W_OK):
        raise ConfigError(f"{labels} cannot be written: its folder is read-only.")


def label(args: argparse.Namespace) -> None:
    import torch
    from detectron2.utils.logger import setup_logger

    from lambda_det.distributed.launch import check_device
    from lambda_det.errors import ConfigError
    from lambda_det.process import keep_memory
    from noisy_student.labelling import Choice, list_images, predict, select
    from noisy_student.teacher import load_teacher

    choice = Choice(args.threshold, args.per_class, args.fill)
    if args.batch_size < 1 or args.workers < 0:
        raise ConfigError("--batch-size must be 1 or more, and --workers 0 or more.")
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    check_device(device, 1)
    if torch.device(device).type == "cpu":
        keep_memory()
    predictions = Path(f"{args.labels}.predictions")
    _check_outputs(args.labels, predictions, args.overwrite)
    setup_logger(name="lambda_det")
    images = list_images(args.images)
    teacher = load_teacher(args.teacher, device)
    print(f"Teacher: {teacher.description}, {len(teacher.classes)} classes")
    predict(
        teacher,
        images,
        predictions,
        batch_size=args.batch_size,
        workers=args.workers,
    )
    counts = select(predictions, images, args.labels, teacher, choice)
    print(
        f"{counts.sum()} labels in {args.labels}: {counts.min()} to {counts.max()} for a class, "
        f"{(counts == 0).sum()} classes without any"
    )


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    from lambda_det.errors import exit_status

    return exit_status(lambda: label(args), "stopped; the same command continues")


if __name__ == "__main__":
    sys.exit(main())
