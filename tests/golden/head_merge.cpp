extern "C" void head_merge(const void* const* in, void* const* out, int64_t first_unit, int64_t last_unit) {
  const float* const __restrict a0 = (const float*)in[0];
  const float* const __restrict a1 = (const float*)in[1];
  float* const __restrict o4 = (float*)out[0];
  for (int64_t unit = first_unit; unit < last_unit; ++unit) {
    for (int64_t i4_0 = 0; i4_0 < 4; ++i4_0) {
      for (int64_t i4_1a = 0; i4_1a < 3; ++i4_1a) {
        #pragma omp simd
        for (int64_t i4_1b = 0; i4_1b < 8; ++i4_1b) {
          const float v0 = a0[(unit * 96) + (((i4_1a * 32) + (i4_0 * 8)) + i4_1b)];
          const float v1 = a1[(unit * 96) + (((i4_0 * 24) + (i4_1a * 8)) + i4_1b)];
          const float v4 = v0 + v1;
          o4[(unit * 96) + (((i4_0 * 24) + (i4_1a * 8)) + i4_1b)] = v4;
        }
      }
    }
  }
}
