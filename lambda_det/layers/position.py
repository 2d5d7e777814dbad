"""Relative position embeddings: one vector per offset between a query and a context position.

A local scope of r x r offsets and a global map of H x W positions are the same thing here: a map of
H x W positions knows (2H - 1) x (2W - 1) offsets, which is an odd scope that reaches everywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lambda_det.errors import ConfigError
from lambda_det.layers.exporting import is_exporting


class RelativePosition(nn.Module):
    """The learned embeddings R of Section 3.3, which make the position output translation
    equivariant.

    ``embedding`` has the shape [k, u, r_y, r_x], and with ``heads`` (the multi-head form) one such
    tensor per head, [h, k, u, r_y, r_x]. Entry [.., dy, dx] meets the value at the offset
    (dy - r_y // 2, dx - r_x // 2) from the query, as in a PyTorch convolution. Layers share their
    embeddings by holding the same instance of this module.

    Args:
        query_depth: k.
        intra_depth: u.
        scope: (r_y, r_x), both odd, of a local scope; or None with ``map_size``.
        map_size: (H, W), the largest map a global embedding is used on.
        heads: h for the multi-head form, None for the paper's multi-query form.

    Raises:
        ConfigError: if a scope is even or not positive.
    """

    def __init__(
        self,
        query_depth: int,
        intra_depth: int = 1,
        *,
        scope: tuple[int, int] | None = None,
        map_size: tuple[int, int] | None = None,
        heads: int | None = None,
    ) -> None:
        super().__init__()
        if (scope is None) == (map_size is None):
            raise ConfigError("RelativePosition needs either a scope or a map_size, and not both.")
        if map_size is not None:
            scope = (2 * map_size[0] - 1, 2 * map_size[1] - 1)
        if any(side < 1 or side % 2 == 0 for side in scope):
            raise ConfigError(
                f"The scope of a lambda layer must have odd sides of at least 1, so that the query "
                f"is at its centre, but it is {scope[0]}x{scope[1]}; use "
                f"{scope[0] | 1}x{scope[1] | 1}."
            )
        self.map_size = map_size
        shape = (query_depth, intra_depth, *scope)
        self.embedding = nn.Parameter(torch.empty(shape if heads is None else (heads, *shape)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the embeddings from N(0, 1) (Appendix E.1)."""
        nn.init.normal_(self.embedding)

    def forward(self, height: int, width: int) -> Tensor:
        """Return the embeddings of the offsets that occur on a map of this size.

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


def crop_offsets(embedding: Tensor, height: int, width: int) -> Tensor:
    """Cut [.., r_y, r_x] down to the offsets that occur on a map of height x width.

    In an export they all stay, since the others meet nothing but zeros.
    """
    if is_exporting():  # a graph for maps of every size
        return embedding
    cut_y = max(embedding.shape[-2] // 2 - (height - 1), 0)
    cut_x = max(embedding.shape[-1] // 2 - (width - 1), 0)
    if cut_y == 0 and cut_x == 0:
        return embedding
    size_y, size_x = embedding.shape[-2:]
    return embedding[..., cut_y : size_y - cut_y, cut_x : size_x - cut_x]


def dense_embedding(embedding: Tensor, height: int, width: int) -> Tensor:
    """Lay out one embedding per pair of positions, zero outside the scope (Section 3.4).

    Args:
        embedding: [k, u, r_y, r_x].

    Returns:
        [n, m, k, u] with n = m = height * width, rows first.
    """
    embedding = crop_offsets(embedding, height, width)
    pad_y = height - 1 - embedding.shape[-2] // 2
    pad_x = width - 1 - embedding.shape[-1] // 2
    full = nn.functional.pad(embedding, (pad_x, pad_x, pad_y, pad_y))  # [k, u, 2H-1, 2W-1]
    rows = torch.arange(height, device=embedding.device)
    columns = torch.arange(width, device=embedding.device)
    offset_y = rows[None, :] - rows[:, None] + height - 1  # [query row, context row]
    offset_x = columns[None, :] - columns[:, None] + width - 1
    pairs = full[:, :, offset_y[:, None, :, None], offset_x[None, :, None, :]]  # [k, u, H, W, H, W]
    positions = height * width
    return pairs.reshape(*embedding.shape[:2], positions, positions).permute(2, 3, 0, 1)
