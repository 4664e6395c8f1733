extern "C" void gelu(const void* const* in, void* const* out, int64_t first_unit, int64_t last_unit) {
  const float* const __restrict a0 = (const float*)in[0];
  float* const __restrict o8 = (float*)out[0];
  #pragma omp simd
  for (int64_t i8_0 = first_unit * 1536; i8_0 < last_unit * 1536; ++i8_0) {
    const float v0 = a0[i8_0];
    const float v2 = v0 * 0.5f;
    const float v4 = v0 * 0.7071067690849304f;
    const float v7 = co_one_plus_erf(v4);
    const float v8 = v2 * v7;
    o8[i8_0] = v8;
  }
}
