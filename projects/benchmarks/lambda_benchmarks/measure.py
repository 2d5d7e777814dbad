"""Measure a group of cases in turns, so that a machine that slows down slows all of them.

Every round runs each case once in each mode, in another order than the round before. Figures are
medians and quartiles over the rounds; ratios are to the base of the same round, and their median is
taken. Peak memory is counted in a run of its own. The models of a group are in memory together,
their gradients and activations are not.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lambda_benchmarks.memory import is_out_of_memory, limited_memory
from lambda_det.errors import ConfigError
from lambda_det.plan import peak_memory, tensor_bytes

# The modes
FORWARD = "forward"  # in eval mode, without gradients
BOTH = "forward+backward"  # in training mode: gradients of parameters and of inputs that want them
STEP = "training step"  # the same, and the optimiser: SGD with momentum and weight decay

# Work shorter than this is repeated within a round; otherwise the clock and the launch of a kernel
# would be measured.
SHORTEST = 0.05
MOST_REPEATS = 200

Model = Callable[..., Any]  # a module, or a function of tensors
T = TypeVar("T")


@dataclass(frozen=True)
class Case:
    """One of the things compared.

    Attributes:
        name: unique in its group.
        make: makes the model and its inputs on the CPU in float32; raises ConfigError where the
            case is impossible.
        images: of a run, for images per second; 0 where there are none.
        columns: more to show beside it.
        halved: makes the same with half the images, for where these do not fit into memory.
    """

    name: str
    make: Callable[[], tuple[Model, tuple[Tensor, ...]]]
    images: int = 0
    columns: Mapping[str, str] = field(default_factory=dict)
    halved: Callable[[], Case] | None = None


@dataclass(frozen=True)
class Group:
    """Cases that take turns with each other; ratios are to the first one.

    Attributes:
        title: what they have in common.
        cases: in the order of the table.
        modes: what is run of each.
        about: more for JSON and plots, such as the image size.
    """

    title: str
    cases: Sequence[Case]
    modes: Sequence[str]
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def base(self) -> str:
        return self.cases[0].name


@dataclass(frozen=True)
class Setting:
    """What all cases have in common.

    Attributes:
        device: where they run.
        dtype: of the products; other than float32 through autocast.
        autocast: False where a case makes everything in that dtype itself.
        channels_last: memory format of weights and inputs of four dimensions.
        rounds: that are counted.
        memory_limit: bytes on the CPU; None for no limit.
    """

    device: torch.device
    dtype: torch.dtype = torch.float32
    autocast: bool = True
    channels_last: bool = False
    rounds: int = 5
    memory_limit: int | None = None


@dataclass
class Result:
    """What was measured of a case.

    Attributes:
        parameters: number of them.
        model_bytes: parameters and buffers.
        input_bytes: inputs, and the gradient of the output.
        seconds: of one run in each round, by mode.
        peak_bytes: by mode, beyond model and inputs; the state of the optimiser counts.
        reasons: by mode, why there are no figures.
    """

    case: Case
    parameters: int = 0
    model_bytes: int = 0
    input_bytes: int = 0
    seconds: dict[str, list[float]] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)


class Subject:
    """The model and the inputs of a case on the device, and what can be done with them."""

    def __init__(self, case: Case, setting: Setting) -> None:
        model, inputs = case.make()
        self.setting = setting
        self.parameters: list[Tensor] = []
        self.buffers: list[Tensor] = []
        layout = {"memory_format": torch.channels_last} if setting.channels_last else {}
        if isinstance(model, nn.Module):
            model = model.to(setting.device, **layout)
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
        # The paper's, with a rate that changes next to nothing: the weights must stay finite
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
        outputs = self.forward()
        if self.grads is None:
            self.grads = [torch.randn_like(output) for output in outputs]
        torch.autograd.backward(outputs, self.grads)
        if mode == STEP:
            self.optimizer.step()

    def forward(self) -> list[Tensor]:
        """The outputs, with what the backward pass needs."""
        with self._autocast():
            return output_tensors(self.model(*self.inputs))

    def clear(self) -> None:
        """Free the gradients."""
        for tensor in (*self.parameters, *self.inputs):
            tensor.grad = None

    def time(self, mode: str, repeats: int = 1) -> float:
        """Seconds of one run, of ``repeats`` in a row."""
        _synchronize(self.setting.device)
        start = time.perf_counter()
        for _ in range(repeats):
            self.run(mode)
        _synchronize(self.setting.device)
        seconds = (time.perf_counter() - start) / repeats
        self.clear()
        return seconds

    def model_bytes(self) -> int:
        return tensor_bytes((*self.parameters, *self.buffers))

    def input_bytes(self) -> int:
        return tensor_bytes((*self.inputs, *(self.grads or ())))

    def peak_bytes(self, mode: str) -> int:
        """Peak memory of one run beyond the model and the inputs."""
        self.clear()
        state: list[Tensor] = []
        if mode == STEP:  # it is there from the second step on
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
    """Yield the round and a thing: each thing once a round, in changing order.

    Every second round has the order of the round before it backwards. After it, the order begins
    with the next thing.
    """
    for turn in range(rounds):
        start = turn // 2 % max(len(things), 1)
        turned = [*things[start:], *things[:start]]
        for thing in reversed(turned) if turn % 2 else turned:
            yield turn, thing


@dataclass(frozen=True)
class _Work:
    """What has its turn: a case in a mode, so many times in a row."""

    subject: Subject
    mode: str
    repeats: int
    result: Result


def measure_group(
    group: Group, setting: Setting, progress: Callable[[str], None] = lambda line: None
) -> list[Result]:
    """Measure all cases of a group.

    A case that is impossible, or that runs out of memory, has a reason in place of figures, and the
    others go on without it.

    Args:
        group: what to measure.
        setting: how.
        progress: is given lines about what is done and how long it will take.

    Returns:
        A result for each case, in their order.
    """
    results = [Result(case) for case in group.cases]
    was_benchmark = torch.backends.cudnn.benchmark
    # The baselines are convolutions, and shall have the fastest that cuDNN has for them
    torch.backends.cudnn.benchmark = True
    try:
        with limited_memory(setting.memory_limit):
            work: list[_Work] = []
            for place, case in enumerate(group.cases):
                results[place], added = _fitting(group, case, setting, progress)
                work += added
            _run_rounds(group, work, setting, progress)
    finally:
        torch.backends.cudnn.benchmark = was_benchmark
    work.clear()
    _free(setting.device)
    return results


def _fitting(
    group: Group, case: Case, setting: Setting, progress: Callable[[str], None]
) -> tuple[Result, list[_Work]]:
    """Warm a case up; where it does not fit into memory, with half the images, and so on."""
    while True:
        progress(f"{group.title}: warming up {case.name}, {case.images or 'no'} images")
        result = Result(case)
        work = _warm_up(result, group.modes, setting)
        if case.halved is None or not any("out of memory" in r for r in result.reasons.values()):
            return result, work
        for one in work:
            one.subject.clear()
        del work
        _free(setting.device)
        case = case.halved()


def _warm_up(result: Result, modes: Sequence[str], setting: Setting) -> list[_Work]:
    """Make a case, run every mode for the first time, and count its memory.

    The first run allocates, and may compile; the second one says how often to repeat it in a round.
    """
    subject = attempt(result, modes, lambda: Subject(result.case, setting), setting)
    work = []
    for mode in modes if subject else ():

        def first_runs(mode: str = mode) -> tuple[float, int]:
            subject.time(mode)
            return subject.time(mode), subject.peak_bytes(mode)

        measured = attempt(result, [mode], first_runs, setting)
        subject.clear()
        if measured is not None:
            seconds, result.peak_bytes[mode] = measured
            repeats = int(min(max(1, round(SHORTEST / max(seconds, 1e-9))), MOST_REPEATS))
            work.append(_Work(subject, mode, repeats, result))
    if subject:
        result.parameters = sum(parameter.numel() for parameter in subject.parameters)
        result.model_bytes, result.input_bytes = subject.model_bytes(), subject.input_bytes()
    return work


def _run_rounds(
    group: Group, work: list[_Work], setting: Setting, progress: Callable[[str], None]
) -> None:
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        start, last = time.perf_counter(), -1
        for turn, one in take_turns(work, setting.rounds):
            if turn != last:
                left = "" if turn == 0 else _time_left(start, turn, setting.rounds)
                progress(f"{group.title}: round {turn + 1} of {setting.rounds}{left}")
                last = turn
            if one.mode in one.result.reasons:
                continue
            seconds = attempt(
                one.result,
                [one.mode],
                lambda one=one: one.subject.time(one.mode, one.repeats),
                setting,
            )
            if seconds is None:
                one.subject.clear()
                one.result.seconds.pop(one.mode, None)
                one.result.peak_bytes.pop(one.mode)
            else:
                one.result.seconds.setdefault(one.mode, []).append(seconds)
    finally:
        if was_enabled:
            gc.enable()


def _time_left(start: float, done: int, total: int) -> str:
    return f", {duration((time.perf_counter() - start) / done * (total - done))} left"


def attempt(
    result: Result, modes: Sequence[str], work: Callable[[], T], setting: Setting
) -> T | None:
    """What the work returns; None where it fails, with the reason in the result for these modes."""
    try:
        return work()
    except Exception as error:
        if isinstance(error, ConfigError):
            reason = str(error)
        elif is_out_of_memory(error):
            reason = "out of memory"
            if setting.memory_limit is not None:
                reason += f" (limit {setting.memory_limit / 1e9:.1f} GB)"
        else:
            first = (str(error).strip() or "no message").splitlines()[0]
            reason = f"{type(error).__name__}: {first}"
    # Only after the block is the exception gone, which holds what was allocated
    result.reasons |= dict.fromkeys(modes, reason)
    _free(setting.device)
    return None


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def duration(seconds: float) -> str:
    """Such as "about 40 s", "about 3 min"."""
    return f"about {seconds:.0f} s" if seconds < 100 else f"about {seconds / 60:.0f} min"
