"""Self-attention with relative positions, as baselines: global, axial and local.

Each takes and returns maps [B, C, H, W] and replaces a 3x3 convolution. The attention maps are held
in memory, as in the implementations of the paper's time. Letters in einsum: b batch, h heads, d
depth of a head, y and x the query's place, Y and X the context's.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lambda_det.errors import ConfigError


class _Attention(nn.Module):
    """The projections that all have: queries, keys and values of the same depth."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        if dim % heads:
            raise ConfigError(f"Attention on {dim} channels cannot have {heads} equal heads.")
        self.heads, self.depth = heads, dim // heads
        self.projection = nn.Conv2d(dim, 3 * dim, 1, bias=False)  # rows (q k v, h, d)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, scaled by d^-1/2, keys and values, each [b, h, d, H, W]."""
        parts = self.projection(x).unflatten(1, (3, self.heads, self.depth))
        queries, keys, values = parts.unbind(1)
        return queries * self.depth**-0.5, keys, values


class GlobalAttention(_Attention):
    """All positions look at all others (Bello et al., 2019, "Attention Augmented ...").

    The logit of a pair is q.k + q.r_y[Y - y] + q.r_x[X - x], with embeddings that heads share.

    Args:
        dim: channels in and out.
        heads: that divide them.
        map_size: (H, W) of the largest map.
    """

    def __init__(self, dim: int, heads: int, map_size: tuple[int, int]) -> None:
        super().__init__(dim, heads)
        self.rows = _offsets(map_size[0], self.depth)
        self.columns = _offsets(map_size[1], self.depth)

    def forward(self, x: Tensor, mask: None = None) -> Tensor:
        height, width = x.shape[-2:]
        queries, keys, values = self.project(x)
        content = queries.flatten(3).transpose(2, 3) @ keys.flatten(3)  # [b, h, (y x), (Y X)]
        rows = torch.einsum("bhdyx,yYd->bhyxY", queries, _by_pair(self.rows, height))
        columns = torch.einsum("bhdyx,xXd->bhyxX", queries, _by_pair(self.columns, width))
        logits = content.unflatten(3, (height, width)).unflatten(2, (height, width))
        logits = logits + rows[..., None] + columns[..., None, :]  # [b, h, y, x, Y, X]
        weights = logits.flatten(4).flatten(2, 3).softmax(dim=-1)  # [b, h, (y x), (Y X)]
        output = values.flatten(3) @ weights.transpose(2, 3).to(values.dtype)  # [b, h, d, (y x)]
        return output.flatten(1, 2).unflatten(2, (height, width))


class AxialAttention(nn.Module):
    """First along the column of a position, then along its row (Ho et al., 2019).

    Wang et al. (2020) add positions of keys and values, which are left out here.

    Args:
        dim: channels in and out.
        heads: that divide them.
        map_size: (H, W) of the largest map.
    """

    def __init__(self, dim: int, heads: int, map_size: tuple[int, int]) -> None:
        super().__init__()
        self.along_column = RowAttention(dim, heads, map_size[0])
        self.along_row = RowAttention(dim, heads, map_size[1])

    def forward(self, x: Tensor, mask: None = None) -> Tensor:
        x = self.along_column(x.transpose(2, 3)).transpose(2, 3)
        return self.along_row(x)


class RowAttention(_Attention):
    """Each position looks at its own row: the logit is q.k + q.r[X - x].

    Args:
        dim: channels in and out.
        heads: that divide them.
        width: of the largest map.
    """

    def __init__(self, dim: int, heads: int, width: int) -> None:
        super().__init__(dim, heads)
        self.columns = _offsets(width, self.depth)

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = self.project(x)
        logits = torch.einsum("bhdyx,bhdyX->bhyxX", queries, keys)
        pairs = _by_pair(self.columns, x.shape[3])
        logits = logits + torch.einsum("bhdyx,xXd->bhyxX", queries, pairs)
        weights = logits.softmax(dim=-1).to(values.dtype)
        return torch.einsum("bhyxX,bhdyX->bhdyx", weights, values).flatten(1, 2)


class LocalAttention(_Attention):
    """Each position looks at a square around it (Ramachandran et al., 2019).

    The logit is q.k + q.r, where one half of r belongs to the row's offset and the other to the
    column's. Positions beyond the border take no part. Keys and values are copied once per offset.

    Args:
        dim: channels in and out.
        heads: that divide them into an even depth.
        scope: odd side of the square.
    """

    def __init__(self, dim: int, heads: int, scope: int = 7) -> None:
        super().__init__(dim, heads)
        if self.depth % 2 or scope % 2 == 0:
            raise ConfigError("Local attention needs an even depth of a head and an odd scope.")
        self.scope = scope
        self.rows = nn.Parameter(torch.randn(scope, self.depth // 2) * self.depth**-0.5)
        self.columns = nn.Parameter(torch.randn(scope, self.depth // 2) * self.depth**-0.5)

    def forward(self, x: Tensor, mask: None = None) -> Tensor:
        height, width = x.shape[-2:]
        queries, keys, values = self.project(x)
        queries = queries.flatten(3)  # [b, h, d, n]
        logits = torch.einsum("bhdn,bhdrn->bhrn", queries, self._around(keys))
        on_rows, on_columns = queries.chunk(2, dim=2)
        rows = torch.einsum("bhdn,yd->bhyn", on_rows, self.rows)
        columns = torch.einsum("bhdn,xd->bhxn", on_columns, self.columns)
        logits = logits + (rows[:, :, :, None] + columns[:, :, None]).flatten(2, 3)
        inside = F.unfold(
            torch.ones(1, 1, height, width, device=x.device), self.scope, padding=self.scope // 2
        )  # [1, r, n]
        weights = logits.masked_fill(inside[:, None] == 0, float("-inf")).softmax(dim=2)
        output = torch.einsum("bhrn,bhdrn->bhdn", weights.to(values.dtype), self._around(values))
        return output.flatten(1, 2).unflatten(2, (height, width))

    def _around(self, x: Tensor) -> Tensor:
        """[b, h, d, H, W] as [b, h, d, offsets, positions], 0 beyond the border."""
        around = F.unfold(x.flatten(1, 2), self.scope, padding=self.scope // 2)
        return around.unflatten(1, (self.heads, self.depth, self.scope**2))


def _offsets(side: int, depth: int) -> nn.Parameter:
    """Embeddings of the offsets 1 - side to side - 1, [2 side - 1, d]."""
    return nn.Parameter(torch.randn(2 * side - 1, depth) * depth**-0.5)


def _by_pair(offsets: Tensor, side: int) -> Tensor:
    """Embeddings [offsets, d] as [query, context, d] for a side up to the largest."""
    places = torch.arange(side, device=offsets.device)
    return offsets[places[None, :] - places[:, None] + offsets.shape[0] // 2]
