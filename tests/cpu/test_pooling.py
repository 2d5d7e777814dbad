"""ROIAlign: boxes are not rounded; and the linear layer of a box head as a convolution."""

import copy

import pytest
import torch
from detectron2.layers import ROIAlign
from torch import nn
from torch.nn import functional as F

from lambda_det.cpu import pooling
from lambda_det.cpu.pooling import convolve_pooled, patch_pooling
from lambda_det.detection.task import DetectionTask
from lambda_det.training.precision import Precision
from tests.native.test_native import needs_kernel
from tests.training.tiny_detector import tiny_config


@pytest.mark.parametrize("channels", [1, 16])
def test_pooling_does_not_round_boxes(channels):
    ours, plain = (ROIAlign((4, 4), 0.25, 0, aligned=True) for _ in range(2))
    patch_pooling(ours)
    ramp = torch.arange(256, dtype=torch.float32).expand(1, channels, 256, 256) % 16
    boxes = torch.tensor([[0, 601.5, 707.0, 651.5, 757.0]])
    exact = plain(ramp, boxes)
    with Precision("cpu", torch.bfloat16).autocast():
        got = ours(ramp.bfloat16(), boxes)
        rounded = plain(ramp.bfloat16(), boxes)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), exact, rtol=0.01, atol=0.01)
    assert (rounded.float() - exact).abs().max() > 0.1  # or there was nothing to fix


@needs_kernel
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_boxes_that_are_nowhere_have_zeros_and_the_layout_is_that_of_the_map(layout):
    pool = ROIAlign((3, 5), 0.25, 0, aligned=True)
    patch_pooling(pool)
    boxes = torch.tensor([[0, 1.0, 2, 30, 20]] * 3)
    boxes[1, 1:], boxes[2, 3:] = torch.nan, torch.inf  # where torchvision reads anywhere
    x = torch.rand(1, 16, 9, 9).contiguous(memory_format=layout).requires_grad_()
    y = pool(x, boxes)
    assert (y[0] > 0).all() and not y[1:].any()
    (of_x,) = torch.autograd.grad(y.sum(), x)
    assert all(z.is_contiguous(memory_format=layout) for z in (y, of_x))


@pytest.mark.parametrize("capability", ["AVX2", "AVX512"])
def test_the_layer_behind_pooled_boxes_is_the_same_as_a_convolution(capability, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(pooling, "_ROWS", 5)
    used, convolve = [], F.conv2d
    monkeypatch.setattr(F, "conv2d", lambda *args: used.append(1) or convolve(*args))
    cfg = tiny_config()
    cfg.MODEL.ROI_HEADS.NAME = "CascadeROIHeads"
    cfg.MODEL.ROI_BOX_HEAD.CLS_AGNOSTIC_BBOX_REG = True
    heads = DetectionTask(cfg).build_model().roi_heads
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


@pytest.fixture
def heads(monkeypatch):
    """Of a detector that is not accelerated, on a processor where convolutions pay."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    heads = DetectionTask(tiny_config()).build_model().roi_heads
    convolve_pooled(heads, False)
    return heads


class _Own(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 1


def test_own_layers_stay_and_others_come_back(heads):
    for on in (True, True, False):
        convolve_pooled(heads, on)
        fc1 = heads.box_head.fc1
        assert (type(fc1) is nn.Linear) == (type(heads.box_head.flatten) is nn.Flatten) == (not on)
    heads.box_head.fc1 = _Own(fc1.in_features, fc1.out_features)
    convolve_pooled(heads)
    assert type(heads.box_head.fc1) is _Own and type(heads.box_head.flatten) is nn.Flatten


@pytest.mark.parametrize("name", ["fc1", "flatten"])
@torch.no_grad()
def test_a_layer_with_a_hook_for_vectors_stays(name, heads):
    head, shapes = heads.box_head, []
    x = torch.randn(5, head.fc1.in_features).view(5, -1, *heads.box_pooler.output_size)
    expected = head(x)
    getattr(head, name).register_forward_hook(lambda module, args, y: shapes.append(y.shape))
    convolve_pooled(heads)
    torch.testing.assert_close(head(x), expected)
    assert [len(shape) for shape in shapes] == [2]


@torch.no_grad()
def test_the_layer_of_a_head_that_is_used_elsewhere_too(heads):
    layer = heads.box_head.fc1
    plain = copy.deepcopy(layer)
    convolve_pooled(heads)
    for shape in ((3,), (2, 3, 4), ()):
        x = torch.randn(*shape, layer.in_features)
        torch.testing.assert_close(layer(x), plain(x))
