extern "C" void softmax_bf16(const void* const* in, void* const* out, int64_t first_unit, int64_t last_unit) {
  alignas(64) unsigned char shared[448];
  co_bf16* const s1 = (co_bf16*)(shared + 0);
  co_bf16* const s4 = (co_bf16*)(shared + 16);
  co_bf16* const s5 = (co_bf16*)(shared + 0);
  for (int64_t unit = first_unit; unit < last_unit; ++unit) {
    const co_bf16* const __restrict a0 = (const co_bf16*)in[0] + unit * 210;
    co_bf16* const __restrict o7 = (co_bf16*)out[0] + unit * 210;
    {
      for (int64_t i1_0 = 0; i1_0 < 3; ++i1_0) {
        float v1_lanes[64];
        #pragma omp simd
        for (int64_t lane = 0; lane < 64; ++lane) {
          v1_lanes[lane] = (float)(-CO_INF);
        }
        for (int64_t r1_0_first = 0; r1_0_first < 64; r1_0_first += 64) {
          #pragma omp simd
          for (int64_t lane = 0; lane < 64; ++lane) {
            const int64_t r1_0 = r1_0_first + lane;
            const float v0 = a0[(i1_0 * 70) + r1_0];
            v1_lanes[lane] = co_maximum(v0, v1_lanes[lane]);
          }
        }
        #pragma omp simd
        for (int64_t lane = 0; lane < 6; ++lane) {
          const int64_t r1_0 = 64 + lane;
          const float v0 = a0[(i1_0 * 70) + r1_0];
          v1_lanes[lane] = co_maximum(v0, v1_lanes[lane]);
        }
        #pragma omp simd
        for (int64_t lane = 0; lane < 32; ++lane) {
          v1_lanes[lane] = co_maximum(v1_lanes[lane + 32], v1_lanes[lane]);
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
        s1[i1_0] = v1;
      }
    }
    {
      for (int64_t i4_0 = 0; i4_0 < 3; ++i4_0) {
        const float v1_1 = s1[i4_0];
        #pragma omp simd
        for (int64_t i4_1 = 0; i4_1 < 70; ++i4_1) {
          const float v0_1 = a0[(i4_0 * 70) + i4_1];
          const float v3 = v0_1 - v1_1;
          const float v4 = co_exp(v3);
          s4[(i4_0 * 70) + i4_1] = v4;
        }
      }
    }
    {
      for (int64_t i5_0 = 0; i5_0 < 3; ++i5_0) {
        float v5_lanes[64];
        #pragma omp simd
        for (int64_t lane = 0; lane < 64; ++lane) {
          v5_lanes[lane] = 0.0f;
        }
        for (int64_t r5_0_first = 0; r5_0_first < 64; r5_0_first += 64) {
          #pragma omp simd
          for (int64_t lane = 0; lane < 64; ++lane) {
            const int64_t r5_0 = r5_0_first + lane;
            const float v4_1 = s4[(i5_0 * 70) + r5_0];
            v5_lanes[lane] = v5_lanes[lane] + v4_1;
          }
        }
        #pragma omp simd
        for (int64_t lane = 0; lane < 6; ++lane) {
          const int64_t r5_0 = 64 + lane;
          const float v4_1 = s4[(i5_0 * 70) + r5_0];
          v5_lanes[lane] = v5_lanes[lane] + v4_1;
        }
        #pragma omp simd
        for (int64_t lane = 0; lane < 32; ++lane) {
          v5_lanes[lane] = v5_lanes[lane] + v5_lanes[lane + 32];
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
        s5[i5_0] = v5;
      }
    }
    {
      for (int64_t i7_0 = 0; i7_0 < 3; ++i7_0) {
        const float v5_1 = s5[i7_0];
        #pragma omp simd
        for (int64_t i7_1 = 0; i7_1 < 70; ++i7_1) {
          const float v4_2 = s4[(i7_0 * 70) + i7_1];
          const float v7 = v4_2 / v5_1;
          o7[(i7_0 * 70) + i7_1] = v7;
        }
      }
    }
  }
}
