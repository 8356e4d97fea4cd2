// What the kernels ask of the hardware: thin wrappers of PTX instructions, one instruction each where there is one.
//
// A compiler that is not CUDA's gets the same functions from emulator.h, in which a block of threads runs on a CPU;
// tests run every kernel that way. A kernel therefore uses nothing of CUDA's C++ beyond __global__, __launch_bounds__,
// threadIdx, blockIdx, gridDim, blockDim and what stands here.
#pragma once
#include "types.cuh"

#if !defined(__CUDACC__)
  #include "emulator.h"
#else

  #define DEVICE __device__ __forceinline__
  #define KERNEL extern "C" __global__
  #define GRID_CONSTANT const __grid_constant__
  #define LAUNCH_BOUNDS(threads, blocks) __launch_bounds__(threads, blocks)

// ---- threads, warps, blocks

DEVICE void sync_block() { __syncthreads(); }
DEVICE void sync_warp() { __syncwarp(); }
DEVICE u32 shuffle(u32 x, int lane) { return __shfl_sync(~0u, x, lane); }
DEVICE u32 shuffle_xor(u32 x, int mask) { return __shfl_xor_sync(~0u, x, mask); }
DEVICE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(~0u, x, mask); }
DEVICE bool any_lane(bool x) { return __any_sync(~0u, x); }
// True in one lane of the warp. The compiler knows that it is one, and makes no loop around what depends on it.
DEVICE bool elect_one() {
  u32 r;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(r));
  return r;
}
DEVICE void atomic_or(i32* address, i32 x) { atomicOr(address, x); }
// What this thread, and the block's others before a barrier, wrote comes before it; what they read after it comes
// after.
DEVICE u32 atomic_add_fenced(u32* address, u32 x) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(address), "r"(x) : "memory");
  return before;
}

// ---- memory

// The block's dynamic shared memory, 128-byte aligned.
DEVICE u8* shared_memory() {
  extern __shared__ __align__(128) u8 dynamic_shared[];
  return dynamic_shared;
}
DEVICE u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

// An mbarrier is 8 bytes of shared memory at an 8-byte aligned shared address. One arrival completes a phase.
DEVICE void barrier_init(u32 barrier) { asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier)); }
// Makes initialised barriers visible to the copy engine.
DEVICE void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// The arrival of this phase, which then completes once `bytes` more have been copied.
DEVICE void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
DEVICE void barrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred p;\nWAIT:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\nbra "
      "WAIT;\nDONE:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
// `bytes` (a multiple of 16) from global to shared memory, both 16-byte aligned, counted by `barrier`. The data is read
// once: it leaves the L2 cache first.
DEVICE void bulk_copy(u32 destination, const void* source, u32 bytes, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(destination),
      "l"(source), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}
DEVICE u64 read_once_policy() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
// Ordinary accesses to shared memory before it come before bulk copies after it.
DEVICE void fence_copies() {
  #if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  #endif
}
// 16 bytes from global to shared memory, by this lane; the older way, which GPUs before Hopper have too.
DEVICE void lane_copy(u32 destination, const void* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(destination), "l"(source) : "memory");
}
DEVICE void lane_copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>
DEVICE void lane_copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// ---- bits

// x, of which the compiler forgets how it came about: it stays in a register.
DEVICE u32 kept(u32 x) {
  asm volatile("" : "+r"(x));
  return x;
}

DEVICE float float_of(u32 bits) { return __uint_as_float(bits); }
DEVICE u32 bits_of(float x) { return __float_as_uint(x); }
// Four bytes picked from the eight of (a, b), as `prmt`: nibble i of `selector` says which byte of b:a becomes byte i.
DEVICE u32 pick_bytes(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }

// ---- arithmetic. A half2 or bf16x2 is a u32 with the first number in its low half.

DEVICE u32 half2_mul(u32 a, u32 b) {
  u32 r;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
DEVICE u32 half2_sub(u32 a, u32 b) {
  u32 r;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
// The low half twice, and the high half twice: multiplications take it as an operand's modifier.
DEVICE u32 half2_low(u32 x) {
  u32 r;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\nmov.b32 %0, {low, low};\n}" : "=r"(r) : "r"(x));
  return r;
}
DEVICE u32 half2_high(u32 x) {
  u32 r;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\nmov.b32 %0, {high, high};\n}" : "=r"(r) : "r"(x));
  return r;
}
DEVICE u32 half2_of(float low, float high) {
  u32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
DEVICE u32 bf16x2_of(float low, float high) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
DEVICE float half_to_float(u16 x) {
  float r;
  asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(x));
  return r;
}
  #if __CUDA_ARCH__ >= 890
    #define HAS_E4M3_CONVERT 1
// Two e4m3 codes, in the low 16 bits of x, to half2. Exact.
DEVICE u32 half2_of_e4m3(u32 x) {
  u32 r;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"(static_cast<u16>(x)));
  return r;
}
  #endif
// The larger one; a number where the other is NaN.
DEVICE float max_of(float a, float b) {
  float r;
  asm("max.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}
// 2^x, at most 2 units in the last place off; subnormal results become 0.
DEVICE float exp2_fast(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
// log2 x and 1/x, for the end of a kernel: a few units in the last place off.
DEVICE float log2_fast(float x) {
  float r;
  asm("lg2.approx.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

// ---- tensor cores: c += a b, a 16 x 16 (rows), b 16 x 8 (columns), c 16 x 8 in fp32; fragments as the PTX ISA has
// them for mma.m16n8k16

template <bool IS_BF16>
DEVICE void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  if constexpr (IS_BF16)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// Transposes an 8 x 8 matrix of 16-bit numbers, of which lane 4 r + c holds row r, columns 2 c and 2 c + 1.
DEVICE u32 transpose_8x8(u32 x) {
  u32 r;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(x));
  return r;
}
#endif
