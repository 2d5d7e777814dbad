"""What auto takes on a device that verdicts are for: here the CPU stands in for a GPU."""

import json
import sys

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from lambda_det.layers import local
from lambda_det.layers.local import IMPLEMENTATIONS, choose, fused, local_position_output, verdict
from lambda_det.layers.local.query_first import query_first_gradients, query_first_output
from lambda_det.layers.local.verdict import Verdict

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch, tmp_path):
    monkeypatch.setattr(verdict, "DEVICES", {"cpu"})
    monkeypatch.setattr(verdict, "_in_use", {})
    monkeypatch.setattr(verdict, "_taken", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(verdict.SWITCH, raising=False)


def _inputs(side=6, batch=1):
    queries = torch.randn(batch, side, side, 2, 4)
    return queries, torch.randn(batch, side, side, 3, 1), torch.randn(4, 1, 3, 3)


def _write(take="conv", right=("conv", "query_first"), inputs=None):
    shape = verdict.shape_class(*(inputs or _inputs()))
    entry = {"take": take, "why": "a test says so", "right": list(right)}
    return verdict.write(verdict.key_of(CPU), {shape: entry})


def _sentence():
    """What is said where there is no verdict to use; then the safe implementation is taken."""
    assert choose(*_inputs()) == "query_first"
    about = verdict.read(CPU).about
    assert about and about.count("\n") == 0
    return about


def test_takes_what_a_valid_verdict_says():
    _write()
    assert choose(*_inputs()) == "conv"
    # Sizes that nothing is known of
    assert choose(*_inputs(side=20)) == "query_first"
    assert choose(*(x.double() for x in _inputs())) == "query_first"
    assert {entry["take"] for entry in verdict.taken()["classes"].values()} == {
        "conv",
        "query_first",
    }


def test_a_class_spans_a_factor_of_four():
    sides = {side: verdict.shape_class(*_inputs(side)) for side in (3, 4, 7, 8, 15, 16)}
    assert sides[4] == sides[7] != sides[8] == sides[15] != sides[16]
    assert verdict.shape_class(*_inputs(4, batch=3)) == sides[4] != sides[3]
    verdict.shape_class(*_inputs(4, batch=0))


def test_the_layout_is_part_of_the_class():
    queries, values, embedding = _inputs()
    maps = queries.permute(0, 3, 4, 1, 2).contiguous().permute(0, 3, 4, 1, 2)
    assert verdict.shape_class(maps, values, embedding) != verdict.shape_class(*_inputs())


def test_the_tiles_of_the_kernels_are_part_of_the_class():
    def of(batch, side):
        queries = torch.empty(batch, side, side, 4, 16, dtype=torch.bfloat16)
        embedding = torch.empty(16, 1, 23, 23)
        inputs = queries, torch.empty(batch, side, side, 64, 1), embedding
        return str(fused._Plan.of(*inputs)), verdict.shape_class(*inputs)

    (few, small), (many, large) = of(1, 32), of(3, 36)  # both of 1024 positions or more
    assert few != many and small != large
    assert of(1, 33)[1] == small


@pytest.mark.skipif(torch.__version__ < (2, 6), reason="such constants are not taken there")
def test_the_class_is_a_constant_for_torch_compile():
    queries, embedding = torch.randn(1, 6, 6, 2, 8), torch.randn(8, 1, 3, 3)
    inputs = queries, torch.randn(1, 6, 6, 3, 1), embedding
    whole = torch.compile(verdict.shape_class, backend="eager", fullgraph=True, dynamic=True)
    assert whole(*inputs) == verdict.shape_class(*inputs)
    assert "plan" in whole(*inputs)


def test_none_yet(monkeypatch, caplog):
    caplog.set_level("INFO")
    assert "doctor --gpu" in _sentence()
    choose(*_inputs(side=20))
    assert set(verdict.taken()["classes"]) == {verdict.EVERY}
    assert sum("there is no verdict" in line for line in caplog.messages) == 1


def test_without_a_verdict_no_size_is_specialised():
    counter = CompileCounter()
    whole = torch.compile(local_position_output, backend=counter, fullgraph=True, dynamic=True)
    for side in (6, 20, 33):
        whole(*_inputs(side))
    assert counter.frame_count == 1


def test_every_device_has_its_own():
    shape = verdict.shape_class(*_inputs())
    entry = {"take": "conv", "why": "", "right": ["conv"]}
    verdict.use("cuda:0", Verdict({}, {shape: entry}))
    verdict.use("cuda:1", Verdict({}, {"other sizes": entry}))
    assert [verdict.decided(f"cuda:{i}", shape) for i in (0, 1)] == ["conv", "query_first"]
    verdict.use("cuda:1", Verdict({}, {shape: entry}))
    verdict.refuse("cuda:0", shape, "it failed")
    assert [verdict.decided(f"cuda:{i}", shape) for i in (0, 1)] == ["query_first", "conv"]
    assert list(verdict.taken()["classes"]) == [shape]


def test_what_is_added_stays():
    _write()
    path = _write(inputs=_inputs(side=20))
    assert len(json.loads(path.read_text())["classes"]) == 2
    assert choose(*_inputs()) == choose(*_inputs(side=20)) == "conv"


@pytest.mark.parametrize("part", ["driver", "device", "PyTorch", "Triton", "kernels"])
def test_of_something_else(part, monkeypatch):
    _write()
    here = verdict.key_of(CPU)
    monkeypatch.setattr(verdict, "key_of", lambda device: {**here, part: "another"})
    assert part == "device" or part in _sentence()
    assert "doctor --gpu" in _sentence()


def _cut_short(path):
    path.write_text(path.read_text()[:100])


def _by_hand(path):
    path.write_text(path.read_text().replace('"take": "conv"', '"take": "dense"'))


def _without_checksum(path):
    path.write_text('{"key": {}, "classes": []}')


def _no_mapping(path):
    path.write_text("[1, 2]")


def _bytes(path):
    path.write_bytes(b"\xff\xfe\x00")


@pytest.mark.parametrize("damage", [_cut_short, _by_hand, _without_checksum, _no_mapping, _bytes])
def test_a_damaged_file(damage):
    path = _write()
    damage(path)
    assert str(path) in _sentence()
    # It is not in the way of the next one
    _write()
    verdict._in_use.clear(), verdict._taken.clear()
    assert choose(*_inputs()) == "conv"


def test_a_name_that_is_none(caplog):
    """Of a file that was made by hand with care, or by another version."""
    caplog.set_level("INFO")
    _write("fastest", ["fastest"])
    assert choose(*_inputs()) == "query_first"
    local_position_output(*_inputs())
    assert sum("fastest cannot be used" in line for line in caplog.messages) == 1


def test_switched_off(monkeypatch):
    _write()
    monkeypatch.setenv(verdict.SWITCH, "0")
    assert verdict.SWITCH in _sentence()


def test_without_a_home(monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(verdict, "cache_folder", homeless)
    assert "cache folder" in _sentence()


def test_a_cache_folder_that_is_a_file(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    _sentence()
    with pytest.raises(OSError):
        _write()


def test_a_kernel_that_is_refused_or_fails_is_not_fatal(monkeypatch, caplog):
    def broken(*inputs):
        raise RuntimeError("out of resources: shared memory")

    caplog.set_level("INFO")
    inputs = _inputs()
    expected = IMPLEMENTATIONS["query_first"](*inputs)
    monkeypatch.setitem(IMPLEMENTATIONS, "conv", broken)
    _write()
    for _ in range(2):
        assert torch.equal(local_position_output(*inputs), expected)
    assert sum("out of resources" in line for line in caplog.messages) == 1
    assert "conv failed" in next(iter(verdict.taken()["classes"].values()))["why"]
    _write("fused", ["fused"])
    verdict._in_use.clear(), verdict._taken.clear()
    assert choose(*inputs) == "query_first"  # whose query depth is 4
    assert "query depth" in caplog.messages[-1]


@pytest.fixture
def kernels(monkeypatch):
    """Stand-ins of the kernels: their calls, and in which direction they fail."""
    calls, failing = [], set()

    def kernel(direction, function):
        def call(*inputs):
            calls.append(direction)
            if direction in failing:
                raise RuntimeError("out of resources: registers")
            return function(*inputs)

        return call

    gradients = kernel("backward", query_first_gradients)
    monkeypatch.setitem(IMPLEMENTATIONS, "fused", kernel("forward", query_first_output))
    monkeypatch.setattr(local, "_UNSUPPORTED", {})
    monkeypatch.setattr(fused, "fused_gradients", gradients)
    return calls, failing


def _with_gradients(function, inputs):
    output = function(*inputs)
    return [output, *torch.autograd.grad(output.square().sum(), inputs)]


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_kernel_that_fails_in_either_direction_is_not_fatal(direction, compiled, kernels, caplog):
    caplog.set_level("INFO")
    calls, failing = kernels
    _write("fused", ["fused", "query_first"])
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
    failing.add(direction)
    output = function(*inputs)  # of another layer, which has its backward pass after the failure
    step()
    torch.autograd.grad(output.sum(), inputs)
    step()
    asked = {"forward": ["forward"], "backward": ["forward", "forward", "backward"]}
    assert calls[2:] == asked[direction]  # and no more after it has failed
    assert sum("fused failed (out of resources" in line for line in caplog.messages) == 1
    (entry,) = verdict.taken()["classes"].values()
    assert entry["take"] == "query_first" and "registers" in entry["why"]


def test_too_little_memory_is_an_error(kernels, monkeypatch):
    """By no fault of the kernel, and what takes its place needs as much."""

    def full(*inputs):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    _write("fused", ["fused", "query_first"])
    monkeypatch.setattr(fused, "fused_gradients", full)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        _with_gradients(local_position_output, [x.requires_grad_() for x in _inputs()])


def test_a_failure_of_the_safe_one_is_an_error(monkeypatch):
    def broken(*inputs):
        raise RuntimeError("broken")

    monkeypatch.setitem(IMPLEMENTATIONS, "query_first", broken)
    with pytest.raises(RuntimeError, match="broken"):
        local_position_output(*_inputs())


def test_a_resumed_run_keeps_what_is_still_proved():
    _write("conv", ["conv", "dense", "query_first"])
    choose(*_inputs())
    shape = verdict.shape_class(*_inputs())
    for before, after in (("dense", "dense"), ("query_first", "query_first"), ("fused", "conv")):
        verdict.use(CPU, verdict.read(CPU))
        changes = verdict.keep(CPU, {"classes": {shape: {"take": before, "why": ""}}})
        assert choose(*_inputs()) == after
        assert [f"{before} -> {after}" in change for change in changes] == [True] * (
            before != after
        )
    # Begun without a verdict
    verdict.use(CPU, verdict.read(CPU))
    record = {verdict.EVERY: {"take": "query_first", "why": ""}}
    for _ in range(2):
        assert verdict.keep(CPU, {"classes": record}) == []
        assert choose(*_inputs()) == "query_first"
        record = verdict.taken()["classes"]
    # On a device without a verdict
    verdict.use(CPU, Verdict({}, about="a test has none"))
    (change,) = verdict.keep(CPU, {"classes": {shape: {"take": "conv", "why": ""}}})
    assert "conv -> query_first" in change and choose(*_inputs()) == "query_first"
    assert verdict.keep(CPU, {}) == []  # of a checkpoint from before there were verdicts


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_graph_break(dynamic):
    _write()
    whole = torch.compile(
        local_position_output, backend="aot_eager", fullgraph=True, dynamic=dynamic
    )
    for side in (6, 20):
        inputs = [x.requires_grad_() for x in _inputs(side)]
        torch.testing.assert_close(whole(*inputs), IMPLEMENTATIONS["dense"](*inputs))
    assert {entry["take"] for entry in verdict.taken()["classes"].values()} == {
        "conv",
        "query_first",
    }


def test_without_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    assert verdict.key_of(CPU)["Triton"] == "none"
