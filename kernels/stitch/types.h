// The element types of generated kernels, in both dialects. CO_CUDA is set
// where this is CUDA C++, also when that runs on the host under the emulation.
// bf16 and f16 are storage: they turn into float when read and are rounded to even when stored.

#ifdef CO_CUDA
#define CO_FN static __device__ __forceinline__
#define CO_MEMBER __device__ __forceinline__
#else
#define CO_FN static inline __attribute__((always_inline))
#define CO_MEMBER inline __attribute__((always_inline))
#endif

#ifdef __CUDACC_RTC__
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#define CO_INF __int_as_float(0x7f800000)
#define CO_NAN __int_as_float(0x7fc00000)
CO_FN uint32_t co_bits(float x) { return __float_as_uint(x); }
CO_FN float co_float(uint32_t bits) { return __uint_as_float(bits); }
#else
#include <math.h>
#include <stdint.h>
#include <string.h>
#define CO_INF __builtin_inff()
#define CO_NAN __builtin_nanf("")
CO_FN uint32_t co_bits(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }
CO_FN float co_float(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
#endif

CO_FN uint16_t co_to_bf16(float x) {
  const uint32_t bits = co_bits(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return (uint16_t)(x != x ? (bits >> 16) | 0x40u : rounded);
}

// Exponents of a half are moved by multiplying with 2^112: right for denormals too.
CO_FN float co_from_f16(uint16_t half) {
  const uint32_t magnitude = half & 0x7fffu, sign = (uint32_t)(half & 0x8000u) << 16;
  const uint32_t finite = co_bits(co_float(magnitude << 13) * co_float(0x77800000u));
  return co_float((magnitude >= 0x7c00u ? (magnitude << 13) | 0x7f800000u : finite) | sign);
}

// Below the smallest normal half, adding 0.5 rounds to multiples of 2^-24.
CO_FN uint16_t co_to_f16(float x) {
  const uint32_t bits = co_bits(x), sign = (bits >> 16) & 0x8000u, size = bits & 0x7fffffffu;
  const uint32_t small = co_bits(co_float(size) + 0.5f) - 0x3f000000u;
  const uint32_t normal = (size + 0xc8000fffu + ((size >> 13) & 1u)) >> 13;
  const uint32_t large = size > 0x7f800000u ? 0x7e00u : 0x7c00u;
  return (uint16_t)(sign | (size >= 0x47800000u ? large : size < 0x38800000u ? small : normal));
}

struct co_bf16 {
  uint16_t bits;
  CO_MEMBER co_bf16& operator=(float x) { bits = co_to_bf16(x); return *this; }
  CO_MEMBER operator float() const { return co_float((uint32_t)bits << 16); }
};

struct co_f16 {
  uint16_t bits;
  CO_MEMBER co_f16& operator=(float x) { bits = co_to_f16(x); return *this; }
  CO_MEMBER operator float() const { return co_from_f16(bits); }
};

CO_FN float co_round_bf16(float x) { return co_float((uint32_t)co_to_bf16(x) << 16); }
CO_FN float co_round_f16(float x) { return co_from_f16(co_to_f16(x)); }
