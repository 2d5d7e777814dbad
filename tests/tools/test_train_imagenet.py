"""tools/train_imagenet.py as a user calls it."""

import json
from pathlib import Path

import pytest
import torch

from tests import forked
from tests.classification.tiny import RECIPE, make_images

pytestmark = pytest.mark.slow  # trains

TOOL = Path(__file__).parents[2] / "tools/train_imagenet.py"


@pytest.fixture
def words(tmp_path):
    """A command line, into tmp_path/NAME."""
    images = tmp_path / "pictures"
    make_images(images)
    (tmp_path / "recipe.yaml").write_text(RECIPE)

    def make(name, *pairs, flags=()):
        data = ("DATA.TRAIN", images / "train", "DATA.VAL", images / "val")
        start = ("--config-file", tmp_path / "recipe.yaml", *flags)
        return (*start, *data, "OUTPUT_DIR", tmp_path / name, *pairs)

    return make


def _logged(folder, key):
    lines = (folder / "metrics.json").read_text().splitlines()
    return [row[key] for row in map(json.loads, lines) if key in row]


def _state(folder):
    return torch.load(folder / "model_final.pth", weights_only=True)["ema"]["model"]


# Statistics of all processes together, and nothing random in the network. The rate is low, since
# steps on eight images amplify the last bit of a sum soon.
ALIKE = ("MODEL.NORM", "SyncBN", "MODEL.DROPOUT", 0, "MODEL.STOCHASTIC_DEPTH", 0)
ALIKE += ("SOLVER.BASE_LR", 0.001, "LOG_PERIOD", 1, "TEST.PRECISE_BN_BATCHES", 99)


def test_two_processes_train_as_one(words, tmp_path):
    done = forked.run([TOOL, *words("one", *ALIKE)], tmp_path / "printed")
    assert done.returncode == 0, done.stdout
    for done in forked.run_as_torchrun([TOOL, *words("two", *ALIKE)], tmp_path):
        assert done.returncode == 0, done.stdout
    one, two = tmp_path / "one", tmp_path / "two"
    assert "8 images a step, 4 at once on each process" in (two / "log.txt").read_text()
    losses = _logged(one, "total_loss")
    assert len(losses) == 6
    assert _logged(two, "total_loss") == pytest.approx(losses, rel=1e-4)
    for key in ("val/raw_loss", "val/ema_loss", "val/ema_top1"):
        assert _logged(two, key) == pytest.approx(_logged(one, key), rel=1e-3), key
    expected = _state(one)
    for name, value in _state(two).items():  # running statistics included
        scale = expected[name].abs().max().item() + 0.01
        torch.testing.assert_close(value, expected[name], rtol=0, atol=2e-3 * scale, msg=name)
