// What test_emulator.py runs: correct uses of everything in ptx.cuh, and mistakes that the emulator must find.
#include "ptx.cuh"

struct SampleParams {
  u64 a, b, out;
  i32 sample;
};

template <bool IS_BF16>
DEVICE void multiply(const u16* a, const u16* b, float* c) {  // a 16 x 16 and c 16 x 8 by rows, b 16 x 8 by columns
  const u32 lane = threadIdx.x & 31, g = lane / 4, t = lane % 4;
  const auto pair = [](const u16* p) { return *reinterpret_cast<const u32*>(p); };
  float sum[4];
  for (u32 i = 0; i < 4; i++) sum[i] = c[(g + 8 * (i / 2)) * 8 + 2 * t + i % 2];
  mma<IS_BF16>(sum, pair(a + g * 16 + 2 * t), pair(a + (g + 8) * 16 + 2 * t), pair(a + g * 16 + 2 * t + 8),
               pair(a + (g + 8) * 16 + 2 * t + 8), pair(b + g * 16 + 2 * t), pair(b + g * 16 + 2 * t + 8));
  for (u32 i = 0; i < 4; i++) c[(g + 8 * (i / 2)) * 8 + 2 * t + i % 2] = sum[i];
}

// 64 numbers per tile go through a ring of two stages, and are added up by lane.
enum RingMistake { NONE, NO_WAIT, NO_RELEASE, WRONG_PARITY, FEWER_BYTES, MORE_BYTES, NO_FENCE, LEFT_OVER };
template <RingMistake MISTAKE>
DEVICE void ring(const float* in, float* out) {
  const u32 tiles = 7, bytes = 256, lane = threadIdx.x & 31;
  u8* stages = shared_memory();
  const u32 base = shared_address(stages), barriers = base + 2 * bytes;
  const u64 policy = read_once_policy();
  const auto fill = [&](u32 tile) {
    const u32 stage = tile & 1, barrier = barriers + 8 * stage;
    barrier_expect(barrier, MISTAKE == FEWER_BYTES ? bytes - 16 : MISTAKE == MORE_BYTES ? bytes + 16 : bytes);
    bulk_copy(base + stage * bytes, in + 64 * tile, 128, barrier, policy);
    bulk_copy(base + stage * bytes + 128, in + 64 * tile + 32, 128, barrier, policy);
  };
  const bool leader = elect_one();  // once: electing makes lanes wait for each other
  if (leader) {
    barrier_init(barriers);
    barrier_init(barriers + 8);
    if (MISTAKE != NO_FENCE) barrier_init_fence();
    fill(0);
    fill(1);
  }
  sync_warp();
  float sum = 0;
  for (u32 tile = 0; tile < (MISTAKE == LEFT_OVER ? tiles - 1 : tiles); tile++) {
    const u32 stage = tile & 1, parity = tile >> 1 & 1;
    if (MISTAKE != NO_WAIT) barrier_wait(barriers + 8 * stage, MISTAKE == WRONG_PARITY ? parity ^ 1 : parity);
    const float* x = reinterpret_cast<const float*>(stages + stage * bytes);
    sum += x[lane] + x[lane + 32];
    if (MISTAKE != NO_RELEASE) sync_warp();
    if (tile + 2 < tiles && leader) fill(tile + 2);
  }
  out[lane] = sum;
}

template <bool ENOUGH>
DEVICE void lane_copies(const float* in, float* out) {  // two groups in flight
  const u32 lane = threadIdx.x & 31;
  u8* stages = shared_memory();
  float sum[4] = {0, 0, 0, 0};
  for (u32 tile = 0; tile < 8; tile++) {
    if (tile < 6) lane_copy(shared_address(stages + tile % 4 * 512 + 16 * lane), in + 128 * tile + 4 * lane);
    lane_copies_commit();
    if (tile < 2) continue;
    lane_copies_wait<ENOUGH ? 2 : 3>();
    sync_warp();
    const float* x = reinterpret_cast<const float*>(stages + (tile - 2) % 4 * 512);
    for (u32 i = 0; i < 4; i++) sum[i] += x[32 * i + (lane ^ 9)];
    sync_warp();
  }
  lane_copies_wait<0>();
  for (u32 i = 0; i < 4; i++) out[32 * i + (lane ^ 9)] = sum[i];
}

template <bool SYNC>
DEVICE void reduce_block(const float* in, float* out) {  // the sum of the block's numbers, in order
  float* shared = reinterpret_cast<float*>(shared_memory());
  shared[threadIdx.x] = in[threadIdx.x];
  if (SYNC) sync_block();
  if (threadIdx.x == 0) {
    float sum = 0;
    for (u32 i = 0; i < blockDim.x; i++) sum += shared[i];
    out[0] = sum;
  }
}

// Each block adds up its part; the one that finishes last adds up the parts and says which block it was.
DEVICE void reduce_grid(const float* in, float* out, u32* counter) {
  const u32 block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z), blocks = gridDim.x * gridDim.y * gridDim.z;
  float* parts = out + 2;
  float sum = in[32 * block + threadIdx.x];
  for (int i = 16; i; i >>= 1) sum += shuffle_xor(sum, i);
  u32 last = 0;
  if (threadIdx.x == 0) {
    parts[block] = sum;
    last = atomic_add_fenced(counter, 1) == blocks - 1;
  }
  last = shuffle(last, 0);
  if (!last) return;
  float total = 0;
  for (u32 i = threadIdx.x; i < blocks; i += 32) total += parts[i];
  for (int i = 16; i; i >>= 1) total += shuffle_xor(total, i);
  if (threadIdx.x == 0) {
    out[0] = total;
    out[1] = static_cast<float>(block);
  }
}

DEVICE void warp_calls(const u32* in, u32* out) {
  const u32 lane = threadIdx.x & 31, x = in[lane];
  out[lane] = shuffle(x, static_cast<int>(lane * 7 & 31));
  out[32 + lane] = shuffle_xor(x, 5);
  out[64 + lane] = any_lane(lane == 17) + 2 * any_lane(lane > 31);
  out[96 + lane] = transpose_8x8(x);
  out[128 + lane] = elect_one();
  out[160 + lane] = bits_of(shuffle_xor(float_of(x), 31));
}

DEVICE void arithmetic(const u32* in, u32* out) {  // one thread
  out[0] = half2_mul(in[0], in[1]);
  out[1] = half2_sub(in[0], in[1]);
  out[2] = half2_of(float_of(in[0]), float_of(in[1]));
  out[3] = bf16x2_of(float_of(in[0]), float_of(in[1]));
  out[4] = bits_of(half_to_float(static_cast<u16>(in[0])));
#if HAS_E4M3_CONVERT
  out[5] = half2_of_e4m3(in[0]);
#endif
  out[6] = pick_bytes(in[0], in[1], 0x7531);
  out[7] = pick_bytes(in[0], in[1], 0x8c04);
}

KERNEL void LAUNCH_BOUNDS(1024, 1) sample(GRID_CONSTANT SampleParams p) {
  const u32 lane = threadIdx.x & 31;
  const float* a = reinterpret_cast<const float*>(p.a);
  u32* words = reinterpret_cast<u32*>(p.out);
  float* out = reinterpret_cast<float*>(p.out);
  switch (p.sample) {
    case 0: return multiply<false>(reinterpret_cast<const u16*>(p.a), reinterpret_cast<const u16*>(p.b), out);
    case 1: return multiply<true>(reinterpret_cast<const u16*>(p.a), reinterpret_cast<const u16*>(p.b), out);
    case 2: return warp_calls(reinterpret_cast<const u32*>(p.a), words);
    case 3: {
      const u32* in = reinterpret_cast<const u32*>(p.a);
      const u32 at = blockIdx.x * 32 + lane;
      return arithmetic(in + 2 * at, words + 8 * at);
    }
    case 4: return ring<NONE>(a, out);
    case 5: return lane_copies<true>(a, out);
    case 6: return reduce_block<true>(a, out);
    case 7: return reduce_grid(a, out, reinterpret_cast<u32*>(p.b));
    case 8:
      atomic_add_fenced(words, threadIdx.x);
      return atomic_or(reinterpret_cast<i32*>(words + 1), 1 << (threadIdx.x & 15));
    case 9: return void(out[threadIdx.x] = exp2_fast(a[threadIdx.x]) + log2_fast(a[threadIdx.x]));
    // Mistakes.
    case 20: return ring<NO_WAIT>(a, out);
    case 21: return ring<NO_RELEASE>(a, out);
    case 22: return ring<WRONG_PARITY>(a, out);
    case 23: return ring<FEWER_BYTES>(a, out);
    case 24: return ring<MORE_BYTES>(a, out);
    case 25: return ring<NO_FENCE>(a, out);
    case 26: return ring<LEFT_OVER>(a, out);
    case 27: return lane_copies<false>(a, out);
    case 28: return reduce_block<false>(a, out);
    case 30:  // different calls
      if (lane < 16)
        sync_warp();
      else
        words[lane] = shuffle(lane, 0);
      return;
    case 31:  // the same call in two places
      if (lane < 16)
        sync_warp();
      else
        sync_warp();
      return;
    case 32:  // some lanes have returned
      if (lane == 3) return;
      return sync_warp();
    case 33:  // a warp is missing
      if (threadIdx.x >= 32) return;
      return sync_block();
    case 34:  // one warp waits for the block, the other for its own lanes and never for the block
      if (threadIdx.x < 32 || lane < 16) sync_block();
      if (threadIdx.x >= 32) sync_warp();
      return;
    case 40: return void(words[0] = shared_memory()[1 << 20]);
    case 41: return void(shared_memory()[1008] = 1);  // the byte behind a block's shared memory
    case 42: return void(words[0] = shared_address(words));
    case 43: return lane_copy(shared_address(shared_memory()) + 1008, a);
    case 44: return lane_copy(shared_address(shared_memory()) + 8, a);
    case 45: return lane_copy(shared_address(shared_memory()), a + 1);
    case 46:  // all lanes to one place
      lane_copy(shared_address(shared_memory()), a);
      return sync_warp();
    case 47: return lane_copy(shared_address(shared_memory()) + 16 * lane, a);  // never waited for
    case 50: return void(words[0] = *reinterpret_cast<const u32*>(p.a + 2));
    case 51: return void(words[0] = 1u << (lane + p.sample));
    case 52: {
      u32 few[4] = {0, 1, 2, 3};
      return void(words[0] = few[lane]);
    }
    case 53: return void(words[0] = *reinterpret_cast<const u32*>(8));
    case 54: return barrier_expect(shared_address(shared_memory()), 16);
    case 55:
      if (lane == 0) {
        barrier_init(shared_address(shared_memory()));
        *reinterpret_cast<u32*>(shared_memory()) = 0;
        barrier_expect(shared_address(shared_memory()), 16);
      }
      return;
    case 56: return void(words[0] = static_cast<u32>(p.sample) / (lane & 0));
  }
}
