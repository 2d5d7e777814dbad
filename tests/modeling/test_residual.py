"""The end of a block in one piece, against the modules one after the other in float64."""

from __future__ import annotations

import copy
import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from detectron2.layers import FrozenBatchNorm2d
from torch import nn

from lambda_det.modeling import residual
from lambda_det.modeling.blocks import Bottleneck, SqueezeExcitation, conv_norm
from lambda_det.modeling.norm import SyncBatchNorm2d

CHANNELS = 8

NORMS = {
    "training": lambda: nn.BatchNorm2d(CHANNELS),
    "evaluation": lambda: nn.BatchNorm2d(CHANNELS).eval(),
    "cumulative": lambda: nn.BatchNorm2d(CHANNELS, eps=0.1, momentum=None),
    "no parameters": lambda: nn.BatchNorm2d(CHANNELS, affine=False),
    "no parameters, evaluation": lambda: nn.BatchNorm2d(CHANNELS, affine=False).eval(),
    "no running statistics": lambda: nn.BatchNorm2d(CHANNELS, track_running_stats=False).eval(),
    "ours": lambda: SyncBatchNorm2d(CHANNELS),
    "torch's synchronised": lambda: nn.SyncBatchNorm(CHANNELS),
    "frozen": lambda: FrozenBatchNorm2d(CHANNELS),
}


def _norm(kind="training"):
    """A norm whose numbers are all unlike the initial ones."""
    norm = NORMS[kind]()
    with torch.no_grad():
        for name, tensor in [*norm.named_parameters(), *norm.named_buffers()]:
            if name == "running_var":
                tensor.uniform_(0.5, 2)
            elif tensor.is_floating_point():
                tensor.normal_()
    return norm


def _excitation():
    se = SqueezeExcitation(CHANNELS)
    for parameter in se.parameters():
        nn.init.normal_(parameter)
    return se


def _maps(batch=3, size=(5, 7), dtype=torch.float64, format=torch.contiguous_format, mean=2.0):
    c = torch.randn(batch, CHANNELS, *size, dtype=torch.float64) * 3 + mean
    shortcut, grad = torch.randn(2, batch, CHANNELS, *size, dtype=torch.float64)
    return [x.to(dtype).contiguous(memory_format=format) for x in (c, shortcut, grad)]


def _run(function, maps, norm, se, dtype):
    """Output, gradients and buffers, with modules of their own; all in float64."""
    norm, se = copy.deepcopy(norm).to(dtype), se and copy.deepcopy(se).to(dtype)
    c, shortcut, grad = (x.detach().to(dtype) for x in maps)
    c.requires_grad_(), shortcut.requires_grad_()
    y = function(c, shortcut, norm, se)
    y.backward(grad)
    parts = [part for part in (norm, se) if part is not None]
    gradients = [p.grad for part in parts for p in part.parameters()]
    results = [y.detach(), c.grad, shortcut.grad, *gradients, *norm.buffers()]
    return y, [result.double() for result in results if result is not None]


def _is_fused(y):
    return "_Finish" in type(y.grad_fn).__name__


@pytest.mark.parametrize("squeezes", [False, True])
@pytest.mark.parametrize("batch, size", [(1, (9, 13)), (3, (5, 7)), (2, (1, 1))])
@pytest.mark.parametrize("kind", NORMS)
def test_equal_to_the_modules_in_float64(kind, batch, size, squeezes):
    torch.manual_seed(batch)
    norm, se = _norm(kind), _excitation() if squeezes else None
    for format in (torch.contiguous_format, torch.channels_last):
        maps = _maps(batch, size, format=format)
        _, expected = _run(residual.plain, maps, norm, se, torch.float64)
        for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 2e-5)):
            if size == (1, 1) and dtype == torch.float32:
                continue  # two values per channel; their variance may be next to nothing
            y, results = _run(residual.finish, maps, norm, se, dtype)
            assert _is_fused(y) and y.dtype == dtype
            assert y.is_contiguous(memory_format=format)
            assert len(results) == len(expected)
            for result, exact in zip(results, expected, strict=True):
                scale = max(exact.abs().max().item(), 1e-3)
                assert (result - exact).abs().max() <= tolerance * scale


@pytest.mark.parametrize("squeezes", [False, True])
@pytest.mark.parametrize("kind", ["training", "evaluation"])
def test_gradcheck(kind, squeezes):
    torch.manual_seed(0)
    norm = _norm(kind).double()
    if norm.training:
        norm = nn.BatchNorm2d(CHANNELS, track_running_stats=False).double()
    se = _excitation().double() if squeezes else None
    for batch in (1, 2):
        c, shortcut, _ = _maps(batch, (2, 3))
        c.requires_grad_(), shortcut.requires_grad_()
        inputs = [c, shortcut, *norm.parameters(), *(se.parameters() if se else ())]
        assert torch.autograd.gradcheck(
            lambda c, shortcut, *_: residual.finish(c, shortcut, norm, se), inputs
        )


def test_gradients_of_far_values_and_of_expanded_output_gradients():
    torch.manual_seed(0)
    norm, se = _norm(), _excitation()
    c, shortcut, _ = _maps(2, (16, 16), mean=200.0)
    maps = c, shortcut, torch.ones(()).double().expand_as(c)
    _, expected = _run(residual.plain, maps, norm, se, torch.float64)
    _, modules = _run(residual.plain, maps, norm, se, torch.float32)
    _, results = _run(residual.finish, maps, norm, se, torch.float32)
    for result, module, exact in zip(results, modules, expected, strict=True):
        error, usual = (result - exact).abs().max(), (module - exact).abs().max()
        assert error <= 3 * usual + 1e-5 * exact.abs().max()


@pytest.mark.parametrize("kind", ["training", "cumulative", "ours", "no running statistics"])
def test_running_statistics_move_as_those_of_the_norm(kind):
    norm = _norm(kind).double()
    other = copy.deepcopy(norm)
    for step in range(3):
        c, shortcut, _ = _maps(step + 1)
        residual.plain(c, shortcut, other, None)
        if step == 1:
            residual.finish(c.clone(), shortcut, norm, None)  # without gradients
        else:
            residual.finish(c.requires_grad_(), shortcut, norm, None)
        torch.testing.assert_close(norm.state_dict(), other.state_dict(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("squeezes", [False, True])
@pytest.mark.parametrize("kind", ["training", "evaluation", "frozen"])
def test_without_gradients_nothing_of_the_size_of_the_map_is_made(kind, squeezes):
    norm, se = _norm(kind).double(), _excitation().double() if squeezes else None
    c, shortcut, _ = _maps()
    kept = shortcut.clone()
    with torch.no_grad():
        expected = residual.plain(c, shortcut, copy.deepcopy(norm), se)
        y = residual.finish(c, shortcut, norm, se)
    torch.testing.assert_close(y, expected)
    assert y.data_ptr() == c.data_ptr() and torch.equal(shortcut, kept)


def _kept_maps(function, norm, se):
    """Memory of maps kept for the backward pass."""
    kept = {}

    def pack(tensor):
        if tensor.dim() == 4 and tensor.shape[-1] > 1:
            kept[tensor.data_ptr()] = tensor
        return tensor

    c, shortcut, _ = _maps()
    c.requires_grad_(), shortcut.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = function(c, shortcut, norm.double(), se.double())
    return sorted(kept) == sorted([c.data_ptr(), y.data_ptr()])


def test_nothing_is_kept_but_input_and_output():
    assert _kept_maps(residual.finish, _norm(), _excitation())
    assert not _kept_maps(residual.plain, _norm(), _excitation())


def test_it_is_deterministic_and_differentiable_once():
    norm, se, maps = _norm(), _excitation(), _maps(dtype=torch.float32)
    first, second = (_run(residual.finish, maps, norm, se, torch.float32)[1] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    c, shortcut, _ = maps
    y = residual.finish(c.requires_grad_(), shortcut, norm, se)
    (gradient,) = torch.autograd.grad(y.square().sum(), c, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize("frozen", ["c", "shortcut", "norm", "se", "all but se"])
def test_what_needs_no_gradient_gets_none(frozen):
    norm, se = _norm().double(), _excitation().double()
    maps = dict(zip(("c", "shortcut"), _maps()[:2], strict=True))
    groups = {
        "c": [maps["c"]],
        "shortcut": [maps["shortcut"]],
        "norm": list(norm.parameters()),
        "se": list(se.parameters()),
    }
    asked = [name for name in groups if name != frozen]
    if frozen == "all but se":
        asked = ["se"]
    for name, tensors in groups.items():
        for tensor in tensors:
            tensor.requires_grad_(name in asked)
    tensors = [tensor for name in asked for tensor in groups[name]]
    results = [
        torch.autograd.grad(function(maps["c"], maps["shortcut"], norm, se).square().sum(), tensors)
        for function in (residual.finish, residual.plain)
    ]
    torch.testing.assert_close(*results)


def test_the_plain_form_serves_other_dtypes_and_single_values():
    norm = _norm()
    c, shortcut, _ = _maps(dtype=torch.bfloat16)
    for same in (norm, copy.deepcopy(norm).bfloat16()):
        y = residual.finish(c.requires_grad_(), shortcut, same, None)
        assert y.dtype == torch.bfloat16 and not _is_fused(y)
    c, shortcut, _ = _maps(1, (1, 1), dtype=torch.float32)
    with pytest.raises(ValueError, match="more than 1 value"):
        residual.finish(c, shortcut, norm, None)
    c, shortcut, _ = _maps(dtype=torch.float32)
    wide = residual.finish(c.requires_grad_(), shortcut.double(), norm, None)
    assert wide.dtype == torch.float64


def test_what_is_covered(monkeypatch):
    cpu = torch.device("cpu")
    se = SqueezeExcitation(CHANNELS)

    def covers(norm="BN", se=None, device=cpu):
        conv = conv_norm(4, CHANNELS, 1, norm=norm, relu=False)
        return residual.covers(conv, se, device)

    assert all(covers(norm, se) for norm in ("BN", "SyncBN", "FrozenBN", SyncBatchNorm2d))
    assert not any(covers(norm) for norm in ("", "LN", "naiveSyncBN", lambda c: nn.GroupNorm(2, c)))
    assert not covers(device=torch.device("meta"))
    conv = conv_norm(4, CHANNELS, 1, norm="BN", relu=False)
    for part in (conv, conv.norm, se, se.reduce, se.expand):
        for register in (
            part.register_forward_hook,
            part.register_forward_pre_hook,
            part.register_full_backward_hook,
            part.register_full_backward_pre_hook,
        ):
            handle = register(lambda *_: None)
            assert not residual.covers(conv, se, cpu)
            handle.remove()
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert not residual.covers(conv, se, cpu)
    handle.remove()
    assert residual.covers(conv, se, cpu)
    for module, name in ((torch.jit, "is_tracing"), (torch.compiler, "is_compiling")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, lambda: True)
            assert not residual.covers(conv, se, cpu)


def _block(**options):
    torch.manual_seed(0)
    options = {"bottleneck_channels": 8, "se": True, **options}
    block = Bottleneck(16, 32, **options)
    for part in block.modules():
        if isinstance(part, nn.BatchNorm2d):
            nn.init.uniform_(part.weight, 0.5, 1)
            nn.init.uniform_(part.bias, -0.5, 0.5)
    return block


def _step(block, *inputs):
    block = copy.deepcopy(block).double()
    y = block(*inputs)
    y.square().sum().backward()
    return y, [y, *(p.grad for p in block.parameters()), *block.buffers()]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stride": 2},
        {"se": False},
        {"stride": 2, "pooled_shortcut": False, "se": False},
        {"lambda_options": {"scope": 3, "query_depth": 4, "heads": 2}},
        {"norm": "FrozenBN"},
    ],
)
def test_blocks_are_what_they_are_by_modules(options, monkeypatch):
    block = _block(**options)
    x = torch.randn(2, 16, 7, 9).double()
    y, results = _step(block, x)
    assert _is_fused(y)
    monkeypatch.setattr(residual, "covers", lambda *_: False)
    y, expected = _step(block, x)
    assert not _is_fused(y)
    torch.testing.assert_close(results, expected, rtol=1e-9, atol=1e-9)


def test_blocks_take_the_modules_where_more_is_asked_for():
    x, mask = torch.randn(2, 16, 7, 9).double(), torch.ones(2, 1, 7, 9, dtype=torch.bool)
    mask[0, :, 4:] = False
    assert not _is_fused(_step(_block(), x, mask)[0])
    assert _is_fused(_step(_block(se=False), x, mask)[0])
    dropping = _block(stochastic_depth=0.5)
    assert not _is_fused(_step(dropping, x)[0])
    assert _is_fused(_step(dropping.eval(), x)[0])
    block, seen = _block().double(), []
    block.conv3.norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    assert not _is_fused(block(x)) and len(seen) == 1


def test_compiled_blocks_have_no_break():
    block = _block(se=True).double()
    x = torch.randn(2, 16, 7, 9).double()
    expected = copy.deepcopy(block)(x)
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)


# Images of the two processes, step by step, and whether the second one's norm is watched by a hook
STEPS = [((3, 1), False), ((1, 2), True), ((2, 0), False)]


def _share(step, rank):
    torch.manual_seed(step)
    sizes, _ = STEPS[step]
    maps = _maps(sum(sizes))
    return [x[: sizes[0]] if rank == 0 else x[sizes[0] :] for x in maps]


def _synced(squeezes):
    torch.manual_seed(0)
    return _norm("ours").double(), _excitation().double() if squeezes else None


def _worker(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/init", rank=rank, world_size=2)
    results = []
    for squeezes in (False, True):
        norm, se = _synced(squeezes)
        for step, (_, watched) in enumerate(STEPS):
            function = residual.plain if watched and rank == 1 else residual.finish
            norm.zero_grad()
            c, shortcut, grad = _share(step, rank)
            y = function(c.requires_grad_(), shortcut, norm, se)
            y.backward(grad)
            results.append([y.detach(), c.grad, norm.weight.grad, norm.bias.grad])
            results[-1] += [norm.running_mean.clone(), norm.running_var.clone()]
    torch.save(results, os.path.join(folder, f"{rank}.pth"))
    dist.destroy_process_group()


def test_two_processes_are_one_with_all_values(tmp_path):
    mp.start_processes(_worker, args=(str(tmp_path),), nprocs=2, start_method="spawn")
    ranks = [iter(torch.load(tmp_path / f"{rank}.pth", weights_only=True)) for rank in range(2)]
    for squeezes in (False, True):
        norm, se = _synced(squeezes)
        for step in range(len(STEPS)):
            norm.zero_grad()
            shares = [_share(step, rank) for rank in range(2)]
            c, shortcut, grad = (torch.cat(parts) for parts in zip(*shares, strict=True))
            y = residual.plain(c.requires_grad_(), shortcut, norm, se)
            y.backward(grad)
            (y0, c0, *sums0, mean0, var0), (y1, c1, *sums1, mean1, var1) = map(next, ranks)
            torch.testing.assert_close(torch.cat([y0, y1]), y.detach())
            torch.testing.assert_close(torch.cat([c0, c1]), c.grad)
            torch.testing.assert_close(sums0[0] + sums1[0], norm.weight.grad)
            torch.testing.assert_close(sums0[1] + sums1[1], norm.bias.grad)
            for mean, var in ((mean0, var0), (mean1, var1)):
                torch.testing.assert_close(mean, norm.running_mean)
                torch.testing.assert_close(var, norm.running_var)
