"""Millions of names in two arrays."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Iterator

import numpy as np
import torch

_BLOCK = 1 << 16


class PackedNames:
    """File names, by index from 0, without a Python object for each.

    A list of strings would be copied into every worker of a loader, as reading an element writes
    its reference count (https://github.com/pytorch/pytorch/issues/13246). Tensors are shared with
    workers that are forked, and through shared memory with those that are spawned.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        text, ends = bytearray(), array("q")
        for name in names:
            text += os.fsencode(name)
            ends.append(len(text))
        self._set(text, np.array(ends, dtype=np.int64))

    @classmethod
    def from_bytes(cls, text: bytearray, lengths: np.ndarray) -> PackedNames:
        """Names that lie one behind the other in ``text``, of ``lengths`` [names] bytes each."""
        packed = cls.__new__(cls)
        packed._set(text, np.cumsum(lengths, dtype=np.int64))
        return packed

    def _set(self, text: bytearray, ends: np.ndarray) -> None:
        self._text = torch.from_numpy(np.frombuffer(text, dtype=np.uint8))
        self._ends = torch.from_numpy(ends)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> str:
        return os.fsdecode(self.encoded(index))

    def encoded(self, index: int) -> bytes:
        """The bytes of a name."""
        if not 0 <= index < len(self):
            raise IndexError(f"name {index} of {len(self)}")
        start = int(self._ends[index - 1]) if index else 0
        return self._text[start : int(self._ends[index])].numpy().tobytes()

    def hashes(self) -> np.ndarray:
        """Python's hash of each name's bytes, int64 [names]; the same in one process only."""
        return np.fromiter(map(hash, self._all_encoded()), np.int64, len(self))

    def _all_encoded(self) -> Iterator[bytes]:
        text = memoryview(self._text.numpy())
        start = 0
        for ends in self._ends.split(_BLOCK):  # not a list of all of them
            for end in ends.tolist():
                yield bytes(text[start:end])
                start = end
