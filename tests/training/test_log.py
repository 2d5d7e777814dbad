"""What stands on the screen: lines beside a bar."""

import logging
import sys

from tqdm import tqdm

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
