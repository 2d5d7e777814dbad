"""The lambda layer: a linear function of a position's context, applied to its query."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lambda_det.errors import ConfigError
from lambda_det.layers.exporting import plain
from lambda_det.layers.functional import (
    KEY_NORMS,
    KeyNorm,
    apply_lambda,
    content_lambda,
    masked_content_output,
    normalize_keys,
    position_output,
    without_autocast,
)
from lambda_det.layers.hooks import note
from lambda_det.layers.local import check_implementation, local_position_output
from lambda_det.layers.local.dilation import grid_size, spread
from lambda_det.layers.position import RelativePosition, dense_embedding
from lambda_det.layers.saturation import limit, saturate


class LambdaLayer(nn.Module):
    """Lambda layer on a map [B, C, H, W] or a sequence [B, C, N] (Sections 3.1 to 3.4, Appendix B).

    y_n = (content lambda + position lambda_n)^T q_n, with q = norm(W_q x), keys softmax(W_k x) over
    the context and values norm(W_v x). All heads share the same lambdas (multi-query) unless
    ``multi_head`` is set. The content lambda covers the whole map; the position lambdas cover a
    local ``scope``, or the whole map if ``map_size`` is given.

    Args:
        dim: input channels d.
        dim_out: output channels, d if None; the value depth v is dim_out / heads.
        query_depth: |k|.
        heads: |h|, queries per position.
        intra_depth: |u| (Appendix B.4).
        scope: odd side of the local scope |m|, or (side_y, side_x); for a sequence its length. None
            for no position lambda (content only), or together with ``map_size``.
        map_size: (H, W) of the largest map, for global position embeddings; needs ``scope=None``.
            For sequences (1, N).
        sequence: whether the input is a sequence; then an int ``scope`` means (1, scope).
        content: False leaves the content lambda and the keys out (position only).
        norm: "BN", "" for none, or a function from a number of channels to a module; used on
            queries and values, as 2-d norms on [B, channels, H, W].
        key_norm: "softmax", "l2" or "none", over the context positions (Table 12).
        query_softmax: also take the softmax of each query over its depth (Table 12).
        multi_head: give each head keys, values and embeddings of its own (Appendix B.3).
        position: the ``position`` module of another layer, to share its embeddings.
        implementation: of the local position output, see :mod:`lambda_det.layers.local`.

    Shape:
        x: [B, dim, H, W] or [B, dim, N]; output: the same with dim_out channels, head-major (h, v).

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
        sequence: bool = False,
        content: bool = True,
        norm: str | Callable[[int], nn.Module | None] = "BN",
        key_norm: KeyNorm = "softmax",
        query_softmax: bool = False,
        multi_head: bool = False,
        position: RelativePosition | None = None,
        implementation: str = "auto",
    ) -> None:
        super().__init__()
        dim_out = dim if dim_out is None else dim_out
        if min(dim, dim_out, query_depth, heads, intra_depth) < 1:
            raise ConfigError(
                "dim, dim_out, query_depth, heads and intra_depth of a lambda layer must be at "
                f"least 1, but they are {dim}, {dim_out}, {query_depth}, {heads} and {intra_depth}."
            )
        if dim_out % heads:
            raise ConfigError(
                f"A lambda layer with {dim_out} output channels cannot have {heads} heads, since "
                "the heads share the channels equally; choose a number of heads that divides "
                f"{dim_out}."
            )
        if key_norm not in KEY_NORMS:
            raise ConfigError(
                f"key_norm of a lambda layer is {key_norm!r}, but must be one of {KEY_NORMS}."
            )
        if map_size is not None and scope is not None:
            raise ConfigError(
                "A lambda layer has either a local scope or a global map_size; set scope=None."
            )
        if isinstance(scope, int):
            scope = (1 if sequence else scope, scope)
        has_position = scope is not None or map_size is not None or position is not None
        if not content and not has_position:
            raise ConfigError(
                "A lambda layer without content and without position lambda has no output; give it "
                "a scope or set content=True."
            )
        check_implementation(implementation)
        self.query_depth, self.heads, self.intra_depth = query_depth, heads, intra_depth
        self.value_depth = dim_out // heads
        self.content, self.key_norm, self.query_softmax = content, key_norm, query_softmax
        self.multi_head = multi_head
        self.groups = heads if multi_head else 1  # of heads that share keys, values and embeddings
        self.dilation = dilation
        self.implementation = implementation

        make_norm = _NORMS.get(norm) if isinstance(norm, str) else norm
        if make_norm is None:
            raise ConfigError(
                f"norm of a lambda layer is {norm!r}, but must be 'BN', '' or a function from a "
                "number of channels to a module."
            )
        shared = self.groups * intra_depth
        # Rows of the projection: queries (h, k), keys (k, u), values (v, u)
        self.rows = [heads * query_depth, content * shared * query_depth, shared * self.value_depth]
        self.qkv = nn.Conv2d(dim, sum(self.rows), 1, bias=False)
        self.query_norm = make_norm(self.rows[0]) or nn.Identity()
        self.value_norm = make_norm(self.rows[2]) or nn.Identity()
        if position is None and has_position:
            position = RelativePosition(
                query_depth,
                intra_depth,
                scope=scope,
                map_size=map_size,
                heads=heads if multi_head else None,
            )
        if position is not None:
            _check_shared(position, query_depth, intra_depth, heads if multi_head else None)
        _check_dilation(dilation, position)
        self.position = position
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the projections (Appendix E.1); the embeddings draw their own N(0, 1)."""
        nn.init.normal_(self.qkv.weight, std=self.qkv.in_channels**-0.5)
        with torch.no_grad():
            self.qkv.weight[: self.rows[0]] *= self.query_depth**-0.5

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map [B, dim, H, W] to [B, dim_out, H, W], or sequences likewise.

        Args:
            x: the input, which is both queries and context.
            mask: None, or bool. [B, 1, H, W] (for sequences [B, 1, N]): True at positions that
                belong to the image; the others, padding, take no part in any lambda. [n, m]: True
                where query n may look at context position m, rows first, for the whole batch
                (Appendix B.2).
        """
        if x.dim() == 3:
            if mask is not None and mask.dim() == 3:
                mask = mask[:, :, None]
            return self.forward(x[:, :, None], mask)[:, :, 0]
        contexts = mask if mask is not None and mask.dim() == 2 else None
        valid = mask if mask is not None and mask.dim() == 4 else None
        if mask is not None and contexts is None and valid is None:
            raise ConfigError(
                f"The mask of a lambda layer has the shape {list(mask.shape)}, but must be [B, 1, "
                "H, W] for padding or [n, m] for a context per query."
            )
        queries, keys, values = saturate(self.qkv(x)).split(self.rows, dim=1)
        queries = saturate(self.query_norm(queries))
        values = saturate(self.value_norm(values))
        note("queries", queries)
        note("values", values)
        queries = _split(queries, self.heads, self.query_depth)
        values = _split(values, self.groups, self.value_depth, self.intra_depth)
        if self.query_softmax:
            queries = queries.softmax(dim=-1).to(values.dtype)  # autocast gives float32 on CUDA
        if valid is not None:
            values = values * valid[:, 0, :, :, None, None, None].to(values.dtype)
        if self.content:
            keys = _split(keys, self.groups, self.query_depth, self.intra_depth)
        queries = queries.unflatten(3, (self.groups, -1))
        outputs = [
            self._group_output(
                group,
                _group(queries, group),
                _group(keys, group) if self.content else None,
                _group(values, group),
                contexts,
                None if valid is None else valid.flatten(1),
            )
            for group in range(self.groups)
        ]
        y = outputs[0] if self.groups == 1 else torch.cat(outputs, dim=3)  # [B, H, W, h, v]
        if not self.training:
            y = limit(y)
        return plain(y.flatten(3).permute(0, 3, 1, 2))

    def _group_output(
        self,
        group: int,
        queries: Tensor,
        keys: Tensor | None,
        values: Tensor,
        contexts: Tensor | None,
        valid: Tensor | None,
    ) -> Tensor:
        """Output of heads that share a lambda: queries [B, H, W, h, k] give [B, H, W, h, v]."""
        height, width = queries.shape[1:3]
        output: Tensor | None = None
        if keys is not None:
            flat = (queries.flatten(1, 2), keys.flatten(1, 2), values.flatten(1, 2))
            # Autocast would take these products, and the softmax's sums, back to 16 bits.
            with without_autocast(queries):
                if contexts is None:
                    weights = normalize_keys(flat[1], self.key_norm, valid)
                    lambdas = content_lambda(weights, flat[2])
                    note("normalised keys", weights)
                    note("content lambda", lambdas)
                    output = apply_lambda(flat[0], lambdas)
                else:
                    output = masked_content_output(*flat, contexts, self.key_norm)
            output = output.unflatten(1, (height, width))
            note("content output", output)
        if self.position is not None:
            embedding = self.position(*grid_size(height, width, self.dilation))
            if self.multi_head:
                embedding = embedding[group]
            if contexts is None:
                position = local_position_output(
                    queries, values, embedding, self.implementation, dilation=self.dilation
                )
            else:
                embedding = spread(embedding, self.dilation)
                dense = dense_embedding(embedding, height, width) * contexts[:, :, None, None]
                position = position_output(queries.flatten(1, 2), values.flatten(1, 2), dense)
                position = position.unflatten(1, (height, width))
            note("position output", position)
            output = position if output is None else saturate(output + position)
        return output

    def extra_repr(self) -> str:
        return (
            f"query_depth={self.query_depth}, heads={self.heads}, intra_depth={self.intra_depth}, "
            f"dilation={self.dilation}, key_norm={self.key_norm}, "
            f"implementation={self.implementation}"
        )


def _split(x: Tensor, *sizes: int) -> Tensor:
    """View [B, product of sizes, H, W] as [B, H, W, *sizes], dense where x is channels_last."""
    return plain(x.permute(0, 2, 3, 1)).unflatten(-1, sizes)


def _group(x: Tensor, group: int) -> Tensor:
    """One group of [B, H, W, groups, ..]. The gradient of a lone one is a view and not a copy."""
    return x.squeeze(3) if x.shape[3] == 1 else plain(x[:, :, :, group])


def _check_shared(
    position: RelativePosition, query_depth: int, intra_depth: int, heads: int | None
) -> None:
    expected = [query_depth, intra_depth] if heads is None else [heads, query_depth, intra_depth]
    found = list(position.embedding.shape[:-2])
    if found != expected:
        raise ConfigError(
            f"The shared position embedding has the leading sizes {found}, but this lambda layer "
            f"needs {expected}; share only between layers of equal query_depth, intra_depth and "
            "heads."
        )


def _check_dilation(dilation: int, position: RelativePosition | None) -> None:
    is_global = position is not None and position.map_size is not None
    if dilation < 1 or (dilation > 1 and is_global):
        raise ConfigError(
            f"The dilation of a lambda layer is {dilation}; it must be at least 1, and 1 for a "
            "global map, which has every offset already."
        )


_NORMS: dict[str, Callable[[int], nn.Module | None]] = {
    "BN": nn.BatchNorm2d,
    "": lambda channels: None,
}
