"""Time a group of cases in turns, so that a machine that slows down slows all of them.

Every round times each case once in each mode, every second round in reverse order. Ratios are to
the first case of the same round. On a CPU ``torch.utils.benchmark`` takes the times. On a GPU each
run follows a write to more memory than the second-level cache holds: in a loop it would find its
maps there, which it does not in a network.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.benchmark import Timer

# The modes
FORWARD = "forward"  # in eval mode, without gradients
BOTH = "forward+backward"  # in training mode: gradients of parameters and of inputs that want them
STEP = "training step"  # the same, and the optimiser: SGD with momentum and weight decay

# Shorter work is repeated within a round; otherwise the clock and the launch of a kernel would be
# measured.
SHORTEST = 0.05
MOST_REPEATS = 200
CACHE = 256 << 20  # bytes, more than the second-level cache of any GPU

Seconds = dict[str, dict[str, list[float]]]  # of each round, by case and mode


@dataclass(frozen=True)
class Case:
    """One of the cases that are compared.

    Attributes:
        name: unique in its group.
        make: makes the model, a module or a function of tensors, and its inputs on the CPU in
            float32.
        images: of a run, for images per second; 0 for none.
    """

    name: str
    make: Callable[[], tuple[Callable[..., Any], tuple[Tensor, ...]]]
    images: int = 0


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
        channels_last: memory format of weights and inputs of four dimensions.
        rounds: number of counted rounds.
    """

    device: torch.device
    dtype: torch.dtype = torch.float32
    channels_last: bool = False
    rounds: int = 5


class Subject:
    """The model and the inputs of a case on the device, and the operations on them."""

    def __init__(self, case: Case, setting: Setting) -> None:
        model, inputs = case.make()
        self.setting = setting
        layout = {"memory_format": torch.channels_last} if setting.channels_last else {}
        if isinstance(model, nn.Module):
            model = model.to(setting.device)
            for tensor in (*model.parameters(), *model.buffers()):
                if layout and tensor.dim() == 4:  # a kernel of a 3-d convolution has no such layout
                    tensor.data = tensor.data.contiguous(**layout)
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
            list(model.parameters()) if isinstance(model, nn.Module) else [torch.zeros(1)],
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
        self.optimizer.zero_grad()
        for tensor in self.inputs:
            tensor.grad = None
        with self._autocast():
            outputs = output_tensors(self.model(*self.inputs))
        if self.grads is None:
            self.grads = [torch.randn_like(output) for output in outputs]
        torch.autograd.backward(outputs, self.grads)
        if mode == STEP:
            self.optimizer.step()

    def time(self, mode: str, repeats: int = 1) -> float:
        """Seconds of one run, as the mean of ``repeats``."""
        if self.setting.device.type == "cuda":
            return self._time_on_gpu(mode, repeats)
        timer = Timer(
            "run(mode)",
            globals={"run": self.run, "mode": mode},
            num_threads=torch.get_num_threads(),
        )
        return timer.timeit(repeats).mean

    def _time_on_gpu(self, mode: str, repeats: int) -> float:
        cache = torch.empty(CACHE, dtype=torch.uint8, device=self.setting.device)
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        for begin, end in events:
            cache.zero_()
            begin.record()
            self.run(mode)
            end.record()
        torch.cuda.synchronize(self.setting.device)
        return sum(begin.elapsed_time(end) for begin, end in events) / repeats / 1e3

    def _autocast(self) -> contextlib.AbstractContextManager:
        if self.setting.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.setting.device.type, self.setting.dtype)


def output_tensors(output: Any) -> list[Tensor]:
    """The tensors of a nested output."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, Mapping):
        output = output.values()
    return [tensor for part in output for tensor in output_tensors(part)]


def measure_group(group: Group, setting: Setting) -> Seconds:
    """The seconds of each case in each mode and round."""
    # the baselines are convolutions, which get cuDNN's fastest algorithm
    torch.backends.cudnn.benchmark = True
    seconds: Seconds = {case.name: {mode: [] for mode in group.modes} for case in group.cases}
    work = []
    for case in group.cases:
        subject = Subject(case, setting)
        for mode in group.modes:
            subject.time(mode)  # allocates, and may compile
            repeats = round(SHORTEST / max(subject.time(mode), 1e-9))
            work.append((case.name, subject, mode, min(max(1, repeats), MOST_REPEATS)))
    with _without_collections():
        for turn in range(setting.rounds):
            print(f"{group.title}: round {turn + 1} of {setting.rounds}", file=sys.stderr)
            for name, subject, mode, repeats in reversed(work) if turn % 2 else work:
                seconds[name][mode].append(subject.time(mode, repeats))
    return seconds


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
