"""What is in the way of torch.compile is said before a training, and what it makes is the same."""

import copy
import re

import pytest
import torch
from torch import nn

from lambda_det.modeling.compilation import why_not
from tests.modeling.small import small_network


def _hooked(network):
    network.res3[0].conv1.register_forward_hook(lambda *called: None)


def _weight_normed(network):
    nn.utils.weight_norm(network.res3[0].conv1)


# options of the network, a change of it, whether images have one size, and words of the reason
IN_THE_WAY = {
    "several sizes": ({}, None, False, r"INPUT\.LSJ"),
    "a hook": ({}, _hooked, True, r"backbone\.res3\.0\.conv1 has a hook"),
    "weight norm": ({}, _weight_normed, None, r"backbone\.res3\.0\.conv1 has a hook"),
    "padding": ({"mask_padding": True}, None, True, "has a hook"),
    "checkpoints": ({"checkpoint_activations": True}, None, True, "CHECKPOINT_ACTIVATIONS"),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize(
    ("options", "change", "one_size", "words"), IN_THE_WAY.values(), ids=IN_THE_WAY
)
def test_what_is_in_the_way_is_said(options, change, one_size, words):
    network = small_network(**options)
    if change is not None:
        change(network)
    assert re.search(words, why_not(network, one_size=one_size))


def test_a_model_without_a_backbone_is_named():
    assert "backbone" in why_not(None, one_size=True)


@pytest.mark.parametrize("one_size", [True, None])
def test_a_network_of_ours_can_be_compiled(one_size):
    assert why_not(small_network(), one_size=one_size) is None


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT",
    reason="PyTorch 2.15 compiles code with vectors for a processor that has none",
)
@pytest.mark.slow
def test_a_compiled_network_has_the_same_numbers_and_parameters():
    """By the compiler of this machine, forward and backward, in one graph."""
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.zeros(2))
    except Exception as error:  # of Dynamo, of a compiler's process, of a Python that is too new
        pytest.skip(f"PyTorch compiles nothing here: {error}")
    torch.manual_seed(0)
    network = small_network(scope=5)
    for name, parameter in network.named_parameters():
        if name.endswith("norm.weight"):  # otherwise the residual branches are 0
            nn.init.uniform_(parameter, 0.5, 1.5)
    compiled, x = copy.deepcopy(network), torch.randn(2, 3, 64, 64)
    compiled.compile(fullgraph=True)
    found = [part(x) for part in (network, compiled)]
    for name, one in found[0].items():
        assert (one - found[1][name]).norm() < 1e-4 * one.norm(), name
    for maps in found:
        sum(one.square().mean() for one in maps.values()).backward()
    largest = max(one.grad.norm() for one in network.parameters())
    for (name, one), other in zip(network.named_parameters(), compiled.parameters(), strict=True):
        # that of a scale before another norm is 0 but for rounding
        limit = 1e-3 * one.grad.norm() + 1e-5 * largest
        assert (one.grad - other.grad).norm() < limit, name
    torch.testing.assert_close(network.state_dict(), compiled.state_dict(), rtol=1e-4, atol=1e-4)
    assert copy.deepcopy(compiled)._compiled_call_impl is None  # as averages and evaluations are
