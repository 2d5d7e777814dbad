"""The end of a bottleneck block in one piece: norm, squeeze-and-excitation, shortcut and ReLU.

With batch norm, all that follows the last convolution is an affine map per image and channel,
y = relu(shortcut + A c + B), for the mean that squeeze-and-excitation takes of the normalised map
follows from the mean of c. So nothing of the map's size is made but y, and nothing is kept for the
backward pass but c, which batch norm keeps anyway, and y, which the next block keeps anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from detectron2.layers import FrozenBatchNorm2d
from detectron2.utils import comm
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lambda_det.layers.hooks import is_watched
from lambda_det.layers.saturation import saturate
from lambda_det.modeling.convolution import SaturatingConv2d
from lambda_det.modeling.norm import (
    SyncBatchNorm2d,
    join_processes,
    move_running_statistics,
)

__all__ = ["covers", "finish", "plain"]

_NORMS = (nn.BatchNorm2d, SyncBatchNorm2d, nn.SyncBatchNorm, FrozenBatchNorm2d)


def covers(conv: nn.Module, se: nn.Module | None, device: torch.device) -> bool:
    """Whether :func:`finish` has more than the plain form for the modules as they are now.

    It has on the CPU, for the batch norms of PyTorch, Detectron2 and this package. Modules whose
    outputs somebody watches through hooks must be called, and what is compiled or traced is left to
    the compiler, which fuses the plain form by itself. On a GPU it was not measured.

    Args:
        conv: the last convolution, with its norm.
        se: the squeeze-and-excitation that follows, with 1x1 convolutions ``reduce`` and
            ``expand``, or None.
        device: of the block's input.
    """
    if device.type != "cpu" or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    norm = getattr(conv, "norm", None)
    if (
        type(conv) is not SaturatingConv2d
        or conv.activation is not None
        or type(norm) not in _NORMS
    ):
        return False
    if type(norm) is FrozenBatchNorm2d and se is None and torch.is_grad_enabled():
        return False  # its plain form keeps y alone
    if type(norm) is nn.SyncBatchNorm and norm.training and dist.is_initialized():
        return False  # it says itself that it has no CPU form
    parts = [conv, norm] if se is None else [conv, norm, *se.modules()]
    return not is_watched(*parts)


def plain(c: Tensor, shortcut: Tensor, norm: nn.Module, se: nn.Module | None) -> Tensor:
    """What :func:`finish` computes, by the modules one after the other."""
    out = saturate(norm(saturate(c)))
    if se is not None:
        out = se(out)
    return F.relu_(saturate(out + shortcut))


def finish(c: Tensor, shortcut: Tensor, norm: nn.Module, se: nn.Module | None) -> Tensor:
    """relu(se(norm(c)) + shortcut), with norm's running statistics moved as it moves them.

    It can be differentiated once.

    Args:
        c: [B, C, H, W], the output of the last convolution. Without gradients it is overwritten.
        shortcut: [B, C, H, W].
        norm: of c.
        se: as in :func:`covers`.

    Returns:
        [B, C, H, W].
    """
    parameters = [norm.weight, norm.bias]
    if se is not None:
        parameters += [se.reduce.weight, se.reduce.bias, se.expand.weight, se.expand.bias]
    by_batch = type(norm) is not FrozenBatchNorm2d and (norm.training or norm.running_mean is None)
    synced = by_batch and type(norm) is SyncBatchNorm2d and comm.get_world_size() > 1
    if not _fits(c, shortcut, [norm.running_mean, *parameters]) or (
        not synced and c.numel() < 2 * c.shape[1]
    ):
        return plain(c, shortcut, norm, se)
    with torch.autocast("cpu", enabled=False):
        with torch.no_grad():
            statistics = _statistics(c, norm, by_batch, synced, se is not None)
        inputs = [c, shortcut, *parameters]
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs):
            return _Finish.apply(statistics, synced, *inputs)
        with torch.no_grad():
            return _affine(statistics, parameters).write(c, shortcut, out=c)


def _fits(c: Tensor, shortcut: Tensor, numbers: Sequence[Tensor | None]) -> bool:
    """Whether all is of one dtype that needs no wider one for statistics."""
    return (
        type(c) is Tensor
        and c.dtype in (torch.float32, torch.float64)
        and c.shape == shortcut.shape
        and all(t is None or t.dtype == c.dtype for t in (shortcut, *numbers))
    )


class _Statistics(NamedTuple):
    """What normalises c.

    Attributes:
        mean: [C].
        inv_std: [C].
        count: values per channel [] that mean and inv_std are of; None where they are not of c.
        image_means: of c [B, C]; None where nothing needs it.
    """

    mean: Tensor
    inv_std: Tensor
    count: Tensor | None
    image_means: Tensor | None


def _statistics(
    c: Tensor, norm: nn.Module, by_batch: bool, synced: bool, squeeze: bool
) -> _Statistics:
    image_means = c.mean((2, 3)) if squeeze else None
    if not by_batch:
        inv_std = torch.rsqrt(norm.running_var + norm.eps)
        return _Statistics(norm.running_mean, inv_std, None, image_means)
    mean, var = c.new_zeros(2, c.shape[1])
    count = c.new_full((), c.numel() // c.shape[1])
    if c.numel() > 0:
        mean, var = torch.batch_norm_update_stats(c, None, None, 0.0)
    if synced:
        mean, var, count = join_processes(mean, var, count)
    if norm.training and norm.running_mean is not None:
        move_running_statistics(norm, mean, var, count)
    return _Statistics(mean, torch.rsqrt(var + norm.eps), count, image_means)


class _Excitation(NamedTuple):
    """Numbers of squeeze-and-excitation: [B, C], [B, C / 4] and [B, C]."""

    squeezed: Tensor
    hidden: Tensor
    gate: Tensor


def _excite(squeezed: Tensor, weights: Sequence[Tensor]) -> _Excitation:
    """Gate of the means [B, C]; ``weights`` are weight and bias of ``reduce`` and ``expand``."""
    down, down_bias, up, up_bias = weights
    hidden = F.relu_(F.linear(squeezed, down.flatten(1), down_bias))
    return _Excitation(squeezed, hidden, torch.sigmoid(F.linear(hidden, up.flatten(1), up_bias)))


def _excite_backward(
    grad_gate: Tensor, excitation: _Excitation, weights: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Gradients of ``squeezed`` and of the weights."""
    squeezed, hidden, gate = excitation
    down, _, up, _ = weights
    grad_logits = grad_gate * gate * (1 - gate)
    grad_hidden = (grad_logits @ up.flatten(1)) * (hidden > 0)
    gradients = [grad_hidden.T @ squeezed, grad_hidden.sum(0)]
    gradients += [grad_logits.T @ hidden, grad_logits.sum(0)]
    return grad_hidden @ down.flatten(1), gradients


class _Affine(NamedTuple):
    """y = relu(shortcut + scale c + offset).

    Attributes:
        scale: [C], or [B, C] with squeeze-and-excitation.
        offset: the same.
        excitation: None without.
    """

    scale: Tensor
    offset: Tensor
    excitation: _Excitation | None

    def write(self, c: Tensor, shortcut: Tensor, out: Tensor) -> Tensor:
        """Compute y into ``out``, which may be c."""
        torch.addcmul(shortcut, c, _over_positions(self.scale), out=out)
        return out.add_(_over_positions(self.offset)).relu_()


def _affine(statistics: _Statistics, parameters: Sequence[Tensor | None]) -> _Affine:
    """Fold norm and squeeze-and-excitation; ``parameters`` are their weights and biases."""
    mean, inv_std = statistics.mean, statistics.inv_std
    weight, bias = _weight_and_bias(mean, parameters)
    scale = inv_std * weight
    offset = bias - mean * scale
    if len(parameters) == 2:
        return _Affine(scale, offset, None)
    squeezed = (statistics.image_means - mean) * scale + bias
    excitation = _excite(squeezed, parameters[2:])
    return _Affine(excitation.gate * scale, excitation.gate * offset, excitation)


def _weight_and_bias(mean: Tensor, parameters: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
    weight, bias = parameters[:2]
    return (
        torch.ones_like(mean) if weight is None else weight,
        torch.zeros_like(mean) if bias is None else bias,
    )


def _over_positions(numbers: Tensor) -> Tensor:
    """[C] or [B, C] as what a map [B, C, H, W] can be multiplied by."""
    return numbers[..., None, None]


class _Finish(torch.autograd.Function):
    """The end of the block; its backward pass needs c, y and numbers per image and channel."""

    @staticmethod
    def forward(
        ctx,
        statistics: _Statistics,
        synced: bool,
        c: Tensor,
        shortcut: Tensor,
        *parameters: Tensor | None,
    ) -> Tensor:
        affine = _affine(statistics, parameters)
        y = affine.write(c, shortcut, out=torch.empty_like(c))
        ctx.synced = synced
        ctx.save_for_backward(c, y, *statistics, *parameters, *(affine.excitation or ()))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        c, y, *saved = ctx.saved_tensors
        statistics, saved = _Statistics(*saved[:4]), saved[4:]
        g = torch.empty_like(y)
        torch.ops.aten.threshold_backward.grad_input(grad, y, 0, grad_input=g)
        with torch.autocast("cpu", enabled=False):
            grad_c, gradients = _affine_backward(
                g, c, statistics, saved, synced=ctx.synced, wants_c=ctx.needs_input_grad[2]
            )
        return None, None, grad_c, g, *gradients


def _affine_backward(
    g: Tensor,
    c: Tensor,
    statistics: _Statistics,
    saved: Sequence[Tensor | None],
    *,
    synced: bool,
    wants_c: bool,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Gradients of c and of the parameters, for the gradient g of scale c + offset.

    With m = (c - mean) inv_std, n = weight m + bias and s the mean of n over the positions, scale c
    + offset = gate(s) n, so that the gradient of n is gate g + grad_s / positions.
    """
    squeezes = statistics.image_means is not None
    parameters, excitation = (saved[:6], saved[6:]) if squeezes else (saved, None)
    mean, inv_std, count, image_means = statistics
    weight, bias = _weight_and_bias(mean, parameters)
    scale = inv_std * weight
    gate = excitation[2] if squeezes else torch.ones_like(mean)[None]  # [B or 1, C]

    # Where one gate is for all images, a norm's backward pass gives the map and the sums at once
    alike = len(gate) == 1 and not synced
    grad_c = None
    if alike:
        grad_c, g_m, g_sum = _norm_backward(g, c, statistics, gate[0] * weight, wants_c)
    else:
        g_m, g_sum = c.new_zeros(2, *c.shape[:2])
        for i in range(len(c)):  # on an empty map the operator would divide by zero
            image = slice(i, i + 1)
            _, g_m[i], g_sum[i] = _norm_backward(g[image], c[image], statistics, weight, False)

    grad_weight, grad_bias = (gate * g_m).sum(0), (gate * g_sum).sum(0)
    gradients, constant = [], torch.zeros_like(gate)
    if squeezes:
        grad_gate = g_m * weight + g_sum * bias
        grad_s, gradients = _excite_backward(grad_gate, _Excitation(*excitation), parameters[2:])
        grad_weight += (grad_s * (image_means - mean) * inv_std).sum(0)
        grad_bias += grad_s.sum(0)
        constant = grad_s * scale / c.shape[2:].numel()

    if not alike:
        by_c = None
        if count is not None:
            total = torch.stack([grad_bias, grad_weight])  # the order of `SyncBatchNorm2d`
            if synced:
                dist.all_reduce(total)
            grad_mean, projection = total / count.clamp(min=1)
            by_c = -scale * inv_std * projection
            constant = constant - scale * grad_mean - by_c * mean
        if wants_c:
            grad_c = g * _over_positions(gate * scale)
            if by_c is not None:
                grad_c.addcmul_(c, _over_positions(by_c))
            grad_c += _over_positions(constant)
    elif squeezes and count is None and wants_c:
        grad_c += _over_positions(constant)  # which statistics of c itself would take away again

    gradients = [
        None if parameter is None else gradient.view_as(parameter)
        for parameter, gradient in zip(
            parameters, [grad_weight, grad_bias, *gradients], strict=True
        )
    ]
    return grad_c, gradients


def _norm_backward(
    g: Tensor, c: Tensor, statistics: _Statistics, weight: Tensor, wants_c: bool
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Gradients of c, weight and bias where g is that of weight (c - mean) inv_std + bias.

    The last two are the sums [C] of g (c - mean) inv_std and of g.
    """
    mean, inv_std, count, _ = statistics
    return torch.ops.aten.native_batch_norm_backward(
        g,
        c,
        weight,
        mean,
        inv_std.pow(-2),  # the variance that a norm with an epsilon of 0 has in evaluation
        mean,
        inv_std,
        count is not None,
        0.0,
        [wants_c, True, True],
    )
