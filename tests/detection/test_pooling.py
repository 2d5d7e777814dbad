"""ROIAlign: boxes are not rounded, and several threads give the bits of one."""

from __future__ import annotations

import threading

import pytest
import torch
import torchvision
from detectron2.layers import ROIAlign
from torch import nn

from lambda_det.detection import pooling
from lambda_det.detection.pooling import patch_pooling
from lambda_det.training.precision import Precision


def test_pooling_does_not_round_boxes():
    model = nn.ModuleDict({"pooler": nn.ModuleList([ROIAlign((4, 4), 0.25, 0, aligned=True)])})
    plain = model["pooler"][0]
    patch_pooling(model, in_float32=True)
    ramp = torch.arange(256, dtype=torch.float32).expand(1, 1, 256, 256) % 16
    boxes = torch.tensor([[0, 601.5, 707.0, 651.5, 757.0]])
    exact = plain(ramp, boxes)
    with Precision("cpu", torch.bfloat16).autocast():
        got = model["pooler"][0](ramp.bfloat16(), boxes)
        rounded = plain(ramp.bfloat16(), boxes)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), exact, rtol=0.01, atol=0.01)
    assert (rounded.float() - exact).abs().max() > 0.1  # or there was nothing to mend


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def _pooled(pooler, x, boxes, grad):
    x = x.clone().requires_grad_()
    y = pooler(x, boxes)
    y.backward(grad)
    return y, x.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("batch", "channels"), [(1, 2), (1, 8), (3, 7)])
def test_threads_change_no_bit(dtype, layout, batch, channels, three_threads, monkeypatch):
    used, passes, in_threads = set(), [], pooling._in_threads
    monkeypatch.setattr(
        pooling, "_in_threads", lambda *given: passes.append(given) or in_threads(*given)
    )
    monkeypatch.setattr(
        pooling,
        "roi_align",
        lambda *given: used.add(threading.get_ident()) or torchvision.ops.roi_align(*given),
    )
    model = nn.ModuleDict({"pooler": ROIAlign((3, 5), 0.25, 0, aligned=True)})
    plain = model["pooler"]
    patch_pooling(model)
    x = torch.randn(batch, channels, 30, 41, dtype=dtype).contiguous(memory_format=layout)
    corners = torch.rand(40, 2, 2) * torch.tensor([170.0, 130.0])
    image = torch.randint(batch, (40, 1)).float()
    boxes = torch.cat([image, corners.amin(1), corners.amax(1)], dim=1)
    grad = torch.randn(40, channels, 3, 5, dtype=dtype)
    for got, expected in zip(
        _pooled(model["pooler"], x, boxes, grad), _pooled(plain, x, boxes, grad), strict=True
    ):
        assert got.dtype == dtype and torch.equal(got, expected)
    assert used and threading.get_ident() not in used
    assert len(passes) == 2  # forward and backward
    used.clear()
    assert model["pooler"](x, boxes[:0]).shape == (0, channels, 3, 5) and not used
    with torch.inference_mode():
        assert torch.equal(model["pooler"](x, boxes), plain(x, boxes))
    assert used
