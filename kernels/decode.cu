// Decode attention over a packed cache: a few queries against many keys and values, read as they are stored.
//
// Columns are the (query, query head) pairs that share a KV head; a block holds COLUMNS of them. Both products are
// swapped,
//   S^T[token, column] = K[token, dim] Q^T[dim, column]        A = K,   16 tokens x 16 dims
//   O^T[dim, column]   = V^T[dim, token] P^T[token, column]    A = V^T, 16 dims x 16 tokens
// so that the tensor cores' 16 rows are filled with the cache and few columns cost little. Lane = 4 g + t.
//   K: the lane reads rows pi(g) and pi(g) + 8, and of them the share t of four;   B = Q: column g.
//   V: the lane reads rows pi(2 t), pi(2 t + 1) and 8 after them, and of them the share g of eight;   B = P: column g.
//   S comes as C (token g, columns 2 t, 2 t + 1) and is needed as B: one transposition of 8 x 8.
// The permutation pi of a tile's tokens, the order of dims in K and Q and the order of dims in the output are free;
// they make every lane's bytes contiguous.
//
// Work: the tiles of all (sequence, KV head) pairs form one list, of which every block takes a contiguous share. With
// ONE_HEAD, as many blocks share each head, evenly; without, all blocks share all heads evenly, and a block goes on
// from one head to the next with its ring full. A head that lies in several shares is combined by the block that
// finishes it last.
//
// Compiled with: HEAD_DIM; for K and V: _ELEMENT, _SCALE, _GROUP, _ZERO; COLUMNS (2, 4, 8, 16); TOKENS of a stage (16,
// 32); STAGES; WARPS; BLOCKS per multiprocessor; ONE_HEAD (0, 1); SOFTCAP (0, 1); LOADS_ONLY (0, 1): everything is read
// and nothing is computed, to measure what the computing costs.
#include "decode_cursor.cuh"
#include "decode_merge.cuh"
#include "decode_state.cuh"

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
  const u32 first_head = ONE_HEAD ? head_of_block : begin / tiles;
  if (to_fill) {
    // Where a head has fewer tiles than there are warps, the first tile may lie in a later one.
    const u32 tile_head = ONE_HEAD ? head_of_block : first_tile / tiles;
    next.enter(p, tile_head / p.kv_heads, tile_head % p.kv_heads, first_tile - tile_head * tiles);
  }
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
    const Tiles clean = tiles_within(
        p, {max_of(rows.from, p.window ? p.position + p.queries - p.window : 0), min_of(rows.to, p.position + 1)});
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
      if (!edge || (start < rows.to && start + TOKENS > rows.from))
        attend(p, stage, start, edge, rows, first_column, at, lane, q, state);
      // Rows that were cleared come before what the copy engine writes there next.
      if (edge) fence_copies();
#endif
      fill(ring.release());
    }
    float value_global = 1.0f;
    if (p.value_global)
      value_global = reinterpret_cast<const float*>(p.value_global)[b * p.value_global_batch + h * p.value_global_head];
    state.write(parts + warp * PART_FLOATS, at, value_global);
    sync_block();

    const auto of_warp = [&](u32 i) { return parts + i * PART_FLOATS; };
    if (begin <= head_begin && to == head_end) {
      merge(of_warp, WARPS, [&](int e, const Sum& sum) { write_out(p, head, first_column, e, sum); });
    } else {
      // A block has a part in at most two heads that it shares: one that it continues, in slot 0, and one that it
      // begins.
      float* slots =
          reinterpret_cast<float*>(p.partial) + static_cast<i64>(blockIdx.y) * 2 * gridDim.x * gridDim.z * PART_FLOATS;
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
        const auto of_block = [&](u32 i) {
          return slots + static_cast<i64>(2 * (first_block + i) + (i ? 0 : 1)) * PART_FLOATS;
        };
        merge(of_block, count, [&](int e, const Sum& sum) { write_out(p, head, first_column, e, sum); });
        if (threadIdx.x == 0) *counter = 0;
      }
    }
    sync_block();
  }
}
