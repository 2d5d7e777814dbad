"""The two lambdas of a layer as modules that map queries, keys and values to an output.

b: batch, h: heads, k: query and key depth, v: value depth, u: intra-depth. Queries are written
[b, H, W, h, k], keys and values [b, H, W, k, u] and [b, H, W, v, u]; H and W of these may differ
from those of the queries, and in volumes the positions are D, H, W. Both take the mask of
:class:`lambda_det.layers.LambdaLayer`: bool [b, 1, H, W], False at padding, or [n, m], True where
query n may look at position m, rows first.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import gt

import torch
from torch import Tensor, nn

from lambda_det.errors import ConfigError
from lambda_det.layers.functional import (
    KEY_NORMS,
    KeyNorm,
    apply_lambda,
    content_lambda,
    crop_offsets,
    dense_embedding,
    grid_size,
    masked_content_output,
    normalize_keys,
    spread,
    without_autocast,
)
from lambda_det.layers.grids import given_position_output, grid_position_output, hide_padding


class ContentLambda(nn.Module):
    """The sum over the whole context, one linear function for all queries (Equations 1 and 2).

    Args:
        key_norm: "softmax", "l2" or "none", over the context positions.

    Raises:
        ConfigError: if there is no such norm.
    """

    def __init__(self, key_norm: KeyNorm = "softmax") -> None:
        super().__init__()
        if key_norm not in KEY_NORMS:
            raise ConfigError(
                f"key_norm of a lambda layer is {key_norm!r}, but must be one of {KEY_NORMS}."
            )
        self.key_norm = key_norm

    def forward(
        self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """Map queries [b, H, W, h, k], keys [b, H, W, k, u] and values [b, H, W, v, u] to
        [b, H, W, h, v].
        """
        q, k, v = (x.flatten(1, -3) for x in (queries, keys, values))  # [b, n, ..] with n = H W
        # Autocast would take the softmax's sums, and the products, to 16 bits
        with without_autocast(queries):
            if mask is not None and mask.dim() == 2:
                y = masked_content_output(q, k, v, mask, self.key_norm)
            else:
                valid = None if mask is None else mask.flatten(1)
                lambdas = content_lambda(normalize_keys(k, self.key_norm, valid), v)  # [b, k, v]
                y = apply_lambda(q, lambdas)
        return y.unflatten(1, queries.shape[1:-2])

    def extra_repr(self) -> str:
        return f"key_norm={self.key_norm}"


class RelativePosition(nn.Module):
    """The learned embeddings R of Section 3.3, and the position output that is made of them.

    ``embedding`` has the shape [k, u, r_y, r_x], and with ``heads`` (the multi-head form) one such
    tensor per head, [h, k, u, r_y, r_x]. Entry [.., dy, dx] meets the value at the offset
    (dy - r_y // 2, dx - r_x // 2) from the query, as in a PyTorch convolution. The embeddings
    depend on offsets alone, which makes the position output translation equivariant. A global map
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
        if (scope is None) == (map_size is None):
            raise ConfigError(
                "A lambda layer has either a local scope or a global map_size; set scope=None "
                "beside a map_size."
            )
        if map_size is not None:
            scope = tuple(2 * side - 1 for side in map_size)
        if len(scope) not in (2, 3) or any(side < 1 or side % 2 == 0 for side in scope):
            raise ConfigError(
                f"The scope of a lambda layer must have two or three odd sides of at least 1, so "
                f"that the query is at its centre, but it is {_by(scope)}; use "
                f"{_by([side | 1 for side in scope])}."
            )
        self.map_size, self.heads = map_size, heads
        leading = () if heads is None else (heads,)
        self.embedding = nn.Parameter(torch.empty(*leading, query_depth, intra_depth, *scope))
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

        Args:
            queries: of the heads that share an embedding.
            values: likewise.
            mask: see above.
            head: which embedding, in the multi-head form.
            dilation: how many positions apart neighbouring offsets are.
            implementation: see :func:`lambda_det.layers.local.local_position_output`.
            stride: query (i, j) is at position (stride i, stride j) of the values' map.
        """
        size, context = queries.shape[1:-2], values.shape[1:-2]
        places = [stride * (side - 1) + 1 for side in size]
        embedding = self.offsets(*grid_size(list(map(max, places, context)), dilation))
        if self.heads is not None:
            embedding = embedding[head]
        if mask is not None and mask.dim() == 2:
            wide = spread(embedding, dilation, len(size))
            dense = dense_embedding(wide, size, context, stride)
            y = given_position_output(queries, values, dense, mask)
        else:
            values = hide_padding(values, mask)
            y = grid_position_output(
                queries, values, embedding, implementation, dilation=dilation, stride=stride
            )
        return self.add_bias(y, queries, head)

    def add_bias(self, y: Tensor, queries: Tensor, head: int) -> Tensor:
        """Add q . b, the same number in every value channel, to [b, H, W, h, v]."""
        if self.bias is None:
            return y
        bias = self.bias if self.heads is None else self.bias[head]
        return y + (queries @ bias.to(queries.dtype))[..., None]

    def offsets(self, *size: int) -> Tensor:
        """The embeddings of the offsets that occur on a map of this size.

        Returns:
            [.., min(r_y, 2 H - 1), min(r_x, 2 W - 1)], the middle of ``embedding``.

        Raises:
            ConfigError: if a global embedding is used on a map larger than it was made for.
        """
        if self.map_size and any(map(gt, size, self.map_size)):
            raise ConfigError(
                f"A global position embedding for maps of up to {_by(self.map_size)} positions got "
                f"a map of {_by(size)}; make it with a larger map_size, or use a local scope, "
                "which takes maps of any size."
            )
        return crop_offsets(self.embedding, *size)

    def extra_repr(self) -> str:
        kind = "local" if self.map_size is None else "global"
        return f"{kind}, embedding={list(self.embedding.shape)}"


def _by(size: Sequence[int]) -> str:
    return "x".join(map(str, size))
