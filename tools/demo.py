#!/usr/bin/env python
"""Make the shapes, train a small LambdaResNet Mask R-CNN on them, evaluate, draw, report.

`make demo` runs this, in minutes on two cores without a GPU. Started again it continues where it
was stopped; remove the output folder to start from the beginning.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

CONFIG = (
    Path(__file__).resolve().parents[1] / "configs" / "quick" / "shapes_lambdaresnet26_slim.yaml"
)
EXPECTED_BOX_AP = 40.0  # well below what was measured; less means that something is broken


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--output", default="output/demo", help="folder of the run (%(default)s)")
    flags.add_argument("--pictures", type=int, default=12, help="how many (%(default)s)")
    return flags.parse_args(argv)


def final_metrics(output: str) -> dict[str, float]:
    """The last box and mask AP in the run's metrics.json."""
    metrics: dict[str, float] = {}
    for line in (Path(output) / "metrics.json").read_text().splitlines():
        metrics.update(json.loads(line))
    return metrics


def demo(output: str, pictures: int) -> bool:
    """Train, evaluate, draw and report; return whether the detector has learned."""
    # Imported here, so that --help answers at once
    from lambda_det.detection import load_config, parser, run
    from lambda_det.detection.data import make_shapes
    from lambda_det.prediction import Predictor
    from lambda_det.prediction.files import plan_dataset, predict
    from lambda_det.report.run_page import write_report

    make_shapes(os.getenv("DETECTRON2_DATASETS", "datasets"))
    arguments = ["--config-file", str(CONFIG), "--resume", "OUTPUT_DIR", output]
    run(parser().parse_args(arguments))

    cfg = load_config(parser().parse_args(arguments))
    planned = plan_dataset("test", cfg, f"{output}/pictures", overwrite=True, limit=pictures)
    predict(Predictor(output), planned)
    page = write_report(output)

    metrics = final_metrics(output)
    box, mask = metrics["bbox/AP"], metrics["segm/AP"]
    print(f"\nHeld-out shapes: box AP {box:.1f}, mask AP {mask:.1f}")
    print(f"Predictions (left) beside the ground truth (right): {output}/pictures")
    print(f"Curves, AP by class and errors on one page: {page}")
    if not box >= EXPECTED_BOX_AP:  # NaN, too
        print(f"error: box AP should be at least {EXPECTED_BOX_AP:.0f}", file=sys.stderr)
    return box >= EXPECTED_BOX_AP


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    from lambda_det.errors import exit_status

    return exit_status(
        lambda: 0 if demo(args.output, args.pictures) else 1,
        "stopped; the same command continues from the last checkpoint",
    )


if __name__ == "__main__":
    sys.exit(main())
