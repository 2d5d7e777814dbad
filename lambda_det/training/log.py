"""The log of a process, on the screen and in log.txt, and the numbers that every training logs.

To log another number, put it into the storage (``put_scalar``); one that another machine measures
differently is added to the table here. Losses have the names that the model gives them, with "loss"
in each.
"""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from detectron2.utils import comm
from detectron2.utils.logger import _ColorfulFormatter
from tabulate import tabulate
from termcolor import colored
from tqdm import tqdm

from lambda_det.errors import Interrupted, Preempted, UserError, escape_record
from lambda_det.training.run_folder import LOG

logger = logging.getLogger(__name__)

_LOGGERS = ("fvcore", "detectron2", "lambda_det")
# What these rooms say, a bar of the progress leaves visible: the time that is left, evaluations,
# and by this file tables and what other rooms show.
_SHOWN_ABOVE_BAR = (
    "lambda_det.detection.first_batch",
    "lambda_det.distributed",
    "lambda_det.training",
)
# Without a bar the screen shows what this package says, and a line of numbers in each period of the
# log. What other packages say of their work stands in log.txt.
_SHOWN = ("lambda_det", "detectron2.utils.events")
# The "extra" of a record that stands in log.txt alone, such as results of a part of an evaluation
ONLY_IN_FILE = {"only_in_file": True}
_LINE, _TIME = "[%(asctime)s] %(name)s %(levelname)s: %(message)s", "%m/%d %H:%M:%S"


class BufferedLog(logging.handlers.MemoryHandler):
    """The log of a process, in memory until the folder of the run is there.

    A context; if the log is not opened in it, warnings are shown at its end. A second run of the
    process has a log of its own.

    Args:
        quiet: show only tables, the time, evaluations and warnings on the screen.
        earlier: what another log has taken in, with which this one begins.
    """

    def __init__(self, *, quiet: bool = False, earlier: Iterable[logging.LogRecord] = ()) -> None:
        super().__init__(10_000, logging.CRITICAL + 1, flushOnClose=False)
        self._quiet = quiet
        self._opened: list[logging.Handler] = []
        self.buffer += earlier

    def take(self) -> list[logging.LogRecord]:
        """What was logged so far and goes on in another log, also of another process."""
        prepare = logging.handlers.QueueHandler(None).prepare  # so that they can be pickled
        taken = [prepare(record) for record in self.buffer]
        self.buffer.clear()
        return taken

    def __enter__(self) -> BufferedLog:
        for name in _LOGGERS:
            logging.getLogger(name).addHandler(self)
            logging.getLogger(name).setLevel(logging.INFO)
        return self

    def open(self, folder: str) -> None:
        """Write what was logged so far, and from now on everything, to the screen and log.txt."""
        rank = comm.get_rank()
        path = Path(folder, f"{LOG}.rank{rank}" if rank else LOG)
        file = logging.FileHandler(path, encoding="utf-8", errors="backslashreplace")
        file.setFormatter(logging.Formatter(_LINE, _TIME))
        self._opened = [file] if rank else [self._screen(), file]
        for handler in self._opened:
            handler.addFilter(escape_record)  # names of classes and files
        for logger in map(logging.getLogger, _LOGGERS):
            logger.propagate = False
            logger.removeHandler(self)
            for handler in self._opened:
                logger.addHandler(handler)
        logging.raiseExceptions = False  # a full disk would print a stack trace for each record
        for record in self.buffer:
            for handler in self._opened:
                handler.handle(record)
        self.buffer.clear()

    def _screen(self) -> logging.Handler:
        """The handler of the screen, with lines as Detectron2 has them."""
        screen = logging.StreamHandler(sys.stdout)
        line = colored("[%(asctime)s %(name)s]: ", "green") + "%(message)s"
        screen.setFormatter(
            _ColorfulFormatter(line, _TIME, root_name="detectron2", abbrev_name="d2")
        )
        screen.addFilter(self._is_shown)
        _write_above_bars(screen)
        return screen

    def _is_shown(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING:
            return True
        if getattr(record, "only_in_file", False):
            return False
        return record.name.startswith(_SHOWN_ABOVE_BAR if self._quiet else _SHOWN)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for bar in list(tqdm._instances):
            if bar.unit == "step":  # ours, below which what follows has lines of its own
                bar.close()
        if error is not None:  # which the command line shows on the screen
            is_told = isinstance(error, (Interrupted, Preempted, UserError))
            logger.info(error, exc_info=error.__cause__ if is_told else error, extra=ONLY_IN_FILE)
        for handler in (self, *self._opened):
            for name in _LOGGERS:
                logging.getLogger(name).removeHandler(handler)
            with contextlib.suppress(OSError):  # of a full disk
                handler.close()
        for record in self.buffer:
            if record.levelno >= logging.WARNING and comm.is_main_process():
                logging.lastResort.handle(record)


def _write_above_bars(screen: logging.StreamHandler) -> None:
    """Have a handler clear the bars of a progress before each line, and draw them below it."""
    # Without a lock, which a loader process that is killed would keep: a bar may be there twice
    emit = screen.emit

    def emit_above(record: logging.LogRecord) -> None:
        with tqdm.external_write_mode(file=screen.stream, nolock=True):
            emit(record)

    screen.emit = emit_above


def show(text: str) -> None:
    """Log a text that a bar of the progress leaves visible on the screen."""
    logger.info(text)


def log_table(title: str, rows: Iterable[tuple[Any, ...]]) -> None:
    """Log what the configuration has, what a rule makes of it, and why.

    Args:
        title: of the table.
        rows: key, value that is given, value of the rule or "", and the reason. A value of the rule
            that is given already is not said twice.
    """
    head = ("key", "given", "rule", "why")
    texts = [(key, str(given), str(rule), why) for key, given, rule, why in rows]
    said = [(key, given, "" if rule == given else rule, why) for key, given, rule, why in texts]
    logger.info(f"{title}:\n{tabulate(said, head, disable_numparse=True)}")


# ------------------------------------------------------------------------------------- its numbers
# Of these another machine measures other values. The others follow from the steps: they are kept
# over a resume, and compared between runs.
OF_MACHINE = {"time", "data_time", "rank_data_time", "eta_seconds"}
# The last word may be of a class, whose name has any letters: bbox_EMA/AP-traffic light
_AVERAGED = re.compile(r"_EMA/[^/]+(-.*)?$|/ema_\w+$")


def is_loss(name: str) -> bool:
    """Whether a value of the log is a loss, of training or ("validation/...") of a test set."""
    # After "AP-", "IoU-" and the like stands the name of a class: bbox/AP-matte/glossy cup
    return bool(re.fullmatch(r"(?!.*/[A-Za-z]*[A-Z]-).*loss[^/]*", name))


def is_of_averaged_weights(name: str) -> bool:
    """Whether a result of an evaluation is of averaged weights, such as "bbox_EMA/AP"."""
    return bool(_AVERAGED.search(name))


def plain_name(name: str) -> str:
    """The name of a result without the word that it is of averaged weights."""
    return re.sub(r"_EMA(?=/[^/]+(-.*)?$)", "", name)
