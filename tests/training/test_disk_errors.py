"""A disk that is full or broken, in words: by errors made, and on a small disk."""

import errno
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lambda_det.errors import DataError, DiskError
from lambda_det.training.checkpoint_files import point_to
from lambda_det.training.disk_errors import explain_disk_errors
from lambda_det.training.run_folder import BufferedLog

ROOT = Path(__file__).parents[2]


def _raise(number, file=None):
    raise OSError(number, os.strerror(number), *([file] if file else []))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS])
def test_what_only_writing_can_raise(tmp_path, number):
    words = "A file in .* could not be written: .*; there is no checkpoint yet"
    with pytest.raises(DiskError, match=words), explain_disk_errors(str(tmp_path)):
        _raise(number)
    point_to(str(tmp_path), "model_0000003.pth")
    words = r"last good checkpoint is .*model_0000003\.pth.*--resume"
    with pytest.raises(DiskError, match=words), explain_disk_errors(str(tmp_path)):
        try:
            _raise(number, str(tmp_path / "metrics.json"))
        finally:
            raise RuntimeError("of a library that hides it")


@pytest.mark.parametrize(
    "error",
    [ValueError("x"), DataError("x"), OSError("x"), OSError(errno.EACCES, "x", "image.jpg")],
)
def test_other_errors_stay_what_they_are(tmp_path, error):
    with pytest.raises(type(error)) as caught, explain_disk_errors(str(tmp_path)):
        raise error
    assert caught.value is error


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no disk that is always full")
def test_a_log_that_cannot_be_written_prints_no_stack_traces(tmp_path, capsys):
    logger = logging.getLogger("lambda_det")
    with BufferedLog() as log:
        log.open(str(tmp_path))
        (handler,) = (h for h in logger.handlers if hasattr(h, "baseFilename"))
        handler.setStream(open("/dev/full", "w"))  # noqa: SIM115
        logger.info("step")
    printed = capsys.readouterr()
    assert "step" in printed.out and not printed.err and not logger.handlers


# A run of checkpoints of 1 MB, until one cannot be written; then with what makes room
_FILL = """
import sys
from pathlib import Path
from torch import nn
from lambda_det.training.checkpointer import SafeCheckpointer
from lambda_det.training.checkpoint_files import read_newest
from lambda_det.errors import DiskError
folder = Path(sys.argv[1])
checkpointer = SafeCheckpointer(nn.Linear(500, 500), str(folder))
saved = 0
try:
    for step in range(20):
        checkpointer.save(f"model_{step:07d}", iteration=step)
        checkpointer.wait()
        saved += 1
except DiskError as error:
    print(error)
assert 2 <= saved < 20, saved
assert read_newest(str(folder)).path.endswith(f"model_{saved - 1:07d}.pth")
assert not list(folder.glob("*.tmp"))
(folder / "model_0000000.pth").unlink()
checkpointer.save("model_0000099")
checkpointer.wait()
assert read_newest(str(folder)).path.endswith("model_0000099.pth")
"""


def _mount() -> list[str]:
    """The start of a command that mounts a disk of 5 MB at a folder and runs another command."""
    script = 'mount -t tmpfs -o size=5m tmpfs "$1" && shift && exec "$@"'
    return ["unshare", "-rm", "sh", "-c", script, "sh"]


@pytest.mark.slow
def test_a_small_disk_that_is_full(tmp_path):
    usable = (
        shutil.which("unshare")
        and not subprocess.run([*_mount(), str(tmp_path), "true"], capture_output=True).returncode
    )
    if not usable:
        pytest.skip("no disk can be mounted here")
    done = subprocess.run(
        [*_mount(), str(tmp_path), sys.executable, "-c", _FILL, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = done.stdout.splitlines()
    assert "could not be written: No space left on device; it needs 1.0 MB" in line
    assert "the last good checkpoint is" in line
