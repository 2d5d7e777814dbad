"""The lambda layer: a linear function of a position's context, applied to its query.

Sections, figures, tables and appendices are of "LambdaNetworks: Modeling Long-Range
Interactions Without Attention" (Bello, ICLR 2021). The layer is Figure 3 of it, on maps.
Sequences, volumes, strides and other contexts are in the project ``projects/paper``.

b: batch, h: heads, k: query and key depth, v: value depth, u: intra-depth, r: offsets of a scope.
n counts the positions of queries, m the positions of the context. Queries are written
[b, H, W, h, k], keys [b, H, W, k, u] and values [b, H, W, v, u].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lambda_det.config import check, one_of
from lambda_det.errors import ConfigError
from lambda_det.layers import masked, options
from lambda_det.layers.local import IMPLEMENTATIONS, local_position_output, without_autocast
from lambda_det.layers.local.lambda_first import dense_output
from lambda_det.native import is_transformed


class LambdaLayer(nn.Module):
    """Lambda layer on maps.

    y_n = (content lambda + position lambda_n)^T q_n, with q = norm(W_q x), keys softmax(W_k x) over
    the map and values norm(W_v x) (Sections 3.1 to 3.4, Appendix C). All heads share the same
    lambdas (multi-query) unless ``multi_head`` is set. The content lambda covers the whole map; the
    position lambdas cover a local ``scope``, or the whole map if ``map_size`` is given.

    Args:
        dim: input channels d.
        dim_out: output channels, d if None; the value depth v is dim_out / heads.
        query_depth: |k|.
        heads: |h|, queries per position.
        intra_depth: |u| (Appendix C.4).
        scope: odd side of the local scope |m|, or (side_y, side_x). None for no position lambda
            (content only), or together with ``map_size``.
        dilation: distance between neighbouring offsets of a local scope, in positions.
        map_size: (H, W) of the largest map, for global position embeddings; needs ``scope=None``.
        content: False leaves the content lambda and the keys out (position only).
        norm: "BN", "" for none, or a function from a number of channels to a module; used on
            queries and values, as 2-d norms on [B, channels, H, W].
        key_norm: a name of ``KEY_NORMS``, over the positions.
        query_softmax: also take the softmax of each query over its depth (Table 11).
        multi_head: give each head keys, values and embeddings of its own (Appendix C.3).
        position: the ``position`` module of another layer, to share its embeddings; ``scope``,
            ``map_size`` and ``position_bias`` are then not used.
        position_bias: add a learned number per query depth to every position lambda. The paper has
            none; other public layers do.
        implementation: of the local position output, see :mod:`lambda_det.layers.local`.

    Attributes:
        rows: of ``qkv.weight``: how many are of queries, of keys and of values.

    Shape:
        x: [B, dim, H, W]; output: [B, dim_out, H, W], channels head-major (h, v).

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
        scope: int | tuple[int, int] | None = 23,
        dilation: int = 1,
        map_size: tuple[int, int] | None = None,
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
        check("implementation", implementation, one_of("auto", *IMPLEMENTATIONS))
        options.check_sizes(
            dim=dim,
            dim_out=dim_out,
            query_depth=query_depth,
            heads=heads,
            intra_depth=intra_depth,
            dilation=dilation,
        )
        self.query_depth, self.heads, self.intra_depth = query_depth, heads, intra_depth
        self.value_depth = dim_out // heads
        self.dilation, self.implementation = dilation, implementation
        self.query_softmax, self.multi_head = query_softmax, multi_head

        # Rows of the projection: queries (h, k), keys (k, u), values (v, u); in the multi-head form
        # keys (h, k, u) and values (h, v, u)
        groups = heads if multi_head else 1
        key_rows = groups * query_depth * intra_depth if content else 0
        self.rows = [heads * query_depth, key_rows, groups * self.value_depth * intra_depth]
        self.qkv = nn.Conv2d(dim, sum(self.rows), 1, bias=False)
        self.query_norm = options.make_norm(norm, self.rows[0])
        self.value_norm = options.make_norm(norm, self.rows[2])
        self.content = ContentLambda(key_norm) if content else None
        if position is None and (scope is not None or map_size is not None):
            position = RelativePosition(
                query_depth,
                intra_depth,
                scope=(scope, scope) if isinstance(scope, int) else scope,
                map_size=map_size,
                heads=heads if multi_head else None,
                bias=position_bias,
            )
        if position is not None:
            own = [*position.table().shape[:2], position.heads]
            wanted = [query_depth, intra_depth, heads if multi_head else None]
            options.check_position(own, wanted, position.map_size, dilation)
        elif not content:
            raise ConfigError(
                "A lambda layer without content and without position lambda has no output; give it "
                "a scope or set content=True."
            )
        self.position = position
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the projection (Appendix F.2); the embeddings draw their own N(0, 1)."""
        nn.init.normal_(self.qkv.weight, std=self.qkv.in_channels**-0.5)
        with torch.no_grad():
            self.qkv.weight[: self.rows[0]] *= self.query_depth**-0.5

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map [B, dim, H, W] to [B, dim_out, H, W].

        Args:
            x: the input.
            mask: None, or bool. [B, 1, H, W] or [1, 1, H, W]: True at positions that belong to the
                image; the others, padding, take no part in any lambda. [n, m]: True where query n
                may look at position m, rows first, for the whole batch (Appendix C.2).

        Raises:
            ConfigError: if the mask has another shape, or the map is larger than ``map_size``.
        """
        if mask is not None:
            options.check_mask(mask, x.shape)
        queries, keys, values = self.project(x)
        y = self.apply_lambdas(queries, keys, values, mask)  # [b, H, W, h, v]
        return y.flatten(-2).permute(0, 3, 1, 2)  # [b, (h, v), H, W]

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of a map [b, dim, H, W]."""
        queries, keys, values = self.qkv(x).split(self.rows, dim=1)  # [b, rows, H, W]
        queries = split(normed(self.query_norm, queries), self.query_depth)  # [b, H, W, h, k]
        keys = split(keys, self.intra_depth)  # [b, H, W, k, u], or [b, H, W, (h, k), u]
        values = split(normed(self.value_norm, values), self.intra_depth)  # [b, H, W, v or h v, u]
        if self.query_softmax:
            # Under autocast CUDA gives it in float32
            queries = depth_softmax(queries).to(values.dtype)
        return queries, keys, values

    def apply_lambdas(
        self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None
    ) -> Tensor:
        """The output of the lambdas.

        Args:
            queries: [b, H, W, h, k], as :meth:`project` gives them.
            keys: [b, H, W, k, u].
            values: [b, H, W, v, u].
            mask: as in :meth:`forward`.

        Returns:
            [b, H, W, h, v].
        """
        if not self.multi_head:
            return self.output_of_group(queries, keys, values, mask)
        # each head has its own lambdas (Appendix C.3)
        by_head = [cut_heads(x, self.heads) for x in (queries, keys, values)]
        outputs = [
            self.output_of_group(q, k, v, mask, head)  # [b, H, W, 1, v]
            for head, (q, k, v) in enumerate(zip(*by_head, strict=True))
        ]
        return join_heads(outputs)

    def output_of_group(
        self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, head: int = 0
    ) -> Tensor:
        """The output [b, H, W, h, v] of heads that share their lambdas."""
        y = None if self.content is None else self.content(queries, keys, values, mask)
        if self.position is None:
            return y
        of_position = self.position_output(queries, values, mask, head)
        return of_position if y is None else y + of_position

    def position_output(
        self, queries: Tensor, values: Tensor, mask: Tensor | None, head: int
    ) -> Tensor:
        """What the position lambdas add to the output [b, H, W, h, v]."""
        return self.position(
            queries,
            values,
            mask,
            head=head,
            dilation=self.dilation,
            implementation=self.implementation,
        )

    def extra_repr(self) -> str:
        return (
            f"query_depth={self.query_depth}, heads={self.heads}, intra_depth={self.intra_depth}, "
            f"dilation={self.dilation}, implementation={self.implementation}"
        )


class ContentLambda(nn.Module):
    """The sum over the whole context, one linear function for all queries (Equations 1 and 2).

    Args:
        key_norm: a name of ``KEY_NORMS``, over the context positions.

    Raises:
        ConfigError: there is no such norm.
    """

    def __init__(self, key_norm: str = "softmax") -> None:
        super().__init__()
        check("key_norm", key_norm, one_of(*KEY_NORMS))
        self.key_norm = key_norm

    def forward(
        self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """Map queries [b, H, W, h, k], keys [b, H, W, k, u] and values [b, H, W, v, u] to
        [b, H, W, h, v]; the mask is as in :class:`LambdaLayer`.
        """
        q, k, v = (x.flatten(1, -3) for x in (queries, keys, values))  # [b, n or m, ..]
        # Autocast would take the softmax's sums, and the products, to 16 bits
        with without_autocast(queries):
            if mask is not None and mask.dim() == 2:
                y = masked.content_output(q, k, v, mask, KEY_NORMS[self.key_norm])
            else:
                if k.requires_grad and k.stride(-1) == 1 and not torch.compiler.is_compiling():
                    # A softmax's gradient is a map per channel. Joined as it is with the gradients
                    # of queries and values, it would double the time of the projection's gradient.
                    k.register_hook(lambda grad: grad if grad is None else grad.contiguous())
                k = normalize_keys(k, self.key_norm, mask)
                # in this order the gradient of values that are a map per channel is also one
                content_lambda = torch.einsum("bmvu,bmku->bvk", v.to(k.dtype), k).mT.to(q.dtype)
                if q.stride(-1) == 1:
                    y = torch.einsum("bnhk,bkv->bnhv", q, content_lambda)
                else:  # the same for queries that are a map per channel, as the output then is
                    y = (content_lambda.mT[:, None] @ q.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return y.unflatten(1, queries.shape[1:-2])


# A norm of keys maps keys in float32 or float64 to weights of the same shape. ``dim`` is the
# dimension of the context's positions. ``inside`` is None or bool, False at positions outside of
# the context. It is [b, m, 1, 1] for keys [b, m, k, u] with dim 1, or [n, m] for keys [b, n, m]
# with dim 2, where each query n has its own context. Weights are 0 outside, so all are 0 if the
# context is empty. Weights and gradients are finite, also for keys of -300 and 300. PyTorch
# computes some operators slowly over a dimension that is not the last one. A norm with such an
# operator swaps ``dim`` with the last dimension before it and back after it, as ``_softmax`` does.


def _softmax(keys: Tensor, dim: int, inside: Tensor | None) -> Tensor:
    if inside is not None:
        # The lowest finite number and not -inf: a context without a position must not be NaN
        keys = keys.masked_fill(~inside, torch.finfo(keys.dtype).min)
    # Over any dimension except the last, several threads of PyTorch write to the same cache lines,
    # which takes 5 to 50 times as long on large maps.
    weights = keys.transpose(dim, -1).softmax(-1)
    if inside is not None:
        # A context without a position has equal weights until here. To fill a tensor that is
        # transposed would bind a graph of torch.export to maps of several positions.
        outside = (~inside).expand_as(keys).transpose(dim, -1)
        weights = weights.masked_fill(outside, 0.0)
    return weights.transpose(dim, -1)


def _l2(keys: Tensor, dim: int, inside: Tensor | None) -> Tensor:
    return F.normalize(_none(keys, dim, inside), dim=dim)


def _none(keys: Tensor, dim: int, inside: Tensor | None) -> Tensor:
    return keys if inside is None else keys.masked_fill(~inside, 0.0)


KEY_NORMS: dict[str, Callable[[Tensor, int, Tensor | None], Tensor]] = {
    # the three normalisations of the keys that Table 11 of the paper compares
    "softmax": _softmax,  # the paper's choice
    "l2": _l2,
    "none": _none,
}


def normalize_keys(keys: Tensor, key_norm: str, mask: Tensor | None) -> Tensor:
    """Normalise the keys over the context positions, in float32 at least.

    In float16 the mean softmax weight over a 256x336 map is subnormal.

    Args:
        keys: [b, m, k, u].
        key_norm: a name of ``KEY_NORMS``.
        mask: None, or bool [b, 1, H, W] of the positions m; those that are False get the weight 0,
            also where an image has no other positions.

    Returns:
        [b, m, k, u] in float32, or in float64 if the keys are.
    """
    keys = keys.to(torch.promote_types(keys.dtype, torch.float32))
    inside = None if mask is None else mask.flatten(1)[:, :, None, None]
    return KEY_NORMS[key_norm](keys, 1, inside)


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
        scope: (r_y, r_x), both odd, of a local scope; or None with ``map_size``.
        map_size: (H, W), the largest map a global embedding is used on.
        heads: h for the multi-head form, None for the paper's multi-query form.
        bias: add ``bias`` [k] ([h, k]) to every position lambda [k, v], as the bias of a
            convolution that builds them does.

    Raises:
        ConfigError: if a scope is even or not positive, or is given beside a ``map_size``.
    """

    DIMENSIONS = (2,)  # of the maps

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
        sides = options.scope_sides(scope, map_size, self.DIMENSIONS)
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
        *,
        head: int = 0,
        dilation: int = 1,
        implementation: str = "auto",
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
            mask: as in :class:`LambdaLayer`.
            head: which embedding, in the multi-head form.
            dilation: how many positions apart neighbouring offsets are.
            implementation: see :func:`lambda_det.layers.local.local_position_output`.

        Raises:
            ConfigError: if a global embedding is used on a map larger than it was made for.
        """
        embedding = self.of_head(head, queries.shape[1:-2])  # [k, u, r_y, r_x]
        if mask is not None and mask.dim() == 2:
            with without_autocast(queries):
                y = dense_output(queries, values, masked.spread(embedding, dilation), mask)
        else:
            if mask is not None:
                values = masked.hide_padding(values, mask)
            y = local_position_output(queries, values, embedding, implementation, dilation=dilation)
        return self.add_bias(y, queries, head)

    def of_head(self, head: int, size: Sequence[int]) -> Tensor:
        """The embeddings [k, u, r_y, r_x] of a head, for a map of this size."""
        if self.map_size is not None:
            options.check_map(size, self.map_size)
        return self.table(head)

    def table(self, head: int = 0) -> Tensor:
        """The embeddings [k, u, r_y, r_x] of a head, as all others read them.

        A subclass may compute them, and then has no parameter ``embedding``.
        """
        return self.embedding if self.heads is None else self.embedding[head]

    def add_bias(self, y: Tensor, queries: Tensor, head: int) -> Tensor:
        """Add q . b, the same number in every value channel, to [b, H, W, h, v]."""
        if self.bias is None:
            return y
        bias = self.bias if self.heads is None else self.bias[head]
        return y + (queries @ bias.to(queries.dtype))[..., None]


# How queries, keys and values lie in memory -------------------------------------------------------
# PyTorch's softmax and cat lay their results out by shape. Here queries, values and outputs, and
# their gradients, stay as they come from the projection, dense in the channels (channels last) or a
# map per channel, so that no later operation copies them.


def split(x: Tensor, depth: int) -> Tensor:
    """View [b, (c, depth), H, W] as [b, H, W, c, depth]."""
    return x.permute(0, 2, 3, 1).unflatten(-1, (x.shape[1] // depth, depth))


def normed(norm: nn.Module, x: Tensor) -> Tensor:
    """The norm of queries or values [b, c, H, W].

    On a CPU PyTorch's batch norm takes three to six times as long for a view as for a dense tensor,
    and returns a map per channel, which slows down what follows. So does ``nn.SyncBatchNorm`` on a
    GPU, which makes a map per channel of every input that is not dense.
    """
    # A question about the layout would bind the sizes of a graph, and torch.func knows no memory
    # formats.
    eager = not (torch.compiler.is_compiling() or is_transformed())
    wants_dense = x.device.type == "cpu" or isinstance(norm, nn.SyncBatchNorm)
    if eager and wants_dense and type(norm) is not nn.Identity:
        layout = torch.channels_last if x.stride(1) == 1 else torch.contiguous_format
        x = x.contiguous(memory_format=layout)
    return norm(x)


def depth_softmax(queries: Tensor) -> Tensor:
    """The softmax of queries [b, H, W, h, k] over their depth."""
    if queries.stride(-1) == 1:
        return queries.softmax(dim=-1)
    return _as_last(_as_first(queries).softmax(dim=2))


def cut_heads(x: Tensor, heads: int) -> tuple[Tensor, ...]:
    """[b, H, W, (heads, c), depth] as a [b, H, W, c, depth] of each head."""
    if x.stride(-1) == 1:
        return x.chunk(heads, dim=-2)
    return tuple(map(_as_last, _as_first(x).chunk(heads, dim=1)))


def join_heads(heads: Sequence[Tensor]) -> Tensor:
    """The inverse of :func:`cut_heads`."""
    if heads[0].stride(-1) == 1:
        return torch.cat(heads, dim=-2)
    return _as_last(torch.cat([_as_first(head) for head in heads], dim=1))


def _as_first(x: Tensor) -> Tensor:
    """View [b, H, W, c, depth] as [b, c, depth, H, W]."""
    return x.movedim((-2, -1), (1, 2))


def _as_last(x: Tensor) -> Tensor:
    return x.movedim((1, 2), (-2, -1))
