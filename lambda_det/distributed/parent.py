"""No process outlives the process that started it, however that one ends."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import torch.multiprocessing as mp

__all__ = ["end_with_parent"]

_POLL = 1.0  # seconds between two looks at the parent


def end_with_parent(parent: int, *, by_main_thread: bool = True) -> None:
    """Let the system kill this process when its parent ends in any way; call it before anything
    else.

    What was trained since the last checkpoint is lost, as with any kill. To train on would be
    worse: the run that is started in its place writes into the same folder. A loader process would
    keep its memory for ever: it cannot end while its batches wait in a pipe without a reader.

    Args:
        parent: the process that started this one.
        by_main_thread: whether the parent's main thread started it. The kernel takes the end of the
            thread that started a process for the end of the parent.
    """
    if sys.platform == "linux" and by_main_thread:
        mp._prctl_pr_set_pdeathsig(signal.SIGKILL)
    elif sys.platform != "win32":  # there a process keeps the number of a parent that has ended
        threading.Thread(target=_watch, args=(parent,), name="parent", daemon=True).start()
    if sys.platform != "win32" and os.getppid() != parent:  # it ended before the lines above
        os.kill(os.getpid(), signal.SIGKILL)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL)
    os.kill(os.getpid(), signal.SIGKILL)
