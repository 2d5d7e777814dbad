"""What auto takes on a device that verdicts are for: here the CPU stands in for a GPU."""

import json

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from lambda_det.layers import local
from lambda_det.layers.local import IMPLEMENTATIONS, choose, fused, local_position_output, verdict
from lambda_det.layers.local.query_first import query_first_gradients, query_first_output

CPU = torch.device("cpu")
KIND = "float32 channels_last"
needs_kernels = pytest.mark.skipif(isinstance(fused._kernels(), str), reason="an old Triton")


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch, tmp_path):
    monkeypatch.setattr(verdict, "DEVICES", {"cpu"})
    monkeypatch.setattr(verdict, "_allowed", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(verdict.SWITCH, raising=False)


def _inputs(side=6, k=8):
    queries = torch.randn(1, side, side, 2, k)
    return queries, torch.randn(1, side, side, 3, 1), torch.randn(k, 1, 3, 3)


def _write(*kinds):
    verdict._allowed.clear()
    return verdict.write(verdict.key_of(CPU), kinds)


@needs_kernels
def test_takes_what_was_proved_and_nothing_else():
    """In the interpreter the kernels know the CPU, too."""
    _write(KIND)
    inputs = _inputs()
    assert choose(*inputs) == "fused" == choose(*_inputs(20))
    contiguous = inputs[0].permute(0, 3, 4, 1, 2).contiguous().permute(0, 3, 4, 1, 2)
    assert choose(contiguous, *inputs[1:]) == "query_first"
    assert choose(*(x.half() for x in inputs)) == "query_first"
    assert choose(*_inputs(k=4)) == "query_first"  # which the kernels do not know


def test_products_of_shorter_numbers_are_another_kind(monkeypatch):
    monkeypatch.setattr(verdict, "allows_tf32", lambda: True)
    assert verdict.kind_of(_inputs()[0]) == "tf32 channels_last"


def _of_another_driver(path, monkeypatch):
    here = verdict.key_of(CPU)
    monkeypatch.setattr(verdict, "key_of", lambda device: {**here, "driver": "another"})


def _by_hand(path, monkeypatch):
    """As a file that was renamed, so that it looks like one of this machine."""
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "key": {**content["key"], "Triton": "9"}}))


def _without_a_home(path, monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(verdict, "cache_folder", homeless)


CHANGES = {
    "none": (lambda path, patch: path.unlink(), "doctor --gpu"),
    "switched off": (lambda path, patch: patch.setenv(verdict.SWITCH, "0"), verdict.SWITCH),
    "another driver": (_of_another_driver, "doctor --gpu"),
    "by hand": (_by_hand, "verdict_cpu"),
    "cut": (lambda path, patch: path.write_text(path.read_text()[:100]), "verdict_cpu"),
    "no mapping": (lambda path, patch: path.write_text("[1, 2]"), "verdict_cpu"),
    "bytes": (lambda path, patch: path.write_bytes(b"\xff\xfe\x00"), "verdict_cpu"),
    "no home": (_without_a_home, "cache folder"),
}


@pytest.mark.parametrize(("change", "named"), CHANGES.values(), ids=CHANGES)
def test_what_is_no_verdict_for_this_machine(change, named, monkeypatch, caplog):
    caplog.set_level("INFO")
    change(_write(KIND), monkeypatch)
    for _ in range(2):
        assert choose(*_inputs()) == "query_first"
    (line,) = caplog.messages  # said once
    assert named in line and "query_first" in line


@needs_kernels
def test_a_damaged_file_is_not_in_the_way_of_the_next_one():
    _write(KIND).write_text("{")
    _write(KIND)
    assert choose(*_inputs()) == "fused"


@pytest.mark.parametrize("kinds", [(), pytest.param((KIND,), marks=needs_kernels)])
def test_no_size_is_specialised(kinds):
    """By torch.compile, with or without a verdict."""
    _write(*kinds)
    torch._dynamo.reset()
    counter = CompileCounter()
    whole = torch.compile(local_position_output, backend=counter, fullgraph=True, dynamic=True)
    for side in (6, 20, 33):
        whole(*_inputs(side))
    assert counter.frame_count == 1


@pytest.fixture
def kernels(monkeypatch):
    """Stand-ins of the kernels: their calls, and in which direction they fail."""
    calls, failing = [], {}

    def kernel(direction, function):
        def call(*inputs):
            calls.append(direction)
            if direction in failing:
                raise failing[direction]
            return function(*inputs)

        return call

    gradients = kernel("backward", query_first_gradients)
    monkeypatch.setitem(IMPLEMENTATIONS, "fused", kernel("forward", query_first_output))
    monkeypatch.setattr(local, "_UNSUPPORTED", {})
    monkeypatch.setattr(fused, "fused_gradients", gradients)
    _write(KIND)
    return calls, failing


def _with_gradients(function, inputs):
    output = function(*inputs)
    return [output, *torch.autograd.grad(output.square().sum(), inputs)]


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_kernel_that_fails_in_either_direction_is_not_fatal(direction, compiled, kernels, caplog):
    caplog.set_level("INFO")
    calls, failing = kernels
    inputs = [x.requires_grad_() for x in _inputs()]
    expected = _with_gradients(IMPLEMENTATIONS["query_first"], inputs)
    function = local_position_output
    if compiled:
        function = torch.compile(function, backend="aot_eager", fullgraph=True)

    def step():
        for a, b in zip(_with_gradients(function, inputs), expected, strict=True):
            assert torch.equal(a, b)

    step()
    assert calls == ["forward", "backward"]
    failing[direction] = RuntimeError("out of resources: registers")
    output = function(*inputs)  # of another layer, which has its backward pass after the failure
    step()
    torch.autograd.grad(output.sum(), inputs)
    step()
    asked = {"forward": ["forward"], "backward": ["forward", "forward", "backward"]}
    assert calls[2:] == asked[direction]  # and no more after it has failed
    assert sum("the kernel failed (out of resources" in line for line in caplog.messages) == 1


def test_too_little_memory_is_an_error(kernels):
    """By no fault of the kernel, and what takes its place needs as much."""
    kernels[1]["backward"] = torch.cuda.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(torch.cuda.OutOfMemoryError):
        _with_gradients(local_position_output, [x.requires_grad_() for x in _inputs()])


@needs_kernels
def test_a_resumed_run_keeps_what_is_still_proved(caplog):
    caplog.set_level("INFO")
    _write(KIND, "float16 channels_last")
    verdict.continue_with("cpu", {})  # of a checkpoint from before there were verdicts
    assert choose(*_inputs()) == "fused"
    verdict.continue_with("cpu", {"fused": [KIND]})
    assert verdict.allowed("cpu") == {KIND}
    verdict.continue_with("cpu", {"fused": []})  # the run began without a verdict
    assert choose(*_inputs()) == "query_first"
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    _write()
    verdict.continue_with("cpu", {"fused": [KIND]})
    assert choose(*_inputs()) == "query_first"
    (warning,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert KIND in warning.getMessage()
