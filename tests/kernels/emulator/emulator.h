// The functions of kernels/ptx.cuh for a CPU. Results equal the hardware's to the bit, except:
//   mma             sums exactly and rounds once; tensor cores align and truncate
//   exp2_fast, log2_fast   are the C library's
//
// __CUDA_ARCH__ is set by the build, as a CUDA compiler sets it: what an older GPU lacks is missing here too.
#pragma once
#if !defined(__CUDA_ARCH__)
#error "the emulator is compiled with -D__CUDA_ARCH__=900, or another GPU's number"
#endif
#include <math.h>

#include "machine.h"

#define DEVICE inline
#define KERNEL extern "C"
#define GRID_CONSTANT const
#define LAUNCH_BOUNDS(threads, blocks)
#define __global__
#define __launch_bounds__(...)

// Where a function was called. Lanes of a warp must make a collective call from the same place.
#define EMULATOR_CALLER const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define EMULATOR_SITE(name) \
  emulator::Site { name, file, line }

// ---- threads, warps, blocks

DEVICE void sync_block(EMULATOR_CALLER) { emulator::block_barrier(EMULATOR_SITE("sync_block")); }
DEVICE void sync_warp(EMULATOR_CALLER) {
  emulator::collective(EMULATOR_SITE("sync_warp"), [](emulator::Lane*) {});
}
DEVICE u32 shuffle(u32 x, int lane, EMULATOR_CALLER) {
  emulator::Lane& me = *emulator::M.running;
  me.in[0] = x;
  me.in[1] = static_cast<u32>(lane) & 31;
  emulator::collective(EMULATOR_SITE("shuffle"), [](emulator::Lane* lanes) {
    for (u32 i = 0; i < 32; i++) lanes[i].out[0] = lanes[lanes[i].in[1]].in[0];
  });
  return me.out[0];
}
DEVICE u32 shuffle_xor(u32 x, int mask, EMULATOR_CALLER) {
  emulator::Lane& me = *emulator::M.running;
  if (mask < 0 || mask > 31) emulator::fail("shuffle_xor at %s:%d: mask %d", file, line, mask);
  me.in[0] = x;
  me.in[1] = static_cast<u32>(mask);
  emulator::collective(EMULATOR_SITE("shuffle_xor"), [](emulator::Lane* lanes) {
    for (u32 i = 0; i < 32; i++) lanes[i].out[0] = lanes[i ^ lanes[i].in[1]].in[0];
  });
  return me.out[0];
}
DEVICE float shuffle_xor(float x, int mask, EMULATOR_CALLER) {
  u32 bits;
  memcpy(&bits, &x, 4);
  bits = shuffle_xor(bits, mask, file, line);
  memcpy(&x, &bits, 4);
  return x;
}
DEVICE bool any_lane(bool x, EMULATOR_CALLER) {
  emulator::Lane& me = *emulator::M.running;
  me.in[0] = x;
  emulator::collective(EMULATOR_SITE("any_lane"), [](emulator::Lane* lanes) {
    u32 any = 0;
    for (u32 i = 0; i < 32; i++) any |= lanes[i].in[0];
    for (u32 i = 0; i < 32; i++) lanes[i].out[0] = any;
  });
  return me.out[0];
}
// Which lane it is depends on the seed, but not on the call.
DEVICE bool elect_one(EMULATOR_CALLER) {
  emulator::collective(EMULATOR_SITE("elect_one"), [](emulator::Lane*) {});
  return emulator::M.running->index % 32 == emulator::M.leader;
}
DEVICE u32 atomic_add_fenced(u32* address, u32 x) {
  const u32 before = *address;
  *address = before + x;
  return before;
}
DEVICE void atomic_or(i32* address, i32 x) { *address |= x; }

// ---- memory

DEVICE u8* shared_memory() { return emulator::M.shared; }
DEVICE u32 shared_address(const void* p, EMULATOR_CALLER) { return emulator::address_of(p, EMULATOR_SITE("shared_address")); }

#if __CUDA_ARCH__ >= 900
DEVICE void barrier_init(u32 barrier, EMULATOR_CALLER) {
  const emulator::Site site = EMULATOR_SITE("barrier_init");
  if (barrier % 8) emulator::fail("barrier_init at %s:%d: the address is no multiple of 8", file, line);
  u8* memory = emulator::shared_pointer(barrier, 8, site);
  if (emulator::M.barriers.count(barrier)) emulator::fail("barrier_init at %s:%d: it was initialised before", file, line);
  const u64 mark = emulator::barrier_mark(barrier);
  memcpy(memory, &mark, 8);
  emulator::M.barriers[barrier] = {0, false, false, 0, emulator::M.running->index, {}};
}
DEVICE void barrier_init_fence() {
  for (auto& [address, barrier] : emulator::M.barriers)
    if (barrier.initialiser == emulator::M.running->index) barrier.visible = true;
}
DEVICE void barrier_expect(u32 barrier, u32 bytes, EMULATOR_CALLER) {
  emulator::Barrier& b = emulator::barrier_at(barrier, EMULATOR_SITE("barrier_expect"));
  if (b.arrived) emulator::fail("barrier_expect at %s:%d: a second arrival in one phase", file, line);
  if (bytes > emulator::MAX_TRANSACTION) emulator::fail("barrier_expect at %s:%d: %u bytes are too many", file, line, bytes);
  b.arrived = true;
  b.transactions += bytes;
  emulator::complete_phase(b);
}
DEVICE void barrier_wait(u32 barrier, u32 parity, EMULATOR_CALLER) {
  const emulator::Site site = EMULATOR_SITE("barrier_wait");
  emulator::Lane& me = *emulator::M.running;
  if (parity > 1) emulator::fail("barrier_wait at %s:%d: parity %u", file, line, parity);
  me.site = site;
  if (emulator::phase_is_over(emulator::barrier_at(barrier, site), parity)) return;
  me.barrier = barrier;
  me.parity = parity;
  me.state = emulator::AT_BARRIER;
  emulator::switch_out();
}
DEVICE void bulk_copy(u32 destination, const void* source, u32 bytes, u32 barrier, u64, EMULATOR_CALLER) {
  const emulator::Site site = EMULATOR_SITE("bulk_copy");
  emulator::Barrier& b = emulator::barrier_at(barrier, site);
  if (!b.visible) emulator::fail("bulk_copy at %s:%d: no barrier_init_fence after the barrier's initialisation", file, line);
  b.copies.push_back(emulator::start_copy(destination, source, bytes, site));
}
DEVICE u64 read_once_policy() { return 0; }
#endif
DEVICE void fence_copies() {}

DEVICE void lane_copy(u32 destination, const void* source, EMULATOR_CALLER) {
  emulator::Lane& me = *emulator::M.running;
  me.copies.push_back(emulator::start_copy(destination, source, 16, EMULATOR_SITE("lane_copy")));
  me.copies.back().group = me.committed;
}
DEVICE void lane_copies_commit() { emulator::M.running->committed++; }
template <int LEFT>
DEVICE void lane_copies_wait() {
  emulator::Lane& me = *emulator::M.running;
  std::vector<emulator::Copy> left;
  for (const emulator::Copy& copy : me.copies) {
    if (copy.group + LEFT < me.committed)
      emulator::finish_copy(copy);
    else
      left.push_back(copy);
  }
  me.copies.swap(left);
}

// ---- bits

DEVICE float float_of(u32 bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
DEVICE u32 bits_of(float x) {
  u32 bits;
  memcpy(&bits, &x, 4);
  return bits;
}
DEVICE u32 pick_bytes(u32 a, u32 b, u32 selector) {
  const u64 all = static_cast<u64>(b) << 32 | a;
  u32 r = 0;
  for (int i = 0; i < 4; i++) {
    const u32 nibble = selector >> (4 * i) & 15;
    u32 byte = static_cast<u32>(all >> (8 * (nibble & 7))) & 255;
    if (nibble & 8) byte = byte & 128 ? 255 : 0;  // the sign of the byte, eight times
    r |= byte << (8 * i);
  }
  return r;
}

// ---- arithmetic

namespace emulator {
namespace {

// Rounds to a number of `bits` significand bits (the leading one included) whose least positive value is 2^least; ties to even.
double round_to(double x, int bits, int least) {
  if (x == 0 || !isfinite(x)) return x;
  const int unit = std::max(ilogb(x) - bits + 1, least);
  return scalbn(nearbyint(scalbn(x, -unit)), unit);
}

u32 half_of(double x) {
  if (x != x) return 0x7fff;
  const u32 sign = signbit(x) ? 0x8000 : 0;
  const double a = fabs(round_to(x, 11, -24));
  if (a > 65504) return sign | 0x7c00;
  if (a < 0x1p-14) return sign | static_cast<u32>(a * 0x1p24);
  const int e = ilogb(a);
  return sign | (static_cast<u32>(e + 14) * 1024 + static_cast<u32>(scalbn(a, 10 - e)));
}

u32 bf16_of(float x) {
  if (x != x) return 0x7fff;
  const u32 bits = bits_of(x);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

float from_half(u32 x) {
  const u32 rest = x & 0x7fff;
  const u32 bits = rest > 0x7c00 ? 0x7fffffff : rest == 0x7c00 ? 0x7f800000 : bits_of(float_of(rest << 13) * 0x1p112f);
  return float_of(bits | (x & 0x8000) << 16);
}

u32 half_of_e4m3(u32 x) {
  const u32 e = x >> 3 & 15, m = x & 7;
  if ((x & 127) == 127) return 0x7fff;
  const double a = e ? scalbn(8.0 + m, static_cast<int>(e) - 10) : scalbn(static_cast<double>(m), -9);
  return half_of(x & 128 ? -a : a);
}

float flush(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x; }

}  // namespace
}  // namespace emulator

DEVICE float half_to_float(u16 x) { return emulator::from_half(x); }
DEVICE u32 half2_mul(u32 a, u32 b) {
  const auto one = [](u32 x, u32 y) {
    return emulator::half_of(static_cast<double>(emulator::from_half(x & 0xffff)) * emulator::from_half(y & 0xffff));
  };
  return one(a, b) | one(a >> 16, b >> 16) << 16;
}
DEVICE u32 half2_sub(u32 a, u32 b) {
  const auto one = [](u32 x, u32 y) {
    return emulator::half_of(static_cast<double>(emulator::from_half(x & 0xffff)) - emulator::from_half(y & 0xffff));
  };
  return one(a, b) | one(a >> 16, b >> 16) << 16;
}
DEVICE u32 kept(u32 x) { return x; }
DEVICE u32 half2_low(u32 x) { return (x & 0xffff) | x << 16; }
DEVICE u32 half2_high(u32 x) { return x >> 16 | (x & 0xffff0000u); }
DEVICE u32 half2_of(float low, float high) { return emulator::half_of(low) | emulator::half_of(high) << 16; }
DEVICE u32 bf16x2_of(float low, float high) { return emulator::bf16_of(low) | emulator::bf16_of(high) << 16; }
#if __CUDA_ARCH__ >= 890
#define HAS_E4M3_CONVERT 1
DEVICE u32 half2_of_e4m3(u32 x) { return emulator::half_of_e4m3(x & 255) | emulator::half_of_e4m3(x >> 8 & 255) << 16; }
#endif
DEVICE float max_of(float a, float b) { return fmaxf(a, b); }
DEVICE float exp2_fast(float x) { return emulator::flush(exp2f(emulator::flush(x))); }
DEVICE float log2_fast(float x) { return log2f(x); }

// ---- tensor cores

template <bool IS_BF16>
DEVICE void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, EMULATOR_CALLER) {
  emulator::Lane& me = *emulator::M.running;
  const u32 in[6] = {a0, a1, a2, a3, b0, b1};
  memcpy(me.in, in, sizeof in);
  memcpy(me.in + 6, c, 16);
  emulator::collective(EMULATOR_SITE(IS_BF16 ? "mma<bf16>" : "mma<fp16>"), [](emulator::Lane* lanes) {
    float a[16][16], b[8][16];
    const auto number = [](u32 x) { return IS_BF16 ? float_of(x << 16) : emulator::from_half(x & 0xffff); };
    for (int i = 0; i < 32; i++) {
      const int g = i >> 2, t = i & 3;
      const u32* in = lanes[i].in;
      for (int half = 0; half < 2; half++) {
        a[g][2 * t + half] = number(in[0] >> (16 * half));
        a[g + 8][2 * t + half] = number(in[1] >> (16 * half));
        a[g][2 * t + 8 + half] = number(in[2] >> (16 * half));
        a[g + 8][2 * t + 8 + half] = number(in[3] >> (16 * half));
        b[g][2 * t + half] = number(in[4] >> (16 * half));
        b[g][2 * t + 8 + half] = number(in[5] >> (16 * half));
      }
    }
    for (int i = 0; i < 32; i++)
      for (int j = 0; j < 4; j++) {
        const float *row = a[(i >> 2) + 8 * (j >> 1)], *column = b[2 * (i & 3) + (j & 1)];
        double sum[2] = {float_of(lanes[i].in[6 + j]), 0};
        for (int k = 0; k < 16; k++) sum[k & 1] += static_cast<double>(row[k]) * column[k];
        lanes[i].out[j] = bits_of(static_cast<float>(sum[0] + sum[1]));
      }
  });
  memcpy(c, me.out, 16);
}
DEVICE u32 transpose_8x8(u32 x, EMULATOR_CALLER) {
  emulator::Lane& me = *emulator::M.running;
  me.in[0] = x;
  emulator::collective(EMULATOR_SITE("transpose_8x8"), [](emulator::Lane* lanes) {
    const auto element = [&](u32 row, u32 column) { return lanes[4 * row + column / 2].in[0] >> (16 * (column & 1)) & 0xffff; };
    for (u32 i = 0; i < 32; i++) {
      const u32 row = i >> 2, column = 2 * (i & 3);
      lanes[i].out[0] = element(column, row) | element(column + 1, row) << 16;
    }
  });
  return me.out[0];
}

// ---- what GPUs do not forgive and CPUs do; the compiler's sanitizer calls these

namespace emulator {
namespace {
struct SanitizerSite {
  const char* file;
  u32 line, column;
};
}  // namespace
}  // namespace emulator
extern "C" {
__attribute__((used, visibility("hidden"))) void __ubsan_handle_type_mismatch_v1(void* data, void* pointer) {
  const auto* site = static_cast<emulator::SanitizerSite*>(data);
  emulator::fail("misaligned or null access at %s:%u: %p", site->file, site->line, pointer);
}
__attribute__((used, visibility("hidden"))) void __ubsan_handle_shift_out_of_bounds(void* data, void*, void*) {
  const auto* site = static_cast<emulator::SanitizerSite*>(data);
  emulator::fail("a shift by more bits than there are at %s:%u", site->file, site->line);
}
__attribute__((used, visibility("hidden"))) void __ubsan_handle_out_of_bounds(void* data, void* index) {
  const auto* site = static_cast<emulator::SanitizerSite*>(data);
  emulator::fail("index %lld outside of an array at %s:%u", static_cast<i64>(reinterpret_cast<u64>(index)), site->file, site->line);
}
}
