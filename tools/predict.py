#!/usr/bin/env python
"""Draw the predictions of a trained detector on images, folders of images or videos."""

from __future__ import annotations

import argparse
import logging
import sys

# lambda_det is imported in functions, so that --help answers at once

EXAMPLES = """
With the config.yaml of a run, the last checkpoint of the run is used:
  %(prog)s --config-file output/run/config.yaml --input photo.jpg --output pictures
  %(prog)s --config-file output/run/config.yaml --input holiday/ film.mp4 --output pictures

Other weights, and configuration keys at the end:
  %(prog)s --config-file configs/mask_rcnn_lambdaresnet50.yaml --weights model.pth \\
      --input photo.jpg --output pictures MODEL.DEVICE cpu INPUT.MIN_SIZE_TEST 800

Predictions beside the ground truth, for the first images of a registered data set, or of the
configuration's train or test set:
  %(prog)s --config-file output/run/config.yaml --dataset coco_2017_val --limit 20 --output pictures
  %(prog)s --config-file output/run/config.yaml --dataset test --limit 20 --output pictures
"""


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config-file", metavar="FILE", required=True, help="of the model")
    parser.add_argument(
        "--weights",
        metavar="FILE",
        help="checkpoint of the model; default: the last of the run",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--input",
        nargs="+",
        metavar="PATH",
        help="images, videos, and folders, which are searched recursively for images",
    )
    source.add_argument(
        "--dataset",
        metavar="NAME",
        help="a data set, drawn with its ground truth",
    )
    parser.add_argument(
        "--limit", type=int, metavar="N", help="only the first N images of --dataset"
    )
    parser.add_argument("--output", metavar="DIR", required=True, help="folder of the pictures")
    parser.add_argument(
        "--score-threshold",
        type=float,
        default=0.5,
        metavar="S",
        help="draw instances of at least this score (default: %(default)s)",
    )
    parser.add_argument("--device", metavar="D", help="cpu or cuda; default: MODEL.DEVICE")
    parser.add_argument("--overwrite", action="store_true", help="replace existing pictures")
    parser.add_argument("opts", nargs=argparse.REMAINDER, help="configuration keys and values")
    args = parser.parse_args(argv)
    if args.limit is not None and (args.limit < 1 or not args.dataset):
        parser.error("--limit needs --dataset and must be at least 1")
    return args


def run(args: argparse.Namespace) -> None:
    from lambda_det.detection import load_config
    from lambda_det.detection.predict import (
        Predictor,
        find_weights,
        plan_dataset,
        plan_files,
        predict,
    )

    cfg = load_config(args)
    if args.device:
        cfg.MODEL.DEVICE = args.device
    chosen = args.weights or dict(zip(args.opts[::2], args.opts[1::2], strict=True)).get(
        "MODEL.WEIGHTS"
    )
    weights = find_weights(cfg, args.config_file, chosen)
    if args.dataset:
        pictures = plan_dataset(args.dataset, cfg, args.output, args.overwrite, args.limit)
    else:
        pictures = plan_files(args.input, args.output, args.overwrite)
    print(f"Weights: {weights}")
    result = predict(Predictor(cfg, weights, args.score_threshold), pictures)
    what = "1 picture" if len(result.written) == 1 else f"{len(result.written)} pictures"
    print(f"{result.instances} instances on {what} in {args.output}")
    if result.unreadable:
        print(f"{len(result.unreadable)} could not be read; see above", file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    from lambda_det.errors import exit_status

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    return exit_status(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
