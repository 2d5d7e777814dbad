"""What the benchmarks' figures are: whose turn it was, which times, in which mode."""

import gc

import pytest
import torch
from torch import nn

from lambda_benchmarks import measure
from lambda_benchmarks.measure import BOTH, FORWARD, STEP, Case, Group, Setting, Subject
from tests.tool import load_tool

tool = load_tool("benchmark", "projects/benchmarks")
CPU = torch.device("cpu")


def test_cases_take_turns_and_short_work_is_repeated(monkeypatch):
    turns = []

    def time(subject, mode, repeats=1):
        turns.append((subject.model, repeats, gc.isenabled()))
        return {"base": 0.5, "other": 0.01}[subject.model]

    monkeypatch.setattr(Subject, "time", time)
    cases = [Case(name, lambda name=name: (name, ())) for name in ("base", "other")]
    measure.measure_group(Group("group", cases, (FORWARD,)), Setting(CPU, rounds=3))
    names, repeats, collects = zip(*turns, strict=True)
    order = ["base", "other", "other", "base", "base", "other"]
    assert list(names) == ["base"] * 2 + ["other"] * 2 + order
    assert repeats[4:] == (1, 5, 5, 1, 1, 5)  # a twentieth of a second in each round
    assert not any(collects[4:]) and gc.isenabled()


def test_a_ratio_is_a_median_of_ratios():
    group = Group("group", [Case("base", None), Case("other", None, images=4)], (BOTH,))
    seconds = {"base": {BOTH: [1.0, 2.0, 10.0]}, "other": {BOTH: [3.0, 1.0, 10.0]}}
    row = tool.table(group, seconds).splitlines()[-1]
    assert [cell.strip() for cell in row.split("|")[1:-1]] == [
        "other",
        "1.00 (0.75 to 2.00)",
        "3e+03",
        "1.33",
    ]


def test_a_run_is_timed():
    ran = []
    subject = Subject(
        Case("a", lambda: (lambda x: ran.append(x) or x, (torch.ones(1),))), Setting(CPU)
    )
    assert 0 < subject.time(FORWARD, 5) < 1 and len(ran) >= 5


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
    grad = subject.inputs[0].grad.clone()
    subject.run(BOTH)
    assert torch.equal(subject.inputs[0].grad, grad) and layer[0].weight.grad is not None
    assert torch.equal(layer[0].weight, before)
    subject.optimizer.param_groups[0]["lr"] = 1.0
    subject.run(STEP)
    assert not torch.equal(layer[0].weight, before)
    assert seen == [(False, False), (True, True), (True, True), (True, True)]


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
    assert next(subject.model.parameters()).dtype == torch.float32
    assert subject.inputs[0].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_run_on_a_gpu_is_timed_without_what_the_cache_holds():
    device = torch.device("cuda")
    subject = Subject(Case("a", lambda: (torch.square, (torch.zeros(1 << 20),))), Setting(device))
    subject.run(FORWARD)
    assert 0 < subject.time(FORWARD, 20) < 1e-3
