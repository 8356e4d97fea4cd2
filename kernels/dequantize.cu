// Decodes rows of a packed cache into activations: the numbers are those of kveval/formats/codec.py. Every lane decodes
// eight elements.
//
// Compiled with: OUTPUT (FloatType of the activations), STORED_ELEMENT, _RULE, _SCALE, _GROUP, _ZERO, _GLOBAL,
// _HEAD_DIM.
#include "vectors.cuh"

struct DequantizeParams {
  Rows codes, scales, output;  // from the first row that is read on
  TensorScale global;
  u32 heads, tokens;
  u32 tiles;  // blocks of one (sequence, head)
};

using F = Format<STORED_ELEMENT, STORED_RULE, STORED_SCALE, STORED_GROUP, STORED_ZERO, STORED_GLOBAL, STORED_HEAD_DIM>;

// Elements of a lane that share a scale.
constexpr int SHARED = F::group < LANE ? F::group : LANE;

// Eight elements from `element` on.
DEVICE void decode_elements(const u32 (&codes)[LANE], const u8* scales, int element, float global, float (&x)[LANE]) {
  for (int part = 0; part < LANE; part += SHARED) {
    float step = global, zero = 0.0f;
    if constexpr (F::scale != NO_SCALE) {
      const int index = (element + part) / F::group * (F::zero ? 2 : 1);
      step = load_scale<F::scale>(get_scale<F::scale>(scales, index));
      if (F::global) step *= global;
      if (F::zero) zero = load_scale<F::scale>(get_scale<F::scale>(scales, index + 1));
    }
    for (int i = part; i < part + SHARED; i++) {
      const float value = value_of<F::element>(codes[i]);
      x[i] = F::zero ? multiply_add(value, step, zero) : value * step;
    }
  }
}

// Grid: tiles x heads x sequences. Block: a multiple of 32 up to 256.
KERNEL void LAUNCH_BOUNDS(256, 1) dequantize(GRID_CONSTANT DequantizeParams p) {
  constexpr u32 chunks = F::head_dim / LANE;
  const u32 pair = blockIdx.x / p.tiles, at = blockIdx.x % p.tiles * blockDim.x + threadIdx.x;
  const u32 batch = pair / p.heads, head = pair % p.heads, token = at / chunks;
  const int chunk = static_cast<int>(at % chunks);
  if (token >= p.tokens) return;
  u32 codes[LANE];
  load_codes<F::bits>(row_of(p.codes, batch, head, token) + chunk * F::bits, codes);
  float x[LANE];
  if constexpr (F::element == BF16) {
    for (int i = 0; i < LANE; i++) x[i] = bf16_number(codes[i]);
  } else {
    const u8* scales = F::scale == NO_SCALE ? nullptr : row_of(p.scales, batch, head, token);
    decode_elements(codes, scales, chunk * LANE, F::global ? scale_of(p.global, batch, head) : 1.0f, x);
  }
  store_floats<OUTPUT>(row_of(p.output, batch, head, token) + chunk * (OUTPUT == FLOAT_FP32 ? 4 : 2) * LANE, x);
}
