// The product of two matrices in registers, for the kernels beside it.

#pragma once

#include <type_traits>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#ifdef _OPENMP
#include <omp.h>
#else
static int omp_get_thread_num() { return 0; }
#endif

namespace {

inline long divided_up(long size, long by) { return (size + by - 1) / by; }

#ifdef __AVX512F__
constexpr int kBytes = 64;  // of a vector
constexpr int kMost = 4;    // vectors in a row of a block; a block of four rows fits 32 registers
#else
constexpr int kBytes = 32;
constexpr int kMost = 3;  // a block of four rows of 3 vectors fits 16 registers
#endif
template <typename T> constexpr int kLanes = kBytes / sizeof(T);

// The type of a sum of products of T. An int holds a pair of bfloat16: one instruction of
// AVX512-BF16 multiplies two pairs and adds both products to a float, which is one step.
template <typename T> using SumOf = std::conditional_t<std::is_same<T, int>::value, float, T>;

template <typename T, int lanes = kLanes<T>> struct Vector {
  // A vector has the alignment of a single number, because windows start at any number
  typedef T type __attribute__((vector_size(lanes * sizeof(T)), aligned(sizeof(T)), may_alias));
};
template <typename T> using Wide = typename Vector<T>::type;

// Keeps a vector in a register while several rows are multiplied by it. g++ by itself would load it
// for each row, and wait for the loads.
template <typename Vec, typename T>
inline __attribute__((always_inline)) Vec in_register(const T *from) {
  Vec vector = *(const Vec *)from;
#ifdef __AVX__
  asm("" : "+v"(vector));
#endif
  return vector;
}

template <typename Sum, typename T, typename Vec>
inline __attribute__((always_inline)) Sum added(Sum sum, T factor, Vec b) {
#ifdef __AVX512BF16__
  if constexpr (std::is_same<T, int>::value)
    return (Sum)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(factor), (__m512bh)b);
  else
#endif
    return sum + factor * b;
}

// C[R, columns] (+)= A[R, steps] B[steps, columns] for N vectors of columns, in registers. C is
// added at the end: a sum that starts with C is rounded to the last digit of C at every step.
template <int R, int N, typename T>
inline __attribute__((always_inline)) void block(
    long steps, const T *a, long a_row, long a_step, const T *b, long b_step, SumOf<T> *c,
    long c_row, bool add) {
  typedef Wide<T> Vec;
  typedef Wide<SumOf<T>> Sum;
  constexpr int lanes = kLanes<T>;
  Sum sum[R][N];
  for (int i = 0; i < R; ++i)
    for (int j = 0; j < N; ++j) sum[i][j] = Sum{};
  for (long s = 0; s < steps; ++s) {
    // Not an array, which g++ would write to the stack at every step
    const T *row = b + s * b_step;
    const Vec b0 = in_register<Vec>(row), b1 = N > 1 ? in_register<Vec>(row + lanes) : b0;
    const Vec b2 = N > 2 ? in_register<Vec>(row + 2 * lanes) : b0;
    const Vec b3 = N > 3 ? in_register<Vec>(row + 3 * lanes) : b0;
    for (int i = 0; i < R; ++i) {
      const T factor = a[i * a_row + s * a_step];
      sum[i][0] = added(sum[i][0], factor, b0);
      if (N > 1) sum[i][1] = added(sum[i][1], factor, b1);
      if (N > 2) sum[i][2] = added(sum[i][2], factor, b2);
      if (N > 3) sum[i][3] = added(sum[i][3], factor, b3);
    }
  }
  for (int i = 0; i < R; ++i)
    for (int j = 0; j < N; ++j) {
      Sum &result = *(Sum *)(c + i * c_row + j * lanes);
      result = add ? result + sum[i][j] : sum[i][j];
    }
}

// A block has eight rows if they have few vectors, and four otherwise, so that there are enough
// sums to keep the processor busy.
constexpr long rows_of_block(long vectors) { return vectors > kMost / 2 ? 4 : 8; }

#ifndef ROW_BLOCKS
#define ROW_BLOCKS inline
#endif
template <int R, int N, typename T>
ROW_BLOCKS void row_blocks(long rows, long steps, const T *a, long a_row, long a_step, const T *b,
                       long b_step, SumOf<T> *c, long c_row, bool add) {
  for (; rows >= R; rows -= R, a += R * a_row, c += R * c_row)
    block<R, N>(steps, a, a_row, a_step, b, b_step, c, c_row, add);
  if constexpr (R > 1)
    row_blocks<R / 2, N>(rows, steps, a, a_row, a_step, b, b_step, c, c_row, add);
}

// C[rows, columns] (+)= A[rows, steps] B[steps, columns]; columns fill whole vectors.
template <int N = kMost, typename T>
void multiply(long rows, long columns, long steps, const T *a, long a_row, long a_step, const T *b,
              long b_step, SumOf<T> *c, long c_row, bool add) {
  constexpr int some = N * kLanes<T>;
  for (; columns >= some; columns -= some, b += some, c += some)
    row_blocks<rows_of_block(N), N>(rows, steps, a, a_row, a_step, b, b_step, c, c_row, add);
  if constexpr (N > 1)
    multiply<N - 1>(rows, columns, steps, a, a_row, a_step, b, b_step, c, c_row, add);
}

}  // namespace
