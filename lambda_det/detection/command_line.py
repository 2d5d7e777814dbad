"""The command lines of detection."""

from __future__ import annotations

import argparse

from lambda_det.training.command_line import YAML_EXAMPLES, run, run_parser

__all__ = ["lazy_parser", "parser", "run"]

_EXAMPLES = """
Configuration keys follow the flags as KEY VALUE pairs.

On COCO (DETECTRON2_DATASETS names the folder that holds coco/), with 1 GPU, 8 GPUs, no GPU:
  %(prog)s --config-file configs/mask_rcnn_lambdaresnet50.yaml
  %(prog)s --config-file configs/mask_rcnn_lambdaresnet50.yaml --num-gpus 8
  %(prog)s --config-file configs/mask_rcnn_lambdaresnet50.yaml MODEL.DEVICE cpu

The paper's batch of 256 images on 8 GPUs, 2 images at a time on each:
  %(prog)s --config-file FILE --num-gpus 8 SOLVER.ACCUMULATE_GRADIENTS 16

On your own data; lambda-det train chooses the file where none is named:
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

Several machines, torchrun and --debug-numerics: as tools/train_net.py --help says.
"""


_LAZY_NAMES = {
    "config": "LazyConfig: a Python file, which is run, or the config.yaml of its run",
    "folder": "train.output_dir",
    "weights": "train.init_checkpoint",
    "device": "train.device",
    "cpu": "train.device=cpu",
    "opts": "keys and their values, such as train.output_dir=output/mine",
}


def parser() -> argparse.ArgumentParser:
    """The flags of a training that a YAML file describes, and those that name and fit data."""
    return run_parser(
        "lambda_det.detection.task.DetectionTask",
        "Train and evaluate a detector described by a configuration file.",
        _EXAMPLES + YAML_EXAMPLES,
        add_first=_add_data_flags,
    )


def lazy_parser() -> argparse.ArgumentParser:
    """The flags of a training that a LazyConfig describes."""
    return run_parser(
        "lambda_det.detection.task.DetectionTask",
        "Train and evaluate what a LazyConfig describes.",
        _LAZY_EXAMPLES,
        _LAZY_NAMES,
    )


def _add_data_flags(result: argparse.ArgumentParser) -> None:
    data = result.add_argument_group(
        "your own data",
        "instead of DATASETS.TRAIN and .TEST; labels of COCO, YOLO, Pascal VOC, LabelMe, VIA or "
        "CVAT",
    )
    data.add_argument(
        "--data",
        metavar="DIR",
        help="folder of a data set, or YOLO's data.yaml: its parts to train and to evaluate on",
    )
    data.add_argument("--train-json", "--train", metavar="FILE_OR_DIR", help="labels to train on")
    data.add_argument(
        "--train-images", "--images", metavar="DIR", help="folder of the images to train on"
    )
    data.add_argument("--test-json", "--test", metavar="FILE_OR_DIR", help="labels to evaluate on")
    data.add_argument("--test-images", metavar="DIR", help="folder of the images to evaluate on")
    data.add_argument(
        "--val-share",
        type=float,
        metavar="S",
        help="share of the training images to evaluate on, by their names, without a --test-json; "
        "0.1 with --data or without --config",
    )
    data.add_argument(
        "--stratify", action="store_const", const=True, help="each class has its share, too"
    )
    data.add_argument(
        "--group-by",
        metavar="REGEX",
        help="images whose names match it alike stay on one side, such as ^[^_]+ of a video's",
    )
    schedule = result.add_argument_group(
        "schedule and size for your data", "RECIPE in lambda_det/config.py"
    )
    schedule.add_argument(
        "--epochs", type=float, metavar="N", help="passes over the training images; 0: by a rule"
    )
    schedule.add_argument(
        "--batch",
        type=int,
        metavar="N",
        help="images a step; else by the memory of the GPUs, where the file says what it takes",
    )
    schedule.add_argument(
        "--size",
        type=int,
        metavar="N",
        help="pixels of the shorter side of images in the test; the longer side and the sizes in "
        "training change by the same factor",
    )
