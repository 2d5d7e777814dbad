"""Steps whose loss stands out from those before: named with their images, and counted."""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Any

__all__ = ["SpikeWatch"]

FACTOR = 10.0  # times the median of the losses before
WINDOW = 100  # losses that the median is of
FEWEST = 20  # before so many nothing is said
PAUSE = 100  # steps after a warning before the next one


class SpikeWatch:
    """The total losses of this process's last steps.

    Attributes:
        count: steps so far in which the loss of some process stood out.
    """

    def __init__(self) -> None:
        self.count = 0
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._quiet_until = 0

    @property
    def median(self) -> float:
        """Of the last losses; infinite while they are too few."""
        return statistics.median(self._recent) if len(self._recent) >= FEWEST else math.inf

    @property
    def limit(self) -> float:
        """What a loss may be; infinite where nothing can be said."""
        return FACTOR * self.median if self.median > 0 else math.inf

    def add(self, total: float) -> None:
        """The loss of a step that was taken."""
        self._recent.append(total)

    def count_one(self, iteration: int) -> bool:
        """Count a step that stands out; returns whether it is time to say so."""
        self.count += 1
        if iteration < self._quiet_until:
            return False
        self._quiet_until = iteration + PAUSE
        return True

    def state_dict(self) -> dict[str, Any]:
        return {
            "count": self.count,
            "recent": list(self._recent),
            "quiet_until": self._quiet_until,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self._quiet_until = state["count"], state["quiet_until"]
        self._recent = deque(state["recent"], maxlen=WINDOW)
