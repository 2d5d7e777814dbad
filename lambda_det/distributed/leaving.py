"""How the processes of a run leave its work: together, so that none waits for one that has left.

A process that ``--num-gpus`` has started keeps its connections until all have ended. One that
waited for it would wait for half an hour (``connection.AT_LENGTH``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

from detectron2.utils import comm

from lambda_det.distributed.signals import StopRequest, received_signal
from lambda_det.errors import duration

logger = logging.getLogger(__name__)

Batch = TypeVar("Batch")
# Between two lines about the time that is left
_SECONDS = 30


def leave_if_asked() -> None:
    """Leave the work if a signal has asked any process to stop; called in all of them alike.

    Raises:
        StopRequest: one was asked; it is raised on all.
    """
    if number := max(comm.all_gather(received_signal())):
        raise StopRequest(number)


class UntilAsked(Generic[Batch]):
    """Batches for work without collective calls, such as an evaluation's.

    Each process may have another number of them. A process that was asked to stop takes no more.
    Before the first and after the last batch all processes meet, and leave if one was asked.
    Where the work takes long, the log says how much of these batches is left.
    """

    def __init__(self, batches: Iterable[Batch]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        """
        Raises:
            StopRequest: on all processes, if one was asked to stop.
        """
        leave_if_asked()
        begin = logged = time.monotonic()
        for done, batch in enumerate(self._batches):
            if received_signal():
                break
            now = time.monotonic()
            if done and now - logged >= _SECONDS:
                left = (now - begin) / done * (len(self) - done)
                logger.info(f"Evaluated {done} of {len(self)} batches; {duration(left)} left")
                logged = now
            yield batch
        leave_if_asked()
