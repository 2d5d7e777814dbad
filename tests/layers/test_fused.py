"""The position output by the GPU's kernels, from the choice of a form to the launch.

There is no GPU: the driver runs the kernels in an emulator, on tensors of the CPU.
"""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from lambda_det import doctor
from lambda_det.errors import ConfigError, UserError
from lambda_det.layers.local import OPERATORS, choose, fused, local_position_output
from lambda_det.layers.local.lambda_first import dense_output
from tests.native import emulated
from tests.native.emulated import needs_emulator

from .reference import errors, exactly, with_gradients

fused_output, fused_gradients = OPERATORS["fused"]
# as shares of the norms; more heads than four are summed and rounded once more
TOLERANCES = {torch.bfloat16: 3.5e-3, torch.float16: 4.5e-4}

# batch, map, heads, k, v, scope
SIZES = {
    "the kernels' own": (1, (3, 9), 4, 16, 64, (23, 23)),
    "one position": (1, (1, 1), 1, 8, 4, (1, 1)),
    "fewer heads, smaller depths and scope": (2, (3, 4), 3, 8, 20, (9, 7)),
    "more heads": (1, (2, 9), 6, 16, 40, (3, 23)),
    "two slices of values": (1, (9, 3), 4, 5, 96, (13, 5)),
}


@pytest.fixture
def noting(monkeypatch, tmp_path):
    """A GPU that notes launches and computes nothing; its kernels need no proof."""
    monkeypatch.setattr(fused, "_wrong", lambda *about: None)
    with emulated.pretend(monkeypatch, tmp_path, is_emulated=False) as machine:
        yield machine


@pytest.fixture
def pretended(noting):
    """A GPU that computes in an emulator."""
    noting.is_emulated = True


def _inputs(size, dtype=torch.bfloat16):
    batch, (height, width), heads, k, v, scope = size
    shapes = (batch, height, width, heads, k), (batch, height, width, v, 1), (k, 1, *scope)
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def _check(inputs):
    """Compare with float64, output and gradients, as shares of their norms."""
    exact = exactly(inputs)
    expected = dense_output(*exact)
    grad = torch.randn_like(expected).to(inputs[0].dtype)
    got = with_gradients(fused_output, inputs, grad)
    want = with_gradients(dense_output, exact, grad.double())
    output = got[0] if inputs[0].stride(-1) == 1 else got[0].permute(0, 3, 4, 1, 2)
    assert output.is_contiguous()  # channels last, or a map per channel, as the queries
    assert [x.dtype for x in got] == [x.dtype for x in (inputs[0], *inputs)]
    found = errors(got, want)
    assert max(found.values()) <= TOLERANCES[inputs[0].dtype], found


@pytest.mark.slow
@needs_emulator
@pytest.mark.parametrize("name", SIZES)
def test_equals_float64(name, pretended):
    """In bfloat16; two slices in float16, with an embedding of the parameters' own dtype."""
    is_half = "slices" in name
    inputs = _inputs(SIZES[name], torch.float16 if is_half else torch.bfloat16)
    _check([*inputs[:2], inputs[2].detach().float().requires_grad_() if is_half else inputs[2]])


@pytest.mark.slow
@needs_emulator
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_strides_of_the_layer(memory_format, pretended):
    """Queries and values as the layer splits them, and a cropped embedding."""
    queries = torch.randn(2, 4 * 8, 4, 7).bfloat16().to(memory_format=memory_format)
    values = torch.randn(2, 2 * 64, 4, 7).bfloat16().to(memory_format=memory_format)
    queries = queries.permute(0, 2, 3, 1).unflatten(-1, (4, 8))
    values = values.permute(0, 2, 3, 1).unflatten(-1, (2, 64, 1))[:, :, :, 1]
    embedding = torch.randn(8, 1, 9, 9).bfloat16()[..., 2:7, 1:8]
    _check([x.requires_grad_() for x in (queries, values, embedding)])


@pytest.mark.slow
@needs_emulator
def test_gradient_of_any_strides_and_torch_compile(pretended):
    inputs = _inputs((1, (3, 5), 4, 16, 64, (3, 3)))
    ones = torch.ones((), dtype=torch.bfloat16).expand(1, 3, 5, 4, 64)
    double = lambda q, v, e: local_position_output(q, v, e, "fused") * 2  # noqa: E731
    whole = torch.compile(double, backend="aot_eager", fullgraph=True)
    plain = lambda *x: dense_output(*x) * 2  # noqa: E731
    want = with_gradients(plain, exactly(inputs), ones.double())
    for function in (double, whole):
        found = errors(with_gradients(function, inputs, ones), want)
        assert max(found.values()) <= TOLERANCES[torch.bfloat16], found


@pytest.mark.slow
@needs_emulator
def test_operators_are_well_formed(pretended):
    """PyTorch's own check of schemas, shapes without data, and registration of the gradient."""
    inputs = _inputs((2, (2, 3), 4, 8, 64, (3, 3)))
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(fused_output, inputs, test_utils=checks)
    plain = [torch.randn(2, 2, 3, 4, 64).bfloat16(), *(x.detach() for x in inputs)]
    torch.library.opcheck(fused_gradients, plain, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4)])
def test_nothing_in_nothing_out(shape, noting):
    queries, values = torch.randn(*shape, 2, 8), torch.randn(*shape, 4, 1)
    inputs = [x.bfloat16().requires_grad_() for x in (queries, values, torch.randn(8, 1, 3, 3))]
    output = local_position_output(*inputs, "fused")
    assert output.shape == (*shape, 2, 4)
    for x, grad in zip(inputs, torch.autograd.grad(output.sum(), inputs), strict=True):
        assert grad.shape == x.shape and not grad.any()
    assert not noting.launches


def test_inference_loads_nothing_of_the_backward_pass(noting):
    """At c4 of 1024 pixels: in place, with the forms that FORMS has for it."""
    noting.multiprocessors = 132
    inputs = _inputs((2, (64, 64), 4, 16, 64, (23, 23)))
    inputs[2] = inputs[2].detach().float().requires_grad_()  # as a parameter is
    with torch.no_grad():
        output = local_position_output(*inputs, "fused")
    assert len(noting.compiled) == 1
    (launch,) = noting.launches
    assert launch.values[:4] == tuple(x.data_ptr() for x in (*inputs, output))
    local_position_output(*inputs, "fused")
    forms = sorted("_".join(name.split("_")[1:3]) for name in noting.compiled)
    assert forms == ["embedding_a", "output_a", "queries_a", "values_c"]


REFUSALS = {
    "intra-depth": (
        lambda q, v, e: (q, v.repeat(1, 1, 1, 1, 2), e.repeat(1, 2, 1, 1)),
        "depth is 2",
    ),
    "query depth": (lambda q, v, e: (q.repeat(1, 1, 1, 1, 2), v, e.repeat(2, 1, 1, 1)), "is 32"),
    "another query depth": (lambda q, v, e: (q, v, e[:8]), "do not belong together"),
    "another map": (lambda q, v, e: (q[:, :5], v, e), "do not belong together"),
    "scope": (lambda q, v, e: (q, v, torch.zeros(16, 1, 3, 25).bfloat16()), "3x25"),
    "float32": (lambda q, v, e: (q.float(), v.float(), e.float()), "float32"),
    "mixed dtypes": (lambda q, v, e: (q, v.half(), e), "bfloat16, float16"),
}


@pytest.mark.parametrize("change, reason", REFUSALS.values(), ids=REFUSALS)
def test_refuses_with_the_reason(change, reason, noting):
    inputs = change(*_inputs((1, (9, 13), 4, 16, 64, (3, 3))))
    assert reason in fused.unsupported(*inputs)
    with pytest.raises(ConfigError, match=rf"'fused'.*{reason}"):
        local_position_output(*inputs, "fused")
    assert choose(*inputs) == "query_first"
    with pytest.raises(ValueError, match=reason):
        fused_output(*inputs)
    assert not noting.compiled


def test_refuses_the_cpu():
    assert "on cpu" in fused.unsupported(*_inputs((1, (2, 3), 4, 16, 64, (3, 3))))


def test_tensors_without_data_load_nothing(noting):
    with FakeTensorMode() as fake:
        inputs = map(fake.from_tensor, _inputs(SIZES["the kernels' own"]))
        assert choose(*inputs) == "fused"
    assert not noting.compiled


# heads, map, scope and whether filling up with zeros pays
PAYS = {
    "the paper's": (4, (64, 64), (23, 23), True),
    "one head": (1, (32, 32), (23, 23), True),
    "one head, a smaller scope": (1, (32, 32), (9, 9), False),
    "a small scope": (4, (32, 32), (5, 5), False),
    "one position": (4, (1, 1), (1, 1), False),
}


@pytest.mark.parametrize("name", PAYS)
def test_auto_takes_them_where_enough_of_their_work_is_left(name, noting):
    heads, size, scope, is_better = PAYS[name]
    inputs = _inputs((1, size, heads, 16, 64, scope))
    assert choose(*inputs) == ("fused" if is_better else "query_first")
    assert fused.unsupported(*inputs) is None


REFUSED = emulated._Status.CUDA_ERROR_INVALID_VALUE

# What is set of the machine, of its driver or of its NVRTC; and what is said
NOT_HERE = {
    "no bindings": ({}, "cuda.bindings"),
    "other bindings": ({"nvrtc.nvrtcGetCUBIN": None}, "nvrtcGetCUBIN"),
    "older bindings": ({"nvrtc.nvrtcGetSupportedArchs": None}, "nvrtcGetSupportedArchs"),
    "no driver": ({"driver.cuInit": lambda flags: 1 / 0}, "driver"),
    "an old driver": ({"driver.cuModuleLoadData": lambda code: (REFUSED, None)}, "too old"),
    "an old GPU": ({"capability": (7, 5)}, r"7\.5"),
    "a new GPU": ({"capability": (13, 0)}, r"13\.0"),
    "little memory": ({"shared_bytes": 64 * 1024}, "cuFuncSetAttribute says"),
    "of AMD": ({}, "no NVIDIA GPU"),
    "not compiled": ({}, "NVRTC"),
    "wrong numbers": ({}, "an error of 0.3"),
}


def _spoil(machine, name, monkeypatch):
    """Let a machine lack something."""
    for path, value in NOT_HERE[name][0].items():
        owner, _, last = path.rpartition(".")
        owner = getattr(machine, owner) if owner else machine
        if value is None:
            delattr(owner, last)
        else:
            setattr(owner, last, value)
    if name == "no bindings":
        monkeypatch.setitem(emulated.sys.modules, "cuda.bindings.nvrtc", None)
    elif name == "of AMD":
        monkeypatch.setattr(torch.version, "hip", "6.4")
    elif name == "not compiled":
        text, nvrtc = b"such an old compiler", machine.nvrtc
        nvrtc.nvrtcCompileProgram = lambda *about: (REFUSED,)
        nvrtc.nvrtcGetProgramLogSize = lambda program: (emulated._Status.SUCCESS, len(text))
        nvrtc.nvrtcGetProgramLog = lambda program, buffer: emulated.fill(buffer, text)
    elif name == "wrong numbers":
        monkeypatch.setattr(fused, "_wrong", lambda *about: "an error of 0.3")


@pytest.mark.parametrize("name", NOT_HERE)
def test_what_lacks_here_is_said_once_and_plain_pytorch_is_used(
    name, noting, monkeypatch, caplog, tmp_path
):
    _spoil(noting, name, monkeypatch)
    inputs = _inputs((1, (9, 13), 4, 16, 64, (23, 23)))
    expected = local_position_output(*inputs, "query_first")
    for _ in range(2):
        assert torch.equal(local_position_output(*inputs), expected)
    assert caplog.text.count("plain PyTorch") == 1
    assert "such an old compiler" in caplog.text or name != "not compiled"
    with pytest.raises(ConfigError, match=rf"'fused'.*{NOT_HERE[name][1]}"):
        local_position_output(*inputs, "fused")
    assert not noting.launches and not [*tmp_path.iterdir()]
    if name == "wrong numbers":  # which torch.compile learns after it has asked
        forms = fused_output, OPERATORS["query_first"][0]
        for a, b in zip(*(with_gradients(form, inputs) for form in forms), strict=True):
            assert torch.equal(a, b)


def test_doctor_tries_the_kernels_on_each_gpu(noting, monkeypatch):
    checks = {check.name: check for check in doctor.CHECKS}
    check = checks["kernels of the GPU"]
    assert check.probe() == "no GPU" or torch.cuda.is_available()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert check.probe() == "compute lambda layers"
    emulated.forget()
    noting.capability = (7, 5)
    with pytest.raises(UserError, match=r"cuda:0.*7\.5"):
        check.probe()
