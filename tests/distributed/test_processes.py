"""One process, two and four take the same steps, and have the same norms.

tests/tools/test_train_imagenet.py trains with synchronised norms.
"""

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.process_group import in_processes
from tests.distributed.same_steps import (
    CHANNELS,
    NORMS,
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


# Of results, which in bfloat16 keep 8 bits, and of running statistics
TOLERANCES = {"float64": (1e-10, 1e-7), "bfloat16": (8e-3, 1e-5)}


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("case", range(len(SHARES)))
def test_synchronised_norm_is_batch_norm_of_all_values(results, world_size, case, kind):
    """Equal and unequal numbers of images, some processes without any and once all of them."""
    members = [member["norms"][kind][case] for member in results[world_size]]
    norm = norm_parameters(kind).double()
    plain = nn.BatchNorm2d(CHANNELS, momentum=norm.momentum).double()
    for earlier in range(case + 1):
        pairs = zip(*(values(earlier, share) for share in range(4)), strict=True)
        x, grad = (torch.cat(pair).to(getattr(torch, kind)).double() for pair in pairs)
        if len(x):
            plain(x)
    expected = _by_hand(x, grad, norm.weight, norm.bias)
    ours = [torch.cat([m[key] for m in members]) for key in ("y", "x_grad")]
    ours += [sum(m["grads"][which] for m in members) for which in range(2)]
    assert ours[0].dtype == getattr(torch, kind)
    limit, of_statistics = TOLERANCES[kind]
    for mine, reference in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine.double(), reference, rtol=limit, atol=limit)
    for member in members:
        for key in ("running_mean", "running_var", "num_batches_tracked"):
            found, expected = member["state"][key].double(), plain.state_dict()[key].double()
            torch.testing.assert_close(found, expected, rtol=of_statistics, atol=of_statistics)


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
