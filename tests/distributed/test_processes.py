"""One process, two and four take the same steps, with synchronised norms and without."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lambda_det.modeling.norm import SyncBatchNorm2d, convert_sync_norms
from tests.distributed.process_group import in_processes
from tests.distributed.same_steps import (
    CHANNELS,
    SHARES,
    STEPS,
    everything,
    norm_parameters,
    values,
)

pytestmark = pytest.mark.slow

EPS = 1e-5


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[int, list]:
    return in_processes(everything, (1, 2, 4), tmp_path_factory.mktemp("processes"))


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_mask_rcnn_has_the_losses_of_one_process(results, world_size):
    """In float32, where sums over images are taken in another order; noise grows with the steps."""
    alone = results[1][0]["detection"]
    assert len(alone["losses"]) == STEPS and len(alone["losses"][0]) == 5
    for member in results[world_size]:
        for ours, reference in zip(member["detection"]["losses"], alone["losses"], strict=True):
            assert ours == pytest.approx(reference, rel=2e-5)
        for name, weight in alone["weights"].items():
            scale = weight.abs().max().clamp(min=0.1)
            assert (member["detection"]["weights"][name] - weight).abs().max() < 1e-4 * scale, name
    # it has learnt, so that the weights had a say
    assert alone["losses"][0]["loss_cls"] > 1.01 * alone["losses"][-1]["loss_cls"]


@pytest.mark.parametrize("world_size", [2, 4])
def test_synchronised_norms_train_as_those_of_one_process_with_the_whole_batch(results, world_size):
    alone = results[1][0]["synchronised"]
    assert alone["kinds"] == ["BatchNorm2d"]
    for member in results[world_size]:
        ours = member["synchronised"]
        assert ours["kinds"] == ["SyncBatchNorm2d"]
        for mine, reference in zip(ours["losses"], alone["losses"], strict=True):
            assert mine == pytest.approx(reference, rel=1e-6)  # is kept as float32
        torch.testing.assert_close(ours["weights"], alone["weights"], rtol=1e-10, atol=1e-10)
    assert any(name.endswith("running_var") for name in alone["weights"])


def _by_hand(x: Tensor, grad: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    """The output and the gradients of x, weight and bias, by autograd, one channel at a time."""
    x, weight, bias = (t.detach().clone().requires_grad_() for t in (x, weight, bias))
    channels = []
    for channel in range(CHANNELS):
        all_values = x[:, channel]
        mean = all_values.sum() / all_values.numel()
        var = ((all_values - mean) ** 2).sum() / all_values.numel()
        channels.append((all_values - mean) / (var + EPS) ** 0.5 * weight[channel] + bias[channel])
    y = torch.stack(channels, 1)
    y.backward(grad)
    return y.detach(), x.grad, weight.grad, bias.grad


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("case", range(len(SHARES)))
def test_synchronised_norm_is_batch_norm_of_all_values(results, world_size, case):
    """Equal and unequal numbers of images, some processes without any; float64."""
    members = [member["norms"][case] for member in results[world_size]]
    norm = norm_parameters()
    plain = nn.BatchNorm2d(CHANNELS).double()
    for earlier in range(case + 1):
        x, grad = (torch.cat(p) for p in zip(*(values(earlier, s) for s in range(4)), strict=True))
        plain(x)
    expected = _by_hand(x, grad, norm.weight, norm.bias)
    ours = [torch.cat([m[key] for m in members]) for key in ("y", "x_grad")]
    ours += [sum(m["grads"][which] for m in members) for which in range(2)]
    for mine, reference in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-10, atol=1e-10)
    for member in members:
        for key in ("running_mean", "running_var", "num_batches_tracked"):
            torch.testing.assert_close(member["state"][key], plain.state_dict()[key])


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(("kind", "cases"), [("BatchNorm2d", 1), ("SyncBatchNorm2d", 2)])
def test_estimated_statistics_are_those_of_all_values(results, world_size, kind, cases):
    """Unequal numbers of values, far from mean 0; the same statistics on all processes."""
    x = torch.cat([values(case, share)[0] for case in range(cases) for share in range(4)])
    mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0)
    for member in results[world_size]:
        ours = member["statistics"][kind]
        torch.testing.assert_close(ours["running_mean"].double(), mean, rtol=1e-5, atol=0)
        torch.testing.assert_close(ours["running_var"].double(), var, rtol=1e-5, atol=0)


def test_torch_has_no_synchronised_norm_for_the_cpu(results):
    said = results[2][0]["native"]
    assert said.startswith("SyncBatchNorm expected input tensor to be on GPU")
    model = nn.Sequential(nn.SyncBatchNorm(CHANNELS))
    assert type(convert_sync_norms(model, "cuda")[0]) is nn.SyncBatchNorm
    assert type(convert_sync_norms(model, "cpu")[0]) is SyncBatchNorm2d


class _Kernels:
    """The kernels themselves, in float32 on a GPU."""

    @staticmethod
    def stats(x):
        return torch.batch_norm_stats(x, EPS)

    @staticmethod
    def gather(means, inv_stds, counts):
        x = means.new_zeros(1, CHANNELS, 1, 1)
        return torch.batch_norm_gather_stats_with_counts(
            x, means, inv_stds, None, None, 0.1, EPS, counts
        )

    @staticmethod
    def elemt(x, weight, bias, mean, inv_std):
        return torch.batch_norm_elemt(x, weight, bias, mean, inv_std, EPS)

    @staticmethod
    def backward_reduce(grad, x, mean, inv_std):
        weight = torch.ones_like(mean)
        return torch.batch_norm_backward_reduce(grad, x, mean, inv_std, weight, True, True, True)

    @staticmethod
    def backward_elemt(grad, x, mean, inv_std, weight, sum_dy, sum_dy_xmu, count):
        counts = torch.tensor([count], dtype=torch.int32, device=x.device)
        return torch.batch_norm_backward_elemt(
            grad, x, mean, inv_std, weight, sum_dy, sum_dy_xmu, counts
        )


def _native(kernels, shares: list, weight: Tensor, bias: Tensor) -> list[Tensor]:
    """What torch's SyncBatchNorm does over processes, with lists for collective calls."""
    counts = torch.stack([weight.new_tensor(x.numel() / CHANNELS) for x, _ in shares])
    means, inv_stds = (
        torch.stack(s) for s in zip(*(kernels.stats(x) for x, _ in shares), strict=True)
    )
    mean, inv_std = kernels.gather(means, inv_stds, counts)
    y = [kernels.elemt(x, weight, bias, mean, inv_std) for x, _ in shares]
    reduced = [kernels.backward_reduce(grad, x, mean, inv_std) for x, grad in shares]
    sums = [sum(r[which] for r in reduced) for which in range(4)]
    count = int(counts.sum())
    grads = [
        kernels.backward_elemt(grad, x, mean, inv_std, weight, sums[0], sums[1], count)
        for x, grad in shares
    ]
    return [torch.cat(y), torch.cat(grads), sums[2], sums[3]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_it_is_what_the_native_one_computes_on_gpus(results):
    """Torch refuses the real thing without a GPU per process; its kernels are tested here."""
    for case in (0, 1):  # it skips processes without values, and refuses where there are none
        shares = [values(case, share) for share in range(4)]
        shares = [[t.to("cuda").float() for t in pair] for pair in shares if pair[0].numel()]
        norm = norm_parameters().to("cuda").float()
        native = _native(_Kernels, shares, norm.weight.detach(), norm.bias.detach())
        members = [member["norms"][case] for member in results[4]]
        ours = [torch.cat([m[key] for m in members]) for key in ("y", "x_grad")]
        ours += [sum(m["grads"][which] for m in members) for which in range(2)]
        for mine, theirs in zip(ours, native, strict=True):
            torch.testing.assert_close(mine, theirs.cpu().double(), rtol=1e-3, atol=1e-3)
