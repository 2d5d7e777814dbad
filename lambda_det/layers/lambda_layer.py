"""The lambda layer: a linear function of a position's context, applied to its query.

Sections, figures, tables and appendices are those of "LambdaNetworks: Modeling Long-Range
Interactions Without Attention" (Bello, ICLR 2021). The layer is that of Figure 3.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lambda_det.layers import grids
from lambda_det.layers.functional import KeyNorm
from lambda_det.layers.lambdas import ContentLambda, RelativePosition
from lambda_det.layers.options import check_inputs, check_lambdas, check_sizes, make_norm

Parts = tuple[Tensor, Tensor, Tensor]  # queries, keys, values


class LambdaLayer(nn.Module):
    """Lambda layer on maps [B, C, H, W], sequences [B, C, N] or volumes [B, C, D, H, W].

    y_n = (content lambda + position lambda_n)^T q_n, with q = norm(W_q x), keys softmax(W_k x) over
    the context and values norm(W_v x) (Sections 3.1 to 3.4, Appendix C). All heads share the same
    lambdas (multi-query) unless ``multi_head`` is set. The content lambda covers the whole map; the
    position lambdas cover a local ``scope``, or the whole map if ``map_size`` is given.

    Args:
        dim: input channels d.
        dim_out: output channels, d if None; the value depth v is dim_out / heads.
        query_depth: |k|.
        heads: |h|, queries per position.
        intra_depth: |u| (Appendix C.4).
        scope: odd side of the local scope |m|, or (side_y, side_x); for a sequence its length, for
            a volume (side_z, side_y, side_x). None for no position lambda (content only), or
            together with ``map_size``.
        dilation: distance between neighbouring offsets of a local scope, in positions.
        stride: distance between neighbouring queries, in positions (Section 3.4). Only every
            ``stride``-th position of the input in each direction becomes a query.
        map_size: (H, W) of the largest map, for global position embeddings; needs ``scope=None``.
            For sequences (1, N), for volumes (D, H, W).
        sequence: whether the input is a sequence; then an int ``scope`` means (1, scope).
        content: False leaves the content lambda and the keys out (position only).
        norm: "BN", "" for none, or a function from a number of channels to a module; used on
            queries and values, as 2-d norms on [B, channels, H, W].
        key_norm: "softmax", "l2" or "none", over the context positions (Table 11).
        query_softmax: also take the softmax of each query over its depth (Table 11).
        multi_head: give each head keys, values and embeddings of its own (Appendix C.3).
        position: the ``position`` module of another layer, to share its embeddings.
        position_bias: add a learned number per query depth to every position lambda. The paper has
            none; other public layers do.
        implementation: of the local position output, see :mod:`lambda_det.layers.local`.

    Shape:
        x: [B, dim, H, W], [B, dim, N] or [B, dim, D, H, W]; output: the same with dim_out channels,
            head-major (h, v), and sizes divided by the stride, rounded up.

    Raises:
        ConfigError: if heads do not divide dim_out, a scope is even, or the options contradict each
            other.
    """

    def __init__(
        self,
        dim: int,
        dim_out: int | None = None,
        *,
        query_depth: int = 16,
        heads: int = 4,
        intra_depth: int = 1,
        scope: int | tuple[int, ...] | None = 23,
        dilation: int = 1,
        stride: int = 1,
        map_size: tuple[int, ...] | None = None,
        sequence: bool = False,
        content: bool = True,
        norm: str | Callable[[int], nn.Module | None] = "BN",
        key_norm: KeyNorm = "softmax",
        query_softmax: bool = False,
        multi_head: bool = False,
        position: RelativePosition | None = None,
        position_bias: bool = False,
        implementation: str = "auto",
    ) -> None:
        super().__init__()
        dim_out = dim if dim_out is None else dim_out
        check_sizes(dim, dim_out, query_depth, heads, intra_depth)
        self.query_depth, self.heads, self.intra_depth = query_depth, heads, intra_depth
        self.value_depth = dim_out // heads
        self.query_softmax, self.multi_head = query_softmax, multi_head
        self.dilation, self.stride, self.implementation = dilation, stride, implementation

        # Rows of the projection: queries (h, k), keys (k, u), values (v, u); in the multi-head form
        # keys (h, k, u) and values (h, v, u)
        shared = intra_depth * (heads if multi_head else 1)
        self.rows = [heads * query_depth, content * query_depth * shared, self.value_depth * shared]
        self.qkv = nn.Conv2d(dim, sum(self.rows), 1, bias=False)
        self.query_norm = make_norm(norm, self.rows[0])
        self.value_norm = make_norm(norm, self.rows[2])
        self.content = ContentLambda(key_norm) if content else None
        if position is None and (scope is not None or map_size is not None):
            position = RelativePosition(
                query_depth,
                intra_depth,
                scope=(1 if sequence else scope, scope) if isinstance(scope, int) else scope,
                map_size=map_size,
                heads=heads if multi_head else None,
                bias=position_bias,
            )
        self.position = position
        check_lambdas(self)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the projection (Appendix F.2); the embeddings draw their own N(0, 1)."""
        nn.init.normal_(self.qkv.weight, std=self.qkv.in_channels**-0.5)
        with torch.no_grad():
            self.qkv.weight[: self.rows[0]] *= self.query_depth**-0.5

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        context: Tensor | None = None,
        embeddings: Tensor | None = None,
    ) -> Tensor:
        """Map [B, dim, H, W] to [B, dim_out, H, W], or sequences and volumes likewise.

        Args:
            x: the input, which is both queries and context unless there is a ``context``.
            mask: None, or bool. [B, 1, ..], as large as the context: True at positions that belong
                to the image; the others, padding, take no part in any lambda. [n, m]: True where
                query n may look at context position m, rows first, for the whole batch (Appendix
                C.2).
            context: [B, dim, H', W'], which keys and values are made of (Section 3.1). Its first
                position is at the same place as that of ``x``.
            embeddings: position embeddings of this call instead of the layer's own, such as the
                relations of a graph: [n, m, k, u], or [B, n, m, k, u] for those of each example.
        """
        check_inputs(self, x, mask, context, embeddings)
        if context is None and self.stride > 1:
            context = x
        parts = self.project(grids.strided(x, self.stride), context)
        if self.multi_head:
            of_heads = zip(*(grids.cut_heads(part, self.heads) for part in parts), strict=True)
            outputs = [self._output(p, mask, embeddings, h) for h, p in enumerate(of_heads)]
            y = grids.join_heads(outputs)
        else:
            y = self._output(parts, mask, embeddings)
        y = y.flatten(-2)
        y = y.permute(0, -1, *range(1, y.dim() - 1))
        return y[:, :, 0] if x.dim() == 3 else y

    def project(self, x: Tensor, context: Tensor | None = None) -> Parts:
        """Queries [b, H, W, h, k], keys [b, H, W, k, u] and values [b, H, W, v, u] of a map.

        Keys and values are those of the context, if there is one. In the multi-head form keys are
        [b, H, W, (h, k), u] and values [b, H, W, (h, v), u]. Volumes give [b, D, H, W, ..].
        """
        if context is None:
            context = x
            queries, keys, values = self.qkv(grids.as_map(x)).split(self.rows, dim=1)
        else:
            # Project both maps with all rows: a folded norm's bias and hooks need the whole
            # convolution.
            queries = self.qkv(grids.as_map(x)).split(self.rows, dim=1)[0]
            keys, values = self.qkv(grids.as_map(context)).split(self.rows, dim=1)[1:]
        queries = grids.split(self.query_norm(queries), self.query_depth, x.shape[2:])
        keys = grids.split(keys, self.intra_depth, context.shape[2:])
        values = grids.split(self.value_norm(values), self.intra_depth, context.shape[2:])
        if self.query_softmax:
            # Under autocast CUDA gives it in float32
            queries = grids.depth_softmax(queries).to(values.dtype)
        return queries, keys, values

    def _output(
        self, parts: Parts, mask: Tensor | None, embeddings: Tensor | None, head: int = 0
    ) -> Tensor:
        """Apply the lambdas that these heads share: [b, H, W, h, v]."""
        queries, keys, values = parts
        y = 0
        if self.content is not None:
            y = self.content(queries, keys, values, mask)
        if embeddings is not None:
            y = y + grids.given_position_output(queries, values, embeddings, mask)
        if self.position is not None:
            y = y + self.position(
                queries, values, mask, head, self.dilation, self.implementation, self.stride
            )
        return y

    def extra_repr(self) -> str:
        return (
            f"query_depth={self.query_depth}, heads={self.heads}, intra_depth={self.intra_depth}, "
            f"dilation={self.dilation}, stride={self.stride}, implementation={self.implementation}"
        )
