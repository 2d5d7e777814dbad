from types import SimpleNamespace

import pytest
import torch

from lambda_det.export.onnx_file import HOLDS_ANY_SIZE
from tests.export.tiny import lambda_detector_config, save_lambda_run
from tests.export.toy import RUN, classifier_checkpoint
from tests.shapes import make_shapes

needs_any_size = pytest.mark.skipif(not HOLDS_ANY_SIZE, reason="needs PyTorch 2.7")


@pytest.fixture(autouse=True)
def quietly(recwarn):
    """torch.jit advises against itself, and warns of each constant of a trace."""
    with torch.no_grad():
        yield


@pytest.fixture(scope="package")
def run(tmp_path_factory):
    """The folder of a run with validation images."""
    folder = tmp_path_factory.mktemp("run")
    make_shapes(folder, num_train=1, num_val=4, size=64)
    cfg = lambda_detector_config()
    cfg.DATASETS.TEST_JSON = str(folder / "shapes/annotations/instances_val.json")
    cfg.DATASETS.TEST_IMAGES = str(folder / "shapes/val")
    made = save_lambda_run(folder / "run")
    (made / "config.yaml").write_text(cfg.dump())
    return SimpleNamespace(cfg=cfg, folder=made)


@pytest.fixture(scope="package")
def checkpoint():
    """Of a classifier; tests do not change it."""
    return classifier_checkpoint(**RUN["options"])
