"""Mixed precision: which device takes which dtype, and boxes that are not rounded."""

from __future__ import annotations

import pytest
import torch

from lambda_det.training.precision import Precision
from tests.training.toy import settings


def _precision(device, dtype):
    return Precision.of(settings(device=device, amp_dtype=dtype))


def test_of_settings():
    assert _precision("cuda:0", "float16") == Precision("cuda", torch.float16)
    assert _precision("cpu", "bfloat16") == Precision("cpu", torch.bfloat16)
    assert _precision("cpu", None) == Precision("cpu", None)


@pytest.mark.parametrize(
    ("capability", "instructions", "onednn", "supported"),
    [
        ("AVX2", False, False, False),
        ("AVX512", False, True, False),  # of Skylake to Ice Lake: oneDNN emulates it
        ("AVX512", True, True, True),
        ("DEFAULT", False, True, True),  # ARM
    ],
)
def test_bfloat16_is_emulated_where_the_processor_lacks_it(
    monkeypatch, capability, instructions, onednn, supported
):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: instructions, raising=False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False, raising=False)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: onednn)
    assert Precision("cpu", torch.bfloat16).is_emulated() == (not supported)
    assert not Precision("cpu", None).is_emulated()
    assert _precision("cpu", "auto").dtype == (torch.bfloat16 if supported else None)
    assert str(_precision("cpu", "auto")) == ("bfloat16" if supported else "float32")


@pytest.mark.parametrize(
    ("capability", "has_it"), [((7, 5), False), ((8, 0), True), ((9, 0), True)]
)
def test_bfloat16_is_emulated_on_gpus_before_ampere(monkeypatch, capability, has_it):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert Precision("cuda", torch.bfloat16).is_emulated() == (not has_it)
    assert not Precision("cuda", torch.float16).is_emulated()
    assert _precision("cuda:1", "auto").dtype == (torch.bfloat16 if has_it else None)


def test_auto_is_bfloat16_for_a_gpu_that_is_not_here(monkeypatch):
    """As lambda_det/plan.py names it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert _precision("cuda", "auto").dtype == torch.bfloat16
