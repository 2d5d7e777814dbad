"""3x3 convolutions on the CPU by Winograd's algorithm, with a fourth of the multiplications.

PyTorch's own convolutions have one error in each memory layout. If the weights of a kernel are of
one size, the errors of the output and of both gradients in float32 are here at most twice the
larger of these (tests/cpu/test_winograd.py). In a kernel with a single weight that is not zero they
are up to six times as large. A value that is not finite reaches whole tiles of outputs.

The kernel is native/winograd.cpp. If the gradient of a map is zero at most positions, as after the
loss of an RPN, only the products of the others are computed. In bfloat16 all other convolutions are
PyTorch's, except where the processor has it at twice the rate of float32.

:func:`use_winograd` exchanges the class of convolutions that exist, and does not put others in
their places: hooks belong to these very objects, and several modules may hold one of them. Which
way a convolution takes is decided at each call, because layout, dtype, threads and gradients may be
others at the next one: first :func:`_pays`, and otherwise :meth:`_Conv2d._by_pytorch`.
"""

from __future__ import annotations

import functools
from itertools import pairwise
from typing import Any

import torch
from detectron2.layers import Conv2d
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.grad import conv2d_weight
from torchvision.ops.misc import Conv2dNormActivation

from lambda_det.cpu.folding import folded, is_foldable
from lambda_det.cpu.pooling import without_mkl
from lambda_det.native import (
    call,
    has,
    is_recorded,
    lay_out,
    longs,
    missing,
    new_map,
    pixels,
    readable,
)
from lambda_det.native.calls import differentiable_once, is_hooked

_LEAST = 128  # channels: the error of a sum over fewer would be more than twice PyTorch's
# The least number of channels, and of positions for each channel, for which the transforms pay. In
# bfloat16 PyTorch's convolution takes half the time.
_PAYS_FROM = {torch.float32: (1, 4), torch.float64: (1, 4), torch.bfloat16: (64, 16)}
_MULTIPLE = 16  # the kernel in C++ reads whole vectors of channels
_PANELS = 64  # up to this number, a transformed kernel's columns are padded to whole panels
_BETWEEN = 32  # numbers between the 36 of them, and of their gradients
# In a sparse gradient at most one of this number of positions is not zero. Winograd's error reaches
# the whole tile of each, where plain sums leave zeros: at a hundredth it would be up to three times
# as large.
_SPARSE = 4


def use_winograd(model: nn.Module, on: bool = True) -> None:
    """Let the convolutions in ``model`` take this path wherever it pays, or undo that.

    It serves convolutions of stride 1 with 3x3 kernels. Those of Detectron2's own class, and those
    in a torch.nn.Sequential, with kernels of any size, also fold the norm behind them as long as
    its statistics are fixed. Other subclasses stay as they are.
    """
    other = FAST_CONVOLUTIONS | FAST_SEQUENCES
    if not on:
        other = {fast: plain for plain, fast in other.items()}
    for module in model.modules():
        # Detectron2's class ignores the padding mode, and PyTorch's follows it
        if type(module) in other and getattr(module, "padding_mode", "zeros") == "zeros":
            module.__class__ = other[type(module)]


class _Conv2d(Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        """Map [B, C, H, W] to [B, C', H', W']."""
        if is_recorded():  # graphs have PyTorch's operators
            return super().forward(x)
        norm, activation = self.norm, self.activation
        if readable(x, self.weight) and is_foldable(norm, self.weight):
            return self._convolved(x, *folded(norm, self.weight, self.bias), activation)
        if norm is None:
            return self._convolved(x, self.weight, self.bias, activation)
        x = norm(self._convolved(x, self.weight, self.bias))
        return x if activation is None else activation(x)

    def _convolved(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: Any = None
    ) -> Tensor:
        autocasts = torch.is_autocast_enabled("cpu")
        dtype = torch.get_autocast_dtype("cpu") if autocasts else x.dtype
        relu = activation is F.relu or (type(activation) is nn.ReLU and not is_hooked(activation))
        sides = self.kernel_size, self.stride, self.padding, self.dilation
        is_3x3 = self.groups == 1 and sides == ((3, 3), (1, 1), (1, 1), (1, 1))
        if is_3x3 and _pays(x, weight, bias, dtype):
            bias = bias if bias is None else bias.to(dtype)
            x = winograd_conv2d(x.to(dtype), weight.to(dtype), bias, relu)
        else:
            x = self._by_pytorch(x, weight, bias, dtype)
            x = x.relu_() if relu else x
        return x if relu or activation is None else activation(x)

    def _by_pytorch(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """PyTorch's convolution, kept from the two cases in which it takes long."""
        if self.kernel_size == (1, 1) and dtype == torch.float32 and _left_to_mkl():
            # A dilation, which moves no tap, keeps PyTorch from MKL
            return F.conv2d(x, weight, bias, self.stride, self.padding, 2, self.groups)
        is_depthwise = self.groups == self.in_channels == self.out_channels > 1
        is_slow = dtype == torch.bfloat16 and is_depthwise and max(self.stride) > 1
        if is_slow and _has_one_dtype(dtype, x, weight, bias) and _learns(x, weight):
            # In bfloat16 oneDNN's gradients take 5 to 20 times the time of those in float32
            with torch.autocast("cpu", enabled=False):
                bias = bias if bias is None else bias.float()
                return self._conv_forward(x.float(), weight.float(), bias).bfloat16()
        return self._conv_forward(x, weight, bias)


class _PlainConv2d(_Conv2d):
    """PyTorch's convolution, which calls neither a norm nor an activation that it may have."""

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, C, H, W] to [B, C', H', W']."""
        if is_recorded():
            return nn.Conv2d.forward(self, x)
        return self._convolved(x, self.weight, self.bias)


# The classes of convolutions, each with the class that replaces it here
FAST_CONVOLUTIONS: dict[type[nn.Conv2d], type[nn.Conv2d]] = {
    Conv2d: _Conv2d,
    nn.Conv2d: _PlainConv2d,
}


class _Folding(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        """What the modules in their order compute, with norms in the convolutions before them."""
        if is_recorded():
            return super().forward(input)
        is_folded = False
        for module, behind in pairwise([*self, None]):
            if is_folded:  # this norm is in the convolution before it
                is_folded = False
            elif _takes_norm(module, behind, input):
                input = module._convolved(input, *folded(behind, module.weight, module.bias))
                is_folded = True
            else:
                input = module(input)
        return input


def _takes_norm(module: nn.Module, norm: nn.Module | None, x: Tensor) -> bool:
    """Whether a norm can be folded into the module before it, whose input is x."""
    return (
        type(module) is _PlainConv2d
        and not is_hooked(module)
        and readable(x, module.weight)
        and x.dim() == 4  # norms refuse maps without a batch
        and is_foldable(norm, module.weight)
    )


class _FoldingConvolution(_Folding, Conv2dNormActivation):
    """torchvision's sequence of a convolution, a norm and an activation."""


# The classes of sequences, each with the class that replaces it here
FAST_SEQUENCES: dict[type[nn.Module], type[nn.Module]] = {
    nn.Sequential: _Folding,
    Conv2dNormActivation: _FoldingConvolution,
}


def _left_to_mkl() -> bool:
    """Whether 1x1 kernels take twice oneDNN's time: on one thread PyTorch gives them to MKL."""
    return torch.get_num_threads() == 1 and without_mkl()


def _learns(x: Tensor, weight: Tensor) -> bool:
    """Whether a convolution on the CPU has gradients."""
    needed = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return needed and readable(x, weight)


def _has_one_dtype(dtype: torch.dtype, *tensors: Tensor | None) -> bool:
    """Whether a convolution in this dtype takes them; autocast leaves float64 alone."""
    fitting = {dtype, torch.float32} if torch.is_autocast_enabled("cpu") else {dtype}
    return {x.dtype for x in tensors if x is not None} <= fitting


def _pays(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> bool:
    # The kernel gets pointers and checks nothing
    if bias is not None and not (readable(bias) and bias.shape == weight.shape[:1]):
        return False
    if not readable(x, weight) or x.dim() != 4 or x.shape[1] != weight.shape[1]:
        return False
    if dtype not in _PAYS_FROM or not _has_one_dtype(dtype, x, weight):
        return False
    if not weight.is_contiguous(memory_format=torch.channels_last):
        return False  # the output is, and in this network no map should be
    channels, positions = weight.shape[:2], x.numel() // x.shape[1]
    least, for_each = _PAYS_FROM[dtype]
    if min(channels) < least or any(number % _MULTIPLE for number in channels):
        return False
    if positions < for_each * min(channels) or missing():
        return False
    return dtype != torch.bfloat16 or torch.is_grad_enabled() or _twice_the_rate()


def winograd_conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, relu: bool = False
) -> Tensor:
    """The convolution of stride 1 and padding 1, F(4x4, 3x3) of Lavin and Gray, section 4.1.

    Sums over fewer than 128 channels are left to PyTorch, except in bfloat16, whose rounding error
    is larger; the gradient of the weight, a sum over positions, is computed here.

    Args:
        x: [B, C, H, W] in float32, float64 or bfloat16 on the CPU; C is a multiple of 16.
        weight: [C', C, 3, 3]; C' is a multiple of 16.
        bias: [C'].
        relu: whether to return max(0, output).

    Returns:
        [B, C', H, W], in the layout of x or channels last. It can be differentiated once.
    """
    return _Winograd.apply(x, weight, bias, relu)


class _Winograd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
        if _left_to_pytorch(x):
            output = F.conv2d(x, weight, bias, padding=1)
            output = output.relu_() if relu else output
        else:
            output = _convolve(x, weight.permute(2, 3, 1, 0), bias, relu)
        ctx.save_for_backward(x, weight, output if relu else None)
        return output

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rectified = ctx.saved_tensors
        of_x, of_weight, of_bias, _ = ctx.needs_input_grad
        if rectified is not None:
            grad = torch.ops.aten.threshold_backward(grad, rectified, 0)
        # The products of a gradient in float32 stay in it
        with torch.autocast("cpu", enabled=False):
            dense, sparse = _Dense(grad), _Sparse.of(grad)

            def by(factor: Tensor) -> _Sparse | _Dense:
                """A NaN in the other factor must reach the result where the gradient is 0."""
                return sparse if sparse and factor.sum(dtype=torch.float64).isfinite() else dense

            return (
                by(weight).of_map(weight) if of_x else None,
                by(x).of_kernel(x) if of_weight else None,
                grad.sum((0, 2, 3)) if of_bias else None,
                None,
            )


def _left_to_pytorch(x: Tensor) -> bool:
    if x.dtype == torch.bfloat16:
        return not _twice_the_rate()
    return x.shape[1] < _LEAST


@functools.cache
def _twice_the_rate() -> bool:
    """Whether bfloat16 has only twice the rate of float32 here; with AMX it has much more."""
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()  # not in older PyTorch
    return has("convolve", torch.bfloat16) and not capabilities.get("amx_tile", True)


class _Dense:
    def __init__(self, grad: Tensor) -> None:
        self.grad = grad

    def of_map(self, weight: Tensor) -> Tensor:
        # The convolution of the gradient with the turned kernel
        if _left_to_pytorch(self.grad):
            return F.conv2d(self.grad, weight.flip(2, 3).transpose(0, 1), padding=1)
        return _convolve(self.grad, weight.flip(2, 3).permute(2, 3, 0, 1))

    def of_kernel(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        out = self.grad.shape[1]
        if x.dtype == torch.bfloat16 and not _twice_the_rate():
            return conv2d_weight(x, (out, channels, 3, 3), self.grad, padding=1)
        sizes = longs((batch, height, width, channels, out, 0))
        sums = x.new_empty(36, channels * out + _BETWEEN, dtype=_summed_in(x))
        gradient = sums.new_empty(3, 3, channels, out)
        call("convolution_gradient", x.dtype, sizes, pixels(x), pixels(self.grad), sums, gradient)
        of_kernel = new_map(gradient, out, channels, 3, 3)  # autograd gives it the kernel's dtype
        lay_out(of_kernel.permute(2, 3, 1, 0)[..., None, :], gradient[..., None, :])
        return of_kernel


class _Sparse:
    """A gradient that is zero at most positions: only the products of the others."""

    def __init__(self, grad: Tensor, positions: Tensor) -> None:
        """The gradient [B, H, W, C'], and which of its B * H * W vectors are not zero [K]."""
        self.rows = grad.flatten(0, 2)[positions]
        batch, height, width, _ = grad.shape
        self.padded = batch, height + 2, width + 2
        rows, column = positions // width, positions % width
        corner = (rows + rows // height * 2) * (width + 2) + column
        steps = torch.arange(3)
        self.windows = corner[:, None] + (steps[:, None] * (width + 2) + steps).flatten()

    @classmethod
    def of(cls, grad: Tensor) -> _Sparse | None:
        grad = pixels(grad)
        vectors = grad.flatten(0, 2)
        # A sample of a few numbers shows of most gradients that they are not sparse
        if vectors[::7, :_MULTIPLE].any(-1).float().mean() > 0.5:
            return None
        positions = vectors.any(-1).nonzero().flatten()
        return cls(grad, positions) if len(positions) <= len(vectors) // _SPARSE else None

    def of_map(self, weight: Tensor) -> Tensor:
        products = (self.rows @ weight.permute(0, 2, 3, 1).flatten(1)).unflatten(1, (9, -1))
        padded = products.new_zeros(*self.padded, weight.shape[1])
        flat = padded.flatten(0, 2)
        for step in range(9):  # in one step all positions differ
            flat[self.windows[:, step]] += products[:, step]
        return padded[:, 1:-1, 1:-1].contiguous().permute(0, 3, 1, 2)

    def of_kernel(self, x: Tensor) -> Tensor:
        padded = F.pad(pixels(x), (0, 0, 1, 1, 1, 1)).flatten(0, 2)
        products = self.rows.T @ padded[self.windows].flatten(1)
        return products.unflatten(1, (3, 3, -1)).permute(0, 3, 1, 2)


def _convolve(x: Tensor, kernel: Tensor, bias: Tensor | None = None, relu: bool = False) -> Tensor:
    """The maps [B, C, H, W] with a kernel [3, 3, C, C']."""
    dtype = _summed_in(x)
    batch, channels, height, width = x.shape
    out = kernel.shape[3]
    sizes = longs((batch, height, width, channels, out, relu))
    transformed = x.new_empty(36 * (channels * (out + _PANELS) + _BETWEEN), dtype=dtype)
    output = new_map(x, batch, out, height, width)
    bias = x.new_zeros(out, dtype=dtype) if bias is None else bias.to(dtype).contiguous()
    taps = kernel.new_empty(kernel.shape, dtype=dtype)
    lay_out(taps[..., None, :], kernel[..., None, :])
    call("transform_kernel", x.dtype, sizes, taps, transformed)
    call("convolve", x.dtype, sizes, pixels(x), transformed, bias, pixels(output))
    return output


def _summed_in(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype == torch.bfloat16 else x.dtype
