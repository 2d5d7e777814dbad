"""Mixed precision: which device bears which, and boxes that are not rounded."""

from __future__ import annotations

import pytest
import torch
from detectron2.config import get_cfg
from detectron2.layers import ROIAlign
from torch import nn

from lambda_det.config import add_lambda_config
from lambda_det.errors import ConfigError
from lambda_det.training.precision import Precision, pool_in_float32


def _cfg(device, dtype, enabled=True):
    cfg = get_cfg()
    add_lambda_config(cfg)
    cfg.MODEL.DEVICE, cfg.SOLVER.AMP.DTYPE, cfg.SOLVER.AMP.ENABLED = device, dtype, enabled
    return cfg


def test_from_config():
    assert Precision.from_config(_cfg("cuda:0", "float16")) == Precision("cuda", torch.float16)
    assert Precision.from_config(_cfg("cpu", "bfloat16")) == Precision("cpu", torch.bfloat16)
    assert Precision.from_config(_cfg("cpu", "float16", False)) == Precision("cpu", None)
    with pytest.raises(ConfigError, match="float16 needs a CUDA device"):
        Precision.from_config(_cfg("cpu", "float16"))
    with pytest.raises(ConfigError, match="'half'"):
        Precision.from_config(_cfg("cpu", "half"))


def test_autocast_and_scaler():
    x = torch.ones(2, 2)
    with Precision("cpu", torch.bfloat16).autocast():
        assert (x @ x).dtype == torch.bfloat16
    with Precision("cpu", None).autocast():
        assert (x @ x).dtype == torch.float32
    assert not Precision("cpu", torch.bfloat16).grad_scaler().is_enabled()


def test_pooling_does_not_round_boxes():
    model = nn.ModuleDict({"pooler": nn.ModuleList([ROIAlign((4, 4), 0.25, 0, aligned=True)])})
    plain = model["pooler"][0]
    pool_in_float32(model)
    ramp = torch.arange(256, dtype=torch.float32).expand(1, 1, 256, 256) % 16
    boxes = torch.tensor([[0, 601.5, 707.0, 651.5, 757.0]])
    exact = plain(ramp, boxes)
    with Precision("cpu", torch.bfloat16).autocast():
        got = model["pooler"][0](ramp.bfloat16(), boxes)
        rounded = plain(ramp.bfloat16(), boxes)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), exact, rtol=0.01, atol=0.01)
    assert (rounded.float() - exact).abs().max() > 0.1  # or there was nothing to mend
