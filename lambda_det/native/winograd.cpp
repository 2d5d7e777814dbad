// 3x3 convolutions of stride 1 and padding 1 by Winograd's F(4x4, 3x3), on the CPU.
//
//     Y = A' [(G g G') * (B' d B)] A
//
// gives a tile of 4x4 outputs from the 6x6 inputs d around it with 36 products for each pair of
// channels in place of 144 (Lavin and Gray, arXiv:1509.09308, section 4.1). Over the channels each
// of the 36 is a product of matrices. The points of the polynomials are 0, 3/4, -3/4, 3/2, -3/2 and
// infinity: with the usual 1 and 2 the error in float32 is twice as large.
//
// Only the last output needs the point at infinity. Where tiles of 4 would reach beyond a map, some
// have 3 outputs and five products: a map of 7x7 takes 121 products in place of 144.
//
// Maps are [batch, height, width, channels], kernels [3, 3, in, out]; the numbers of channels are
// multiples of 16. Beyond a map there are zeros. Maps in bfloat16 are computed in float32: a plain
// convolution in bfloat16 has twice the rate, but so many more products that it takes longer.

#include <algorithm>
#include <memory>
#include <vector>

// In one large function g++ would keep less of the products in registers
#define ROW_BLOCKS __attribute__((noinline))
#include "multiply.h"

namespace {

constexpr int kTile = 4, kWindow = 6, kProducts = kWindow * kWindow;
// Tiles that a thread computes at a time; their windows of 256 channels take 1.2 MB
constexpr long kMany = 32;
// Tiles that all threads together compute at a time, for the gradient of the kernel
constexpr long kMostTiles = 64;
// Channels, or tiles, that are added up before their sum goes to the total. One sum of all would
// have four times the rounding error.
constexpr long kSteps = 32;

// Kernels are transformed in double, since no power of two makes their fractions exact
template <typename T> using Precise = typename Vector<double, kLanes<T>>::type;
template <typename T> constexpr int kPanel = kMost * kLanes<T>;  // columns of a block of multiply()

struct Convolution {
  long batch, height, width, in, out, relu;
};

template <typename T> inline Wide<T> load(const T *from) { return *(const Wide<T> *)from; }
template <typename T> inline void store(T *to, const Wide<T> &value) { *(Wide<T> *)to = value; }

#ifdef __AVX512BF16__
typedef short BFloat16;  // the upper half of a float
inline Wide<float> load(const BFloat16 *from) {
  const __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
  return (Wide<float>)_mm512_slli_epi32(bits, 16);
}
inline void store(BFloat16 *to, const Wide<float> &value) {
  _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh((__m512)value));
}
#endif

// __builtin_convertvector is not in g++ 8
template <typename To, typename T> inline To convert(const Wide<T> &from) {
  To to;
  for (int i = 0; i < kLanes<T>; ++i) to[i] = from[i];
  return to;
}
template <typename T> inline void store_rounded(T *to, const Precise<T> &value) {
  for (int i = 0; i < kLanes<T>; ++i) to[i] = T(value[i]);
}

constexpr float kA = 0.75f, kB = 1.5f, kA2 = kA * kA, kB2 = kB * kB;  // exact in float

// B': six inputs, which lie `step` apart
template <typename V> inline __attribute__((always_inline)) void transform_input(V *d, int step) {
  const V d0 = d[0], d1 = d[step], d2 = d[2 * step];
  const V d3 = d[3 * step], d4 = d[4 * step], d5 = d[5 * step];
  const V even_a = d4 - kB2 * d2, odd_a = kA * (d3 - kB2 * d1);
  const V even_b = d4 - kA2 * d2, odd_b = kB * (d3 - kA2 * d1);
  d[0] = kA2 * kB2 * d0 - (kA2 + kB2) * d2 + d4;
  d[step] = even_a + odd_a;
  d[2 * step] = even_a - odd_a;
  d[3 * step] = even_b + odd_b;
  d[4 * step] = even_b - odd_b;
  d[5 * step] = kA2 * kB2 * d1 - (kA2 + kB2) * d3 + d5;
}

// A': four outputs of six products
template <typename V> inline __attribute__((always_inline)) void transform_output(V *m, int step) {
  const V even_a = m[step] + m[2 * step], odd_a = m[step] - m[2 * step];
  const V even_b = m[3 * step] + m[4 * step], odd_b = m[3 * step] - m[4 * step];
  m[0] += even_a + even_b;
  m[step] = kA * odd_a + kB * odd_b;
  m[2 * step] = kA2 * even_a + kB2 * even_b;
  m[3 * step] = kA2 * kA * odd_a + kB2 * kB * odd_b + m[5 * step];
}

// A: the gradients of six products from those of four outputs
template <typename V> inline __attribute__((always_inline)) void transform_grad(V *y, int step) {
  const V y0 = y[0], y1 = y[step], y2 = y[2 * step], y3 = y[3 * step];
  const V even_a = y0 + kA2 * y2, odd_a = kA * (y1 + kA2 * y3);
  const V even_b = y0 + kB2 * y2, odd_b = kB * (y1 + kB2 * y3);
  y[step] = even_a + odd_a;
  y[2 * step] = even_a - odd_a;
  y[3 * step] = even_b + odd_b;
  y[4 * step] = even_b - odd_b;
  y[5 * step] = y3;
}

// G: the polynomial of the taps at each point p, divided by the product of p's distances to the
// other points
constexpr double at_0 = 1 / (double(kA2) * kB2);
constexpr double at_a = 1 / (2 * double(kA2) * (kA2 - kB2));
constexpr double at_b = 1 / (2 * double(kB2) * (kB2 - kA2));
template <typename V>
inline __attribute__((always_inline)) void transform_taps(const V *g, int step, V *to) {
  const V even_a = at_a * g[0] + kA2 * at_a * g[2 * step], odd_a = kA * at_a * g[step];
  const V even_b = at_b * g[0] + kB2 * at_b * g[2 * step], odd_b = kB * at_b * g[step];
  to[0] = at_0 * g[0];
  to[1] = even_a + odd_a;
  to[2] = even_a - odd_a;
  to[3] = even_b + odd_b;
  to[4] = even_b - odd_b;
  to[5] = g[2 * step];
}

// G': three taps of six products
template <typename V>
inline __attribute__((always_inline)) void transform_sums(const V *m, int step, V *to) {
  const V even_a = m[step] + m[2 * step], odd_a = m[step] - m[2 * step];
  const V even_b = m[3 * step] + m[4 * step], odd_b = m[3 * step] - m[4 * step];
  to[0] = at_0 * m[0] + at_a * even_a + at_b * even_b;
  to[1] = kA * at_a * odd_a + kB * at_b * odd_b;
  to[2] = kA2 * at_a * even_a + kB2 * at_b * even_b + m[5 * step];
}

// The tiles along one side of a map: first those of 4 outputs, then those of 3
struct Side {
  const long size, count = divided_up(size, kTile);
  const long whole = std::max(0l, size - (kTile - 1) * count);
  long start(long tile) const { return tile * kTile - std::max(0l, tile - whole); }
  long end(long tile) const { return std::min(size, start(tile) + kTile - (tile >= whole)); }
};

// The tiles of all images, by rows
struct Tiles {
  const Convolution &s;
  const Side down{s.height}, across{s.width};
  const long count = s.batch * down.count * across.count;
  long column(long tile) const { return tile % across.count; }
  long row(long tile) const { return tile / across.count % down.count; }
  long image(long tile) const { return tile / (across.count * down.count); }

  // Finds the positions of a square of the map, whose upper left corner lies `before` positions
  // above and to the left of the tile's corner
  template <int side, typename M>
  void find(long tile, int before, const M *map, long channels, const M *zeros,
            const M **found) const {
    const long top = down.start(row(tile)) - before, left = across.start(column(tile)) - before;
    const long bottom = std::min(s.height, down.end(row(tile)) + before);
    const long right = std::min(s.width, across.end(column(tile)) + before);
    const long rows = image(tile) * s.height;
    for (int i = 0; i < side; ++i)
      for (int j = 0; j < side; ++j) {
        const long y = top + i, x = left + j;
        const bool inside = y >= 0 && y < bottom && x >= 0 && x < right;
        found[i * kWindow + j] = inside ? map + ((rows + y) * s.width + x) * channels : zeros;
      }
  }
};

// Some tiles, sorted so that the tiles that need a certain product are neighbours: first low and
// wide ones, then high and wide, high and narrow, low and narrow. A high tile has 4 rows of outputs
// and a low one 3; likewise wide and narrow.
struct Block {
  long tile[kMostTiles], count = 0, bounds[5];
  Block(const Tiles &tiles, long first, long most) {
    const long end = std::min(first + most, tiles.count);
    for (int kind = 0; kind < 4; ++kind) {
      bounds[kind] = count;
      for (long t = first; t < end; ++t) {
        const bool high = tiles.row(t) < tiles.down.whole;
        const bool wide = tiles.column(t) < tiles.across.whole;
        if ((wide ? high : 3 - high) == kind) tile[count++] = t;
      }
    }
    bounds[4] = count;
  }
  // Products of the last row need high tiles, those of the last column wide ones
  long from(int product) const { return bounds[product / kWindow == kWindow - 1]; }
  long to(int product) const {
    const bool last = product / kWindow == kWindow - 1;
    return bounds[product % kWindow == kWindow - 1 ? 2 : last ? 3 : 4];
  }
};

// Distance in memory between two of the 36 products. If it were a power of two, the 36 vectors of a
// tile would evict each other from the cache, and the transform of a kernel would take three times
// as long.
template <typename T> inline long product_size(long numbers) { return numbers + 2 * kLanes<T>; }

// B' d B of a tile. `product` is the distance between the 36 products in `to`, and `vector_stride`
// that between vectors of channels.
template <typename T, typename M>
void transform_window(const Tiles &tiles, long tile, const M *map, const M *zeros, T *to,
                      long product, long vector_stride) {
  const M *window[kProducts];
  tiles.find<kWindow>(tile, 1, map, tiles.s.in, zeros, window);
  for (long c = 0; c < tiles.s.in; c += kLanes<T>, to += vector_stride) {
    Wide<T> d[kProducts];
    for (int i = 0; i < kProducts; ++i) d[i] = load(window[i] + c);
    for (int i = 0; i < kWindow; ++i) transform_input(d + i * kWindow, 1);
    for (int i = 0; i < kWindow; ++i) transform_input(d + i, kWindow);
    for (int i = 0; i < kProducts; ++i) store(to + i * product, d[i]);
  }
}

// A dY A' of a tile of a gradient, likewise
template <typename T, typename M>
void transform_grad_tile(const Tiles &tiles, long tile, const M *grad, const M *zeros, T *to,
                         long product, long panel_stride) {
  const M *pixels[kProducts];
  tiles.find<kTile>(tile, 0, grad, tiles.s.out, zeros, pixels);
  for (long c = 0; c < tiles.s.out; c += kLanes<T>) {
    Wide<T> d[kProducts];
    for (int i = 0; i < kTile; ++i) {
      for (int j = 0; j < kTile; ++j) d[i * kWindow + j] = load(pixels[i * kWindow + j] + c);
      transform_grad(d + i * kWindow, 1);
    }
    for (int j = 0; j < kWindow; ++j) transform_grad(d + j, kWindow);
    T *target = to + c / kPanel<T> * panel_stride + c % kPanel<T>;
    for (int i = 0; i < kProducts; ++i) store(target + i * product, d[i]);
  }
}

// G g G' of [3, 3, in, out], as [36, panels of out, in, panel] with gaps between the 36
template <typename T>
void transform_kernel(const Convolution &s, const T *kernel, T *to, int threads) {
  constexpr int panel = kPanel<T>;
  const long panels = divided_up(s.out, panel), size = product_size<T>(panels * s.in * panel);
#pragma omp parallel for collapse(2) num_threads(threads) schedule(static)
  for (long p = 0; p < panels; ++p)
    for (long in = 0; in < s.in; ++in)
      for (long c = 0; c < std::min<long>(panel, s.out - p * panel); c += kLanes<T>) {
        Precise<T> taps[9], half[3 * kWindow], whole[kWindow];
        for (int i = 0; i < 9; ++i)
          taps[i] = convert<Precise<T>, T>(load(kernel + (i * s.in + in) * s.out + p * panel + c));
        for (int x = 0; x < 3; ++x) transform_taps(taps + x, 3, half + x * kWindow);
        for (int i = 0; i < kWindow; ++i) {
          transform_taps(half + i, kWindow, whole);
          for (int j = 0; j < kWindow; ++j)
            store_rounded(to + (i * kWindow + j) * size + (p * s.in + in) * panel + c, whole[j]);
        }
      }
}

// kernel: the result of transform_kernel
template <typename T, typename M>
void convolve(const Convolution &s, const M *map, const T *kernel, const T *bias, M *output,
              int threads) {
  constexpr int lanes = kLanes<T>, panel = kPanel<T>;
  const Tiles tiles{s};
  const long panels = divided_up(s.out, panel);
  const long window_size = product_size<T>(kMany * s.in), size = product_size<T>(kMany * panel);
  const long kernel_size = product_size<T>(panels * s.in * panel);
#pragma omp parallel num_threads(threads)
  {
    std::vector<T> windows(kProducts * window_size), products(kProducts * size);
    std::vector<M> zeros(s.in);
#pragma omp for schedule(dynamic, 1)
    for (long first = 0; first < tiles.count; first += kMany) {
      const Block block(tiles, first, kMany);
      for (long t = 0; t < block.count; ++t)
        transform_window(tiles, block.tile[t], map, zeros.data(), windows.data() + t * s.in,
                         window_size, lanes);
      for (long p = 0; p < panels; ++p) {
        const long columns = std::min<long>(panel, s.out - p * panel);
        for (int i = 0; i < kProducts; ++i) {
          const long from = block.from(i), count = block.to(i) - from;
          for (long in = 0; in < s.in; in += kSteps)
            multiply(count, columns, std::min(kSteps, s.in - in),
                     windows.data() + i * window_size + from * s.in + in, s.in, 1,
                     kernel + i * kernel_size + (p * s.in + in) * panel, panel,
                     products.data() + i * size + from * panel, panel, in > 0);
        }
        for (long t = 0; t < block.count; ++t) {
          const long tile = block.tile[t], rows = tiles.image(tile) * s.height;
          const long y0 = tiles.down.start(tiles.row(tile)), y1 = tiles.down.end(tiles.row(tile));
          const long x0 = tiles.across.start(tiles.column(tile));
          const long x1 = tiles.across.end(tiles.column(tile));
          for (long c = 0; c < columns; c += lanes) {
            Wide<T> m[kProducts];
            for (int i = 0; i < kProducts; ++i) m[i] = load(products.data() + i * size + t * panel + c);
            for (int j = 0; j < kWindow; ++j) transform_output(m + j, kWindow);
            for (int i = 0; i < kTile; ++i) transform_output(m + i * kWindow, 1);
            const Wide<T> added = load(bias + p * panel + c), zero = {};
            for (long y = y0; y < y1; ++y)
              for (long x = x0; x < x1; ++x) {
                const Wide<T> sum = m[(y - y0) * kWindow + x - x0] + added;
                store(output + ((rows + y) * s.width + x) * s.out + p * panel + c,
                      s.relu ? (sum < zero ? zero : sum) : sum);
              }
          }
        }
      }
    }
  }
}

// G' [(A dY A') * (B' d B)] G, summed over the tiles. sums: [36, in, out] with gaps
template <typename T, typename M>
void convolution_gradient(const Convolution &s, const M *map, const M *grad, T *sums,
                          T *grad_kernel, int threads) {
  constexpr int lanes = kLanes<T>, panel = kPanel<T>;
  const Tiles tiles{s};
  const long panels = divided_up(s.out, panel);
  const long window_size = product_size<T>(kMostTiles * s.in);
  const long size = product_size<T>(kMostTiles * panels * panel);
  // The layouts that multiply() reads: [36, vectors of in, tiles, vector], [36, panels, tiles,
  // panel]
  const std::unique_ptr<T[]> windows(new T[kProducts * window_size]);
  const std::unique_ptr<T[]> grads(new T[kProducts * size]);
  const std::vector<M> zeros(std::max(s.in, s.out));
  const long sums_size = product_size<T>(s.in * s.out);
#pragma omp parallel num_threads(threads)
  {
    for (long first = 0; first < std::max(1l, tiles.count); first += kMostTiles) {
      const Block block(tiles, first, kMostTiles);
#pragma omp for schedule(static)
      for (long t = 0; t < block.count; ++t) {
        transform_window(tiles, block.tile[t], map, zeros.data(), windows.get() + t * lanes,
                         window_size, kMostTiles * lanes);
        transform_grad_tile(tiles, block.tile[t], grad, zeros.data(), grads.get() + t * panel, size,
                            kMostTiles * panel);
      }
#pragma omp for collapse(2) schedule(static)
      for (int i = 0; i < kProducts; ++i)
        for (long p = 0; p < panels; ++p)
          for (long c = 0; c < s.in; c += lanes) {
            long t = block.from(i);
            do
              multiply(lanes, std::min<long>(panel, s.out - p * panel),
                       std::min(kSteps, block.to(i) - t),
                       windows.get() + i * window_size + (c * kMostTiles + t * lanes), 1, lanes,
                       grads.get() + i * size + (p * kMostTiles + t) * panel, panel,
                       sums + i * sums_size + c * s.out + p * panel, s.out,
                       first > 0 || t > block.from(i));
            while ((t += kSteps) < block.to(i));
          }
    }
#pragma omp for schedule(static)
    for (long in = 0; in < s.in; ++in)
      for (long out = 0; out < s.out; out += lanes) {
        Precise<T> sum[kProducts], half[kWindow * 3], taps[3];
        for (int i = 0; i < kProducts; ++i)
          sum[i] = convert<Precise<T>, T>(load(sums + i * sums_size + in * s.out + out));
        for (int j = 0; j < kWindow; ++j) transform_sums(sum + j, kWindow, half + j * 3);
        for (int y = 0; y < 3; ++y) {
          transform_sums(half + y, 3, taps);
          for (int x = 0; x < 3; ++x)
            store_rounded(grad_kernel + ((y * 3 + x) * s.in + in) * s.out + out, taps[x]);
        }
      }
  }
}

}  // namespace

// The exported functions, for sums of type T and maps of type M
#define EXPORT(T, M, suffix)                                                                       \
  void transform_kernel_##suffix(const Convolution *s, const T *kernel, T *to, int threads) {      \
    transform_kernel<T>(*s, kernel, to, threads);                                                  \
  }                                                                                                \
  void convolve_##suffix(const Convolution *s, const M *map, const T *kernel, const T *bias,       \
                         M *output, int threads) {                                                 \
    convolve<T, M>(*s, map, kernel, bias, output, threads);                                        \
  }                                                                                                \
  void convolution_gradient_##suffix(const Convolution *s, const M *map, const M *grad, T *sums,   \
                                     T *grad_kernel, int threads) {                                \
    convolution_gradient<T, M>(*s, map, grad, sums, grad_kernel, threads);                         \
  }

extern "C" {
EXPORT(float, float, float32)
EXPORT(double, double, float64)
#ifdef __AVX512BF16__
EXPORT(float, BFloat16, bfloat16)
#endif
}
