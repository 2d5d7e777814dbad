"""The two lambdas of a layer as modules that map queries, keys and values to an output.

b: batch, h: heads, k: query and key depth, v: value depth, u: intra-depth. Both take the mask of
:class:`lambda_det.layers.LambdaLayer`: bool [b, 1, H, W], False at padding, or [n, m], True where
query n may look at position m, rows first.
"""

from __future__ import annotations

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
    position_output,
    spread,
    without_autocast,
)
from lambda_det.layers.local import local_position_output


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
        q, k, v = (x.flatten(1, 2) for x in (queries, keys, values))  # [b, n, ..] with n = H W
        # Autocast would take the softmax's sums, and the products, to 16 bits
        with without_autocast(queries):
            if mask is not None and mask.dim() == 2:
                y = masked_content_output(q, k, v, mask, self.key_norm)
            else:
                valid = None if mask is None else mask.flatten(1)
                lambdas = content_lambda(normalize_keys(k, self.key_norm, valid), v)  # [b, k, v]
                y = apply_lambda(q, lambdas)
        return y.unflatten(1, queries.shape[1:3])

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
        scope: (r_y, r_x), both odd, of a local scope; or None with ``map_size``.
        map_size: (H, W), the largest map a global embedding is used on.
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
        scope: tuple[int, int] | None = None,
        map_size: tuple[int, int] | None = None,
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
            scope = (2 * map_size[0] - 1, 2 * map_size[1] - 1)
        if any(side < 1 or side % 2 == 0 for side in scope):
            raise ConfigError(
                f"The scope of a lambda layer must have odd sides of at least 1, so that the query "
                f"is at its centre, but it is {scope[0]}x{scope[1]}; use "
                f"{scope[0] | 1}x{scope[1] | 1}."
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
    ) -> Tensor:
        """Map queries [b, H, W, h, k] and values [b, H, W, v, u] to [b, H, W, h, v].

        Args:
            queries: of the heads that share an embedding.
            values: likewise.
            mask: see above.
            head: which embedding, in the multi-head form.
            dilation: how many positions apart neighbouring offsets are.
            implementation: see :func:`lambda_det.layers.local.local_position_output`.
        """
        size = queries.shape[1:3]
        embedding = self.offsets(*grid_size(*size, dilation))
        if self.heads is not None:
            embedding = embedding[head]
        if mask is not None and mask.dim() == 2:
            dense = dense_embedding(spread(embedding, dilation), *size)  # [n, m, k, u]
            q, v = queries.flatten(1, 2), values.flatten(1, 2)
            with without_autocast(queries):
                y = position_output(q, v, dense.to(q.dtype) * mask[:, :, None, None])
            y = y.unflatten(1, size)
        else:
            if mask is not None:
                values = values * mask[:, 0, :, :, None, None].to(values.dtype)
            y = local_position_output(queries, values, embedding, implementation, dilation=dilation)
        return self.add_bias(y, queries, head)

    def add_bias(self, y: Tensor, queries: Tensor, head: int) -> Tensor:
        """Add q . b, the same number in every value channel, to [b, H, W, h, v]."""
        if self.bias is None:
            return y
        bias = self.bias if self.heads is None else self.bias[head]
        return y + (queries @ bias.to(queries.dtype))[..., None]

    def offsets(self, height: int, width: int) -> Tensor:
        """The embeddings of the offsets that occur on a map of this size.

        Returns:
            [.., min(r_y, 2 height - 1), min(r_x, 2 width - 1)], the middle of ``embedding``.

        Raises:
            ConfigError: if a global embedding is used on a map larger than it was made for.
        """
        if self.map_size and (height > self.map_size[0] or width > self.map_size[1]):
            raise ConfigError(
                "A global position embedding for maps of up to "
                f"{self.map_size[0]}x{self.map_size[1]} positions got a map of {height}x{width}; "
                "make it with a larger map_size, or use a local scope, which takes maps of any "
                "size."
            )
        return crop_offsets(self.embedding, height, width)

    def extra_repr(self) -> str:
        kind = "local" if self.map_size is None else "global"
        return f"{kind}, embedding={list(self.embedding.shape)}"
