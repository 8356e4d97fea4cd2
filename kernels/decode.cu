// Decode attention over a packed cache: a few queries against many keys and values, read as they are stored.
//
// Columns are the (query, query head) pairs that share a KV head; a block holds COLUMNS of them. Both products are swapped,
//   S^T[token, column] = K[token, dim] Q^T[dim, column]        A = K,   16 tokens x 16 dims
//   O^T[dim, column]   = V^T[dim, token] P^T[token, column]    A = V^T, 16 dims x 16 tokens
// so that the tensor cores' 16 rows are filled with the cache and few columns cost little. Lane = 4 g + t.
//   K: the lane reads rows pi(g) and pi(g) + 8, and of them the share t of four;   B = Q: column g.
//   V: the lane reads rows pi(2 t), pi(2 t + 1) and 8 after them, and of them the share g of eight;   B = P: column g.
//   S comes as C (token g, columns 2 t, 2 t + 1) and is needed as B: one transposition of 8 x 8.
// The permutation pi of a tile's tokens, the order of dims in K and Q and the order of dims in the output are free; they
// make every lane's bytes contiguous.
//
// Work: the tiles of all (sequence, KV head) pairs form one list, of which every block takes a contiguous share. With
// ONE_HEAD, as many blocks share each head, evenly; without, all blocks share all heads evenly, and a block goes on from one
// head to the next with its ring full. A head that lies in several shares is combined by the block that finishes it last.
//
// Compiled with: HEAD_DIM; for K and V: _ELEMENT, _SCALE, _GROUP, _ZERO; COLUMNS (2, 4, 8, 16); TOKENS of a stage (16, 32);
// STAGES; WARPS; BLOCKS per multiprocessor; ONE_HEAD (0, 1); SOFTCAP (0, 1). LOADS_ONLY (0, 1): everything is read and nothing is computed,
// to measure what the computing costs.
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
  u64 key_global, value_global;  // fp32 scales [B or 1, H or 1], or 0
  u64 query, out, lse;           // [B, Hq, Lq, D] by strides; [B, Lq, Hq, D]; fp32 [B, Hq, Lq]
  u64 partial, counters;         // workspace, see decode.py; counters are zero before and after
  u64 bounds, sinks;             // i32 [B, 2] (start, end) or 0; fp32 [Hq] or 0
  i64 query_batch, query_head, query_row;  // elements
  i32 key_global_batch, key_global_head, value_global_batch, value_global_head;
  i32 batch, kv_heads, group, queries;
  i32 length, position, window;  // rows stored; place of the first query among them; 0: no window
  i32 first, tiles;              // first row of a head's first tile; tiles per head
  i32 query_is_half, out_type;   // out_type: 0 bf16, 1 fp16, 2 fp32
  float scale, softcap;          // both times log2 e
  u32 share, longer;             // tiles of a block; how many of the first blocks (of a head, with ONE_HEAD) have one more
  u32 two;                       // 2
};

constexpr int TILES_N = (COLUMNS + 7) / 8;              // n-tiles of 8 columns
constexpr int PAIRS = COLUMNS < 8 ? COLUMNS / 2 : 4;    // lanes t that hold columns
constexpr int THREADS = WARPS * 32;
constexpr int U = TOKENS / 16;
constexpr int M_TILES = HEAD_DIM / 16;
constexpr bool KEY_BF16 = K_ELEMENT == BF16, VALUE_BF16 = V_ELEMENT == BF16;
// Whether P is multiplied with scales of V before it is rounded.
constexpr bool WEIGHTS_SCALED = Value::scale != NO_SCALE && !scales_elements<Value>();
constexpr int VALUE_GROUPS = WEIGHTS_SCALED ? Value::groups : 1;
// Then P's sum is taken apart; on the tensor cores, after rounding, where the scaled weights are P's own rounding.
constexpr bool SUMS_ROUNDED = !WEIGHTS_SCALED || V_SCALE == E8M0_SCALE;
// Codes 0 to 15 are taken as -8 to 7: weights are rounded, and the rounding of a weight then multiplies less. The weights'
// sum times 8 is taken away in the end.
constexpr bool CENTERED = V_ELEMENT == UINT4;
constexpr int VALUE_OFFSET = CENTERED ? 8 : code_offset<V_ELEMENT>();

constexpr int KEY_AT = 0, VALUE_AT = TOKENS * Key::row_bytes, KEY_SCALE_AT = VALUE_AT + TOKENS * Value::row_bytes;
constexpr int VALUE_SCALE_AT = KEY_SCALE_AT + TOKENS * Key::scale_bytes;
constexpr int STAGE_BYTES = VALUE_SCALE_AT + TOKENS * Value::scale_bytes;
using WarpRing = Ring<STAGES, STAGE_BYTES>;
// A warp's result: O as [m-tile and half][column][g], then the reference m and the sum l of every column.
constexpr int OUT_FLOATS = HEAD_DIM * COLUMNS, PART_FLOATS = OUT_FLOATS + 2 * COLUMNS;
constexpr int MERGE_AT = (WARPS * (WarpRing::bytes + WarpRing::barrier_bytes) + 127) / 128 * 128;
constexpr float NOTHING = -1e30f;  // the reference of a column that has seen no token
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
  const i32 from = max_of(rows.from - p.first + TOKENS - 1, 0) / TOKENS, to = max_of(rows.to - p.first, 0) / TOKENS;
  return {from, max_of(from, to)};
}

// What a warp fills next: a tile of a (sequence, KV head), and where its pieces lie. All of it is the same in all lanes, and
// computed so that the compiler knows: copies take their operands from the warp's own registers.
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
    return reinterpret_cast<const u8*>(plane.data) + b * plane.batch_stride + h * plane.head_stride + static_cast<i64>(p.first) * ROW_BYTES;
  }
  // Fills a stage and goes on by the tiles of the other warps.
  DEVICE void fill(const DecodeParams& p, WarpRing& ring, u32 stage) {
    if (full.have(tile)) fill_rows(ring, stage, TOKENS);
    else fill_rows(ring, stage, rows_at_edge(p));
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

// The queries of a block's columns as B fragments, in the order of K's packed elements.
struct Queries {
  u32 b[TILES_N][M_TILES][2];
  float factor[TILES_N][2];                                         // of the scores of columns 2 t, 2 t + 1: log2 e and all scales
  float sum[Key::zero ? Key::groups : 1][TILES_N][2];               // of a column's query over a group, for zero points

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
      const u16* q = reinterpret_cast<const u16*>(p.query) + b_index * p.query_batch + head * p.query_head + row * p.query_row;
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

  // Queries as halves, scaled by a power of two to a largest magnitude in [1, 2), which is returned: bf16 reaches further
  // than fp16.
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
    exponent = exponent < 1 ? 1 : exponent > 252 ? 252 : exponent;
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

// A lane's place in fragments and in a stage: byte offsets within 16 tokens. They stay in registers; left to itself, the
// compiler works them out again for every tile.
struct Lane {
  int g, t;
  int key_row;  // of M-row g; M-row g + 8 is 8 rows on
  u32 key, key_block;              // K: row of M-row g, share t; the scale of its block
  u32 value[2], value_block[2];    // V: rows of contraction rows 2 t and 2 t + 1, share g; the scales of their blocks
  u32 key_scale, value_scale;      // scales of M-row g

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

// Scores of 16 tokens, as C fragments (token key_row, columns 2 t, 2 t + 1; token key_row + 8, the same), but for `factor`.
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
                pair[r][v * N + i] = half2_mul(expanded[i], w < 2 ? half2_low(block_scale[r]) : half2_high(block_scale[r]));
            }
          }
        #pragma unroll
        for (int i = 0; i < together * N / 2; i++)
          #pragma unroll
          for (int n = 0; n < TILES_N; n++) {
            const u32 (&b)[2] = q.b[n][chunk * steps + w * N / 2 + i];
            mma<KEY_BF16>(e[n], pair[0][2 * i], pair[1][2 * i], pair[0][2 * i + 1], pair[1][2 * i + 1], b[0], b[1]);
          }
      }
    }
    #pragma unroll
    for (int r = 0; r < 2; r++) {
      ScaleAndZero by{1.0f, 0.0f};
      if constexpr (Key::scale != NO_SCALE && !scales_elements<Key>())
        by = load_scale<Key, code_offset<K_ELEMENT>()>(stage + at.key_scale + (16 * u + 8 * r) * Key::scale_bytes, group);
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

// What a warp has gathered of its columns.
struct State {
  float o[TILES_N][M_TILES][4];               // O^T as C fragments: dims 2 i, 2 i + 1 of the lane's share, columns 2 t, 2 t + 1
  float l[TILES_N][4];                        // sums of P: of columns 2 t, 2 t + 1 in [0] and [1]
  float z[Value::zero ? VALUE_GROUPS : 1][TILES_N][2];  // sums of P times zero point, per group
  float m[TILES_N][2];                        // references, log2
  float w[CENTERED ? VALUE_GROUPS : 1][TILES_N][4];     // sums of scaled weights as rounded, in [0] and [1]
  float weight_unit;                          // P is multiplied with scale * weight_unit <= 1

  DEVICE void clear() {
    #pragma unroll
    for (int n = 0; n < TILES_N; n++) {
      #pragma unroll
      for (int i = 0; i < M_TILES; i++) o[n][i][0] = o[n][i][1] = o[n][i][2] = o[n][i][3] = 0.0f;
      l[n][0] = l[n][1] = l[n][2] = l[n][3] = 0.0f;
      m[n][0] = m[n][1] = NOTHING;
      #pragma unroll
      for (int c = 0; c < (Value::zero ? VALUE_GROUPS : 1); c++) z[c][n][0] = z[c][n][1] = 0.0f;
      #pragma unroll
      for (int c = 0; c < (CENTERED ? VALUE_GROUPS : 1); c++) w[c][n][0] = w[c][n][1] = w[c][n][2] = w[c][n][3] = 0.0f;
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
        const float reference = max_of(m[n][c], x * factor[n][c] - REFERENCE_BELOW), by = exp2_fast(m[n][c] - reference);
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
        #pragma unroll
        for (int i = 0; i < (CENTERED ? VALUE_GROUPS : 1); i++) {
          w[i][n][c] *= by * by_unit;
          w[i][n][c + 2] *= by * by_unit;
        }
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
        const ScaleAndZero first = load_scale<Value, VALUE_OFFSET>(scales, group), second = load_scale<Value, VALUE_OFFSET>(scales + 8 * Value::scale_bytes, group);
        #pragma unroll
        for (int n = 0; n < TILES_N; n++) {
          weights(p[n], first.scale * weight_unit, second.scale * weight_unit, b[n]);
          if constexpr (CENTERED) mma<false>(w[group][n], ones, ones, ones, ones, b[n][0], b[n][1]);
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
      load_words<ValueShare::bytes>(stage + at.value[r & 1] + row * Value::row_bytes + 8 * chunk * ValueShare::bytes, words[r]);
    }
    u32 scale[2];
    if constexpr (scales_elements<Value>()) {
      #pragma unroll
      for (int k = 0; k < 2; k++) {
        const u8* blocks = stage + (16 * u + 8 * k) * Value::scale_bytes + 8 * chunk * ValueShare::elements / 16;
        scale[k] = half2_of_e4m3(blocks[at.value_block[0]] | blocks[at.value_block[1]] << 8);
      }
    }
    // One pair per dim of the share: rows 2 t and 2 t + 1 of the contraction, and 8 after them. Two dims make an m-tile.
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
            mma<VALUE_BF16>(c, pair[0][2 * i], pair[0][2 * i + 1], pair[1][2 * i], pair[1][2 * i + 1], b[n][0], b[n][1]);
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
            if constexpr (CENTERED) x -= 8.0f / weight_unit * w[i / (M_TILES / VALUE_GROUPS)][n][c];
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
    for (int i = 4 * lane; i < Value::row_bytes; i += 128) *reinterpret_cast<u32*>(stage + VALUE_AT + row * Value::row_bytes + i) = 0;
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
DEVICE void attend(const DecodeParams& p, u8* stage, i32 start, bool edge, Range rows, i32 first_column, const Lane& at, int lane,
                   const Queries& q, State& state) {
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
        heaviest = max_of(heaviest, load_scale<Value, VALUE_OFFSET>(stage + at.value_scale + 8 * i * Value::scale_bytes, group).scale);
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
    if (p.out_type == 2) reinterpret_cast<float*>(p.out)[to] = x;
    else reinterpret_cast<u16*>(p.out)[to] = static_cast<u16>(p.out_type ? half2_of(x, 0.0f) : bf16x2_of(x, 0.0f));
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
    const float m = shuffle_xor(sum.m, d), top = max_of(sum.m, m), mine = exp2_fast(sum.m - top), theirs = exp2_fast(m - top);
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

KERNEL void LAUNCH_BOUNDS(THREADS, BLOCKS) decode(GRID_CONSTANT DecodeParams p) {
  u8* shared = shared_memory();
  const int lane = threadIdx.x & 31;
  const u32 warp = shuffle(threadIdx.x >> 5, 0);  // the compiler then knows that it is one number per warp
  const i32 first_column = blockIdx.y * COLUMNS;
  const u32 heads = p.batch * p.kv_heads, tiles = p.tiles;
  // Where shares begin, in blocks that share a head or, without ONE_HEAD, in all; none is empty.
  const auto share_begin = [&](u32 block) { return block * p.share + (block < p.longer ? block : p.longer); };
  const auto block_of = [&](u32 tile) {
    const u32 in_longer = p.longer * (p.share + 1);
    return tile < in_longer ? tile / (p.share + 1) : p.longer + (tile - in_longer) / p.share;
  };
  // Blocks are counted along x; with ONE_HEAD, head after head, x within a head and z over heads.
  const u32 head_of_block = blockIdx.z, block = blockIdx.x, block_in_all = blockIdx.z * gridDim.x + blockIdx.x;
  const u32 begin = head_of_block * tiles + share_begin(block), end = head_of_block * tiles + share_begin(block + 1);
  WarpRing ring(shared + warp * WarpRing::bytes, shared + WARPS * WarpRing::bytes + warp * WarpRing::barrier_bytes);
  float* parts = reinterpret_cast<float*>(shared + MERGE_AT);
  u32* last_flag = reinterpret_cast<u32*>(parts + WARPS * PART_FLOATS);
  const Lane at(lane);

  const u32 first_tile = begin + warp;  // of this warp, in the work list
  u32 to_fill = first_tile < end ? (end - first_tile + WARPS - 1) / WARPS : 0;
  Cursor next{};
  const u32 first_head = ONE_HEAD ? head_of_block : begin / tiles, ahead = first_tile - first_head * tiles;
  // More warps than tiles: the first tile may lie in a later head.
  if (to_fill) next.enter(p, (first_head + (ONE_HEAD ? 0 : ahead / tiles)) / p.kv_heads, (first_head + (ONE_HEAD ? 0 : ahead / tiles)) % p.kv_heads, ONE_HEAD ? ahead : ahead % tiles);
  const auto fill = [&](u32 stage) {
    if (to_fill) {
      to_fill--;
      next.fill(p, ring, stage);
    } else {
      ring.fill_nothing();
    }
  };
  #pragma unroll 1
  for (u32 stage = 0; stage < STAGES; stage++) fill(stage);

  u32 at_tile = first_tile;
  #pragma unroll 1
  for (u32 head = first_head; head == first_head || (!ONE_HEAD && head <= (end - 1) / tiles); head++) {
    const u32 head_begin = head * tiles, head_end = head_begin + tiles;
    const u32 to = head_end < end ? head_end : end;
    const u32 b = head / p.kv_heads, h = head % p.kv_heads;
    const Range rows = rows_of(p, b);
    // The last query sees the most of the end, the first the most of a window's beginning.
    const Tiles clean = tiles_within(p, {max_of(rows.from, p.window ? p.position + p.queries - p.window : 0), min_of(rows.to, p.position + 1)});
    Queries q;
    q.load(p, b, h, first_column, lane);
    State state;
    state.clear();
    #pragma unroll 1
    for (; at_tile < to; at_tile += WARPS) {
      u8* stage = ring.wait();
#if LOADS_ONLY
      state.o[0][0][0] += *reinterpret_cast<const float*>(stage + 4 * lane);
#else
      const i32 tile = at_tile - head_begin, start = p.first + tile * TOKENS;
      const bool edge = !clean.have(tile);
      if (!edge || (start < rows.to && start + TOKENS > rows.from)) attend(p, stage, start, edge, rows, first_column, at, lane, q, state);
      // Rows that were cleared come before what the copy engine writes there next.
      if (edge) fence_copies();
#endif
      fill(ring.release());
    }
    float value_global = 1.0f;
    if (p.value_global) value_global = reinterpret_cast<const float*>(p.value_global)[b * p.value_global_batch + h * p.value_global_head];
    state.write(parts + warp * PART_FLOATS, at, value_global);
    sync_block();

    const auto of_warp = [&](u32 i) { return parts + i * PART_FLOATS; };
    if (begin <= head_begin && to == head_end) {
      merge(of_warp, WARPS, [&](int e, const Sum& sum) { write_out(p, head, first_column, e, sum); });
    } else {
      // A block has a part in at most two heads that it shares: one that it continues, in slot 0, and one that it begins.
      float* slots = reinterpret_cast<float*>(p.partial) + static_cast<i64>(blockIdx.y) * 2 * gridDim.x * gridDim.z * PART_FLOATS;
      float* mine = slots + static_cast<i64>(2 * block_in_all + (head_begin < begin ? 0 : 1)) * PART_FLOATS;
      merge(of_warp, WARPS, [&](int e, const Sum& sum) {
        reinterpret_cast<Four*>(mine)[e] = sum.o;
        if (e < 2 * COLUMNS && e % 2 == 0) {
          mine[OUT_FLOATS + e / 2] = sum.m;
          mine[OUT_FLOATS + COLUMNS + e / 2] = sum.l;
        }
      });
      const u32 first_block = ONE_HEAD ? head * gridDim.x : block_of(head_begin);
      const u32 count = ONE_HEAD ? gridDim.x : block_of(head_end - 1) - first_block + 1;
      sync_block();
      u32* counter = reinterpret_cast<u32*>(p.counters) + blockIdx.y * heads + head;
      if (threadIdx.x == 0) *last_flag = atomic_add_fenced(counter, 1) == count - 1;
      sync_block();
      if (*last_flag) {
        // Only the first of the head's blocks begins it.
        const auto of_block = [&](u32 i) { return slots + static_cast<i64>(2 * (first_block + i) + (i ? 0 : 1)) * PART_FLOATS; };
        merge(of_block, count, [&](int e, const Sum& sum) { write_out(p, head, first_column, e, sum); });
        if (threadIdx.x == 0) *counter = 0;
      }
    }
    sync_block();
  }
}
