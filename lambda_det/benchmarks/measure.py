"""Measure a group of cases: they take turns, so that a machine that slows down slows all of them.

Every round runs each case once in each mode, in another order than the round before. Figures are
medians and quartiles over the rounds, and ratios to the base of the same round, of which again the
median is taken. Peak memory is counted in a run of its own. The models of a group live side by
side, their gradients and activations don't.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lambda_det.benchmarks.memory import is_out_of_memory, limited_memory, peak_memory, tensor_bytes
from lambda_det.errors import ConfigError

# A mode by its name, and what it does:
FORWARD = "forward"  # in eval mode, without gradients
BOTH = "forward+backward"  # in training mode: gradients of parameters and of inputs that want them
STEP = "training step"  # the same, and the optimiser: SGD with momentum and weight decay

# Work shorter than this is repeated within a round, or the clock and the start of a kernel would
# be what is measured.
SHORTEST = 0.05
MOST_REPEATS = 200

Model = Callable[..., Any]  # a module, or a function of tensors
T = TypeVar("T")


@dataclass(frozen=True)
class Case:
    """One of the things compared.

    Attributes:
        name: unique in its group.
        make: makes the model and its inputs on the CPU in float32; may raise ConfigError where the
            case cannot be.
        images: of a run, for images per second; 0 where there are none.
        columns: more to show beside it.
    """

    name: str
    make: Callable[[], tuple[Model, tuple[Tensor, ...]]]
    images: int = 0
    columns: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Group:
    """Cases that take turns with each other.

    Attributes:
        title: what they have in common.
        cases: in the order of the table.
        modes: what is run of each.
        base: name of the case that ratios are to.
        about: more for JSON and plots, such as the image size.
    """

    title: str
    cases: Sequence[Case]
    modes: Sequence[str]
    base: str
    about: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Setting:
    """What all cases have in common.

    Attributes:
        device: where they run.
        dtype: of the products; other than float32 through autocast.
        autocast: False where a case itself makes everything in that dtype.
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
        case: which.
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
    """A case made ready: the model and its inputs on the device, and what can be done with them."""

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
        self._optimizer: torch.optim.SGD | None = None

    def run(self, mode: str) -> None:
        """Do once what the mode says; gradients are there afterwards."""
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
        """Let go of the gradients."""
        for tensor in (*self.parameters, *self.inputs):
            tensor.grad = None

    @property
    def optimizer(self) -> torch.optim.SGD:
        """The paper's, with a rate that changes next to nothing: the weights must stay finite."""
        if self._optimizer is None:
            self._optimizer = torch.optim.SGD(
                self.parameters, lr=1e-9, momentum=0.9, weight_decay=4e-5, nesterov=True
            )
        return self._optimizer

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
        return peak_memory(lambda: self.run(mode), self.setting.device) + tensor_bytes(state)

    def _autocast(self):
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
    """Each thing once in each round, every second time backwards, and then from another one on."""
    for turn in range(rounds):
        start = turn // 2 % max(len(things), 1)
        turned = [*things[start:], *things[:start]]
        for thing in reversed(turned) if turn % 2 else turned:
            yield turn, thing


def measure_group(
    group: Group, setting: Setting, progress: Callable[[str], None] = lambda line: None
) -> list[Result]:
    """Measure all cases of a group.

    A case that cannot be, or that runs out of memory, has its reason in place of figures, and the
    others go on without it.

    Args:
        group: what to measure.
        setting: how.
        progress: is told, in a line, what is done and how long it will take.

    Returns:
        A result for each case, in their order.
    """
    results = {case.name: Result(case) for case in group.cases}
    subjects: dict[str, Subject] = {}
    repeats: dict[tuple[str, str], int] = {}
    was_enabled, was_benchmark = gc.isenabled(), torch.backends.cudnn.benchmark
    # The baselines are convolutions, and shall have the fastest that cuDNN has for them.
    torch.backends.cudnn.benchmark = True
    try:
        with limited_memory(setting.memory_limit):
            length = 0.0
            for case in group.cases:
                progress(f"{group.title}: warming up {case.name}")
                length += _prepare(case, group.modes, setting, results, subjects, repeats)
            work = [key for key in repeats if key[0] in subjects]
            gc.collect()
            gc.disable()
            start = time.perf_counter()
            last = -1
            for turn, (name, mode) in take_turns(work, setting.rounds):
                if turn != last:
                    if turn > 0:
                        length = (time.perf_counter() - start) / turn
                    left = length * (setting.rounds - turn)
                    progress(
                        f"{group.title}: round {turn + 1} of {setting.rounds}, {duration(left)} "
                        "left"
                    )
                    last = turn
                result = results[name]
                if mode in result.reasons:
                    continue
                subject = subjects[name]
                seconds = attempt(
                    result,
                    mode,
                    lambda subject=subject, mode=mode, number=repeats[name, mode]: _time(
                        subject, mode, number
                    ),
                    setting,
                )
                if seconds is None:
                    subject.clear()
                    result.seconds.pop(mode, None)
                    result.peak_bytes.pop(mode)
                else:
                    result.seconds.setdefault(mode, []).append(seconds)
    finally:
        torch.backends.cudnn.benchmark = was_benchmark
        if was_enabled:
            gc.enable()
    subjects.clear()
    _free(setting.device)
    return list(results.values())


def _prepare(
    case: Case,
    modes: Iterable[str],
    setting: Setting,
    results: dict[str, Result],
    subjects: dict[str, Subject],
    repeats: dict[tuple[str, str], int],
) -> float:
    """Make a case, run every mode for the first time, count its memory; returns a round's length.

    The first run allocates, and may compile; the second one says how often to repeat it in a round.
    """
    result = results[case.name]
    length = 0.0
    subject = attempt(result, None, lambda: Subject(case, setting), setting)
    if subject is None:
        result.reasons = dict.fromkeys(modes, result.reasons.pop(""))
        return length
    for mode in modes:
        seconds = attempt(
            result,
            mode,
            lambda mode=mode: (_time(subject, mode, 1), _time(subject, mode, 1))[1],
            setting,
        )
        if seconds is None:
            subject.clear()
            continue
        peak = attempt(result, mode, lambda mode=mode: subject.peak_bytes(mode), setting)
        subject.clear()
        if peak is None:
            continue
        result.peak_bytes[mode] = peak
        number = int(min(max(1, round(SHORTEST / max(seconds, 1e-9))), MOST_REPEATS))
        repeats[case.name, mode] = number
        length += number * seconds
    subjects[case.name] = subject
    result.parameters = sum(parameter.numel() for parameter in subject.parameters)
    result.model_bytes, result.input_bytes = subject.model_bytes(), subject.input_bytes()
    return length


def _time(subject: Subject, mode: str, number: int) -> float:
    """Seconds of one run, out of ``number`` of them in a row."""
    device = subject.setting.device
    _synchronize(device)
    start = time.perf_counter()
    for _ in range(number):
        subject.run(mode)
    _synchronize(device)
    seconds = (time.perf_counter() - start) / number
    subject.clear()
    return seconds


def attempt(result: Result, mode: str | None, work: Callable[[], T], setting: Setting) -> T | None:
    """The outcome of the work, or None and the reason in the result, under the mode or ""."""
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
    # Only here has the exception, which holds what was allocated, gone
    result.reasons[mode or ""] = reason
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
    """A length of time for people: "about 40 s", "about 3 min"."""
    return f"about {seconds:.0f} s" if seconds < 100 else f"about {seconds / 60:.0f} min"
