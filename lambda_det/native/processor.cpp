// Whether this processor has the instructions that the library was compiled for. A wheel brings
// several libraries, and each is asked. x86-64-v3 and v4 have more instruction sets than are tested
// here; every processor with the tested ones has the others as well.
extern "C" int suits_this_processor() {
  int suits = 1;
#ifdef __AVX2__
  suits = suits && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
          __builtin_cpu_supports("bmi2");
#endif
#ifdef __AVX512F__
  suits = suits && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
          __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
          __builtin_cpu_supports("avx512vl");
#endif
#ifdef __AVX512BF16__
  suits = suits && __builtin_cpu_supports("avx512bf16");
#endif
  return suits;
}
