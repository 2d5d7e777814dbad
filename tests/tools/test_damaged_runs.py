"""``lambda-det train`` where the disk fills up, and where it has spoiled what was on it."""

from pathlib import Path

import pytest
import torch

from lambda_det.training.run_folder import RunFolder
from tests.reliability.runs import metrics

pytestmark = pytest.mark.slow  # trains


@pytest.fixture(scope="module")
def run(train, tmp_path_factory) -> Path:
    """The folder of a run of four steps, with a checkpoint in the midst of it."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    assert train(folder, "SOLVER.MAX_ITER", 4) == 0
    return folder


def test_files_that_may_not_become_large_enough(train, run, capsys):
    """The run ends with one message, and continues when there is space again."""
    resource = pytest.importorskip("resource")
    before = (run / "model_final.pth").read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limits[1]))
    try:
        assert train(run, "--resume", "SOLVER.MAX_ITER", 7) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    printed = capsys.readouterr()
    last = printed.err.strip().splitlines()[-1]
    assert last.startswith(f"error: {run / 'model_0000005.pth'} could not be written")
    assert f"The last good checkpoint is {run / 'model_final.pth'}" in last and "--resume" in last
    assert "Traceback" not in printed.err + printed.out
    assert (run / "model_final.pth").read_bytes() == before
    assert RunFolder(run).read_newest().path == str(run / "model_final.pth")
    assert not list(run.glob("*.tmp"))
    assert max(metrics(run)) >= 4  # what was recorded until then is kept


def test_a_spoiled_checkpoint_is_made_again_from_the_one_before(train, run, caplog):
    path = run / "model_final.pth"
    good, before = path.read_bytes(), torch.load(path, weights_only=True)["model"]
    place = good.index(bytes(before["proposal_generator.rpn_head.conv.weight"].untyped_storage()))
    path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
    caplog.clear()
    assert train(run, "--resume", "SOLVER.MAX_ITER", 4) == 0
    assert "model_final.pth cannot be read: it is damaged" in caplog.text
    assert f"Instead {run / 'model_0000001.pth'} is taken" in caplog.text
    after = torch.load(path, weights_only=True)["model"]
    assert all(torch.equal(after[name], value) for name, value in before.items())
