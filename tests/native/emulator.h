// Runs the kernels of position_output.cu on a CPU, by the definitions of PTX.
//
// Each thread of a program is a fiber of its own. It goes on until an instruction needs the others:
// those of its warp for mma, ldmatrix and shuffles, all of the program at a barrier. A fiber begins
// by ucontext, which asks the system each time, and afterwards is left and entered by jumps.
// Programs run one after the other. Copies to shared memory land when they begin, or as late as they may: when
// the thread waits for their group. Until then NaN lies there, as it does in all shared memory that
// was not written. Programs are compiled with EMULATED, and FLOAT16 for float16. There is
// no <cmath> and no <functional>, because to read these takes as long as to compile a kernel.

#pragma once

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include <setjmp.h>
#include <ucontext.h>

struct uint4 {
  uint32_t x, y, z, w;
};
struct float4 {
  float x, y, z, w;
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace emulator {

constexpr int kWarp = 32, kWords = 12;  // the most words that a lane gives to an instruction
constexpr size_t kStack = 1 << 17, kMostThreads = 1024;

struct Copy {
  uint32_t to;
  uint8_t bytes[16];
};

struct Fiber {
  ucontext_t beginning;
  jmp_buf place;  // where it goes on
  bool is_begun = false, is_done = false;
  long exchanges = 0;
  std::vector<Copy> open;                 // copies that were begun
  std::vector<std::vector<Copy>> groups;  // of copies under way
};

// What the lanes of a warp give to an instruction, and to the next one, which some reach earlier.
struct Warp {
  uint32_t words[2][kWarp][kWords];
  float products[2][16][8];
  int arrived[2] = {0, 0};
};

// A kernel with the addresses of its arguments' values, as the driver is given them.
struct Launch {
  void *kernel;
  int count;
  void **arguments;

  void *pointer(int i) const { return *(void **)arguments[i]; }
  int number(int i) const { return *(int *)arguments[i]; }

  // Four or five pointers and three sizes, or two pointers and a number for the last sum of the
  // embedding's gradient.
  void run() const {
    using Of8 = void (*)(void *, void *, void *, void *, void *, int, int, int);
    using Of7 = void (*)(void *, void *, void *, void *, int, int, int);
    using Of3 = void (*)(void *, void *, int);
    void *const a = pointer(0), *const b = pointer(1);
    if (count == 8) {
      ((Of8)kernel)(a, b, pointer(2), pointer(3), pointer(4), number(5), number(6), number(7));
    } else if (count == 7) {
      ((Of7)kernel)(a, b, pointer(2), pointer(3), number(4), number(5), number(6));
    } else {
      ((Of3)kernel)(a, b, number(2));
    }
  }
};

struct Machine {
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  jmp_buf place;  // which a fiber goes back to
  Launch launch;
  int thread, program, programs, threads;
  long arrived;  // at barriers
  bool is_late;
  uint32_t shared_bytes;
  long conflicts;  // of banks, in ldmatrix
  char fault[200];
};

extern Machine machine;
alignas(1024) extern uint8_t shared_memory[256 * 1024];
extern char stacks[kMostThreads * kStack];  // of the fibers

inline void fault(const char *what, long number) {
  if (!machine.fault[0])
    snprintf(machine.fault, sizeof machine.fault, "%s (%ld)", what, number);
}

inline Fiber &fiber() { return machine.fibers[machine.thread]; }
inline void let_others_run() {
  if (!_setjmp(fiber().place)) _longjmp(machine.place, 1);
}

// 16-bit numbers ----------------------------------------------------------------------------------

inline uint32_t bits_of(float number) {
  uint32_t bits;
  memcpy(&bits, &number, 4);
  return bits;
}

#ifdef FLOAT16
inline float to_float(uint16_t half) {
  const int exponent = half >> 10 & 31, fraction = half & 1023;
  const float sign = half & 0x8000 ? -1.f : 1.f;
  if (exponent == 31) return fraction ? __builtin_nanf("") : sign * __builtin_inff();
  return sign * (exponent ? __builtin_ldexpf(1024.f + fraction, exponent - 25)
                          : __builtin_ldexpf((float)fraction, -24));
}

// To the nearest, and of two equally near ones to the even one.
inline uint16_t rounded(float number) {
  const uint16_t sign = bits_of(number) >> 16 & 0x8000;
  const float size = __builtin_fabsf(number);
  if (__builtin_isnan(number)) return 0x7fff;
  if (size >= 65520.f) return sign | 0x7c00;
  const int exponent = size < __builtin_ldexpf(1.f, -14) ? -14 : __builtin_ilogbf(size);
  const int steps = (int)__builtin_nearbyintf(__builtin_ldexpf(size, 10 - exponent));
  return sign | (uint16_t)(steps + ((exponent + 14) << 10));  // 1024 steps are the next exponent
}
#else
inline float to_float(uint16_t half) {
  const uint32_t bits = (uint32_t)half << 16;
  float number;
  memcpy(&number, &bits, 4);
  return number;
}

inline uint16_t rounded(float number) {
  const uint32_t bits = bits_of(number);
  if (__builtin_isnan(number)) return 0x7fff;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
#endif

inline float as_float(uint32_t bits) {
  float number;
  memcpy(&number, &bits, 4);
  return number;
}

// Instructions ------------------------------------------------------------------------------------

struct Nothing {
  void operator()(Warp &, int) const {}
};

// Every lane gives its words, and the last one computes what all need of them. Returns which of the
// warp's two places has both.
template <class Whole = Nothing>
inline int exchange_words(Warp &warp, const uint32_t *words, int count, Whole whole = {}) {
  const int turn = fiber().exchanges++ & 1;
  if (warp.arrived[turn] == kWarp) warp.arrived[turn] = 0;
  memcpy(warp.words[turn][machine.thread % kWarp], words, 4 * count);
  if (++warp.arrived[turn] == kWarp) whole(warp, turn);
  while (warp.arrived[turn] != kWarp) let_others_run();
  return turn;
}

inline Warp &warp() { return machine.warps[machine.thread / kWarp]; }

// The words that every lane gave.
inline uint32_t (*gather(const uint32_t *words, int count))[kWords] {
  return warp().words[exchange_words(warp(), words, count)];
}

// a [16, 16] times b [16, 8], of which the lanes gave the words by PTX's "Matrix Fragments for
// mma.m16n8k16", as floats.
struct Multiply {
  void operator()(Warp &warp, int turn) const {
    float a[16][16], b[16][8];
    for (int lane = 0; lane < kWarp; ++lane) {
      const int group = lane / 4, member = lane % 4;
      const uint32_t *given = warp.words[turn][lane];
      for (int i = 0; i < 4; ++i) {
        float *row = &a[group + 8 * (i % 2)][2 * member + 8 * (i / 2)];
        memcpy(row, given + 2 * i, 8);
      }
      for (int i = 0; i < 4; ++i) {
        memcpy(&b[2 * member + i % 2 + 8 * (i / 2)][group], given + 8 + i, 4);
      }
    }
    memset(warp.products[turn], 0, sizeof warp.products[turn]);
    for (int row = 0; row < 16; ++row) {
      for (int k = 0; k < 16; ++k) {
        for (int column = 0; column < 8; ++column)
          warp.products[turn][row][column] += a[row][k] * b[k][column];
      }
    }
  }
};

inline bool is_shared(uint32_t at, const char *what) {
  if (at % 16 == 0 && at + 16 <= machine.shared_bytes) return true;
  fault(what, at);
  return false;
}

inline void load(uint32_t (&m)[4], uint32_t address, bool is_transposed) {
  const bool is_good = is_shared(address, "ldmatrix beyond shared memory, or not aligned");
  const uint32_t at = is_good ? address : 0;
  const auto rows = gather(&at, 1);
  const int lane = machine.thread % kWarp, group = lane / 4, member = lane % 4;
  for (int i = 0; i < 4; ++i) {
    uint16_t pair[2];
    for (int which = 0; which < 2; ++which) {
      const int near = 2 * member + which;
      const int row = is_transposed ? near : group, column = is_transposed ? group : near;
      memcpy(&pair[which], shared_memory + rows[i * 8 + row][0] + column * 2, 2);
    }
    m[i] = pair[0] | (uint32_t)pair[1] << 16;
  }
  if (lane) return;
  for (int i = 0; i < 4; ++i) {  // the 8 rows of a matrix should lie in different groups of banks
    int seen = 0;
    for (int row = 0; row < 8; ++row) {
      const int banks = 1 << (rows[i * 8 + row][0] / 16 % 8);
      machine.conflicts += (seen & banks) != 0;
      seen |= banks;
    }
  }
}

inline void begin(int program) {
  machine.program = program;
  machine.arrived = 0;
  machine.fibers = std::vector<Fiber>(machine.threads);
  machine.warps = std::vector<Warp>((machine.threads + kWarp - 1) / kWarp);
  memset(shared_memory, 0xff, sizeof shared_memory);
  for (int thread = 0; thread < machine.threads; ++thread) {
    ucontext_t &beginning = machine.fibers[thread].beginning;
    getcontext(&beginning);
    beginning.uc_stack.ss_sp = stacks + thread * kStack;
    beginning.uc_stack.ss_size = kStack;
    makecontext(
        &beginning,
        +[]() {
          machine.launch.run();
          fiber().is_done = true;
          _longjmp(machine.place, 1);
        },
        0);
  }
}

// Until the fiber waits for others, or is done.
inline void go_on(Fiber &one) {
  if (_setjmp(machine.place)) return;
  if (one.is_begun) _longjmp(one.place, 1);
  one.is_begun = true;
  setcontext(&one.beginning);
}

inline void run() {
  for (int program = 0; program < machine.programs; ++program) {
    begin(program);
    for (bool any = true; any;) {
      any = false;
      for (machine.thread = 0; machine.thread < machine.threads; ++machine.thread) {
        if (fiber().is_done) continue;
        any = true;
        go_on(fiber());
      }
    }
    for (Fiber &one : machine.fibers) {
      if (!one.open.empty() || !one.groups.empty()) fault("copies that nobody waits for", program);
    }
  }
}

}  // namespace emulator

// What position_output.cu calls -------------------------------------------------------------------

#define DEVICE inline
#define __restrict__
#define KERNEL(...) extern "C" void
#define SHARED_MEMORY uint8_t *shared = emulator::shared_memory

DEVICE int thread_index() { return emulator::machine.thread; }
DEVICE int program_index() { return emulator::machine.program; }
DEVICE int program_count() { return emulator::machine.programs; }

DEVICE void barrier() {
  auto &machine = emulator::machine;
  const long turn = machine.arrived++ / machine.threads;
  while (machine.arrived / machine.threads == turn) emulator::let_others_run();
}

DEVICE uint32_t shared_address(const void *p) {
  return (uint32_t)((const uint8_t *)p - emulator::shared_memory);
}

DEVICE uint32_t pack(float low, float high) {
  return emulator::rounded(low) | (uint32_t)emulator::rounded(high) << 16;
}

DEVICE void multiply_add(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                         uint32_t b0, uint32_t b1) {
  const uint32_t words[] = {a0, a1, a2, a3, b0, b1};
  uint32_t mine[12];  // as floats
  for (int i = 0; i < 6; ++i) {
    mine[2 * i] = emulator::bits_of(emulator::to_float(words[i]));
    mine[2 * i + 1] = emulator::bits_of(emulator::to_float(words[i] >> 16));
  }
  auto &warp = emulator::warp();
  const auto &products =
      warp.products[emulator::exchange_words(warp, mine, 12, emulator::Multiply())];
  const int lane = thread_index() % emulator::kWarp, group = lane / 4, member = lane % 4;
  for (int i = 0; i < 4; ++i) c[i] += products[group + 8 * (i / 2)][2 * member + i % 2];
}

DEVICE void load_matrices(uint32_t (&m)[4], uint32_t address) {
  emulator::load(m, address, false);
}
DEVICE void load_transposed(uint32_t (&m)[4], uint32_t address) {
  emulator::load(m, address, true);
}

DEVICE void copy_16_bytes(uint32_t to, const void *from, bool is_there) {
  if ((uintptr_t)from % 16) emulator::fault("cp.async from where it is not aligned", to);
  if (!emulator::is_shared(to, "cp.async beyond shared memory, or not aligned")) return;
  emulator::Copy copy = {to, {}};
  if (is_there) memcpy(copy.bytes, from, 16);
  memset(emulator::shared_memory + to, 0xff, 16);
  if (!emulator::machine.is_late) memcpy(emulator::shared_memory + to, copy.bytes, 16);
  emulator::fiber().open.push_back(copy);
}

DEVICE void close_group() {
  emulator::fiber().groups.push_back(emulator::fiber().open);
  emulator::fiber().open.clear();
}

template <int PENDING> DEVICE void wait_for_groups() {
  auto &groups = emulator::fiber().groups;
  while ((int)groups.size() > PENDING) {
    if (emulator::machine.is_late) {
      for (const auto &copy : groups[0])
        memcpy(emulator::shared_memory + copy.to, copy.bytes, 16);
    }
    groups.erase(groups.begin());
  }
}

DEVICE uint32_t exchange(uint32_t word, int with) {
  return emulator::gather(&word, 1)[thread_index() % emulator::kWarp ^ with][0];
}

// What the tests call -----------------------------------------------------------------------------

emulator::Machine emulator::machine;
alignas(1024) uint8_t emulator::shared_memory[256 * 1024];
char emulator::stacks[kMostThreads * kStack];

// Returns a fault, or an empty text.
extern "C" const char *launch(void *kernel, int count, void **arguments, int programs, int threads,
                              int shared_bytes, int is_late) {
  auto &machine = emulator::machine;
  machine = emulator::Machine();
  machine.launch = {kernel, count, arguments};
  machine.programs = programs;
  machine.threads = threads;
  machine.shared_bytes = shared_bytes;
  machine.is_late = is_late;
  if (threads > (int)emulator::kMostThreads) {
    emulator::fault("too many threads", threads);
  } else {
    emulator::run();
  }
  return machine.fault;
}

extern "C" long bank_conflicts() { return emulator::machine.conflicts; }
