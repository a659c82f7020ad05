// AVX-512 and VNNI by way of SIMDe, for CPUs that lack them: included before srt/csrc/kernels.cpp,
// it makes that file choose the code it would choose on a CPU that has them. EMULATE_VNNI adds
// VNNI; EMULATE_AVX_VNNI emulates VNNI for AVX2 alone, without AVX-512.
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>

#ifdef EMULATE_AVX_VNNI
#define __AVXVNNI__ 1
#define _mm256_dpbusd_avx_epi32 simde_mm256_dpbusd_epi32
#else
#define __AVX512F__ 1
#define __AVX512BW__ 1
#ifdef EMULATE_VNNI
#define __AVX512VNNI__ 1
#endif

// The instructions of ours that SIMDe does not know: the low byte of each 32-bit lane, and bytes
// to lanes.
typedef int32_t emulated_lanes __attribute__((vector_size(64)));
typedef int8_t emulated_bytes __attribute__((vector_size(16)));
static inline __m128i low_bytes(simde__m512i v) {
  return (__m128i)__builtin_convertvector((emulated_lanes)v, emulated_bytes);
}
static inline simde__m512i lanes_of_bytes(__m128i v) {
  return (simde__m512i)__builtin_convertvector((emulated_bytes)v, emulated_lanes);
}
#define _mm512_cvtepi32_epi8 low_bytes
#define _mm512_cvtepi8_epi32 lanes_of_bytes

// `asm("" : "+v"(x))` keeps x in a register, and 512 bits do not fit one here.
#define asm(...)
#endif
