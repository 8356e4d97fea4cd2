// A ring of stages in shared memory that one warp fills ahead of its own reading. No other warp has a part in it.
#pragma once
#include "ptx.cuh"

#if __CUDA_ARCH__ >= 900
  #define BULK_COPIES 1
#endif

// One contiguous piece of a stage: `bytes` from `source` go to `offset` in the stage.
struct Piece {
  const u8* source;
  u32 offset, bytes;
};

// All methods are called by the whole warp, with equal arguments.
template <int COUNT, int BYTES>
struct Ring {
  static constexpr u32 bytes = COUNT * BYTES, barrier_bytes = COUNT * 8;
  u8* stages;
  u32 barriers;
  u32 stage, parity;
#if BULK_COPIES
  u64 policy;
#endif

  DEVICE Ring(u8* stages_, u8* barriers_) : stages(stages_), barriers(shared_address(barriers_)), stage(0), parity(0) {
#if BULK_COPIES
    policy = read_once_policy();
    if (elect_one()) {
      for (int i = 0; i < COUNT; i++) barrier_init(barriers + 8 * i);
      barrier_init_fence();
    }
    sync_warp();
#endif
  }

  // Starts to fill stage `at`. Pieces of zero bytes are left out. Source and offset are 16-byte aligned; a piece may be
  // filled up to the next multiple of 16 bytes.
  template <int N>
  DEVICE void fill(u32 at, const Piece (&pieces)[N]) {
    u8* to = stages + at * BYTES;
#if BULK_COPIES
    if (elect_one()) {
      const u32 barrier = barriers + 8 * at, base = shared_address(to);
      u32 total = 0;
      for (int i = 0; i < N; i++) total += (pieces[i].bytes + 15u) & ~15u;
      barrier_expect(barrier, total);
      for (int i = 0; i < N; i++) {
        const u32 n = (pieces[i].bytes + 15u) & ~15u;
        if (n) bulk_copy(base + pieces[i].offset, pieces[i].source, n, barrier, policy);
      }
    }
#else
    const u32 base = shared_address(to), lane = threadIdx.x & 31;
    for (int i = 0; i < N; i++)
      for (u32 o = lane * 16; o < pieces[i].bytes; o += 512)
        lane_copy(base + pieces[i].offset + o, pieces[i].source + o);
    lane_copies_commit();
#endif
  }

  // Where nothing is left to fill, so that waiting can go on counting.
  DEVICE void fill_nothing() {
#if !BULK_COPIES
    lane_copies_commit();
#endif
  }

  // The next filled stage.
  DEVICE u8* wait() {
#if BULK_COPIES
    barrier_wait(barriers + 8 * stage, parity);
#else
    lane_copies_wait<COUNT - 1>();
    sync_warp();
#endif
    return stages + stage * BYTES;
  }

  // Done with that stage, whose number is returned.
  DEVICE u32 release() {
    sync_warp();
    const u32 freed = stage;
    if (++stage == COUNT) {
      stage = 0;
      parity ^= 1;
    }
    return freed;
  }
};
