from collections.abc import Callable
from pathlib import Path

import pytest

from lambda_det import cli
from tests.detection.tiny import NARROW, TINY
from tests.shapes import data_words

# Keys of a training of three steps, with few proposals
SMALL = """
    SOLVER.IMS_PER_BATCH 2 SOLVER.REFERENCE_WORLD_SIZE 0 SOLVER.MAX_ITER 3 SOLVER.BASE_LR 0.01
    SOLVER.CHECKPOINT_PERIOD 2 MODEL.LAMBDA_RESNET.NAME resnet14_slim_lambda_c5
    MODEL.RPN.PRE_NMS_TOPK_TRAIN 50 MODEL.RPN.POST_NMS_TOPK_TRAIN 20
    MODEL.RPN.PRE_NMS_TOPK_TEST 50 MODEL.RPN.POST_NMS_TOPK_TEST 20
"""


@pytest.fixture(scope="package")
def data(tmp_path_factory) -> list[str]:
    """The flags that name a small data set of shapes."""
    return data_words(tmp_path_factory.mktemp("shapes"), num_train=8, num_val=2, size=64)


@pytest.fixture(scope="package")
def train(data) -> Callable[..., int]:
    """Train a small Mask R-CNN into a folder, with more words; the status of the command."""

    def train(folder: Path, *more: object) -> int:
        words = ["--config", "mask_rcnn_lambdaresnet50.yaml", *data, "--output", folder]
        keys = f"{TINY[0]} {NARROW[0]} {SMALL}".split()
        return cli.main(["train", *map(str, (*words, *keys, *more))])

    return train


@pytest.fixture(scope="package")
def trained(train, tmp_path_factory) -> Path:
    """The folder of a run; tests leave it as it is."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert train(folder) == 0
    return folder


@pytest.fixture
def last_error(capsys) -> Callable[[], str]:
    """The last line of a command that was refused."""

    def last_error() -> str:
        last = capsys.readouterr().err.strip().splitlines()[-1]
        assert last.startswith("error: ")
        return last

    return last_error
