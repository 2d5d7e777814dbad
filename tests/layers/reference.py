"""The lambda layer as the paper defines it, one query and one context position at a time.

And what all implementations of the local position output are compared with it by.
"""

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

RESULTS = ("output", "queries", "values", "embedding")


def with_gradients(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor | None = None
) -> list[Tensor]:
    """The output of a function, and the gradients of its inputs.

    Args:
        function: of the inputs.
        inputs: queries, values and embedding, that require gradients.
        grad: of the output; without one numbers from -1 to 1.
    """
    output = function(*inputs)
    if grad is None:
        grad = torch.linspace(-1, 1, output.numel()).view(output.shape).to(output)
    grads = torch.autograd.grad(output, inputs, grad.to(output.dtype), materialize_grads=True)
    return [output, *grads]


def assert_close(got: Sequence[Tensor], want: Sequence[Tensor], about: object = "", **tolerance):
    """Compare results of :func:`with_gradients`, number by number."""
    for name, a, b in zip(RESULTS, got, want, strict=True):
        torch.testing.assert_close(a, b, **tolerance, msg=f"{name} {about}: {{}}".format)


def errors(got: Sequence[Tensor], want: Sequence[Tensor]) -> dict[str, float]:
    """The norms of the errors of such results, as shares of the norms."""
    pairs = zip(RESULTS, got, want, strict=True)
    return {name: ((a.double() - b).norm() / b.norm()).item() for name, a, b in pairs}


def exactly(inputs: Sequence[Tensor]) -> list[Tensor]:
    """The same inputs in float64."""
    return [x.detach().double().requires_grad_() for x in inputs]


def laid_out(shape: Sequence[int], order: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A random tensor of that shape whose memory has the axes in that order."""
    tensor = torch.randn([shape[axis] for axis in order], dtype=dtype)
    return tensor.permute([order.index(axis) for axis in range(len(shape))])


def local_position_output(
    queries: Tensor, values: Tensor, embedding: Tensor, dilation: int = 1
) -> Tensor:
    """[b, H, W, h, k], [b, H, W, v, u] and [k, u, r_y, r_x] give [b, H, W, h, v]."""
    positions = queries.shape[1:3].numel()
    mask = torch.ones(len(queries), positions, positions, dtype=torch.bool)
    return grid_position_output(queries, values, embedding, stride=1, dilation=dilation, mask=mask)


def grid_position_output(
    queries: Tensor, values: Tensor, embedding: Tensor, *, stride: int, dilation: int, mask: Tensor
) -> Tensor:
    """As above for queries [b, *Q, h, k] on a grid of any dimension, in steps of ``stride`` on that
    of the values [b, *C, v, u]; embedding [k, u, *r].

    By the mask, bool [b, n, m], query n sees value m where it is True.
    """
    size, context = queries.shape[1:-2], values.shape[1:-2]
    outputs = []
    for n, place in enumerate(itertools.product(*map(range, size))):
        lambda_n = values.new_zeros(len(values), len(embedding), values.shape[-2])
        for m, other in enumerate(itertools.product(*map(range, context))):
            steps = [o - stride * p for o, p in zip(other, place, strict=True)]
            if any(step % dilation for step in steps):
                continue
            sides = embedding.shape[2:]
            at = [step // dilation + side // 2 for step, side in zip(steps, sides, strict=True)]
            if all(0 <= a < side for a, side in zip(at, sides, strict=True)):
                value, seen = values[(slice(None), *other)], mask[:, n, m]  # [b, v, u]
                if not seen.all():
                    value = value * seen[:, None, None]
                e = embedding[(slice(None), slice(None), *at)]  # [k, u]
                lambda_n = lambda_n + e @ value.mT  # [b, k, v]
        outputs.append(queries[(slice(None), *place)] @ lambda_n)
    return torch.stack(outputs, dim=1).unflatten(1, size)


KEY_NORMS = {  # of the keys [m, k, u] of one context
    "softmax": lambda keys: keys.exp() / keys.exp().sum(0),
    "l2": lambda keys: keys / keys.pow(2).sum(0).sqrt(),
    "none": lambda keys: keys,
}


def content_output(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, key_norm: str = "softmax"
) -> Tensor:
    """[b, n, h, k], [b, m, k, u], [b, m, v, u] and bool [b, n, m] give [b, n, h, v]."""
    outputs = []
    lambdas: dict[tuple[int, ...], Tensor] = {}  # by image and context, which queries may share
    for n in range(queries.shape[1]):
        per_image = []
        for b in range(queries.shape[0]):
            context = [m for m in range(keys.shape[1]) if mask[b, n, m]]
            if (b, *context) not in lambdas:
                lambda_n = queries.new_zeros(keys.shape[2], values.shape[2])
                if context:
                    kept = torch.stack([keys[b, m] for m in context])  # [m', k, u]
                    kept = KEY_NORMS[key_norm](kept)
                    for index, m in enumerate(context):
                        lambda_n = lambda_n + kept[index] @ values[b, m].T
                lambdas[b, *context] = lambda_n
            per_image.append(queries[b, n] @ lambdas[b, *context])
        outputs.append(torch.stack(per_image))
    return torch.stack(outputs, dim=1)


def layer_output(
    layer: nn.Module,
    x: Tensor,
    mask: Tensor | None = None,
    context: Tensor | None = None,
    embeddings: Tensor | None = None,
) -> Tensor:
    """A lambda layer's output from its parameters, by the loops of this file.

    Args:
        layer: on maps, or the general one of projects/paper, for what follows.
        x: [B, C, ..].
        mask: bool [b, n, m], whether query n sees position m.
        context: [B, C, ..], if it is not the input.
        embeddings: [n, m, k, u] or [b, n, m, k, u], if they are not the layer's own.
    """
    stride = getattr(layer, "stride", 1)
    context = x if context is None else context
    every = slice(None, None, stride)
    x = x[(..., *[every] * (x.dim() - 2))]
    size, places = x.shape[2:], context.shape[2:]
    batch, positions, others = x.shape[0], size.numel(), places.numel()
    groups = layer.heads if layer.multi_head else 1

    queries, keys, values = (
        torch.einsum("oi,bin->bon", rows[:, :, 0, 0], source.flatten(2))
        for rows, source in zip(
            layer.qkv.weight.split(layer.rows), (x, context, context), strict=True
        )
    )
    queries, keys, values = (
        y.mT  # [b, n, channels]
        for y in (
            layer.query_norm(queries[..., None])[..., 0],
            keys,
            layer.value_norm(values[..., None])[..., 0],
        )
    )
    queries = queries.reshape(batch, positions, layer.heads, -1)
    values = values.reshape(batch, others, groups, layer.value_depth, layer.intra_depth)
    if layer.query_softmax:
        queries = queries.exp() / queries.exp().sum(-1, keepdim=True)
    if mask is None:
        mask = torch.ones(batch, positions, others, dtype=torch.bool)
    outputs = []
    for group in range(groups):
        q = queries[:, :, group : group + 1] if layer.multi_head else queries
        v = values[:, :, group]
        y = torch.zeros(batch, positions, q.shape[2], layer.value_depth, dtype=x.dtype)
        if layer.content is not None:
            k = keys.unflatten(2, (groups, layer.query_depth, layer.intra_depth))[:, :, group]
            y = y + content_output(q, k, v, mask, layer.content.key_norm)
        if embeddings is not None:
            pairs = embeddings.expand(batch, *embeddings.shape[-4:])
            for n in range(positions):
                for m in range(others):
                    lambda_n = pairs[:, n, m] @ (v[:, m] * mask[:, n, m, None, None]).mT
                    at = torch.zeros(positions, 1, 1, dtype=x.dtype)
                    at[n] = 1
                    y = y + at * (q[:, n] @ lambda_n)[:, None]
        if layer.position is not None:
            embedding = layer.position.table(group)
            rows = (1,) if len(size) == 1 else ()  # of a sequence
            position = grid_position_output(
                q.unflatten(1, (*rows, *size)),
                v.unflatten(1, (*rows, *places)),
                embedding,
                stride=stride,
                dilation=layer.dilation,
                mask=mask,
            ).flatten(1, -3)
            if layer.position.bias is not None:
                bias = layer.position.bias[group] if layer.multi_head else layer.position.bias
                lambda_n = bias[:, None].expand(-1, layer.value_depth)  # [k, v]
                position = position + q @ lambda_n
            y = y + position
        outputs.append(y)
    y = torch.cat(outputs, dim=2)  # [b, n, h, v]
    return y.flatten(2).mT.unflatten(2, size)
