"""A small folder of images, and a recipe that trains on it in seconds."""

from pathlib import Path

import cv2
import numpy as np

from lambda_det.classification import parser, run

COLOURS = {"blue": (220, 60, 40), "green": (40, 210, 60), "red": (50, 40, 220)}  # in BGR
RECIPE = """
MODEL: {DEVICE: cpu, NAME: lambda_resnet26_slim, DROPOUT: 0.3, STOCHASTIC_DEPTH: 0.1}
INPUT: {SIZE: 32, RANDAUGMENT: {LAYERS: 1, MAGNITUDE: 5}}
DATALOADER: {NUM_WORKERS: 0}
SOLVER: {EPOCHS: 2, IMS_PER_BATCH: 8, BASE_LR: 0.05, LR_BATCH: 8, WARMUP_EPOCHS: 0.5,
         EMA_DECAY: 0.99, WEIGHT_DECAY: 0.0001, LABEL_SMOOTHING: 0.1, CHECKPOINT_PERIOD: 2,
         AMP: {ENABLED: False}}
TEST: {PRECISE_BN_BATCHES: 2}
LOG_PERIOD: 2
"""
# One block a stage, where the recipe has two
NETWORK = ("MODEL.NAME", "resnet14_slim_lambda_c5")


def make_images(root: Path) -> None:
    """Folders train (8 of each of 3 classes) and val (3 of each) of noisy plain colours."""
    rng = np.random.default_rng(0)
    for part, count in (("train", 8), ("val", 3)):
        for name, colour in COLOURS.items():
            folder = root / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                noise = rng.integers(-30, 31, (40, 48, 3))
                image = np.clip(np.array(colour) + noise, 0, 255).astype(np.uint8)
                cv2.imwrite(str(folder / f"{number}.jpg"), image)


def train(root: Path, images: Path, *pairs: object) -> Path:
    """Train the recipe on the folders below ``images``, into ``root``, which it returns."""
    (root / "recipe.yaml").write_text(RECIPE)
    where = ["DATA.TRAIN", images / "train", "DATA.VAL", images / "val", "OUTPUT_DIR", root]
    words = ["--config-file", root / "recipe.yaml", *where, *pairs]
    run(parser().parse_args(list(map(str, words))))
    return root
