extern "C" void layer_norm_warp(const void* const* in, void* const* out, int64_t first_unit, int64_t last_unit) {
  const float* const __restrict a1 = (const float*)in[1];
  const float* const __restrict a2 = (const float*)in[2];
  alignas(64) unsigned char shared[4640];
  float* const s4 = (float*)(shared + 0);
  float* const s7 = (float*)(shared + 32);
  float* const s8 = (float*)(shared + 2336);
  float* const s9 = (float*)(shared + 0);
  for (int64_t unit = first_unit; unit < last_unit; ++unit) {
    const float* const __restrict a0 = (const float*)in[0] + unit * 576;
    float* const __restrict o19 = (float*)out[0] + unit * 576;
    {
      for (int64_t i4_0 = 0; i4_0 < 6; ++i4_0) {
        float v4_lanes[64];
        #pragma omp simd
        for (int64_t lane = 0; lane < 64; ++lane) {
          v4_lanes[lane] = 0.0f;
        }
        for (int64_t r4_0_first = 0; r4_0_first < 64; r4_0_first += 64) {
          #pragma omp simd
          for (int64_t lane = 0; lane < 64; ++lane) {
            const int64_t r4_0 = r4_0_first + lane;
            const float v0 = a0[(i4_0 * 96) + r4_0];
            v4_lanes[lane] = v4_lanes[lane] + v0;
          }
        }
        #pragma omp simd
        for (int64_t lane = 0; lane < 32; ++lane) {
          const int64_t r4_0 = 64 + lane;
          const float v0 = a0[(i4_0 * 96) + r4_0];
          v4_lanes[lane] = v4_lanes[lane] + v0;
        }
        #pragma omp simd
        for (int64_t lane = 0; lane < 32; ++lane) {
          v4_lanes[lane] = v4_lanes[lane] + v4_lanes[lane + 32];
        }
        #pragma omp simd
        for (int64_t lane = 0; lane < 16; ++lane) {
          v4_lanes[lane] = v4_lanes[lane] + v4_lanes[lane + 16];
        }
        #pragma omp simd
        for (int64_t lane = 0; lane < 8; ++lane) {
          v4_lanes[lane] = v4_lanes[lane] + v4_lanes[lane + 8];
        }
        #pragma omp simd
        for (int64_t lane = 0; lane < 4; ++lane) {
          v4_lanes[lane] = v4_lanes[lane] + v4_lanes[lane + 4];
        }
        v4_lanes[0] = v4_lanes[0] + v4_lanes[2];
        v4_lanes[1] = v4_lanes[1] + v4_lanes[3];
        v4_lanes[0] = v4_lanes[0] + v4_lanes[1];
        const float v4 = v4_lanes[0];
        s4[i4_0] = v4;
      }
    }
    {
      for (int64_t i7_0 = 0; i7_0 < 6; ++i7_0) {
        const float v4_1 = s4[i7_0];
        const float v5 = v4_1 * 0.010416666977107525f;
        #pragma omp simd
        for (int64_t i7_1 = 0; i7_1 < 96; ++i7_1) {
          const float v0_1 = a0[(i7_0 * 96) + i7_1];
          const float v7 = v0_1 - v5;
          s7[(i7_0 * 96) + i7_1] = v7;
        }
      }
    }
    {
      #pragma omp simd
      for (int64_t i8_1 = 0; i8_1 < 576; ++i8_1) {
        const float v7_1 = s7[i8_1];
        const float v8 = v7_1 * v7_1;
        s8[i8_1] = v8;
      }
    }
    {
      for (int64_t i9_0 = 0; i9_0 < 6; ++i9_0) {
        float v9_lanes[64];
        #pragma omp simd
        for (int64_t lane = 0; lane < 64; ++lane) {
          v9_lanes[lane] = 0.0f;
        }
        for (int64_t r9_0_first = 0; r9_0_first < 64; r9_0_first += 64) {
          #pragma omp simd
          for (int64_t lane = 0; lane < 64; ++lane) {
            const int64_t r9_0 = r9_0_first + lane;
            const float v8_1 = s8[(i9_0 * 96) + r9_0];
            v9_lanes[lane] = v9_lanes[lane] + v8_1;
          }
        }
        #pragma omp simd
        for (int64_t lane = 0; lane < 32; ++lane) {
          const int64_t r9_0 = 64 + lane;
          const float v8_1 = s8[(i9_0 * 96) + r9_0];
          v9_lanes[lane] = v9_lanes[lane] + v8_1;
        }
        #pragma omp simd
        for (int64_t lane = 0; lane < 32; ++lane) {
          v9_lanes[lane] = v9_lanes[lane] + v9_lanes[lane + 32];
        }
        #pragma omp simd
        for (int64_t lane = 0; lane < 16; ++lane) {
          v9_lanes[lane] = v9_lanes[lane] + v9_lanes[lane + 16];
        }
        #pragma omp simd
        for (int64_t lane = 0; lane < 8; ++lane) {
          v9_lanes[lane] = v9_lanes[lane] + v9_lanes[lane + 8];
        }
        #pragma omp simd
        for (int64_t lane = 0; lane < 4; ++lane) {
          v9_lanes[lane] = v9_lanes[lane] + v9_lanes[lane + 4];
        }
        v9_lanes[0] = v9_lanes[0] + v9_lanes[2];
        v9_lanes[1] = v9_lanes[1] + v9_lanes[3];
        v9_lanes[0] = v9_lanes[0] + v9_lanes[1];
        const float v9 = v9_lanes[0];
        s9[i9_0] = v9;
      }
    }
    {
      for (int64_t i19_0 = 0; i19_0 < 6; ++i19_0) {
        const float v9_1 = s9[i19_0];
        const float v10 = v9_1 * 0.010416666977107525f;
        const float v12 = v10 + 9.999999747378752e-06f;
        const float v13 = co_rsqrt(v12);
        #pragma omp simd
        for (int64_t i19_1 = 0; i19_1 < 96; ++i19_1) {
          const float v7_2 = s7[(i19_0 * 96) + i19_1];
          const float v15 = v7_2 * v13;
          const float v1 = a1[i19_1];
          const float v17 = v15 * v1;
          const float v2 = a2[i19_1];
          const float v19 = v17 + v2;
          o19[(i19_0 * 96) + i19_1] = v19;
        }
      }
    }
  }
}
