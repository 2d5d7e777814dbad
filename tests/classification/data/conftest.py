"""Small sets of images, made on the spot."""

from collections.abc import Callable
from pathlib import Path

import pytest
from detectron2.config import CfgNode
from PIL import Image

from lambda_det.classification.config import get_classification_config


@pytest.fixture
def cfg() -> CfgNode:
    cfg = get_classification_config()
    cfg.MODEL.DEVICE = "cpu"
    cfg.INPUT.SIZE = 16
    cfg.INPUT.TEST_CROP = 1.0
    cfg.DATALOADER.NUM_WORKERS = 0
    return cfg


@pytest.fixture
def make_folder(tmp_path: Path) -> Callable[..., Path]:
    """Write ``counts[class]`` images of 20x24 pixels into the folder of each class.

    Image n has the colour (n, 100, 200), n counting through all in the order of their names.
    """

    def make(counts: dict[str, int], name: str = "images") -> Path:
        number = 0
        for folder in sorted(counts):
            (tmp_path / name / folder).mkdir(parents=True)
            for index in range(counts[folder]):
                image = Image.new("RGB", (20, 24), (number, 100, 200))
                image.save(tmp_path / name / folder / f"{index:03d}.png")
                number += 1
        return tmp_path / name

    return make
