"""The flags of training and evaluation."""

from __future__ import annotations

import argparse

from detectron2.engine import default_argument_parser

__all__ = ["lazy_parser", "parser", "run_parser"]

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

_STATUS = """
Exit status: 0 when all is done; 2 after an error, which is one sentence; 75 when SIGTERM or SIGUSR1
of a scheduler stopped a training, which saved all and goes on with --resume; 130 after Ctrl-C.
"""

_HELP = {
    "config_file": "YAML file of configuration keys, read over the defaults",
    "resume": "continue the run in OUTPUT_DIR from its last checkpoint; start it if there is none",
    "eval_only": "evaluate MODEL.WEIGHTS, or with --resume the last checkpoint of OUTPUT_DIR",
    "num_gpus": "GPUs to use on this machine, one process each (with MODEL.DEVICE cpu: processes)",
    "num_machines": "machines that train together",
    "machine_rank": "which of them this is, from 0",
    "dist_url": "where the processes meet, tcp://ADDRESS:PORT of the machine of rank 0; "
    "by default a free port of this machine",
    "opts": "configuration keys and their values, such as OUTPUT_DIR output/mine",
}


def run_parser(description: str, examples: str) -> argparse.ArgumentParser:
    """Detectron2's usual flags of a training, said more clearly.

    Args:
        description: one sentence.
        examples: shown after the flags; ``%(prog)s`` is the program.
    """
    result = default_argument_parser(epilog=examples + _STATUS)
    result.description = description
    result.set_defaults(dist_url="auto")
    for action in result._actions:
        action.help = _HELP.get(action.dest, action.help)
    result.add_argument(
        "--debug-numerics",
        action="store_true",
        help="stop at the first layer whose output or gradient is NaN or infinite, and name it; "
        "training is slower",
    )
    return result


_LAZY_HELP = {
    "config_file": "LazyConfig: a Python file, which is run, or the config.yaml of its run",
    "resume": "continue the run in train.output_dir from its last checkpoint; start it if there is "
    "none",
    "eval_only": "evaluate train.init_checkpoint, or with --resume the last checkpoint of "
    "train.output_dir",
    "num_gpus": "GPUs to use on this machine, one process each (with train.device=cpu: processes)",
    "opts": "keys and their values, such as train.output_dir=output/mine",
}


def parser() -> argparse.ArgumentParser:
    """The usual flags, and four that name data in COCO's format."""
    result = run_parser(
        "Train and evaluate a detector described by a configuration file.", _EXAMPLES
    )
    _add_data_flags(result, "DATASETS.TRAIN and .TEST")
    return result


def lazy_parser() -> argparse.ArgumentParser:
    """The same flags for a LazyConfig."""
    result = run_parser("Train and evaluate what a LazyConfig describes.", _LAZY_EXAMPLES)
    for action in result._actions:
        action.help = _LAZY_HELP.get(action.dest, action.help)
    _add_data_flags(result, "those of dataloader.train and .test")
    return result


def _add_data_flags(result: argparse.ArgumentParser, instead_of: str) -> None:
    data = result.add_argument_group(f"data in COCO's format, instead of {instead_of}")
    for part, use in (("train", "to train on"), ("test", "to evaluate on")):
        data.add_argument(f"--{part}-json", metavar="FILE", help=f"annotations {use}")
        data.add_argument(f"--{part}-images", metavar="DIR", help=f"folder of the images {use}")
