"""ROIAlign: boxes are not rounded, and the kernel in C++ computes what torchvision's does."""

import copy

import pytest
import torch
from detectron2.layers import ROIAlign
from torch import nn
from torch.nn import functional as F

from lambda_det import native
from lambda_det.cpu import pooling
from lambda_det.cpu.pooling import convolve_pooled, patch_pooling
from lambda_det.detection.model import build_model
from lambda_det.training.precision import Precision
from tests.training.tiny_detector import tiny_config

needs_kernel = pytest.mark.skipif(bool(native.missing()), reason=str(native.missing()))


@pytest.mark.parametrize("channels", [1, 16])
def test_pooling_does_not_round_boxes(channels):
    model = nn.ModuleDict({"pooler": nn.ModuleList([ROIAlign((4, 4), 0.25, 0, aligned=True)])})
    plain = model["pooler"][0]
    patch_pooling(model, in_float32=True)
    ramp = torch.arange(256, dtype=torch.float32).expand(1, channels, 256, 256) % 16
    boxes = torch.tensor([[0, 601.5, 707.0, 651.5, 757.0]])
    exact = plain(ramp, boxes)
    with Precision("cpu", torch.bfloat16).autocast():
        got = model["pooler"][0](ramp.bfloat16(), boxes)
        rounded = plain(ramp.bfloat16(), boxes)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), exact, rtol=0.01, atol=0.01)
    assert (rounded.float() - exact).abs().max() > 0.1  # or there was nothing to fix


def _both(**options):
    """Our pooler and torchvision's."""
    model = nn.ModuleDict({"pooler": ROIAlign((3, 5), 0.25, **options)})
    plain = model["pooler"]
    patch_pooling(model)
    return model["pooler"], plain


def _pooled(pooler, x, boxes, grad):
    x = x.detach().requires_grad_()
    y = pooler(x, boxes)
    return y.detach(), *torch.autograd.grad(y, x, grad)


def _boxes(count, batch):
    """Some reach beyond the map, some lie on its positions, one is empty and one is nowhere."""
    corners = torch.rand(count, 2, 2) * torch.tensor([220.0, 180.0]) - 25
    corners[: count // 3] = corners[: count // 3].round()
    corners[0, 1] = corners[0, 0]
    corners[1] = torch.nan
    image = torch.randint(batch, (count, 1)).float()
    return torch.cat([image, corners.amin(1), corners.amax(1)], dim=1)


@pytest.fixture
def calls(monkeypatch):
    """The names of the kernels that were run, each amid numbers that must not be touched."""
    names, call = [], pooling.call

    def fenced(name, dtype, sizes, *tensors):
        fences = [torch.full((x.numel() + 2048,), 99, dtype=x.dtype) for x in tensors]
        inside = [f[1024:-1024].view(x.shape) for f, x in zip(fences, tensors, strict=True)]
        for x, y in zip(tensors, inside, strict=True):
            y.copy_(x)
        call(name, dtype, sizes, *inside)
        for x, y, fence in zip(tensors, inside, fences, strict=True):
            x.copy_(y)
            assert (fence[:1024] == 99).all() and (fence[-1024:] == 99).all()
        names.append(name)

    monkeypatch.setattr(pooling, "call", fenced)
    return names


@needs_kernel
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("options", [(0, True), (0, False), (2, True)])
@pytest.mark.parametrize(("batch", "channels"), [(1, 16), (3, 80)])
def test_the_kernel_equals_torchvisions(batch, channels, options, layout, threads, calls):
    ours, plain = _both(sampling_ratio=options[0], aligned=options[1])
    x = torch.randn(batch, channels, 30, 41, dtype=torch.float64).contiguous(memory_format=layout)
    boxes, grad = _boxes(40, batch), torch.randn(40, channels, 3, 5, dtype=torch.float64)
    known = boxes.isfinite().all(dim=1)  # torchvision reads anywhere for NaN
    expected = _pooled(plain, x, boxes[known], grad[known])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        output, of_x = _pooled(ours, x, boxes, grad)
        half = _pooled(ours, x.float(), boxes, grad.float())
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(output[known], expected[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(of_x, expected[1], rtol=1e-12, atol=1e-12)
    assert output.is_contiguous(memory_format=layout) and of_x.is_contiguous(memory_format=layout)
    assert (output[~known] == 0).all() and calls == ["pool", "pool_gradient"] * 2
    # In float32 the error is at most twice that of torchvision's
    single = _pooled(plain, x.float(), boxes[known], grad[known].float())
    for got, other, true in zip((half[0][known], half[1]), single, expected, strict=True):
        assert (got - true).norm() <= 2 * (other - true).norm()


@needs_kernel
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_its_result_can_be_changed_in_place(layout):
    ours, plain = _both(sampling_ratio=0, aligned=True)
    x, boxes = torch.randn(1, 16, 9, 9).contiguous(memory_format=layout), _boxes(4, 1)[2:]
    grad = torch.randn(2, 16, 3, 5)
    got = _pooled(lambda *inputs: ours(*inputs).relu_(), x, boxes, grad)
    expected = _pooled(lambda *inputs: plain(*inputs).relu_(), x, boxes, grad)
    torch.testing.assert_close(got, expected)


@needs_kernel
def test_boxes_in_any_layout_and_without_end():
    ours, plain = _both(sampling_ratio=0, aligned=True)
    x, boxes = torch.randn(1, 16, 9, 9), _boxes(9, 1)[2:]
    torch.testing.assert_close(ours(x, boxes.T.contiguous().T), plain(x, boxes))
    boxes[:, 3:] = torch.inf
    assert (ours(x, boxes) == 0).all()


@needs_kernel
def test_wrong_inputs_are_torchvisions(calls):
    ours, _ = _both(sampling_ratio=0, aligned=True)
    x, boxes = torch.randn(1, 16, 9, 9), _boxes(4, 1)[2:]
    for inputs in (x, boxes[:, 1:]), (x[0], boxes):
        with pytest.raises((AssertionError, RuntimeError, IndexError)):
            ours(*inputs)
    assert ours(x.to("meta"), boxes.to("meta")).is_meta and not calls


@needs_kernel
def test_no_boxes_and_no_gradients(calls):
    ours, plain = _both(sampling_ratio=0, aligned=True)
    x, boxes = torch.randn(1, 16, 9, 9), _boxes(4, 1)[2:]
    assert ours(x, boxes[:0]).shape == (0, 16, 3, 5)
    with torch.inference_mode():
        torch.testing.assert_close(ours(x, boxes), plain(x, boxes))
    assert calls == ["pool"] * 2


@pytest.mark.parametrize("reason", [None, "there is no compiler"])
def test_otherwise_it_is_torchvisions(calls, reason, monkeypatch):
    monkeypatch.setattr(pooling, "missing", lambda: reason)
    ours, plain = _both(sampling_ratio=0, aligned=True)
    x, boxes = torch.randn(1, 16 if reason else 7, 9, 9), _boxes(4, 1)[2:]
    assert torch.equal(ours(x, boxes), plain(x, boxes)) and not calls


@pytest.mark.parametrize("capability", ["AVX2", "AVX512"])
def test_the_layer_behind_pooled_boxes_is_the_same_as_a_convolution(capability, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(pooling, "_ROWS", 5)
    used, convolve = [], F.conv2d
    monkeypatch.setattr(F, "conv2d", lambda *args: used.append(1) or convolve(*args))
    cfg = tiny_config()
    cfg.MODEL.ROI_HEADS.NAME = "CascadeROIHeads"
    cfg.MODEL.ROI_BOX_HEAD.CLS_AGNOSTIC_BBOX_REG = True
    heads = build_model(cfg).roi_heads
    convolve_pooled(heads, False)  # which build_model has done
    ours = copy.deepcopy(heads)
    convolve_pooled(ours)
    x = torch.randn(5, cfg.MODEL.FPN.OUT_CHANNELS, *heads.box_pooler.output_size)
    for head, plain in zip(ours.box_head, heads.box_head, strict=True):
        traced = torch.jit.trace(head, x, check_trace=False)
        assert "convolution" not in str(traced.inlined_graph)  # it may run on another processor
        used.clear()
        for maps in (x, x.contiguous(memory_format=torch.channels_last), x[:0]):
            for found in (head(maps), traced(maps)):
                torch.testing.assert_close(found, plain(maps), rtol=1e-4, atol=1e-5)
        assert len(used) == (capability == "AVX512") * 2
        got, wanted = (
            torch.autograd.grad(layer(x).square().sum(), layer.fc1.weight)
            for layer in (head, plain)
        )
        torch.testing.assert_close(got[0], wanted[0], rtol=1e-4, atol=1e-5)


class _Own(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 1


def test_own_layers_stay_and_others_come_back(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    heads = build_model(tiny_config()).roi_heads
    for on in (True, True, False):
        convolve_pooled(heads, on)
        fc1 = heads.box_head.fc1
        assert (type(fc1) is nn.Linear) == (type(heads.box_head.flatten) is nn.Flatten) == (not on)
    heads.box_head.fc1 = _Own(fc1.in_features, fc1.out_features)
    convolve_pooled(heads)
    assert type(heads.box_head.fc1) is _Own and type(heads.box_head.flatten) is nn.Flatten


@pytest.mark.parametrize("name", ["fc1", "flatten"])
@torch.no_grad()
def test_a_layer_with_a_hook_for_vectors_stays(name, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    heads = build_model(tiny_config()).roi_heads
    convolve_pooled(heads, False)
    head = heads.box_head
    x = torch.randn(5, head.fc1.in_features).view(5, -1, *heads.box_pooler.output_size)
    expected = head(x)
    shapes = []
    getattr(head, name).register_forward_hook(lambda module, args, y: shapes.append(y.shape))
    convolve_pooled(heads)
    torch.testing.assert_close(head(x), expected)
    assert [len(shape) for shape in shapes] == [2]


@torch.no_grad()
def test_the_layer_of_a_head_that_is_used_elsewhere_too(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    heads = build_model(tiny_config()).roi_heads
    convolve_pooled(heads)
    layer = heads.box_head.fc1
    plain = nn.Linear(layer.in_features, layer.out_features)
    plain.load_state_dict(layer.state_dict())
    for shape in ((3,), (2, 3), (2, 3, 4), ()):
        x = torch.randn(*shape, layer.in_features)
        torch.testing.assert_close(layer(x), plain(x))
