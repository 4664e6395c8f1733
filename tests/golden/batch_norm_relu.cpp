extern "C" void batch_norm_relu(const void* const* in, void* const* out, int64_t first_unit, int64_t last_unit) {
  const float* const __restrict a0 = (const float*)in[0];
  const float* const __restrict a1 = (const float*)in[1];
  const float* const __restrict a2 = (const float*)in[2];
  const float* const __restrict a3 = (const float*)in[3];
  float* const __restrict o9 = (float*)out[0];
  for (int64_t unit = first_unit; unit < last_unit; ++unit) {
    for (int64_t i9_0 = 0; i9_0 < 5; ++i9_0) {
      const float v2 = a2[i9_0];
      const float v3 = a3[i9_0];
      #pragma omp simd
      for (int64_t i9_1 = 0; i9_1 < 49; ++i9_1) {
        const float v0 = a0[(unit * 245) + ((i9_0 * 49) + i9_1)];
        const float v5 = v0 * v2;
        const float v7 = v5 + v3;
        const float v1 = a1[(unit * 245) + ((i9_0 * 49) + i9_1)];
        const float v8 = v7 + v1;
        const float v9 = co_relu(v8);
        o9[(unit * 245) + ((i9_0 * 49) + i9_1)] = v9;
      }
    }
  }
}
