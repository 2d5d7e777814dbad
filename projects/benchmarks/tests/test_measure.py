"""What the benchmarks' figures are: whose turn it was, which times, how much memory."""

import gc

import pytest
import torch
from torch import nn

from lambda_benchmarks import measure, report
from lambda_benchmarks.measure import BOTH, FORWARD, STEP, Case, Group, Setting, Subject
from lambda_benchmarks.memory import peak_memory

CPU = torch.device("cpu")
MB = 1_000_000


@pytest.fixture
def clock(monkeypatch):
    """Stands for the timer; work says how long it takes."""
    now = [0.0]
    monkeypatch.setattr(measure, "timer", lambda: now[0])
    return now


def group_of(cases: dict, images: int = 0) -> Group:
    made = [
        Case(name, lambda run=run: (run, (torch.zeros(1),)), images) for name, run in cases.items()
    ]
    return Group("group", made, (FORWARD,))


def figures_of(group: Group, rounds: int) -> dict:
    results = measure.measure_group(group, Setting(CPU, rounds=rounds))
    return report.group_figures(group, results)


def test_turns_change_their_order():
    turns = list(measure.take_turns("abc", 4))
    rounds = ["".join(thing for turn, thing in turns if turn == number) for number in range(4)]
    assert rounds == ["abc", "cba", "bca", "acb"]
    assert list(measure.take_turns("", 2)) == []


def test_ratios_are_of_the_same_round(clock):
    """A machine that slows down threefold from round to round changes no ratio."""
    calls = []

    def work(name, seconds):
        def run(x):
            calls.append((name, gc.isenabled()))
            clock[0] += seconds * 3 ** (max(len(calls) - 7, 0) // 2)
            return x

        return run

    group = group_of({"base": work("base", 0.5), "other": work("other", 0.25)}, images=4)
    base, other = figures_of(group, 3)["cases"].values()
    # Two runs to warm up and one to count memory, each; then in turns
    warm, turns = ["base"] * 3 + ["other"] * 3, ["base", "other", "other", "base", "other", "base"]
    assert [name for name, _ in calls] == warm + turns
    assert not any(collects for _, collects in calls[6:]) and gc.isenabled()
    assert base[FORWARD]["rounds"] == pytest.approx([0.5, 1.5, 4.5])
    assert other[FORWARD]["rounds"] == pytest.approx([0.25, 0.75, 2.25])
    assert other[FORWARD]["ratio"] == pytest.approx([0.5, 0.5, 0.5])
    assert other[FORWARD]["seconds"] == pytest.approx([0.5, 0.75, 1.5])
    assert other[FORWARD]["images_per_second"][1] == pytest.approx(4 / 0.75)


def test_ratio_is_a_median_of_ratios():
    base, other = (measure.Result(Case(name, None)) for name in "ab")
    base.seconds[BOTH], other.seconds[BOTH] = [1.0, 2.0, 10.0], [3.0, 1.0, 10.0]
    other.peak_bytes[BOTH] = 0
    assert report.figures(other, base, BOTH)["ratio"] == [0.75, 1.0, 2.0]


def test_short_work_is_repeated(clock):
    calls = []

    def run(x):
        calls.append(x)
        clock[0] += 0.01
        return x

    (case,) = figures_of(group_of({"short": run}), 2)["cases"].values()
    assert case[FORWARD]["rounds"] == pytest.approx([0.01, 0.01])
    assert len(calls) == 3 + 2 * 5  # a twentieth of a second in each round


@pytest.mark.slow
def test_case_that_fails_has_its_reason():
    def fall(x):
        raise RuntimeError("first line\nsecond line")

    def tire(x):
        tire.left -= 1
        if tire.left < 0:
            raise RuntimeError("CUDA out of memory. Tried to allocate")
        return x

    tire.left = 3
    found = figures_of(group_of({"base": lambda x: x, "bug": fall, "tired": tire}), 2)
    assert len(found["cases"]["base"][FORWARD]["rounds"]) == 2
    assert found["cases"]["bug"][FORWARD] == {"reason": "first line second line"}
    assert found["cases"]["tired"][FORWARD] == {"reason": "out of memory"}
    table = report.group_table(found)
    assert "- bug, forward: first line" in table and "| - " in table
    # Without a base there are no ratios
    _, other = figures_of(group_of({"base": fall, "other": lambda x: x}), 1)["cases"].values()
    assert "ratio" not in other[FORWARD] and other[FORWARD]["seconds"][1] > 0


@pytest.mark.slow
def test_a_batch_is_halved_until_it_fits(clock):
    """As in Appendix F.3; times are those of as many images as were asked for."""
    tried = []

    def case(images):
        def run(x):
            tried.append(images)
            if images > 4:
                raise RuntimeError("CUDA out of memory. Tried to allocate")
            clock[0] += 0.5 * images
            return x

        return Case(
            "batches", lambda: (run, (torch.zeros(1),)), images, {}, lambda: case(images // 2)
        )

    def base_run(x):
        clock[0] += 16
        return x

    base = Case("base", lambda: (base_run, (torch.zeros(1),)), 16)
    _, halved = figures_of(Group("group", [base, case(16)], (FORWARD,)), 2)["cases"].values()
    assert tried[:3] == [16, 8, 4] and set(tried[3:]) == {4}
    assert halved["images"] == 4
    assert halved[FORWARD]["seconds"] == [8, 8, 8] and halved[FORWARD]["ratio"] == [0.5, 0.5, 0.5]
    assert halved[FORWARD]["images_per_second"] == [2, 2, 2]


def test_peak_memory():
    held = torch.empty(MB)

    def work():
        first, second = torch.empty(MB // 4), torch.empty(MB // 2)  # 1 and 2 MB
        del first
        third = torch.empty(MB // 8)
        view = third[10:]
        fourth = view.clone()[:1]
        del second, third, view
        return torch.empty(MB // 4), fourth

    at_once = 2 * MB + MB // 2 + MB // 2 - 40
    for _ in range(2):
        assert at_once <= peak_memory(work, CPU) <= at_once + 200
    assert peak_memory(lambda: held.add_(1), CPU) < 200
    # What was there before doesn't make room by going
    several = []
    peak_memory(lambda: several.append(torch.empty(MB)), CPU)
    assert peak_memory(lambda: (several.clear(), torch.empty(MB // 4)), CPU) >= MB


def test_peak_memory_of_a_layer():
    layer = nn.Linear(1000, 500, bias=False)
    case = Case("a", lambda: (layer, (torch.randn(100, 1000, requires_grad=True),)))
    subject = Subject(case, Setting(CPU))
    for mode in (FORWARD, BOTH, STEP):
        subject.run(mode)
    weight, x, y = 2 * MB, 400_000, 200_000
    # The gradient of the output was given, so it counts with the inputs
    sizes = {"parameters": weight // 4, "model_bytes": weight, "input_bytes": x + y}
    assert subject.sizes() == sizes
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
            return {"maps": [y]}  # outputs may be mappings and sequences

    setting = Setting(CPU, dtype=torch.bfloat16, channels_last=True)
    subject = Subject(
        Case("a", lambda: (Convolution(4, 8, 3), (torch.randn(2, 4, 9, 9),))), setting
    )
    subject.run(FORWARD)
    subject.run(STEP)
    assert seen == [(torch.bfloat16, True)] * 2
    assert subject.parameters[0].dtype == torch.float32
    assert subject.inputs[0].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.slow
@pytest.mark.posix
def test_memory_limit():
    resource = measure.resource
    before = resource.getrlimit(resource.RLIMIT_DATA)
    measure.limit_memory(0.1)
    try:
        # More than earlier tests may have left in the heap, which a process can be told to keep
        group = group_of({"base": lambda x: x, "large": lambda x: torch.empty(1000 * MB).fill_(1)})
        base, large = figures_of(group, 1)["cases"].values()
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
    assert "seconds" in base[FORWARD] and large[FORWARD] == {"reason": "out of memory"}


def test_out_of_memory_errors():
    assert measure.is_out_of_memory(MemoryError())
    assert measure.is_out_of_memory(torch.cuda.OutOfMemoryError())
    assert not measure.is_out_of_memory(RuntimeError("shapes differ"))
    assert not measure.is_out_of_memory(ValueError("out of memory"))
