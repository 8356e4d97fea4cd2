// From packed codes to the 16-bit pairs that tensor cores multiply.
//
// The order of a contraction is free, and so is the order of output rows, as long as both sides agree. So every lane
// takes contiguous packed bytes, and the other operand (or the output) is permuted to match, once.
#pragma once
#include "ptx.cuh"

#if !defined(HAS_E4M3_CONVERT)
// Two e4m3 codes, in the low 16 bits of x, to half2. Exact: the bits of a half with the exponent 8 too small.
DEVICE u32 half2_of_e4m3(u32 x) {
  const u32 high = pick_bytes(x, 0, 0x1404);
  return half2_mul((high & 0x80008000u) | ((high & 0x7f007f00u) >> 1), 0x5c005c00u);
}
#endif

// What a code stands for is the number in the pair times this; for uint4, pairs at odd places are 16 times larger.
template <int ELEMENT>
HOST_DEVICE constexpr float pair_unit() {
  return ELEMENT == E2M1 ? 0x1p14f : ELEMENT == UINT4 ? 0x1p24f : 1.0f;
}
template <int ELEMENT>
HOST_DEVICE constexpr bool odd_pairs_are_16_times() {
  return ELEMENT == UINT4;
}
template <int ELEMENT>
HOST_DEVICE constexpr int pairs_per_word() {
  return 32 / (2 * element_bits(ELEMENT));
}

// What `expand` takes away from a code. The zero point makes up for it.
template <int ELEMENT>
HOST_DEVICE constexpr int code_offset() {
  return ELEMENT == UINT8 ? 128 : 0;
}

// The pairs of a word of packed codes: (0, 1), (2, 3) of two or four codes; (0, 4), (1, 5), (2, 6), (3, 7) of eight.
// `two` is 2, passed at run time: the compiler then leaves multiplications to the FMA pipe, which has room.
template <int ELEMENT>
DEVICE void expand(u32 word, u32 two, u32 (&pair)[pairs_per_word<ELEMENT>()]) {
  if constexpr (ELEMENT == BF16) {
    pair[0] = word;
  } else if constexpr (ELEMENT == E4M3) {
    pair[0] = half2_of_e4m3(word);
    pair[1] = half2_of_e4m3(word >> 16);
  } else if constexpr (ELEMENT == E5M2) {
    pair[0] = pick_bytes(word, 0, 0x1404);
    pair[1] = pick_bytes(word, 0, 0x3424);
  } else if constexpr (ELEMENT == INT8 || ELEMENT == UINT8) {
    // The byte as the last 8 bits of a half in [1024, 2048); less 1024 + 128.
    const u32 x = ELEMENT == INT8 ? word ^ 0x80808080u : word;
    pair[0] = half2_sub(pick_bytes(x, 0x64, 0x4140), 0x64806480u);
    pair[1] = half2_sub(pick_bytes(x, 0x64, 0x4342), 0x64806480u);
  } else if constexpr (ELEMENT == UINT4) {
    // The four bits as a subnormal half: code * 2^-24, or code * 2^-20 from the upper nibble of a byte.
    const u32 high = word >> 8;
    pair[0] = word & 0x000f000fu;
    pair[1] = word & 0x00f000f0u;
    pair[2] = high & 0x000f000fu;
    pair[3] = high & 0x00f000f0u;
  } else {
    // A nibble `seem` becomes the top byte `s000eem0` of a half: value * 2^-14, exact (0.5 is the subnormal 2^-15).
    // (n << 1) + 0x70 carries the sign from bit 4 to bit 7, in all four bytes of a word at once.
    const u32 shift8 = two << 7;
    const u32 low = (word & 0x0f0f0f0fu) * two + 0x70707070u, high = ((word >> 4) & 0x0f0f0f0fu) * two + 0x70707070u;
    pair[0] = (low * shift8) & 0x8e008e00u;
    pair[1] = (high * shift8) & 0x8e008e00u;
    pair[2] = low & 0x8e008e00u;
    pair[3] = high & 0x8e008e00u;
  }
}

// Words in which every pair joins the same element of two rows: from one word each of rows a and b, the `part`-th half
// of its pairs.
template <int ELEMENT>
DEVICE u32 interleave(u32 a, u32 b, int part) {
  if constexpr (element_bits(ELEMENT) == 8) return pick_bytes(a, b, part ? 0x7362 : 0x5140);
  return pick_bytes(a, b, part ? 0x7632 : 0x5410);
}

// Largest power of two up to 16 that divides `bytes`: the widest load that tiles them.
HOST_DEVICE constexpr int widest_load(int bytes) {
  return bytes % 16 == 0 ? 16 : bytes % 8 == 0 ? 8 : bytes % 4 == 0 ? 4 : 2;
}

// Block scales in e4m3 go into the elements: e2m1 times e4m3 is exact in a half. Other scales multiply sums.
template <class F>
HOST_DEVICE constexpr bool scales_elements() {
  return F::scale == E4M3_SCALE;
}

// How `lanes` lanes share a row: `chunks` times, each takes `bytes` contiguous bytes. A chunk lies within one group
// whose scale multiplies sums; a lane's part of a chunk lies within one or two blocks whose scale multiplies elements.
template <class F, int LANES>
struct Share {
  static constexpr int span = (scales_elements<F>() ? F::head_dim : F::group) * F::bits / 8;
  static constexpr int widest = widest_load(span / LANES);
  static constexpr int bytes = scales_elements<F>() && LANES == 8 && widest > 8 ? 8 : widest;
  static constexpr int chunks = F::row_bytes / (LANES * bytes);
  static constexpr int chunks_per_group = scales_elements<F>() ? chunks : F::group * F::bits / 8 / (LANES * bytes);
  static constexpr int words = bytes < 4 ? 1 : bytes / 4;
  static constexpr int elements = bytes * 8 / F::bits;
  static_assert(span % LANES == 0 && F::row_bytes % (LANES * bytes) == 0, "a row is shared evenly");
};

template <int BYTES>
DEVICE void load_words(const u8* from, u32 (&words)[BYTES < 4 ? 1 : BYTES / 4]) {
  if constexpr (BYTES == 16) {
    struct alignas(16) Four {
      u32 x[4];
    } four = *reinterpret_cast<const Four*>(from);
    for (int i = 0; i < 4; i++) words[i] = four.x[i];
  } else if constexpr (BYTES == 8) {
    struct alignas(8) Two {
      u32 x[2];
    } two = *reinterpret_cast<const Two*>(from);
    words[0] = two.x[0];
    words[1] = two.x[1];
  } else if constexpr (BYTES == 4) {
    words[0] = *reinterpret_cast<const u32*>(from);
  } else {
    words[0] = *reinterpret_cast<const u16*>(from);
  }
}

struct ScaleAndZero {
  float scale, zero;
};

// The stored scale (and the zero point, as it is for codes less OFFSET) of a group, from the scale bytes of its row.
// For scales that multiply sums.
template <class F, int OFFSET>
DEVICE ScaleAndZero load_scale(const u8* row, int group) {
  if constexpr (F::scale == FP32) {
    static_assert(!F::zero, "fp32 scales come without zero points here");
    return {*reinterpret_cast<const float*>(row + 4 * group), 0.0f};
  } else if constexpr (F::scale == E8M0_SCALE) {
    const u32 code = row[group];
    return {float_of(code ? code << 23 : 0x00400000u), 0.0f};
  } else if constexpr (F::zero) {
    const u32 both = *reinterpret_cast<const u32*>(row + 4 * group);
    const bool is_bf16 = F::scale == BF16_SCALE;
    const float scale = is_bf16 ? float_of(both << 16) : half_to_float(static_cast<u16>(both));
    const float zero = is_bf16 ? float_of(both & 0xffff0000u) : half_to_float(static_cast<u16>(both >> 16));
    return {scale, OFFSET ? zero + OFFSET * scale : zero};
  } else {
    const u16 one = *reinterpret_cast<const u16*>(row + 2 * group);
    return {F::scale == BF16_SCALE ? float_of(static_cast<u32>(one) << 16) : half_to_float(one), 0.0f};
  }
}
