// Decode attention: what a warp reads next. See decode.cu.
#pragma once
#include "decode_shape.cuh"

// What a warp fills next: a tile of a (sequence, KV head), and where its pieces lie. All of it is the same in all
// lanes, and computed so that the compiler knows: copies take their operands from the warp's own registers.
struct Cursor {
  u32 b, h;
  i32 tile;
  Range rows;
  Tiles full;
  const u8 *key, *value, *key_scale, *value_scale;  // the first row of the head's first tile

  // Points at tile `tile_` of KV head h_ of sequence b_.
  DEVICE void enter(const DecodeParams& p, u32 b_, u32 h_, i32 tile_) {
    b = b_;
    h = h_;
    tile = tile_;
    rows = rows_of(p, b);
    full = tiles_within(p, rows);
    key = first_row<Key::row_bytes>(p, p.key);
    value = first_row<Value::row_bytes>(p, p.value);
    key_scale = first_row<Key::scale_bytes>(p, p.key_scale);
    value_scale = first_row<Value::scale_bytes>(p, p.value_scale);
  }
  template <int ROW_BYTES>
  DEVICE const u8* first_row(const DecodeParams& p, const Plane& plane) const {
    return reinterpret_cast<const u8*>(plane.data) + b * plane.batch_stride + h * plane.head_stride +
           static_cast<i64>(p.first) * ROW_BYTES;
  }
  // Fills a stage and goes on by the tiles of the other warps.
  DEVICE void fill(const DecodeParams& p, WarpRing& ring, u32 stage) {
    if (full.have(tile))
      fill_rows(ring, stage, TOKENS);
    else
      fill_rows(ring, stage, rows_at_edge(p));
    tile += WARPS;
    if constexpr (!ONE_HEAD)
      if (tile >= p.tiles) leave(p);
  }
  DEVICE void fill_rows(WarpRing& ring, u32 stage, u32 n) const {
    const i64 rows_before = static_cast<i64>(tile) * TOKENS;
    const Piece pieces[4] = {{key + rows_before * Key::row_bytes, KEY_AT, n * Key::row_bytes},
                             {value + rows_before * Value::row_bytes, VALUE_AT, n * Value::row_bytes},
                             {key_scale + rows_before * Key::scale_bytes, KEY_SCALE_AT, n * Key::scale_bytes},
                             {value_scale + rows_before * Value::scale_bytes, VALUE_SCALE_AT, n * Value::scale_bytes}};
    ring.fill(stage, pieces);
  }
  // Rows to read of a tile that is not wholly attended: those from its first to the last attended one.
  DEVICE u32 rows_at_edge(const DecodeParams& p) const {
    const i32 start = p.first + tile * TOKENS, n = min_of(TOKENS, rows.to - start);
    return n < 0 || start + TOKENS <= rows.from ? 0 : n;
  }
  DEVICE void leave(const DecodeParams& p) {
    while (tile >= p.tiles) {
      tile -= p.tiles;
      if (++h == static_cast<u32>(p.kv_heads)) {
        h = 0;
        b++;
      }
    }
    if (b < static_cast<u32>(p.batch)) enter(p, b, h, tile);
  }
};
