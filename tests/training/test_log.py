"""What stands on the screen, lines beside a bar; and how the file ends."""

import logging
import sys
from types import SimpleNamespace

import pytest
from tqdm import tqdm

from lambda_det.errors import ConfigError, Interrupted
from lambda_det.training.hooks import Progress
from lambda_det.training.log import BufferedLog, show


def test_a_line_and_a_bar_never_share_a_line_of_the_screen(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stderr", sys.stdout)  # both are the terminal
    with BufferedLog(quiet=True) as log:
        log.open(str(tmp_path))
        with tqdm(total=3, desc="steps") as bar:
            bar.update()
            show("a line")
            logging.getLogger("detectron2.data").warning("a warning")
            bar.update(2)
    # what a terminal shows of each line is what comes after the last return to its beginning
    screen = [line.split("\r")[-1] for line in capsys.readouterr().out.split("\n")]
    for words in ("a line", "a warning"):
        (line,) = [line for line in screen if words in line]
        assert "steps" not in line
    assert "3/3" in screen[-2]


def test_what_ends_the_run_has_a_line_of_its_own(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stderr", sys.stdout)
    with pytest.raises(Interrupted), BufferedLog(quiet=True) as log:
        log.open(str(tmp_path))
        hook = Progress()
        hook.trainer = SimpleNamespace(max_iter=3, start_iter=0)
        hook.before_train()
        raise Interrupted("why")
    print("why")  # as the command line does
    assert capsys.readouterr().out.split("\n")[-2:] == ["why", ""]


@pytest.mark.parametrize(
    ("error", "has_trace"),
    [(Interrupted("why"), False), (ConfigError("why"), False), (IndexError("why"), True)],
)
def test_the_file_ends_with_what_ended_the_run(tmp_path, capsys, error, has_trace):
    """The screen has it from the command line; the trace is that of a fault alone."""
    with pytest.raises(type(error)), BufferedLog() as log:
        log.open(str(tmp_path))
        raise error
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert lines[0].endswith(" why") and (len(lines) > 1) == has_trace
    assert capsys.readouterr().out == ""


def test_the_cause_of_a_refusal_stands_in_the_file(tmp_path):
    """The error of a library, which a sentence for the user replaces on the screen."""
    with pytest.raises(ConfigError), BufferedLog() as log:
        log.open(str(tmp_path))
        raise ConfigError("why") from IndexError("of a library")
    assert "IndexError: of a library" in (tmp_path / "log.txt").read_text()
