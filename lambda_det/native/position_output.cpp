// The position output with the query contracted first, and its gradients, on the CPU.
//
//     a[n, h, r] = sum_k q[n, h, k] E[k, r]        y[n, h, :] = sum_r a[n, h, r] V[n + r, :]
//
// Scores exist for one row of the scope and one tile of queries at a time, so that they stay in the
// first-level cache. Offsets that lead out of the map cost nothing: rows are skipped and columns
// cut. Every product below is one call of multiply(). Plain C functions, without PyTorch's headers,
// so that to compile them takes two seconds or three.
//
// Layouts, all dense ("p": padded with zeros to whole vectors, see layers/local/compiled.py):
//     queries [b, H, W, h, k]   values [b, u, H, W, vp]   transposed values [b, u, H, vp, Wp]
//     embedding [u, r_y, k, rp]   transposed embedding [u, r_y, r_x, kp]
//     gradient of the output [b, H, W, h, vp]
// The output is [b, H, W, h, v] in any layout.

#include <algorithm>
#include <cstring>
#include <vector>

#include "multiply.h"

namespace {

struct Sizes {
  long batch, height, width, heads, k, v, u, scope_y, scope_x;
  long rp, kp, vp, wp;
};

// Rows of the scope that lie on the map for a query of that row (or columns likewise).
inline long first_offset(long position, long scope) { return std::max(0L, scope / 2 - position); }
inline long end_offset(long position, long scope, long size) {
  return std::min(scope, size + scope / 2 - position);
}

// Strides of a tensor [b, H, W, g, c] in any layout.
struct Strides {
  long image, y, x, group, channel;
};

// Copies from one layout to another, in small blocks, as one of them may jump at every channel.
template <typename T>
void lay_out(const long *shape, const T *from, const Strides &f, T *to, const Strides &t,
             int threads) {
  const long images = shape[0], height = shape[1], width = shape[2];
  const long groups = shape[3], channels = shape[4], side = 16;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (long row = 0; row < images * height; ++row) {
    const T *source = from + row / height * f.image + row % height * f.y;
    T *target = to + row / height * t.image + row % height * t.y;
    for (long group = 0; group < groups; ++group)
      for (long x0 = 0; x0 < width; x0 += side)
        for (long c0 = 0; c0 < channels; c0 += side)
          for (long x = x0; x < std::min(width, x0 + side); ++x)
            for (long c = c0; c < std::min(channels, c0 + side); ++c)
              target[x * t.x + group * t.group + c * t.channel] =
                  source[x * f.x + group * f.group + c * f.channel];
  }
}

// Queries of a tile: its outputs take about 16 kB, half of a first-level cache.
template <typename T> long tile_width(const Sizes &s) {
  const long fitting = 16384 / (long)(s.heads * s.vp * sizeof(T));
  return std::min(s.width, std::max(4L, std::min(16L, fitting)));
}

template <typename T>
void forward(const Sizes &s, const T *queries, const T *values, const T *embedding, T *output,
             const Strides &strides, int threads) {
  const long tile = tile_width<T>(s), tiles = (s.width + tile - 1) / tile;
  const long h = s.heads;
#pragma omp parallel num_threads(threads)
  {
    std::vector<T> scores(tile * h * s.rp), sums(tile * h * s.vp);
#pragma omp for schedule(static, 1)
    for (long index = 0; index < s.batch * s.height * tiles; ++index) {
      const long x0 = index % tiles * tile, width = std::min(tile, s.width - x0);
      const long row = index / tiles, y = row % s.height, image = row / s.height;
      const T *q = queries + (row * s.width + x0) * h * s.k;
      std::fill(sums.begin(), sums.end(), T(0));
      for (long u = 0; u < s.u; ++u)
        for (long dy = first_offset(y, s.scope_y); dy < end_offset(y, s.scope_y, s.height); ++dy) {
          const T *e = embedding + (u * s.scope_y + dy) * s.k * s.rp;
          const T *value_row =
              values + ((image * s.u + u) * s.height + y + dy - s.scope_y / 2) * s.width * s.vp;
          multiply<T, kShort<T>>(width * h, s.rp, s.k, q, s.k, 1, e, s.rp, scores.data(), s.rp,
                                 false);
          for (long i = 0; i < width; ++i) {
            const long x = x0 + i, from = first_offset(x, s.scope_x);
            multiply<T, kLong<T>>(h, s.vp, end_offset(x, s.scope_x, s.width) - from,
                                  scores.data() + i * h * s.rp + from, s.rp, 1,
                                  value_row + (x + from - s.scope_x / 2) * s.vp, s.vp,
                                  sums.data() + i * h * s.vp, s.vp, true);
          }
        }
      T *out = output + image * strides.image + y * strides.y + x0 * strides.x;
      for (long head = 0; head < h; ++head)
        for (long v = 0; v < s.v; ++v)
          for (long i = 0; i < width; ++i)
            out[i * strides.x + head * strides.group + v * strides.channel] =
                sums[(i * h + head) * s.vp + v];
    }
  }
}

// dV[m] = sum over n, h of a[n, h, m - n] G[n, h]: each row of values gathers from the rows of
// queries that see it, so that no two threads write to one place.
template <typename T>
void values_gradient(const Sizes &s, const T *grad, const T *queries, const T *embedding,
                     T *grad_values, int threads) {
  const long tile = tile_width<T>(s), h = s.heads;
  const long window = tile - 1 + s.rp;  // columns that a tile's queries see, with whole vectors
#pragma omp parallel num_threads(threads)
  {
    // Each query's scores lie shifted by its place in the tile; the rest is and stays 0.
    std::vector<T> scores(tile * h * window);
#pragma omp for schedule(static, 1)
    for (long row = 0; row < s.batch * s.u * s.height; ++row) {
      const long y = row % s.height, plane = row / s.height;
      const long u = plane % s.u, image = plane / s.u;
      T *out = grad_values + row * s.width * s.vp;
      std::memset(out, 0, s.width * s.vp * sizeof(T));
      for (long query_y = std::max(0L, y - s.scope_y / 2);
           query_y <= std::min(s.height - 1, y + s.scope_y / 2); ++query_y) {
        const long dy = y - query_y + s.scope_y / 2;
        const T *e = embedding + (u * s.scope_y + dy) * s.k * s.rp;
        for (long x0 = 0; x0 < s.width; x0 += tile) {
          const long width = std::min(tile, s.width - x0);
          const long position = (image * s.height + query_y) * s.width + x0;
          for (long i = 0; i < width; ++i)
            multiply<T, kShort<T>>(h, s.rp, s.k, queries + (position + i) * h * s.k, s.k, 1, e,
                                   s.rp, scores.data() + i * h * window + i, window, false);
          // Columns of the window that lie on the map, and for each four the queries that see them
          const long left = x0 - s.scope_x / 2;
          const long end = std::min(width - 1 + s.scope_x, s.width - left);
          for (long c = std::max(0L, -left); c < end; c += 4) {
            const long from = std::max(0L, c - s.scope_x + 1), to = std::min(width, c + 4);
            multiply<T, kLong<T>>(std::min(4L, end - c), s.vp, (to - from) * h,
                                  scores.data() + from * h * window + c, 1, window,
                                  grad + (position + from) * h * s.vp, s.vp,
                                  out + (left + c) * s.vp, s.vp, true);
          }
        }
      }
    }
  }
}

// The scores' gradient d[n, h, r] = sum_v G[n, h, v] V[n + r, v] gives dq = d E^T and dE = q^T d.
// grad_embedding is [threads, u, r_y, k, rp], zero at the start.
template <typename T>
void queries_gradient(const Sizes &s, const T *grad, const T *queries, const T *transposed_values,
                      const T *transposed_embedding, T *grad_queries, T *grad_embedding,
                      int threads) {
  const long tile = tile_width<T>(s), tiles = (s.width + tile - 1) / tile;
  const long h = s.heads;
#pragma omp parallel num_threads(threads)
  {
    std::vector<T> scores(tile * h * s.rp);
    T *own = grad_embedding + omp_get_thread_num() * s.u * s.scope_y * s.k * s.rp;
#pragma omp for schedule(static, 1)
    for (long index = 0; index < s.batch * s.height * tiles; ++index) {
      const long x0 = index % tiles * tile, width = std::min(tile, s.width - x0);
      const long row = index / tiles, y = row % s.height, image = row / s.height;
      const long position = row * s.width + x0;
      const T *q = queries + position * h * s.k;
      T *out = grad_queries + position * h * s.kp;
      std::memset(out, 0, width * h * s.kp * sizeof(T));
      for (long u = 0; u < s.u; ++u)
        for (long dy = first_offset(y, s.scope_y); dy < end_offset(y, s.scope_y, s.height); ++dy) {
          const T *value_row = transposed_values +
              ((image * s.u + u) * s.height + y + dy - s.scope_y / 2) * s.vp * s.wp;
          for (long i = 0; i < width; ++i)
            multiply<T, kShort<T>>(h, s.rp, s.v, grad + (position + i) * h * s.vp, s.vp, 1,
                                   value_row + x0 + i, s.wp, scores.data() + i * h * s.rp, s.rp,
                                   false);
          multiply<T, kLong<T>>(width * h, s.kp, s.scope_x, scores.data(), s.rp, 1,
                                 transposed_embedding + (u * s.scope_y + dy) * s.scope_x * s.kp,
                                 s.kp, out, s.kp, true);
          multiply<T, kShort<T>>(s.k, s.rp, width * h, q, 1, s.k, scores.data(), s.rp,
                                 own + (u * s.scope_y + dy) * s.k * s.rp, s.rp, true);
        }
    }
  }
}

}  // namespace

#define EXPORT(T, suffix)                                                                          \
  void lay_out_##suffix(const long *shape, const T *from, const Strides *f, T *to,                 \
                        const Strides *t, int threads) {                                           \
    lay_out<T>(shape, from, *f, to, *t, threads);                                                  \
  }                                                                                                \
  void forward_##suffix(const Sizes *s, const T *queries, const T *values, const T *embedding,     \
                        T *output, const Strides *strides, int threads) {                          \
    forward<T>(*s, queries, values, embedding, output, *strides, threads);                         \
  }                                                                                                \
  void values_gradient_##suffix(const Sizes *s, const T *grad, const T *queries,                   \
                                const T *embedding, T *grad_values, int threads) {                 \
    values_gradient<T>(*s, grad, queries, embedding, grad_values, threads);                        \
  }                                                                                                \
  void queries_gradient_##suffix(const Sizes *s, const T *grad, const T *queries,                  \
                                 const T *transposed_values, const T *transposed_embedding,        \
                                 T *grad_queries, T *grad_embedding, int threads) {                \
    queries_gradient<T>(*s, grad, queries, transposed_values, transposed_embedding, grad_queries,  \
                        grad_embedding, threads);                                                  \
  }

extern "C" {
EXPORT(float, float32)
EXPORT(double, float64)
}
