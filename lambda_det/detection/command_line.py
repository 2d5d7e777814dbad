"""The command lines of detection: the flags, and what starts with them."""

from __future__ import annotations

import argparse

from lambda_det.training.command_line import run_parser

__all__ = ["lazy_parser", "parser", "run", "run_lazy"]

_EXAMPLES = """
Configuration keys follow the flags as KEY VALUE pairs.

On COCO (DETECTRON2_DATASETS names the folder that holds coco/), with 1 GPU, 8 GPUs, no GPU:
  %(prog)s --config-file configs/mask_rcnn_lambdaresnet50.yaml
  %(prog)s --config-file configs/mask_rcnn_lambdaresnet50.yaml --num-gpus 8
  %(prog)s --config-file configs/mask_rcnn_lambdaresnet50.yaml MODEL.DEVICE cpu

The paper's batch of 256 images on 8 GPUs, 2 images at a time on each:
  %(prog)s --config-file FILE --num-gpus 8 SOLVER.ACCUMULATE_GRADIENTS 16

On your own data in COCO's format:
  %(prog)s --config-file FILE --train-json a.json --train-images images/ \\
      --test-json b.json --test-images images/ OUTPUT_DIR output/mine

Find the layer that a loss of NaN comes from, after the run has stopped with one (slower):
  %(prog)s --config-file FILE --resume --debug-numerics OUTPUT_DIR output/mine

Continue after a stop; evaluate the last checkpoint; evaluate some weights:
  %(prog)s --config-file FILE --resume OUTPUT_DIR output/mine
  %(prog)s --config-file FILE --eval-only --resume OUTPUT_DIR output/mine
  %(prog)s --config-file FILE --eval-only MODEL.WEIGHTS model_final.pth

On 2 machines of 8 GPUs (the same line on the other one, with --machine-rank 1), or by torchrun:
  %(prog)s --config-file FILE --num-gpus 8 --num-machines 2 --machine-rank 0 \\
      --dist-url tcp://ADDRESS_OF_THE_FIRST:29500
  torchrun --nproc_per_node 8 %(prog)s --config-file FILE
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

On your own data in COCO's format:
  %(prog)s --config-file FILE --train-json a.json --train-images images/ \\
      --test-json b.json --test-images images/ train.output_dir=output/mine

Continue after a stop; evaluate the last checkpoint; evaluate some weights:
  %(prog)s --config-file FILE --resume train.output_dir=output/mine
  %(prog)s --config-file FILE --eval-only --resume train.output_dir=output/mine
  %(prog)s --config-file FILE --eval-only train.init_checkpoint=model_final.pth

Several machines, torchrun and --debug-numerics: as tools/train_net.py --help says.
"""


def parser() -> argparse.ArgumentParser:
    """The flags of a training described by a YAML file, and four that name data."""
    keys = {
        "config": "YAML file of configuration keys, read over the defaults",
        "folder": "OUTPUT_DIR",
        "weights": "MODEL.WEIGHTS",
        "cpu": "MODEL.DEVICE cpu",
        "opts": "configuration keys and their values, such as OUTPUT_DIR output/mine",
    }
    description = "Train and evaluate a detector described by a configuration file."
    result = run_parser(description, _EXAMPLES, keys)
    _add_data_flags(result, "DATASETS.TRAIN and .TEST")
    recipe = result.add_argument_group("a schedule for your data (RECIPE in lambda_det/config.py)")
    recipe.add_argument(
        "--epochs", type=float, metavar="N", help="passes over the training images; 0: by a rule"
    )
    recipe.add_argument(
        "--batch", type=int, metavar="N", help="images a step: SOLVER.IMS_PER_BATCH"
    )
    return result


def lazy_parser() -> argparse.ArgumentParser:
    """The same flags for a LazyConfig."""
    keys = {
        "config": "LazyConfig: a Python file, which is run, or the config.yaml of its run",
        "folder": "train.output_dir",
        "weights": "train.init_checkpoint",
        "cpu": "train.device=cpu",
        "opts": "keys and their values, such as train.output_dir=output/mine",
    }
    description = "Train and evaluate what a LazyConfig describes."
    result = run_parser(description, _LAZY_EXAMPLES, keys)
    _add_data_flags(result, "those of dataloader.train and .test")
    return result


def _add_data_flags(result: argparse.ArgumentParser, instead_of: str) -> None:
    data = result.add_argument_group(f"data in COCO's format, instead of {instead_of}")
    for part, use in (("train", "to train on"), ("test", "to evaluate on")):
        data.add_argument(f"--{part}-json", metavar="FILE", help=f"annotations {use}")
        data.add_argument(f"--{part}-images", metavar="DIR", help=f"folder of the images {use}")


# What follows imports PyTorch and Detectron2 when it is called, and not for --help
def run(args: argparse.Namespace, task: type | None = None) -> None:
    """Train or evaluate what a YAML file describes, in as many processes as asked for.

    Args:
        args: of :func:`parser`.
        task: in place of :class:`lambda_det.detection.task.DetectionTask`.

    Raises:
        UserError: one sentence to print.
    """
    from lambda_det.detection.task import DetectionTask
    from lambda_det.training import start

    start.run(args, task or DetectionTask)


def run_lazy(args: argparse.Namespace) -> None:
    """Train or evaluate what a LazyConfig describes, in as many processes as asked for.

    Args:
        args: of :func:`lazy_parser`.

    Raises:
        UserError: one sentence to print, with the keys of a LazyConfig.
    """
    from lambda_det.detection.lazy_task import LazyTask
    from lambda_det.training import start

    start.run(args, LazyTask)
