// ROIAlign and its gradient on the CPU, on channels-last maps.
//
// Each bin of a box is the mean of points on a grid, which are interpolated between four positions
// of the map. So a bin is a weighted sum over rows and columns of the map, and the weight of a line
// comes from all points beside it. A vector holds channels, because all channels have the same
// weights.
//
// Maps are [batch, height, width, channels], pooled boxes [boxes, bins_y, bins_x, channels]; the
// number of channels is a multiple of 16.

#include <algorithm>
#include <vector>

#include "multiply.h"

namespace {

constexpr long kTogether = 16;  // channels that are summed at a time

struct Pooling {
  long batch, height, width, channels, boxes, bins_y, bins_x;
};

// For each box: its image, where it begins, how large a bin is, and how many points it has; (x, y)
template <typename T> struct Boxes {
  const long *image;
  const T *start, *bin;
  const long *points;
};

template <typename T> struct Weighted {
  long position;
  T weight;
};
template <typename T> using List = std::vector<Weighted<T>>;

template <typename T> void add(List<T> &list, long position, T weight) {
  // The previous point may lie beside the same line: look at the last two entries
  for (size_t i = list.size(); i > 0 && i + 2 > list.size(); --i)
    if (list[i - 1].position == position) {
      list[i - 1].weight += weight;
      return;
    }
  list.push_back({position, weight});
}

// The rows or columns of the map beside the points of a bin. Points that lie beyond the map, or
// that are NaN, have none.
template <typename T> void find_lines(T start, T bin, long points, long size, List<T> &found) {
  found.clear();
  for (long i = 0; i < points; ++i) {
    T at = start + (i + T(.5)) * bin / points;
    if (!(at >= -1 && at <= size)) continue;
    at = std::max(at, T(0));
    const long before = std::min(long(at), size - 1);
    const T share = before == size - 1 ? T(0) : at - before;
    add(found, before, (1 - share) / points);
    add(found, std::min(before + 1, size - 1), share / points);
  }
}

// The corners of a bin. The bins of a box have to be asked in their order, from the first on,
// because rows and columns are kept for the bins that follow.
template <typename T> struct Bin {
  std::vector<List<T>> columns;
  List<T> rows, corners;

  void find(const Pooling &s, const Boxes<T> &boxes, long box, long bin) {
    const T *start = boxes.start + 2 * box, *size = boxes.bin + 2 * box;
    const long *points = boxes.points + 2 * box, y = bin / s.bins_x, x = bin % s.bins_x;
    columns.resize(s.bins_x);
    if (y == 0) find_lines(start[0] + x * size[0], size[0], points[0], s.width, columns[x]);
    if (x == 0) find_lines(start[1] + y * size[1], size[1], points[1], s.height, rows);
    corners.clear();
    for (const Weighted<T> &row : rows)
      for (const Weighted<T> &column : columns[x]) {
        const long from = (boxes.image[box] * s.height + row.position) * s.width + column.position;
        corners.push_back({from * s.channels, row.weight * column.weight});
      }
  }
};

template <typename T>
void pool(const Pooling &s, const T *map, const Boxes<T> &boxes, T *output, int threads) {
  constexpr long lanes = kLanes<T>, vectors = kTogether / lanes;
#pragma omp parallel num_threads(threads)
  {
    Bin<T> points;
#pragma omp for schedule(dynamic, 4)
    for (long box = 0; box < s.boxes; ++box)
      for (long bin = 0; bin < s.bins_y * s.bins_x; ++bin) {
        points.find(s, boxes, box, bin);
        for (long c = 0; c < s.channels; c += kTogether) {
          Wide<T> sum[vectors] = {};
          for (const Weighted<T> &corner : points.corners)
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
  constexpr long lanes = kLanes<T>;
  const long groups = s.channels / kTogether;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (long part = 0; part < threads; ++part) {
    const long from = groups * part / threads * kTogether;
    const long to = groups * (part + 1) / threads * kTogether;
    Bin<T> points;
    for (long box = 0; box < s.boxes && from < to; ++box)
      for (long bin = 0; bin < s.bins_y * s.bins_x; ++bin) {
        points.find(s, boxes, box, bin);
        const T *g = grad + (box * s.bins_y * s.bins_x + bin) * s.channels;
        for (const Weighted<T> &corner : points.corners)
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
