"""What stands on the screen: lines beside a bar, and tables."""

import logging
import sys

from tqdm import tqdm

from lambda_det.training.log import BufferedLog, log_table, show


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


def test_a_table_says_a_value_once(caplog):
    caplog.set_level(logging.INFO)
    same, changed = [[16], [32]], (0.5, 1.0)
    log_table("Keys", [("SIZES", same, same, "clusters"), ("RATIOS", changed, [[0.7, 1.2]], "b")])
    assert caplog.text.count(str(same)) == 1 and "[[0.7, 1.2]]" in caplog.text
    assert str(changed) in caplog.text and "clusters" in caplog.text
