// NVIDIA's own conversions, compiled for the host: cuda_fp8.h and cuda_fp4.h emulate the device instructions in plain C++.
// Block formats apply one arithmetic operation at a time in float32; build with -ffp-contract=off.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp4.h>
#include <cuda_fp8.h>
#include <cuda_runtime_api.h>

#include <cmath>
#include <cstdint>

namespace {

uint8_t to_e4m3(float x) { return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3); }
uint8_t to_e2m1(float x) { return __nv_cvt_float_to_fp4(x, __NV_E2M1, cudaRoundNearest); }
uint8_t to_e8m0_floor(float x) { return __nv_cvt_float_to_e8m0(x, __NV_SATFINITE, cudaRoundZero); }
float from_fp8(uint8_t code, __nv_fp8_interpretation_t kind) {
    return __half2float(__half(__nv_cvt_fp8_to_halfraw(code, kind)));
}
float from_e2m1(uint8_t code) { return __half2float(__half(__nv_cvt_fp4_to_halfraw(code, __NV_E2M1))); }
float from_e8m0(uint8_t code) { return __bfloat162float(__nv_bfloat16(__nv_cvt_e8m0_to_bf16raw(code))); }

float amax_of(const float* x, int n) {
    float amax = 0.0f;
    for (int i = 0; i < n; i++) amax = std::fmax(amax, std::fabs(x[i]));
    return amax;
}

}  // namespace

extern "C" {

int cudart_version() { return CUDART_VERSION; }

void encode_e4m3(const float* x, uint8_t* out, int n) {
    for (int i = 0; i < n; i++) out[i] = to_e4m3(x[i]);
}
void encode_e5m2(const float* x, uint8_t* out, int n) {
    for (int i = 0; i < n; i++) out[i] = __nv_cvt_float_to_fp8(x[i], __NV_SATFINITE, __NV_E5M2);
}
void encode_e2m1(const float* x, uint8_t* out, int n) {
    for (int i = 0; i < n; i++) out[i] = to_e2m1(x[i]);
}
void encode_e8m0_floor(const float* x, uint8_t* out, int n) {
    for (int i = 0; i < n; i++) out[i] = to_e8m0_floor(x[i]);
}
void decode_e4m3(const uint8_t* codes, float* out, int n) {
    for (int i = 0; i < n; i++) out[i] = from_fp8(codes[i], __NV_E4M3);
}
void decode_e5m2(const uint8_t* codes, float* out, int n) {
    for (int i = 0; i < n; i++) out[i] = from_fp8(codes[i], __NV_E5M2);
}
void decode_e2m1(const uint8_t* codes, float* out, int n) {
    for (int i = 0; i < n; i++) out[i] = from_e2m1(codes[i]);
}
void decode_e8m0(const uint8_t* codes, float* out, int n) {
    for (int i = 0; i < n; i++) out[i] = from_e8m0(codes[i]);
}

// FP8 with one fp32 scale amax/448 per row. codes [rows, dim], scales [rows].
void fp8_per_row(const float* x, int rows, int dim, uint8_t* codes, float* scales) {
    for (int r = 0; r < rows; r++) {
        scales[r] = amax_of(x + r * dim, dim) / 448.0f;
        for (int i = 0; i < dim; i++) codes[r * dim + i] = scales[r] == 0.0f ? to_e4m3(x[r * dim + i])
                                                                            : to_e4m3(x[r * dim + i] / scales[r]);
    }
}

// NVFP4: blocks of 16, e4m3 scale (amax/6)/global, codes e2m1(x / (scale*global)). n a multiple of 16.
// A block whose scale rounds to zero decodes to zero; its codes are those of x itself.
void nvfp4(const float* x, int n, float global, uint8_t* codes, uint8_t* scales) {
    for (int b = 0; b < n / 16; b++) {
        const float* block = x + b * 16;
        scales[b] = to_e4m3(amax_of(block, 16) / 6.0f / global);
        const float step = from_fp8(scales[b], __NV_E4M3) * global;
        for (int i = 0; i < 16; i++) codes[b * 16 + i] = to_e2m1(step == 0.0f ? block[i] : block[i] / step);
    }
}

// MX: blocks of 32, e8m0 scale by the OCP floor rule. fp4: elements e2m1 (emax 2), else e4m3 (emax 8).
void mx(const float* x, int n, int fp4, uint8_t* codes, uint8_t* scales) {
    for (int b = 0; b < n / 32; b++) {
        const float* block = x + b * 32;
        const int exponent = to_e8m0_floor(amax_of(block, 32)) - (fp4 ? 2 : 8);
        scales[b] = exponent < 0 ? 0 : exponent;
        const float step = std::ldexp(1.0f, scales[b] - 127);
        for (int i = 0; i < 32; i++) codes[b * 32 + i] = fp4 ? to_e2m1(block[i] / step) : to_e4m3(block[i] / step);
    }
}

}  // extern "C"
