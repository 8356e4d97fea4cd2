// Eight elements of a head at a time: from and to memory, as activations and as packed codes.
#pragma once
#include "elements.cuh"
#include "ptx.cuh"

// Elements of a head that one lane has at a time.
constexpr int LANE = 8;

template <int WORDS>
struct alignas(4 * WORDS) Words {
  u32 word[WORDS];
};

// A tensor [B, H, T, ...] whose rows are contiguous; strides in bytes.
struct Rows {
  u64 data;
  i64 batch, head, token;
};

DEVICE u8* row_of(const Rows& rows, u32 batch, u32 head, u32 token) {
  return reinterpret_cast<u8*>(rows.data) + batch * rows.batch + head * rows.head + token * rows.token;
}

// A tensor-level scale, fp32 [B or 1, H or 1]; strides in bytes, 0 where there is one for all.
struct TensorScale {
  u64 data;
  i64 batch, head;
};

DEVICE float scale_of(const TensorScale& scale, u32 batch, u32 head) {
  return *reinterpret_cast<const float*>(scale.data + batch * scale.batch + head * scale.head);
}

template <int FLOAT>
DEVICE float widened(u32 bits) {
  return FLOAT == FLOAT_BF16 ? bf16_number(bits) : half_to_float(static_cast<u16>(bits));
}

// Eight activations at `from`, which is aligned to 16 bytes if `aligned`.
template <int FLOAT>
DEVICE void load_floats(const u8* from, bool aligned, float (&x)[LANE]) {
  if constexpr (FLOAT == FLOAT_FP32) {
    if (aligned) {
      for (int half = 0; half < 2; half++) {
        const Words<4> part = reinterpret_cast<const Words<4>*>(from)[half];
        for (int i = 0; i < 4; i++) x[4 * half + i] = float_of(part.word[i]);
      }
    } else {
      for (int i = 0; i < LANE; i++) x[i] = reinterpret_cast<const float*>(from)[i];
    }
  } else if (aligned) {
    const Words<4> part = *reinterpret_cast<const Words<4>*>(from);
    for (int i = 0; i < LANE; i++) x[i] = widened<FLOAT>(part.word[i / 2] >> (16 * (i % 2)) & 0xffffu);
  } else {
    for (int i = 0; i < LANE; i++) x[i] = widened<FLOAT>(reinterpret_cast<const u16*>(from)[i]);
  }
}

// `to` is aligned to 16 bytes. Numbers beyond the range of fp16 become infinite, as in torch.
template <int FLOAT>
DEVICE void store_floats(u8* to, const float* x) {
  if constexpr (FLOAT == FLOAT_FP32) {
    for (int half = 0; half < 2; half++) {
      Words<4> part;
      for (int i = 0; i < 4; i++) part.word[i] = bits_of(x[4 * half + i]);
      reinterpret_cast<Words<4>*>(to)[half] = part;
    }
  } else {
    Words<4> part;
    for (int i = 0; i < 4; i++)
      part.word[i] = FLOAT == FLOAT_BF16 ? bf16x2_of(x[2 * i], x[2 * i + 1]) : half2_of(x[2 * i], x[2 * i + 1]);
    *reinterpret_cast<Words<4>*>(to) = part;
  }
}

// Eight codes of BITS bits, the first in the low bits, to memory aligned to as many bytes as they take, and from it.
template <int BITS>
DEVICE void store_codes(u8* to, const u32* codes) {
  Words<BITS / 4> packed = {};
  for (int i = 0; i < LANE; i++) packed.word[i * BITS / 32] |= codes[i] << (i * BITS % 32);
  *reinterpret_cast<Words<BITS / 4>*>(to) = packed;
}
template <int BITS>
DEVICE void load_codes(const u8* from, u32 (&codes)[LANE]) {
  const Words<BITS / 4> packed = *reinterpret_cast<const Words<BITS / 4>*>(from);
  for (int i = 0; i < LANE; i++) codes[i] = packed.word[i * BITS / 32] >> (i * BITS % 32) & ((1u << BITS) - 1);
}

// Number `index` of a row of stored scales (and zero points).
template <int TYPE>
DEVICE void put_scale(u8* row, int index, u32 stored) {
  if constexpr (scale_size(TYPE) == 4) reinterpret_cast<u32*>(row)[index] = stored;
  if constexpr (scale_size(TYPE) == 2) reinterpret_cast<u16*>(row)[index] = static_cast<u16>(stored);
  if constexpr (scale_size(TYPE) == 1) row[index] = static_cast<u8>(stored);
}
template <int TYPE>
DEVICE u32 get_scale(const u8* row, int index) {
  if constexpr (scale_size(TYPE) == 4) return reinterpret_cast<const u32*>(row)[index];
  if constexpr (scale_size(TYPE) == 2) return reinterpret_cast<const u16*>(row)[index];
  return row[index];
}
