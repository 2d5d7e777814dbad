"""The command line of ImageNet training."""

from __future__ import annotations

import argparse

from lambda_det.training.command_line import YAML_EXAMPLES, run_parser

_EXAMPLES = """
Configuration keys are given as KEY VALUE pairs, before or after the flags;
lambda_det/classification/config.py lists them.

On ImageNet in folders of classes, with 8 GPUs (the paper's batch of 4096: 4 x 128 on each):
  %(prog)s --config-file configs/imagenet/lambda_resnet152_256.yaml --num-gpus 8 \\
      DATA.TRAIN /data/imagenet/train DATA.VAL /data/imagenet/val \\
      SOLVER.ACCUMULATE_GRADIENTS 4 OUTPUT_DIR output/lambda_resnet152

With a smaller batch, which the learning rate follows, and without a GPU:
  %(prog)s --config-file FILE --device cpu SOLVER.IMS_PER_BATCH 256
"""
_THEN = """
Then a backbone for detection:
  tools/export_backbone.py output/mine/model_best.pth output/mine/backbone.pth
"""


def parser() -> argparse.ArgumentParser:
    """The flags of a training."""
    return run_parser(
        "lambda_det.classification.task:ClassificationTask",
        "Train and evaluate a classifier, whose backbone detectors start from.",
        _EXAMPLES + YAML_EXAMPLES + _THEN,
    )
