"""The engine's sentences in the words of a LazyConfig."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from lambda_det.engine.lazy_config import KEYS
from lambda_det.errors import UserError

__all__ = ["lazy_words"]

_NAMES = {
    **KEYS,
    "DATASETS.TRAIN": "dataloader.train.dataset.names",
    "DATASETS.TEST": "dataloader.test.dataset.names",
    "SOLVER.WARMUP_ITERS": "lr_multiplier.warmup_length",
    "CHECKPOINT_ACTIVATIONS": "checkpoint_activations",
}
# The longest names first, or DATASETS.TRAIN would be found in DATASETS.TRAIN_JSON. A value that
# follows is joined to the key, as on the command line.
_KEY = re.compile(
    r"(?<![\w.])("
    + "|".join(re.escape(key) for key in sorted(_NAMES, key=len, reverse=True))
    + r")(?![\w])(?: (?=(?:FILE|cpu|cuda|bfloat16|float16|True|False)\b))?"
)


def translated(text: str) -> str:
    def replaced(match: re.Match) -> str:
        return _NAMES[match[1]] + ("=" if match[0].endswith(" ") else "")

    return _KEY.sub(replaced, text)


@contextmanager
def lazy_words() -> Iterator[None]:
    """Let a UserError that passes name the keys of a LazyConfig."""
    try:
        yield
    except UserError as error:
        raise type(error)(translated(str(error))) from error
