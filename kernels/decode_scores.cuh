// Decode attention: queries as fragments, and their scores against a stage's keys. See decode.cu.
#pragma once
#include "decode_shape.cuh"

// The queries of a block's columns as B fragments, in the order of K's packed elements.
struct Queries {
  u32 b[TILES_N][M_TILES][2];
  float factor[TILES_N][2];                            // of the scores of columns 2 t, 2 t + 1: log2 e and all scales
  float sum[Key::zero ? Key::groups : 1][TILES_N][2];  // of a column's query over a group, for zero points

  DEVICE void load(const DecodeParams& p, u32 b_index, u32 h, i32 first_column, int lane) {
    const int g = lane >> 2, t = lane & 3;
    float unit = p.scale * pair_unit<K_ELEMENT>();
    if (p.key_global) {
      const float* global = reinterpret_cast<const float*>(p.key_global);
      unit *= global[b_index * p.key_global_batch + h * p.key_global_head];
    }
#pragma unroll
    for (int n = 0; n < TILES_N; n++) {
      const i32 column = first_column + 8 * n + g;
      const bool present = column < p.group * p.queries && 8 * n + g < COLUMNS;
      const i32 row = present ? column / p.group : 0, head = h * p.group + (present ? column % p.group : 0);
      const u16* q =
          reinterpret_cast<const u16*>(p.query) + b_index * p.query_batch + head * p.query_head + row * p.query_row;
      u32 raw[M_TILES][2];
#pragma unroll
      for (int i = 0; i < M_TILES / 2; i++) {
        // Eight elements that are adjacent in the lane's share.
        constexpr int E = KeyShare::elements;
        const int chunk = 8 * i / E, dim = chunk * 4 * E + t * E + 8 * i % E;
        u32 x[4] = {0, 0, 0, 0};
        if (present) load_words<16>(reinterpret_cast<const u8*>(q + dim), x);
        if constexpr (Key::bits == 4) {
          raw[2 * i][0] = pick_bytes(x[0], x[2], 0x5410);
          raw[2 * i][1] = pick_bytes(x[0], x[2], 0x7632);
          raw[2 * i + 1][0] = pick_bytes(x[1], x[3], 0x5410);
          raw[2 * i + 1][1] = pick_bytes(x[1], x[3], 0x7632);
        } else {
          for (int j = 0; j < 4; j++) raw[2 * i + j / 2][j % 2] = x[j];
        }
      }
      float column_unit = 1.0f;
      if constexpr (KEY_BF16) {
#pragma unroll
        for (int i = 0; i < M_TILES; i++)
          for (int j = 0; j < 2; j++) b[n][i][j] = raw[i][j];
      } else {
        column_unit = to_half(raw, b[n], p.query_is_half);
      }
      factor[n][0] = unit * float_of(shuffle(bits_of(column_unit), 8 * t));
      factor[n][1] = unit * float_of(shuffle(bits_of(column_unit), 8 * t + 4));
      if constexpr (Key::zero) sums(n);
    }
  }

  // Queries as halves, scaled by a power of two to a largest magnitude in [1, 2), which is returned: bf16 reaches
  // further than fp16.
  DEVICE static float to_half(const u32 (&raw)[M_TILES][2], u32 (&half)[M_TILES][2], bool is_half) {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < M_TILES; i++)
      for (int j = 0; j < 2; j++) {
        const float low = first(raw[i][j], is_half), high = second(raw[i][j], is_half);
        largest = max_of(largest, max_of(low < 0 ? -low : low, high < 0 ? -high : high));
      }
    largest = max_of(largest, shuffle_xor(largest, 1));
    largest = max_of(largest, shuffle_xor(largest, 2));
    u32 exponent = bits_of(largest) >> 23;
    // Not below 2^-63: the scores' factor would be subnormal, which counts as 0, and 0 times a masked score is NaN.
    exponent = exponent < 64 ? 64 : exponent > 252 ? 252 : exponent;
    const float down = float_of((254 - exponent) << 23);
#pragma unroll
    for (int i = 0; i < M_TILES; i++)
      for (int j = 0; j < 2; j++) {
        // Odd pairs of nibbles decode 16 times too large.
        const float f = odd_pairs_are_16_times<K_ELEMENT>() && j ? down * 0.0625f : down;
        half[i][j] = half2_of(first(raw[i][j], is_half) * f, second(raw[i][j], is_half) * f);
      }
    return float_of(exponent << 23);
  }
  DEVICE static float first(u32 pair, bool is_half) {
    return is_half ? half_to_float(static_cast<u16>(pair)) : float_of(pair << 16);
  }
  DEVICE static float second(u32 pair, bool is_half) {
    return is_half ? half_to_float(static_cast<u16>(pair >> 16)) : float_of(pair & 0xffff0000u);
  }

  // Sums over each group, in the unit of the scores, on the tensor cores: A = ones (or 16 where pairs are 1/16).
  DEVICE void sums(int n) {
    constexpr int steps = Key::group / 16;
    constexpr u32 one = 0x3c003c00u, odd = odd_pairs_are_16_times<K_ELEMENT>() ? 0x4c004c00u : one;
#pragma unroll
    for (int c = 0; c < Key::groups; c++) {
      float e[4] = {0, 0, 0, 0};
#pragma unroll
      for (int i = 0; i < steps; i++) mma<false>(e, one, one, odd, odd, b[n][c * steps + i][0], b[n][c * steps + i][1]);
      sum[c][n][0] = e[0] / pair_unit<K_ELEMENT>();
      sum[c][n][1] = e[1] / pair_unit<K_ELEMENT>();
    }
  }
};

// A lane's place in fragments and in a stage: byte offsets within 16 tokens. They stay in registers; left to itself,
// the compiler works them out again for every tile.
struct Lane {
  int g, t;
  int key_row;                   // of M-row g; M-row g + 8 is 8 rows on
  u32 key, key_block;            // K: row of M-row g, share t; the scale of its block
  u32 value[2], value_block[2];  // V: rows of contraction rows 2 t and 2 t + 1, share g; the scales of their blocks
  u32 key_scale, value_scale;    // scales of M-row g

  DEVICE explicit Lane(int lane) : g(lane >> 2), t(lane & 3) {
    key_row = permuted(g);
    key = kept(KEY_AT + key_row * Key::row_bytes + t * KeyShare::bytes);
    key_block = kept(KEY_SCALE_AT + key_row * Key::scale_bytes + t * KeyShare::elements / 16);
    for (int i = 0; i < 2; i++) {
      const int row = permuted(2 * t + i);
      value[i] = kept(VALUE_AT + row * Value::row_bytes + g * ValueShare::bytes);
      value_block[i] = kept(VALUE_SCALE_AT + row * Value::scale_bytes + g * ValueShare::elements / 16);
    }
    key_scale = kept(KEY_SCALE_AT + key_row * Key::scale_bytes);
    value_scale = kept(VALUE_SCALE_AT + key_row * Value::scale_bytes);
  }
  DEVICE static int permuted(int r) { return r ^ ((r >> 1) & 1); }  // fewer bank conflicts than the identity
};

// Scores of 16 tokens, as C fragments (token key_row, columns 2 t, 2 t + 1; token key_row + 8, the same), but for
// `factor`.
DEVICE void scores(const u8* stage, int u, const Lane& at, const Queries& q, u32 two, float (&s)[TILES_N][4]) {
  constexpr int E = KeyShare::elements, steps = E / 4;
#pragma unroll
  for (int n = 0; n < TILES_N; n++) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.0f;
#pragma unroll
  for (int group = 0; group < KeyShare::chunks / KeyShare::chunks_per_group; group++) {
    float e[TILES_N][4];
#pragma unroll
    for (int n = 0; n < TILES_N; n++) e[n][0] = e[n][1] = e[n][2] = e[n][3] = 0.0f;
#pragma unroll
    for (int c = 0; c < KeyShare::chunks_per_group; c++) {
      const int chunk = group * KeyShare::chunks_per_group + c;
      u32 words[2][KeyShare::words], block_scale[2];
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int row = 16 * u + 8 * r;
        load_words<KeyShare::bytes>(stage + at.key + row * Key::row_bytes + 4 * chunk * KeyShare::bytes, words[r]);
        if constexpr (scales_elements<Key>()) {
          const u8* scale = stage + at.key_block + row * Key::scale_bytes + 4 * chunk * E / 16;
          block_scale[r] = half2_of_e4m3(E == 32 ? *reinterpret_cast<const u16*>(scale) : *scale * 0x0101u);
        }
      }
      constexpr int N = pairs_per_word<K_ELEMENT>(), together = N == 1 ? 2 : 1;  // words that make whole steps
#pragma unroll
      for (int w = 0; w < KeyShare::words; w += together) {
        u32 pair[2][together * N];
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
          for (int v = 0; v < together; v++) {
            u32 expanded[N];
            expand<K_ELEMENT>(words[r][w + v], two, expanded);
#pragma unroll
            for (int i = 0; i < N; i++) {
              pair[r][v * N + i] = expanded[i];
              // A block is two words.
              if constexpr (scales_elements<Key>())
                pair[r][v * N + i] =
                    half2_mul(expanded[i], w < 2 ? half2_low(block_scale[r]) : half2_high(block_scale[r]));
            }
          }
#pragma unroll
        for (int i = 0; i < together * N / 2; i++)
#pragma unroll
          for (int n = 0; n < TILES_N; n++) {
            const u32(&b)[2] = q.b[n][chunk * steps + w * N / 2 + i];
            mma<KEY_BF16>(e[n], pair[0][2 * i], pair[1][2 * i], pair[0][2 * i + 1], pair[1][2 * i + 1], b[0], b[1]);
          }
      }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
      ScaleAndZero by{1.0f, 0.0f};
      if constexpr (Key::scale != NO_SCALE && !scales_elements<Key>())
        by = load_scale<Key, code_offset<K_ELEMENT>()>(stage + at.key_scale + (16 * u + 8 * r) * Key::scale_bytes,
                                                       group);
#pragma unroll
      for (int n = 0; n < TILES_N; n++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
          if constexpr (Key::zero) {
            const float offset = group ? s[n][2 * r + c] + by.zero * q.sum[group][n][c] : by.zero * q.sum[group][n][c];
            s[n][2 * r + c] = by.scale * e[n][2 * r + c] + offset;
          } else if constexpr (Key::scale != NO_SCALE && !scales_elements<Key>()) {
            s[n][2 * r + c] = group ? by.scale * e[n][2 * r + c] + s[n][2 * r + c] : by.scale * e[n][2 * r + c];
          } else {
            s[n][2 * r + c] = e[n][2 * r + c];
          }
        }
    }
  }
}
