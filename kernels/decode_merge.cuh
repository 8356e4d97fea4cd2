// Decode attention: adding up parts, of warps and of blocks, and writing the result. See decode.cu.
#pragma once
#include "decode_shape.cuh"

struct alignas(16) Four {
  float x[4];
};

struct Sum {
  Four o;
  float m, l;
};

// Element `e` of a part: four g of one (dim pair, column). Writes the finished outputs of a column.
DEVICE void write_out(const DecodeParams& p, u32 head, i32 first_column, int e, Sum sum) {
  Four& o = sum.o;
  float &m = sum.m, &l = sum.l;
  const int column_in_block = e / 2 % COLUMNS, pair = e / (2 * COLUMNS), g0 = e % 2 * 4;
  const i32 column = first_column + column_in_block;
  if (column >= p.group * p.queries) return;
  const u32 b = head / p.kv_heads, h = head % p.kv_heads;
  const i32 row = column / p.group, query_head = h * p.group + column % p.group, heads = p.kv_heads * p.group;
  if (p.sinks) {
    const float sink = reinterpret_cast<const float*>(p.sinks)[query_head] * 1.4426950408889634f;
    const float reference = max_of(m, sink), by = exp2_fast(m - reference);
    l = l * by + exp2_fast(sink - reference);
    for (int i = 0; i < 4; i++) o.x[i] *= by;
    m = reference;
  }
  constexpr int E = ValueShare::elements;
  const int tile = pair / 2, chunk = tile / (E / 2), within = 2 * (tile % (E / 2)) + pair % 2;
  const i64 out = ((static_cast<i64>(b) * p.queries + row) * heads + query_head) * HEAD_DIM + chunk * 8 * E + within;
  const float inverse = l > 0 ? 1.0f / l : 0.0f;
  for (int i = 0; i < 4; i++) {
    const i64 to = out + (g0 + i) * E;
    const float x = o.x[i] * inverse;
    if (p.out_type == 2)
      reinterpret_cast<float*>(p.out)[to] = x;
    else
      reinterpret_cast<u16*>(p.out)[to] = static_cast<u16>(p.out_type ? half2_of(x, 0.0f) : bf16x2_of(x, 0.0f));
  }
  if (pair == 0 && g0 == 0)
    reinterpret_cast<float*>(p.lse)[(static_cast<i64>(b) * heads + query_head) * p.queries + row] =
        l > 0 ? 0.6931471805599453f * (m + log2_fast(l)) : negative_infinity();
}

// Adds up parts in shared or global memory. Several lanes of a warp share an element of O and take turns at the parts.
constexpr int OUT_FOURS = OUT_FLOATS / 4;
HOST_DEVICE constexpr int lanes_of_four(int most) {
  int lanes = 1;
  while (lanes < 32 && 2 * lanes <= most) lanes *= 2;
  return lanes;
}
constexpr int SHARING = lanes_of_four(THREADS / OUT_FOURS);

template <class At>
DEVICE Sum add_parts(At part, u32 count, int e, int turn) {
  const int column = e / 2 % COLUMNS;
  Sum sum{{{0, 0, 0, 0}}, NOTHING, 0.0f};
  constexpr int AHEAD = 8;  // parts whose loads are under way at a time
#pragma unroll 1
  for (u32 first = turn; first < count; first += AHEAD * SHARING) {
    Four o[AHEAD];
    float m[AHEAD], l[AHEAD], top = sum.m;
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      const u32 at = first + i * SHARING;
      const float* from = part(at < count ? at : turn);
      o[i] = reinterpret_cast<const Four*>(from)[e];
      m[i] = at < count ? from[OUT_FLOATS + column] : NOTHING;
      l[i] = from[OUT_FLOATS + COLUMNS + column];
    }
#pragma unroll
    for (int i = 0; i < AHEAD; i++) top = max_of(top, m[i]);
    const float before = exp2_fast(sum.m - top);
    sum.l *= before;
    for (int j = 0; j < 4; j++) sum.o.x[j] *= before;
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      const float by = first + i * SHARING < count ? exp2_fast(m[i] - top) : 0.0f;
      sum.l += by * l[i];
      for (int j = 0; j < 4; j++) sum.o.x[j] += by * o[i].x[j];
    }
    sum.m = top;
  }
#pragma unroll
  for (int d = 1; d < SHARING; d <<= 1) {
    const float m = shuffle_xor(sum.m, d), top = max_of(sum.m, m), mine = exp2_fast(sum.m - top),
                theirs = exp2_fast(m - top);
    sum.l = sum.l * mine + shuffle_xor(sum.l, d) * theirs;
    for (int j = 0; j < 4; j++) sum.o.x[j] = sum.o.x[j] * mine + shuffle_xor(sum.o.x[j], d) * theirs;
    sum.m = top;
  }
  return sum;
}

// Calls `done(e, sum)` once for every four numbers of the sum of parts. Called by the whole block.
template <class At, class Done>
DEVICE void merge(At part, u32 count, Done done) {
#pragma unroll 1
  for (u32 first = threadIdx.x & ~31u; first < OUT_FOURS * SHARING; first += THREADS) {
    // A warp at a time, so that all of its lanes come to the shuffles.
    const u32 i = first + (threadIdx.x & 31), e = i / SHARING;
    const Sum sum = add_parts(part, count, e < OUT_FOURS ? e : 0, i % SHARING);
    if (e < OUT_FOURS && i % SHARING == 0) done(e, sum);
  }
}
