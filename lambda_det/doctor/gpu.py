"""``lambda-det doctor --gpu``: prove the fused kernels of the lambda layer on this GPU.

For each kind of inputs (dtype and layout) they are held against plain PyTorch on the sizes of the
paper's networks and on awkward ones, and timed beside ``query_first``. Where they are right and
faster, ``auto`` takes them from then on (:mod:`lambda_det.layers.local.verdict`). Each kind is
checked in a process of its own, as a kernel may crash or hang.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tabulate import tabulate
from torch import Tensor

from lambda_det.errors import ConfigError, exit_status, reason
from lambda_det.layers.local import IMPLEMENTATIONS, unsupported, verdict
from lambda_det.version import __version__

__all__ = ["check", "main", "prove"]

PLAIN = "conv"  # plain PyTorch, against whose error others are held
TOLERANCE = 2  # times that error
MOST_MEMORY = 2  # times that of query_first
LEAST_GAIN = 0.97  # of its time; differences below that are noise
REPEATS = 3  # of which every bit must be the same
ROUNDS = 15  # of times, of which the median counts
LARGE = 2**31 + 2**20  # numbers of a tensor, more than 32 bits can count
TIMEOUT = 1800  # seconds of a check
KINDS = [
    f"{dtype} {layout}"
    for dtype in ("bfloat16", "float16", "float32")
    for layout in ("channels_last", "contiguous")
]
CHECK = (sys.executable, "-m", "lambda_det.doctor.gpu")


class Case(NamedTuple):
    """A call: images, height and width of the map, heads, query and value depth, scope."""

    images: int
    height: int
    width: int
    heads: int = 4
    k: int = 16
    v: int = 64
    scope: int = 23

    def inputs(self, kind: str, device: torch.device) -> list[Tensor]:
        """Queries, values and embedding as the layer lays them out, with gradients."""
        dtype, layout = kind.split()
        options = {"device": device, "dtype": getattr(torch, dtype)}
        found = []
        for groups, depth in ((self.heads, self.k), (self.v, 1)):
            if layout == "channels_last":
                shape = (self.images, self.height, self.width, groups, depth)
                found.append(torch.randn(shape, **options))
            else:
                shape = (self.images, groups, depth, self.height, self.width)
                found.append(torch.randn(shape, **options).permute(0, 3, 4, 1, 2))
        scopes = (min(self.scope, 2 * side - 1) for side in (self.height, self.width))
        found.append(torch.randn(self.k, 1, *scopes, **options))
        return [x.requires_grad_() for x in found]


# Layers of detectors at 1024 pixels and of classifiers; these are timed, too
USUAL = [
    Case(2, 64, 64),
    Case(4, 32, 32, v=128),
    Case(64, 20, 20),
    Case(128, 14, 14),
    Case(128, 10, 10, v=128),
    Case(64, 7, 7, v=128),
]
# Odd sides, other depths, heads and scopes, one query. On a tiny map there are many images, as
# plain PyTorch's error may be small by chance on one.
AWKWARD = [
    Case(1, 33, 61),
    Case(3, 34, 35, heads=8, v=32, scope=15),
    Case(2, 17, 40, heads=1, k=32, v=256, scope=7),
    Case(2, 13, 21, heads=2, k=8, v=24, scope=41),
    Case(32, 1, 3),
    Case(64, 1, 1),
]


class _WrongError(Exception):
    """A result is not what it should be."""


def _run(name: str, inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    """The output of an implementation, and the gradients of its inputs."""
    output = IMPLEMENTATIONS[name](*inputs)
    return [output.detach(), *torch.autograd.grad(output, inputs, grad)]


def _like_output(case: Case, inputs: list[Tensor]) -> Tensor:
    """A gradient of the output; small, so that no sum leaves the range of float16."""
    queries = inputs[0]
    shape = (*queries.shape[:4], case.v)
    return torch.randn(shape, device=queries.device, dtype=queries.dtype) * 2**-6


_NAMES = ("output", *(f"gradient of the {x}" for x in ("queries", "values", "embedding")))


def _compare(case: Case, got: list[Tensor], inputs: list[Tensor], grad: Tensor) -> float:
    """Raise unless the errors are small; return the largest, as a share of what is allowed."""
    exact = [x.detach().double().requires_grad_() for x in inputs]
    want, plain = _run(PLAIN, exact, grad.double()), _run(PLAIN, inputs, grad)
    least = torch.finfo(grad.dtype).eps / 2  # of one rounding; on a small map plain may have none
    worst = 0.0
    for name, a, b, c in zip(_NAMES, got, want, plain, strict=True):
        if a.dtype != grad.dtype or a.shape != b.shape:
            raise _WrongError(f"the {name} is {a.dtype} {list(a.shape)} ({case})")
        size = b.norm().clamp_min(1e-30)
        error, usual = (((x.double() - b).norm() / size).item() for x in (a, c))
        limit = max(TOLERANCE * usual, least)
        if not error <= limit:  # NaN is not
            raise _WrongError(f"the {name} has an error of {error:.2g}, over {limit:.2g} ({case})")
        worst = max(worst, error / limit)
    return worst


def _check_values(case: Case, kind: str, device: torch.device) -> float:
    inputs = case.inputs(kind, device)
    grad = _like_output(case, inputs)
    results = []
    for _ in range(REPEATS):
        for tensor in (*inputs, grad):  # NaN in the memory that results get, so that a gap is seen
            torch.full_like(tensor, torch.nan)
        results.append(_run("fused", inputs, grad))
    worst = _compare(case, results[0], inputs, grad)
    for again in results[1:]:
        for name, a, b in zip(_NAMES, results[0], again, strict=True):
            if not torch.equal(a, b):
                raise _WrongError(f"the {name} differs when it is computed again ({case})")
    return worst


def _check_empty(kind: str, device: torch.device) -> None:
    case = Case(0, 8, 8)
    inputs = case.inputs(kind, device)
    output, *_, of_embedding = _run("fused", inputs, _like_output(case, inputs))
    if output.shape != (0, 8, 8, case.heads, case.v) or of_embedding.any():
        raise _WrongError("a batch without images has a result")


def _check_large(kind: str, device: torch.device) -> str:
    """More numbers than 32 bits can count: the last image, where memory allows; what to note."""
    case = Case(LARGE // (64 * 64 * 4 * 16) + 2, 64, 64, v=16, scope=3)
    # Queries, output and their gradients; values, padded and as gradients in float32; some chunks
    wanted = 7 * LARGE * getattr(torch, kind.split()[0]).itemsize
    if device.type == "cuda" and (free := torch.cuda.mem_get_info(device)[0]) < wanted:
        return f"; 2^31 numbers take {wanted / 2**30:.0f} GiB, {free / 2**30:.0f} are free"
    inputs = case.inputs(kind, device)
    grad = _like_output(case, inputs)
    grad[:-1] = 0
    output, of_queries, of_values, of_embedding = _run("fused", inputs, grad)
    last = [x.detach()[-1:].requires_grad_() for x in inputs[:2]]
    got = [output[-1:], of_queries[-1:], of_values[-1:], of_embedding]
    _compare(case, got, [*last, inputs[2]], grad[-1:])
    return ""


def _time(case: Case, kind: str, device: torch.device) -> dict[str, tuple[float, int]]:
    """Of both implementations the median seconds of a step, in turns, and the peak of memory."""
    inputs = case.inputs(kind, device)
    grad = _like_output(case, inputs)
    names = ("fused", verdict.FALLBACK)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    peaks = dict.fromkeys(names, 0)
    on_gpu = device.type == "cuda"
    for turn in range(ROUNDS + 1):
        for name in names:
            if on_gpu:
                torch.cuda.reset_peak_memory_stats(device)
                before = torch.cuda.memory_allocated(device)
                torch.cuda.synchronize(device)
            start = time.perf_counter()
            _run(name, inputs, grad)
            if on_gpu:
                torch.cuda.synchronize(device)
                peaks[name] = torch.cuda.max_memory_allocated(device) - before
            if turn:  # the first compiles
                seconds[name].append(time.perf_counter() - start)
    return {name: (statistics.median(seconds[name]), peaks[name]) for name in names}


def check(kind: str, device: torch.device) -> dict[str, Any]:
    """Check and time the kernels for a kind of inputs.

    Returns:
        "take": whether ``auto`` shall take them; "why"; "rows": of a table of errors and times.
    """
    if why := unsupported("fused", *Case(1, 1, 1).inputs(kind, device)):
        return {"take": False, "why": why, "rows": []}
    rows, gains, memory = [], [], []
    try:
        torch.backends.cudnn.allow_tf32 = False  # by plain PyTorch's error others are judged
        errors = {case: _check_values(case, kind, device) for case in (*USUAL, *AWKWARD)}
        _check_empty(kind, device)
        note = _check_large(kind, device)
        for case in USUAL:
            (ours, ours_peak), (theirs, theirs_peak) = _time(case, kind, device).values()
            gains.append(ours / theirs)
            memory.append(ours_peak / max(theirs_peak, 1))
            times = (f"{seconds * 1e3:.3f}" for seconds in (ours, theirs))
            rows.append([*case, f"{errors[case]:.2f}", *times, f"{memory[-1]:.2f}"])
    except Exception as error:  # kernels and compilers raise their own
        return {"take": False, "why": reason(error), "rows": rows}
    gain = statistics.geometric_mean(gains)
    take = gain <= LEAST_GAIN and max(memory) <= MOST_MEMORY
    why = f"right, {gain:.2f} of the time and {max(memory):.2f} of the memory of {verdict.FALLBACK}"
    return {"take": take, "why": why + note, "rows": rows}


def _check_apart(kind: str, device: torch.device) -> dict[str, Any]:
    """The same in a process of its own; its crash or hang is a finding."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        command = [*CHECK, kind, str(device), str(result)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT
            )
        except subprocess.TimeoutExpired:
            return {"take": False, "why": f"it took more than {TIMEOUT} s", "rows": []}
        if result.exists():
            return json.loads(result.read_text("utf-8"))
    if done.returncode < 0:
        end = f"was ended by {signal.Signals(-done.returncode).name}"
    else:
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        end = f"ended with status {done.returncode}: {last}"
    return {"take": False, "why": f"the process {end}", "rows": []}


def prove(device: torch.device) -> None:
    """Check all kinds, write the verdict, and print what belongs into an issue.

    Raises:
        ConfigError: the verdict cannot be written.
    """
    key = verdict.key_of(device)
    try:
        path = verdict.write(key, ())  # before work that would be lost
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"The verdict cannot be written ({reason(error)}), and auto takes {verdict.FALLBACK}: "
            "let XDG_CACHE_HOME name a folder that can be written to."
        ) from error
    lines = [f"{name}: {value}" for name, value in key.items()]
    lines.append(f"lambda_det: {__version__}, {platform.platform()}")
    header = (*Case._fields, "error, of the allowed", "fused ms", "query_first ms", "memory")
    proved = []
    for kind in KINDS:
        print(f"checking {kind}", flush=True)
        found = _check_apart(kind, device)
        proved += [kind] * found["take"]
        lines.append(f"\n{kind}: {'fused' if found['take'] else verdict.FALLBACK}; {found['why']}")
        if found["rows"]:
            lines.append(tabulate(found["rows"], header, tablefmt="github"))
    verdict.write(key, proved)
    text = "\n".join(lines)
    print(f"\nFor an issue:\n```\n{text}\n```\n\nauto goes by it from now on: {path}")
    if os.environ.get(verdict.SWITCH) == "0":
        print(f"{verdict.SWITCH}=0 is set, which switches it off")


def main() -> int:
    """Prove on the current GPU; return the exit status, which is 2 where there is none."""

    def work() -> None:
        if not torch.cuda.is_available() or torch.version.hip:
            raise ConfigError(
                f"PyTorch {torch.__version__} sees no NVIDIA GPU, so there is nothing to prove; "
                f"auto takes {verdict.FALLBACK} on other GPUs. lambda-det doctor may say why."
            )
        prove(torch.device("cuda", torch.cuda.current_device()))

    return exit_status(work)


if __name__ == "__main__":
    kind, device, result = sys.argv[1:]
    torch.manual_seed(0)
    found = check(kind, torch.device(device))
    Path(result).write_text(json.dumps(found), "utf-8")
