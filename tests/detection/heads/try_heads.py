#!/usr/bin/env python
"""Show that every shipped head learns: train each on generated shapes for minutes, and measure it.

The shipped configurations run through tools/train_net.py with the sizes and the schedule of
configs/quick/shapes_lambdaresnet26.yaml and a few keys of each head. A row for each head has its
metrics on held-out images; a head that stays below what it should reach is a failure.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

# lambda_det is imported in functions, so that --help answers at once

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
QUICK = CONFIGS / "quick" / "shapes_lambdaresnet26.yaml"

EXAMPLES = """examples:
  python tests/detection/heads/try_heads.py --output output/heads
  python tests/detection/heads/try_heads.py --heads retinanet deeplab --output output/two
  python tests/detection/heads/try_heads.py --heads point_rend --steps 1000 --output output/longer

The data goes to $DETECTRON2_DATASETS, else datasets; shapes that exist are used.
"""

# All anchors stand on one map, of stride 16. Regions of its 1024 or 2048 channels are slow on a
# CPU: fewer and smaller ones.
_WITHOUT_FPN = """
MODEL.ANCHOR_GENERATOR.SIZES [[16,32,64,96]]
MODEL.RPN.CONV_DIMS [64]
MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE 16
"""


@dataclass(frozen=True)
class Head:
    """A shipped configuration and what makes it small.

    Attributes:
        config: name of the file below configs/.
        data: the data set without its split.
        reaches: metrics, by their names in metrics.json, and what they should be at least after
            the quick schedule: well below what was measured.
        overrides: lines of KEY VALUE, read over what the quick configuration sets.
    """

    config: str
    data: str
    reaches: dict[str, float]
    overrides: str = ""

    def opts(self) -> list[str]:
        """KEY VALUE pairs for the command line of tools/train_net.py."""
        import yaml

        from lambda_det.config import leaves

        quick = yaml.safe_load(QUICK.read_text())
        for key in ("_BASE_", "OUTPUT_DIR"):
            del quick[key]
        opts = [word for key, value in leaves(quick) for word in (key, str(value))]
        for split in ("train", "test"):
            name = f"{self.data}_{split.replace('test', 'val')}"
            opts += [f"DATASETS.{split.upper()}", f'("{name}",)']
        for line in self.overrides.strip().splitlines():
            opts += line.split(maxsplit=1)
        return opts


HEADS = {
    "retinanet": Head(
        "retinanet_lambdaresnet50",
        "shapes",
        {"bbox/AP": 20.0},
        """
MODEL.ANCHOR_GENERATOR.SIZES [[16,20,25],[32,40,51],[64,81,102],[96,101,106],[112,120,128]]
MODEL.RETINANET.NUM_CLASSES 3
MODEL.RETINANET.NUM_CONVS 2
SOLVER.BASE_LR 0.02
""",
    ),
    "faster_rcnn": Head("faster_rcnn_lambdaresnet50", "shapes", {"bbox/AP": 20.0}),
    "cascade_mask_rcnn": Head(
        "cascade_mask_rcnn_lambdaresnet50", "shapes", {"bbox/AP": 20.0, "segm/AP": 20.0}
    ),
    "keypoint_rcnn": Head(
        "keypoint_rcnn_lambdaresnet50",
        "shapes_keypoints",
        {"bbox/AP": 20.0, "keypoints/AP": 30.0},
        """
MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS 4
MODEL.ROI_KEYPOINT_HEAD.CONV_DIMS (64,64)
TEST.KEYPOINT_OKS_SIGMAS [0.1,0.1,0.1,0.1]
""",
    ),
    "panoptic_fpn": Head(
        "panoptic_fpn_lambdaresnet50",
        "shapes_panoptic",
        {"bbox/AP": 20.0, "segm/AP": 20.0, "sem_seg/mIoU": 50.0, "panoptic_seg/PQ": 40.0},
        """
MODEL.SEM_SEG_HEAD.NUM_CLASSES 4
MODEL.SEM_SEG_HEAD.CONVS_DIM 32
MODEL.PANOPTIC_FPN.COMBINE.STUFF_AREA_LIMIT 64
""",
    ),
    "point_rend": Head(
        "point_rend_lambdaresnet50",
        "shapes",
        {"bbox/AP": 20.0, "segm/AP": 20.0},
        """
MODEL.ROI_MASK_HEAD.FC_DIM 256
MODEL.POINT_HEAD.NUM_CLASSES 3
MODEL.POINT_HEAD.FC_DIM 64
""",
    ),
    "deeplab": Head(
        "deeplabv3plus_lambdaresnet50",
        "shapes_stuff",
        {"sem_seg/mIoU": 50.0},
        """
MODEL.RESNETS.RES5_MULTI_GRID [1,2]
MODEL.SEM_SEG_HEAD.NUM_CLASSES 4
MODEL.SEM_SEG_HEAD.CONVS_DIM 64
MODEL.SEM_SEG_HEAD.ASPP_CHANNELS 64
MODEL.SEM_SEG_HEAD.ASPP_DILATIONS [2,4,6]
""",
    ),
    "c4": Head(
        "mask_rcnn_c4_lambdaresnet50",
        "shapes",
        # Hardly more than nothing, for a reason not found (docs/results.md); with Detectron2's own
        # res5 in the heads it is the same
        {"bbox/AP": 1.0, "segm/AP": 1.0},
        _WITHOUT_FPN
        + """
MODEL.ROI_BOX_HEAD.POOLER_RESOLUTION 7
MODEL.ROI_MASK_HEAD.NUM_CONV 0
SOLVER.BASE_LR 0.003
""",
    ),
    "dc5": Head(
        "mask_rcnn_dc5_lambdaresnet50",
        "shapes",
        {"bbox/AP": 20.0, "segm/AP": 20.0},
        _WITHOUT_FPN
        + """
MODEL.ROI_BOX_HEAD.POOLER_RESOLUTION 5
MODEL.ROI_MASK_HEAD.POOLER_RESOLUTION 8
""",
    ),
}


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--heads",
        nargs="+",
        choices=HEADS,
        default=list(HEADS),
        metavar="NAME",
        help=f"which of them: {', '.join(HEADS)} (default: all)",
    )
    parser.add_argument(
        "--steps", type=int, default=200, metavar="N", help="of 8 images (default: %(default)s)"
    )
    parser.add_argument("--output", required=True, metavar="DIR", help="a new run's folder in it")
    parser.add_argument(
        "--opts",
        nargs=argparse.REMAINDER,
        default=[],
        help="last of all: configuration keys and values, such as MODEL.DEVICE cuda",
    )
    args = parser.parse_args(argv)
    if args.steps < 1:
        parser.error("--steps is 1 or more")
    return args


def try_heads(args: argparse.Namespace) -> int:
    """Train and measure one after the other; 1 if one has not learned."""
    from lambda_det.detection.data import make_panoptic_shapes, make_shapes
    from lambda_det.errors import ConfigError

    output = Path(args.output)
    for name in args.heads:
        if (output / name).exists():
            raise ConfigError(f"{output / name} exists; give another --output.")
    root = os.getenv("DETECTRON2_DATASETS", "datasets")
    for folder, make in (("shapes", make_shapes), ("shapes_panoptic", make_panoptic_shapes)):
        if not Path(root, folder).exists():
            make(root)
    low = []
    for name in args.heads:
        start = time.perf_counter()
        metrics = train(HEADS[name], output / name, args.steps, args.opts)
        seconds = time.perf_counter() - start
        figures = "  ".join(f"{key} {metrics[key]:5.1f}" for key in HEADS[name].reaches)
        print(f"{name:<18}{args.steps:>5} steps {seconds:>6.0f} s  {figures}", flush=True)
        low += [
            f"{name}'s {key} should be at least {least:.0f}"
            for key, least in HEADS[name].reaches.items()
            if not metrics[key] >= least  # NaN, too
        ]
    for sentence in low:
        print(f"error: {sentence}", file=sys.stderr)
    return 1 if low else 0


def train(head: Head, folder: Path, steps: int, more: list[str]) -> dict[str, float]:
    """Train and evaluate by the ordinary command; returns the last value of each metric.

    Raises:
        UserError: the command failed.
    """
    from lambda_det.errors import UserError

    opts = [*head.opts(), "SOLVER.MAX_ITER", str(steps)]
    # the learning rate falls where it does in the quick schedule
    opts += ["SOLVER.STEPS", f"({int(0.73 * steps)}, {int(0.92 * steps)})"]
    opts += ["OUTPUT_DIR", str(folder), *more]
    config = str(CONFIGS / f"{head.config}.yaml")
    command = [sys.executable, str(Path(__file__).with_name("train_net.py"))]
    done = subprocess.run(
        [*command, "--config-file", config, *opts],
        stdout=subprocess.DEVNULL,  # its log is in the folder
        stderr=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1].removeprefix("error: ")
        raise UserError(f"Training in {folder} ended with status {done.returncode}: {reason}")
    metrics: dict[str, float] = {}
    for line in (folder / "metrics.json").read_text().splitlines():
        metrics.update(json.loads(line))
    return metrics


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    from lambda_det.errors import exit_status

    return exit_status(lambda: try_heads(args))


if __name__ == "__main__":
    sys.exit(main())
