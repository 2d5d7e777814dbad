"""Files whose reading by pickle runs a program."""

import os
import pickle
from pathlib import Path

import torch


class Program:
    """Makes a folder when it is unpickled."""

    def __init__(self, mark: str | Path) -> None:
        self._mark = str(mark)

    def __reduce__(self):
        return os.mkdir, (self._mark,)


def write_malicious(path: Path, mark: Path) -> Path:
    """Write a file of weights as its ending says, with a program that makes the folder ``mark``."""
    program = Program(mark)
    content = {
        "model": {"w": torch.ones(1)},
        "model_state": {"w": program},
        "trainer": program,
        "__author__": "Detectron2 Model Zoo",
        "iteration": 5,
    }
    if path.suffix == ".pkl":
        path.write_bytes(pickle.dumps({**content, "model": {}}, protocol=2))
    else:
        torch.save(content, path)
    return path
