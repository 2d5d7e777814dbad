// The position output with the query contracted first, and its gradients, on the CPU.
//
//     a[n, h, r] = sum_k q[n, h, k] E[k, r]        y[n, h, :] = sum_r a[n, h, r] V[n + r, :]
//
// Scores exist for one row of the scope and one tile of queries at a time, so that they stay in the
// first-level cache. Offsets that lead out of the map cost nothing: rows are skipped and columns
// cut. Every product below is one call of multiply(). The file exports plain C functions and does
// without PyTorch's headers, so it compiles in two or three seconds.
//
// The functions also exist for bfloat16, where the processor has AVX512-BF16. A step of a product
// then takes a pair of numbers. Scores are rounded to bfloat16 before the next product takes them
// as factors; all sums are float.
//
// All layouts are dense. "p" marks a dimension that is padded with zeros to whole vectors. "/2"
// marks one that is padded to pairs for bfloat16; a last dimension of 2, which is not written here,
// then holds the numbers of a pair (layers/local/compiled.py):
//     queries [b, H, W, h, k/2]   values [b, u, H, W/2, vp]   transposed values [b, u, H, vp/2, Wp]
//     embedding [u, r_y, k/2, rp]   transposed embedding [u, r_y, r_x/2, kp]
//     gradient of the output [b, H, W, h, vp/2]
//     rows of queries [b, H, (W h)/2, k], of the gradient [b, H, (W h)/2, vp]
// The output is [b, H, W, h, v] in any layout.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "multiply.h"

namespace {

struct Sizes {
  long batch, height, width, heads, k, v, u, scope_y, scope_x;
  long rp, kp, vp, wp;
};

// The type in which multiply() takes numbers T, the type of its sums, and the numbers in a step.
// uint16_t stands for bfloat16.
template <typename T> using Step = std::conditional_t<std::is_same<T, uint16_t>::value, int, T>;
template <typename T> using Sum = SumOf<Step<T>>;
template <typename T> constexpr long kPair = sizeof(Step<T>) / sizeof(T);

// Makes factors of the next product from the sums of this one: floats and doubles stay as they are,
// and bfloat16 needs rounding.
template <typename T> class Factors {
 public:
  explicit Factors(long) {}
  const T *in_rows(const T *sums, long) { return sums; }
};

#ifdef __AVX512BF16__
template <> class Factors<uint16_t> {
 public:
  explicit Factors(long most) : numbers_(kBefore + most) {}
  // `count` is a multiple of 8. The number before the first one of the result is 0.
  const uint16_t *in_rows(const float *sums, long count) {
    uint16_t *to = numbers_.data() + kBefore;
    for (; count >= 16; count -= 16, sums += 16, to += 16)
      _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(sums)));
    if (count) _mm_storeu_si128((__m128i *)to, (__m128i)_mm256_cvtneps_pbh(_mm256_loadu_ps(sums)));
    return numbers_.data() + kBefore;
  }

 private:
  static constexpr long kBefore = 32;
  std::vector<uint16_t> numbers_;
};

// Interleaves rows in pairs: a column of two rows becomes a pair of numbers. With `heads` each row
// is shifted to the right by the place of its query.
inline void pair_rows(const float *sums, long rows, long columns, long heads, int *to, long width) {
  typedef uint16_t Half __attribute__((may_alias));
  const __m256i by_turns =
      _mm256_set_epi16(15, 7, 14, 6, 13, 5, 12, 4, 11, 3, 10, 2, 9, 1, 8, 0);
  for (long row = 0; row < rows; row += 2, to += width) {
    const bool both = row + 1 < rows;
    int *places[] = {to + (heads ? row / heads : 0), to + (heads ? (row + both) / heads : 0)};
    for (long c = 0; c < columns; c += 8) {
      const float *even = sums + row * columns + c;
      const __m256 odd = both ? _mm256_loadu_ps(even + columns) : _mm256_setzero_ps();
      const __m256i pairs = _mm256_permutexvar_epi16(
          by_turns, (__m256i)_mm256_cvtne2ps_pbh(odd, _mm256_loadu_ps(even)));
      if (places[0] == places[1]) {
        _mm256_storeu_si256((__m256i *)(places[0] + c), pairs);
      } else {
        for (int i = 0; i < 16; ++i)
          ((Half *)(places[i % 2] + c))[i] = ((const Half *)&pairs)[i];
      }
    }
  }
}
#endif

// Rows of the scope that lie on the map for a query of that row (or columns likewise).
inline long first_offset(long position, long scope) { return std::max(0L, scope / 2 - position); }
inline long end_offset(long position, long scope, long size) {
  return std::min(scope, size + scope / 2 - position);
}

// Strides of a tensor [b, H, W, g, c] in any layout.
struct Strides {
  long image, y, x, group, channel;
};

// Copies a row of a map from one layout to another. Where channels are dense in both, it copies all
// channels of a position at once. Otherwise it copies small blocks, because neighbouring channels
// of one layout may lie far apart.
template <typename T>
void lay_out_row(long width, long groups, long channels, const T *from, const Strides &f, T *to,
                 const Strides &t) {
  const bool dense = f.channel == 1 && t.channel == 1;
  const long side = dense ? channels : 16;
  for (long group = 0; group < groups; ++group)
    for (long x0 = 0; x0 < width; x0 += 16)
      for (long c0 = 0; c0 < channels; c0 += side) {
        const T *source = from + x0 * f.x + group * f.group + c0 * f.channel;
        T *target = to + x0 * t.x + group * t.group + c0 * t.channel;
        const long columns = std::min(16L, width - x0), count = std::min(side, channels - c0);
        if (dense) {
          for (long x = 0; x < columns; ++x) std::copy_n(source + x * f.x, count, target + x * t.x);
        } else if (t.x == 1) {
          for (long c = 0; c < count; ++c)
            for (long x = 0; x < columns; ++x)
              target[x + c * t.channel] = source[x * f.x + c * f.channel];
        } else {
          for (long x = 0; x < columns; ++x)
            for (long c = 0; c < count; ++c)
              target[x * t.x + c * t.channel] = source[x * f.x + c * f.channel];
        }
      }
}

template <typename T>
void lay_out(const long *shape, const T *from, const Strides &f, T *to, const Strides &t,
             int threads) {
  const long images = shape[0], height = shape[1];
#pragma omp parallel for num_threads(threads) schedule(static)
  for (long row = 0; row < images * height; ++row)
    lay_out_row(shape[2], shape[3], shape[4], from + row / height * f.image + row % height * f.y, f,
                to + row / height * t.image + row % height * t.y, t);
}

// Queries of a tile: its outputs take about 16 kB, half of a first-level cache.
template <typename T> long tile_width(const Sizes &s) {
  const long fitting = 16384 / (long)(s.heads * s.vp * sizeof(Sum<T>)) / kPair<T> * kPair<T>;
  return std::min(s.width, std::max(4L, std::min(16L, fitting)));
}

template <typename T>
void forward(const Sizes &s, const Step<T> *queries, const Step<T> *values,
             const Step<T> *embedding, T *output, const Strides &strides, int threads) {
  constexpr long pair = kPair<T>;
  const long tile = tile_width<T>(s), tiles = divided_up(s.width, tile);
  const long h = s.heads, k = divided_up(s.k, pair), columns = divided_up(s.width, pair);
#pragma omp parallel num_threads(threads)
  {
    std::vector<Sum<T>> scores(tile * h * s.rp), sums(tile * h * s.vp);
    Factors<T> factors(tile * h * std::max(s.rp, s.vp));
#pragma omp for schedule(static, 1)
    for (long index = 0; index < s.batch * s.height * tiles; ++index) {
      const long x0 = index % tiles * tile, width = std::min(tile, s.width - x0);
      const long row = index / tiles, y = row % s.height, image = row / s.height;
      const Step<T> *q = queries + (row * s.width + x0) * h * k;
      std::fill(sums.begin(), sums.end(), Sum<T>(0));
      for (long u = 0; u < s.u; ++u)
        for (long dy = first_offset(y, s.scope_y); dy < end_offset(y, s.scope_y, s.height); ++dy) {
          const Step<T> *e = embedding + (u * s.scope_y + dy) * k * s.rp;
          const Step<T> *value_row =
              values + ((image * s.u + u) * s.height + y + dy - s.scope_y / 2) * columns * s.vp;
          multiply(width * h, s.rp, k, q, k, 1, e, s.rp, scores.data(), s.rp, false);
          const T *a = factors.in_rows(scores.data(), width * h * s.rp);
          for (long i = 0; i < width; ++i) {
            const long x = x0 + i, from = first_offset(x, s.scope_x);
            const long column = x + from - s.scope_x / 2;
            // The pair of an odd column begins one column earlier. `from` is 0 there, and so is the
            // number before the scores, which becomes the factor of that column.
            const long odd = column % pair;
            const long count = end_offset(x, s.scope_x, s.width) - from + odd;
            const Step<T> *factor = (const Step<T> *)(a + i * h * s.rp + from - odd);
            multiply(h, s.vp, divided_up(count, pair), factor, s.rp / pair, 1,
                     value_row + column / pair * s.vp, s.vp, sums.data() + i * h * s.vp, s.vp,
                     true);
          }
        }
      T *out = output + image * strides.image + y * strides.y + x0 * strides.x;
      lay_out_row(width, h, s.v, factors.in_rows(sums.data(), width * h * s.vp),
                  {0, 0, h * s.vp, s.vp, 1}, out, strides);
    }
  }
}

// dV[m] = sum over n, h of a[n, h, m - n] G[n, h]: each row of values gathers from the rows of
// queries that see it, so that no two threads write to one place.
template <typename T>
void values_gradient(const Sizes &s, const Step<T> *grad, const Step<T> *queries,
                     const Step<T> *embedding, Sum<T> *grad_values, int threads) {
  constexpr long pair = kPair<T>;
  const long tile = tile_width<T>(s), h = s.heads, k = divided_up(s.k, pair);
  const long window = tile - 1 + s.rp;  // columns that a tile's queries see, with whole vectors
#pragma omp parallel num_threads(threads)
  {
    // Each query's scores lie shifted by its place in the tile; the rest is and stays 0.
    std::vector<Step<T>> scores(divided_up(tile * h, pair) * window);
    std::vector<Sum<T>> sums(pair > 1 ? tile * h * s.rp : 0);
#pragma omp for schedule(static, 1)
    for (long row = 0; row < s.batch * s.u * s.height; ++row) {
      const long y = row % s.height, plane = row / s.height;
      const long u = plane % s.u, image = plane / s.u;
      Sum<T> *out = grad_values + row * s.width * s.vp;
      std::memset(out, 0, s.width * s.vp * sizeof(Sum<T>));
      for (long query_y = std::max(0L, y - s.scope_y / 2);
           query_y <= std::min(s.height - 1, y + s.scope_y / 2); ++query_y) {
        const long dy = y - query_y + s.scope_y / 2, query_row = image * s.height + query_y;
        const Step<T> *e = embedding + (u * s.scope_y + dy) * k * s.rp;
        const Step<T> *grad_row = grad + query_row * divided_up(s.width * h, pair) * s.vp;
        for (long x0 = 0; x0 < s.width; x0 += tile) {
          const long width = std::min(tile, s.width - x0);
          const Step<T> *q = queries + (query_row * s.width + x0) * h * k;
          if constexpr (pair == 1) {
            for (long i = 0; i < width; ++i)
              multiply(h, s.rp, k, q + i * h * k, k, 1, e, s.rp,
                       scores.data() + i * h * window + i, window, false);
          } else {
            multiply(width * h, s.rp, k, q, k, 1, e, s.rp, sums.data(), s.rp, false);
            pair_rows(sums.data(), width * h, s.rp, h, scores.data(), window);
          }
          // Four columns of the window at a time, of those on the map, and the queries that see
          // them
          const long left = x0 - s.scope_x / 2;
          const long end = std::min(width - 1 + s.scope_x, s.width - left);
          for (long c = std::max(0L, -left); c < end; c += 4) {
            const long from = std::max(0L, c - s.scope_x + 1) * h / pair;
            const long to = divided_up(std::min(width, c + 4) * h, pair);
            multiply(std::min(4L, end - c), s.vp, to - from, scores.data() + from * window + c, 1,
                     window, grad_row + (x0 * h / pair + from) * s.vp, s.vp,
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
void queries_gradient(const Sizes &s, const Step<T> *grad, const Step<T> *query_rows,
                      const Step<T> *transposed_values, const Step<T> *transposed_embedding,
                      Sum<T> *grad_queries, Sum<T> *grad_embedding, int threads) {
  constexpr long pair = kPair<T>;
  const long tile = tile_width<T>(s), tiles = divided_up(s.width, tile);
  const long h = s.heads, vp = s.vp / pair, v = divided_up(s.v, pair);
  const long offsets = divided_up(s.scope_x, pair);
  // Number of neighbouring queries that share vectors of values: as many as fill a block of
  // multiply(), if the padding of a row has room for their shifted windows
  const long fitting = std::min(rows_of_block(s.rp / kLanes<Sum<T>>) / h, s.rp - s.scope_x + 1);
  const long together = std::max(1L, fitting);
#pragma omp parallel num_threads(threads)
  {
    std::vector<Sum<T>> scores(tile * h * s.rp);
    std::vector<Step<T>> paired(pair > 1 ? divided_up(tile * h, pair) * s.rp : 0);
    Factors<T> factors(tile * h * s.rp);
    Sum<T> *own = grad_embedding + omp_get_thread_num() * s.u * s.scope_y * s.k * s.rp;
#pragma omp for schedule(static, 1)
    for (long index = 0; index < s.batch * s.height * tiles; ++index) {
      const long x0 = index % tiles * tile, width = std::min(tile, s.width - x0);
      const long row = index / tiles, y = row % s.height, image = row / s.height;
      const long position = row * s.width + x0;
      const Step<T> *q = query_rows + (row * divided_up(s.width * h, pair) + x0 * h / pair) * s.k;
      Sum<T> *out = grad_queries + position * h * s.kp;
      std::memset(out, 0, width * h * s.kp * sizeof(Sum<T>));
      for (long u = 0; u < s.u; ++u)
        for (long dy = first_offset(y, s.scope_y); dy < end_offset(y, s.scope_y, s.height); ++dy) {
          const Step<T> *value_row = transposed_values +
              ((image * s.u + u) * s.height + y + dy - s.scope_y / 2) * vp * s.wp;
          for (long i = 0; i < width; i += together) {
            const long count = std::min(together, width - i);
            Sum<T> *to = scores.data() + i * h * s.rp;
            multiply(count * h, s.rp, v, grad + (position + i) * h * vp, vp, 1, value_row + x0 + i,
                     s.wp, to, s.rp, false);
            for (long j = 1; j < count; ++j)  // their windows start j columns later
              std::copy(to + j * h * s.rp + j, to + (j + 1) * h * s.rp, to + j * h * s.rp);
          }
          const Step<T> *d = (const Step<T> *)factors.in_rows(scores.data(), width * h * s.rp);
          multiply(width * h, s.kp, offsets, d, s.rp / pair, 1,
                   transposed_embedding + (u * s.scope_y + dy) * offsets * s.kp, s.kp, out, s.kp,
                   true);
          if constexpr (pair > 1) {
            pair_rows(scores.data(), width * h, s.rp, 0, paired.data(), s.rp);
            d = paired.data();
          }
          multiply(s.k, s.rp, divided_up(width * h, pair), q, 1, s.k, d, s.rp,
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
  void forward_##suffix(const Sizes *s, const Step<T> *queries, const Step<T> *values,             \
                        const Step<T> *embedding, T *output, const Strides *strides,               \
                        int threads) {                                                             \
    forward<T>(*s, queries, values, embedding, output, *strides, threads);                         \
  }                                                                                                \
  void values_gradient_##suffix(const Sizes *s, const Step<T> *grad, const Step<T> *queries,       \
                                const Step<T> *embedding, Sum<T> *grad_values, int threads) {      \
    values_gradient<T>(*s, grad, queries, embedding, grad_values, threads);                        \
  }                                                                                                \
  void queries_gradient_##suffix(const Sizes *s, const Step<T> *grad, const Step<T> *query_rows,   \
                                 const Step<T> *transposed_values,                                 \
                                 const Step<T> *transposed_embedding, Sum<T> *grad_queries,        \
                                 Sum<T> *grad_embedding, int threads) {                            \
    queries_gradient<T>(*s, grad, query_rows, transposed_values, transposed_embedding,             \
                        grad_queries, grad_embedding, threads);                                    \
  }

extern "C" {
int vector_bytes() { return kBytes; }
EXPORT(float, float32)
EXPORT(double, float64)
#ifdef __AVX512BF16__
EXPORT(uint16_t, bfloat16)
#endif
}
