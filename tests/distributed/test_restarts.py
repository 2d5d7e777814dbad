"""torchrun restarts a run one of whose processes was killed, and it comes to the same end."""

import os
import signal
from pathlib import Path

import pytest

from tests import forked
from tests.processes import children, wait_until
from tests.reliability.runs import TOOL, VARIABLES, content, detection_words, differences

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds processes in /proc"),
]

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=2"]


@pytest.mark.parametrize(
    "launcher",
    [["-c", forked.LAUNCHER], pytest.param(TORCHRUN, marks=pytest.mark.release)],
    ids=["forking", "torchrun"],
)
def test_torchrun_continues_after_a_kill(launcher, tmp_path):
    words = detection_words(tmp_path)
    words += ["SOLVER.MAX_ITER", "14", "DATALOADER.NUM_WORKERS", "1", "TEST.EVAL_PERIOD", "0"]
    words += ["SOLVER.ACCUMULATE_GRADIENTS", "1", "OUTPUT_DIR"]
    folder, output = tmp_path / "run", tmp_path / "output"
    argv = [*launcher, TOOL, *words, str(folder)]
    run = forked.start(argv, output, **VARIABLES)

    def has_saved() -> bool:
        assert run.is_alive(), output.read_text()[-5000:]
        return (folder / "last_checkpoint").exists()

    wait_until(has_saved, 200)
    training = [pid for pid in children(run.pid) if children(pid)]  # each has a loader process
    assert len(training) == 2
    os.kill(training[1], signal.SIGKILL)
    run.join(300)
    assert run.exitcode == 0, output.read_text()[-9000:]
    if launcher == TORCHRUN:  # a forking launcher may end the other process before it says so
        assert "Process 0 of 2 has lost the connection" in output.read_text()
    starts = [line for line in (folder / "log.txt").open() if "Training from iteration" in line]
    assert len(starts) == 2 and "iteration 0 to" in starts[0] and "iteration 0 to" not in starts[1]

    for done in forked.run_as_torchrun([TOOL, *words, tmp_path / "whole"], tmp_path, **VARIABLES):
        assert done.returncode == 0, done.stdout[-5000:]
    # Norms are not synchronised here: the statistics of the first process are those of both after
    # the restart, and with them the evaluation is another one
    whole, restarted = (content(path / "model_final.pth") for path in (tmp_path / "whole", folder))
    assert differences(whole["model"], restarted["model"]) == []
