// ROIAlign and its gradient on the CPU, on channels-last maps.
//
// Each bin of a box is the mean of points on a grid, which are interpolated between four positions
// of the map. A vector holds channels, so all of them have the points of a bin in common.
//
// Maps are [batch, height, width, channels], pooled boxes [boxes, bins_y, bins_x, channels]; the
// number of channels is a multiple of 16.

#include <algorithm>
#include <vector>

#include "multiply.h"

namespace {

template <typename T> using Wide = typename Vector<T, kLong<T>>::type;
constexpr long kTogether = 16;  // channels

struct Pooling {
  long batch, height, width, channels, boxes, bins_y, bins_x;
};

// For each box: its image, where it begins, how large a bin is, and how many points it has; (x, y)
template <typename T> struct Boxes {
  const long *image;
  const T *start, *bin;
  const long *points;
};

template <typename T> struct Corner {
  long position;
  T weight;
};

// Two positions next to a coordinate and their weights; false beyond the map, and for NaN.
template <typename T> inline bool neighbours(T at, long size, long *positions, T *weights) {
  if (!(at >= -1 && at <= size)) return false;
  at = std::max(at, T(0));
  positions[0] = std::min(long(at), size - 1);
  positions[1] = std::min(positions[0] + 1, size - 1);
  weights[1] = positions[0] == size - 1 ? T(0) : at - positions[0];
  weights[0] = 1 - weights[1];
  return true;
}

template <typename T>
void find_corners(const Pooling &s, const Boxes<T> &boxes, long box, long bin_y, long bin_x,
                  std::vector<Corner<T>> &found) {
  found.clear();
  const long points_x = boxes.points[2 * box], points_y = boxes.points[2 * box + 1];
  const T size_x = boxes.bin[2 * box], size_y = boxes.bin[2 * box + 1];
  const T share = T(1) / std::max(points_x * points_y, 1L);
  for (long i = 0; i < points_y; ++i) {
    long rows[2], columns[2];
    T down[2], across[2];
    const T y = boxes.start[2 * box + 1] + bin_y * size_y + (i + T(.5)) * size_y / points_y;
    if (!neighbours(y, s.height, rows, down)) continue;
    for (long j = 0; j < points_x; ++j) {
      const T x = boxes.start[2 * box] + bin_x * size_x + (j + T(.5)) * size_x / points_x;
      if (!neighbours(x, s.width, columns, across)) continue;
      for (int k = 0; k < 4; ++k) {
        const long row = boxes.image[box] * s.height + rows[k / 2];
        found.push_back({(row * s.width + columns[k % 2]) * s.channels,
                         share * down[k / 2] * across[k % 2]});
      }
    }
  }
}

template <typename T>
void pool(const Pooling &s, const T *map, const Boxes<T> &boxes, T *output, int threads) {
  constexpr long lanes = kLong<T>, vectors = kTogether / lanes;
#pragma omp parallel num_threads(threads)
  {
    std::vector<Corner<T>> corners;
#pragma omp for schedule(dynamic, 4)
    for (long box = 0; box < s.boxes; ++box)
      for (long bin = 0; bin < s.bins_y * s.bins_x; ++bin) {
        find_corners(s, boxes, box, bin / s.bins_x, bin % s.bins_x, corners);
        for (long c = 0; c < s.channels; c += kTogether) {
          Wide<T> sum[vectors] = {};
          for (const Corner<T> &corner : corners)
            for (long v = 0; v < vectors; ++v)
              sum[v] += corner.weight * *(const Wide<T> *)(map + corner.position + c + v * lanes);
          T *to = output + (box * s.bins_y * s.bins_x + bin) * s.channels + c;
          for (long v = 0; v < vectors; ++v) *(Wide<T> *)(to + v * lanes) = sum[v];
        }
      }
  }
}

// Each thread has some of the channels, so that no two write to one place. grad_map: zero at first
template <typename T>
void pool_gradient(const Pooling &s, const T *grad, const Boxes<T> &boxes, T *grad_map,
                   int threads) {
  constexpr long lanes = kLong<T>;
  const long groups = s.channels / kTogether;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (long part = 0; part < threads; ++part) {
    const long from = groups * part / threads * kTogether;
    const long to = groups * (part + 1) / threads * kTogether;
    std::vector<Corner<T>> corners;
    for (long box = 0; box < s.boxes && from < to; ++box)
      for (long bin = 0; bin < s.bins_y * s.bins_x; ++bin) {
        find_corners(s, boxes, box, bin / s.bins_x, bin % s.bins_x, corners);
        const T *g = grad + (box * s.bins_y * s.bins_x + bin) * s.channels;
        for (const Corner<T> &corner : corners)
          for (long c = from; c < to; c += lanes)
            *(Wide<T> *)(grad_map + corner.position + c) += corner.weight * *(const Wide<T> *)(g + c);
      }
  }
}

}  // namespace

#define EXPORT(T, suffix)                                                                          \
  void pool_##suffix(const Pooling *s, const T *map, const long *image, const T *start,            \
                     const T *bin, const long *points, T *output, int threads) {                   \
    pool<T>(*s, map, {image, start, bin, points}, output, threads);                                \
  }                                                                                                \
  void pool_gradient_##suffix(const Pooling *s, const T *grad, const long *image, const T *start,  \
                              const T *bin, const long *points, T *grad_map, int threads) {        \
    pool_gradient<T>(*s, grad, {image, start, bin, points}, grad_map, threads);                    \
  }

extern "C" {
EXPORT(float, float32)
EXPORT(double, float64)
}
