// Decode attention: the softmax, and the sums over a stage's values. See decode.cu.
#pragma once
#include "decode_scores.cuh"

// What a warp has gathered of its columns.
struct State {
  float o[TILES_N][M_TILES][4];  // O^T as C fragments: dims 2 i, 2 i + 1 of the lane's share, columns 2 t, 2 t + 1
  float l[TILES_N][4];           // sums of P: of columns 2 t, 2 t + 1 in [0] and [1]
  float z[Value::zero ? VALUE_GROUPS : 1][TILES_N][2];  // sums of P times zero point, per group
  float m[TILES_N][2];                                  // references, log2
  float weight_unit;                                    // P is multiplied with scale * weight_unit <= 1

  DEVICE void clear() {
#pragma unroll
    for (int n = 0; n < TILES_N; n++) {
#pragma unroll
      for (int i = 0; i < M_TILES; i++) o[n][i][0] = o[n][i][1] = o[n][i][2] = o[n][i][3] = 0.0f;
      l[n][0] = l[n][1] = l[n][2] = l[n][3] = 0.0f;
      m[n][0] = m[n][1] = NOTHING;
#pragma unroll
      for (int c = 0; c < (Value::zero ? VALUE_GROUPS : 1); c++) z[c][n][0] = z[c][n][1] = 0.0f;
    }
    weight_unit = 0x1p100f;
  }

  // Makes room for scores up to `top` (per column, this lane's share of the rows) and value scales up to `heaviest`.
  DEVICE void rescale(float (&top)[TILES_N][2], const float (&factor)[TILES_N][2], float heaviest) {
    float by_unit = 1.0f;
    if constexpr (WEIGHTS_SCALED) {
#pragma unroll
      for (int d = 4; d < 32; d <<= 1) heaviest = max_of(heaviest, shuffle_xor(heaviest, d));
      if (heaviest * weight_unit > 1.0f) {
        u32 exponent = (bits_of(heaviest) >> 23) + 1;  // heaviest < 2^(exponent - 127)
        exponent = exponent > 252 ? 252 : exponent;
        const float unit = float_of((254 - exponent) << 23);
        by_unit = unit / weight_unit;
        weight_unit = unit;
      }
    }
#pragma unroll
    for (int n = 0; n < TILES_N; n++)
#pragma unroll
      for (int c = 0; c < 2; c++) {
        float x = top[n][c];
#pragma unroll
        for (int d = 4; d < 32; d <<= 1) x = max_of(x, shuffle_xor(x, d));
        const float reference = max_of(m[n][c], x * factor[n][c] - REFERENCE_BELOW),
                    by = exp2_fast(m[n][c] - reference);
        m[n][c] = reference;
        l[n][c] *= by;
        l[n][c + 2] *= by;
#pragma unroll
        for (int i = 0; i < M_TILES; i++) {
          o[n][i][c] *= by * by_unit;
          o[n][i][c + 2] *= by * by_unit;
        }
#pragma unroll
        for (int i = 0; i < (Value::zero ? VALUE_GROUPS : 1); i++) z[i][n][c] *= by;
      }
  }

  // Adds 16 tokens with weights p (as C fragments).
  DEVICE void add(const u8* stage, int u, const Lane& at, u32 two, const float (&p)[TILES_N][4]) {
    constexpr u32 ones = VALUE_BF16 ? 0x3f803f80u : 0x3c003c00u;
    u32 b[TILES_N][2];
#pragma unroll
    for (int n = 0; n < TILES_N; n++) {
      if constexpr (SUMS_ROUNDED) {
        weights(p[n], 1.0f, 1.0f, b[n]);
        mma<VALUE_BF16>(l[n], ones, ones, ones, ones, b[n][0], b[n][1]);
      } else {
        l[n][0] += p[n][0] + p[n][2];
        l[n][1] += p[n][1] + p[n][3];
      }
    }
#pragma unroll
    for (int group = 0; group < ValueShare::chunks / ValueShare::chunks_per_group; group++) {
      if constexpr (WEIGHTS_SCALED) {
        const u8* scales = stage + at.value_scale + 16 * u * Value::scale_bytes;
        const ScaleAndZero first = load_scale<Value, VALUE_OFFSET>(scales, group),
                           second = load_scale<Value, VALUE_OFFSET>(scales + 8 * Value::scale_bytes, group);
#pragma unroll
        for (int n = 0; n < TILES_N; n++) {
          weights(p[n], first.scale * weight_unit, second.scale * weight_unit, b[n]);
          if constexpr (Value::zero) {
            z[group][n][0] += p[n][0] * first.zero + p[n][2] * second.zero;
            z[group][n][1] += p[n][1] * first.zero + p[n][3] * second.zero;
          }
        }
      }
#pragma unroll
      for (int c = 0; c < ValueShare::chunks_per_group; c++)
        add_chunk(stage, u, at, two, group * ValueShare::chunks_per_group + c, b);
    }
  }

  DEVICE static void weights(const float (&p)[4], float first, float second, u32 (&b)[2]) {
    if constexpr (VALUE_BF16) {
      b[0] = transpose_8x8(bf16x2_of(p[0], p[1]));
      b[1] = transpose_8x8(bf16x2_of(p[2], p[3]));
    } else if constexpr (WEIGHTS_SCALED) {
      b[0] = transpose_8x8(half2_of(p[0] * first, p[1] * first));
      b[1] = transpose_8x8(half2_of(p[2] * second, p[3] * second));
    } else {
      b[0] = transpose_8x8(half2_of(p[0], p[1]));
      b[1] = transpose_8x8(half2_of(p[2], p[3]));
    }
  }

  DEVICE void add_chunk(const u8* stage, int u, const Lane& at, u32 two, int chunk, const u32 (&b)[TILES_N][2]) {
    constexpr int N = pairs_per_word<V_ELEMENT>(), parts = ValueShare::bytes < 4 ? 1 : 2;
    u32 words[4][ValueShare::words];
#pragma unroll
    for (int r = 0; r < 4; r++) {
      const int row = 16 * u + 8 * (r >> 1);
      load_words<ValueShare::bytes>(stage + at.value[r & 1] + row * Value::row_bytes + 8 * chunk * ValueShare::bytes,
                                    words[r]);
    }
    u32 scale[2];
    if constexpr (scales_elements<Value>()) {
#pragma unroll
      for (int k = 0; k < 2; k++) {
        const u8* blocks = stage + (16 * u + 8 * k) * Value::scale_bytes + 8 * chunk * ValueShare::elements / 16;
        scale[k] = half2_of_e4m3(blocks[at.value_block[0]] | blocks[at.value_block[1]] << 8);
      }
    }
    // One pair per dim of the share: rows 2 t and 2 t + 1 of the contraction, and 8 after them. Two dims make an
    // m-tile.
    constexpr int together = N == 1 ? 2 : 1;  // parts that make whole m-tiles
#pragma unroll
    for (int w = 0; w < ValueShare::words; w++)
#pragma unroll
      for (int part = 0; part < parts; part += together) {
        u32 pair[2][together * N];
#pragma unroll
        for (int k = 0; k < 2; k++)
#pragma unroll
          for (int v = 0; v < together; v++) {
            u32 expanded[N];
            expand<V_ELEMENT>(interleave<V_ELEMENT>(words[2 * k][w], words[2 * k + 1][w], part + v), two, expanded);
#pragma unroll
            for (int i = 0; i < N; i++) {
              pair[k][v * N + i] = expanded[i];
              if constexpr (scales_elements<Value>()) pair[k][v * N + i] = half2_mul(expanded[i], scale[k]);
            }
          }
#pragma unroll
        for (int i = 0; i < together * N / 2; i++)
#pragma unroll
          for (int n = 0; n < TILES_N; n++) {
            float (&c)[4] = o[n][chunk * (ValueShare::elements / 2) + (w * parts + part) * N / 2 + i];
            // -8 in the units of even and odd pairs: subnormals.
            if constexpr (CENTERED) mma<false>(c, 0x80088008u, 0x80808080u, 0x80088008u, 0x80808080u, b[n][0], b[n][1]);
            mma<VALUE_BF16>(c, pair[0][2 * i], pair[0][2 * i + 1], pair[1][2 * i], pair[1][2 * i + 1], b[n][0],
                            b[n][1]);
          }
      }
  }

  // Sums over the lanes that hold other rows, and everything in its own unit: to `part` in shared memory.
  DEVICE void write(float* part, const Lane& at, float value_global) {
#pragma unroll
    for (int n = 0; n < TILES_N; n++) {
      if constexpr (WEIGHTS_SCALED)
#pragma unroll
        for (int c = 0; c < 2; c++)
#pragma unroll
          for (int d = 4; d < 32; d <<= 1) {
            if constexpr (!SUMS_ROUNDED) l[n][c] += shuffle_xor(l[n][c], d);
            if constexpr (Value::zero)
#pragma unroll
              for (int i = 0; i < VALUE_GROUPS; i++) z[i][n][c] += shuffle_xor(z[i][n][c], d);
          }
      if (at.t >= PAIRS) continue;
#pragma unroll
      for (int i = 0; i < M_TILES; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          float unit = pair_unit<V_ELEMENT>();
          if (odd_pairs_are_16_times<V_ELEMENT>() && half) unit *= 0.0625f;
          if constexpr (WEIGHTS_SCALED) unit /= weight_unit;
#pragma unroll
          for (int c = 0; c < 2; c++) {
            float x = o[n][i][2 * half + c] * unit;
            if constexpr (Value::zero) x += z[i / (M_TILES / VALUE_GROUPS)][n][c];
            part[((2 * i + half) * COLUMNS + 8 * n + 2 * at.t + c) * 8 + at.g] = x * value_global;
          }
        }
      if (at.g == 0)
#pragma unroll
        for (int c = 0; c < 2; c++) {
          part[OUT_FLOATS + 8 * n + 2 * at.t + c] = m[n][c];
          part[OUT_FLOATS + COLUMNS + 8 * n + 2 * at.t + c] = l[n][c];
        }
    }
  }
};

// Rows of the stage that hold no token of this sequence: their values must not meet a weight of 0, for they may be NaN.
DEVICE void clear_rows(u8* stage, i32 from, i32 to, int lane) {
#pragma unroll 1
  for (i32 row = 0; row < TOKENS; row++) {
    if (row >= from && row < to) continue;
#pragma unroll 1
    for (int i = 4 * lane; i < Value::row_bytes; i += 128)
      *reinterpret_cast<u32*>(stage + VALUE_AT + row * Value::row_bytes + i) = 0;
#pragma unroll 1
    for (int i = lane; i < Value::scale_bytes; i += 32) stage[VALUE_SCALE_AT + row * Value::scale_bytes + i] = 0;
  }
  sync_warp();
}

// softcap * tanh(x / softcap), with x and the cap times log2 e.
DEVICE float capped(float x, float cap) {
  const float ratio = x / cap, size = ratio < 0 ? -ratio : ratio;
  const float e = exp2_fast(-2.8853900817779268f * size);  // e^(-2 |ratio|)
  const float tanh = (1.0f - e) / (1.0f + e);
  return ratio < 0 ? -cap * tanh : cap * tanh;
}

// Attends to the tile in `stage`, whose first row is `start`; at an edge, not every column attends to all of it.
DEVICE void attend(const DecodeParams& p, u8* stage, i32 start, bool edge, Range rows, i32 first_column, const Lane& at,
                   int lane, const Queries& q, State& state) {
  float s[U][TILES_N][4];
#pragma unroll
  for (int u = 0; u < U; u++) scores(stage, u, at, q, p.two, s[u]);
  float factor[TILES_N][2];
#pragma unroll
  for (int n = 0; n < TILES_N; n++)
#pragma unroll
    for (int c = 0; c < 2; c++) factor[n][c] = SOFTCAP ? 1.0f : q.factor[n][c];
#if SOFTCAP
  #pragma unroll
  for (int u = 0; u < U; u++)
  #pragma unroll
    for (int n = 0; n < TILES_N; n++)
  #pragma unroll
      for (int i = 0; i < 4; i++) s[u][n][i] = capped(s[u][n][i] * q.factor[n][i & 1], p.softcap);
#endif
  if (edge) {
    clear_rows(stage, rows.from - start, rows.to - start, lane);
#pragma unroll
    for (int n = 0; n < TILES_N; n++)
#pragma unroll
      for (int c = 0; c < 2; c++) {
        const Range own = rows_of_column(p, rows, first_column + 8 * n + 2 * at.t + c);
#pragma unroll
        for (int u = 0; u < U; u++)
#pragma unroll
          for (int r = 0; r < 2; r++) {
            const i32 row = start + 16 * u + at.key_row + 8 * r;
            if (row < own.from || row >= own.to) s[u][n][2 * r + c] = negative_infinity();
          }
      }
  }
  float top[TILES_N][2], heaviest = 0.0f;
  bool high = false;
#pragma unroll
  for (int n = 0; n < TILES_N; n++)
#pragma unroll
    for (int c = 0; c < 2; c++) {
      top[n][c] = s[0][n][c];
#pragma unroll
      for (int u = 0; u < U; u++)
#pragma unroll
        for (int r = 0; r < 2; r++) top[n][c] = max_of(top[n][c], s[u][n][2 * r + c]);
      high |= top[n][c] * factor[n][c] > state.m[n][c] + RESCALE_ABOVE;
    }
  if constexpr (WEIGHTS_SCALED) {
#pragma unroll
    for (int i = 0; i < 2 * U; i++)
#pragma unroll
      for (int group = 0; group < Value::groups; group++)
        heaviest =
            max_of(heaviest,
                   load_scale<Value, VALUE_OFFSET>(stage + at.value_scale + 8 * i * Value::scale_bytes, group).scale);
    high |= heaviest * state.weight_unit > 1.0f;
  }
  if (any_lane(high)) state.rescale(top, factor, heaviest);
#pragma unroll
  for (int u = 0; u < U; u++) {
    float weight[TILES_N][4];
#pragma unroll
    for (int n = 0; n < TILES_N; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) weight[n][i] = exp2_fast(s[u][n][i] * factor[n][i & 1] - state.m[n][i & 1]);
    state.add(stage, u, at, p.two, weight);
  }
}
