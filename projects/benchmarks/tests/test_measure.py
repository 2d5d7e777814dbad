"""What the benchmarks' figures are: whose turn it was, which times, how much memory."""

from __future__ import annotations

import functools
import gc

import pytest
import torch
from torch import nn

from lambda_benchmarks import measure, memory, report
from lambda_benchmarks.measure import BOTH, FORWARD, STEP, Case, Group, Setting, Subject
from lambda_det.errors import ConfigError
from lambda_det.plan import peak_memory

CPU = torch.device("cpu")
MB = 1_000_000


class Clock:
    """Stands for the ``time`` module; work says how long it takes."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(measure.time, "perf_counter", lambda: self.now)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def group_of(cases: dict, modes=(FORWARD,), images: int = 0) -> Group:
    made = [
        Case(name, lambda run=run: (run, (torch.zeros(1),)), images) for name, run in cases.items()
    ]
    return Group("group", made, modes)


def test_turns_change_their_order():
    turns = list(measure.take_turns("abc", 4))
    rounds = ["".join(thing for turn, thing in turns if turn == number) for number in range(4)]
    assert rounds == ["abc", "cba", "bca", "acb"]
    assert [thing for _, thing in measure.take_turns("ab", 4)] == list("abbabaab")
    assert list(measure.take_turns("", 2)) == []


def test_ratios_are_of_the_same_round(clock):
    """A machine that slows down threefold from round to round changes no ratio."""
    calls = []

    def work(name, seconds):
        def run(x):
            calls.append(name)
            clock.now += seconds * 3 ** (max(len(calls) - 7, 0) // 2)
            return x

        return run

    group = group_of({"base": work("base", 0.5), "other": work("other", 0.25)}, images=4)
    results = measure.measure_group(group, Setting(CPU, rounds=3))
    # Two runs to warm up and one to count memory, each; then in turns
    warm, turns = ["base"] * 3 + ["other"] * 3, ["base", "other", "other", "base", "other", "base"]
    assert calls == warm + turns
    assert results[0].seconds[FORWARD] == pytest.approx([0.5, 1.5, 4.5])
    assert results[1].seconds[FORWARD] == pytest.approx([0.25, 0.75, 2.25])
    found = report.figures(results[1], results[0], FORWARD)
    assert found["ratio"] == pytest.approx([0.5, 0.5, 0.5])
    assert found["seconds"] == pytest.approx([0.5, 0.75, 1.5])
    assert found["images_per_second"][1] == pytest.approx(4 / 0.75)


def test_ratio_is_a_median_of_ratios():
    base, other = (measure.Result(Case(name, None)) for name in "ab")
    base.seconds[BOTH], other.seconds[BOTH] = [1.0, 2.0, 10.0], [3.0, 1.0, 10.0]
    other.peak_bytes[BOTH] = 0
    assert report.figures(other, base, BOTH)["ratio"] == [0.75, 1.0, 2.0]


def test_short_work_is_repeated(clock):
    calls = []

    def run(x):
        calls.append(x)
        clock.now += 0.01
        return x

    (result,) = measure.measure_group(group_of({"short": run}), Setting(CPU, rounds=2))
    assert result.seconds[FORWARD] == pytest.approx([0.01, 0.01])
    assert len(calls) == 3 + 2 * 5  # a twentieth of a second in each round


def test_garbage_is_not_collected_while_the_clock_runs():
    seen = []

    def run(x):
        seen.append(gc.isenabled())
        return x

    measure.measure_group(group_of({"a": run}), Setting(CPU, rounds=1))
    assert seen[:3] == [True] * 3 and not any(seen[3:]) and len(seen) > 3
    assert gc.isenabled()


def test_case_that_fails_has_its_reason():
    def refuse(x):
        raise ConfigError("not on this machine.")

    def fall(x):
        raise RuntimeError("first line\nsecond line")

    def tire(x):
        tire.left -= 1
        if tire.left < 0:
            raise RuntimeError("CUDA out of memory. Tried to allocate")
        return x

    tire.left = 3
    group = group_of({"base": lambda x: x, "no": refuse, "bug": fall, "tired": tire})
    base, *others = measure.measure_group(group, Setting(CPU, rounds=2))
    assert len(base.seconds[FORWARD]) == 2 and not base.reasons
    assert [result.reasons[FORWARD] for result in others] == [
        "not on this machine.",
        "RuntimeError: first line",
        "out of memory",
    ]
    assert not any(result.seconds or result.peak_bytes for result in others)
    table = report.group_table(group, [base, *others])
    assert "- no, forward: not on this machine." in table
    assert table.count("| no ") == 1 and "| - " in table
    figures = report.group_figures(group, [base, *others])
    assert figures["cases"]["tired"][FORWARD] == {"reason": "out of memory"}


def test_without_a_base_there_are_no_ratios():
    def refuse(x):
        raise ConfigError("no.")

    group = group_of({"base": refuse, "other": lambda x: x})
    results = measure.measure_group(group, Setting(CPU, rounds=1))
    found = report.group_figures(group, results)["cases"]["other"][FORWARD]
    assert found["ratio"] is None and found["seconds"][1] > 0


def test_peak_memory_of_a_layer():
    layer = nn.Linear(1000, 500, bias=False)
    case = Case("a", lambda: (layer, (torch.randn(100, 1000, requires_grad=True),)))
    subject = Subject(case, Setting(CPU))
    for mode in (FORWARD, BOTH, STEP):
        subject.run(mode)
    weight, x, y = 2 * MB, 400_000, 200_000
    assert subject.model_bytes() == weight
    assert subject.input_bytes() == x + y  # the gradient of the output was given
    assert subject.peak_bytes(FORWARD) == pytest.approx(y, abs=2000)
    # The output is held by us; then the gradients of weight and input
    assert subject.peak_bytes(BOTH) == pytest.approx(y + weight + x, abs=2000)
    # The momentum is there before the step, and counts all the same
    subject.clear()
    without = peak_memory(lambda: subject.run(STEP), CPU)
    assert without >= 2 * weight + x
    assert subject.peak_bytes(STEP) == pytest.approx(without + weight, abs=2000)


def test_modes():
    layer = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    seen = []
    layer.register_forward_hook(lambda m, x, y: seen.append((m.training, torch.is_grad_enabled())))
    subject = Subject(
        Case("a", lambda: (layer, (torch.randn(4, 3).requires_grad_(),))), Setting(CPU)
    )
    before = layer[0].weight.clone()
    subject.run(FORWARD)
    assert subject.inputs[0].grad is None and layer[0].weight.grad is None
    subject.run(BOTH)
    assert subject.inputs[0].grad is not None and layer[0].weight.grad is not None
    assert torch.equal(layer[0].weight, before)
    subject.optimizer.param_groups[0]["lr"] = 1.0
    subject.run(STEP)
    assert not torch.equal(layer[0].weight, before)
    assert seen == [(False, False), (True, True), (True, True)]
    subject.clear()
    assert subject.inputs[0].grad is None and layer[0].weight.grad is None


def test_dtype_and_memory_format():
    seen = []

    class Convolution(nn.Conv2d):
        def forward(self, x):
            y = super().forward(x)
            seen.append((y.dtype, y.is_contiguous(memory_format=torch.channels_last)))
            return y

    setting = Setting(CPU, dtype=torch.bfloat16, channels_last=True)
    subject = Subject(
        Case("a", lambda: (Convolution(4, 8, 3), (torch.randn(2, 4, 9, 9),))), setting
    )
    subject.run(FORWARD)
    subject.run(STEP)
    assert seen == [(torch.bfloat16, True)] * 2
    assert subject.parameters[0].dtype == torch.float32
    assert subject.inputs[0].is_contiguous(memory_format=torch.channels_last)


def test_output_tensors():
    one, two = torch.zeros(1), torch.ones(2)
    assert measure.output_tensors({"res2": one, "res3": [two]}) == [one, two]


@pytest.mark.slow
@pytest.mark.skipif(memory._reserved_bytes() is None, reason="the limit needs /proc")
def test_memory_limit():
    group = group_of({"base": lambda x: x, "large": lambda x: torch.empty(50 * MB).fill_(1)})
    setting = Setting(CPU, rounds=1, memory_limit=100 * MB)
    base, large = measure.measure_group(group, setting)
    assert base.seconds and large.reasons == {FORWARD: "out of memory (limit 0.1 GB)"}
    torch.empty(50 * MB).fill_(1)  # and the limit is gone
    group = group_of({"large": lambda x: torch.empty(50 * MB).fill_(1)})
    (large,) = measure.measure_group(group, Setting(CPU, rounds=1, memory_limit=1000 * MB))
    assert large.peak_bytes == {FORWARD: pytest.approx(200 * MB, abs=1000)}


def test_out_of_memory_errors():
    assert memory.is_out_of_memory(MemoryError())
    assert memory.is_out_of_memory(torch.cuda.OutOfMemoryError())
    assert not memory.is_out_of_memory(RuntimeError("shapes differ"))
    assert not memory.is_out_of_memory(ValueError("out of memory"))


def test_available_memory(tmp_path, monkeypatch):
    limit, used = tmp_path / "limit", tmp_path / "used"
    limit.write_text("3000\n")
    used.write_text("1000\n")
    monkeypatch.setattr(memory, "_CGROUPS", ((str(limit), str(used)),))
    assert memory.available_memory() == 1800
    limit.write_text("max\n")
    found = memory.available_memory()
    assert found is None or found > 10 * MB


def test_memory_kept_for_the_backward_pass():
    first, second = nn.Linear(10, 20), nn.Sequential(nn.ReLU(), nn.Linear(20, 30))
    x = torch.randn(100, 10)

    def work():
        return second(first(x)).exp()

    places = {first: "first", second: "second"}
    kept = memory.kept_for_backward(work, places, "elsewhere")
    # x; the result of the ReLU, which the second layer keeps as well; the result of exp
    assert kept == {"first": 100 * 10 * 4, "second": 100 * 20 * 4, "elsewhere": 100 * 30 * 4}
    assert not first._forward_hooks and not first._forward_pre_hooks


def test_a_batch_is_halved_until_it_fits():
    def case(images: int) -> Case:
        def make():
            if images > 3:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return torch.nn.Linear(4, 4), (torch.randn(images, 4),)

        smaller = functools.partial(case, images // 2) if images > 1 else None
        return Case("layer", make, images, {"batch": str(images)}, smaller)

    whole = Case("whole", lambda: (torch.nn.Linear(4, 4), (torch.randn(6, 4),)), 6)
    group = Group("g", [whole, case(12)], (FORWARD,))
    results = measure.measure_group(group, Setting(CPU, rounds=2))
    assert [result.case.images for result in results] == [6, 3]
    assert results[1].case.columns == {"batch": "3"} and not results[1].reasons
    results[0].seconds[FORWARD], results[1].seconds[FORWARD] = [2.0, 4.0], [3.0, 4.0]
    assert report.ratios(results[1], results[0], FORWARD) == [3.0, 2.0]  # of an image
