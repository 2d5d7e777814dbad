"""Copies of networks in plain operators, whose graphs hold for inputs of every size.

A graph is recorded on one input. In it nothing may be chosen by the size of a map, nor be computed
by operators that only this package brings. So modules that do one of both are replaced by
subclasses with the same parameters, which compute the same more slowly.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lambda_det.layers import ContentLambda, LambdaLayer, RelativePosition
from lambda_det.layers.lambda_layer import normalize_keys
from lambda_det.layers.local import dilated
from lambda_det.native.calls import Model, copied

TILE = 8  # queries along each side of a tile


def portable_copy(model: Model) -> Model:
    """A copy in plain operators, in evaluation mode, for ``torch.jit.trace`` or ``torch.export``.

    Names and parameters are the model's.
    """
    # with weights laid out for channels last, the exporters would ask for the layout of every map
    model = copied(model).eval().to(memory_format=torch.contiguous_format)
    for module in model.modules():
        form = _form(module)
        if form is not None:
            module.__class__ = form  # same parameters, names and hooks
    return model


def _form(module: nn.Module) -> type[nn.Module] | None:
    """The class that computes the same as a module in a graph; None to leave it as it is."""
    if type(module) is nn.AvgPool2d:
        side_by_side = module.kernel_size == module.stride == 2 and module.padding == 0
        partial_windows = module.ceil_mode and not module.count_include_pad
        return PortableAvgPool2d if side_by_side and partial_windows else None
    if isinstance(module, nn.BatchNorm2d):
        return PortableBatchNorm2d
    # subclasses of other packages stay as they are
    forms = {
        LambdaLayer: PortableLambdaLayer,
        ContentLambda: PortableContentLambda,
        RelativePosition: PortableRelativePosition,
    }
    return forms.get(type(module))


def dense(x: Tensor) -> Tensor:
    """A copy of a view, laid out by its shape.

    Operators derive the layout of a view from its sizes, and then the graph holds only for maps of
    more than one row, column or position.
    """
    return x.clone(memory_format=torch.contiguous_format)


class PortableLambdaLayer(LambdaLayer):
    """See :class:`LambdaLayer`."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return dense(super().forward(x, mask))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        queries, keys, values = super().project(x)
        return dense(queries), dense(keys), dense(values)


class PortableContentLambda(ContentLambda):
    """See :class:`ContentLambda`; ``mask`` is one of padding."""

    def forward(
        self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        q, k, v = (dense(x).flatten(1, 2) for x in (queries, keys, values))
        k = normalize_keys(k, self.key_norm, mask)
        k = dense(k.permute(0, 2, 1, 3)).flatten(2)  # [b, k, (m, u)]
        v = dense(v.permute(0, 1, 3, 2)).flatten(1, 2)  # [b, (m, u), v]
        lambdas = torch.bmm(k, v.to(k.dtype)).to(q.dtype)
        # not einsum, which treats a map of one position differently
        y = torch.bmm(q.flatten(1, 2), lambdas)
        return y.unflatten(1, queries.shape[1:4])


class PortableRelativePosition(RelativePosition):
    """See :class:`RelativePosition`; ``mask`` is one of padding."""

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
        # the embedding is not cropped to the map, because offsets beyond it meet values of 0
        embedding = self.table(head)
        if mask is not None:
            values = values * mask[:, 0, :, :, None, None].to(values.dtype)
        queries, values = dense(queries), dense(values)
        undilated = partial(portable_output, embedding=embedding.to(queries.dtype))
        if dilation == 1:
            y = undilated(queries, values)
        else:
            y = _first(dilated(undilated, queries, values, dilation), *queries.shape[1:3])
        return self.add_bias(y, queries, head)


class PortableBatchNorm2d(nn.BatchNorm2d):
    """``BatchNorm2d`` in plain operators: its own asks whether there are any boxes."""

    def forward(self, x: Tensor) -> Tensor:
        scale, shift = torch.rsqrt(self.running_var + self.eps), 0.0
        if self.affine:
            scale, shift = scale * self.weight, self.bias
        shift = shift - self.running_mean * scale
        return x * scale[:, None, None] + shift[:, None, None]


class PortableAvgPool2d(nn.AvgPool2d):
    """``AvgPool2d`` of 2x2 windows side by side, with sizes rounded up.

    Only positions on the map count: the last row and column are repeated instead. Runtimes differ
    on sizes that are rounded up, and OpenVINO refuses to average a map of one channel in bfloat16,
    which the counts would be.
    """

    def forward(self, x: Tensor) -> Tensor:
        # the divisor changes nothing; onnx_file.py recognises the operator by it
        return F.avg_pool2d(F.pad(x, (0, 1, 0, 1), mode="replicate"), 2, divisor_override=4)


def portable_output(queries: Tensor, values: Tensor, embedding: Tensor) -> Tensor:
    """The query-first position output as one graph for maps of every size.

    See :func:`lambda_det.layers.local.local_position_output`. Tiles and windows are those of
    :mod:`lambda_det.layers.local.query_first`. Their sizes do not depend on the map, only their
    number does. A graph cannot loop over chunks whose number is known only when it runs, so all
    windows and the scores of one head are in memory at once: for a scope of 23x23, 900 numbers per
    position, 15 MB on a 64x64 map.
    """
    batch, height, width = queries.shape[:3]
    places = _places((height, width), (1, 1), queries.device)
    grid = batch, *places.shape[:2]
    tiles = _gather(queries.flatten(1, 2), dense(places.flatten(2).flatten(0, 1).T))
    tiles = dense(tiles.permute(3, 1, 0, 2, 4)).flatten(2, 3)  # [h, (y, x), tiles, k]

    places = _places((height, width), embedding.shape[2:], queries.device).flatten(2).flatten(0, 1)
    windows = _gather(values.flatten(1, 2), places).movedim(-1, 2)
    windows = dense(windows).flatten(2, 3).flatten(0, 1)  # [tiles, (u, window), v]

    placed, outputs = _in_windows(embedding), []
    for head in tiles.unbind(0):
        scores = torch.bmm(head, placed)  # [(y, x), tiles, (u, window)]
        outputs.append(torch.bmm(scores.transpose(0, 1), windows))  # [tiles, (y, x), v]
    output = torch.stack(outputs, dim=2).unflatten(1, (TILE, TILE)).unflatten(0, grid)
    output = dense(output.permute(0, 1, 3, 2, 4, 5, 6))  # [b, rows, y, columns, x, h, v]
    return _first(output.flatten(3, 4).flatten(1, 2), height, width)


def _places(size: tuple[int, int], scope: Sequence[int], device: torch.device) -> Tensor:
    """[rows, columns, y, x]: the positions of the map in each tile's window; H * W beyond it."""
    beyond, axes = size[0] * size[1], []
    for side, reach, step in zip(size, scope, (size[1], 1), strict=True):
        first = torch.arange((side + TILE - 1) // TILE, device=device) * TILE - reach // 2
        place = first[:, None] + torch.arange(TILE + reach - 1, device=device)
        axes.append(torch.where((place >= 0) & (place < side), place * step, beyond))
    return (axes[0][:, None, :, None] + axes[1][None, :, None]).clamp(max=beyond)


def _gather(x: Tensor, places: Tensor) -> Tensor:
    """The vectors of [b, (H, W), c, d] at places [m, n]: [b, m, n, c, d], 0 beyond the map."""
    # Runtimes need less time for this than for slices and transpositions
    padded = F.pad(x, (0, 0, 0, 0, 0, 1))
    return padded.index_select(1, places.flatten()).unflatten(1, places.shape)


def _in_windows(embedding: Tensor) -> Tensor:
    """[k, u, r_y, r_x] in each query's window of a tile, 0 elsewhere: [(y, x), k, (u, window)]."""
    # Its place lies as far from the window's corner as the query lies from the tile's
    edge = TILE - 1
    wide = F.pad(embedding, (edge, edge, edge, edge))
    windows = wide.unfold(2, embedding.shape[2] + edge, 1).unfold(3, embedding.shape[3] + edge, 1)
    # [k, u, y, x, wy, wx]; without it the values of the last query come first
    windows = windows.flip(2, 3)
    return dense(windows.permute(2, 3, 0, 1, 4, 5)).flatten(3, 5).flatten(0, 1)


def _first(x: Tensor, height: int, width: int) -> Tensor:
    """The first rows and columns of [b, H, W, ..]."""
    # not slices, because an exporter would have to prove that they lie inside
    for dim, size in ((1, height), (2, width)):
        x = x.index_select(dim, torch.arange(size, device=x.device))
    return x
