"""Gradient clipping: what is clipped to what, and when."""

import pytest
import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from lambda_det.training.precision import LossScaler
from lambda_det.training.settings import Clipping
from lambda_det.training.step import clip_gradients
from tests.training.toy import Steps, ToyModel, batches, items

CLIP = {
    "value": clip_grad_value_,
    "norm": lambda parameters, most: [clip_grad_norm_(p, most) for p in parameters],
    "full_model": clip_grad_norm_,
}


@pytest.mark.parametrize("scaled", [False, True], ids=["unscaled", "loss scaling"])
@pytest.mark.parametrize("kind", CLIP)
def test_the_sum_of_all_batches_is_clipped_without_its_scale(kind, scaled):
    data = items(8)
    expected = ToyModel()
    sum(expected(data).values()).backward()
    norm = torch.stack([p.grad.norm() for p in expected.parameters()]).norm().item()
    most = 0.02
    CLIP[kind](list(expected.parameters()), most)
    assert norm > 10 * most
    model = ToyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    clipping = Clipping(kind, most)
    trainer = Steps(model, batches(data, 2), optimizer, accumulate=4, clipping=clipping)
    trainer.grad_scaler = LossScaler("cpu", enabled=scaled)
    storage = trainer.take(range(1))
    for found, start, want in zip(
        model.parameters(), ToyModel().parameters(), expected.parameters(), strict=True
    ):
        torch.testing.assert_close(start - found, want.grad, rtol=1e-4, atol=1e-6)
    # The norm in the log is that of before
    assert storage.history("grad_norm").latest() == pytest.approx(norm, rel=1e-4)


def test_the_kinds_differ_and_the_norm_type_counts():
    data, results = items(8), []
    for kind, norm_type in [("value", 2.0), ("norm", 2.0), ("full_model", 2.0), ("norm", 1.0)]:
        model = ToyModel()
        sum(model(data).values()).backward()
        clip_gradients(list(model.parameters()), Clipping(kind, 0.02, norm_type))
        results.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    for i, one in enumerate(results):
        assert not any(torch.allclose(one, other) for other in results[:i])
