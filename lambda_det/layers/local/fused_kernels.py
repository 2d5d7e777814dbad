"""Triton kernels of the position output with the query contracted first (see fused.py).

A map row's (x, h) pairs, heads innermost, are its rows: a tile of ``ROWS`` of them may begin and
end within a query, so any number of heads fills it. One row dy of the scope is taken in blocks of
R offsets dx, which meet two neighbouring windows of R columns of values, near and far: the score of
the tile's i-th query at the offset dx belongs to column i + dx. A gather along the columns rotates
the scores by i and so brings all of them to their columns: scores at columns from i on belong to
the near window, scores at columns before i, which were wrapped around, to the far one.

The embedding comes as [r_y, blocks, K, R]: r_x filled up with zeros to whole blocks, k to K >= 16,
which is the least inner size of a product. Offsets are int64, because a batch can hold more than
2^31 numbers.
"""

import triton
import triton.language as tl
from triton.runtime.jit import JITFunction


@triton.jit
def _dot(a, b, total, PRECISION: tl.constexpr, WIDEN: tl.constexpr):
    """``total`` plus the product, in float32; WIDEN where the interpreter runs it.

    The interpreter takes the bits of bfloat16 numbers for integers in products.
    """
    if WIDEN:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, total, input_precision=PRECISION)


@triton.jit
def _tile(row, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """The column and head of each of a tile's rows, and the column of the first."""
    rows = row + tl.arange(0, ROWS)
    return rows // HEADS, rows % HEADS, row // HEADS


@triton.jit
def _load(base, x, x_stride, head, head_stride, depth, depth_stride, depths, on_map):
    """Load [rows, depths] of queries or gradients, 0 off the map and beyond the depth."""
    pointers = base + (x.to(tl.int64) * x_stride + head.to(tl.int64) * head_stride)[:, None]
    pointers += (depth.to(tl.int64) * depth_stride)[None, :]
    return tl.load(pointers, on_map[:, None] & (depth < depths)[None, :], other=0.0)


@triton.jit
def _store(base, numbers, x, x_stride, head, head_stride, depth, depth_stride, depths, on_map):
    """Store [rows, depths] where :func:`_load` would load."""
    pointers = base + (x.to(tl.int64) * x_stride + head.to(tl.int64) * head_stride)[:, None]
    pointers += (depth.to(tl.int64) * depth_stride)[None, :]
    inside = on_map[:, None] & (depth < depths)[None, :]
    tl.store(pointers, numbers.to(base.dtype.element_ty), inside)


@triton.jit
def _load_window(base, x, x_stride, depth, depth_stride, width, depths):
    """Load [columns, depths] of a row of values, 0 outside the map and beyond the depth."""
    pointers = base + (x.to(tl.int64) * x_stride)[:, None]
    pointers += (depth.to(tl.int64) * depth_stride)[None, :]
    on_map = (x >= 0) & (x < width)
    return tl.load(pointers, on_map[:, None] & (depth < depths)[None, :], other=0.0)


@triton.jit
def output_kernel(
    queries, q_b, q_y, q_x, q_h, q_k,
    values, v_b, v_y, v_x, v_v,
    embedding, scope_y, left,
    output, o_b, o_y, o_x, o_h, o_v,
    height, width, value_depth,
    HEADS: tl.constexpr, QUERY_DEPTH: tl.constexpr, K: tl.constexpr,
    R: tl.constexpr, BLOCKS: tl.constexpr,
    ROWS: tl.constexpr, DEPTH: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """y[n, h, :] = sum_r a[n, h, r] V[n + r, :] for a tile of queries and DEPTH value channels."""
    tiles = tl.cdiv(width * HEADS, ROWS)
    slices = tl.cdiv(value_depth, DEPTH)
    program = tl.program_id(0)
    depth = program % slices * DEPTH + tl.arange(0, DEPTH)
    tile = program // slices % tiles
    y = program // slices // tiles % height
    b = (program // slices // tiles // height).to(tl.int64)
    y_long = y.to(tl.int64)

    x, head, first = _tile(tile * ROWS, HEADS, ROWS)
    on_map = x < width
    k = tl.arange(0, K)
    q = _load(queries + b * q_b + y_long * q_y, x, q_x, head, q_h, k, q_k, QUERY_DEPTH, on_map)

    column = tl.arange(0, R)
    i = (x - first)[:, None]
    far = column[None, :] < i
    turned = (column[None, :] + R - i) % R
    place = k[:, None] * R + column[None, :]

    total = tl.zeros([ROWS, DEPTH], tl.float32)
    top = scope_y // 2
    below = tl.maximum(top - y, 0)
    above = tl.minimum(height + top - y, scope_y)
    for step in range(below * BLOCKS, above * BLOCKS):
        e = tl.load(embedding + step * (K * R) + place)
        a = _dot(q, e, tl.zeros([ROWS, R], tl.float32), PRECISION, WIDEN)
        a = tl.gather(a.to(q.dtype), turned, 1)
        row = values + b * v_b + (y + step // BLOCKS - top).to(tl.int64) * v_y
        window_x = first - left + step % BLOCKS * R + column
        window = _load_window(row, window_x, v_x, depth, v_v, width, value_depth)
        total = _dot(tl.where(far, 0.0, a), window, total, PRECISION, WIDEN)
        window = _load_window(row, window_x + R, v_x, depth, v_v, width, value_depth)
        total = _dot(tl.where(far, a, 0.0), window, total, PRECISION, WIDEN)

    _store(
        output + b * o_b + y_long * o_y, total, x, o_x, head, o_h, depth, o_v, value_depth, on_map
    )


@triton.jit
def query_kernel(
    grad, g_b, g_y, g_x, g_h, g_v,
    queries, q_b, q_y, q_x, q_h, q_k,
    values, v_b, v_y, v_x, v_v,
    embedding, scope_y, left,
    grad_queries, o_b, o_y, o_x, o_h, o_k,
    grad_embedding,
    batch, height, width, value_depth,
    HEADS: tl.constexpr, QUERY_DEPTH: tl.constexpr, K: tl.constexpr,
    R: tl.constexpr, BLOCKS: tl.constexpr,
    ROWS: tl.constexpr, DEPTH: tl.constexpr, SLICES: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Gradients of the queries, and this program's share [r_y, blocks, K, R] of the embedding's.

    With P programs, each takes every P-th tile. Its share lies in memory, since the sum over one
    tile is over all rows of the scope; no other program writes there.
    """
    tiles = tl.cdiv(width * HEADS, ROWS)
    share = grad_embedding + tl.program_id(0).to(tl.int64) * scope_y * (BLOCKS * K * R)
    k = tl.arange(0, K)
    column = tl.arange(0, R)
    place = k[:, None] * R + column[None, :]
    top = scope_y // 2
    for task in range(tl.program_id(0), batch * height * tiles, tl.num_programs(0)):
        y = task // tiles % height
        b = (task // tiles // height).to(tl.int64)
        y_long = y.to(tl.int64)
        x, head, first = _tile(task % tiles * ROWS, HEADS, ROWS)
        on_map = x < width
        q = _load(queries + b * q_b + y_long * q_y, x, q_x, head, q_h, k, q_k, QUERY_DEPTH, on_map)
        grads = grad + b * g_b + y_long * g_y
        depth = tl.arange(0, DEPTH)
        g = _load(grads, x, g_x, head, g_h, depth, g_v, value_depth, on_map)
        i = (x - first)[:, None]
        far = column[None, :] < i
        turned = (column[None, :] + i) % R

        total = tl.zeros([ROWS, K], tl.float32)
        below = tl.maximum(top - y, 0)
        above = tl.minimum(height + top - y, scope_y)
        for step in range(below * BLOCKS, above * BLOCKS):
            row = values + b * v_b + (y + step // BLOCKS - top).to(tl.int64) * v_y
            window_x = first - left + step % BLOCKS * R + column
            near_a = tl.zeros([ROWS, R], tl.float32)
            far_a = tl.zeros([ROWS, R], tl.float32)
            for part in tl.static_range(SLICES):
                depth = part * DEPTH + tl.arange(0, DEPTH)
                if SLICES > 1:
                    g = _load(grads, x, g_x, head, g_h, depth, g_v, value_depth, on_map)
                window = _load_window(row, window_x, v_x, depth, v_v, width, value_depth)
                near_a = _dot(g, tl.trans(window), near_a, PRECISION, WIDEN)
                window = _load_window(row, window_x + R, v_x, depth, v_v, width, value_depth)
                far_a = _dot(g, tl.trans(window), far_a, PRECISION, WIDEN)
            a = tl.gather(tl.where(far, far_a, near_a).to(q.dtype), turned, 1)
            e = tl.load(embedding + step * (K * R) + place)
            total = _dot(a, tl.trans(e), total, PRECISION, WIDEN)
            sums = share + step * (K * R) + place
            added = _dot(tl.trans(q), a, tl.zeros([K, R], tl.float32), PRECISION, WIDEN)
            tl.store(sums, tl.load(sums) + added)
        # Another thread may add to the same place for the next tile.
        tl.debug_barrier()

        to = grad_queries + b * o_b + y_long * o_y
        _store(to, total, x, o_x, head, o_h, k, o_k, QUERY_DEPTH, on_map)


@triton.jit
def value_kernel(
    grad, g_b, g_y, g_x, g_h, g_v,
    queries, q_b, q_y, q_x, q_h, q_k,
    embedding, scope_y, left,
    grad_values, o_b, o_y, o_x, o_v,
    height, width, value_depth,
    HEADS: tl.constexpr, QUERY_DEPTH: tl.constexpr, K: tl.constexpr,
    R: tl.constexpr, BLOCKS: tl.constexpr,
    ROWS: tl.constexpr, DEPTH: tl.constexpr, TALL: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Gradient of a tile of TALL x R values and DEPTH channels, from all queries that see it.

    With several rows of values, the queries and their gradients are read once for all of them.
    """
    across = tl.cdiv(width, R)
    down = tl.cdiv(height, TALL)
    slices = tl.cdiv(value_depth, DEPTH)
    program = tl.program_id(0)
    depth = program % slices * DEPTH + tl.arange(0, DEPTH)
    first = program // slices % across * R
    first_y = program // slices // across % down * TALL
    b = (program // slices // across // down).to(tl.int64)

    k = tl.arange(0, K)
    column = tl.arange(0, R)
    down_across = tl.arange(0, TALL * R)
    to_y = first_y + down_across // R
    chunks: tl.constexpr = ((2 * R - 1) * HEADS + ROWS - 1) // ROWS
    total = tl.zeros([DEPTH, TALL * R], tl.float32)
    top = scope_y // 2
    below = tl.maximum(first_y - top, 0)
    above = tl.minimum(first_y + TALL + top, height)
    for chunk in range(chunks):
        # i counts from the query whose last offset of the block is the tile's first column.
        i, head, _ = _tile(chunk * ROWS, HEADS, ROWS)
        offset = column[None, :] + (R - 1) - i[:, None]
        inside = (offset >= 0) & (offset < R)
        offset = tl.where(inside, offset, 0)
        offset = tl.broadcast_to(offset[:, None, :], (ROWS, TALL, R))
        for step in range(below * BLOCKS, above * BLOCKS):
            block = step % BLOCKS
            y = step // BLOCKS
            queries_y = queries + b * q_b + y.to(tl.int64) * q_y
            grad_y = grad + b * g_b + y.to(tl.int64) * g_y
            x = first + left - block * R - (R - 1) + i
            on_map = (x >= 0) & (x < width)
            q = _load(queries_y, x, q_x, head, q_h, k, q_k, QUERY_DEPTH, on_map)
            g = _load(grad_y, x, g_x, head, g_h, depth, g_v, value_depth, on_map)
            dy = to_y - y + top
            place = ((dy * BLOCKS + block) * K)[None, :] + k[:, None]
            e = tl.load(
                embedding + place * R + (down_across % R)[None, :],
                ((dy >= 0) & (dy < scope_y))[None, :] & (k < K)[:, None],
                other=0.0,
            )
            a = _dot(q, e, tl.zeros([ROWS, TALL * R], tl.float32), PRECISION, WIDEN)
            a = tl.gather(tl.reshape(a.to(q.dtype), (ROWS, TALL, R)), offset, 2)
            a = tl.reshape(tl.where(inside[:, None, :], a, 0.0), (ROWS, TALL * R))
            total = _dot(tl.trans(g), a, total, PRECISION, WIDEN)

    to_x = first + down_across % R
    to = grad_values + b * o_b + (to_y.to(tl.int64) * o_y + to_x.to(tl.int64) * o_x)[None, :]
    tl.store(
        to + (depth.to(tl.int64) * o_v)[:, None],
        total.to(grad_values.dtype.element_ty),
        ((to_y < height) & (to_x < width))[None, :] & (depth < value_depth)[:, None],
    )


INTERPRETED = not isinstance(output_kernel, JITFunction)
