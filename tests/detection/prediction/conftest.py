import cv2
import numpy as np
import pytest

from tests.training.tiny_detector import save_run


@pytest.fixture(scope="package")
def run(tmp_path_factory):
    """The config and the checkpoint of a finished run."""
    return save_run(tmp_path_factory.mktemp("run"))


@pytest.fixture
def image():
    """Noise of 48x64 pixels, blue and red far apart."""
    image = np.random.default_rng(0).integers(0, 255, (48, 64, 3), dtype=np.uint8)
    image[:, :, 0] //= 4
    return image


@pytest.fixture
def images(tmp_path, image):
    """A folder with images in it and below it."""
    folder = tmp_path / "images"
    (folder / "below").mkdir(parents=True)
    for name in ("a.png", "b.jpg", "below/c.bmp"):
        cv2.imwrite(str(folder / name), image)
    (folder / "notes.txt").write_text("no image")
    return folder
