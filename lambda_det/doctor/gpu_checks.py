"""One implementation of the position output on one device, in a process of its own (see gpu.py).

It is compared with plain PyTorch in float64, and timed beside the 3x3 convolution.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lambda_det.doctor.parts import first_line
from lambda_det.layers.local import IMPLEMENTATIONS, verdict

__all__ = ["CONVOLUTION", "Case", "main"]

PLAIN = ("conv", "depthwise")  # plain PyTorch; the first that runs is what others are held against
CONVOLUTION = "3x3 convolution"
TOLERANCE = 2  # times the error of plain PyTorch in the same dtype
TINY = (32, 1, 3)  # images, so that no error is small by chance; height and width
REFERENCE_NUMEL = 2**26  # of the lambdas in float64: so many images are compared at once
REPEATS, ROUNDS, SHORTEST = 3, 15, 0.01  # of bits; of times, and seconds of a round

Function = Callable[[Tensor, Tensor, Tensor], Tensor]


class Case(NamedTuple):
    """A call of the local position output."""

    batch: int
    height: int
    width: int
    heads: int
    k: int
    v: int
    u: int
    scope_y: int
    scope_x: int
    dtype: str
    channels_last: bool

    def inputs(self, device: torch.device | str) -> list[Tensor]:
        """Queries, values and embedding as the layer lays them out, with gradients."""
        dtype = getattr(torch, self.dtype)
        shapes = ((self.heads, self.k), (self.v, self.u))
        found = []
        for groups, depth in shapes:
            if self.channels_last:
                shape = (self.batch, self.height, self.width, groups, depth)
                found.append(torch.randn(shape, device=device, dtype=dtype))
            else:
                shape = (self.batch, groups, depth, self.height, self.width)
                maps = torch.randn(shape, device=device, dtype=dtype)
                found.append(maps.permute(0, 3, 4, 1, 2))
        shape = (self.k, self.u, self.scope_y, self.scope_x)
        found.append(torch.randn(shape, device=device, dtype=dtype))
        return [x.requires_grad_() for x in found]

    def on_map(self, batch: int, height: int, width: int) -> Case:
        """On another map, with the offsets that occur on it."""
        return self._replace(
            batch=batch,
            height=height,
            width=width,
            scope_y=min(self.scope_y, 2 * height - 1),
            scope_x=min(self.scope_x, 2 * width - 1),
        )

    def shape_class(self) -> str:
        return verdict.shape_class(*self.inputs("meta"))

    def __str__(self) -> str:
        return f"{self.batch} x {self.height}x{self.width}, {self.shape_class()}"


def main() -> None:
    """Do the jobs that stand on the standard input, and write a line for each to a file."""
    request = json.load(sys.stdin)
    device = torch.device(request["device"])
    with open(request["results"], "a", encoding="utf-8") as results:
        for job in request["jobs"]:
            case = Case(*job["case"])
            work = {"check": _check, "large": _check_large, "time": _time}[job["kind"]]
            try:
                found = {"found": work(job["names"], case, device, job["limit"])}
            except torch.cuda.OutOfMemoryError:
                found = {"refused": "out of memory"}
                if work is _check_large:  # that it takes much is no fault here
                    found = {"found": {"left out": "out of memory"}}
            except Exception as error:  # kernels and compilers raise their own
                found = {"refused": first_line(error).removeprefix("_WrongError: ")}
            results.write(json.dumps(found) + "\n")
            results.flush()
            if "refused" in found:
                return  # the device may be of no use any more; another process does the rest


class _WrongError(Exception):
    """A result is not what it should be."""


def _gradients(function: Function, inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    """The output, and the gradients of all inputs."""
    output = function(*inputs)
    return [output.detach(), *torch.autograd.grad(output, inputs, grad)]


def _like_output(case: Case, inputs: list[Tensor]) -> Tensor:
    """A gradient of the output; small, so that no sum leaves the range of float16."""
    queries = inputs[0]
    grad = torch.randn((*queries.shape[:4], case.v), device=queries.device, dtype=queries.dtype)
    return grad * 2**-6


def _plain(inputs: list[Tensor], grad: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """What plain PyTorch says in float64, and in the dtype of the inputs."""
    exact = [x.detach().double().requires_grad_() for x in inputs]
    for name in PLAIN:
        try:
            want = _gradients(IMPLEMENTATIONS[name], exact, grad.double())
            return want, _gradients(IMPLEMENTATIONS[name], inputs, grad)
        except RuntimeError:  # a convolution that cuDNN does not have
            if name == PLAIN[-1]:
                raise
    raise AssertionError("PLAIN is empty")


_NAMES = ("output", *(f"gradient of the {x}" for x in ("queries", "values", "embedding")))


def _compare(case: Case, got: list[Tensor], inputs: list[Tensor], grad: Tensor) -> float:
    """Raise unless the errors are small; return the largest, as a share of what is allowed."""
    want, plain = _plain(inputs, grad)
    least = torch.finfo(grad.dtype).eps / 2  # of one rounding; on a small map plain may have none
    worst = 0.0
    for name, a, b, c in zip(_NAMES, got, want, plain, strict=True):
        if a.dtype != grad.dtype or a.shape != b.shape:
            raise _WrongError(
                f"the {name} is {a.dtype} {list(a.shape)}, not {grad.dtype} {list(b.shape)}"
            )
        size = b.norm().clamp_min(1e-30)
        error, usual = (((x.double() - b).norm() / size).item() for x in (a, c))
        allowed = max(TOLERANCE * usual, least)
        if not error <= allowed:  # NaN is not
            raise _WrongError(
                f"the {name} has an error of {error:.2g}, and {allowed:.2g} is allowed ({case})"
            )
        worst = max(worst, error / allowed)
    return worst


def _poison(like: list[Tensor]) -> None:
    """Leave NaN in the memory that the next tensors get, so that what is not written is seen."""
    for tensor in like:
        torch.full_like(tensor, torch.nan)


def _check(names: list[str], case: Case, device: torch.device, limit: int) -> dict[str, Any]:
    """Everything but size: values, bits, odd sizes, no images."""
    torch.manual_seed(0)
    function = IMPLEMENTATIONS[names[0]]
    with _exact_products():
        worst = _check_values(function, case, device)
        odd = [side - 1 + side % 2 for side in (case.height, case.width)]
        for other in (case.on_map(2, *odd), case.on_map(*TINY)):
            _check_values(function, other, device)
        empty = case._replace(batch=0)
        inputs = empty.inputs(device)
        got = _gradients(function, inputs, _like_output(empty, inputs))
        if got[0].shape != (*inputs[0].shape[:4], case.v) or got[3].any():
            raise _WrongError("a batch without images has a result")
    return {"error": worst}


def _check_values(function: Function, case: Case, device: torch.device) -> float:
    inputs = case.inputs(device)
    grad = _like_output(case, inputs)
    per_image = case.height * case.width * case.k * case.v
    few = min(max(REFERENCE_NUMEL // per_image, 1), case.batch)
    grad[: case.batch - few] = 0  # so that the embedding's gradient is of the others alone
    _poison([*inputs, grad])
    got = _gradients(function, inputs, grad)
    if any(x[: case.batch - few].any() for x in got[1:3]):
        raise _WrongError(f"an image gets a gradient of others ({case})")
    last = slice(case.batch - few, None)
    some = [x.detach()[last].requires_grad_() for x in inputs[:2]]
    compared = [*(x[last] for x in got[:3]), got[3]]
    worst = _compare(case, compared, [*some, inputs[2]], grad[last])
    for _ in range(REPEATS - 1):
        _poison([*inputs, grad])
        again = _gradients(function, inputs, grad)
        for name, a, b in zip(_NAMES, got, again, strict=True):
            if not torch.equal(a, b):
                raise _WrongError(f"the {name} differs when it is computed again ({case})")
    return worst


def _check_large(names: list[str], case: Case, device: torch.device, limit: int) -> dict[str, Any]:
    """More numbers than 32 bits can count: the last image against float64, where memory allows."""
    function = IMPLEMENTATIONS[names[0]]
    per_image = case.height * case.width * case.heads * case.k
    case = case._replace(batch=limit // per_image + 2)
    # Queries, output and their gradients; values, padded and as gradients in float32; some chunks
    wanted = 7 * limit * getattr(torch, case.dtype).itemsize
    if device.type == "cuda" and (free := torch.cuda.mem_get_info(device)[0]) < wanted:
        return {"left out": f"it takes {wanted / 2**30:.0f} GiB, and {free / 2**30:.0f} are free"}
    with _exact_products():
        inputs = case.inputs(device)
        grad = _like_output(case, inputs)
        grad[:-1] = 0
        got = _gradients(function, inputs, grad)
        some = [x.detach()[-1:].requires_grad_() for x in inputs[:2]]
        last = [*(x[-1:] for x in got[:3]), got[3]]
        return {"error": _compare(case, last, [*some, inputs[2]], grad[-1:])}


@contextlib.contextmanager
def _exact_products() -> Iterator[None]:
    """Plain PyTorch without TF32, by whose error others are judged."""
    was = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = was


def _time(names: list[str], case: Case, device: torch.device, limit: int) -> dict[str, Any]:
    """Median seconds, forward and with the backward pass, in turns; and peak memory on a GPU."""
    torch.backends.cudnn.benchmark = True  # the convolution shall have its fastest
    inputs = case.inputs(device)
    grad = _like_output(case, inputs)
    channels = case.heads * case.v
    shape = (case.batch, channels, case.height, case.width)
    layout = torch.channels_last
    images = torch.randn(shape, device=device, dtype=grad.dtype).to(memory_format=layout)
    weight = torch.randn((channels, channels, 3, 3), device=device, dtype=grad.dtype)
    pair = [images.requires_grad_(), weight.to(memory_format=layout).requires_grad_()]
    calls: dict[str, tuple[Callable[..., Tensor], list[Tensor], Tensor]] = {
        CONVOLUTION: (lambda x, w: F.conv2d(x, w, padding=1), pair, torch.randn_like(images))
    }
    calls |= {name: (IMPLEMENTATIONS[name], inputs, grad) for name in names}

    def run(name: str, backward: bool) -> None:
        function, arguments, gradient = calls[name]
        if backward:
            torch.autograd.grad(function(*arguments), arguments, gradient)
        else:
            with torch.no_grad():
                function(*arguments)

    def seconds(name: str, backward: bool, times: int) -> float:
        _synchronize(device)
        start = time.perf_counter()
        for _ in range(times):
            run(name, backward)
        _synchronize(device)
        return (time.perf_counter() - start) / times

    modes = [(name, backward) for backward in (False, True) for name in calls]
    for mode in modes:
        seconds(*mode, 1)  # which compiles
    repeats = {mode: max(1, round(SHORTEST / max(seconds(*mode, 1), 1e-6))) for mode in modes}
    rounds: dict[tuple[str, bool], list[float]] = {mode: [] for mode in modes}
    for turn in range(ROUNDS):
        for mode in modes if turn % 2 else reversed(modes):
            rounds[mode].append(seconds(*mode, repeats[mode]))
    medians = {mode: statistics.median(times) for mode, times in rounds.items()}
    return {
        "seconds": {name: [medians[name, False], medians[name, True]] for name in calls},
        "bytes": {name: _peak(device, lambda name=name: run(name, True)) for name in calls},
    }


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _peak(device: torch.device, work: Callable[[], object]) -> int:
    """Bytes that a call takes at most; 0 where nobody counts them."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    return torch.cuda.max_memory_allocated(device) - before


if __name__ == "__main__":
    main()
