"""The engine's sentences in the words of a LazyConfig."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from detectron2.config import CfgNode

from lambda_det.detection.lazy_config import KEYS, LazyRun
from lambda_det.errors import UserError

__all__ = ["lazy_words", "own_words", "words_of"]

_NAMES = {
    **KEYS,
    "DATASETS.TRAIN": "dataloader.train.dataset.names",
    "DATASETS.TEST": "dataloader.test.dataset.names",
    "SOLVER.CLIP_GRADIENTS": "train.clip_gradients",
    "SOLVER.WARMUP_ITERS": "lr_multiplier.warmup_length",
    "CHECKPOINT_ACTIVATIONS": "checkpoint_activations",
}
# The longest names first, or DATASETS.TRAIN would be found in DATASETS.TRAIN_JSON. A value that
# follows is joined to the key, as on the command line. What is quoted or part of a path is the
# user's own.
_KEY = re.compile(
    r"(?<![\w./'\"-])("
    + "|".join(re.escape(key) for key in sorted(_NAMES, key=len, reverse=True))
    + r")(?![\w/'\"-]|\.\w)(?: (?=(?:FILE|cpu|cuda|bfloat16|float16|True|False)\b))?"
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
        if getattr(error, "in_own_words", False):
            raise
        raise type(error)(translated(str(error))) from error


def words_of(cfg: CfgNode) -> AbstractContextManager[None]:
    """Those of the file that a configuration came from."""
    return lazy_words() if isinstance(cfg, LazyRun) else nullcontext()


@contextmanager
def own_words() -> Iterator[None]:
    """Let :func:`lazy_words` leave a UserError that passes as it is.

    It is about the LazyConfig itself or what the user wrote, and names their keys already.
    """
    try:
        yield
    except UserError as error:
        error.in_own_words = True
        raise
