"""The lambda layer beyond maps: sequences, volumes, strides, other contexts, given embeddings.

Section 3.1 has contexts that are not the input, Section 3.4 strides. Embeddings that are given with
a call belong to any relation, such as the edges of a graph (Sections 2.1 and 3.1).

Letters are those of :mod:`lambda_det.layers.lambda_layer`. Shapes are written for maps, queries
[b, H, W, h, k] and values [b, H', W', v, u]. The positions of a sequence are a map of one row, and
those of a volume D, H, W. Phases of a stride and slices of a volume become intra-depth: everything
except separate contexts of queries and given embeddings becomes the sum of
:func:`lambda_det.layers.local_position_output` on one map. So every implementation that takes an
intra-depth above 1 computes them, forward and backward.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lambda_det.errors import ConfigError
from lambda_det.layers import LambdaLayer, RelativePosition, local_position_output
from lambda_det.layers.lambda_layer import cut_heads, depth_softmax, join_heads, normed, split
from lambda_det.layers.local import crop_offsets, grid_size, without_autocast
from lambda_det.layers.masked import hide_padding, spread


class GeneralPosition(RelativePosition):
    """:class:`RelativePosition` for maps and volumes, of values on another map than the queries.

    For volumes the embedding is [k, u, r_z, r_y, r_x], and sizes have three sides.
    """

    DIMENSIONS = (2, 3)

    def forward(
        self,
        queries: Tensor,
        values: Tensor,
        mask: Tensor | None = None,
        *,
        head: int = 0,
        dilation: int = 1,
        implementation: str = "auto",
        stride: int = 1,
    ) -> Tensor:
        """The position output for volumes, and for queries whose map is not that of the values.

        y[b, n, h, v] = sum over k, u and the offsets r of

            q[b, n, h, k] E[k, u, r] V[b, s n + r, v, u]

        with values of 0 outside their map. Query and value maps may have different sizes; their
        first positions coincide.

        Args:
            queries: [b, H, W, h, k].
            values: [b, H', W', v, u].
            mask: that of :class:`GeneralLambdaLayer`.
            head, dilation, implementation: see :class:`RelativePosition`.
            stride: s, how many positions of the values' map neighbouring queries are apart.

        Returns:
            [b, H, W, h, v].
        """
        size, context = queries.shape[1:-2], values.shape[1:-2]
        reached = [max(stride * (q - 1) + 1, v) for q, v in zip(size, context, strict=True)]
        embedding = crop_offsets(self.of_head(head, reached), *grid_size(reached, dilation))
        embedding = spread(embedding, dilation)
        if mask is not None and mask.dim() == 2:
            pairs = pairs_of_offsets(embedding, size, context, stride)
            y = pairs_output(queries, values, pairs, mask)
        else:
            if mask is not None:
                values = hide_padding(values, mask)
            y = _on_one_map(queries, values, embedding, implementation, stride)
        return self.add_bias(y, queries, head)


class GeneralLambdaLayer(LambdaLayer):
    """Lambda layer on maps [B, C, H, W], sequences [B, C, N] or volumes [B, C, D, H, W].

    Args:
        dim, dim_out: channels in and out.
        scope: odd side of the local scope, or its sides; for a sequence its length, for a volume
            (side_z, side_y, side_x). None for no position lambda, or together with ``map_size``.
        map_size: (H, W) of the largest map, for global position embeddings; needs ``scope=None``.
            For sequences (1, N), for volumes (D, H, W).
        stride: distance between neighbouring queries, in positions (Section 3.4). Only every
            ``stride``-th position of the input in each direction becomes a query.
        sequence: whether the input is a sequence; then an int ``scope`` means (1, scope).
        options: of :class:`LambdaLayer`.

    Shape:
        x: [B, dim, H, W], [B, dim, N] or [B, dim, D, H, W]; output: the same with dim_out channels,
            head-major (h, v), and sizes divided by the stride, rounded up.

    Raises:
        ConfigError: if the options contradict each other.
    """

    def __init__(
        self,
        dim: int,
        dim_out: int | None = None,
        *,
        scope: int | tuple[int, ...] | None = 23,
        map_size: tuple[int, ...] | None = None,
        stride: int = 1,
        sequence: bool = False,
        query_depth: int = 16,
        heads: int = 4,
        intra_depth: int = 1,
        multi_head: bool = False,
        position: GeneralPosition | None = None,
        position_bias: bool = False,
        **options: Any,
    ) -> None:
        if stride < 1:
            raise ConfigError(f"stride of a lambda layer is {stride}, but must be at least 1.")
        if position is None and (scope is not None or map_size is not None):
            position = GeneralPosition(
                query_depth,
                intra_depth,
                scope=(1 if sequence else scope, scope) if isinstance(scope, int) else scope,
                map_size=map_size,
                heads=heads if multi_head else None,
                bias=position_bias,
            )
        super().__init__(
            dim,
            dim_out,
            scope=None,
            query_depth=query_depth,
            heads=heads,
            intra_depth=intra_depth,
            multi_head=multi_head,
            position=position,
            **options,
        )
        self.stride = stride

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        context: Tensor | None = None,
        embeddings: Tensor | None = None,
    ) -> Tensor:
        """Map [B, dim, N] to [B, dim_out, ceil(N / stride)], maps and volumes likewise.

        Args:
            x: the input, which is both queries and context unless there is a ``context``.
            mask: None, or bool. [B, 1, ..], as large as the context: True at positions that belong
                to the input; the others, padding, take no part in any lambda. [n, m]: True where
                query n may look at context position m, rows first, for the whole batch (Appendix
                C.2).
            context: [B, dim, H', W'], from which keys and values are made (Section 3.1). Its first
                position is at the same place as that of ``x``.
            embeddings: position embeddings of this call instead of the layer's own, such as the
                relations of a graph: [n, m, k, u], or [B, n, m, k, u] for those of each example.
        """
        source = x if context is None else context
        self._check_input(x, source, mask, embeddings)
        if mask is not None and mask.dim() == 3:  # a sequence as a map of one row
            mask = mask[:, :, None]
        if self.stride > 1:
            context = source
            # a convolution would also copy the view, and with odd sides not recognise its layout
            every = slice(None, None, self.stride)
            x = x[(..., *[every] * (x.dim() - 2))].clone()
        parts = self.project(_as_map(x), None if context is None else _as_map(context))
        if x.dim() == 5:
            sizes = (x, source, source)
            parts = [y.unflatten(1, z.shape[2:4]) for y, z in zip(parts, sizes, strict=True)]
        y = self.apply_lambdas(*parts, mask)  # [b, H, W, h, v]
        if embeddings is not None:
            y = y + self._output_of_relations(*parts, embeddings, mask)
        y = y.flatten(-2)
        y = y.permute(0, -1, *range(1, y.dim() - 1))
        return y[:, :, 0] if x.dim() == 3 else y

    def project(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of ``x`` [b, dim, H, W]; keys and values of the context, if there is one."""
        queries, keys, values = self.qkv(x).split(self.rows, dim=1)
        if context is not None:
            # with all rows, because hooks of the convolution expect its whole output
            keys, values = self.qkv(context).split(self.rows, dim=1)[1:]
        queries = split(normed(self.query_norm, queries), self.query_depth)
        keys = split(keys, self.intra_depth)
        values = split(normed(self.value_norm, values), self.intra_depth)
        if self.query_softmax:
            queries = depth_softmax(queries).to(values.dtype)
        return queries, keys, values

    def position_output(
        self, queries: Tensor, values: Tensor, mask: Tensor | None, head: int
    ) -> Tensor:
        return self.position(
            queries,
            values,
            mask,
            head=head,
            dilation=self.dilation,
            implementation=self.implementation,
            stride=self.stride,
        )

    def _output_of_relations(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        embeddings: Tensor,
        mask: Tensor | None,
    ) -> Tensor:
        if not self.multi_head:
            return pairs_output(queries, values, embeddings, mask)
        of_heads = zip(cut_heads(queries, self.heads), cut_heads(values, self.heads), strict=True)
        return join_heads([pairs_output(q, v, embeddings, mask) for q, v in of_heads])

    def _check_input(
        self, x: Tensor, context: Tensor, mask: Tensor | None, embeddings: Tensor | None
    ) -> None:
        """Raise ConfigError where the arguments of a call do not fit the layer or each other."""
        dims = max(x.dim() - 2, 2)  # 2 for maps and sequences
        own = dims
        if self.position is not None:
            own = self.position.table().dim() - 2
        if x.dim() not in (3, 4, 5) or dims != own:
            raise ConfigError(
                f"A lambda layer got an input of the shape {list(x.shape)}; sequences [B, C, N] "
                "and maps [B, C, H, W] need a scope of 2 sides, and volumes [B, C, D, H, W] one of "
                "3, such as (7, 7, 7), or no scope."
            )
        if context.shape[:2] != x.shape[:2] or context.dim() != x.dim():
            raise ConfigError(
                f"The context of a lambda layer has the shape {list(context.shape)}; it must be "
                f"that of the input, {list(x.shape)}, except for the sizes of the map."
            )
        if embeddings is not None and self.position is not None:
            raise ConfigError(
                "This lambda layer has position embeddings of its own; make it with scope=None to "
                "give others with a call."
            )
        # The numbers of queries and of positions of the context
        pairs = [
            math.prod(-(-side // self.stride) for side in x.shape[2:]),
            math.prod(context.shape[2:]),
        ]
        if embeddings is not None:
            shape = [*pairs, self.query_depth, self.intra_depth]
            _check_shape("embeddings", embeddings, shape, [len(x), *shape])
        if mask is not None:
            padding = [1, *context.shape[2:]]
            # a padding mask of one example serves for all
            _check_shape("mask", mask, [len(x), *padding], [1, *padding], pairs)


def _check_shape(name: str, x: Tensor, *shapes: list[int]) -> None:
    if list(x.shape) not in shapes:
        raise ConfigError(
            f"The {name} of a lambda layer has the shape {list(x.shape)}, but for this input must "
            f"have one of {', '.join(map(str, shapes))}."
        )


def _as_map(x: Tensor) -> Tensor:
    """[B, C, N] or [B, C, D, H, W] as a map, of one row or of D H rows."""
    return x[:, :, None] if x.dim() == 3 else x.flatten(2, -2)


def pairs_output(
    queries: Tensor, values: Tensor, embeddings: Tensor, mask: Tensor | None
) -> Tensor:
    """The position output [b, H, W, h, v] of embeddings [n, m, k, u], or [b, n, m, k, u] for each
    image.

    n and m count the positions of queries and values, rows first. The mask is that of a
    :class:`GeneralLambdaLayer`.
    """
    embeddings = embeddings.to(queries.dtype)
    if mask is not None and mask.dim() == 2:
        embeddings = embeddings * mask[:, :, None, None]
    elif mask is not None:
        values = hide_padding(values, mask)
    pairs = "bnmku" if embeddings.dim() == 5 else "nmku"
    with without_autocast(queries):
        lambdas = torch.einsum(f"{pairs},bmvu->bnkv", embeddings, values.flatten(1, -3))
        y = torch.einsum("bnhk,bnkv->bnhv", queries.flatten(1, -3), lambdas)
    return y.unflatten(1, queries.shape[1:-2])


def pairs_of_offsets(
    embedding: Tensor, size: Sequence[int], context: Sequence[int], stride: int
) -> Tensor:
    """One embedding [n, m, k, u] per pair of a query and a value, zero outside the scope.

    Args:
        embedding: [k, u, r_y, r_x]; for volumes [k, u, r_z, r_y, r_x].
        size: of the map of queries.
        context: of the map of values.
        stride: a query's place on the map of values is its own times this.
    """
    dims, pads, offsets = len(size), [], []
    for dim, (queries, values) in enumerate(zip(size, context, strict=True)):
        reach = embedding.shape[2 + dim] // 2
        before = max(stride * (queries - 1) - reach, 0)
        pads = [before, max(values - 1 - reach, 0), *pads]  # F.pad takes the last dimension first
        place = torch.arange(values, device=embedding.device)
        origin = torch.arange(queries, device=embedding.device) * stride
        offset = place - origin[:, None] + reach + before
        shape = [1] * 2 * dims  # of all queries' and then all values' sides
        shape[dim], shape[dims + dim] = queries, values
        offsets.append(offset.view(shape))
    pairs = F.pad(embedding, pads)[(slice(None), slice(None), *offsets)]
    return pairs.flatten(2 + dims).flatten(2, 1 + dims).permute(2, 3, 0, 1)


def _on_one_map(
    queries: Tensor, values: Tensor, embedding: Tensor, implementation: str, stride: int
) -> Tensor:
    """The position output by way of one map that queries and values share."""
    size = queries.shape[1:-2]
    if stride > 1:
        # A sequence is a single row
        sides = zip(size, values.shape[1:-2], strict=True)
        steps = [stride if max(pair) > 1 else 1 for pair in sides]
        values, embedding = _phases_as_depth(values, embedding, steps)
    # with the values that a query reaches
    whole = [
        max(own, min(other, own + reach // 2))
        for own, other, reach in zip(size, values.shape[1:-2], embedding.shape[2:], strict=True)
    ]
    queries, values = _fit(queries, whole), _fit(values, whole)
    if len(size) == 2:
        y = local_position_output(queries, values, embedding, implementation)
    else:
        values, embedding = _slices_as_depth(values, embedding)
        y = local_position_output(queries.flatten(0, 1), values, embedding, implementation)
        y = y.unflatten(0, (-1, whole[0]))
    return _fit(y, size)


def _fit(x: Tensor, size: Sequence[int]) -> Tensor:
    """[b, H, W, ..] of another size, cut off or filled up with zeros at the end of each side."""
    missing = [new - old for new, old in zip(size, x.shape[1:-2], strict=True)]
    pads = itertools.chain.from_iterable((0, number) for number in reversed(missing))
    return F.pad(x, (0, 0, 0, 0, *pads)) if any(missing) else x


def _phases_as_depth(
    values: Tensor, embedding: Tensor, steps: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Values and embedding on the queries' map: position s n + p is intra-depth p of position n."""
    # [b, H', W', v, u], [k, u, r_y, r_x] -> [b, ceil(H' / s_y), ceil(W' / s_x), v, u s_y s_x], and
    # [k, u s_y s_x, ..] with odd sides
    dims, pads = len(steps), []
    values = _fit(values, [s * -(-n // s) for n, s in zip(values.shape[1:-2], steps, strict=True)])
    for side, step in zip(embedding.shape[2:], steps, strict=True):
        reach, reached = side // 2, -(-(side // 2) // step)  # in positions, and in queries
        # From -step reached to step reached + step - 1: whole groups of phases
        pads = [step * reached - reach, step * reached + step - 1 - reach, *pads]
    embedding = F.pad(embedding, pads)
    for dim, step in reversed(list(enumerate(steps))):
        values = values.unflatten(1 + dim, (-1, step)).movedim(2 + dim, -1)
        embedding = embedding.unflatten(2 + dim, (-1, step)).movedim(3 + dim, -1)
    # Phases come last, the last direction's first
    embedding = embedding.movedim(tuple(range(-dims, 0)), tuple(range(2, 2 + dims)))
    return values.flatten(2 + dims), embedding.flatten(1, 1 + dims)


def _slices_as_depth(values: Tensor, embedding: Tensor) -> tuple[Tensor, Tensor]:
    """A volume as a batch of slices, each with its neighbours within the scope as intra-depth."""
    # [b, D, H, W, v, u], [k, u, r_z, r_y, r_x] -> [b D, H, W, v, u r_z], [k, u r_z, r_y, r_x]
    reach = embedding.shape[2] // 2
    padded = F.pad(values, (0, 0, 0, 0, 0, 0, 0, 0, reach, reach))
    around = padded.unfold(1, embedding.shape[2], 1)  # [b, D, H, W, v, u, r_z]
    return around.flatten(-2).flatten(0, 1), embedding.flatten(1, 2)
