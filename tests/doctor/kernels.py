"""Implementations that are wrong on purpose, and the checks of the doctor with them."""

from __future__ import annotations

import io
import os
import signal
import sys
from pathlib import Path

import torch

from lambda_det.doctor import gpu_checks
from lambda_det.layers.local import IMPLEMENTATIONS
from lambda_det.layers.local.lambda_first import dense_output


def slightly_wrong(queries, values, embedding):
    """As a kernel that leaves out one offset of the scope."""
    embedding = embedding.clone()
    embedding[..., -1, -1] = 0
    return dense_output(queries, values, embedding)


def crash(*inputs):
    os.kill(os.getpid(), signal.SIGSEGV)


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, queries, values, embedding):
        ctx.save_for_backward(queries, values, embedding)
        return dense_output(queries, values, embedding)

    @staticmethod
    def backward(ctx, grad):
        inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            output = dense_output(*inputs)
        of_queries, of_values, of_embedding = torch.autograd.grad(output, inputs, grad)
        return of_queries, of_values * 1.001, of_embedding


class _NotZeroed(_WrongGradient):
    @staticmethod
    def backward(ctx, grad):
        of_queries, of_values, of_embedding = _WrongGradient.backward(ctx, grad)
        return of_queries, of_values / 1.001, of_embedding + (len(grad) == 0)


def wrong_gradient(queries, values, embedding):
    return _WrongGradient.apply(queries, values, embedding)


def in_double(*inputs):
    return dense_output(*inputs).double()


def in_short(*inputs):
    """With products in 16 bits, which float32 does not allow."""
    return dense_output(*(x.bfloat16() for x in inputs)).to(inputs[0].dtype)


def less_exact_on_other_maps(queries, values, embedding):
    """By three units in the last place; plain PyTorch is right to one."""
    y = dense_output(queries, values, embedding)
    return y if queries.shape[1] == 4 else y * (1 + 3.6e-7)


def wrong_beyond_a_size(queries, values, embedding):
    """As a kernel whose offsets overflow."""
    y = dense_output(queries, values, embedding)
    return y if queries.numel() <= 3000 else torch.cat([y[:-1], 0 * y[-1:]])


_calls = [0]


def never_the_same(*inputs):
    _calls[0] += 1
    return dense_output(*inputs) * (1 + 1.2e-7 * (_calls[0] % 2))


def across_images(queries, values, embedding):
    y = dense_output(queries, values, embedding)
    return y + 0 * y + 1e-3 * (y.sum(0, keepdim=True) - y)


def never_empty(queries, values, embedding):
    return _NotZeroed.apply(queries, values, embedding)


def not_written(queries, values, embedding):
    y = dense_output(queries, values, embedding)
    return torch.where(torch.arange(y.shape[-1]) == 0, torch.nan, y)


WRONG = {
    "slightly_wrong": slightly_wrong,
    "wrong_gradient": wrong_gradient,
    "in_double": in_double,
    "in_short": in_short,
    "less_exact_on_other_maps": less_exact_on_other_maps,
    "never_the_same": never_the_same,
    "across_images": across_images,
    "never_empty": never_empty,
    "not_written": not_written,
}

if __name__ == "__main__":
    IMPLEMENTATIONS.update(slightly_wrong=slightly_wrong, crash=crash)
    if len(sys.argv) > 1:
        sys.stdin = io.StringIO(Path(sys.argv[1]).read_text())
    gpu_checks.REPEATS, gpu_checks.ROUNDS, gpu_checks.SHORTEST = 2, 1, 0.0
    gpu_checks.main()
