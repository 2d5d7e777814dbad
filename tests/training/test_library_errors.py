"""Errors of the system and of libraries in a run get its file, and the last good checkpoint."""

import errno
import logging
import os
from pathlib import Path

import pytest

from lambda_det.errors import DiskError
from lambda_det.training.library_errors import explained
from lambda_det.training.log import BufferedLog
from lambda_det.training.run_folder import RunFolder
from tests.training.toy import settings

ROOT = Path(__file__).parents[2]


def _raise(number, file=None):
    raise OSError(number, os.strerror(number), *([file] if file else []))


def _explained(folder):
    return explained(settings(output_dir=str(folder)))


def _raise_hidden(number, file):
    try:
        _raise(number, file)
    except OSError:
        raise RuntimeError("of a library that hides it")  # noqa: B904


@pytest.mark.parametrize("do", [_raise, _raise_hidden])
def test_an_error_of_the_system_names_the_file_and_the_last_checkpoint(tmp_path, do):
    words = r"metrics\.json: No space left on device.*no checkpoint yet.*--resume"
    with pytest.raises(DiskError, match=words), _explained(tmp_path):
        do(errno.ENOSPC, "run/metrics.json")
    RunFolder(tmp_path).point_to("model_0000003.pth")
    with pytest.raises(DiskError, match=r"run in .*model_0000003\.pth"), _explained(tmp_path):
        do(errno.ENOSPC, None)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EMFILE, os.strerror(errno.EMFILE)),
        RuntimeError("received 0 items of ancdata"),  # by Python's socket, of a loader process
        OSError("Caught OSError in DataLoader worker process 0.\n ... Too many open files: 'a'"),
    ],
)
def test_too_many_open_files_are_one_sentence(tmp_path, error):
    words = r"ulimit -n .* num_workers\. There is no checkpoint yet.*--resume"
    with pytest.raises(DiskError, match=words), _explained(tmp_path):
        raise error


def test_a_mistake_after_an_error_that_was_dealt_with_keeps_its_stack(tmp_path):
    error = ValueError("a mistake")
    with pytest.raises(ValueError, match="a mistake") as caught, _explained(tmp_path):
        try:
            _raise(errno.ENOENT, "a cache that may be missing")
        except OSError:
            raise error  # noqa: B904
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


def test_names_in_the_log_do_not_command_the_terminal(tmp_path, capsys):
    """A table of Detectron2's has its lines and its colour, and the names of classes."""
    with BufferedLog() as log:
        logging.getLogger("lambda_det").warning("early %s", "\x1b[2J")
        log.open(str(tmp_path))
        logging.getLogger("detectron2").warning("\x1b[36mclass\n%s\x1b[0m", "\x1b]0;title\x07")
        logging.getLogger("lambda_det").info("%d", "no number")  # a fault stays one of logging
    for text in (capsys.readouterr().out, (tmp_path / "log.txt").read_text()):
        assert r"early \x1b[2J" in text
        assert "\x1b[36mclass\n\\x1b]0;title\\x07\x1b[0m\n" in text
