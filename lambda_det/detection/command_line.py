"""The command lines of detection."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from lambda_det.training.command_line import YAML_EXAMPLES, run_parser

_EXAMPLES = """
Configuration keys are given as KEY VALUE pairs, before or after the flags.

On COCO (DETECTRON2_DATASETS names the folder that holds coco/), with 1 GPU, 8 GPUs, no GPU:
  %(prog)s --config-file configs/mask_rcnn_lambdaresnet50.yaml
  %(prog)s --config-file configs/mask_rcnn_lambdaresnet50.yaml --num-gpus 8
  %(prog)s --config-file configs/mask_rcnn_lambdaresnet50.yaml MODEL.DEVICE cpu

The paper's batch of 256 images on 8 GPUs, 2 images at a time on each:
  %(prog)s --config-file FILE --num-gpus 8 SOLVER.ACCUMULATE_GRADIENTS 16

On your own data; the file is chosen where none is named:
  %(prog)s --config-file FILE --data my/ --output output/mine
"""

_LAZY_EXAMPLES = """
Loading a LazyConfig runs the Python in it; the config.yaml that a run saved runs nothing as it is
read, but what its _target_ name is called then: take either from people you trust. Keys of the
configuration follow the flags as key=value; +key=value adds one.

On COCO (DETECTRON2_DATASETS names the folder that holds coco/), with 1 GPU, 8 GPUs, no GPU:
  %(prog)s --config-file configs/mask_rcnn_lambdaresnet50.py
  %(prog)s --config-file configs/mask_rcnn_lambdaresnet50.py --num-gpus 8
  %(prog)s --config-file configs/mask_rcnn_lambdaresnet50.py train.device=cpu

The paper's batch of 256 images on 8 GPUs, 2 images at a time on each; another network:
  %(prog)s --config-file FILE --num-gpus 8 train.accumulate_gradients=16
  %(prog)s --config-file FILE model.backbone.bottom_up.name=lambda_resnet101

Continue after a stop; evaluate the last checkpoint; evaluate some weights:
  %(prog)s --config-file FILE --resume train.output_dir=output/mine
  %(prog)s --config-file FILE --eval-only --resume train.output_dir=output/mine
  %(prog)s --config-file FILE --eval-only train.init_checkpoint=model_final.pth

Several machines, and torchrun: as tools/train_net.py --help says.
"""


_LAZY_NAMES = {
    "config": "LazyConfig: a Python file, which is run, or the config.yaml of its run",
    "folder": "train.output_dir",
    "weights": "train.init_checkpoint",
    "device": "train.device",
    "cpu": "train.device=cpu",
    "opts": "keys and their values, such as train.output_dir=output/mine",
}


def parser(
    add_first: Sequence[Callable[[argparse.ArgumentParser], None]] = (),
) -> argparse.ArgumentParser:
    """The flags of a training that a YAML file describes, and the flags that name its data.

    Args:
        add_first: each adds flags that the help shows before these.
    """
    return run_parser(
        "lambda_det.detection.task:DetectionTask",
        "Train and evaluate a detector described by a configuration file.",
        _EXAMPLES + YAML_EXAMPLES,
        add_first=[*add_first, _add_file_flags],
    )


def lazy_parser() -> argparse.ArgumentParser:
    """The flags of a training that a LazyConfig describes."""
    return run_parser(
        "lambda_det.detection.task:DetectionTask",
        "Train and evaluate what a LazyConfig describes.",
        _LAZY_EXAMPLES,
        _LAZY_NAMES,
    )


def _add_file_flags(result: argparse.ArgumentParser) -> None:
    data = result.add_argument_group("files of data, instead of DATASETS.TRAIN and .TEST")
    data.add_argument("--train-json", "--train", metavar="FILE_OR_DIR", help="labels to train on")
    data.add_argument(
        "--train-images", "--images", metavar="DIR", help="folder of the images to train on"
    )
    data.add_argument("--test-json", "--test", metavar="FILE_OR_DIR", help="labels to evaluate on")
    data.add_argument("--test-images", metavar="DIR", help="folder of the images to evaluate on")


def add_checkpoint_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags by which a command chooses among the weights of a run."""
    parser.add_argument(
        "--checkpoint",
        default="best",
        metavar="best|last|STEP",
        help="of the run's folder (default: the best one at its evaluations)",
    )
    parser.add_argument(
        "--raw", action="store_true", help="the trained weights, also where there are averaged ones"
    )
