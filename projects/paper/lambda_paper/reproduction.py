"""The lambda layer of the CIFAR-10 reproduction (TU Delft, 2021), each difference from ours alone.

To import this module adds its networks to those of :func:`lambda_det.list_models`, as
:mod:`lambda_paper.attention` does. ``resnet50_lambda_pairs`` has the first of ``DIFFERENCES``, and
so on, and ``resnet50_lambda_delft`` all of them. A network holds for images of one size alone, the
32 pixels of CIFAR-10 or MODEL.LAMBDA_RESNET.GLOBAL_CONTEXT.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from lambda_det.errors import ConfigError
from lambda_det.layers import LambdaLayer
from lambda_det.modeling.replacements import KINDS, MakeNorm
from lambda_det.modeling.specs import SPECS, PaperFigures

DIFFERENCES = {
    "pairs": "an embedding for each pair of positions, [n, m, k], in place of one for each offset",
    "values": "the values' norm has statistics for each position, over examples and channels",
    "queries": "the queries' norm has statistics for each depth, also over heads",
    "reshape": "the map [d, n] is read as [n, d] without a transpose; ours has the transpose",
}


class Pairs(nn.Module):
    """``embedding`` [k, 1, n, m]: one for each pair of a query and a position of its context."""

    def __init__(self, map_size: tuple[int, int], query_depth: int) -> None:
        super().__init__()
        number = math.prod(map_size)
        self.embedding = nn.Parameter(torch.randn(query_depth, 1, number, number))

    def forward(self, queries: Tensor, values: Tensor, mask: None = None, **_: object) -> Tensor:
        """Map queries [b, H, W, h, k] and values [b, H, W, v, 1] to [b, H, W, h, v]."""
        weights = torch.einsum("bnhk,knm->bnhm", queries.flatten(1, 2), self.embedding[:, 0])
        output = torch.einsum("bnhm,bmv->bnhv", weights, values.flatten(1, 2)[..., 0])
        return output.unflatten(1, queries.shape[1:3])


class Pooled(nn.Module):
    """A norm of [B, (groups, c), H, W] also over groups: for queries with groups of heads.

    Without groups of [B, v, H, W] over channels, with statistics for each position: of values.
    """

    def __init__(self, norm: nn.Module, groups: int = 0) -> None:
        super().__init__()
        self.norm, self.groups = norm, groups

    def forward(self, x: Tensor) -> Tensor:
        if self.groups:
            parts = x.flatten(2).unflatten(1, (self.groups, -1))  # [B, h, k, n]
        else:
            parts = x.flatten(2)[..., None]  # [B, v, n, 1]
        return self.norm(parts.transpose(1, 2)).transpose(1, 2).reshape(x.shape)


class DelftLambda(LambdaLayer):
    """A lambda layer with some of ``DIFFERENCES``.

    Args:
        dim: channels in and out.
        map_size: (H, W) of its maps.
        norm: makes the norms.
        differences: names of ``DIFFERENCES``.
    """

    def __init__(
        self, dim: int, map_size: tuple[int, int], norm: MakeNorm, differences: set[str]
    ) -> None:
        pairs = "pairs" in differences
        super().__init__(dim, scope=None, map_size=None if pairs else map_size, norm=norm)
        self.map_size, self.reshape = map_size, "reshape" in differences
        if pairs:
            self.position = Pairs(map_size, self.query_depth)
        if "values" in differences:
            self.value_norm = Pooled(norm(math.prod(map_size)))
        if "queries" in differences:
            self.query_norm = Pooled(norm(self.query_depth), self.heads)

    def forward(self, x: Tensor, mask: None = None) -> Tensor:
        if x.shape[2:] != self.map_size:
            (height, width), (own, _) = x.shape[2:], self.map_size
            raise ConfigError(
                f"A network of the CIFAR-10 reproduction holds for images of one size: a layer for "
                f"maps of {own}x{own} positions got one of {height}x{width}. Give INPUT.SIZE and "
                "MODEL.LAMBDA_RESNET.GLOBAL_CONTEXT the same value."
            )
        if self.reshape:
            x = x.flatten(1).unflatten(1, (-1, x.shape[1])).mT.unflatten(2, self.map_size)
        return super().forward(x)


def _sharing(differences: set[str]) -> Callable[..., DelftLambda]:
    """Layers that share their embeddings with the one before, if its maps have the same size."""
    last: list[DelftLambda] = []

    def make(dim: int, size: tuple[int, int], norm: MakeNorm) -> DelftLambda:
        layer = DelftLambda(dim, size, norm, differences)
        # The last layer of a network before has the smallest map, and the first the largest
        if last and last[0].map_size == size:
            layer.position = last[0].position
        last[:] = [layer]
        return layer

    return make


for _kind in (*DIFFERENCES, "delft"):
    KINDS[_kind] = _sharing(set(DIFFERENCES) if _kind == "delft" else {_kind})
    for _name in ("resnet50_lambda", "resnet14_slim_lambda"):
        SPECS[f"{_name}_{_kind}"] = replace(
            SPECS[f"{_name}_c2345"],
            kind=_kind,
            global_context=32,
            image_size=32,
            paper=PaperFigures(),
        )


def setup_environment() -> None:
    """What Detectron2 calls after it has imported this module; nothing is left to do."""
