"""``lambda-det doctor --gpu``: the CPU stands in for a GPU, with kernels wrong on purpose."""

import itertools
import sys

import pytest
import torch

from lambda_det.cli import main
from lambda_det.doctor import gpu
from lambda_det.doctor.gpu import Case
from lambda_det.errors import ConfigError
from lambda_det.layers.local import IMPLEMENTATIONS, choose, verdict
from lambda_det.layers.local.lambda_first import conv_output

CPU = torch.device("cpu")
KIND = "float32 channels_last"
CASE = Case(2, 4, 5, heads=2, k=8, v=4, scope=3)
LARGE_IMAGES = 5  # of the case of many numbers


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    """A machine without verdicts, and checks that take no time."""
    monkeypatch.setattr(verdict, "_allowed", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(verdict.SWITCH, raising=False)
    monkeypatch.setattr(gpu, "unsupported", lambda *_: None)
    monkeypatch.setattr(gpu, "USUAL", [CASE])
    monkeypatch.setattr(gpu, "AWKWARD", [Case(32, 1, 3, v=4)])
    monkeypatch.setattr(gpu, "LARGE", (LARGE_IMAGES - 2) * 64 * 64 * 4 * 16)
    monkeypatch.setattr(gpu, "ROUNDS", 1)


def _hooked(tensor, hook):
    copy = tensor.clone()
    copy.register_hook(hook)
    return copy


def slightly_wrong(queries, values, embedding):
    """As a kernel that leaves out one offset of the scope."""
    embedding = embedding.clone()
    embedding[..., -1, -1] = 0
    return conv_output(queries, values, embedding)


def wrong_gradient(queries, values, embedding):
    return conv_output(queries, _hooked(values, lambda grad: grad * 1.001), embedding)


def in_double(*inputs):
    return conv_output(*inputs).double()


def in_short(*inputs):
    """With products in 16 bits, which float32 does not allow."""
    return conv_output(*(x.bfloat16() for x in inputs)).to(inputs[0].dtype)


def less_exact_on_other_maps(*inputs):
    """By three units in the last place; plain PyTorch is right to one."""
    y = conv_output(*inputs)
    return y if y.shape[1] == CASE.height else y * (1 + 3.6e-7)


_calls = itertools.count()


def never_the_same(*inputs):
    return conv_output(*inputs) * (1 + 1.2e-7 * (next(_calls) % 2))


def across_images(*inputs):
    y = conv_output(*inputs)
    return y + 1e-3 * (y.sum(0, keepdim=True) - y)


def never_empty(queries, values, embedding):
    is_empty = float(len(queries) == 0)
    return conv_output(queries, values, _hooked(embedding, lambda grad: grad + is_empty))


def not_written(*inputs):
    y = conv_output(*inputs)
    return torch.where(torch.arange(y.shape[-1]) == 0, torch.nan, y)


def wrong_beyond_a_size(*inputs):
    """As a kernel whose offsets overflow."""
    y = conv_output(*inputs)
    return torch.cat([y[:-1], 0 * y[-1:]]) if len(y) == LARGE_IMAGES else y


FAULTS = {
    slightly_wrong: "the output has an error",
    wrong_gradient: "the gradient of the values has an error",
    in_double: "float64",
    in_short: "the output has an error",
    less_exact_on_other_maps: "the output has an error",
    never_the_same: "differs when it is computed again",
    across_images: "has an error",
    never_empty: "without images",
    not_written: "an error of nan",
    wrong_beyond_a_size: "the output has an error",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_finds_the_fault(fault, monkeypatch):
    monkeypatch.setitem(IMPLEMENTATIONS, "fused", fault)
    found = gpu.check(KIND, CPU)
    assert not found["take"] and FAULTS[fault] in found["why"]


@pytest.mark.parametrize("kind", [KIND, "float16 contiguous"])
def test_finds_no_fault_in_what_is_right(kind, monkeypatch):
    monkeypatch.setitem(IMPLEMENTATIONS, "fused", IMPLEMENTATIONS["query_first"])
    found = gpu.check(kind, CPU)
    assert found["why"].startswith("right, ") and len(found["rows"]) == 1
    monkeypatch.setattr(gpu, "unsupported", lambda *_: "an older GPU")
    assert gpu.check(kind, CPU) == {"take": False, "why": "an older GPU", "rows": []}


@pytest.mark.parametrize(
    ("seconds", "peak", "take"),
    [(0.96, 10, True), (0.98, 10, False), (0.5, 20, True), (0.5, 21, False)],
)
def test_takes_what_is_faster_and_needs_no_more_than_twice_the_memory(
    seconds, peak, take, monkeypatch
):
    """A difference that the next measurement may turn round does not count."""
    monkeypatch.setitem(IMPLEMENTATIONS, "fused", IMPLEMENTATIONS["query_first"])
    times = {"fused": (seconds, peak), "query_first": (1.0, 10)}
    monkeypatch.setattr(gpu, "_time", lambda *_: times)
    found = gpu.check(KIND, CPU)
    assert found["take"] == take, found["why"]


@pytest.mark.parametrize(
    ("code", "named"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGABRT)", "ended by SIGABRT"),
        ("raise SystemExit('no CUDA')", "status 1: no CUDA"),
        ("import time; time.sleep(60)", "more than 1 s"),
    ],
)
@pytest.mark.posix
def test_a_crash_or_a_hang_is_a_finding(code, named, monkeypatch):
    monkeypatch.setattr(gpu, "TIMEOUT", 1)
    monkeypatch.setattr(gpu, "CHECK", (sys.executable, "-c", code))
    found = gpu._check_apart(KIND, CPU)
    assert not found["take"] and named in found["why"]


@pytest.mark.slow
def test_from_the_proof_to_the_choice(monkeypatch, capsys):
    """Of two kinds one is right and faster; a real process checks the third."""
    monkeypatch.setattr(gpu, "KINDS", [KIND, "float16 contiguous", "bfloat16 contiguous"])
    monkeypatch.setattr(verdict, "DEVICES", {"cpu"})
    apart = gpu._check_apart

    def check(kind, device):
        if kind.startswith("bfloat16"):
            return apart(kind, device)  # without Triton's interpreter, as a GPU is not there
        return {
            "take": kind == KIND,
            "why": "a test says so",
            "rows": [[*CASE, "0.5", "1", "2", "1"]],
        }

    monkeypatch.setattr(gpu, "_check_apart", check)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    gpu.prove(CPU)
    printed = capsys.readouterr().out
    assert (
        f"{KIND}: fused; a test says so" in printed and f"PyTorch: {torch.__version__}" in printed
    )
    assert "bfloat16 contiguous: query_first; " in printed and "Triton" in printed
    inputs = Case(2, 4, 5, heads=2, k=8, v=4, scope=3).inputs(KIND, CPU)
    monkeypatch.setattr("lambda_det.layers.local._UNSUPPORTED", {})
    assert choose(*inputs) == "fused"
    assert choose(*(x.half() for x in inputs)) == "query_first"


def test_where_nothing_can_be_proved(capsys, monkeypatch, tmp_path):
    """Without a GPU, on one of AMD, and where the verdict cannot be kept."""
    for is_there, hip in ((False, None), (True, "6.2")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda is_there=is_there: is_there)
        monkeypatch.setattr(torch.version, "hip", hip)
        assert main(["doctor", "--gpu"]) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert "no NVIDIA GPU" in line
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="XDG_CACHE_HOME"):
        gpu.prove(CPU)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_on_a_gpu(monkeypatch):
    monkeypatch.undo()
    assert main(["doctor", "--gpu"]) == 0
    proved, about = verdict.read(torch.device("cuda", torch.cuda.current_device()))
    assert proved <= set(gpu.KINDS) and about.startswith("verdict ")
