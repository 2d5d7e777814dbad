"""The CPU kernel: every path through its tiles, the layouts it takes and gives, its building."""

import itertools

import pytest
import torch

from lambda_det.errors import ConfigError
from lambda_det.layers import LambdaLayer
from lambda_det.layers.local import OPERATORS, compiled, local_position_output
from lambda_det.native import has
from tests import forked

from .reference import assert_close, errors, exactly
from .test_local import NO_KERNEL, results

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
@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-2)]
)
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
        grad = torch.randn(batch, height, width, heads, v, dtype=torch.float64)
        got, want = results(inputs, "compiled", grad), results(exactly(inputs), "query_first", grad)
        assert all(x.dtype == dtype for x in got)
        found = errors(got, want)
        assert max(found.values()) < tolerance, f"{[list(x.shape) for x in inputs]}: {found}"


@needs_kernel
@pytest.mark.parametrize("heads", [1, 4])
def test_copies_of_a_layer_in_channels_last(heads, monkeypatch):
    """Where depths fill vectors: backward alone, of the values and of two gradients."""
    copied, copy = [], compiled.lay_out
    monkeypatch.setattr(compiled, "lay_out", lambda *pair: (copied.append(pair), copy(*pair)))
    layer = LambdaLayer(64, query_depth=16, heads=heads, scope=5, implementation="compiled")
    x = torch.randn(2, 64, 6, 5).to(memory_format=torch.channels_last).requires_grad_()
    y = layer.to(memory_format=torch.channels_last)(x)
    assert len(copied) == 0
    y.backward(torch.randn_like(y))
    assert len(copied) <= 3


FENCED = """
import ctypes, faulthandler, mmap, random, sys
faulthandler.enable()
import torch
from lambda_det import native
from lambda_det.layers.local import compiled, local_position_output

PAGE, libc = mmap.PAGESIZE, ctypes.CDLL(None)

def fenced(tensor, at_end):
    "The tensor in a copy of its storage that ends, or begins, at a page that nobody may touch."
    storage = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    used = storage.numel() * storage.element_size()
    room = -(-used // PAGE) * PAGE
    area = mmap.mmap(-1, room + 2 * PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(area))
    for page in (address, address + PAGE + room):
        assert libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(PAGE), 0) == 0
    offset = PAGE + (room - used if at_end else 0)
    copy = torch.frombuffer(area, dtype=tensor.dtype, count=storage.numel(), offset=offset)
    return copy.copy_(storage).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

call = compiled.call

@torch.no_grad()
def fenced_call(name, dtype, *arguments):
    pairs = [(x, fenced(x, at_end)) if isinstance(x, torch.Tensor) else (x, x) for x in arguments]
    call(name, dtype, *(copy for _, copy in pairs))
    own = {x.data_ptr() for x in inputs}  # which autograd watches, and the kernel only reads
    for tensor, copy in pairs:
        if copy is not tensor and 0 not in tensor.stride() and tensor.data_ptr() not in own:
            tensor.copy_(copy)

compiled.call = native.call = fenced_call
random.seed(0)
torch.manual_seed(0)
for at_end in (True, False):
    for _ in range(25):
        draw = random.randint
        b, y, x, h, k, v, u = (draw(1, n) for n in (2, 6, 40, 6, 18, 40, 2))
        dtype = random.choice([torch.float32, torch.float64, torch.bfloat16])
        inputs = [torch.randn(b, y, x, h, k), torch.randn(b, y, x, v, u)]
        inputs.append(torch.randn(k, u, 2 * draw(0, 4) + 1, 2 * draw(0, 12) + 1))
        inputs = [t.to(dtype).requires_grad_() for t in inputs]
        if draw(0, 1):  # a map per channel
            inputs[0] = inputs[0].permute(0, 3, 4, 1, 2).contiguous().permute(0, 3, 4, 1, 2)
        results = []
        for name in ("compiled", "query_first"):
            output = local_position_output(*inputs, name)
            loss = (output * torch.linspace(-1, 1, output.numel()).view(output.shape)).sum()
            results.append([output, *torch.autograd.grad(loss, inputs)])
        tolerance = 0.05 if dtype == torch.bfloat16 else 1e-3
        for got, want in zip(*results):
            scale = want.abs().max().item() if dtype == torch.bfloat16 else 1
            torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance * scale)
print("kept within its buffers")
"""


@pytest.mark.slow
@needs_kernel
def test_it_keeps_within_its_buffers(tmp_path):
    """Whole vectors are read and written: none may reach beyond what the tensors hold."""
    # In a process of its own, since a touch of the fence ends it
    run = forked.run(["-c", FENCED], tmp_path / "printed")
    assert run.returncode == 0, run.stdout[-2000:]
    assert "kept within" in run.stdout


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inputs_and_gradient_in_any_layout(dtype):
    """The embedding and the gradient too: F.pad keeps a channels-last layout, the kernel has one.

    With v = 16 nothing is padded, so that only .contiguous() lays the gradient out.
    """
    orders = ((0, 1, 2, 3), (1, 0, 3, 2), (3, 2, 1, 0), (1, 2, 0, 3), (2, 0, 3, 1))
    for order, of_values in itertools.product(orders, ((3, 0, 2, 1, 4), (0, 1, 3, 2, 4))):
        inputs = (
            _tensor((2, 5, 6, 3, 16), (4, 2, 0, 3, 1), dtype),
            _tensor((2, 5, 6, 16, 2), of_values, dtype),
            _tensor((16, 2, 3, 5), order, dtype),
        )
        grad = _tensor((2, 5, 6, 3, 16), (4, 3, 2, 1, 0), dtype).detach()
        got, want = results(inputs, "compiled", grad), results(inputs, "dense", grad)
        assert_close(got, want, order, rtol=1e-4, atol=1e-4)
        one = local_position_output(*inputs, "compiled").sum()  # whose gradient has strides of 0
        torch.autograd.grad(one, inputs)


@needs_kernel
def test_threads_share_nothing_on_a_larger_map():
    """Large enough for the threads to run at the same time, also where one is the default."""
    inputs = [torch.randn(1, 64, 40, 4, 16), torch.randn(1, 64, 40, 32, 2)]
    inputs = [x.requires_grad_() for x in (*inputs, torch.randn(16, 2, 9, 9))]
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, *[4] * 10):
            torch.set_num_threads(threads)
            found.append(results(inputs, "compiled"))
    finally:
        torch.set_num_threads(before)
    one, first, *others = found
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
    assert_close(one, first, rtol=1e-3, atol=1e-3)


INPUTS = [torch.ones(1, 9, 9, 1, 2), torch.ones(1, 9, 9, 2, 1), torch.ones(2, 1, 3, 3)]
CHANNELS_LAST, MAPS = (0, 1, 2, 3, 4), (0, 3, 4, 1, 2)


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("of_queries", [CHANNELS_LAST, MAPS])
@pytest.mark.parametrize("of_values", [CHANNELS_LAST, MAPS])
def test_results_are_laid_out_as_the_inputs(of_queries, of_values, dtype):
    """Output and gradient of the queries as the queries, that of the values as the values.

    A layer's own output does not show it: the sum with the content output takes that one's layout.
    """
    shapes = ((2, 5, 6, 3, 4), (2, 5, 6, 7, 2), (4, 2, 3, 5))
    orders = (of_queries, of_values, (1, 2, 0, 3))
    inputs = [_tensor(*x, dtype) for x in zip(shapes, orders, strict=True)]
    output = local_position_output(*inputs, "compiled")
    grad = _tensor(output.shape, (4, 3, 2, 1, 0), dtype).detach()
    grads = torch.autograd.grad(output, inputs, grad)
    for result, order in zip(
        (output, *grads[:2]), (of_queries, of_queries, of_values), strict=True
    ):
        assert result.permute(order).is_contiguous()
    assert grads[2].is_contiguous()
    # What torch.compile is told about shapes, dtypes and strides is what comes
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(OPERATORS["compiled"][0], tuple(inputs), test_utils=checks)
    plain = tuple(x.detach() for x in (grad, *inputs))
    torch.library.opcheck(OPERATORS["compiled"][1], plain, test_utils=checks)


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_kernel_gets_what_it_takes_and_no_more_than_it_needs(dtype, monkeypatch):
    """float16, and bfloat16 without AVX512-BF16, go to it as float32."""
    seen, call = set(), compiled.call

    def watched(name, dtype, *arguments):
        seen.update([dtype, *(x.dtype for x in arguments if isinstance(x, torch.Tensor))])
        call(name, dtype, *arguments)

    monkeypatch.setattr(compiled, "call", watched)
    inputs = [x.to(dtype).requires_grad_() for x in INPUTS]
    torch.autograd.grad(local_position_output(*inputs, "compiled").sum(), inputs)
    wide = torch.promote_types(dtype, torch.float32)
    assert seen == ({dtype, wide} if has("forward", dtype) else {torch.float32})


SIZES = {  # of queries, values, embedding
    "another batch": ((4, 5, 6, 2, 3), (1, 5, 6, 4, 1), (3, 1, 3, 3)),
    "another map": ((1, 9, 6, 2, 3), (1, 5, 6, 4, 1), (3, 1, 3, 3)),
    "another query depth": ((1, 5, 6, 2, 8), (1, 5, 6, 4, 1), (3, 1, 3, 3)),
    "another intra-depth": ((1, 5, 6, 2, 3), (1, 5, 6, 4, 2), (3, 1, 3, 3)),
    "an even scope": ((1, 5, 6, 2, 3), (1, 5, 6, 4, 1), (3, 1, 3, 4)),
    "no columns": ((1, 5, 0, 2, 3), (1, 5, 0, 4, 1), (3, 1, 3, 3)),
    "no heads": ((1, 5, 6, 0, 3), (1, 5, 6, 4, 1), (3, 1, 3, 3)),
    "no value depth": ((1, 5, 6, 2, 3), (1, 5, 6, 0, 1), (3, 1, 3, 3)),
}


@needs_kernel
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_sizes_that_do_not_fit_are_refused(sizes, monkeypatch):
    """Rather than read from beyond the tensors."""
    monkeypatch.setattr(compiled, "call", lambda *_, **__: pytest.fail("the kernel was called"))
    with pytest.raises(ValueError, match="embedding"):
        local_position_output(*(torch.zeros(size) for size in sizes), "compiled")


def test_another_device_is_named():
    inputs = [torch.zeros(1, 3, 3, 1, 2), torch.zeros(1, 3, 3, 2, 1), torch.zeros(2, 1, 3, 3)]
    with pytest.raises(ConfigError, match=r"'compiled'.*CPU.*meta"):
        local_position_output(*(x.to("meta") for x in inputs), "compiled")
