// Encodes new keys and values and stores them: one launch for both, the bytes those of kveval/formats/codec.py.
//
// A (sequence, head) vector of one token belongs to LANES adjacent lanes of a warp, of which each has eight elements
// (in heads of more than 256, several times eight). Lanes beyond the head repeat its last elements, which changes no
// maximum and no minimum; lanes beyond the last token repeat that token. Neither writes.
//
// Compiled with: INPUT (FloatType of the activations); for K and V: _ELEMENT, _RULE, _SCALE, _GROUP, _ZERO, _GLOBAL,
// _HEAD_DIM.
#include "vectors.cuh"

struct AppendRole {
  Rows input, codes, scales;  // codes and scales from the first new row on
  TensorScale global;
  u32 tokens;
  u32 tiles;  // blocks of one (sequence, head)
  u32 aligned, unused;
};

struct AppendParams {
  AppendRole role[2];  // keys, values
  u64 nonfinite;       // i32[2]
  u32 heads, pairs;    // KV heads; times sequences
};

using Keys = Format<K_ELEMENT, K_RULE, K_SCALE, K_GROUP, K_ZERO, K_GLOBAL, K_HEAD_DIM>;
using Values = Format<V_ELEMENT, V_RULE, V_SCALE, V_GROUP, V_ZERO, V_GLOBAL, V_HEAD_DIM>;

// How a head is spread over lanes, and its groups over what a lane has.
template <class F>
struct Spread {
  static constexpr int chunks = F::head_dim / LANE;
  HOST_DEVICE static constexpr int lanes_for(int n) {
    int lanes = 1;
    while (lanes < n && lanes < 32) lanes *= 2;
    return lanes;
  }
  static constexpr int lanes = lanes_for(chunks);
  static constexpr int turns = (chunks + lanes - 1) / lanes;
  // A group that is the whole head has all turns of a lane; others have eight elements of a lane, or fewer.
  static constexpr bool whole = F::group == F::head_dim;
  static constexpr int size = whole ? turns * LANE : F::group < LANE ? F::group : LANE;
  static constexpr int group_lanes = whole ? lanes : F::group < LANE ? 1 : F::group / LANE;
};

template <int LANES>
DEVICE float largest_of_lanes(float x) {
  for (int mask = LANES / 2; mask > 0; mask /= 2) x = larger(x, shuffle_xor(x, mask));
  return x;
}

template <class F>
DEVICE u32 stored_scale(float x, float global) {
  return store_scale<F::scale>(F::global ? x / global : x);
}
template <class F>
DEVICE float loaded_scale(u32 stored, float global) {
  const float scale = load_scale<F::scale>(stored);
  return F::global ? scale * global : scale;
}

// Codes for a stored scale. A scale of zero, stored for values too small for it, decodes to zero.
template <class F>
DEVICE void encode_scaled(const float* x, u32* codes, u32 step, float global) {
  const float divisor = or_one(loaded_scale<F>(step, global));
  for (int i = 0; i < Spread<F>::size; i++) codes[i] = code_of<F::element>(x[i] / divisor);
}

// The sum of squares of what encoding changes, added by halves of the group.
template <class F>
DEVICE float squared_error(const float* x, const u32* codes, u32 step, float global) {
  constexpr int size = Spread<F>::size;
  const float scale = loaded_scale<F>(step, global);
  float sum[size];
  for (int i = 0; i < size; i++) {
    const float error = value_of<F::element>(codes[i]) * scale - x[i];
    sum[i] = error * error;
  }
  for (int mask = Spread<F>::group_lanes / 2; mask > 0; mask /= 2)
    for (int i = 0; i < size; i++) sum[i] += shuffle_xor(sum[i], mask);
  for (int half = size / 2; half > 0; half /= 2)
    for (int i = 0; i < half; i++) sum[i] += sum[i + half];
  return sum[0];
}

// This lane's part of a group: its codes, and the numbers that are stored for the group.
template <class F>
DEVICE void encode_group(const float* x, u32* codes, float global, u32& step, u32& zero) {
  constexpr int size = Spread<F>::size, lanes = Spread<F>::group_lanes;
  if constexpr (F::rule == AS_IS) {
    for (int i = 0; i < size; i++) codes[i] = bf16_bits(x[i]);
  } else if constexpr (F::rule == CONSTANT) {
    for (int i = 0; i < size; i++) codes[i] = code_of<F::element>(F::global ? x[i] / global : x[i]);
  } else if constexpr (F::rule == MINMAX) {
    float low = x[0], high = x[0];
    for (int i = 1; i < size; i++) {
      low = smaller(low, x[i]);
      high = larger(high, x[i]);
    }
    // Of two zeros neither is the smaller; + 0 makes them one, whichever was found.
    low = -largest_of_lanes<lanes>(-low) + 0.0f;
    high = largest_of_lanes<lanes>(high) + 0.0f;
    step = stored_scale<F>((high - low) / largest(F::element), global);
    zero = stored_scale<F>(low, global);
    const float divisor = or_one(loaded_scale<F>(step, global)), offset = loaded_scale<F>(zero, global);
    for (int i = 0; i < size; i++) codes[i] = code_of<F::element>((x[i] - offset) / divisor);
  } else {
    float peak = 0.0f;
    for (int i = 0; i < size; i++) peak = larger(peak, magnitude(x[i]));
    peak = largest_of_lanes<lanes>(peak);
    if constexpr (F::rule == MX_FLOOR) {
      step = floor_scale<F::element>(peak);
      encode_scaled<F>(x, codes, step, global);
    } else if constexpr (F::rule == AMAX) {
      step = stored_scale<F>(peak / largest(F::element), global);
      encode_scaled<F>(x, codes, step, global);
    } else {
      u32 other[size];
      step = stored_scale<F>(peak / 6.0f, global);
      const u32 to_four = stored_scale<F>(peak / 4.0f, global);
      encode_scaled<F>(x, codes, step, global);
      encode_scaled<F>(x, other, to_four, global);
      const float error = squared_error<F>(x, codes, step, global);
      if (squared_error<F>(x, other, to_four, global) < error) {
        step = to_four;
        for (int i = 0; i < size; i++) codes[i] = other[i];
      }
    }
  }
}

template <class F>
DEVICE void append_role(const AppendRole& role, u32 heads, u32 pairs, i32* nonfinite) {
  using S = Spread<F>;
  if (role.tokens == 0) return;
  const u32 pair = blockIdx.x / role.tiles, tile = blockIdx.x % role.tiles;
  if (pair >= pairs) return;
  const u32 batch = pair / heads, head = pair % heads;
  const u32 token = tile * (blockDim.x / S::lanes) + threadIdx.x / S::lanes;
  const int lane = static_cast<int>(threadIdx.x % S::lanes);

  float x[S::turns][LANE];
  const u8* input = row_of(role.input, batch, head, token < role.tokens ? token : role.tokens - 1);
  bool finite = true;
  for (int turn = 0; turn < S::turns; turn++) {
    const int chunk = turn * S::lanes + lane, last = S::chunks - 1;
    load_floats<INPUT>(input + (chunk < last ? chunk : last) * (INPUT == FLOAT_FP32 ? 4 : 2) * LANE, role.aligned,
                       x[turn]);
    for (int i = 0; i < LANE; i++) finite = finite && is_finite(x[turn][i]);
  }
  if (!finite) atomic_or(nonfinite, 1);

  u32 codes[S::turns][LANE];
  constexpr int groups = S::turns * LANE / S::size;
  u32 step[groups], zero[groups];
  const float global = F::global ? scale_of(role.global, batch, head) : 1.0f;
  for (int group = 0; group < groups; group++) {
    const int at = group * S::size;
    encode_group<F>(&x[at / LANE][at % LANE], &codes[at / LANE][at % LANE], global, step[group], zero[group]);
  }

  if (token >= role.tokens) return;
  u8* row = row_of(role.codes, batch, head, token);
  for (int turn = 0; turn < S::turns; turn++) {
    const int chunk = turn * S::lanes + lane;
    if (chunk < S::chunks) store_codes<F::bits>(row + chunk * F::bits, codes[turn]);
  }
  if constexpr (F::scale != NO_SCALE) {
    if (lane % S::group_lanes) return;
    u8* scales = row_of(role.scales, batch, head, token);
    for (int group = 0; group < groups; group++) {
      const int at = group * S::size, element = (at / LANE * S::lanes + lane) * LANE + at % LANE;
      if (element >= F::head_dim) return;
      const int index = element / F::group * (F::zero ? 2 : 1);
      put_scale<F::scale>(scales, index, step[group]);
      if constexpr (F::zero) put_scale<F::scale>(scales, index + 1, zero[group]);
    }
  }
}

template <class A, class B>
constexpr bool same_type = false;
template <class A>
constexpr bool same_type<A, A> = true;

// Grid: (tiles x pairs, of the role that has more; 2). Block: a multiple of 32 up to 128.
KERNEL void LAUNCH_BOUNDS(128, 1) append(GRID_CONSTANT AppendParams p) {
  i32* nonfinite = reinterpret_cast<i32*>(p.nonfinite) + blockIdx.y;
  if (same_type<Keys, Values> || blockIdx.y == 0)
    append_role<Keys>(p.role[blockIdx.y], p.heads, p.pairs, nonfinite);
  else
    append_role<Values>(p.role[1], p.heads, p.pairs, nonfinite);
}
