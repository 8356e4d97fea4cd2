// From scaled floats to the codes of an element and back, and from numbers to stored scales and back. Bit for bit what
// kveval/formats/elements.py and rules.py do, on any C++17 compiler: plain IEEE arithmetic, so it must be compiled
// without contraction, fast division or flushing of subnormals.
#pragma once
#include "types.cuh"

// How activations come in and go out.
enum FloatType { FLOAT_BF16 = 0, FLOAT_FP16 = 1, FLOAT_FP32 = 2 };

union FloatBits {
  float number;
  u32 bits;
};
HOST_DEVICE u32 float_bits(float x) {
  FloatBits both;
  both.number = x;
  return both.bits;
}
HOST_DEVICE float bits_float(u32 x) {
  FloatBits both;
  both.bits = x;
  return both.number;
}
HOST_DEVICE float smaller(float a, float b) { return b < a ? b : a; }
HOST_DEVICE float larger(float a, float b) { return b > a ? b : a; }
HOST_DEVICE float magnitude(float x) { return bits_float(float_bits(x) & 0x7fffffffu); }
HOST_DEVICE bool is_finite(float x) { return (float_bits(x) & 0x7f800000u) != 0x7f800000u; }
// a b + c with one rounding, as torch's addcmul on a GPU (and on processors that have the instruction).
HOST_DEVICE float multiply_add(float a, float b, float c) {
#if defined(__CUDACC__) && defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}
// `step` to divide by: what is divided by a zero decodes to zero anyway.
HOST_DEVICE float or_one(float step) { return step == 0.0f ? 1.0f : step; }

// ---- elements

HOST_DEVICE constexpr float largest(int element) {
  return element == E4M3    ? 448.0f
         : element == E5M2  ? 57344.0f
         : element == INT8  ? 127.0f
         : element == UINT8 ? 255.0f
         : element == UINT4 ? 15.0f
                            : 6.0f;
}
// floor(log2(largest)), which the OCP floor rule takes from the exponent.
HOST_DEVICE constexpr int largest_exponent(int element) {
  int exponent = 0;
  while (static_cast<float>(2u << exponent) <= largest(element)) ++exponent;
  return exponent;
}

// Code, without its sign, of the nearest float with MANTISSA bits behind the point whose smallest normal number is
// 2^MIN_EXPONENT; ties to the even code. `x` lies between 0 and the largest number. Adding a power of two so large that
// the sum's last place is the step of the small float leaves the rounding to the hardware.
template <int MANTISSA, int MIN_EXPONENT>
HOST_DEVICE u32 small_float(float x) {
  constexpr u32 least = static_cast<u32>(127 + MIN_EXPONENT) << 23;
  const u32 exponent = float_bits(x) & 0x7f800000u;
  const u32 power = exponent > least ? exponent : least;
  const u32 shift = power + (static_cast<u32>(23 - MANTISSA) << 23);
  const u32 steps = float_bits(x + bits_float(shift)) - shift;
  return steps + ((power - least) >> (23 - MANTISSA));
}

// The nearest integer, ties to even, for |x| < 2^22; its two's complement stands in the low bits.
HOST_DEVICE u32 nearest_integer(float x) { return float_bits(x + 12582912.0f); }

// The code of the element's nearest number, ties to the even code; values beyond its range take its end. For finite x.
template <int ELEMENT>
HOST_DEVICE u32 code_of(float x) {
  constexpr float limit = largest(ELEMENT);
  if constexpr (ELEMENT == INT8) {
    return nearest_integer(smaller(larger(x, -limit), limit)) & 0xffu;
  } else if constexpr (ELEMENT == UINT8 || ELEMENT == UINT4) {
    return nearest_integer(smaller(larger(x, 0.0f), limit)) & 0xffu;
  } else {
    const float size = smaller(magnitude(x), limit);
    const u32 negative = float_bits(x) >> 31;
    if constexpr (ELEMENT == E4M3) return negative << 7 | small_float<3, -6>(size);
    if constexpr (ELEMENT == E5M2) return negative << 7 | small_float<2, -14>(size);
    if constexpr (ELEMENT == E2M1) return negative << 3 | small_float<1, 0>(size);
  }
}

// What a code stands for; NaN if it stands for no number.
template <int ELEMENT>
HOST_DEVICE float value_of(u32 code) {
  const float nan = bits_float(0x7fc00000u);
  if constexpr (ELEMENT == INT8) {
    return code == 0x80u ? nan : static_cast<float>(static_cast<i32>(code << 24) >> 24);
  } else if constexpr (ELEMENT == UINT8 || ELEMENT == UINT4) {
    return static_cast<float>(code);
  } else {
    // The bits of a small float, moved to where a float has them, are the number less the difference of the biases.
    constexpr int bits = element_bits(ELEMENT), mantissa = ELEMENT == E4M3 ? 3 : ELEMENT == E5M2 ? 2 : 1;
    constexpr int bias = ELEMENT == E4M3 ? 7 : ELEMENT == E5M2 ? 15 : 1;
    constexpr u32 unused = ELEMENT == E4M3 ? 0x7fu : ELEMENT == E5M2 ? 0x7cu : 8u;
    const u32 size = code & ((1u << (bits - 1)) - 1);
    const float x = bits_float(size << (23 - mantissa)) * bits_float(static_cast<u32>(127 + 127 - bias) << 23);
    if (size >= unused) return nan;
    return bits_float(float_bits(x) | (code >> (bits - 1)) << 31);
  }
}

// ---- 16-bit floats

// The nearest bf16, ties to even; finite numbers beyond its range saturate.
HOST_DEVICE u32 bf16_bits(float x) {
  const float limit = bits_float(0x7f7f0000u);
  const u32 bits = float_bits(smaller(larger(x, -limit), limit));
  return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}
HOST_DEVICE float bf16_number(u32 bits) { return bits_float(bits << 16); }
// Likewise fp16.
HOST_DEVICE u32 fp16_bits(float x) {
  return float_bits(x) >> 31 << 15 | small_float<10, -14>(smaller(magnitude(x), 65504.0f));
}
HOST_DEVICE float fp16_number(u32 bits) {
  const u32 size = bits & 0x7fffu;
  const float x = bits_float(size << 13) * bits_float(static_cast<u32>(127 + 127 - 15) << 23);
  const u32 number = size >= 0x7c00u ? 0x7f800000u | size << 13 : float_bits(x);
  return bits_float(number | (bits & 0x8000u) << 16);
}

// ---- stored scales and zero points

// The bits that are stored of `x`: the nearest number of the type, saturating. (For e8m0 see `floor_scale`.)
template <int TYPE>
HOST_DEVICE u32 store_scale(float x) {
  const float limit = bits_float(0x7f7fffffu);
  if constexpr (TYPE == FP32) return float_bits(smaller(larger(x, -limit), limit));
  if constexpr (TYPE == BF16_SCALE) return bf16_bits(x);
  if constexpr (TYPE == FP16_SCALE) return fp16_bits(x);
  if constexpr (TYPE == E4M3_SCALE) return code_of<E4M3>(x);
  return 0;
}

template <int TYPE>
HOST_DEVICE float load_scale(u32 stored) {
  if constexpr (TYPE == FP32) return bits_float(stored);
  if constexpr (TYPE == BF16_SCALE) return bf16_number(stored);
  if constexpr (TYPE == FP16_SCALE) return fp16_number(stored);
  if constexpr (TYPE == E4M3_SCALE) return value_of<E4M3>(stored);
  // Code 0 is 2^-127, which a float holds only as a subnormal.
  if constexpr (TYPE == E8M0_SCALE) return bits_float(stored == 0 ? 0x00400000u : stored << 23);
  return 1.0f;
}

// The e8m0 code of 2^(floor(log2 peak) - floor(log2 of the element's largest number)): OCP Microscaling Formats 1.0,
// section 6.3.
template <int ELEMENT>
HOST_DEVICE u32 floor_scale(float peak) {
  const i32 exponent = static_cast<i32>(float_bits(peak) >> 23 & 0xffu) - largest_exponent(ELEMENT);
  return static_cast<u32>(exponent < 0 ? 0 : exponent > 254 ? 254 : exponent);
}
