#!/usr/bin/env python
"""Make the shapes data set: COCO-format images and annotations, from a seed, in seconds."""

from __future__ import annotations

import argparse
import os
import sys

# lambda_det is imported in functions, so that --help answers at once

EXAMPLES = """examples:
  python datasets/make_shapes.py
  python datasets/make_shapes.py --root /data --num-train 2000 --size 256
  python datasets/make_shapes.py --panoptic
"""


def make(arguments: argparse.Namespace) -> None:
    from lambda_det.detection.data import make_panoptic_shapes, make_shapes

    options = vars(arguments)
    panoptic = options.pop("panoptic")
    (make_panoptic_shapes if panoptic else make_shapes)(**options)
    folder = os.path.join(arguments.root, "shapes_panoptic" if panoptic else "shapes")
    print(f"The shapes data set is in {folder}.")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--root",
        default=os.getenv("DETECTRON2_DATASETS", "datasets"),
        help="where shapes/ goes (default: $DETECTRON2_DATASETS, else datasets)",
    )
    parser.add_argument("--num-train", type=int, default=500, help="training images (500)")
    parser.add_argument("--num-val", type=int, default=100, help="validation images (100)")
    parser.add_argument("--size", type=int, default=128, help="side of the images in pixels (128)")
    parser.add_argument("--seed", type=int, default=0, help="another seed, another data set (0)")
    parser.add_argument(
        "--panoptic",
        action="store_true",
        help="shapes_panoptic/ instead: with keypoints, and on patterns that are classes, too",
    )
    arguments = parser.parse_args(argv)
    from lambda_det.errors import exit_status

    return exit_status(lambda: make(arguments))


if __name__ == "__main__":
    sys.exit(main())
