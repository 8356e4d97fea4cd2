// Types, enumerations and the compile-time description of a storage format. Compiles with any C++17 compiler, and
// includes no header of CUDA's: at run time NVRTC has none to offer.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

#if defined(__CUDACC__)
  #define HOST_DEVICE __host__ __device__ __forceinline__
#else
  #define HOST_DEVICE inline
#endif

// The numbers are those of kveval/kernels/formats.py.
enum Element { BF16 = 0, E4M3 = 1, E5M2 = 2, INT8 = 3, UINT8 = 4, UINT4 = 5, E2M1 = 6 };
enum ScaleType { NO_SCALE = 0, FP32 = 1, BF16_SCALE = 2, FP16_SCALE = 3, E4M3_SCALE = 4, E8M0_SCALE = 5 };
enum Rule { AS_IS = 0, CONSTANT = 1, AMAX = 2, MINMAX = 3, MX_FLOOR = 4, FOUR_OVER_SIX = 5 };

HOST_DEVICE constexpr int element_bits(int element) {
  return element == BF16 ? 16 : element == UINT4 || element == E2M1 ? 4 : 8;
}
HOST_DEVICE constexpr int scale_size(int type) {
  return type == NO_SCALE ? 0 : type == FP32 ? 4 : type == BF16_SCALE || type == FP16_SCALE ? 2 : 1;
}

// How one role (keys or values) is stored.
// GROUP: elements along the head that share a stored scale (the head's size: one per token, or none is stored).
// ZERO: a zero point is stored behind each scale. GLOBAL: there is a tensor-level fp32 scale besides.
template <int ELEMENT, int RULE, int SCALE, int GROUP, bool ZERO, bool GLOBAL, int DIM>
struct Format {
  static constexpr int element = ELEMENT, rule = RULE, scale = SCALE, group = GROUP, head_dim = DIM;
  static constexpr bool zero = ZERO, global = GLOBAL;
  static constexpr int bits = element_bits(ELEMENT);
  static constexpr int row_bytes = DIM * bits / 8;
  static constexpr int groups = DIM / GROUP;
  static constexpr int scale_bytes = groups * scale_size(SCALE) * (ZERO ? 2 : 1);
  static_assert(DIM % GROUP == 0, "a group ends within the head");
};
