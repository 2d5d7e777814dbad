"""How the kernels are compiled: for this processor at first use, or by setup.py for a wheel.

Only the standard library is imported, because setup.py runs this file by its path.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

# The objects are linked without libgomp: the process must not hold a second pool of threads beside
# the one of PyTorch, which has its OpenMP library in the global scope.
FLAGS = ["-O3", "-ffp-contract=fast", "-fopenmp", "-fPIC", "-std=c++17", "-c"]
# the processors of a wheel, the best last: 0.98 to 1.05 of the time of -march=native
PROCESSORS = {
    "x86_64": {
        "1_avx2": ["-march=x86-64-v3"],
        "2_avx512": ["-march=x86-64-v4"],
        "3_avx512_bf16": ["-march=x86-64-v4", "-mavx512bf16"],
    },
    "aarch64": {"1_neon": ["-march=armv8-a"]},
}


def files(suffix: str) -> list[Path]:
    return sorted(Path(__file__).parent.glob(f"*{suffix}"))


def run(command: Sequence[str]) -> str:
    """The output of a command.

    Raises:
        OSError, subprocess.SubprocessError: it is missing, failed, or took five minutes.
    """
    text = {"capture_output": True, "text": True, "errors": "replace"}
    return subprocess.run(command, check=True, timeout=300, stdin=subprocess.DEVNULL, **text).stdout


def compile_kernels(compiler: Sequence[str], processor: Sequence[str], folder: Path) -> Path:
    """A library of all kernels, in a folder for it and its parts.

    Args:
        compiler: its name, perhaps with arguments.
        processor: the flags for one.

    Raises:
        OSError, subprocess.SubprocessError: as by :func:`run`.
    """
    objects = [str(folder / f"{source.stem}.o") for source in files(".cpp")]
    for source, compiled in zip(files(".cpp"), objects, strict=True):
        run([*compiler, *FLAGS, *processor, str(source), "-o", compiled])
    library = folder / "kernels.so"
    run([*compiler, "-shared", *objects, "-o", str(library)])
    return library
