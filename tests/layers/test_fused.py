"""The fused kernels against float64, on a GPU or in Triton's interpreter."""

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lambda_det.errors import ConfigError
from lambda_det.layers.local import OPERATORS, fused, local_position_output
from lambda_det.layers.local.fused import unsupported
from lambda_det.layers.local.lambda_first import dense_output

from .reference import assert_close, errors, exactly, with_gradients

_ANY = torch.zeros(1, 1, 1, 1, 8), torch.zeros(1, 1, 1, 1, 1), torch.zeros(8, 1, 1, 1)
NO_KERNELS = unsupported(*(x.to("cuda" if torch.cuda.is_available() else "cpu") for x in _ANY))
pytestmark = pytest.mark.skipif(bool(NO_KERNELS), reason=str(NO_KERNELS))

ROOT = Path(__file__).resolve().parents[2]
fused_output, fused_gradients = OPERATORS["fused"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter cuts numbers off where it makes bfloat16 of them, a GPU rounds.
TOLERANCES = {
    torch.float32: 1e-6,
    torch.float16: 6e-4,
    torch.bfloat16: 4e-3 if DEVICE == "cuda" else 9e-3,
}

# batch, map, heads, k, v, scope
SIZES = {
    "one position": (1, (1, 1), 1, 8, 4, (1, 1)),
    "one position, large scope": (2, (1, 1), 3, 16, 4, (3, 5)),
    "one row": (2, (1, 9), 4, 16, 5, (1, 5)),
    "one column": (1, (9, 1), 2, 16, 5, (5, 1)),
    "map smaller than the scope": (2, (3, 4), 3, 8, 20, (9, 7)),
    "scope of one position": (2, (3, 5), 2, 32, 16, (1, 1)),
    "three heads, odd tiles": (1, (2, 25), 3, 16, 5, (3, 23)),
    "four heads, large tiles": (1, (2, 35), 4, 16, 8, (1, 23)),
    "one head": (1, (1, 40), 1, 8, 4, (3, 19)),
    "more heads than a tile has rows": (1, (1, 2), 140, 8, 4, (1, 3)),
    "many rows, tall scope": (1, (7, 2), 1, 32, 17, (5, 3)),
    "two blocks of offsets": (1, (1, 20), 2, 8, 6, (3, 39)),
    "three blocks of offsets": (1, (1, 38), 2, 8, 6, (1, 75)),
    "v of 64": (1, (2, 6), 4, 16, 64, (3, 3)),
    "v of 80": (1, (2, 5), 2, 16, 80, (3, 3)),
    "v of 128": (1, (2, 6), 4, 16, 128, (3, 3)),
    "v of 130, in slices": (1, (2, 5), 2, 16, 130, (3, 3)),
}


def _inputs(size, dtype=torch.float32):
    batch, (height, width), heads, k, v, scope = size
    shapes = (batch, height, width, heads, k), (batch, height, width, v, 1), (k, 1, *scope)
    return [torch.randn(shape).to(DEVICE, dtype).requires_grad_() for shape in shapes]


def _check(inputs, tolerance):
    """Compare with float64, output and gradients, as shares of their norms."""
    exact = exactly(inputs)
    expected = dense_output(*exact)
    grad = torch.randn_like(expected).to(inputs[0].dtype)
    got, want = (
        with_gradients(fused_output, inputs, grad),
        with_gradients(dense_output, exact, grad),
    )
    output = got[0] if inputs[0].stride(-1) == 1 else got[0].permute(0, 3, 4, 1, 2)
    assert output.is_contiguous()  # channels last, or a map per channel, as the queries
    assert all(x.dtype == inputs[0].dtype for x in got)
    found = errors(got, want)
    assert max(found.values()) <= tolerance, found


QUICK = ("one position", "two blocks of offsets")  # the interpreter takes a second for others


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SIZES],
)
def test_equals_float64(name, monkeypatch):
    # Large tiles on small maps; a few programs with several tiles each.
    monkeypatch.setattr(fused, "PROGRAMS", 2)
    _check(_inputs(SIZES[name]), TOLERANCES[torch.float32])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("four heads, large tiles", torch.float16),
        ("two blocks of offsets", torch.bfloat16),
        ("v of 64", torch.float16),
        ("v of 130, in slices", torch.bfloat16),
    ],
)
def test_lower_precision_stays_close(name, dtype, monkeypatch):
    monkeypatch.setattr(fused, "PROGRAMS", 2)
    _check(_inputs(SIZES[name], dtype), TOLERANCES[dtype])


@pytest.mark.slow
def test_equal_on_random_sizes():
    """Sizes nobody chose, with the small tiles that small maps are given."""

    def draw(low, high):
        return int(torch.randint(low, high + 1, ()))

    for _ in range(4):
        size = (
            draw(1, 2),
            (draw(1, 4), draw(1, 12)),
            draw(1, 4),
            (8, 16, 32)[draw(0, 2)],
            draw(1, 20),
            (2 * draw(0, 3) + 1, 2 * draw(0, 10) + 1),
        )
        _check(_inputs(size), TOLERANCES[torch.float32])


@pytest.mark.slow
def test_uneven_shares_of_the_embedding_gradient(monkeypatch):
    """More tiles than programs, and fewer programs than asked for where their shares are large."""
    inputs = _inputs((1, (3, 20), 2, 8, 4, (1, 3)))
    for programs, numel in ((2, 2**25), (10**6, 2**25), (256, 1000), (256, 1)):
        monkeypatch.setattr(fused, "PROGRAMS", programs)
        monkeypatch.setattr(fused, "SHARES_NUMEL", numel)
        _check(inputs, TOLERANCES[torch.float32])


@pytest.mark.slow
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_strides_of_the_layer(memory_format):
    """Queries and values as the layer splits them, and a cropped embedding, are read in place."""
    queries = torch.randn(2, 3 * 8, 4, 7).to(DEVICE, memory_format=memory_format)
    values = torch.randn(2, 2 * 5, 4, 7).to(DEVICE, memory_format=memory_format)
    queries = queries.permute(0, 2, 3, 1).unflatten(-1, (3, 8))
    values = values.permute(0, 2, 3, 1).unflatten(-1, (2, 5, 1))[:, :, :, 1]
    embedding = torch.randn(8, 1, 9, 9, device=DEVICE)[..., 2:7, 1:8]
    _check([x.requires_grad_() for x in (queries, values, embedding)], 1e-6)


def test_gradient_of_any_strides():
    inputs = _inputs((1, (3, 5), 2, 8, 4, (3, 3)))
    got, want = (
        with_gradients(function, x, torch.ones(()).expand(1, 3, 5, 2, 4).to(DEVICE))
        for function, x in ((fused_output, inputs), (dense_output, exactly(inputs)))
    )
    assert max(errors(got, want).values()) < 1e-5


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4)])
def test_nothing_in_nothing_out(shape):
    queries, values = torch.randn(*shape, 2, 8), torch.randn(*shape, 4, 1)
    inputs = [x.to(DEVICE).requires_grad_() for x in (queries, values, torch.randn(8, 1, 3, 3))]
    output = fused_output(*inputs)
    assert output.shape == (*shape, 2, 4)
    for x, grad in zip(inputs, torch.autograd.grad(output.sum(), inputs), strict=True):
        assert grad.shape == x.shape and not grad.any()


def test_two_runs_agree_bit_for_bit():
    inputs = _inputs((1, (3, 9), 3, 16, 20, (3, 5)), torch.bfloat16)
    first, second = with_gradients(fused_output, inputs), with_gradients(fused_output, inputs)
    assert_close(first, second, rtol=0, atol=0)


@pytest.mark.slow
def test_operators_are_well_formed():
    """PyTorch's own check of schemas, shapes without data, and registration of the gradient."""
    inputs = _inputs((2, (2, 3), 2, 8, 4, (3, 3)))
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(fused_output, inputs, test_utils=checks)
    plain = [torch.randn(2, 2, 3, 2, 4, device=DEVICE), *(x.detach() for x in inputs)]
    torch.library.opcheck(fused_gradients, plain, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("scope_x", [1, 15, 17, 31, 33, 127])
def test_scores_of_a_tile_reach_no_further_than_two_windows(scope_x):
    for heads, (batch, dtype) in itertools.product(
        (1, 2, 3, 4, 5, 7, 8, 12, 16, 33, 200),
        ((1, torch.bfloat16), (64, torch.bfloat16), (64, torch.float32)),
    ):
        queries = torch.empty(batch, 64, 64, heads, 16, dtype=dtype, device="meta")
        values = torch.empty(batch, 64, 64, 64, 1, dtype=dtype, device="meta")
        embedding = torch.empty(16, 1, 3, scope_x, dtype=dtype, device="meta")
        plan = fused._Plan.of(queries, values, embedding)
        rows = torch.arange(64 * heads)
        i = rows // heads - rows // plan.rows * plan.rows // heads
        assert i.max() <= plan.span
        assert plan.blocks * plan.span >= scope_x > (plan.blocks - 1) * plan.span


REFUSALS = {
    "intra-depth": (
        lambda q, v, e: (q, v.repeat(1, 1, 1, 1, 2), e.repeat(1, 2, 1, 1)),
        "depth is 2",
    ),
    "query depth": (lambda q, v, e: (q[..., :5], v, e[:5]), "query depth is 5"),
    "float64": (lambda q, v, e: (q.double(), v.double(), e.double()), "float64"),
    "mixed dtypes": (lambda q, v, e: (q, v.half(), e), "float16, float32"),
}


@pytest.mark.parametrize("change, reason", REFUSALS.values(), ids=REFUSALS)
def test_refuses_with_the_reason(change, reason):
    inputs = _inputs((1, (2, 3), 2, 8, 4, (3, 3)))
    assert unsupported(*inputs) is None
    assert reason in unsupported(*change(*inputs))
    with pytest.raises(ConfigError, match=rf"'fused'.*{reason}"):
        local_position_output(*change(*inputs), "fused")


def test_refuses_without_triton_or_gpu(monkeypatch):
    inputs = [x.cpu() for x in _inputs((1, (2, 3), 2, 8, 4, (3, 3)))]
    with monkeypatch.context() as patch:
        patch.setattr(fused, "_kernels", lambda: SimpleNamespace(INTERPRETED=False))
        assert "not on an NVIDIA GPU" in unsupported(*inputs)
    triton = pytest.importorskip("triton")
    with monkeypatch.context() as patch:
        patch.delattr(triton.language, "gather")
        assert "too old" in unsupported(*inputs)
        patch.setitem(sys.modules, "triton", None)
        patch.setitem(sys.modules, "triton.language", None)
        assert unsupported(*inputs) == "Triton is not installed"


def test_tf32_only_where_it_was_asked_for():
    plan = fused._Plan(32, 1, 64, 32, 8, 2, 32, 1)
    inputs = _inputs((1, (2, 3), 2, 8, 4, (3, 3)))

    def precision():
        return fused._constants(inputs[0], inputs[2], plan)["PRECISION"]

    assert precision() == "ieee"
    torch.set_float32_matmul_precision("high")
    try:
        assert precision() == "tf32"
    finally:
        torch.set_float32_matmul_precision("highest")


class _Launches:
    """Stands in for the module of kernels, and notes every launch instead of making it."""

    INTERPRETED = True

    def __init__(self):
        self.made = []

    def __getattr__(self, kernel):
        return _Launcher(self.made, kernel)


class _Launcher:
    def __init__(self, made, kernel):
        self.made, self.kernel = made, kernel

    def __getitem__(self, grid):
        return lambda *args, **constants: self.made.append((self.kernel, args, constants))


def compile_kernels(capability: int, dtype: torch.dtype, v: int, channels_last: bool) -> None:
    """Compile what a 64x64 map launches, without a GPU; print each one's shared memory."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from lambda_det.layers.local import fused_kernels

    launches = _Launches()
    fused._kernels = lambda: launches
    strides = torch.channels_last if channels_last else torch.contiguous_format
    queries = torch.zeros(8, 4 * 16, 64, 64, dtype=dtype).to(memory_format=strides)
    values = torch.zeros(8, v, 64, 64, dtype=dtype).to(memory_format=strides)
    queries = queries.permute(0, 2, 3, 1).unflatten(-1, (4, 16)).requires_grad_()
    values = values.permute(0, 2, 3, 1)[..., None].requires_grad_()
    output = fused_output(queries, values, torch.zeros(16, 1, 23, 23, dtype=dtype))
    output.backward(torch.zeros_like(output))
    types = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
    for name, args, constants in launches.made:
        kernel = getattr(fused_kernels, name)
        options = {key: constants.pop(key) for key in ("num_warps", "num_stages")}
        constants["WIDEN"] = False
        signature, attributes = dict.fromkeys(constants, "constexpr"), {}
        for index, (argument, value) in enumerate(zip(kernel.arg_names, args, strict=False)):
            if isinstance(value, int) and value == 1:
                signature[argument], constants[argument] = "constexpr", 1
                continue
            signature[argument] = "i32" if isinstance(value, int) else types[value.dtype]
            if not isinstance(value, int) or value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
        signature = {argument: signature[argument] for argument in kernel.arg_names}
        source = ASTSource(kernel, signature, constants, attributes)
        built = compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        print("kernel", name, built.metadata.shared, flush=True)


# By capability, dtype, v and whether channels_last: registers of a thread, bytes that it spills and
# bytes of shared memory, of each kernel, as Triton 3.9 has it.
KERNELS = ["output_kernel", "query_kernel", "value_kernel"]
COMPILED = {
    (80, "float16", 64, False): ((190, 0, 18432), (255, 116, 32768), (255, 360, 36864)),
    (86, "float32", 64, True): ((80, 0, 24576), (167, 0, 32768), (239, 0, 16384)),
    (89, "bfloat16", 128, False): ((255, 96, 32768), (255, 780, 49152), (255, 16, 32768)),
    (90, "bfloat16", 128, True): ((207, 0, 64512), (162, 0, 99328), (236, 0, 61440)),
    (100, "bfloat16", 128, True): ((145, 0, 64560), (184, 0, 79872), (150, 0, 77856)),
    (120, "float16", 64, True): ((176, 0, 30720), (204, 0, 49152), (187, 0, 57344)),
}
# Bytes of shared memory that a program may have; others have less than the largest need here
SHARED = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}


COMPILE = """
import sys, torch, traceback, lambda_det
assert "lambda_det.layers.local.fused_kernels" not in sys.modules, "it imports Triton"
from tests.layers.test_fused import compile_kernels
capability, dtype, v, channels_last = {}
try:
    compile_kernels(capability, getattr(torch, dtype), v, channels_last)
except Exception:
    traceback.print_exc(file=sys.stdout)
"""


def compiler_output(case: tuple, cache: Path) -> str:
    """What the compiler says, in a process without Triton's interpreter."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(cache)}
    env.pop("TRITON_INTERPRET", None)
    env["TRITON_DUMP_PTXAS_LOG"] = "1"
    command = [sys.executable, "-W", "ignore", "-c", COMPILE.format(case)]
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [case if case[0] == 90 else pytest.param(case, marks=pytest.mark.release) for case in COMPILED],
    ids=lambda case: f"sm_{case[0]}-{case[1]}",
)
def test_kernels_compile_without_a_gpu(case, tmp_path):
    """The interpreter accepts much that the compiler doesn't."""
    triton = pytest.importorskip("triton", minversion="3.3")  # whose compiler is called like this
    said = compiler_output(case, tmp_path)
    is_older = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9)
    if "Traceback" in said and is_older and case[0] >= 100:
        pytest.skip(f"Triton {triton.__version__} may not know sm_{case[0]}")
    assert "Traceback" not in said, said
    kernels = re.findall(r"^kernel (\w+) (\d+)$", said, re.MULTILINE)
    assert [name for name, _ in kernels] == KERNELS
    registers = map(int, re.findall(r"Used (\d+) registers", said))
    spilled = map(int, re.findall(r"(\d+) bytes spill stores", said))
    found = list(zip(registers, spilled, (int(shared) for _, shared in kernels), strict=False))
    assert all(int(shared) <= SHARED.get(case[0], 99 * 1024) for _, shared in kernels)
    if not triton.__version__.startswith("3.9."):
        pytest.skip("the table is of Triton 3.9")
    for name, limits, numbers in zip(KERNELS, COMPILED[case], found, strict=True):
        assert all(a <= b for a, b in zip(numbers, limits, strict=True)), (name, numbers, limits)
