"""Small data sets in COCO's format, made on the spot."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from detectron2.config import CfgNode, get_cfg
from detectron2.utils import logger
from PIL import Image

from lambda_det.config import add_lambda_config
from lambda_det.detection.data import ground_truth, read_coco
from lambda_det.detection.data.coco import GroundTruth
from tests.coco import annotation, coco_content


@pytest.fixture
def content() -> dict[str, Any]:
    """Four images of 64x48 with two annotations each, of two categories."""
    annotations = []
    for image in (10, 20, 30, 40):
        for box in ([4, 6, 20, 16], [30, 10, 24, 30]):
            number = len(annotations) + 1
            annotations.append(annotation(number, image, box, category_id=1 if number % 2 else 5))
    names = {image: f"{image}.png" for image in (10, 20, 30, 40)}
    return coco_content(names, annotations, {1: "apple", 5: "pear"})


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., tuple[str, str]]:
    """Write annotations, and noise for their images, and return the file and the folder."""

    def write_dataset(content: Any, name: str = "set") -> tuple[str, str]:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        rng = np.random.default_rng(0)
        for image in content["images"]:
            shape = (*np.clip([image["height"], image["width"]], 1, 1000), 3)
            pixels = rng.integers(0, 255, shape, dtype=np.uint8)
            file = folder / image["file_name"]
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(file)
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(content))
        return str(path), str(folder)

    return write_dataset


@pytest.fixture
def read(write: Callable[..., tuple[str, str]]) -> Callable[[Any], GroundTruth]:
    """Write annotations, and return what is decided about them."""
    return lambda content: read_coco(*write(content))


@pytest.fixture
def noise(tmp_path: Path) -> Callable[[int, int], dict[str, Any]]:
    """Write an image of noise, and return its record."""

    def write_image(height: int, width: int) -> dict[str, Any]:
        path = str(tmp_path / "image.png")
        pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
        return {"file_name": path, "height": height, "width": width, "image_id": 1}

    return write_image


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the annotation files that are read, in order; at first nothing is kept."""
    read: list[str] = []

    def counted(json_file: str, *places: str, **options: Any) -> Any:
        read.append(Path(json_file).name)
        return read_coco(json_file, *places, **options)

    monkeypatch.setattr(ground_truth, "_kept", {})
    monkeypatch.setattr(ground_truth, "read_coco", counted)
    return read


@pytest.fixture
def cfg() -> CfgNode:
    cfg = get_cfg()
    add_lambda_config(cfg)
    cfg.MODEL.MASK_ON = True
    cfg.MODEL.ROI_HEADS.NUM_CLASSES = 2
    cfg.DATALOADER.NUM_WORKERS = 0
    cfg.INPUT.LSJ.ENABLED = True
    cfg.INPUT.LSJ.SIZE = 64
    return cfg


@pytest.fixture(autouse=True)
def _not_yet_warned() -> None:
    """Forget the warnings that were given once."""
    logger._LOG_COUNTER.clear()
