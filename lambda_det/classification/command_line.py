"""The flags of ImageNet training."""

from __future__ import annotations

import argparse

from detectron2.config import CfgNode

from lambda_det.classification.config import get_classification_config
from lambda_det.training.command_line import run_parser
from lambda_det.training.config_file import read_config

__all__ = ["load_recipe", "parser"]

_EXAMPLES = """
Configuration keys follow the flags as KEY VALUE pairs; lambda_det/classification/config.py lists
them.

On ImageNet in folders of classes, with 8 GPUs (the paper's batch of 4096: 4 x 128 on each):
  %(prog)s --config-file configs/imagenet/lambda_resnet152_256.yaml --num-gpus 8 \\
      DATA.TRAIN /data/imagenet/train DATA.VAL /data/imagenet/val \\
      SOLVER.ACCUMULATE_GRADIENTS 4 OUTPUT_DIR output/lambda_resnet152

With a smaller batch; the learning rate follows it:
  %(prog)s --config-file FILE SOLVER.IMS_PER_BATCH 256

Without a GPU; without data, to see how fast a machine is:
  %(prog)s --config-file FILE MODEL.DEVICE cpu
  %(prog)s --config-file FILE --synthetic-data

Find the layer that a loss of NaN comes from, after the run has stopped with one (slower):
  %(prog)s --config-file FILE --resume --debug-numerics OUTPUT_DIR output/mine

Continue after a stop; evaluate the last checkpoint; evaluate some weights:
  %(prog)s --config-file FILE --resume OUTPUT_DIR output/mine
  %(prog)s --config-file FILE --eval-only --resume OUTPUT_DIR output/mine
  %(prog)s --config-file FILE --eval-only MODEL.WEIGHTS output/mine/model_best.pth

On 2 machines of 8 GPUs (the same line on the other one, with --machine-rank 1), or by torchrun:
  %(prog)s --config-file FILE --num-gpus 8 --num-machines 2 --machine-rank 0 \\
      --dist-url tcp://ADDRESS_OF_THE_FIRST:29500
  torchrun --nproc_per_node 8 %(prog)s --config-file FILE

Then a backbone for detection:
  tools/export_backbone.py output/mine/model_best.pth output/mine/backbone.pth
"""


def parser() -> argparse.ArgumentParser:
    """The usual flags, and one for noise instead of images."""
    result = run_parser(
        "Train and evaluate a classifier, whose backbone detectors start from.", _EXAMPLES
    )
    result.add_argument(
        "--synthetic-data",
        action="store_true",
        help="noise in place of images, to measure all but their loading",
    )
    return result


def load_recipe(args: argparse.Namespace) -> CfgNode:
    """The configuration of a command line, not frozen.

    Raises:
        ConfigError: the file or a key or value cannot be.
    """
    cfg = get_classification_config()
    read_config(cfg, args.config_file, args.opts)
    if args.synthetic_data:
        cfg.DATA.FORMAT = "synthetic"
        cfg.DATA.PSEUDO_LABELS = cfg.DATA.PSEUDO_IMAGES = ""
    if args.debug_numerics:
        cfg.MODEL.COMPILE = False  # compiled modules cannot be watched
    return cfg
