"""The command line of ImageNet training: the flags, and what starts with them."""

from __future__ import annotations

import argparse

from lambda_det.training.command_line import run_parser

__all__ = ["parser", "run"]

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
    """The flags of a training, and one for noise instead of images."""
    keys = {
        "config": "YAML file of configuration keys, read over the defaults",
        "folder": "OUTPUT_DIR",
        "weights": "MODEL.WEIGHTS",
        "cpu": "MODEL.DEVICE cpu",
        "opts": "configuration keys and their values, such as OUTPUT_DIR output/mine",
    }
    description = "Train and evaluate a classifier, whose backbone detectors start from."
    result = run_parser(description, _EXAMPLES, keys)
    result.add_argument(
        "--synthetic-data",
        action="store_true",
        help="noise in place of images, to measure all but their loading",
    )
    return result


def run(args: argparse.Namespace) -> None:
    """Train or evaluate as the command line says, in as many processes as it says.

    Args:
        args: of :func:`parser`.

    Raises:
        UserError: one sentence to print.
    """
    # Imported here, and not for --help
    from lambda_det.classification.task import ClassificationTask
    from lambda_det.training import start

    start.run(args, ClassificationTask)
