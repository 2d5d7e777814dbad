"""tools/train_imagenet.py as a user calls it."""

from pathlib import Path

import pytest
import torch

from tests import forked
from tests.reliability.runs import classification_words, content, metrics

pytestmark = pytest.mark.slow  # trains

TOOL = Path(__file__).parents[2] / "tools/train_imagenet.py"
# Statistics of all processes together, and nothing random in the network. The rate is low, since
# steps on eight images amplify the last bit of a sum soon.
ALIKE = ("MODEL.NORM", "SyncBN", "MODEL.DROPOUT", 0, "MODEL.STOCHASTIC_DEPTH", 0)
ALIKE += ("SOLVER.EPOCHS", 2, "SOLVER.IMS_PER_BATCH", 8, "SOLVER.BASE_LR", 0.001)
ALIKE += ("LOG_PERIOD", 1, "TEST.PRECISE_BN_BATCHES", 99)


def test_two_processes_train_as_one(tmp_path):
    words = [TOOL, *classification_words(tmp_path), *ALIKE, "OUTPUT_DIR"]
    one, two = tmp_path / "one", tmp_path / "two"
    alone = forked.run([*words, one], tmp_path / "printed")
    for done in (alone, *forked.run_as_torchrun([*words, two], tmp_path)):
        assert done.returncode == 0, done.stdout
    assert "8 images a step, 4 at once on each process" in (two / "log.txt").read_text()
    logged = metrics(one)
    assert [*logged] == [0, 1, 2, 3, 4, 5]
    for step, line in metrics(two).items():
        assert line["total_loss"] == pytest.approx(logged[step]["total_loss"], rel=1e-4)
    for key in ("val/raw_loss", "val/ema_loss", "val/ema_top1"):
        assert line[key] == pytest.approx(logged[5][key], rel=1e-3), key
    expected = content(one / "model_final.pth")["ema"]["model"]
    for name, value in content(two / "model_final.pth")["ema"]["model"].items():
        scale = expected[name].abs().max().item() + 0.01  # running statistics included
        torch.testing.assert_close(value, expected[name], rtol=0, atol=2e-3 * scale, msg=name)
