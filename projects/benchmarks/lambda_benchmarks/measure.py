"""Measure a group of cases in turns, so that a machine that slows down slows all of them.

Every round runs each case once in each mode, in another order than the round before. Figures are
medians and quartiles over the rounds; ratios are to the first case of the same round, and their
median is taken. Peak memory is counted in a run of its own. The models of a group are in memory
together, their gradients and activations are not.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.benchmark import timer

from lambda_benchmarks.memory import peak_memory, tensor_bytes
from lambda_det.errors import reason

try:
    import resource
except ImportError:  # on Windows; there is no limit then
    resource = None

# The modes
FORWARD = "forward"  # in eval mode, without gradients
BOTH = "forward+backward"  # in training mode: gradients of parameters and of inputs that want them
STEP = "training step"  # the same, and the optimiser: SGD with momentum and weight decay

# Shorter work is repeated within a round; otherwise the clock and the launch of a kernel would be
# measured.
SHORTEST = 0.05
MOST_REPEATS = 200
OUT_OF_MEMORY = "out of memory"  # the reason why a case has no figures

T = TypeVar("T")


@dataclass(frozen=True)
class Case:
    """One of the cases that are compared.

    Attributes:
        name: unique in its group.
        make: makes the model, a module or a function of tensors, and its inputs on the CPU in
            float32.
        images: of a run, for images per second; 0 for none.
        columns: further columns of its row.
        smaller: makes the same case with fewer images, which replaces it where the memory is too
            small; times are then scaled to the images of the original case.
    """

    name: str
    make: Callable[[], tuple[Callable[..., Any], tuple[Tensor, ...]]]
    images: int = 0
    columns: Mapping[str, str] = field(default_factory=dict)
    smaller: Callable[[], Case] | None = None


@dataclass(frozen=True)
class Group:
    """Cases that take turns with each other in all modes; ratios are to the first one."""

    title: str
    cases: Sequence[Case]
    modes: Sequence[str]


@dataclass(frozen=True)
class Setting:
    """The settings that all cases have in common.

    Attributes:
        device: where they run.
        dtype: of the products; other than float32 through autocast.
        autocast: False if a case makes everything in that dtype itself.
        channels_last: memory format of weights and inputs of four dimensions.
        rounds: number of counted rounds.
    """

    device: torch.device
    dtype: torch.dtype = torch.float32
    autocast: bool = True
    channels_last: bool = False
    rounds: int = 5


@dataclass
class Result:
    """The measurements of a case.

    Attributes:
        case: the case, or the smaller one that replaced it.
        images: of the original case, to which times are scaled.
        sizes: the number of parameters, and bytes of the model and of its inputs.
        seconds: of one run in each round, by mode.
        peak_bytes: by mode, beyond model and inputs; the state of the optimiser counts.
        reasons: by mode, why there are no figures.
    """

    case: Case
    images: int = 0
    sizes: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)


class Subject:
    """The model and the inputs of a case on the device, and the operations on them."""

    def __init__(self, case: Case, setting: Setting) -> None:
        model, inputs = case.make()
        self.setting = setting
        self.parameters: list[Tensor] = []
        self.buffers: list[Tensor] = []
        layout = {"memory_format": torch.channels_last} if setting.channels_last else {}
        if isinstance(model, nn.Module):
            model = model.to(setting.device)
            for tensor in (*model.parameters(), *model.buffers()):
                if layout and tensor.dim() == 4:  # a kernel of a 3-d convolution has no such layout
                    tensor.data = tensor.data.contiguous(**layout)
            self.parameters = list(model.parameters())
            self.buffers = list(model.buffers())
        self.model = model
        self.inputs = tuple(
            x.detach()
            .to(setting.device, **(layout if x.dim() == 4 else {}))
            .requires_grad_(x.requires_grad)
            for x in inputs
        )
        self.grads: list[Tensor] | None = None
        # the paper's optimiser with a tiny rate, because the weights must stay finite
        self.optimizer = torch.optim.SGD(
            self.parameters or [torch.zeros(1)],
            lr=1e-9,
            momentum=0.9,
            weight_decay=4e-5,
            nesterov=True,
        )

    def run(self, mode: str) -> None:
        """Do once what the mode says; gradients are kept."""
        if isinstance(self.model, nn.Module):
            self.model.train(mode != FORWARD)
        if mode == FORWARD:
            with torch.no_grad(), self._autocast():
                self.model(*self.inputs)
            return
        self.clear()
        with self._autocast():
            outputs = output_tensors(self.model(*self.inputs))
        if self.grads is None:
            self.grads = [torch.randn_like(output) for output in outputs]
        torch.autograd.backward(outputs, self.grads)
        if mode == STEP:
            self.optimizer.step()

    def clear(self) -> None:
        """Free the gradients."""
        for tensor in (*self.parameters, *self.inputs):
            tensor.grad = None

    def time(self, mode: str, repeats: int = 1) -> float:
        """Seconds of one run, as the mean of ``repeats`` in a row."""
        start = timer()  # it waits for a GPU
        for _ in range(repeats):
            self.run(mode)
        seconds = (timer() - start) / repeats
        self.clear()
        return seconds

    def sizes(self) -> dict[str, int]:
        return {
            "parameters": sum(parameter.numel() for parameter in self.parameters),
            "model_bytes": tensor_bytes((*self.parameters, *self.buffers)),
            "input_bytes": tensor_bytes((*self.inputs, *(self.grads or ()))),
        }

    def peak_bytes(self, mode: str) -> int:
        """Peak memory of one run beyond the model and the inputs."""
        self.clear()
        state: list[Tensor] = []
        if mode == STEP:  # it exists from the second step on
            values = [v for held in self.optimizer.state.values() for v in held.values()]
            state = [value for value in values if isinstance(value, Tensor)]
        peak = peak_memory(lambda: self.run(mode), self.setting.device) + tensor_bytes(state)
        self.clear()
        return peak

    def _autocast(self) -> contextlib.AbstractContextManager:
        if self.setting.dtype == torch.float32 or not self.setting.autocast:
            return nullcontext()
        return torch.autocast(self.setting.device.type, self.setting.dtype)


def output_tensors(output: Any) -> list[Tensor]:
    """The tensors of a model's output: a tensor, or a mapping or sequence of them."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, Mapping):
        output = output.values()
    return [tensor for part in output for tensor in output_tensors(part)]


def take_turns(things: Sequence[T], rounds: int) -> Iterator[tuple[int, T]]:
    """Yield the round and a thing: each thing once in a round, in changing order.

    Every second round has the reverse order of the round before. After it, the order begins with
    the next thing.
    """
    for turn in range(rounds):
        start = turn // 2 % max(len(things), 1)
        turned = [*things[start:], *things[:start]]
        for thing in reversed(turned) if turn % 2 else turned:
            yield turn, thing


def measure_group(group: Group, setting: Setting) -> list[Result]:
    """Measure all cases of a group, and return a result for each, in their order.

    A case that fails or runs out of memory has a reason in place of figures, and the others go on
    without it.
    """
    results = [Result(case, case.images) for case in group.cases]
    # the baselines are convolutions, which get cuDNN's fastest algorithm
    torch.backends.cudnn.benchmark = True
    work = []  # a turn: a case in a mode, and how often it runs in a row
    for result in results:
        say(f"{group.title}: warming up {result.case.name}")
        began = _warm_up(result, group.modes, setting)
        while OUT_OF_MEMORY in result.reasons.values() and result.case.smaller is not None:
            began.clear()
            result.case, result.reasons = result.case.smaller(), {}
            say(f"{group.title}: out of memory, now with {result.case.images} images")
            began = _warm_up(result, group.modes, setting)
        work += began
    gc.collect()
    gc.disable()
    try:
        last = -1
        for turn, (subject, mode, repeats, result) in take_turns(work, setting.rounds):
            if turn != last:
                say(f"{group.title}: round {turn + 1} of {setting.rounds}")
                last = turn
            if mode in result.reasons:
                continue
            run = partial(subject.time, mode, repeats)
            seconds = _attempted(result, [mode], setting, run)
            if seconds is None:
                subject.clear()
            else:
                result.seconds.setdefault(mode, []).append(seconds)
    finally:
        gc.enable()
    return results


def _warm_up(
    result: Result, modes: Sequence[str], setting: Setting
) -> list[tuple[Subject, str, int, Result]]:
    """Make a case, run every mode for the first time, and count its memory.

    The first run allocates, and may compile; the second one says how often to repeat it in a round.
    """
    subject = _attempted(result, modes, setting, lambda: Subject(result.case, setting))
    if subject is None:
        return []
    work = []
    for mode in modes:

        def first_runs(mode: str = mode) -> tuple[float, int]:
            subject.time(mode)
            return subject.time(mode), subject.peak_bytes(mode)

        measured = _attempted(result, [mode], setting, first_runs)
        subject.clear()
        if measured is not None:
            seconds, result.peak_bytes[mode] = measured
            repeats = int(min(max(1, round(SHORTEST / max(seconds, 1e-9))), MOST_REPEATS))
            work.append((subject, mode, repeats, result))
    result.sizes = subject.sizes()
    return work


def _attempted(
    result: Result, modes: Sequence[str], setting: Setting, work: Callable[[], T]
) -> T | None:
    """The result of the work; None if it fails, with the reason in the result for these modes."""
    try:
        return work()
    except Exception as error:
        why = OUT_OF_MEMORY if is_out_of_memory(error) else reason(error)[:200]
    # the exception, which holds the allocated memory, is gone only after the block
    result.reasons |= dict.fromkeys(modes, why)
    gc.collect()
    if setting.device.type == "cuda":
        torch.cuda.empty_cache()
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means out of memory, on a GPU or the CPU."""
    if isinstance(error, MemoryError | torch.cuda.OutOfMemoryError):
        return True
    texts = ("can't allocate memory", "not enough memory", "out of memory", "bad_alloc")
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in texts)


def limit_memory(gigabytes: float | None) -> None:
    """Let allocations on the CPU fail before the system kills the process. Linux only.

    Args:
        gigabytes: that the process may take in addition; None: 0.9 of the free memory.
    """
    if resource is None or not Path("/proc/self/status").exists():
        return
    free = 1e9 * gigabytes if gigabytes else 0.9 * _kilobytes("/proc/meminfo", "MemAvailable") * 1e3
    used = _kilobytes("/proc/self/status", "VmData") * 1024
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (used + int(free), hard))


def _kilobytes(path: str, name: str) -> int:
    lines = Path(path).read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1])


def say(line: str) -> None:
    """Print to stderr, apart from the figures."""
    print(line, file=sys.stderr, flush=True)
