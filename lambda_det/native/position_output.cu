// The position output with the query contracted first, and its gradients, on NVIDIA GPUs of compute
// capability 8.0 and more.
//
//     a[n, h, r] = sum_k q[n, h, k] E[k, r]        y[n, h, :] = sum_r a[n, h, r] V[n + r, :]
//
// All tensors are dense and begin at a multiple of 16 bytes. Of 16-bit numbers are
//     queries [b, H, W, 4, 16]   values [b, H, W, v]
//     output, and its gradient [b, H, W, 4, v], with v a multiple of 64
// The embedding [16, 23, 23] and its gradient are float; it is rounded to 16 bits when it is read.
// Fewer heads, a smaller depth or scope are filled up with zeros (layers/local/fused.py). Numbers
// are bfloat16, or float16 where FLOAT16 is defined. Sums are float; scores and their gradients
// are rounded to 16 bits before they are factors of a second product. Nothing is added atomically:
// the order of each sum depends on sizes and on the number of programs alone.
//
// Both products are mma.m16n8k16. The score product has 4 neighbouring queries times 4 heads as
// rows, and 8 rows of the window of values as columns; there is one product for each offset dx. The
// query at x needs its score for column x + dx of the window. So scores move to their places by
// other names of registers and one selection for each, and those of two columns are the first
// operand of the second product as they lie. Nothing of them goes through shared memory, or from
// lane to lane.
//
// The words of an operand, by PTX's "Matrix Fragments for mma.m16n8k16": with group = lane / 4 and
// member = lane % 4,
//     a[0], a[1]: rows group, group + 8 at columns 2 member, 2 member + 1; a[2], a[3]: 8 columns on
//     b[0], b[1]: column group at rows 2 member, 2 member + 1, and 8 rows on
//     c[0], c[1]: row group at columns 2 member, 2 member + 1; c[2], c[3]: row group + 8
//
// The host appends one line for each kernel that is wanted, such as OUTPUT_KERNEL(name, ...). The
// file is also compiled for the CPU, with EMULATED (tests/native/emulator.h).

#ifndef EMULATED
#ifdef __CUDACC_RTC__  // no headers of the system are there
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
#else
#include <cstdint>
#endif

#define DEVICE __device__ __forceinline__
#define KERNEL(...) extern "C" __global__ void __launch_bounds__((__VA_ARGS__), 1)
#define SHARED_MEMORY extern __shared__ __align__(1024) uint8_t shared[]

#ifdef FLOAT16
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
#define PACK "cvt.rn.f16x2.f32"
#else
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
#define PACK "cvt.rn.bf16x2.f32"
#endif

DEVICE int thread_index() { return (int)threadIdx.x; }
DEVICE int program_index() { return (int)blockIdx.x; }
DEVICE int program_count() { return (int)gridDim.x; }
DEVICE void barrier() { __syncthreads(); }

DEVICE uint32_t shared_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

// Two sums, rounded to 16 bits, in one word.
DEVICE uint32_t pack(float low, float high) {
  uint32_t word;
  asm(PACK " %0,%1,%2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

// c [16, 8] += a [16, 16] b [16, 8]
DEVICE void multiply_add(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                         uint32_t b0, uint32_t b1) {
  asm(MMA " {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Four matrices [8, 8], whose rows lie where the lanes of each quarter of the warp say.
DEVICE void load_matrices(uint32_t (&m)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address));
}

DEVICE void load_transposed(uint32_t (&m)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address));
}

// Begins a copy of 16 bytes, or of zeros if they are not there. `from` must be an address anyway.
DEVICE void copy_16_bytes(uint32_t to, const void *from, bool is_there) {
  int count = is_there ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0],[%1],16,%2;" ::"r"(to), "l"(from), "r"(count)
               : "memory");
}

// What was begun since the last call is one group of copies.
DEVICE void close_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until only the last PENDING groups may be under way.
template <int PENDING> DEVICE void wait_for_groups() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

DEVICE uint32_t exchange(uint32_t word, int with) {
  return __shfl_xor_sync(0xffffffffu, word, with);
}
#endif

typedef const uint16_t *__restrict__ Source;
typedef uint16_t *__restrict__ Target;
typedef const float *__restrict__ Embedding;

constexpr int SCOPE = 23, RADIUS = 11, K = 16, HEADS = 4;
constexpr int PAIRS = 12;  // of offsets dx; the last one has only one
constexpr int GROUPS = 3;  // of 8 offsets dy; the last one has only 7

// The first number of a position of a map [b, H, W].
DEVICE int64_t position(int b, int y, int x, int height, int width) {
  return ((int64_t)b * height + y) * width + x;
}

// Two neighbouring numbers.
DEVICE uint32_t word_at(const uint16_t *from) { return *reinterpret_cast<const uint32_t *>(from); }

// The index of E[k, dy, dx], or 0 beyond the scope.
DEVICE int embedding_index(int k, int dy, int dx, bool is_inside) {
  return is_inside ? (k * SCOPE + dy) * SCOPE + dx : 0;
}

// Transposes 4 x 4 words across the 4 lanes of a group, so that each lane has 16 bytes of a row.
DEVICE void transpose_words(uint32_t (&w)[4], int member) {
  const bool odd = member & 1, far = member & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t got = exchange(odd ? w[i] : w[i + 1], 1);
    if (odd) {
      w[i] = got;
    } else {
      w[i + 1] = got;
    }
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const uint32_t got = exchange(far ? w[i] : w[i + 2], 2);
    if (far) {
      w[i] = got;
    } else {
      w[i + 2] = got;
    }
  }
}

DEVICE void store_words(uint16_t *to, const uint32_t (&w)[4]) {
  *reinterpret_cast<uint4 *>(to) = make_uint4(w[0], w[1], w[2], w[3]);
}

// Tiles of queries and their windows of values ----------------------------------------------------

// A tile of HEIGHT x WIDTH queries and CHANNELS channels of its window of values. Each warp has two
// rows of QUADS x 4 queries.
//
// The window lies in shared memory as [Y][X][channel], in chunks of 8 channels. ldmatrix reads one
// column of 8 rows at a time; the chunks of a row are exchanged by swizzle(Y), so that these 8
// chunks lie in different banks.
//
// Behind it lies the embedding, in EMBEDDING_BYTES.
template <int V_, int CHANNELS_, int WARPS_Y_, int WARPS_X_, int QUADS_, int EMBEDDING_BYTES_>
struct Tiling {
  static constexpr int V = V_, CHANNELS = CHANNELS_, WARPS_Y = WARPS_Y_, WARPS_X = WARPS_X_;
  static constexpr int QUADS = QUADS_, SLICES = V / CHANNELS, CHUNKS = CHANNELS / 8;
  static constexpr int HEIGHT = 2 * WARPS_Y, WIDTH = 4 * QUADS * WARPS_X;
  static constexpr int WINDOW_HEIGHT = HEIGHT + SCOPE - 1, WINDOW_WIDTH = WIDTH + SCOPE - 1;
  static constexpr int THREADS = 32 * WARPS_Y * WARPS_X;
  // chunks of 32 channels are half a row of banks: an odd number of columns uses both halves
  static constexpr int PITCH = CHANNELS == 32 ? WINDOW_WIDTH | 1 : WINDOW_WIDTH;
  static constexpr int COLUMN_BYTES = CHANNELS * 2, ROW_BYTES = PITCH * COLUMN_BYTES;
  static constexpr int WINDOW_BYTES = WINDOW_HEIGHT * ROW_BYTES;
  static constexpr int SHARED_BYTES = WINDOW_BYTES + EMBEDDING_BYTES_;
  static DEVICE int swizzle(int y) { return CHANNELS == 32 ? y >> 1 & 3 : y & 7; }
};

struct Tile {
  int image, y, x, channel;  // of its first query, and the first channel of its window
};

// The tile of this index; all slices of channels of one tile follow each other.
template <class S> DEVICE Tile tile_at(int index, int columns, int rows) {
  Tile tile;
  tile.channel = index % S::SLICES * S::CHANNELS;
  index /= S::SLICES;
  tile.x = index % columns * S::WIDTH;
  index /= columns;
  tile.y = index % rows * S::HEIGHT;
  tile.image = index / rows;
  return tile;
}

// Begins copies of the rows [first, end) of a tile's window; zeros outside of the map.
template <class S>
DEVICE void load_rows(uint32_t window, Source values, Tile tile, int height, int width, int first,
                      int end) {
  constexpr int STEP = S::THREADS / S::CHUNKS;  // columns at a time
  const int chunk = thread_index() % S::CHUNKS;
#pragma unroll
  for (int u = 0; u < (S::WINDOW_WIDTH + STEP - 1) / STEP; u++) {
    const int column = thread_index() / S::CHUNKS + u * STEP, x = tile.x - RADIUS + column;
    if (column < S::WINDOW_WIDTH) {
      const bool is_column = x >= 0 && x < width;
      const uint16_t *from =
          values +
          (((int64_t)tile.image * height + (tile.y - RADIUS + first)) * width + x) * S::V +
          tile.channel + chunk * 8;
      uint32_t to = window + first * S::ROW_BYTES + column * S::CHANNELS * 2;
#pragma unroll 2
      for (int row = first; row < end; row++) {
        const int y = tile.y - RADIUS + row;
        const bool is_there = is_column && y >= 0 && y < height;
        copy_16_bytes(to + ((chunk ^ S::swizzle(row)) << 4), is_there ? from : values, is_there);
        from += (int64_t)width * S::V;
        to += S::ROW_BYTES;
      }
    }
  }
}

// The output --------------------------------------------------------------------------------------

constexpr int OUTPUT_ROWS = SCOPE + 2;  // offsets dy from -1 to 23: a warp has two rows of queries
constexpr int OUTPUT_EMBEDDING_BYTES = PAIRS * OUTPUT_ROWS * 64;
template <int V, int CHANNELS, int WARPS_Y, int WARPS_X, int QUADS>
using OutputTiling = Tiling<V, CHANNELS, WARPS_Y, WARPS_X, QUADS, OUTPUT_EMBEDDING_BYTES>;

// Lays E out for the score product: [pair of dx][dy + 1][member] is what a lane reads at once, k of
// 2 member, 2 member + 1 and those plus 8 for one dx, then the same for dx + 1. Zeros beyond the
// scope.
template <int THREADS> DEVICE void lay_out_for_output(uint32_t *laid_out, Embedding embedding) {
#pragma unroll 8
  for (int i = thread_index(); i < OUTPUT_EMBEDDING_BYTES / 4; i += THREADS) {
    const int word = i & 3, member = i >> 2 & 3, dy = (i >> 4) % OUTPUT_ROWS - 1;
    const int dx = (i >> 4) / OUTPUT_ROWS * 2 + (word >> 1), k = 2 * member + 8 * (word & 1);
    const bool is_inside = dy >= 0 && dy < SCOPE && dx < SCOPE;
    const int at = embedding_index(k, dy, dx, is_inside);
    const float low = embedding[at], high = embedding[at + (is_inside ? SCOPE * SCOPE : 0)];
    laid_out[i] = is_inside ? pack(low, high) : 0u;
  }
}

// Programs go on from tile to tile. While a tile is computed, the window of the next one comes in
// three groups of rows, each as soon as nobody reads these rows any more.
template <class S>
DEVICE void compute_output(uint8_t *shared, Source queries, Source values, Embedding embedding,
                           Target output, int batch, int height, int width) {
  constexpr int QUADS = S::QUADS;
  constexpr int PARTS = S::CHANNELS / 8;             // columns of 8 channels of the output
  constexpr int COLUMNS = 13 + 2 * (QUADS - 1);      // pairs of columns that the queries see
  constexpr int REACH = PAIRS + 1;                   // of them, those that one query group sees
  const int lane = thread_index() & 31, warp = thread_index() >> 5;
  const int group = lane >> 2, member = lane & 3;
  const int warp_y = warp / S::WARPS_X, warp_x = warp % S::WARPS_X;
  // Rows group and group + 8 of a lane are the queries x and x + 2, or, where it is high, x + 1 and
  // x + 3, which need their scores one column later.
  const bool is_high = lane >= 16;
  const int columns = (width + S::WIDTH - 1) / S::WIDTH;
  const int rows = (height + S::HEIGHT - 1) / S::HEIGHT;
  const int tiles = batch * columns * rows * S::SLICES;
  const uint32_t window = shared_address(shared);
  const uint4 *laid_out = reinterpret_cast<const uint4 *>(shared + S::WINDOW_BYTES);
  // ldmatrix: the matrices of a lane's quarter are column X or X + 1, and an even or odd chunk
  const int matrix_row = lane & 7, matrix_column = lane >> 3 & 1, matrix_chunk = lane >> 4;
  const uint32_t matrix = window + (2 * warp_y + matrix_row) * S::ROW_BYTES +
                          (4 * QUADS * warp_x + matrix_column) * S::CHANNELS * 2;
  const int swizzle = S::swizzle(2 * warp_y + matrix_row) ^ matrix_chunk;
  int index = program_index();
  if (index < tiles) {
    const Tile tile = tile_at<S>(index, columns, rows);
    load_rows<S>(window, values, tile, height, width, 0, 8);
    close_group();
    load_rows<S>(window, values, tile, height, width, 8, 16);
    close_group();
    load_rows<S>(window, values, tile, height, width, 16, S::WINDOW_HEIGHT);
    close_group();
  }
  lay_out_for_output<S::THREADS>(reinterpret_cast<uint32_t *>(shared + S::WINDOW_BYTES), embedding);
#pragma unroll 1
  for (; index < tiles; index += program_count()) {
    const Tile tile = tile_at<S>(index, columns, rows);
    const bool has_next = index + program_count() < tiles;
    const Tile next = tile_at<S>(has_next ? index + program_count() : index, columns, rows);
    const int y = tile.y + 2 * warp_y, x = tile.x + 4 * QUADS * warp_x;
    uint32_t q[2][QUADS][4];  // rows (x, h), columns k
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
      for (int m = 0; m < QUADS; m++) {
#pragma unroll
        for (int r = 0; r < 4; r++) {
          const int row = group + 8 * (r & 1), query_x = x + 4 * m + (row >> 2);
          const int k = 2 * member + 8 * (r >> 1);
          const bool is_there = y + i < height && query_x < width;
          const int64_t at = position(tile.image, y + i, query_x, height, width);
          q[i][m][r] = is_there ? word_at(queries + (at * HEADS + (row & 3)) * K + k) : 0u;
        }
      }
    }
    float sums[2][QUADS][PARTS][4];
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
      for (int m = 0; m < QUADS; m++) {
#pragma unroll
        for (int n = 0; n < PARTS; n++) {
#pragma unroll
          for (int r = 0; r < 4; r++) sums[i][m][n][r] = 0.f;
        }
      }
    }
#pragma unroll 1
    for (int eight = 0; eight < GROUPS; eight++) {  // rows of the window
      if (eight == 0) wait_for_groups<1>();
      if (eight == 1) wait_for_groups<0>();
      barrier();  // these rows are there, and nobody reads rows before them any more
      if (eight == 1) {
        if (has_next) load_rows<S>(window, values, next, height, width, 0, 8);
        close_group();
      }
      if (eight == 2) {
        if (has_next) load_rows<S>(window, values, next, height, width, 8, 16);
        close_group();
      }
      const int top = y - RADIUS + 8 * eight;
      if (top + 7 < 0 || top >= height || y >= height || x >= width) continue;
      const uint4 *e = laid_out + eight * 32 + lane + 4;
      uint32_t matrices[PARTS / 2];
#pragma unroll
      for (int n = 0; n < PARTS / 2; n++)
        matrices[n] = matrix + eight * 8 * S::ROW_BYTES + (((2 * n) ^ swizzle) << 4);
      // Packed scores of a pair of columns, of this step and of the next: rows group and group + 8
      // of the first column, then of the second. Of steps before, what is still to be multiplied.
      uint32_t scores[2][2][QUADS][4];
      uint32_t before[2][QUADS], high1[2][QUADS], high2[2][QUADS], high3[2][QUADS];
      uint4 e_of_pair[2][QUADS == 1 ? 1 : 3];  // a second group of queries needs it two steps later
#pragma unroll
      for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int m = 0; m < QUADS; m++)
          before[i][m] = high1[i][m] = high2[i][m] = high3[i][m] = 0u;
      }
#pragma unroll
      for (int p = -1; p < COLUMNS; p++) {
        const int next_p = p + 1, now = next_p & 1;
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const int slot = QUADS == 1 ? 0 : (next_p + 3) % 3;
          if (next_p < PAIRS) e_of_pair[i][slot] = e[next_p * OUTPUT_ROWS * 4 - 4 * i];
#pragma unroll
          for (int m = 0; m < QUADS; m++) {
            const int pair = next_p - 2 * m;  // of dx
            const int from = QUADS == 1 ? 0 : (pair + 3) % 3;
            uint32_t(&s)[4] = scores[now][i][m];
            if (pair >= 0 && pair < PAIRS) {
              const uint4 e_words = e_of_pair[i][from];
              const uint32_t(&a)[4] = q[i][m];
              float c[4] = {0.f, 0.f, 0.f, 0.f};
              multiply_add(c, a[0], a[1], a[2], a[3], e_words.x, e_words.y);
              s[0] = pack(c[0], c[1]);
              s[1] = pack(c[2], c[3]);
              if (2 * pair + 1 < SCOPE) {
                float d[4] = {0.f, 0.f, 0.f, 0.f};
                multiply_add(d, a[0], a[1], a[2], a[3], e_words.z, e_words.w);
                s[2] = pack(d[0], d[1]);
                s[3] = pack(d[2], d[3]);
              } else {
                s[2] = s[3] = 0u;
              }
            } else {
              s[0] = s[1] = s[2] = s[3] = 0u;
            }
          }
        }
        if (p < 0) continue;
        uint32_t a[2][QUADS][4];
#pragma unroll
        for (int i = 0; i < 2; i++) {
#pragma unroll
          for (int m = 0; m < QUADS; m++) {
            const uint32_t(&s)[4] = scores[p & 1][i][m];
            const uint32_t first = s[0], first_high = s[1], second = s[2], second_high = s[3];
            a[i][m][0] = is_high ? before[i][m] : first;       // row group at a column X
            a[i][m][1] = is_high ? high3[i][m] : high2[i][m];  // row group + 8, two columns later
            a[i][m][2] = is_high ? first : second;             // the same at X + 1
            a[i][m][3] = is_high ? high2[i][m] : high1[i][m];
            before[i][m] = second;
            high3[i][m] = high1[i][m];
            high2[i][m] = first_high;
            high1[i][m] = second_high;
          }
        }
#pragma unroll
        for (int n = 0; n < PARTS / 2; n++) {
          uint32_t v[4];
          load_transposed(v, matrices[n] + p * 2 * S::CHANNELS * 2);
#pragma unroll
          for (int i = 0; i < 2; i++) {
#pragma unroll
            for (int m = 0; m < QUADS; m++) {
              if (p - 2 * m >= 0 && p - 2 * m < REACH) {
                const uint32_t(&w)[4] = a[i][m];
                multiply_add(sums[i][m][2 * n], w[0], w[1], w[2], w[3], v[0], v[1]);
                multiply_add(sums[i][m][2 * n + 1], w[0], w[1], w[2], w[3], v[2], v[3]);
              }
            }
          }
        }
      }
    }
    barrier();
    if (has_next) load_rows<S>(window, values, next, height, width, 16, S::WINDOW_HEIGHT);
    close_group();
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
      for (int m = 0; m < QUADS; m++) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
#pragma unroll
          for (int n = 0; n < PARTS / 4; n++) {
            uint32_t words[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
              const float(&c)[4] = sums[i][m][4 * n + j];
              words[j] = pack(c[2 * r], c[2 * r + 1]);
            }
            transpose_words(words, member);
            const int row = group + 8 * r, query_x = x + 4 * m + (row >> 2);
            if (y + i < height && query_x < width) {
              const int64_t at = position(tile.image, y + i, query_x, height, width);
              store_words(output + (at * HEADS + (row & 3)) * S::V + tile.channel + n * 32 +
                              member * 8,
                          words);
            }
          }
        }
      }
    }
  }
  wait_for_groups<0>();
}

#define OUTPUT_KERNEL(NAME, ...)                                                               \
  KERNEL(__VA_ARGS__::THREADS)                                                                 \
  NAME(Source queries, Source values, Embedding embedding, Target output, int batch,           \
       int height, int width) {                                                                \
    SHARED_MEMORY;                                                                             \
    compute_output<__VA_ARGS__>(shared, queries, values, embedding, output, batch, height,     \
                                width);                                                        \
  }

// The gradient of the queries ---------------------------------------------------------------------
//
// The scores' gradient dA = G V^T of the same window: rows (x, h), columns Y, one product for each
// column X. Scores come back to their offsets by the same renaming, and dQ = dA E^T.

constexpr int QUERIES_EMBEDDING_BYTES = GROUPS * PAIRS * 2 * 512;
template <int V, int CHANNELS, int WARPS_Y, int WARPS_X>
using QueriesTiling = Tiling<V, CHANNELS, WARPS_Y, WARPS_X, 1, QUERIES_EMBEDDING_BYTES>;

// Lays E out for the second product: [8 offsets dy][pair of dx][row of the warp][lane] is what a
// lane reads at once: k of group at dx and dx + 1, and k plus 8 likewise, each at the offsets dy of
// rows 2 member, 2 member + 1 of the window. Zeros beyond the scope.
template <int THREADS> DEVICE void lay_out_for_queries(uint32_t *laid_out, Embedding embedding) {
#pragma unroll 8
  for (int i = thread_index(); i < QUERIES_EMBEDDING_BYTES / 4; i += THREADS) {
    const int word = i & 3, lane = i >> 2 & 31, row = i >> 7 & 1;
    const int pair = (i >> 8) % PAIRS, eight = (i >> 8) / PAIRS;
    const int k = (lane >> 2) + 8 * (word >> 1), dx = 2 * pair + (word & 1);
    const int dy = 8 * eight + 2 * (lane & 3) - row;
    const bool is_column = dx < SCOPE;
    const bool is_low = is_column && dy >= 0 && dy < SCOPE, is_high = is_column && dy + 1 < SCOPE;
    const float low = embedding[embedding_index(k, dy, dx, is_low)];
    const float high = embedding[embedding_index(k, dy + 1, dx, is_high)];
    laid_out[i] = pack(is_low ? low : 0.f, is_high ? high : 0.f);
  }
}

template <class S>
DEVICE void compute_queries_gradient(uint8_t *shared, Source gradient, Source values,
                                     Embedding embedding, Target queries_gradient, int batch, int height, int width) {
  constexpr int STEPS = S::CHANNELS / 16;
  const int lane = thread_index() & 31, warp = thread_index() >> 5;
  const int group = lane >> 2, member = lane & 3;
  const int warp_y = warp / S::WARPS_X, warp_x = warp % S::WARPS_X;
  const bool is_high = lane >= 16;
  const int columns = (width + S::WIDTH - 1) / S::WIDTH;
  const int rows = (height + S::HEIGHT - 1) / S::HEIGHT;
  const int tiles = batch * columns * rows;
  const uint32_t window = shared_address(shared);
  const uint4 *laid_out = reinterpret_cast<const uint4 *>(shared + S::WINDOW_BYTES);
  const uint32_t matrix =
      window + (2 * warp_y + (lane & 7)) * S::ROW_BYTES + 4 * warp_x * S::CHANNELS * 2;
  const int swizzle = S::swizzle(2 * warp_y + (lane & 7)) ^ (lane >> 3);
  // The sums of a tile stay with one program, which takes its slices of channels in turn.
  int unit = 0;
  const int units = tiles > program_index() ? (tiles - program_index() + program_count() - 1) /
                                                  program_count() * S::SLICES
                                            : 0;
  if (units > 0) {
    const Tile tile = tile_at<S>(program_index() * S::SLICES, columns, rows);
    load_rows<S>(window, values, tile, height, width, 0, 8);
    close_group();
    load_rows<S>(window, values, tile, height, width, 8, 16);
    close_group();
    load_rows<S>(window, values, tile, height, width, 16, S::WINDOW_HEIGHT);
    close_group();
  }
  lay_out_for_queries<S::THREADS>(reinterpret_cast<uint32_t *>(shared + S::WINDOW_BYTES),
                                  embedding);
  float sums[2][2][4];  // rows (x, h) of each row of queries, columns k
#pragma unroll 1
  for (; unit < units; unit++) {
    const Tile tile =
        tile_at<S>((program_index() + unit / S::SLICES * program_count()) * S::SLICES +
                       unit % S::SLICES,
                   columns, rows);
    const bool has_next = unit + 1 < units;
    const int next_unit = has_next ? unit + 1 : unit;
    const Tile next =
        tile_at<S>((program_index() + next_unit / S::SLICES * program_count()) * S::SLICES +
                       next_unit % S::SLICES,
                   columns, rows);
    const int y = tile.y + 2 * warp_y, x = tile.x + 4 * warp_x;
    uint32_t g[2][STEPS][4];  // rows (x, h), columns of 16 channels
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
      for (int r = 0; r < 4; r++) {
        const int row = group + 8 * (r & 1), query_x = x + (row >> 2);
        const bool is_there = y + i < height && query_x < width;
        const int64_t at = position(tile.image, y + i, query_x, height, width);
        const uint16_t *from = gradient + (at * HEADS + (row & 3)) * S::V + tile.channel +
                               2 * member + 8 * (r >> 1);
#pragma unroll
        for (int s = 0; s < STEPS; s++) g[i][s][r] = is_there ? word_at(from + 16 * s) : 0u;
      }
    }
    if (unit % S::SLICES == 0) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int n = 0; n < 2; n++) {
#pragma unroll
          for (int r = 0; r < 4; r++) sums[i][n][r] = 0.f;
        }
      }
    }
#pragma unroll 1
    for (int eight = 0; eight < GROUPS; eight++) {  // rows of the window, as for the output
      if (eight == 0) wait_for_groups<1>();
      if (eight == 1) wait_for_groups<0>();
      barrier();
      if (eight == 1) {
        if (has_next) load_rows<S>(window, values, next, height, width, 0, 8);
        close_group();
      }
      if (eight == 2) {
        if (has_next) load_rows<S>(window, values, next, height, width, 8, 16);
        close_group();
      }
      const int top = y - RADIUS + 8 * eight;
      if (top + 7 < 0 || top >= height || y >= height || x >= width) continue;
      const uint4 *e = laid_out + eight * (PAIRS * 2 * 32) + lane;
      uint32_t matrices[S::CHANNELS / 32];
#pragma unroll
      for (int n = 0; n < S::CHANNELS / 32; n++)
        matrices[n] = matrix + eight * 8 * S::ROW_BYTES + (((4 * n) ^ swizzle) << 4);
      // Packed gradients of the columns 2 p - 4 to 2 p + 1, of rows group and group + 8
      uint32_t a_low[2][6], a_high[2][6];
#pragma unroll
      for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int j = 0; j < 6; j++) a_low[i][j] = a_high[i][j] = 0u;
      }
#pragma unroll
      for (int p = 0; p < PAIRS + 2; p++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
#pragma unroll
          for (int j = 0; j < 4; j++) {
            a_low[i][j] = a_low[i][j + 2];
            a_high[i][j] = a_high[i][j + 2];
          }
          a_low[i][4] = a_low[i][5] = a_high[i][4] = a_high[i][5] = 0u;
        }
        if (p < PAIRS + 1) {
#pragma unroll
          for (int column = 0; column < 2; column++) {
            float c[2][4];
#pragma unroll
            for (int i = 0; i < 2; i++) {
#pragma unroll
              for (int r = 0; r < 4; r++) c[i][r] = 0.f;
            }
#pragma unroll
            for (int n = 0; n < S::CHANNELS / 32; n++) {
              uint32_t v[4];
              load_matrices(v, matrices[n] + (2 * p + column) * S::CHANNELS * 2);
#pragma unroll
              for (int i = 0; i < 2; i++) {
                const uint32_t(&a)[4] = g[i][2 * n];
                multiply_add(c[i], a[0], a[1], a[2], a[3], v[0], v[1]);
              }
#pragma unroll
              for (int i = 0; i < 2; i++) {
                const uint32_t(&a)[4] = g[i][2 * n + 1];
                multiply_add(c[i], a[0], a[1], a[2], a[3], v[2], v[3]);
              }
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
              a_low[i][4 + column] = pack(c[i][0], c[i][1]);
              a_high[i][4 + column] = pack(c[i][2], c[i][3]);
            }
          }
        }
        if (p >= 2) {
#pragma unroll
          for (int i = 0; i < 2; i++) {
            const uint4 e_words = e[(p - 2) * 64 + 32 * i];
            const uint32_t a0 = is_high ? a_low[i][1] : a_low[i][0];
            const uint32_t a1 = is_high ? a_high[i][3] : a_high[i][2];
            const uint32_t a2 = is_high ? a_low[i][2] : a_low[i][1];
            const uint32_t a3 = is_high ? a_high[i][4] : a_high[i][3];
            multiply_add(sums[i][0], a0, a1, a2, a3, e_words.x, e_words.y);
            multiply_add(sums[i][1], a0, a1, a2, a3, e_words.z, e_words.w);
          }
        }
      }
    }
    barrier();
    if (has_next) load_rows<S>(window, values, next, height, width, 16, S::WINDOW_HEIGHT);
    close_group();
    if (unit % S::SLICES == S::SLICES - 1) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
#pragma unroll
          for (int n = 0; n < 2; n++) {
            const int row = group + 8 * r, query_x = x + (row >> 2);
            if (y + i < height && query_x < width) {
              const int64_t at = position(tile.image, y + i, query_x, height, width);
              *reinterpret_cast<uint32_t *>(queries_gradient + (at * HEADS + (row & 3)) * K +
                                            8 * n + 2 * member) =
                  pack(sums[i][n][2 * r], sums[i][n][2 * r + 1]);
            }
          }
        }
      }
    }
  }
  wait_for_groups<0>();
}

#define QUERIES_KERNEL(NAME, ...)                                                              \
  KERNEL(__VA_ARGS__::THREADS)                                                                 \
  NAME(Source gradient, Source values, Embedding embedding, Target queries_gradient,           \
       int batch, int height, int width) {                                                     \
    SHARED_MEMORY;                                                                             \
    compute_queries_gradient<__VA_ARGS__>(shared, gradient, values, embedding,                 \
                                          queries_gradient, batch, height, width);             \
  }

// The gradient of the values ----------------------------------------------------------------------
//
// dV[m, :] = sum over r and h of a[m - r, h, r] G[m - r, h, :]. A warp has 8 x 8 positions m and 64
// channels. Its product has 8 rows times 2 columns of positions as rows, and contracts over 4
// queries x 4 heads. The scores are computed transposed, with E as the first operand.

// A tile of 8 x WIDTH positions: WARPS_X warps, each with 8 x 8, for each of SHARES shares of the
// rows of queries. One row of queries and gradient for each share is one of STAGES stages in shared
// memory: [x, h][64 channels] in chunks of 8 that are exchanged by row, then [x, h][k] in halves.
template <int V_, int WARPS_X_, int SHARES_, int STAGES_> struct ValuesTiling {
  static constexpr int V = V_, WARPS_X = WARPS_X_, SHARES = SHARES_, STAGES = STAGES_;
  static constexpr int HEIGHT = 8, WIDTH = 8 * WARPS_X, SLICES = V / 64;
  static constexpr int QUERIES = WIDTH + SCOPE + 1;  // of a row that see the tile
  static constexpr int THREADS = 32 * WARPS_X * SHARES;
  static constexpr int GRADIENT_BYTES = QUERIES * HEADS * 128, QUERY_BYTES = QUERIES * HEADS * 32;
  static constexpr int ROW_BYTES = GRADIENT_BYTES + QUERY_BYTES, STAGE_BYTES = SHARES * ROW_BYTES;
  // offsets dy from -7 to 29, since the positions have 8 rows, and one more pair of dx, of zeros
  static constexpr int ROWS = SCOPE + 14, EMBEDDING_BYTES = (PAIRS + 1) * ROWS * 64;
  static constexpr int SHARED_BYTES = STAGES * STAGE_BYTES + EMBEDDING_BYTES;
};

// Begins copies of a row of queries and of the gradient of their outputs; zeros outside of the map.
template <class S>
DEVICE void load_queries(uint32_t to, Source gradient, Source queries, int image, int y,
                         int first_x, int channel, int height, int width) {
#pragma unroll 4
  for (int i = thread_index(); i < S::QUERIES * 32; i += S::THREADS) {
    const int chunk = i & 7, row = i >> 3, x = first_x + (row >> 2);
    const bool is_there = x >= 0 && x < width;
    const int64_t at = position(image, y, x, height, width);
    const uint16_t *from = gradient + (at * HEADS + (row & 3)) * S::V + channel + chunk * 8;
    copy_16_bytes(to + row * 128 + ((chunk ^ (row & 7)) << 4), is_there ? from : gradient,
                  is_there);
  }
#pragma unroll 2
  for (int i = thread_index(); i < S::QUERIES * 8; i += S::THREADS) {
    const int chunk = i & 1, row = i >> 1, x = first_x + (row >> 2);
    const bool is_there = x >= 0 && x < width;
    const int64_t at = position(image, y, x, height, width);
    const uint16_t *from = queries + (at * HEADS + (row & 3)) * K + chunk * 8;
    copy_16_bytes(to + S::GRADIENT_BYTES + row * 32 + ((chunk ^ (row >> 2 & 1)) << 4),
                  is_there ? from : queries, is_there);
  }
}

// As lay_out_for_output, with the offsets dy from -7 on.
template <class S> DEVICE void lay_out_for_values(uint32_t *laid_out, Embedding embedding) {
#pragma unroll 4
  for (int i = thread_index(); i < S::EMBEDDING_BYTES / 4; i += S::THREADS) {
    const int word = i & 3, member = i >> 2 & 3, dy = (i >> 4) % S::ROWS - 7;
    const int dx = (i >> 4) / S::ROWS * 2 + (word >> 1), k = 2 * member + 8 * (word & 1);
    const bool is_inside = dy >= 0 && dy < SCOPE && dx < SCOPE;
    const int at = embedding_index(k, dy, dx, is_inside);
    const float low = embedding[at], high = embedding[at + (is_inside ? SCOPE * SCOPE : 0)];
    laid_out[i] = is_inside ? pack(low, high) : 0u;
  }
}

// Adds what one group of 4 queries brings to the pairs [FIRST, END) of columns of positions.
// `q` has rows k and columns (x, h); `g` rows (x, h) and columns of channels. Members 0 and 1 of a
// group have the queries x and x + 2 of a position's columns, and members 2 and 3, which are late,
// those whose offset dx is one less.
template <class S, int FIRST, int END>
DEVICE void add_group(float (&sums)[4][8][4], const uint32_t (&q)[4], const uint32_t (&g)[4][4],
                      const uint4 *e, int quad, bool is_late) {
  // Packed scores of the queries 0, 1 for this pair of columns, and of 2, 3 for the pairs before
  uint32_t low = 0u, high = 0u, low1 = 0u, high1 = 0u, high2 = 0u;
#pragma unroll
  for (int p = FIRST - 2; p < END; p++) {
    uint32_t pair = 11 - 2 * quad + p;  // of dx
    if (pair > 12u) pair = 12u;         // there are zeros
    const uint4 e_words = e[pair * (S::ROWS * 4)];
    const uint32_t before = high;
    if (p > FIRST - 2) {
      float c[4] = {0.f, 0.f, 0.f, 0.f};
      multiply_add(c, e_words.x, e_words.z, e_words.y, e_words.w, q[0], q[1]);
      low = pack(c[0], c[1]);
      high = pack(c[2], c[3]);
    }
    if (p >= FIRST) {
      const int m = p < 0 ? 0 : p;
      const uint32_t a0 = is_late ? before : low, a1 = is_late ? low : high;
      const uint32_t a2 = is_late ? high2 : low1, a3 = is_late ? low1 : high1;
#pragma unroll
      for (int n = 0; n < 4; n++) {
        multiply_add(sums[m][2 * n], a0, a1, a2, a3, g[n][0], g[n][1]);
        multiply_add(sums[m][2 * n + 1], a0, a1, a2, a3, g[n][2], g[n][3]);
      }
    }
    high2 = high1;
    if (p < END - 1) {
      float c[4] = {0.f, 0.f, 0.f, 0.f};
      multiply_add(c, e_words.x, e_words.z, e_words.y, e_words.w, q[2], q[3]);
      low1 = pack(c[0], c[1]);
      high1 = pack(c[2], c[3]);
    }
  }
}

template <class S>
DEVICE void compute_values_gradient(uint8_t *shared, Source gradient, Source queries,
                                    Embedding embedding, Target values_gradient, int batch,
                                    int height, int width) {
  const int lane = thread_index() & 31, warp = thread_index() >> 5;
  const int group = lane >> 2, member = lane & 3;
  const int warp_x = warp % S::WARPS_X, share = warp / S::WARPS_X;
  const bool is_late = member >= 2;
  const int columns = (width + S::WIDTH - 1) / S::WIDTH, rows = (height + 7) / 8;
  int index = program_index();
  const int channel = index % S::SLICES * 64;
  index /= S::SLICES;
  const int tile_x = index % columns * S::WIDTH;
  index /= columns;
  const int tile_y = index % rows * 8, image = index / rows;
  const uint32_t stages = shared_address(shared);
  // the rows tile_y - RADIUS + [first, end) of queries that see the tile are on the map
  const int first = tile_y < RADIUS ? RADIUS - tile_y : 0;
  const int end = height - tile_y + RADIUS < 30 ? height - tile_y + RADIUS : 30;
  const int steps = (end - first + S::SHARES - 1) / S::SHARES;
  auto load = [&](int step) {
#pragma unroll 1
    for (int k = 0; k < S::SHARES; k++) {
      const int row = first + step * S::SHARES + k;
      if (row < end)
        load_queries<S>(stages + step % S::STAGES * S::STAGE_BYTES + k * S::ROW_BYTES, gradient,
                        queries, image, tile_y - RADIUS + row, tile_x - RADIUS, channel, height,
                        width);
    }
    close_group();
  };
  load(0);
  uint8_t *behind = shared + S::STAGES * S::STAGE_BYTES;
  lay_out_for_values<S>(reinterpret_cast<uint32_t *>(behind), embedding);
  const uint4 *laid_out = reinterpret_cast<const uint4 *>(behind);
  float sums[4][8][4];  // pairs of columns of positions; of each, rows Y and Y of the next column
#pragma unroll
  for (int m = 0; m < 4; m++) {
#pragma unroll
    for (int n = 0; n < 8; n++) {
#pragma unroll
      for (int r = 0; r < 4; r++) sums[m][n][r] = 0.f;
    }
  }
  // ldmatrix, of the gradient's rows (x, h): 16 rows, an even and an odd chunk
  const int gradient_row = warp_x * 32 + (lane & 15);
  const int gradient_swizzle = (gradient_row & 7) ^ (lane >> 4);
  const uint32_t gradient_at = gradient_row * 128;
  // and of the queries' rows (x, h): rows 0 to 7 with k 0 to 7 and 8 to 15, then rows 8 to 15
  const int query_row = warp_x * 32 + (lane & 7) + (lane >> 4) * 8;
  const uint32_t query_at = S::GRADIENT_BYTES + query_row * 32 +
                            (((lane >> 3 & 1) ^ (query_row >> 2 & 1)) << 4);
  const int x = tile_x + 8 * warp_x;
  const bool is_on_map = x < width;
#pragma unroll 1
  for (int step = 0; step < steps; step++) {
    if (S::STAGES == 1 && step > 0) {
      barrier();  // nobody reads the rows of the step before any more
      load(step);
    }
    wait_for_groups<0>();
    barrier();
    if (S::STAGES == 2 && step + 1 < steps) load(step + 1);
    const int row = first + step * S::SHARES + share;
    if (row >= end || !is_on_map) continue;
    const uint32_t base = stages + step % S::STAGES * S::STAGE_BYTES + share * S::ROW_BYTES;
    const uint4 *e = laid_out + (29 - row) * 4 + lane;
    // the groups of 4 queries that are on the map
    const int first_quad = x >= 8 ? 0 : (11 - x) >> 2, quads = (width + RADIUS - x + 3) >> 2;
    const int end_quad = quads < 8 ? quads : 8;
    uint32_t q[4], g[4][4];
    auto fetch = [&](int quad) {
      load_matrices(q, base + query_at + quad * 512);
#pragma unroll
      for (int n = 0; n < 4; n++)
        load_transposed(g[n],
                        base + gradient_at + quad * 2048 + (((2 * n) ^ gradient_swizzle) << 4));
    };
    fetch(first_quad);
#pragma unroll 1
    for (int quad = first_quad; quad < end_quad; quad++) {
      // the first group and the last see some of the columns only
      if (quad == 0) {
        add_group<S, 0, 2>(sums, q, g, e, quad, is_late);
      } else if (quad < 7) {
        add_group<S, 0, 4>(sums, q, g, e, quad, is_late);
      } else {
        add_group<S, 3, 4>(sums, q, g, e, quad, is_late);
      }
      fetch(quad < 7 ? quad + 1 : 7);
    }
  }
  wait_for_groups<0>();
  // The first share adds the sums of the others, one after the other.
  float *others = reinterpret_cast<float *>(shared);
#pragma unroll 1
  for (int k = 1; k < S::SHARES; k++) {
    barrier();
    if (share == k) {
#pragma unroll
      for (int m = 0; m < 4; m++) {
#pragma unroll
        for (int n = 0; n < 8; n++) {
#pragma unroll
          for (int r = 0; r < 4; r++)
            others[(warp_x * 128 + (m * 8 + n) * 4 + r) * 32 + lane] = sums[m][n][r];
        }
      }
    }
    barrier();
    if (share == 0) {
#pragma unroll
      for (int m = 0; m < 4; m++) {
#pragma unroll
        for (int n = 0; n < 8; n++) {
#pragma unroll
          for (int r = 0; r < 4; r++)
            sums[m][n][r] += others[(warp_x * 128 + (m * 8 + n) * 4 + r) * 32 + lane];
        }
      }
    }
  }
  if (share != 0) return;
#pragma unroll
  for (int m = 0; m < 4; m++) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
#pragma unroll
      for (int n = 0; n < 2; n++) {
        uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; j++)
          words[j] = pack(sums[m][4 * n + j][2 * r], sums[m][4 * n + j][2 * r + 1]);
        transpose_words(words, member);
        const int to_y = tile_y + group, to_x = x + 2 * m + r;
        if (to_y < height && to_x < width) {
          const int64_t at = position(image, to_y, to_x, height, width);
          store_words(values_gradient + at * S::V + channel + n * 32 + member * 8, words);
        }
      }
    }
  }
}

#define VALUES_KERNEL(NAME, ...)                                                               \
  KERNEL(__VA_ARGS__::THREADS)                                                                 \
  NAME(Source gradient, Source queries, Embedding embedding, Target values_gradient,           \
       int batch, int height, int width) {                                                     \
    SHARED_MEMORY;                                                                             \
    compute_values_gradient<__VA_ARGS__>(shared, gradient, queries, embedding,                 \
                                         values_gradient, batch, height, width);               \
  }

// The gradient of the embedding -------------------------------------------------------------------
//
// dE^T = dA^T Q, summed over all queries. dA^T has 8 rows Y times 2 columns X of the window as
// rows, and (x, h) as columns. The sums of a program stay in registers over all its tiles.

// A tile of 4 x 8 queries for 12 warps: 3 groups of 8 offsets dy, 2 halves of the offsets dx, and 2
// pairs of rows of queries. Its window is in one of BUFFERS places.
template <int V_, int BUFFERS_> struct EmbeddingTiling {
  static constexpr int V = V_, BUFFERS = BUFFERS_, CHANNELS = 64, SLICES = V / CHANNELS;
  static constexpr int HEIGHT = 4, WIDTH = 8, CHUNKS = CHANNELS / 8, THREADS = 384;
  static constexpr int WINDOW_HEIGHT = HEIGHT + SCOPE - 1, WINDOW_WIDTH = WIDTH + SCOPE - 1;
  static constexpr int ROW_BYTES = WINDOW_WIDTH * CHANNELS * 2;
  // The last group of dy reads one row more, for an offset dy of 23, whose sums nobody needs. Where
  // there is one buffer, it reads the last row twice.
  static constexpr int LAST_ROW = BUFFERS == 1 ? WINDOW_HEIGHT - 1 : WINDOW_HEIGHT;
  static constexpr int WINDOW_BYTES = (LAST_ROW + 1) * ROW_BYTES;
  // the last row of a window is read two columns further, for sums that nobody needs
  static constexpr int SHARED_BYTES = BUFFERS * WINDOW_BYTES + 512;
  static DEVICE int swizzle(int y) { return y & 7; }
};

constexpr int PARTIAL_SUMS = 2304;  // float4 of a program: 6 kinds of warps, 6 pairs, 2, 32 lanes

template <class S>
DEVICE void compute_embedding_gradient(uint8_t *shared, Source gradient, Source queries,
                                       Source values, float4 *__restrict__ partial_sums,
                                       int batch, int height, int width) {
  const int lane = thread_index() & 31, warp = thread_index() >> 5;
  const int group = lane >> 2, member = lane & 3;
  const int kind = warp % 6, pair_of_rows = warp / 6, eight = kind % 3, half = kind / 3;
  const bool is_late = member >= 2;
  const int columns = (width + S::WIDTH - 1) / S::WIDTH;
  const int rows = (height + S::HEIGHT - 1) / S::HEIGHT;
  const int tiles = batch * columns * rows * S::SLICES;
  const uint32_t windows = shared_address(shared);
  float sums[6][2][4];  // pairs of dx; rows dy of both, columns k
#pragma unroll
  for (int d = 0; d < 6; d++) {
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
      for (int r = 0; r < 4; r++) sums[d][n][r] = 0.f;
    }
  }
  int index = program_index(), buffer = 0;
  if (index < tiles)
    load_rows<S>(windows, values, tile_at<S>(index, columns, rows), height, width, 0,
                 S::WINDOW_HEIGHT);
  close_group();
#pragma unroll 1
  for (; index < tiles; index += program_count(), buffer ^= 1) {
    const Tile tile = tile_at<S>(index, columns, rows);
    if (S::BUFFERS == 1 && index != program_index()) {
      barrier();  // nobody reads the window of the tile before any more
      load_rows<S>(windows, values, tile, height, width, 0, S::WINDOW_HEIGHT);
      close_group();
    }
    wait_for_groups<0>();
    barrier();  // this window is there, and nobody reads the other one any more
    if (S::BUFFERS == 2) {
      if (index + program_count() < tiles)
        load_rows<S>(windows + (buffer ^ 1) * S::WINDOW_BYTES, values,
                     tile_at<S>(index + program_count(), columns, rows), height, width, 0,
                     S::WINDOW_HEIGHT);
      close_group();
    }
#pragma unroll 1
    for (int i = 0; i < 2; i++) {
      const int row_of_tile = 2 * pair_of_rows + i, y = tile.y + row_of_tile;
      const int top = y - RADIUS + 8 * eight;
      if (y >= height || top + 7 < 0 || top >= height) continue;
      // Two quads of queries: columns (x, h) of the first product, rows (x, h) of the second
      uint32_t g[2][2][4][2], q[2][2][2];
#pragma unroll
      for (int m = 0; m < 2; m++) {
#pragma unroll
        for (int n = 0; n < 2; n++) {
          const int x = tile.x + 4 * m + 2 * n + (group >> 2);
          const bool is_there = x < width;
          const int64_t at = position(tile.image, y, x, height, width);
          const uint16_t *from =
              gradient + (at * HEADS + (group & 3)) * S::V + tile.channel + 2 * member;
#pragma unroll
          for (int s = 0; s < 4; s++) {
            g[m][n][s][0] = is_there ? word_at(from + 16 * s) : 0u;
            g[m][n][s][1] = is_there ? word_at(from + 16 * s + 8) : 0u;
          }
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const int row = 2 * member + 8 * r, x = tile.x + 4 * m + (row >> 2);
          const bool is_there = x < width;
          const int64_t at = position(tile.image, y, x, height, width);
          const uint16_t *from = queries + (at * HEADS + (row & 3)) * K + group;
#pragma unroll
          for (int n = 0; n < 2; n++) {
            const uint32_t low = is_there ? from[8 * n] : 0u;
            const uint32_t high = is_there ? from[8 * n + K] : 0u;
            q[m][n][r] = low | high << 16;
          }
        }
      }
      // ldmatrix: columns X and X + 1, and the even and odd chunk of 16 channels
      const int window_row = row_of_tile + 8 * eight + (lane & 7);
      const int row = window_row < S::LAST_ROW ? window_row : S::LAST_ROW;
      const int swizzle = S::swizzle(row) ^ (lane >> 4);
      const uint32_t matrix = windows + buffer % S::BUFFERS * S::WINDOW_BYTES +
                              row * S::ROW_BYTES + (12 * half + (lane >> 3 & 1)) * 128;
      uint32_t matrices[4];
#pragma unroll
      for (int s = 0; s < 4; s++) matrices[s] = matrix + (((2 * s) ^ swizzle) << 4);
      // Packed dA^T of the columns 2 p and 2 p + 1, by age: of the queries 0, 1 and of 2, 3
      uint32_t low01[2][3], high01[2][3], low23[2][2], high23[2][2];
#pragma unroll
      for (int m = 0; m < 2; m++) {
#pragma unroll
        for (int j = 0; j < 3; j++) {
          low01[m][j] = high01[m][j] = 0u;
          low23[m][j & 1] = high23[m][j & 1] = 0u;
        }
      }
#pragma unroll
      for (int p = 0; p < 10; p++) {
        float c01[2][4], c23[2][4];
#pragma unroll
        for (int m = 0; m < 2; m++) {
#pragma unroll
          for (int r = 0; r < 4; r++) c01[m][r] = c23[m][r] = 0.f;
        }
        // A pair of columns outside of the map brings nothing. Here alone a branch saves time.
        const int x = tile.x - RADIUS + 12 * half + 2 * p;
        if (x + 1 >= 0 && x < width) {
#pragma unroll
          for (int s = 0; s < 4; s++) {
            uint32_t v[4];
            load_matrices(v, matrices[s] + p * 256);
#pragma unroll
            for (int m = 0; m < 2; m++) {
              const int d = p - 2 * m;
              if (d >= 0 && d < 7)
                multiply_add(c01[m], v[0], v[1], v[2], v[3], g[m][0][s][0], g[m][0][s][1]);
              if (d >= 1 && d < 8)
                multiply_add(c23[m], v[0], v[1], v[2], v[3], g[m][1][s][0], g[m][1][s][1]);
            }
          }
        }
#pragma unroll
        for (int m = 0; m < 2; m++) {
          const int d = p - 2 * m;
          if (d < 0 || d > 7) continue;
          low01[m][2] = low01[m][1];
          low01[m][1] = low01[m][0];
          high01[m][2] = high01[m][1];
          high01[m][1] = high01[m][0];
          low23[m][1] = low23[m][0];
          high23[m][1] = high23[m][0];
          low01[m][0] = d < 7 ? pack(c01[m][0], c01[m][1]) : 0u;
          high01[m][0] = d < 7 ? pack(c01[m][2], c01[m][3]) : 0u;
          low23[m][0] = d >= 1 ? pack(c23[m][0], c23[m][1]) : 0u;
          high23[m][0] = d >= 1 ? pack(c23[m][2], c23[m][3]) : 0u;
          if (d >= 2) {
            const uint32_t a0 = is_late ? high01[m][2] : low01[m][2];
            const uint32_t a1 = is_late ? low01[m][1] : high01[m][2];
            const uint32_t a2 = is_late ? high23[m][1] : low23[m][1];
            const uint32_t a3 = is_late ? low23[m][0] : high23[m][1];
            multiply_add(sums[d - 2][0], a0, a1, a2, a3, q[m][0][0], q[m][0][1]);
            multiply_add(sums[d - 2][1], a0, a1, a2, a3, q[m][1][0], q[m][1][1]);
          }
        }
      }
    }
  }
  wait_for_groups<0>();
  barrier();
  float4 *others = reinterpret_cast<float4 *>(shared);
  if (pair_of_rows == 1) {
#pragma unroll
    for (int d = 0; d < 6; d++) {
#pragma unroll
      for (int n = 0; n < 2; n++) {
        const float(&c)[4] = sums[d][n];
        others[((kind * 6 + d) * 2 + n) * 32 + lane] = make_float4(c[0], c[1], c[2], c[3]);
      }
    }
  }
  barrier();
  if (pair_of_rows == 0) {
#pragma unroll
    for (int d = 0; d < 6; d++) {
#pragma unroll
      for (int n = 0; n < 2; n++) {
        const int i = ((kind * 6 + d) * 2 + n) * 32 + lane;
        const float(&c)[4] = sums[d][n];
        const float4 other = others[i];
        partial_sums[(int64_t)program_index() * PARTIAL_SUMS + i] =
            make_float4(c[0] + other.x, c[1] + other.y, c[2] + other.z, c[3] + other.w);
      }
    }
  }
}

#define EMBEDDING_KERNEL(NAME, ...)                                                            \
  KERNEL(__VA_ARGS__::THREADS)                                                                 \
  NAME(Source gradient, Source queries, Source values, float *__restrict__ partial_sums,       \
       int batch, int height, int width) {                                                     \
    SHARED_MEMORY;                                                                             \
    compute_embedding_gradient<__VA_ARGS__>(shared, gradient, queries, values,                 \
                                            reinterpret_cast<float4 *>(partial_sums), batch,   \
                                            height, width);                                    \
  }

// 72 programs of 256 threads, each for 32 float4 of the partial sums: 8 slices of the programs,
// then the sum of the slices, to the embedding's gradient [16, 23, 23].
DEVICE void add_partial_sums(uint8_t *shared, const float4 *__restrict__ partial_sums,
                             float *__restrict__ embedding_gradient, int programs) {
  float4 *others = reinterpret_cast<float4 *>(shared);
  const int lane = thread_index() & 31, slice = thread_index() >> 5;
  const int n = program_index() & 1, pair = (program_index() >> 1) % 6, kind = program_index() / 12;
  const int eight = kind % 3, half = kind / 3;
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 8
  for (int p = slice; p < programs; p += 8) {
    const float4 other = partial_sums[(int64_t)p * PARTIAL_SUMS + program_index() * 32 + lane];
    sum.x += other.x;
    sum.y += other.y;
    sum.z += other.z;
    sum.w += other.w;
  }
  others[thread_index()] = sum;
  barrier();
  if (slice == 0) {
    for (int i = 1; i < 8; i++) {
      const float4 other = others[i * 32 + lane];
      sum.x += other.x;
      sum.y += other.y;
      sum.z += other.z;
      sum.w += other.w;
    }
    const int dy = 8 * eight + (lane >> 2), dx = 12 * half + 2 * pair, k = 8 * n + 2 * (lane & 3);
    float *to = embedding_gradient + (k * SCOPE + dy) * SCOPE + dx;
    if (dy < SCOPE) {
      to[0] = sum.x;
      to[SCOPE * SCOPE] = sum.y;
      if (dx + 1 < SCOPE) {
        to[1] = sum.z;
        to[SCOPE * SCOPE + 1] = sum.w;
      }
    }
  }
}

#define SUM_KERNEL(NAME)                                                                        \
  KERNEL(256)                                                                                   \
  NAME(const float *__restrict__ partial_sums, float *__restrict__ embedding_gradient,          \
       int programs) {                                                                          \
    SHARED_MEMORY;                                                                              \
    add_partial_sums(shared, reinterpret_cast<const float4 *>(partial_sums),                    \
                     embedding_gradient, programs);                                             \
  }
