extern "C" void column_softmax(const void* const* in, void* const* out, int64_t first_unit, int64_t last_unit) {
  alignas(64) unsigned char shared[1088];
  float* const s1 = (float*)(shared + 0);
  float* const s4 = (float*)(shared + 64);
  float* const s5 = (float*)(shared + 1024);
  for (int64_t unit = first_unit; unit < last_unit; ++unit) {
    const float* const __restrict a0 = (const float*)in[0] + unit * 60;
    float* const __restrict o7 = (float*)out[0] + unit * 60;
    for (int64_t block = 0; block < 3; ++block) {
      {
        float v1_lanes[32];
        #pragma omp simd
        for (int64_t lane = 0; lane < 32; ++lane) {
          v1_lanes[lane] = (float)(-CO_INF);
        }
        #pragma omp simd
        for (int64_t lane = 0; lane < 20; ++lane) {
          const int64_t r1_0 = 0 + lane;
          const float v0 = a0[(r1_0 * 3) + block];
          v1_lanes[lane] = co_maximum(v0, v1_lanes[lane]);
        }
        #pragma omp simd
        for (int64_t lane = 0; lane < 16; ++lane) {
          v1_lanes[lane] = co_maximum(v1_lanes[lane + 16], v1_lanes[lane]);
        }
        #pragma omp simd
        for (int64_t lane = 0; lane < 8; ++lane) {
          v1_lanes[lane] = co_maximum(v1_lanes[lane + 8], v1_lanes[lane]);
        }
        #pragma omp simd
        for (int64_t lane = 0; lane < 4; ++lane) {
          v1_lanes[lane] = co_maximum(v1_lanes[lane + 4], v1_lanes[lane]);
        }
        v1_lanes[0] = co_maximum(v1_lanes[2], v1_lanes[0]);
        v1_lanes[1] = co_maximum(v1_lanes[3], v1_lanes[1]);
        v1_lanes[0] = co_maximum(v1_lanes[1], v1_lanes[0]);
        const float v1 = v1_lanes[0];
        s1[0] = v1;
      }
      {
        const float v1_1 = s1[0];
        #pragma omp simd
        for (int64_t i4_0 = 0; i4_0 < 20; ++i4_0) {
          const float v0_1 = a0[(i4_0 * 3) + block];
          const float v3 = v0_1 - v1_1;
          const float v4 = co_exp(v3);
          s4[i4_0] = v4;
        }
      }
      {
        float v5_lanes[32];
        #pragma omp simd
        for (int64_t lane = 0; lane < 32; ++lane) {
          v5_lanes[lane] = 0.0f;
        }
        #pragma omp simd
        for (int64_t lane = 0; lane < 20; ++lane) {
          const int64_t r5_0 = 0 + lane;
          const float v4_1 = s4[r5_0];
          v5_lanes[lane] = v5_lanes[lane] + v4_1;
        }
        #pragma omp simd
        for (int64_t lane = 0; lane < 16; ++lane) {
          v5_lanes[lane] = v5_lanes[lane] + v5_lanes[lane + 16];
        }
        #pragma omp simd
        for (int64_t lane = 0; lane < 8; ++lane) {
          v5_lanes[lane] = v5_lanes[lane] + v5_lanes[lane + 8];
        }
        #pragma omp simd
        for (int64_t lane = 0; lane < 4; ++lane) {
          v5_lanes[lane] = v5_lanes[lane] + v5_lanes[lane + 4];
        }
        v5_lanes[0] = v5_lanes[0] + v5_lanes[2];
        v5_lanes[1] = v5_lanes[1] + v5_lanes[3];
        v5_lanes[0] = v5_lanes[0] + v5_lanes[1];
        const float v5 = v5_lanes[0];
        s5[0] = v5;
      }
      {
        const float v5_1 = s5[0];
        #pragma omp simd
        for (int64_t i7_0 = 0; i7_0 < 20; ++i7_0) {
          const float v4_2 = s4[i7_0];
          const float v7 = v4_2 / v5_1;
          o7[(i7_0 * 3) + block] = v7;
        }
      }
    }
  }
}
