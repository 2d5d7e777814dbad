"""The CPU kernel: every path through its tiles, the layouts it takes and gives, its building."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lambda_det.errors import ConfigError
from lambda_det.layers.local import compiled, local_position_output

from .test_local import NO_KERNEL

needs_kernel = pytest.mark.skipif(bool(NO_KERNEL), reason=str(NO_KERNEL))


def _draw(low, high):
    return int(torch.randint(low, high + 1, ()))


def _tensor(shape, order, dtype):
    """A random tensor of that shape whose memory has the axes in that order."""
    tensor = torch.randn([shape[axis] for axis in order], dtype=dtype)
    return tensor.permute([order.index(axis) for axis in range(len(shape))]).requires_grad_()


LAYOUTS = {  # orders of the axes of queries and values [b, y, x, ..]
    "channels last": ((0, 1, 2, 3, 4), (0, 1, 2, 3, 4)),
    "a map per channel": ((0, 3, 4, 1, 2), (0, 3, 4, 1, 2)),
    "mixed": ((0, 3, 4, 1, 2), (4, 3, 2, 1, 0)),
}


@needs_kernel
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_equals_the_other_forms_on_random_sizes(layout, dtype, tolerance):
    """Sizes beyond a tile, and every remainder of the blocks of rows and of vectors."""
    for _ in range(12):
        batch, height, width, heads = _draw(1, 2), _draw(1, 20), _draw(1, 40), _draw(1, 6)
        k, v, u = _draw(1, 18), _draw(1, 40), _draw(1, 2)
        inputs = (
            _tensor((batch, height, width, heads, k), layout[0], dtype),
            _tensor((batch, height, width, v, u), layout[1], dtype),
            torch.randn(k, u, 2 * _draw(0, 12) + 1, 2 * _draw(0, 12) + 1, dtype=dtype),
        )
        inputs[2].requires_grad_()
        exact = [x.detach().double().requires_grad_() for x in inputs]
        output = local_position_output(*inputs, "compiled")
        expected = local_position_output(*exact, "query_first")
        grad = torch.randn_like(expected)
        got = [output, *torch.autograd.grad(output, inputs, grad.to(dtype))]
        want = [expected, *torch.autograd.grad(expected, exact, grad)]
        for name, a, b in zip(("output", "queries", "values", "embedding"), got, want, strict=True):
            assert a.dtype == dtype
            error = (a.double() - b).norm() / b.norm()
            assert error < tolerance, f"{name} at {[list(x.shape) for x in inputs]}: {error}"


@needs_kernel
def test_an_empty_batch():
    inputs = [torch.randn(0, 4, 5, 2, 3), torch.randn(0, 4, 5, 3, 1), torch.randn(3, 1, 3, 3)]
    inputs = [x.requires_grad_() for x in inputs]
    output = local_position_output(*inputs, "compiled")
    assert output.shape == (0, 4, 5, 2, 3)
    assert all((g == 0).all() for g in torch.autograd.grad(output.sum(), inputs))


@needs_kernel
@pytest.mark.parametrize("threads", [1, 3])
def test_any_number_of_threads(threads):
    inputs = [torch.randn(2, 7, 9, 2, 3), torch.randn(2, 7, 9, 4, 1), torch.randn(3, 1, 5, 5)]
    inputs = [x.double().requires_grad_() for x in inputs]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        output = local_position_output(*inputs, "compiled")
        got = [output, *torch.autograd.grad(output.square().sum(), inputs)]
        again = local_position_output(*inputs, "compiled")
        assert all(
            torch.equal(a, b)
            for a, b in zip(
                got, [again, *torch.autograd.grad(again.square().sum(), inputs)], strict=True
            )
        )
    finally:
        torch.set_num_threads(before)
    expected = local_position_output(*inputs, "dense")
    want = [expected, *torch.autograd.grad(expected.square().sum(), inputs)]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_another_device_is_refused_in_words():
    inputs = [torch.zeros(1, 3, 3, 1, 2), torch.zeros(1, 3, 3, 2, 1), torch.zeros(2, 1, 3, 3)]
    with pytest.raises(ConfigError, match=r"'compiled'.*CPU.*meta"):
        local_position_output(*(x.to("meta") for x in inputs), "compiled")


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """No kernel in this process, and none on disk."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    compiled._library.cache_clear()
    yield tmp_path
    monkeypatch.undo()
    compiled._library.cache_clear()


def _script(path: Path, text: str) -> str:
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


INPUTS = [torch.ones(1, 9, 9, 1, 2), torch.ones(1, 9, 9, 2, 1), torch.ones(2, 1, 3, 3)]


@needs_kernel
def test_it_is_compiled_once(fresh, monkeypatch):
    assert compiled.unsupported(*INPUTS) is None
    (library,) = (fresh / "cache" / "lambda_det").iterdir()
    written = library.stat().st_mtime_ns
    compiled._library.cache_clear()
    assert compiled.unsupported(*INPUTS) is None
    assert library.stat().st_mtime_ns == written
    # Other flags are another kernel
    monkeypatch.setattr(compiled, "_COMPILE", [*compiled._COMPILE, "-O1"])
    compiled._library.cache_clear()
    assert compiled.unsupported(*INPUTS) is None
    assert len(list(library.parent.iterdir())) == 2


@needs_kernel
def test_processes_that_start_together_share_one(fresh):
    program = (
        "import torch; from lambda_det.layers.local import local_position_output as f;"
        "x = [torch.ones(1, 9, 9, 1, 2), torch.ones(1, 9, 9, 2, 1), torch.ones(2, 1, 3, 3)];"
        "print(f(*x, 'compiled').sum().item())"
    )
    runs = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=os.environ)
        for _ in range(2)
    ]
    printed = {run.communicate(timeout=120)[0] for run in runs}
    assert all(run.returncode == 0 for run in runs)
    assert len(printed) == 1
    assert len(list((fresh / "cache" / "lambda_det").iterdir())) == 1


@pytest.mark.parametrize("kind", ["missing", "fails", "makes rubbish", "no room"])
def test_without_a_working_compiler_auto_takes_another_form(kind, fresh, monkeypatch):
    compiler = {
        "missing": str(fresh / "none"),
        "fails": _script(fresh / "fails", "echo no >&2; exit 1"),
        # The file after -o
        "makes rubbish": _script(
            fresh / "rubbish", 'while [ $# -gt 0 ]; do [ "$1" = -o ] && echo x > "$2"; shift; done'
        ),
        "no room": "g++",
    }[kind]
    monkeypatch.setenv("CXX", compiler)
    if kind == "no room":
        if NO_KERNEL:
            pytest.skip(NO_KERNEL)
        (fresh / "cache").write_text("a file where the folder should be")
    expected = local_position_output(*INPUTS, "query_first")
    torch.testing.assert_close(local_position_output(*INPUTS), expected)
    with pytest.raises(ConfigError, match="'compiled'") as raised:
        local_position_output(*INPUTS, "compiled")
    assert compiler in str(raised.value) or "g++" in str(raised.value)
