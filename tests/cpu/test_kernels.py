"""The kernels in C++ against PyTorch: the position output, ROIAlign, Winograd's convolution."""

import copy
import ctypes
import faulthandler
import mmap
import random
import sys
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from detectron2.layers import ROIAlign
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from lambda_det import native
from lambda_det.cpu import pooling, winograd
from lambda_det.layers.local import compiled, local_position_output
from tests import forked
from tests.layers.reference import exactly, laid_out, with_gradients
from tests.native.test_native import needs_kernel

pytestmark = needs_kernel
MODULES = compiled, pooling, winograd  # each calls one of them
LAST = torch.channels_last
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}


def _draw(low, high):
    return random.randint(low, high)


def _tensor(shape, dtype):
    """Random numbers whose memory has the channels last, or first, or the axes in any order."""
    axes = [*range(len(shape))]
    maps = [0, *range(3, len(shape)), 1, 2] if len(shape) == 5 else [0, 2, 3, 1]
    return laid_out(shape, random.choice([axes, maps, random.sample(axes, len(axes))]), dtype)


def position_output(dtype):
    """Sizes beyond a tile, and every remainder of the blocks of rows and of vectors."""
    place = _draw(1, 2), _draw(1, 20), _draw(1, 40)
    heads, k, v, u = _draw(1, 6), _draw(1, 18), _draw(1, 40), _draw(1, 2)
    shapes = (*place, heads, k), (*place, v, u), (k, u, 2 * _draw(0, 12) + 1, 2 * _draw(0, 12) + 1)
    forms = (partial(local_position_output, implementation=x) for x in ("compiled", "query_first"))
    return *forms, [_tensor(shape, dtype) for shape in shapes]


def _poolers(sampling=0, aligned=True):
    """Ours and Detectron2's."""
    ours, plain = (ROIAlign((3, 5), 0.25, sampling, aligned) for _ in range(2))
    pooling.patch_pooling(ours)
    return ours, plain


def _boxes(count, batch, dtype):
    """Some reach beyond the map, some lie on its positions, and one is empty."""
    corners = torch.rand(count, 2, 2) * torch.tensor([220.0, 180.0]) - 25
    corners[: count // 3] = corners[: count // 3].round()
    corners[:1, 1] = corners[:1, 0]
    image = torch.randint(batch, (count, 1)).float()
    boxes = torch.cat([image, corners.amin(1), corners.amax(1)], dim=1).to(dtype)
    return boxes.T.contiguous().T  # as code of others may lay them out


def roi_align(dtype):
    batch, channels = _draw(1, 3), 16 * _draw(1, 5)
    boxes = _boxes(_draw(0, 40), batch, dtype)
    x = _tensor((batch, channels, _draw(1, 30), _draw(1, 41)), dtype)
    ours, plain = _poolers(*random.choice([(0, True), (0, False), (2, True)]))
    # In one dtype: the number of points in a box jumps with the last digit of a side. The results
    # are changed in place
    return *(lambda x, pool=pool: pool(x.to(dtype), boxes).neg_() for pool in (ours, plain)), [x]


def convolution(dtype):
    """Maps smaller than a tile, every remainder of tiles, vectors and panels; PyTorch sums over few
    channels, of the map or of its gradient.
    """
    channels, out = 16 * _draw(1, 6), 16 * _draw(1, 6)
    shapes = (_draw(1, 3), channels, _draw(1, 14), _draw(1, 14)), (out, channels, 3, 3)
    inputs = [*(_tensor(shape, dtype) for shape in shapes), torch.randn(out, dtype=dtype)]
    plain = partial(F.conv2d, padding=1)
    if random.random() < 0.5:
        return partial(winograd.winograd_conv2d, relu=True), lambda *x: plain(*x).relu(), inputs
    forms = winograd.winograd_conv2d, plain  # of which the result is changed in place
    return *(lambda *x, form=form: form(*x).neg_() for form in forms), inputs


KERNELS = {
    position_output: tuple(TOLERANCES),
    roi_align: (torch.float64, torch.float32),
    convolution: (torch.float64, torch.float32),
}
each_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)


def check(kernel, dtype):
    """For one draw of sizes, layouts and threads, and a gradient that may be mostly zeros."""
    ours, plain, inputs = kernel(dtype)
    like = plain(*exactly(inputs))
    grad = _tensor(like.shape, dtype) * (torch.rand(like[:, :1].shape) < random.choice([0.2, 1]))
    before = torch.get_num_threads()
    torch.set_num_threads(random.choice([1, 3]))
    try:
        got = with_gradients(ours, [x.requires_grad_() for x in inputs], grad)
    finally:
        torch.set_num_threads(before)
    for a, b in zip(got, with_gradients(plain, exactly(inputs), grad.double()), strict=True):
        assert (a.shape, a.dtype) == (b.shape, dtype)
        assert (a - b).norm() <= TOLERANCES[dtype] * b.norm(), [x.shape for x in inputs]


@pytest.fixture
def some_sums(monkeypatch):
    """Of few channels are PyTorch's; so that the sizes of a test can be small."""
    monkeypatch.setattr(winograd, "_LEAST", 48)


@pytest.mark.usefixtures("some_sums")
@pytest.mark.parametrize(
    ("kernel", "dtype"), [(kernel, dtype) for kernel in KERNELS for dtype in KERNELS[kernel]]
)
def test_equals_pytorch(kernel, dtype):
    for _ in range(12):
        check(kernel, dtype)


@each_kernel
@pytest.mark.usefixtures("some_sums")
def test_threads_share_nothing(kernel, monkeypatch):
    """On maps large enough for the threads to run at the same time."""
    monkeypatch.setattr(sys.modules[__name__], "_draw", lambda low, high: high)
    ours, _, inputs = kernel(torch.float32)
    inputs = [x.requires_grad_() for x in inputs]
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, *[4] * 5):
            torch.set_num_threads(threads)
            found.append(with_gradients(ours, inputs))
    finally:
        torch.set_num_threads(before)
    one, first, *others = found
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
    for a, b in zip(one, first, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def _fenced(tensor, at_end):
    """The tensor in a copy of its storage that ends, or begins, at a page nobody may touch."""
    storage = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    used, page = storage.numel() * storage.element_size(), mmap.PAGESIZE
    room = -(-used // page) * page
    area = mmap.mmap(-1, room + 2 * page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(area))
    for fence in (address, address + page + room):
        assert not ctypes.CDLL(None).mprotect(ctypes.c_void_p(fence), ctypes.c_size_t(page), 0)
    offset = page + (room - used if at_end else 0)
    copied = torch.frombuffer(area, dtype=tensor.dtype, count=storage.numel(), offset=offset)
    return copied.copy_(storage).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def stay_within_their_buffers():
    """Each kernel's argument lies between pages of which a touch ends the process."""
    faulthandler.enable()
    call = native.call

    @torch.no_grad()
    def fenced_call(name, dtype, *arguments):
        at_end = random.random() < 0.5
        tensors = [x for x in arguments if isinstance(x, torch.Tensor) and x.numel()]
        copies = {id(x): _fenced(x, at_end) for x in tensors}
        call(name, dtype, *(copies.get(id(x), x) for x in arguments))
        for x in tensors:
            if not torch.equal(x, copies[id(x)]):  # others are inputs, which autograd watches
                x.copy_(copies[id(x)])

    for module in (native, *MODULES):
        module.call = fenced_call
    winograd._LEAST = 0
    random.seed(0)
    torch.manual_seed(0)
    for kernel, dtypes in KERNELS.items():
        for _ in range(50):
            check(kernel, random.choice(dtypes))
    print("They stayed within their buffers")


@pytest.mark.slow
def test_buffers(tmp_path):
    """Whole vectors are read and written: none may reach beyond what the tensors hold."""
    program = f"import {__name__} as tests; tests.stay_within_their_buffers()"
    run = forked.run(["-c", program], tmp_path / "printed")
    assert run.returncode == 0 and "stayed" in run.stdout, run.stdout[-2000:]


@pytest.fixture
def calls(monkeypatch):
    """The names of the kernels that were run, in their order."""
    names = []
    for module in MODULES:
        monkeypatch.setattr(module, "call", lambda *x: names.append(x[0]) or native.call(*x))
    return names


def pooled():
    return *_poolers(), torch.randn(1, 16, 9, 9), _boxes(4, 1, torch.float32)


def convolved():
    plain = nn.Sequential(nn.Conv2d(128, 128, 3, padding=1)).to(memory_format=LAST)
    fast = copy.deepcopy(plain)
    winograd.use_winograd(fast)
    return fast, plain, torch.randn(1, 128, 24, 24).to(memory_format=LAST)


@pytest.mark.parametrize("why", ["traced", "no kernels", "meta", "fake"])
@pytest.mark.parametrize("make", [pooled, convolved])
@torch.no_grad()
def test_elsewhere_it_is_pytorchs(make, why, calls, monkeypatch):
    fast, plain, *inputs = make()
    expected = plain(*inputs)
    torch.testing.assert_close(fast(*inputs), expected, rtol=1e-3, atol=1e-3)
    assert calls
    calls.clear()
    if why == "traced":
        fast = torch.jit.trace(fast, inputs, check_trace=False)
    elif why == "no kernels":
        for module in (pooling, winograd):
            monkeypatch.setattr(module, "missing", lambda: "no compiler")
    elif why == "meta":
        fast, *inputs = (x.to("meta") for x in (fast, *inputs))
    with FakeTensorMode(allow_non_fake_inputs=True) if why == "fake" else nullcontext() as fake:
        got = fast(*(fake.from_tensor(x) if fake else x for x in inputs))
    assert got.shape == expected.shape and not calls
    assert fake or got.is_meta or torch.equal(got, expected)


def test_transforms_of_torch_func_are_pytorchs(calls):
    """The gradient for each image, of layers that are taken without the transform."""
    model, plain, image = convolved()
    images = image.expand(3, 1, *image.shape[1:])
    model(image)
    assert calls
    calls.clear()

    def gradients(net):
        loss = lambda weights, x: functional_call(net, weights, x).square().mean()  # noqa: E731
        return vmap(grad(loss), (None, 0))(dict(net.named_parameters()), images)

    torch.testing.assert_close(gradients(model), gradients(plain))
    assert not calls


POSITION = (4, 5, 6, 2, 3), (4, 5, 6, 4, 1), (3, 1, 3, 3)  # queries, values, embedding
MAPS, WEIGHT, BOXES = (1, 128, 24, 24), (128, 128, 3, 3), (4, 5)
WRONG = {  # shapes of which a kernel would read beyond the tensors
    "another map": ((4, 9, 6, 2, 3), *POSITION[1:]),
    "another intra-depth": (*POSITION[:1], (4, 5, 6, 4, 2), *POSITION[2:]),
    "an even scope": (*POSITION[:2], (3, 1, 3, 4)),
    "no heads": ((4, 5, 6, 0, 3), *POSITION[1:]),
    "boxes of four numbers": ((1, 16, 9, 9), (4, 4)),
    "a map without a batch": ((16, 9, 9), BOXES),
    "other channels": ((1, 144, 24, 24), WEIGHT, (128,)),
    "another bias": (MAPS, WEIGHT, (16,)),
}


@pytest.mark.parametrize("shapes", WRONG.values(), ids=WRONG)
def test_wrong_inputs_are_refused(shapes, calls):
    first, *others = (torch.zeros(shape) for shape in shapes)
    if len(shapes) == 2:
        function = _poolers()[0]
    elif len(shapes[1]) == 5:
        function = partial(local_position_output, implementation="compiled")
    else:
        function, *_ = convolved()
        function[0].bias, others = nn.Parameter(others[1]), []
    with pytest.raises((AssertionError, RuntimeError, IndexError, ValueError)):
        function(first, *others)
    assert not calls
