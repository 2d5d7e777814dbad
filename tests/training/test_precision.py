"""Mixed precision: which device takes which dtype; skipped steps are counted over a resume."""

import pytest
import torch

from lambda_det.errors import NonFiniteLossError
from lambda_det.training.precision import LossScaler, Precision
from tests.training.toy import Steps, ToyModel, batches, items, settings, weights


def _precision(device):
    return Precision.of(settings(device=device, amp_dtype="auto"))


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
    assert _precision("cpu").dtype == (torch.bfloat16 if supported else None)
    assert str(_precision("cpu")) == ("bfloat16" if supported else "float32")


@pytest.mark.parametrize(("capability", "has_it"), [((7, 5), False), ((8, 0), True)])
def test_bfloat16_is_emulated_on_gpus_before_ampere(monkeypatch, capability, has_it):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert Precision("cuda", torch.bfloat16).is_emulated() == (not has_it)
    assert not Precision("cuda", torch.float16).is_emulated()
    assert _precision("cuda:1").dtype == (torch.bfloat16 if has_it else None)


def test_auto_is_bfloat16_for_a_gpu_that_is_not_here(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert _precision("cuda").dtype == torch.bfloat16


class OnCPU(Precision):
    """float32 with the scaler of float16, which a configuration can have on CUDA alone."""

    def grad_scaler(self):
        return LossScaler("cpu")


class Overflows(ToyModel):
    """The gradients of items that are "large" leave the range of float16."""

    def __init__(self):
        super().__init__()
        self.large = False
        for parameter in self.parameters():
            parameter.register_hook(lambda grad: grad * torch.inf if self.large else grad)

    def forward(self, batch):
        self.large = any("large" in item for item in batch)
        return super().forward(batch)


def _trainer(data, **options):
    return Steps(Overflows(), data, precision=OnCPU("cpu", None), **options)


def _data(count, large):
    data = items(count)
    for index in large:
        data[index]["large"] = True
    return batches(data, 1)


def test_skipped_steps_are_counted():
    trainer = _trainer(_data(8, (2, 5)))
    storage = trainer.take(range(8))
    assert [v for v, _ in storage.history("skipped_steps").values()] == [0, 0, 1, 1, 1, 2, 2, 2]
    norms = storage.history("grad_norm").values()
    assert [i for _, i in norms] == [0, 1, 3, 4, 6, 7]  # of skipped steps it is infinite
    assert trainer.grad_scaler.get_scale() == 65536.0 / 4


def test_a_step_is_that_without_scaling_and_a_skipped_one_leaves_the_weights():
    data = batches(items(6), 1)
    scaled, plain = _trainer(data), Steps(ToyModel(), data)
    norms = [
        [v for v, _ in steps.take(range(6)).history("grad_norm").values()]
        for steps in (scaled, plain)
    ]
    torch.testing.assert_close(*norms, rtol=1e-5, atol=0)
    before = weights(scaled.model)
    scaled.batches = iter(_data(1, (0,)))
    scaled.take(range(6, 7))
    assert torch.equal(weights(scaled.model), before)


@pytest.mark.parametrize("split", [5, 11], ids=["while it grows", "while steps are skipped"])
def test_a_resumed_run_keeps_scale_growth_and_counts(split):
    large = (1, 2, 7, 10, 11)
    whole = _trainer(_data(12, large))
    whole.grad_scaler.set_growth_interval(4)
    whole.take(range(12))
    first = _trainer(_data(12, large))
    first.grad_scaler.set_growth_interval(4)
    first.take(range(split))
    second = _trainer(_data(12, large)[split:])
    second.model.load_state_dict(first.model.state_dict())
    second.load_state_dict(first.state_dict())
    second.take(range(split, 12))
    assert second.grad_scaler.state_dict() == whole.grad_scaler.state_dict()
    assert second.grad_scaler.skipped == whole.grad_scaler.skipped == 5
    assert second.grad_scaler.skipped_in_row == whole.grad_scaler.skipped_in_row == 2
    assert torch.equal(weights(second.model), weights(whole.model))


@pytest.mark.parametrize(("scale", "skipped"), [(2.0**16, 17), (2.0**30, 20)])
def test_when_no_scale_helps_it_stops(scale, skipped):
    trainer = _trainer(_data(40, range(1, 40)), last_checkpoint=lambda: "run/model_7.pth")
    trainer.grad_scaler._init_scale = scale
    with pytest.raises(NonFiniteLossError) as caught:
        trainer.take(range(40))
    text = str(caught.value)
    assert text.startswith(f"Loss scaling skipped {skipped} steps in a row ")
    assert f"iteration {skipped};" in text and "bfloat16" in text and "run/model_7.pth" in text


def test_in_a_row_means_without_a_step_between():
    trainer = _trainer(_data(60, [i for i in range(60) if i % 10]))
    trainer.grad_scaler._init_scale = 2.0**70
    trainer.take(range(60))
    assert trainer.grad_scaler.skipped == 54
