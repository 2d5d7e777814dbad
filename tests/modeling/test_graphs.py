"""The passes of a backbone as CUDA graphs. Without a GPU a function stands for the capture."""

import copy
import gc
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from detectron2.modeling import FPN
from torch import nn

from lambda_det.errors import ConfigError
from lambda_det.modeling import graphs as module
from lambda_det.modeling.graphs import BackboneGraphs, why_not
from tests.export.tiny import scramble
from tests.modeling.small import small_network

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def make_backbone(device="cpu", **options):
    torch.manual_seed(0)
    options = {"scope": 5, "stochastic_depth": 0.5, **options}
    bottom_up = scramble(small_network(**options))
    return FPN(bottom_up, ["res4", "res5"], 8, norm="BN").to(device).train()


def images(size=64, seed=1, device="cpu"):
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(seed)).to(device)


def take_steps(backbone, graphs=None, steps=3, device="cpu", dtype=torch.bfloat16):
    """The losses of some steps, each with its own random numbers."""
    optimizer, losses = torch.optim.SGD(backbone.parameters(), lr=1e-3, momentum=0.9), []
    for step in range(steps):
        optimizer.zero_grad()
        torch.manual_seed(step)
        x = images(seed=step, device=device)
        autocast = torch.autocast(device, dtype, enabled=dtype != torch.float32)
        with autocast, graphs.in_use() if graphs else nullcontext():
            features = backbone(x)
        loss = sum(one.float().square().mean() for one in features.values())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture
def capture(monkeypatch):
    """Stands for PyTorch's capture: what it gives can be changed, and its calls are counted."""
    found = SimpleNamespace(captures=0, replays=0, change=lambda maps: maps)

    def make(passes, samples, **options):
        found.captures += 1
        for _ in range(3):  # as PyTorch does before it captures
            ends = [one.sum() for one in passes(*samples) if one.requires_grad]
            trained = [one for one in passes.parameters() if one.requires_grad]
            torch.autograd.grad(ends, trained, allow_unused=True)

        def replay(x):
            found.replays += 1
            return found.change(passes.compute(x))

        passes.forward = replay  # PyTorch's refer to each other, too
        found.passes = weakref.ref(passes)
        return replay

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", make)
    return found


@pytest.mark.slow
def test_a_training_by_graphs_is_the_training_without(capture):
    """The capture leaves no trace in statistics, random numbers, names or attributes."""
    backbone = make_backbone()
    other, before = copy.deepcopy(backbone), set(vars(backbone))
    graphs = BackboneGraphs(other)
    losses = take_steps(backbone)
    assert take_steps(other, graphs) == losses
    assert capture.captures == 1 and capture.replays == 1 + 3  # one of them is compared
    for (name, one), (same, expected) in zip(
        other.state_dict().items(), backbone.state_dict().items(), strict=True
    ):
        assert name == same and torch.equal(one, expected)
    assert set(vars(other)) == before
    assert type(copy.deepcopy(other)).forward(other, images()).keys() == {"p4", "p5"}


@pytest.mark.slow
def test_frozen_stages_have_maps_without_a_gradient(capture):
    torch.manual_seed(0)
    frozen = small_network(scope=5, out_features=["res2", "res5"], freeze_at=2).train()
    losses = take_steps(copy.deepcopy(frozen))
    assert take_steps(frozen, BackboneGraphs(frozen)) == losses
    assert capture.captures == 1 and capture.replays > 1


CHANGES = {
    "an output": lambda maps: tuple(one * 1.2 for one in maps),
    "a gradient": lambda maps: tuple(one.detach() + 0 * one + 0 * one.sum() for one in maps),
    "no gradient": lambda maps: tuple(one.detach() for one in maps),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_graph_with_other_results_is_not_used(capture, caplog, change):
    capture.change = CHANGES[change]
    backbone = make_backbone()
    losses = take_steps(copy.deepcopy(backbone))
    assert take_steps(backbone, BackboneGraphs(backbone)) == losses
    assert capture.captures == capture.replays == 1
    (record,) = [one for one in caplog.records if one.levelname == "WARNING"]
    assert "CUDA graphs" in record.message


def test_statistics_that_stand_still_are_seen(capture, caplog):
    backbone = make_backbone()

    def undo(maps):
        for norm in backbone.modules():
            if isinstance(norm, nn.BatchNorm2d):
                norm.running_mean.data.zero_()  # unseen by autograd
        return maps

    capture.change = undo
    take_steps(backbone, BackboneGraphs(backbone), steps=1)
    assert "a running statistic" in caplog.text


def test_gradients_that_are_0_at_the_start_are_compared(capture, caplog):
    """The last norm of each residual branch starts at 0, and with it all gradients of a branch."""
    torch.manual_seed(0)
    backbone = small_network(scope=5).train()
    other, block = copy.deepcopy(backbone), backbone.res5[0]
    block.conv2.position.embedding.register_hook(lambda grad: grad * (1 + (capture.replays > 0)))
    take_steps(backbone, BackboneGraphs(backbone), steps=1)
    assert "a gradient of the graph" in caplog.text and capture.replays == 1
    take_steps(other, steps=1)
    assert torch.equal(block.conv3.norm.weight, other.res5[0].conv3.norm.weight)


@pytest.mark.slow
def test_a_graph_is_compared_again(capture, monkeypatch, caplog):
    monkeypatch.setattr(module, "_AGAIN", 2)
    backbone = make_backbone()
    other, third = copy.deepcopy(backbone), copy.deepcopy(backbone)
    losses = take_steps(backbone, steps=4)
    assert take_steps(other, BackboneGraphs(other), steps=4) == losses
    assert capture.replays == 1 + 2 + 1 + 2

    def fails_late(maps):
        if capture.replays > 3:
            raise torch.cuda.OutOfMemoryError("no room")
        return maps

    capture.replays, capture.change = 0, fails_late
    again = copy.deepcopy(third)
    assert take_steps(again, BackboneGraphs(again), steps=4) == losses
    assert capture.replays == 1 + 2 + 1
    capture.replays = 0
    capture.change = lambda maps: tuple(y * (1 + (capture.replays > 3)) for y in maps)
    with pytest.raises(ConfigError, match=r"after 2 steps.*SOLVER\.CUDA_GRAPHS never"):
        take_steps(third, BackboneGraphs(third), steps=4)


@pytest.fixture
def no_collector():
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("replays", [0, 3])
def test_a_graph_that_is_given_up_leaves_no_memory(capture, monkeypatch, no_collector, replays):
    """What holds it are cycles, and the next step needs the memory."""

    def fails(maps):
        if capture.replays > replays:
            raise torch.cuda.OutOfMemoryError("no room")
        return maps

    monkeypatch.setattr(module, "_AGAIN", 2)
    capture.change = fails
    backbone = make_backbone()
    take_steps(backbone, BackboneGraphs(backbone), steps=3 if replays else 1)
    assert capture.replays == replays + 1 and capture.passes() is None


@pytest.mark.parametrize("again", [False, True])
def test_gradients_that_overflow_are_no_fault_of_a_graph(capture, monkeypatch, caplog, again):
    monkeypatch.setattr(module, "_AGAIN", 1)
    backbone = make_backbone()
    embedding = backbone.bottom_up.res5[0].conv2.position.embedding
    graphs, inner = BackboneGraphs(backbone), BackboneGraphs._difference

    def overflows(self, passes, replay, x):
        if again == (graphs._replay is not None):
            handle = embedding.register_hook(lambda grad: grad * torch.inf)
            try:
                return inner(self, passes, replay, x)
            finally:
                handle.remove()
        return inner(self, passes, replay, x)

    monkeypatch.setattr(BackboneGraphs, "_difference", overflows)
    take_steps(backbone, graphs, steps=2)
    assert graphs._replay is None and "not finite" in caplog.text


def test_a_second_call_in_one_forward_pass_is_computed(capture):
    """A graph would write over the maps of the first call before their backward pass."""
    backbone = make_backbone()
    graphs = BackboneGraphs(backbone)
    for _ in range(2):
        before = capture.replays
        with graphs.in_use():
            backbone(images())
            once = capture.replays
            backbone(images())
        assert before < once == capture.replays


def test_a_capture_that_fails_ends_without_graphs(monkeypatch, caplog):
    def fail(*inputs, **options):
        raise torch.cuda.OutOfMemoryError("no room\nand a long story")

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", fail)
    backbone = make_backbone()
    losses = take_steps(copy.deepcopy(backbone))
    assert take_steps(backbone, BackboneGraphs(backbone)) == losses
    assert caplog.text.count("no room") == 1 and "story" not in caplog.text


def test_what_a_graph_does_not_hold_for_is_computed(capture):
    backbone = make_backbone()
    graphs, x = BackboneGraphs(backbone), images()

    def replays(x):
        before = capture.replays
        with graphs.in_use():
            assert backbone(x).keys() == {"p4", "p5"}
        return capture.replays > before

    assert replays(x) and replays(images(seed=2))
    assert not replays(images(96)) and not replays(x[:1]) and not replays(x.double().float()[:0])
    with torch.no_grad():
        assert not replays(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert not replays(x)
    hook = backbone.bottom_up.res4.register_forward_hook(lambda *called: None)
    assert not replays(x)
    hook.remove()
    assert replays(x)
    assert not replays(x.to(memory_format=torch.channels_last))
    backbone.bottom_up.eval()
    assert not replays(x)
    backbone.train()
    backbone.bottom_up.stem.requires_grad_(False)
    assert not replays(x)
    backbone.requires_grad_(True)
    assert replays(x)
    weight = backbone.bottom_up.res5[0].conv1.weight
    weight.grad = torch.zeros_like(weight)  # perhaps where the graph writes
    assert not replays(x)
    weight.grad = None
    assert replays(x)
    kernel = backbone.bottom_up.res5[0].conv3
    kernel.weight = nn.Parameter(kernel.weight.detach().clone())
    assert not replays(x)
    before = capture.replays
    backbone(x)  # outside
    assert capture.replays == before and capture.captures == 1


@pytest.mark.parametrize(
    ("options", "facts", "word"),
    [
        ({}, {}, ""),
        ({}, {"device": "cuda:1"}, ""),
        ({}, {"device": "cpu"}, "GPU"),
        ({}, {"processes": 2}, "processes"),
        ({}, {"accumulate": 2}, "ACCUMULATE_GRADIENTS"),
        ({}, {"one_size": False}, "INPUT.LSJ"),
        ({}, {"one_size": None}, ""),
        ({}, {"one_size": None, "is_asked": False}, "sizes"),
        ({}, {"is_asked": False}, ""),
        ({"mask_padding": True}, {}, "MASK_PADDING"),
        ({"checkpoint_activations": True}, {}, "CHECKPOINT_ACTIVATIONS"),
    ],
)
def test_why_not(options, facts, word):
    backbone = make_backbone(**options)
    why = why_not(backbone, **{"device": "cuda", **facts})
    assert (word in why) if word else not why
    backbone.register_forward_hook(lambda *called: None)  # which is called beside a graph
    assert why_not(backbone, **{"device": "cuda", **facts}) == why
    backbone.bottom_up.register_forward_hook(lambda *called: None)
    assert why_not(backbone, device="cuda")


def test_code_that_is_not_known_needs_to_be_asked_for():
    """It may compute something else at a later step, which a graph would not do."""

    class Identity(nn.Identity):
        pass

    backbone = make_backbone()
    backbone.bottom_up.res5[0].drop = Identity()
    assert "not known" in why_not(backbone, device="cuda", is_asked=False)
    assert not why_not(backbone, device="cuda")
    backbone.forward = backbone.bottom_up.forward
    assert "forward" in why_not(backbone, device="cuda")


def test_a_model_without_backbone():
    assert "backbone" in why_not(None, device="cuda")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("stochastic_depth", [0.0, 0.5])
def test_graphs_on_a_gpu(dtype, stochastic_depth, caplog):
    backbone = make_backbone("cuda", stochastic_depth=stochastic_depth)
    other = copy.deepcopy(backbone)
    losses = take_steps(backbone, steps=5, device="cuda", dtype=dtype)
    graphs = BackboneGraphs(other)
    found = take_steps(other, graphs, steps=5, device="cuda", dtype=dtype)
    assert graphs._replay is not None, caplog.text
    torch.testing.assert_close(found, losses, rtol=2e-2, atol=1e-4)
    assert len(set(found)) == 5
    for one, expected in zip(other.buffers(), backbone.buffers(), strict=True):
        torch.testing.assert_close(one, expected, rtol=5e-2, atol=1e-2)
