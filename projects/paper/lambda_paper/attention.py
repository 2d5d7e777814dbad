"""The paper's baselines: self-attention with relative positions, and linear attention.

They are in Tables 3 and 4. Importing this module adds their networks, ``resnet50_local_attention``
and so on, to :func:`lambda_det.list_models`. With ``DETECTRON2_ENV_MODULE=lambda_paper.attention``
in the environment, and this folder's parent in ``PYTHONPATH``, Detectron2 imports it in every
process.

Each layer takes maps [B, C, H, W] and returns them in the same layout. Attention maps are held in
memory, as in the implementations of the paper's time. Letters in einsum: b batch, h heads, d depth
of a head, y and x the query's place, Y and X the context's.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lambda_det.errors import ConfigError
from lambda_det.modeling.replacements import KINDS, MakeNorm
from lambda_det.modeling.specs import ALL, SPECS, STAGES, PaperFigures

HEADS = 8  # the number that gives the paper's figures


class SelfAttention(nn.Module):
    """The projections that all forms have. ``depth`` is that of a head's queries and keys.

    Args:
        dim: channels in.
        heads: they divide the channels of queries, keys and values.
        key_dim: channels of all queries, and of all keys; ``dim`` if None.
        value_dim: channels of all values, and out; ``dim`` if None.
    """

    def __init__(
        self, dim: int, heads: int, key_dim: int | None = None, value_dim: int | None = None
    ) -> None:
        super().__init__()
        key_dim, value_dim = key_dim or dim, value_dim or dim
        if key_dim % heads or value_dim % heads:
            raise ConfigError(
                f"Attention of {key_dim} channels of keys and {value_dim} of values cannot have "
                f"{heads} equal heads."
            )
        self.heads, self.depth, self.value_depth = heads, key_dim // heads, value_dim // heads
        self.rows = [key_dim, key_dim, value_dim]  # of queries, keys, values: (h, d)
        self.projection = nn.Conv2d(dim, sum(self.rows), 1, bias=False)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, scaled by d^-1/2, keys and values, each [b, h, d, H, W]."""
        parts = self.projection(x).split(self.rows, dim=1)
        queries, keys, values = (part.unflatten(1, (self.heads, -1)) for part in parts)
        return queries * self.depth**-0.5, keys, values


class GlobalAttention(SelfAttention):
    """All positions look at all others (Bello et al., 2019, "Attention Augmented ...").

    The logit of a pair is q.k + q.r_y[Y - y] + q.r_x[X - x], with embeddings that heads share.

    Args:
        dim: channels in, and out unless values have another number.
        heads: that divide them.
        map_size: (H, W) of the largest map.
        channels: of all keys and of all values, see :class:`SelfAttention`.
    """

    def __init__(self, dim: int, heads: int, map_size: tuple[int, int], *channels: int) -> None:
        super().__init__(dim, heads, *channels)
        self.map_size = map_size
        self.y_offsets = _offsets(map_size[0], self.depth)
        self.x_offsets = _offsets(map_size[1], self.depth)

    def forward(self, x: Tensor, mask: None = None) -> Tensor:
        height, width = x.shape[-2:]
        queries, keys, values = self.project(x)
        content = queries.flatten(3).transpose(2, 3) @ keys.flatten(3)  # [b, h, (y x), (Y X)]
        rows = torch.einsum("bhdyx,yYd->bhyxY", queries, _by_pair(self.y_offsets, height))
        columns = torch.einsum("bhdyx,xXd->bhyxX", queries, _by_pair(self.x_offsets, width))
        logits = content.unflatten(3, (height, width)).unflatten(2, (height, width))
        logits = logits + rows[..., None] + columns[..., None, :]  # [b, h, y, x, Y, X]
        weights = logits.flatten(4).flatten(2, 3).softmax(dim=-1)  # [b, h, (y x), (Y X)]
        output = values.flatten(3) @ weights.transpose(2, 3).to(values.dtype)  # [b, h, d, (y x)]
        return _laid_out_as(x, output.flatten(1, 2).unflatten(2, (height, width)))


class AxialAttention(nn.Module):
    """First along the column of a position, then along its row (Wang et al., 2020).

    As there, queries and keys have half the depth of values.

    Args:
        dim: channels in and out.
        heads: that divide them.
        map_size: (H, W) of the largest map.
        norm: makes the norms within, of a number of channels.
    """

    def __init__(self, dim: int, heads: int, map_size: tuple[int, int], norm: MakeNorm) -> None:
        super().__init__()
        try:
            self.along_column = RowAttention(dim, heads, map_size[0], norm)
            self.along_row = RowAttention(dim, heads, map_size[1], norm)
        except ValueError as error:  # a group norm whose groups do not divide the channels
            raise ConfigError(
                f"A norm within axial attention cannot be made ({error}); take NORM BN or SyncBN."
            ) from error

    def forward(self, x: Tensor, mask: None = None) -> Tensor:
        columns = self.along_column(x.transpose(2, 3)).transpose(2, 3)
        return _laid_out_as(x, self.along_row(columns))


class RowAttention(SelfAttention):
    """Each position looks at its own row, with embeddings for queries, keys and values.

    The logit is N(q.k) + N(q.r_q[X - x]) + N(k.r_k[X - x]), and the output N(sum of v) +
    N(sum of r_v[X - x]). N are norms, with weights of their own for each term and head of the
    logits and for each channel of the output; queries, keys and values also have norms.

    Args:
        dim: channels in and out.
        heads: that divide them.
        width: of the largest map.
        norm: makes a norm of a number of channels.
    """

    def __init__(self, dim: int, heads: int, width: int, norm: MakeNorm) -> None:
        super().__init__(dim, heads, key_dim=dim // 2)
        self.map_size = (width,)
        nn.init.normal_(self.projection.weight, std=dim**-0.5)
        self.projection = nn.Sequential(self.projection, norm(sum(self.rows)))
        self.query_offsets = _offsets(width, self.depth)
        self.key_offsets = _offsets(width, self.depth)
        self.value_offsets = _offsets(width, self.value_depth)
        self.logits_norm = norm(3 * heads)
        self.output_norm = norm(2 * dim)

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = self.project(x)
        offsets = (self.query_offsets, self.key_offsets, self.value_offsets)
        of_queries, of_keys, of_values = (_by_pair(part, x.shape[3]) for part in offsets)
        terms = (
            torch.einsum("bhdyx,bhdyX->bhyxX", queries, keys),
            torch.einsum("bhdyx,xXd->bhyxX", queries, of_queries),
            torch.einsum("bhdyX,xXd->bhyxX", keys, of_keys),
        )
        terms = self.logits_norm(torch.cat(terms, dim=1).flatten(2, 3))  # [b, (3 h), (y x), X]
        logits = terms.unflatten(1, (3, self.heads)).sum(1).unflatten(2, x.shape[2:])
        weights = logits.softmax(dim=-1).to(values.dtype)
        sums = (
            torch.einsum("bhyxX,bhdyX->bhdyx", weights, values),
            torch.einsum("bhyxX,xXd->bhdyx", weights, of_values.to(values.dtype)),
        )
        sums = self.output_norm(torch.cat(sums, dim=1).flatten(1, 2))  # [b, (2 h d), y, x]
        return sums.unflatten(1, (2, -1)).sum(1)


class LocalAttention(SelfAttention):
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
        self.y_offsets = nn.Parameter(torch.randn(scope, self.depth // 2) * self.depth**-0.5)
        self.x_offsets = nn.Parameter(torch.randn(scope, self.depth // 2) * self.depth**-0.5)

    def forward(self, x: Tensor, mask: None = None) -> Tensor:
        height, width = x.shape[-2:]
        queries, keys, values = self.project(x)
        queries = queries.flatten(3)  # [b, h, d, n]
        logits = torch.einsum("bhdn,bhdrn->bhrn", queries, self._around(keys))
        on_rows, on_columns = queries.chunk(2, dim=2)
        rows = torch.einsum("bhdn,yd->bhyn", on_rows, self.y_offsets)
        columns = torch.einsum("bhdn,xd->bhxn", on_columns, self.x_offsets)
        logits = logits + (rows[:, :, :, None] + columns[:, :, None]).flatten(2, 3)
        inside = F.unfold(
            torch.ones(1, 1, height, width, device=x.device), self.scope, padding=self.scope // 2
        )  # [1, r, n]
        weights = logits.masked_fill(inside[:, None] == 0, float("-inf")).softmax(dim=2)
        output = torch.einsum("bhrn,bhdrn->bhdn", weights.to(values.dtype), self._around(values))
        return _laid_out_as(x, output.flatten(1, 2).unflatten(2, (height, width)))

    def _around(self, x: Tensor) -> Tensor:
        """[b, h, d, H, W] as [b, h, d, offsets, positions], 0 beyond the border."""
        around = F.unfold(x.flatten(1, 2), self.scope, padding=self.scope // 2)
        return around.unflatten(1, (self.heads, self.depth, self.scope**2))


class AugmentedConvolution(nn.Module):
    """A 3x3 convolution of most channels beside global attention (Bello et al., 2019).

    As there, a tenth of the channels is attention's, keys have twice the depth of values, and at
    least 20 for each head.

    Args:
        dim: channels in and out.
        heads: of the attention.
        map_size: (H, W) of the largest map.
    """

    def __init__(self, dim: int, heads: int, map_size: tuple[int, int]) -> None:
        super().__init__()
        values = max(round(0.1 * dim / heads), 1) * heads
        keys = max(round(0.2 * dim / heads), 20) * heads
        self.convolution = nn.Conv2d(dim, dim - values, 3, padding=1, bias=False)
        self.attention = GlobalAttention(dim, heads, map_size, keys, values)
        self.output = nn.Conv2d(values, values, 1, bias=False)

    def forward(self, x: Tensor, mask: None = None) -> Tensor:
        return torch.cat([self.convolution(x), self.output(self.attention(x))], dim=1)


class DoubleAttention(nn.Module):
    """Linear attention beside convolutions (Chen et al., 2018): x + W (V softmax(B)^T) softmax(A).

    The features A and B are normalised over the positions and over their depth; both, and V, have
    half the channels.

    Args:
        dim: channels in and out.
        norm: makes the last norm.
    """

    def __init__(self, dim: int, norm: MakeNorm) -> None:
        super().__init__()
        self.projection = nn.Conv2d(dim, 3 * (dim // 2), 1, bias=False)  # rows: gather, give, V
        self.output = nn.Conv2d(dim // 2, dim, 1, bias=False)
        self.norm = norm(dim)
        gamma = getattr(self.norm, "weight", None)
        if isinstance(gamma, nn.Parameter):  # a residual branch starts at zero (Appendix F.2)
            nn.init.zeros_(gamma)

    def forward(self, x: Tensor) -> Tensor:
        gather, give, values = self.projection(x).flatten(2).chunk(3, dim=1)  # [b, d, n]
        gather, give = gather.softmax(dim=2), give.softmax(dim=1)
        output = values @ gather.mT.to(values.dtype) @ give.to(values.dtype)
        return x + self.norm(self.output(output.unflatten(2, x.shape[2:])))


def _laid_out_as(x: Tensor, output: Tensor) -> Tensor:
    """The output in the layout of x, so no later convolution changes the layout of its input."""
    if x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous():
        return output.contiguous(memory_format=torch.channels_last)
    return output


def _offsets(side: int, depth: int) -> nn.Parameter:
    """Embeddings of the offsets 1 - side to side - 1, [2 side - 1, d]."""
    return nn.Parameter(torch.randn(2 * side - 1, depth) * depth**-0.5)


def _by_pair(offsets: Tensor, side: int) -> Tensor:
    """Embeddings [offsets, d] as [query, context, d] for a side up to the largest."""
    if side > offsets.shape[0] // 2 + 1:
        raise ConfigError(
            f"Attention with position embeddings for maps of up to {offsets.shape[0] // 2 + 1} "
            f"positions a side got one of {side}; make it for larger images (global_context)."
        )
    places = torch.arange(side, device=offsets.device)
    return offsets[places[None, :] - places[:, None] + offsets.shape[0] // 2]


KINDS |= {
    "global": lambda dim, size, norm: GlobalAttention(dim, HEADS, size),
    "axial": lambda dim, size, norm: AxialAttention(dim, HEADS, size, norm),
    "local": lambda dim, size, norm: LocalAttention(dim, HEADS, 7),
    "augmented": lambda dim, size, norm: AugmentedConvolution(dim, HEADS, size),
    "double": lambda dim, size, norm: DoubleAttention(dim, norm),
}

# For each kind the blocks of the vanilla ResNet-50 that have the layer, the side of the largest
# image, and the paper's figures
_NETWORKS = {
    "global": (
        dict.fromkeys(STAGES, ALL),
        224,
        PaperFigures(source="Table 4", note="out of memory in the paper"),
    ),
    "axial": (dict.fromkeys(STAGES, ALL), 224, PaperFigures(top1=77.5, source="Table 4")),
    "local": (
        dict.fromkeys(STAGES, ALL),
        None,
        PaperFigures(18.0, top1=77.4, source="Tables 3, 4"),
    ),
    "augmented": (
        dict.fromkeys(STAGES[1:], ALL),
        224,
        PaperFigures(25.8, top1=77.7, source="Table 3"),
    ),
    "double": (
        {"res3": (2, 4), "res4": (2, 4, 6)},
        None,
        PaperFigures(33.0, top1=77.0, source="Table 3", note="does not follow from the text"),
    ),
}
for _kind, (_blocks, _side, _paper) in _NETWORKS.items():
    SPECS[f"resnet50_{_kind}_attention"] = replace(
        SPECS["resnet50"],
        kind=_kind,
        follows=_kind == "double",
        lambda_blocks=_blocks,
        global_context=_side,
        paper=_paper,
    )


def setup_environment() -> None:
    """Do nothing: Detectron2 calls this after it has imported the module."""
