"""The position output with the query contracted first, in one kernel for NVIDIA GPUs.

The same sums as query_first.py,

    a[n, h, r] = sum_k q[n, h, k] E[k, r]        the score of every offset, for every query
    y[n, h, v] = sum_r a[n, h, r] V[n + r, v]

As in flash attention, the scores of a tile of queries stay on the chip: neither scores nor lambdas
reach the GPU's memory, and the backward pass computes the scores again. Nothing is added
atomically, so on one kind of GPU equal inputs give equal outputs and gradients, to the bit. The
factors of products have 16 bits, and sums are in float32. Scores, and in the backward pass their
gradients, are rounded to 16 bits before a second product.

The kernels are in native/position_output.cu. They know 4 heads, a query depth of 16, a scope of
23x23 and value depths that are multiples of 64; what is smaller is filled up with zeros, and more
heads are taken four at a time. They read embeddings in float32 and round them, and give their
gradient in float32, so that a parameter needs no copy in 16 bits.
"""

from __future__ import annotations

import ctypes
import functools
import math
import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lambda_det.layers.local import query_first
from lambda_det.native import gpu

DTYPES = (torch.bfloat16, torch.float16)
HEADS, QUERY_DEPTH, SCOPE, VALUE_DEPTH = 4, 16, 23, 64  # of the kernels; of v a multiple
_SOURCE = "position_output.cu"


# Which kernels ------------------------------------------------------------------------------------


class Form(NamedTuple):
    """One form of a kernel; ``tests/native/test_position_output.py`` runs each.

    Attributes:
        kind: what it computes: the output, or the gradient of queries, values or embedding.
        letter: its name among the forms of its kind.
        tiling: the template in position_output.cu; ``{v}`` is the padded value depth.
        threads: of a program.
        shared_bytes: of a program.
        tile: height and width, in positions, of what a program computes at a time.
        channels: of the values, that it takes with a tile; 0 if it takes all of them in turn.
        is_persistent: whether a program goes on from tile to tile.
    """

    kind: str
    letter: str
    tiling: str
    threads: int
    shared_bytes: int
    tile: tuple[int, int]
    channels: int
    is_persistent: bool = True

    def tiles(self, batch: int, height: int, width: int, v: int) -> int:
        """The tiles of a map with a padded value depth."""
        rows, columns = (
            math.ceil(side / tile) for side, tile in zip((height, width), self.tile, strict=True)
        )
        return batch * rows * columns * (v // self.channels if self.channels else 1)

    def programs(self, most: int, *sizes: int) -> int:
        """How many start for the tiles of ``sizes``: ``most``, if they go on from tile to tile."""
        tiles = self.tiles(*sizes)
        return min(tiles, most) if self.is_persistent else tiles


# The forms of each kind. A GPU takes the first that fits its shared memory and has a tile for most
# of its multiprocessors, else the last that fits. Those of the second list are for GPUs on which
# none of the first fits.
#
# Measured on an H200 (2026-11-28, shared memory of 227 KiB, 132 multiprocessors), in bfloat16 with
# a scope of 23x23, in microseconds:
#     batch, map, v     output c, a     queries b, a     values a, b, c          embedding
#     2, 64x64, 64      21.8, 15.0      22.3, 15.8       72.2, 55.3, 38.6        23.9
#     8, 64x64, 64      41.9, 45.7      41.6, 47.7       73.3, 109.6, 137.0      71.6
#     16, 64x64, 64     78.4, 87.4      78.8, 91.7       143.0, 210.4, 262.4     151.9
#     8, 32x32, 128     24.0, 25.3      40.1, 27.0       66.4, 52.4, 67.4        37.5
# The rule takes the fastest in each of these rows. Of the second lists only `output d` was measured
# (58.3 and 31.7 in the second and in the last row), and 64x64 with v of 128, the most expensive map
# of a LambdaResNet, was not. Nor were other GPUs.
FORMS: dict[str, tuple[tuple[Form, ...], tuple[Form, ...]]] = {
    "output": (
        (
            Form("output", "c", "OutputTiling<{v}, 64, 4, 2, 2>", 256, 165120, (8, 16), 64),
            Form("output", "a", "OutputTiling<{v}, 64, 4, 2, 1>", 256, 134400, (8, 8), 64),
        ),
        (Form("output", "d", "OutputTiling<{v}, 32, 4, 2, 1>", 256, 78720, (8, 8), 32),),
    ),
    "queries": (
        (
            Form("queries", "b", "QueriesTiling<{v}, 64, 4, 4>", 512, 182784, (8, 16), 0),
            Form("queries", "a", "QueriesTiling<{v}, 64, 4, 2>", 256, 152064, (8, 8), 0),
        ),
        (Form("queries", "d", "QueriesTiling<{v}, 32, 4, 2>", 256, 96384, (8, 8), 0),),
    ),
    "values": (
        (
            Form("values", "a", "ValuesTiling<{v}, 4, 2, 2>", 256, 174144, (8, 32), 64, False),
            Form("values", "b", "ValuesTiling<{v}, 2, 2, 2>", 128, 133184, (8, 16), 64, False),
            Form("values", "c", "ValuesTiling<{v}, 1, 4, 2>", 128, 194624, (8, 8), 64, False),
        ),
        (Form("values", "d", "ValuesTiling<{v}, 3, 2, 1>", 192, 92224, (8, 24), 64, False),),
    ),
    "embedding": (
        (Form("embedding", "a", "EmbeddingTiling<{v}, 2>", 384, 207872, (4, 8), 64),),
        (Form("embedding", "d", "EmbeddingTiling<{v}, 1>", 384, 100352, (4, 8), 64),),
    ),
}
_MOST = 3 / 4  # of the multiprocessors
# The share of the kernels' own work, heads times window, that must be left when zeros are filled
# up. query_first took 10 times as long for all of it (both directions, batch 8, 64x64, v of 64) on
# that GPU. By extrapolation it would take 7 times as long at the smallest value depth, and its time
# goes with heads times window. Nothing between was measured.
_LEAST_SHARE = 1 / 5


def fitting(kind: str, device: gpu.Gpu) -> tuple[Form, ...]:
    """The forms of a kind among which a GPU chooses.

    The second list fits all that have the capability. The driver refuses what does not fit.
    """
    first, second = FORMS[kind]
    return tuple(form for form in first if form.shared_bytes <= device.shared_bytes) or second


def form_for(kind: str, device: gpu.Gpu, batch: int, height: int, width: int, v: int) -> Form:
    """The form for a map with a padded value depth."""
    forms = fitting(kind, device)
    enough = _MOST * device.multiprocessors
    return next((f for f in forms if f.tiles(batch, height, width, v) >= enough), forms[-1])


def pays(queries: Tensor, embedding: Tensor) -> bool:
    """Whether enough of the kernels' work is left where zeros are filled up."""
    _, height, width, heads, _ = queries.shape
    sides = zip((height, width), embedding.shape[2:], strict=True)
    window = math.prod(min(side, 8) + scope - 1 for side, scope in sides)
    groups = math.ceil(heads / HEADS)
    return heads * window >= _LEAST_SHARE * groups * HEADS * (8 + SCOPE - 1) ** 2


@torch.compiler.assume_constant_result  # so torch.compile does not trace the questions
def _missing(index: int) -> str | None:
    """Why this GPU cannot run the kernels; None if it can."""
    return gpu.missing(index)


def _unfit(queries: Tensor, values: Tensor, embedding: Tensor) -> str | None:
    """Why the kernels do not take tensors of these shapes and dtypes; None if they do."""
    k, u, *scope = embedding.shape
    fits = queries.shape[:3] == values.shape[:3] and (k, u) == (queries.shape[4], values.shape[4])
    if not fits:  # kernels get addresses, and zeros would fill up what is missing
        shapes = " and ".join(str(tuple(x.shape)) for x in (queries, values, embedding))
        return f"the shapes {shapes} of queries, values and embedding do not belong together"
    if len({x.device for x in (queries, values, embedding)}) > 1:
        return "queries, values and embedding are not on one device"
    if u != 1:
        return f"the intra-depth is {u}, and the kernels know no other than 1"
    if k > QUERY_DEPTH:
        return f"the query depth is {k}, and the kernels take at most {QUERY_DEPTH}"
    if max(scope) > SCOPE:
        return f"the scope is {scope[0]}x{scope[1]}, and the kernels take at most {SCOPE}x{SCOPE}"
    dtypes = {queries.dtype, values.dtype}
    if len(dtypes) > 1 or queries.dtype not in DTYPES:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        return f"the dtype is {names}, and the kernels know bfloat16 and float16"
    return None


def unsupported(queries: Tensor, values: Tensor, embedding: Tensor) -> str | None:
    """Why the kernels cannot run on these tensors here; None if they can.

    The kernels that these tensors need are compiled and loaded, unless torch.compile asks, which
    has no tensors yet.
    """
    if why := _unfit(queries, values, embedding):
        return why
    index = gpu.index_of(queries)
    if index is None:
        return f"the kernels run on NVIDIA GPUs, but the queries are on {queries.device.type}"
    if why := _missing(index):
        return why
    is_traced = torch.compiler.is_compiling() or type(queries) not in (Tensor, nn.Parameter)
    if is_traced or queries.numel() == 0:
        return None
    inputs = queries, values, embedding
    has_backward = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    kinds = tuple(FORMS) if has_backward else ("output",)
    plans = _plans(kinds, index, queries.dtype, *values.shape[:4])
    return plans if isinstance(plans, str) else None


def _padded_depth(v: int) -> int:
    return math.ceil(v / VALUE_DEPTH) * VALUE_DEPTH


# Loading ------------------------------------------------------------------------------------------

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int
_lock = threading.RLock()  # autograd has a thread for each GPU


def program(form: Form, v: int, dtype: torch.dtype) -> gpu.Program:
    """What NVRTC compiles for a form, a padded value depth and a dtype."""
    name = f"lambda_{form.kind}_{form.letter}_{v}_{str(dtype).removeprefix('torch.')}"
    tiling = form.tiling.format(v=v)
    about = {
        "THREADS": form.threads,
        "SHARED_BYTES": form.shared_bytes,
        "HEIGHT": form.tile[0],
        "WIDTH": form.tile[1],
    }
    lines = [f"static_assert({tiling}::{key} == {n});" for key, n in about.items()]
    lines.append(f"{form.kind.upper()}_KERNEL({name}, {tiling})")
    types = (_POINTER,) * 4 + (_INT,) * 3
    functions = [gpu.Function(name, form.threads, form.shared_bytes, types)]
    if form.kind == "embedding":
        lines.append(f"SUM_KERNEL({name}_sum)")
        functions.append(gpu.Function(f"{name}_sum", 256, 4096, (_POINTER, _POINTER, _INT)))
    options = ("-DFLOAT16",) if dtype == torch.float16 else ()
    text = "\n".join([gpu.source(_SOURCE), *lines, ""])
    return gpu.Program(text, tuple(functions), options)


@functools.cache
def _load(index: int, dtype: torch.dtype, form: Form, v: int) -> list[gpu.Kernel] | str:
    """The kernels of a form, or why there are none, which the log says."""

    def prove(kernels: Sequence[gpu.Kernel]) -> str | None:
        return _wrong(kernels, index, dtype, form, v)

    try:
        with gpu.made_current(index):
            return gpu.load(index, program(form, v, dtype), prove)
    except gpu.Unavailable as why:
        return gpu.said(index, str(why))


class _Plan(NamedTuple):
    """What is launched for maps of one size: a form, its kernels, and how many programs."""

    form: Form
    kernels: list[gpu.Kernel]
    programs: int


@functools.lru_cache(maxsize=1024)  # images may have many sizes
def _plans(
    kinds: tuple[str, ...],
    index: int,
    dtype: torch.dtype,
    batch: int,
    height: int,
    width: int,
    depth: int,
) -> list[_Plan] | str:
    """A plan for each kind, or why there are none, which the log has said."""
    sizes = batch, height, width, _padded_depth(depth)
    device = gpu.describe(index)
    forms = [form_for(kind, device, *sizes) for kind in kinds]
    plans = []
    with _lock:
        gpu.compile_together(index, [program(form, sizes[3], dtype) for form in forms])
        for form in forms:
            kernels = _load(index, dtype, form, sizes[3])
            if isinstance(kernels, str):
                return kernels
            plans.append(_Plan(form, kernels, form.programs(device.multiprocessors, *sizes)))
    return plans


def _wrong(
    kernels: Sequence[gpu.Kernel], index: int, dtype: torch.dtype, form: Form, v: int
) -> str | None:
    """Compare the kernels of a form with query_first in float32; what is wrong, or None."""
    # Tiles reach over each border of this map, and a program has several
    batch, height, width = 2, 13, 19
    place = gpu.device(index)
    numbers = torch.Generator(place).manual_seed(0)  # not the user's, whose state must stay
    *factors, grad = (
        torch.randn(shape, generator=numbers, device=place).to(dtype).float()
        for shape in _Shapes.of(batch, height, width, v)
    )
    queries, values, embedding = factors
    inputs = _Tensors(queries.to(dtype), values.to(dtype), embedding, grad.to(dtype))
    with torch.no_grad(), torch.autocast(place.type, enabled=False):
        wanted = [torch.empty_like(x) for x in (grad, *factors)]
        query_first.fill_output(wanted[0], *factors)
        query_first.fill_gradients(*wanted[1:], grad, *factors)
        want = dict(zip(FORMS, wanted, strict=True))[form.kind]
        of_kernel = torch.float32 if form.kind == "embedding" else dtype
        got = torch.full_like(want, torch.nan, dtype=of_kernel)
        _run(form, kernels, form.programs(3, batch, height, width, v), got, inputs)
        error = ((got.float() - want).norm() / want.norm()).item()
    return None if error < _PROVED else f"an error of {error:.1e}"


# bfloat16 rounds numbers by 0.0017 on average; a wrong term of a sum is far above this
_PROVED = 0.01


# For doctor ---------------------------------------------------------------------------------------


def try_out(index: int) -> str | None:
    """Load the kernels of a small layer on a GPU, forward and backward; why that fails, or None."""
    options = {"device": gpu.device(index), "dtype": torch.bfloat16, "requires_grad": True}
    *shapes, _ = _Shapes.of(1, 24, 24, VALUE_DEPTH)
    with torch.enable_grad():
        return unsupported(*(torch.zeros(shape, **options) for shape in shapes))


# Use ----------------------------------------------------------------------------------------------

_PARTIAL_SUMS = 4 * 2304  # float32 of each program, as position_output.cu has them
_SUMMING = 72  # programs


class _Tensors(NamedTuple):
    """What the kernels read."""

    queries: Tensor
    values: Tensor
    embedding: Tensor  # in float32
    grad: Tensor | None  # of the output; None where the output itself is computed


class _Shapes(NamedTuple):
    """Of what the kernels take, and of the output."""

    queries: tuple[int, ...]
    values: tuple[int, ...]
    embedding: tuple[int, ...]
    output: tuple[int, ...]

    @classmethod
    def of(cls, batch: int, height: int, width: int, depth: int) -> _Shapes:
        v = _padded_depth(depth)
        return cls(
            (batch, height, width, HEADS, QUERY_DEPTH),
            (batch, height, width, v, 1),
            (QUERY_DEPTH, 1, SCOPE, SCOPE),
            (batch, height, width, HEADS, v),
        )


def _run(
    form: Form,
    kernels: Sequence[gpu.Kernel],
    programs: int,
    result: Tensor,
    inputs: _Tensors,
) -> None:
    """Let the kernels of a form fill ``result``; all tensors are dense and of their own sizes."""
    queries, values, embedding, grad = inputs
    sizes = queries.shape[:3]
    if form.kind == "output":
        kernels[0].launch(programs, queries, values, embedding, result, *sizes)
    elif form.kind == "queries":
        kernels[0].launch(programs, grad, values, embedding, result, *sizes)
    elif form.kind == "values":
        kernels[0].launch(programs, grad, queries, embedding, result, *sizes)
    else:
        sums = queries.new_empty((programs, _PARTIAL_SUMS), dtype=torch.float32)
        kernels[0].launch(programs, grad, queries, values, sums, *sizes)
        kernels[1].launch(_SUMMING, sums, result, programs)


def _is_dense(x: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether a kernel can take a tensor as it is."""
    is_whole = x.shape == shape and x.dtype == dtype
    return is_whole and x.is_contiguous() and x.data_ptr() % 16 == 0


def _part(whole: Tensor, shape: Sequence[int]) -> Tensor:
    """The view of this shape: at the start of each side, and of a scope in the middle."""
    is_embedding = whole.dim() == 4
    for dim, size in enumerate(shape):
        start = (SCOPE - size) // 2 if is_embedding and dim >= 2 else 0
        whole = whole.narrow(dim, start, size)
    return whole


def _filled(x: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """``x`` as a dense tensor of this shape, with zeros around it."""
    if _is_dense(x, shape, dtype):
        return x
    make = x.new_empty if x.shape == shape else x.new_zeros
    filled = make(shape, dtype=dtype)
    _part(filled, x.shape).copy_(x)
    return filled


def _room(target: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """What a kernel writes to: ``target`` if it can, or a new tensor."""
    return target if _is_dense(target, shape, dtype) else target.new_empty(shape, dtype=dtype)


def _put(target: Tensor, result: Tensor) -> None:
    """Copy a result from a tensor that is filled up, unless it is there already."""
    if result is not target:
        target.copy_(_part(result, target.shape))


def _by_heads(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Tensors [b, H, W, h, c] cut into groups of heads, as many as the kernels take at a time."""
    if tensors[0].shape[3] <= HEADS:
        return [tensors]
    return list(zip(*(x.split(HEADS, 3) for x in tensors), strict=True))


def _planned(
    kinds: tuple[str, ...], queries: Tensor, values: Tensor, embedding: Tensor
) -> list[_Plan] | str:
    """The plans for tensors, or why there are none."""
    # The kernels get addresses: what does not fit would be read as something else
    if why := _unfit(queries, values, embedding):
        raise ValueError(f"fused cannot compute this: {why}")
    return _plans(kinds, gpu.index_of(queries), queries.dtype, *values.shape[:4])


def _shared(values: Tensor, embedding: Tensor, shapes: _Shapes) -> tuple[Tensor, Tensor]:
    """Values and embedding as the kernels take them, for all groups of heads."""
    return (
        _filled(values, shapes.values, values.dtype),
        _filled(embedding, shapes.embedding, torch.float32),
    )


def fill_output(output: Tensor, queries: Tensor, values: Tensor, embedding: Tensor) -> None:
    """Compute the output, see :func:`lambda_det.layers.local_position_output`.

    Deterministic, forward and backward. Dense tensors of the kernels' own sizes are not copied
    (channels_last). Where the kernels prove to be unusable only now, query_first takes over.

    Args:
        output: [b, H, W, h, v] in the queries' dtype.
        queries: [b, H, W, h, k] with k of 16 at most.
        values: [b, H, W, v, 1].
        embedding: [k, 1, r_y, r_x] with odd r_y and r_x of 23 at most, of any dtype.

    Raises:
        ValueError: the kernels do not take such tensors.
    """
    if output.numel() == 0:
        return
    plans = _planned(("output",), queries, values, embedding)
    if isinstance(plans, str):
        query_first.fill_output(output, queries, values, embedding.to(queries.dtype))
        return
    shapes, dtype = _Shapes.of(*values.shape[:4]), queries.dtype
    with torch.cuda.device_of(queries):
        shared = _shared(values, embedding, shapes)
        for target, q in _by_heads(output, queries):
            inputs = _Tensors(_filled(q, shapes.queries, dtype), *shared, None)
            result = _room(target, shapes.output, dtype)
            _run(*plans[0], result, inputs)
            _put(target, result)


def fill_gradients(
    grad_queries: Tensor,
    grad_values: Tensor,
    grad_embedding: Tensor,
    grad: Tensor,
    queries: Tensor,
    values: Tensor,
    embedding: Tensor,
) -> None:
    """Compute the three gradients for the gradient [b, H, W, h, v] of the output.

    ``grad_embedding`` needs no copy if it is in float32.
    """
    if grad.numel() == 0:
        grad_embedding.zero_()
        return
    plans = _planned(("queries", "values", "embedding"), queries, values, embedding)
    if isinstance(plans, str):
        results = grad_queries, grad_values, grad_embedding
        embedding = embedding.to(queries.dtype)
        query_first.fill_gradients(*results, grad, queries, values, embedding)
        return
    shapes, dtype = _Shapes.of(*values.shape[:4]), queries.dtype
    groups = _by_heads(grad_queries, queries, grad)
    of_values, of_embedding = grad_values, grad_embedding
    sums: tuple[Tensor, Tensor] | None = None  # of the groups, which share values and embedding
    with torch.cuda.device_of(queries):
        shared = _shared(values, embedding, shapes)
        for of_queries, q, g in groups:
            q, g = _filled(q, shapes.queries, dtype), _filled(g, shapes.output, dtype)
            inputs = _Tensors(q, *shared, g)
            if len(groups) > 1:
                of_values, of_embedding = map(torch.empty_like, shared[:2])
            results = (
                _room(of_queries, shapes.queries, dtype),
                _room(of_values, shapes.values, dtype),
                _room(of_embedding, shapes.embedding, torch.float32),
            )
            for plan, result in zip(plans, results, strict=True):
                _run(*plan, result, inputs)
            _put(of_queries, results[0])
            if sums is None:
                sums = results[1], results[2]
            else:
                sums = sums[0].float() + results[1], sums[1].float() + results[2]
        _put(grad_values, sums[0])
        _put(grad_embedding, sums[1])
