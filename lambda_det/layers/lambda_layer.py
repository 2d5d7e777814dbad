"""The lambda layer: a linear function of a position's context, applied to its query.

Sections, figures, tables and appendices are those of "LambdaNetworks: Modeling Long-Range
Interactions Without Attention" (Bello, ICLR 2021). The layer is that of Figure 3, on maps; what
plain maps do not need is in :mod:`lambda_det.layers.general`.

b: batch, h: heads, k: query and key depth, v: value depth, u: intra-depth, r: offsets of a scope.
n counts the positions of queries, m those of the context. Queries are written [b, H, W, h, k],
keys [b, H, W, k, u] and values [b, H, W, v, u].
"""

from __future__ import annotations

from collections.abc import Callable
from operator import gt

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lambda_det.errors import ConfigError
from lambda_det.layers import general, options
from lambda_det.layers.local import local_position_output
from lambda_det.layers.tensors import (
    crop_offsets,
    cut_heads,
    depth_softmax,
    grid_size,
    hide_padding,
    join_heads,
    normed,
    split,
    without_autocast,
)

Projections = tuple[Tensor, Tensor, Tensor]  # queries, keys, values


# Table 11: norms of keys over the positions of a context, which are the dimension ``dim``.
# ``inside`` is None or bool, False at positions that are no part of the context.


def _softmax(keys: Tensor, dim: int, inside: Tensor | None) -> Tensor:
    if inside is not None:
        # The lowest finite number and not -inf: a context without a position must not be NaN
        keys = keys.masked_fill(~inside, torch.finfo(keys.dtype).min)
    # Over another dimension than the last, several threads of PyTorch write to the same lines of a
    # cache, which takes 5 to 50 times as long on large maps
    return keys.transpose(dim, -1).softmax(-1).transpose(dim, -1)


def _l2(keys: Tensor, dim: int, inside: Tensor | None) -> Tensor:
    return F.normalize(_none(keys, dim, inside), dim=dim)


def _none(keys: Tensor, dim: int, inside: Tensor | None) -> Tensor:
    return keys if inside is None else keys.masked_fill(~inside, 0.0)


KEY_NORMS: dict[str, Callable[[Tensor, int, Tensor | None], Tensor]] = {
    "softmax": _softmax,  # the paper's choice
    "l2": _l2,
    "none": _none,
}


def normalize_keys(keys: Tensor, key_norm: str = "softmax", inside: Tensor | None = None) -> Tensor:
    """Normalise the keys over the context positions, in float32 at least.

    In float16 the mean softmax weight over a 256x336 map is subnormal.

    Args:
        keys: [b, m, k, u].
        key_norm: a name of ``KEY_NORMS``.
        inside: None, or bool [b, m]; positions that are False get the weight 0.

    Returns:
        [b, m, k, u] in float32, or in float64 if the keys are.
    """
    keys = keys.to(torch.promote_types(keys.dtype, torch.float32))
    return KEY_NORMS[key_norm](keys, 1, None if inside is None else inside[:, :, None, None])


class ContentLambda(nn.Module):
    """The sum over the whole context, one linear function for all queries (Equations 1 and 2).

    Args:
        key_norm: a name of ``KEY_NORMS``, over the context positions.

    Raises:
        ConfigError: there is no such norm.
    """

    def __init__(self, key_norm: str = "softmax") -> None:
        super().__init__()
        options.check_name("key_norm", key_norm, KEY_NORMS)
        self.key_norm = key_norm

    def forward(
        self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """Map queries [b, H, W, h, k], keys [b, H, W, k, u] and values [b, H, W, v, u] to
        [b, H, W, h, v]; the mask is that of :class:`LambdaLayer`.
        """
        q, k, v = (x.flatten(1, -3) for x in (queries, keys, values))  # [b, n or m, ..]
        # Autocast would take the softmax's sums, and the products, to 16 bits
        with without_autocast(queries):
            if mask is not None and mask.dim() == 2:
                y = general.content_output(q, k, v, mask, KEY_NORMS[self.key_norm])
            else:
                if k.requires_grad and k.stride(-1) == 1 and not torch.compiler.is_compiling():
                    # A softmax's gradient is a map per channel. The projection's, into which
                    # those of queries, keys and values are joined, would take twice the time.
                    k.register_hook(lambda grad: grad if grad is None else grad.contiguous())
                k = normalize_keys(k, self.key_norm, None if mask is None else mask.flatten(1))
                # In this order the gradient of values that are a map per channel is one, too
                content_lambda = torch.einsum("bmvu,bmku->bvk", v.to(k.dtype), k).mT.to(q.dtype)
                if q.stride(-1) == 1:
                    y = torch.einsum("bnhk,bkv->bnhv", q, content_lambda)
                else:  # the same for queries that are a map per channel, as the output then is
                    y = (content_lambda.mT[:, None] @ q.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return y.unflatten(1, queries.shape[1:-2])


class RelativePosition(nn.Module):
    """The learned embeddings R of Section 3.3, and the position output that is made of them.

    ``embedding`` has the shape [k, u, r_y, r_x], and with ``heads`` (the multi-head form) one such
    tensor per head, [h, k, u, r_y, r_x]. Entry [.., dy, dx] meets the value at the offset
    (dy - r_y // 2, dx - r_x // 2) from the query, as in a PyTorch convolution. The embeddings
    depend on offsets only, which makes the position output translation equivariant. A global map
    of H x W positions is the scope of all its (2H - 1) x (2W - 1) offsets. Layers share their
    embeddings by holding the same instance of this module.

    Args:
        query_depth: k.
        intra_depth: u.
        scope: (r_y, r_x), both odd, of a local scope; or None with ``map_size``. Of volumes
            (r_z, r_y, r_x), and the embedding has one more dimension.
        map_size: (H, W), or (D, H, W), the largest map a global embedding is used on.
        heads: h for the multi-head form, None for the paper's multi-query form.
        bias: add ``bias`` [k] ([h, k]) to every position lambda [k, v], as the bias of a
            convolution that builds them does.

    Raises:
        ConfigError: if a scope is even or not positive, or is given beside a ``map_size``.
    """

    def __init__(
        self,
        query_depth: int,
        intra_depth: int = 1,
        *,
        scope: tuple[int, ...] | None = None,
        map_size: tuple[int, ...] | None = None,
        heads: int | None = None,
        bias: bool = False,
    ) -> None:
        super().__init__()
        sides = options.scope_sides(scope, map_size)
        self.map_size, self.heads = map_size, heads
        leading = () if heads is None else (heads,)
        self.embedding = nn.Parameter(torch.empty(*leading, query_depth, intra_depth, *sides))
        self.bias = nn.Parameter(torch.empty(*leading, query_depth)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the embeddings from N(0, 1) (Appendix F.2)."""
        nn.init.normal_(self.embedding)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(
        self,
        queries: Tensor,
        values: Tensor,
        mask: Tensor | None = None,
        head: int = 0,
        dilation: int = 1,
        implementation: str = "auto",
        stride: int = 1,
    ) -> Tensor:
        """Map queries [b, H, W, h, k] and values [b, H, W, v, u] to [b, H, W, h, v].

        The lambda of position n is a sum over the offsets r of its scope, and is applied to the
        queries of n (Section 3.4); values are 0 outside the map:

            lambda_n = einsum("kur,brvu->bkv", embedding, the values at n + r)
            y_n = einsum("bhk,bkv->bhv", the queries of n, lambda_n)

        :mod:`lambda_det.layers.local` computes this for all n, in the order that is fastest.

        Args:
            queries: of the heads that share an embedding.
            values: likewise.
            mask: that of :class:`LambdaLayer`.
            head: which embedding, in the multi-head form.
            dilation: how many positions apart neighbouring offsets are.
            implementation: see :func:`lambda_det.layers.local.local_position_output`.
            stride: query (i, j) is at position (stride i, stride j) of the values' map.
        """
        size = queries.shape[1:-2]
        pairs = mask is not None and mask.dim() == 2
        if pairs or stride > 1 or len(size) != 2 or size != values.shape[1:-2]:
            y = general.position_output(
                self, queries, values, mask, head, dilation, implementation, stride
            )
        else:
            embedding = self.offsets(*grid_size(size, dilation), head=head)  # [k, u, r_y, r_x]
            if mask is not None:
                values = hide_padding(values, mask)
            y = local_position_output(queries, values, embedding, implementation, dilation=dilation)
        return self.add_bias(y, queries, head)

    def add_bias(self, y: Tensor, queries: Tensor, head: int) -> Tensor:
        """Add q . b, the same number in every value channel, to [b, H, W, h, v]."""
        if self.bias is None:
            return y
        bias = self.bias if self.heads is None else self.bias[head]
        return y + (queries @ bias.to(queries.dtype))[..., None]

    def offsets(self, *size: int, head: int | None = None) -> Tensor:
        """The embeddings of the offsets that occur on a map of this size.

        Args:
            size: (H, W).
            head: in the multi-head form, which embedding; None for all of them.

        Returns:
            [.., min(r_y, 2 H - 1), min(r_x, 2 W - 1)], the middle of ``embedding``.

        Raises:
            ConfigError: if a global embedding is used on a map larger than it was made for.
        """
        if self.map_size and any(map(gt, size, self.map_size)):
            raise ConfigError(
                f"A global position embedding for maps of up to {options.by(self.map_size)} "
                f"positions got a map of {options.by(size)}; make it with a larger map_size, or "
                "use a local scope, which takes maps of any size."
            )
        embedding = self.embedding
        if self.heads is not None and head is not None:
            embedding = embedding[head]
        return crop_offsets(embedding, *size)


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
        key_norm: a name of ``KEY_NORMS``, over the context positions (Table 11).
        query_softmax: also take the softmax of each query over its depth (Table 11).
        multi_head: give each head keys, values and embeddings of its own (Appendix C.3).
        position: the ``position`` module of another layer, to share its embeddings.
        position_bias: add a learned number per query depth to every position lambda. The paper has
            none; other public layers do.
        implementation: of the local position output, see :mod:`lambda_det.layers.local`.

    Attributes:
        rows: of ``qkv.weight``: how many are of queries, of keys and of values.

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
        key_norm: str = "softmax",
        query_softmax: bool = False,
        multi_head: bool = False,
        position: RelativePosition | None = None,
        position_bias: bool = False,
        implementation: str = "auto",
    ) -> None:
        super().__init__()
        dim_out = dim if dim_out is None else dim_out
        self.query_depth, self.heads, self.intra_depth = query_depth, heads, intra_depth
        self.dilation, self.stride, self.implementation = dilation, stride, implementation
        self.query_softmax, self.multi_head = query_softmax, multi_head
        options.check_sizes(self, dim=dim, dim_out=dim_out)
        self.value_depth = dim_out // heads

        # Rows of the projection: queries (h, k), keys (k, u), values (v, u); in the multi-head form
        # keys (h, k, u) and values (h, v, u)
        shared = intra_depth * (heads if multi_head else 1)
        self.rows = [heads * query_depth, content * query_depth * shared, self.value_depth * shared]
        self.qkv = nn.Conv2d(dim, sum(self.rows), 1, bias=False)
        self.query_norm = options.make_norm(norm, self.rows[0])
        self.value_norm = options.make_norm(norm, self.rows[2])
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
        options.check_layer(self)
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
        if x.dim() != 4 or self.stride > 1 or context is not None or embeddings is not None:
            return general.forward(self, x, mask, context, embeddings)
        options.check_input(self, x, x, mask, None)
        y = self.apply_lambdas(self.project(x), mask, self.position)  # [b, H, W, h, v]
        return y.flatten(-2).permute(0, 3, 1, 2)  # [b, (h, v), H, W]

    def project(self, x: Tensor, context: Tensor | None = None) -> Projections:
        """Queries [b, H, W, h, k], keys [b, H, W, k, u] and values [b, H, W, v, u] of a map.

        Keys and values are those of the context, if there is one. In the multi-head form keys are
        [b, H, W, (h, k), u] and values [b, H, W, (h, v), u].
        """
        queries, keys, values = self.qkv(x).split(self.rows, dim=1)
        if context is not None:
            # With all rows, as a folded norm's bias and hooks need the whole convolution
            keys, values = self.qkv(context).split(self.rows, dim=1)[1:]
        queries = split(normed(self.query_norm, queries), self.query_depth)
        keys = split(keys, self.intra_depth)
        values = split(normed(self.value_norm, values), self.intra_depth)
        if self.query_softmax:
            # Under autocast CUDA gives it in float32
            queries = depth_softmax(queries).to(values.dtype)
        return queries, keys, values

    def apply_lambdas(
        self, projections: Projections, mask: Tensor | None, position: Callable[..., Tensor] | None
    ) -> Tensor:
        """The output [b, H, W, h, v] of the ``projections`` that :meth:`project` makes.

        Args:
            projections: queries [b, H, W, h, k], keys [b, H, W, k, u] and values [b, H, W, v, u].
            mask: that of :meth:`forward`.
            position: ``self.position``, or what else makes a position output.
        """
        of_heads = [projections]  # that share their lambdas
        if self.multi_head:  # each head has lambdas of its own (Appendix C.3)
            of_heads = zip(*(cut_heads(x, self.heads) for x in projections), strict=True)
        outputs = []
        for head, (queries, keys, values) in enumerate(of_heads):
            y = 0
            if self.content is not None:
                y = self.content(queries, keys, values, mask)
            if position is not None:
                how = self.dilation, self.implementation, self.stride
                y = y + position(queries, values, mask, head, *how)
            outputs.append(y)
        return join_heads(outputs) if self.multi_head else outputs[0]

    def extra_repr(self) -> str:
        return (
            f"query_depth={self.query_depth}, heads={self.heads}, intra_depth={self.intra_depth}, "
            f"dilation={self.dilation}, stride={self.stride}, implementation={self.implementation}"
        )
