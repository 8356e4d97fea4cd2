// Decode attention: its parameters, the shape of a block, and which rows and tiles a query attends to. See decode.cu.
#pragma once
#include "fragments.cuh"
#include "ring.cuh"

using Key = Format<K_ELEMENT, AS_IS, K_SCALE, K_GROUP, K_ZERO, false, HEAD_DIM>;
using Value = Format<V_ELEMENT, AS_IS, V_SCALE, V_GROUP, V_ZERO, false, HEAD_DIM>;

struct Plane {  // payload or scales: rows of one (sequence, head) are contiguous
  u64 data;
  i64 batch_stride, head_stride;  // bytes
};

struct DecodeParams {
  Plane key, value, key_scale, value_scale;
  u64 key_global, value_global;            // fp32 scales [B or 1, H or 1], or 0
  u64 query, out, lse;                     // [B, Hq, Lq, D] by strides; [B, Lq, Hq, D]; fp32 [B, Hq, Lq]
  u64 partial, counters;                   // workspace, see decode.py; counters are zero before and after
  u64 bounds, sinks;                       // i32 [B, 2] (start, end) or 0; fp32 [Hq] or 0
  i64 query_batch, query_head, query_row;  // elements
  i32 key_global_batch, key_global_head, value_global_batch, value_global_head;
  i32 batch, kv_heads, group, queries;
  i32 length, position, window;  // rows stored; place of the first query among them; 0: no window
  i32 first, tiles;              // first row of a head's first tile; tiles per head
  i32 query_is_half, out_type;   // out_type: 0 bf16, 1 fp16, 2 fp32
  float scale, softcap;          // both times log2 e
  u32 share, longer;  // tiles of a block; how many of the first blocks (of a head, with ONE_HEAD) have one more
  u32 two;            // 2
};

constexpr int TILES_N = (COLUMNS + 7) / 8;            // n-tiles of 8 columns
constexpr int PAIRS = COLUMNS < 8 ? COLUMNS / 2 : 4;  // lanes t that hold columns
constexpr int THREADS = WARPS * 32;
constexpr int U = TOKENS / 16;
constexpr int M_TILES = HEAD_DIM / 16;
constexpr bool KEY_BF16 = K_ELEMENT == BF16, VALUE_BF16 = V_ELEMENT == BF16;
// Whether P is multiplied with scales of V before it is rounded.
constexpr bool WEIGHTS_SCALED = Value::scale != NO_SCALE && !scales_elements<Value>();
constexpr int VALUE_GROUPS = WEIGHTS_SCALED ? Value::groups : 1;
// Then P's sum is taken apart; on the tensor cores, after rounding, where the scaled weights are P's own rounding.
constexpr bool SUMS_ROUNDED = !WEIGHTS_SCALED || V_SCALE == E8M0_SCALE;
// Codes 0 to 15 are taken as -8 to 7, by a product of the weights with -8: weights and sums are rounded, and with codes
// of one sign the roundings would multiply what zero points cancel.
constexpr bool CENTERED = V_ELEMENT == UINT4;
constexpr int VALUE_OFFSET = CENTERED ? 8 : code_offset<V_ELEMENT>();

constexpr int KEY_AT = 0, VALUE_AT = TOKENS * Key::row_bytes, KEY_SCALE_AT = VALUE_AT + TOKENS * Value::row_bytes;
constexpr int VALUE_SCALE_AT = KEY_SCALE_AT + TOKENS * Key::scale_bytes;
constexpr int STAGE_BYTES = VALUE_SCALE_AT + TOKENS * Value::scale_bytes;
using WarpRing = Ring<STAGES, STAGE_BYTES>;
// A warp's result: O as [m-tile and half][column][g], then the reference m and the sum l of every column.
constexpr int OUT_FLOATS = HEAD_DIM * COLUMNS, PART_FLOATS = OUT_FLOATS + 2 * COLUMNS;
constexpr int MERGE_AT = (WARPS * (WarpRing::bytes + WarpRing::barrier_bytes) + 127) / 128 * 128;
constexpr float NOTHING = -1e30f;                               // the reference of a column that has seen no token
constexpr float REFERENCE_BELOW = 7.0f, RESCALE_ABOVE = 15.0f;  // log2: P reaches 2^15 before it is rescaled

using KeyShare = Share<Key, 4>;
using ValueShare = Share<Value, 8>;

DEVICE float negative_infinity() { return float_of(0xff800000u); }
DEVICE i32 min_of(i32 a, i32 b) { return a < b ? a : b; }
DEVICE i32 max_of(i32 a, i32 b) { return a > b ? a : b; }

struct Range {
  i32 from, to;
};

// Rows of sequence b that any query may attend to.
DEVICE Range rows_of(const DecodeParams& p, u32 b) {
  Range r{0, p.length};
  if (p.bounds) {
    const i32* bounds = reinterpret_cast<const i32*>(p.bounds) + 2 * b;
    r = {static_cast<i32>(shuffle(bounds[0], 0)), static_cast<i32>(shuffle(bounds[1], 0))};
  }
  r.to = min_of(min_of(r.to, p.length), p.position + p.queries);
  r.from = max_of(r.from, p.window ? p.position - p.window + 1 : 0);
  return r;
}

// Rows that the query of one column attends to.
DEVICE Range rows_of_column(const DecodeParams& p, Range all, i32 column) {
  const i32 at = p.position + column / p.group;
  return {max_of(all.from, p.window ? at - p.window + 1 : 0), min_of(all.to, at + 1)};
}

// Tiles [from, to) of a head that need no care.
struct Tiles {
  i32 from, to;
  DEVICE bool have(i32 tile) const { return static_cast<u32>(tile - from) < static_cast<u32>(to - from); }
};

// Tiles all of whose rows lie in `rows`.
DEVICE Tiles tiles_within(const DecodeParams& p, Range rows) {
  const i32 from = rows.from > p.first ? (rows.from - p.first - 1) / TOKENS + 1 : 0;
  const i32 to = max_of(rows.to - p.first, 0) / TOKENS;
  return {from, max_of(from, to)};
}
