"""The copy that is written while the training goes on."""

from __future__ import annotations

import io
from collections import OrderedDict

import torch
from torch import nn

from lambda_det.training.background import host_copy, tensor_bytes


def _size(state):
    file = io.BytesIO()
    torch.save(state, file)
    return len(file.getvalue())


def test_what_changes_later_is_not_in_it():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    history = [[1, (2.0, torch.ones(2))]]
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "history": history}
    copied = host_copy(state)
    expected = [value.clone() for value in model.state_dict().values()]
    moment = optimizer.state_dict()["state"][0]["exp_avg"].clone()
    model(torch.randn(5, 3)).square().sum().backward()
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 7
    history[0][1][1].zero_()
    history[0].append(3)
    assert isinstance(copied["model"], OrderedDict)
    assert copied["model"]._metadata == model.state_dict()._metadata
    assert all(map(torch.equal, copied["model"].values(), expected))
    assert torch.equal(copied["optimizer"]["state"][0]["exp_avg"], moment)
    assert copied["optimizer"]["param_groups"][0]["lr"] == 1e-3
    assert len(copied["history"][0]) == 2 and copied["history"][0][1][1].sum() == 2


def test_shared_storages_stay_shared():
    storage = torch.randn(1000)
    state = {"a": storage, "b": [storage[10:20], storage.view(10, 100).t()]}
    copied = host_copy(state)
    assert abs(_size(copied) - _size(state)) < 64 and tensor_bytes(state) == 4000
    assert torch.equal(copied["b"][1], state["b"][1])
    assert copied["b"][1].stride() == (1, 100)
    copied["a"].zero_()
    assert copied["b"][0].abs().sum() == 0 and storage.abs().sum() > 0


def test_tensors_of_all_kinds():
    state = [
        torch.zeros(0, 3),
        torch.tensor(5),
        torch.ones(2, dtype=torch.bfloat16),
        torch.ones(3, dtype=torch.complex64),
        torch.eye(3).to_sparse(),
        torch.tensor([True, False]),
        nn.Parameter(torch.ones(2)),
    ]
    copied = host_copy(state)
    for one, other in zip(state, copied, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape and not other.requires_grad
        assert torch.equal(one.to_dense(), other.to_dense())
