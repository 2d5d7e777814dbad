"""Two runs of seconds, and what they leave, to compare."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lambda_det.training.log import OF_MACHINE
from lambda_det.weights.formats import read_checkpoint
from tests.classification.tiny import RECIPE, make_images
from tests.detection.tiny import TINY, write_lazy_config
from tests.shapes import data_words, make_shapes

ROOT = Path(__file__).parents[2]
TOOL = str(ROOT / "tools" / "train_net.py")
# Of a process that is started for a run
VARIABLES = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}

# A Mask R-CNN with lambda layers and stochastic depth, small enough for many runs
DETECTOR = """
MODEL:
  META_ARCHITECTURE: GeneralizedRCNN
  DEVICE: cpu
  MASK_ON: True
  WEIGHTS: ""
  BACKBONE: {NAME: build_lambda_resnet_fpn_backbone, FREEZE_AT: 0}
  LAMBDA_RESNET: {NAME: lambda_resnet26_slim, SCOPE: 3, OUT_FEATURES: [res4, res5],
                  STOCHASTIC_DEPTH: 0.3}
  FPN: {IN_FEATURES: [res4, res5], OUT_CHANNELS: 8}
  ANCHOR_GENERATOR: {SIZES: [[16], [24], [32]], ASPECT_RATIOS: [[1.0]]}
  RPN: {IN_FEATURES: [p4, p5, p6], PRE_NMS_TOPK_TRAIN: 20, PRE_NMS_TOPK_TEST: 20,
        POST_NMS_TOPK_TRAIN: 10, POST_NMS_TOPK_TEST: 10, BATCH_SIZE_PER_IMAGE: 8}
  ROI_HEADS: {NAME: StandardROIHeads, IN_FEATURES: [p4, p5], BATCH_SIZE_PER_IMAGE: 4}
  ROI_BOX_HEAD: {NAME: FastRCNNConvFCHead, NUM_FC: 1, FC_DIM: 8, POOLER_RESOLUTION: 7}
  ROI_MASK_HEAD: {NAME: MaskRCNNConvUpsampleHead, NUM_CONV: 1, CONV_DIM: 8, POOLER_RESOLUTION: 7}
"""
# Jitter and two loader workers, too: all that draws random numbers takes part
_DETECTION = (
    DETECTOR
    + """INPUT: {LSJ: {ENABLED: True, SIZE: 64}, MIN_SIZE_TEST: 64, MAX_SIZE_TEST: 64}
DATALOADER: {NUM_WORKERS: 2}
SOLVER: {IMS_PER_BATCH: 2, ACCUMULATE_GRADIENTS: 2, BASE_LR: 0.01, MAX_ITER: 60, STEPS: [30],
         WARMUP_ITERS: 10, CHECKPOINT_PERIOD: 3}
TEST: {EVAL_PERIOD: 20}
SEED: 1
"""
)


def detection_words(root: Path) -> list[str]:
    """Make data and a configuration below ``root``; the arguments of a run of 60 steps on them.

    The network has one block a stage, where that of DETECTOR has two.
    """
    (root / "detection.yaml").write_text(_DETECTION)
    words = ["--config-file", str(root / "detection.yaml"), "--resume"]
    words += data_words(root, num_train=10, num_val=4, size=64)
    return [*words, "MODEL.LAMBDA_RESNET.NAME", "resnet14_slim_lambda_c5"]


def lazy_words(root: Path) -> list[str]:
    """The same for the Mask R-CNN of a LazyConfig of ours, of six steps, made as small."""
    make_shapes(root, num_train=7, num_val=2, size=48)
    words = f"""--config-file {write_lazy_config(root)} --resume {TINY[1]}
        dataloader.image_size=48 dataloader.train.total_batch_size=2 optimizer.lr=0.01
        train.max_iter=6 train.reference_world_size=0 train.eval_period=3 train.log_period=1
        model.proposal_generator.pre_nms_topk=[100,100] model.roi_heads.batch_size_per_image=8
        model.proposal_generator.post_nms_topk=[20,20] model.backbone.bottom_up.stochastic_depth=0.2
        """
    return words.split()


def classification_words(root: Path) -> list[str]:
    """The same for a classifier: 60 steps, with averaged weights."""
    make_images(root / "pictures")
    (root / "recipe.yaml").write_text(RECIPE)
    words = ["--config-file", str(root / "recipe.yaml"), "--resume"]
    words += ["DATA.TRAIN", str(root / "pictures/train"), "DATA.VAL", str(root / "pictures/val")]
    return [*words, "SOLVER.EPOCHS", "10", "SOLVER.IMS_PER_BATCH", "4", "TEST.EVAL_PERIOD", "5"]


def content(path: Path) -> dict[str, Any]:
    """The content of a checkpoint without times and folders, which differ between runs."""
    result = read_checkpoint(path)
    for entry in ("recipe", "run"):
        result.get(entry, {}).pop("config", None)
    return {key: value for key, value in result.items() if key != "results"}


def metrics(folder: Path) -> dict[int, dict[str, float]]:
    """The lines of metrics.json by iteration, without times and memory; no iteration twice."""
    lines = [json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()]
    result = {line["iteration"]: _without_times(line) for line in lines}
    assert len(result) == len(lines), "an iteration stands in metrics.json twice"
    return result


def _without_times(line: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in line.items() if key not in OF_MACHINE}


def assert_same_run(one: Path, other: Path) -> None:
    """Equal checkpoints and metrics, to the bit."""
    for name in ("model_final.pth", "model_best.pth"):
        assert differences(content(one / name), content(other / name)) == [], other
    assert differences(metrics(one), metrics(other)) == [], other


def differences(first: Any, second: Any, where: str = "") -> list[str]:
    """Where two nested values are not the same to the bit."""
    if type(first) is not type(second):
        return [f"{where}: {type(first).__name__} and {type(second).__name__}"]
    if isinstance(first, dict):
        if list(first) != list(second):
            return [
                f"{where}: keys {sorted(set(first) ^ set(second), key=str) or 'in other order'}"
            ]
        return [d for key in first for d in differences(first[key], second[key], f"{where}/{key}")]
    if isinstance(first, (list, tuple)):
        if len(first) != len(second):
            return [f"{where}: {len(first)} and {len(second)} items"]
        pairs = enumerate(zip(first, second, strict=True))
        return [d for i, (a, b) in pairs for d in differences(a, b, f"{where}/{i}")]
    if isinstance(first, torch.Tensor):
        same = first.dtype == second.dtype and torch.equal(first, second)
    elif isinstance(first, np.ndarray):
        same = np.array_equal(first, second)
    else:
        same = first == second or (
            isinstance(first, float) and math.isnan(first) and math.isnan(second)
        )
    return [] if same else [f"{where}: {first!r:.80} and {second!r:.80}"]
