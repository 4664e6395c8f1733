extern "C" void paper_attention(const void* const* in, void* const* out, int64_t first_unit, int64_t last_unit) {
  alignas(64) unsigned char shared[1224];
  float* const s2 = (float*)(shared + 1156);
  float* const s5 = (float*)(shared + 0);
  float* const s6 = (float*)(shared + 1156);
  float* const s8 = (float*)(shared + 0);
  for (int64_t unit = first_unit; unit < last_unit; ++unit) {
    const float* const __restrict a0 = (const float*)in[0] + unit * 867;
    const float* const __restrict a1 = (const float*)in[1] + unit * 1632;
    float* const __restrict o10 = (float*)out[0] + unit * 1632;
    for (int64_t block = 0; block < 3; ++block) {
      {
        for (int64_t i2_0 = 0; i2_0 < 17; ++i2_0) {
          float v2_lanes[32];
          #pragma omp simd
          for (int64_t lane = 0; lane < 32; ++lane) {
            v2_lanes[lane] = (float)(-CO_INF);
          }
          #pragma omp simd
          for (int64_t lane = 0; lane < 17; ++lane) {
            const int64_t r2_0 = 0 + lane;
            const float v0 = a0[((block * 289) + (i2_0 * 17)) + r2_0];
            v2_lanes[lane] = co_maximum(v0, v2_lanes[lane]);
          }
          #pragma omp simd
          for (int64_t lane = 0; lane < 16; ++lane) {
            v2_lanes[lane] = co_maximum(v2_lanes[lane + 16], v2_lanes[lane]);
          }
          #pragma omp simd
          for (int64_t lane = 0; lane < 8; ++lane) {
            v2_lanes[lane] = co_maximum(v2_lanes[lane + 8], v2_lanes[lane]);
          }
          #pragma omp simd
          for (int64_t lane = 0; lane < 4; ++lane) {
            v2_lanes[lane] = co_maximum(v2_lanes[lane + 4], v2_lanes[lane]);
          }
          v2_lanes[0] = co_maximum(v2_lanes[2], v2_lanes[0]);
          v2_lanes[1] = co_maximum(v2_lanes[3], v2_lanes[1]);
          v2_lanes[0] = co_maximum(v2_lanes[1], v2_lanes[0]);
          const float v2 = v2_lanes[0];
          s2[i2_0] = v2;
        }
      }
      {
        for (int64_t i5_0 = 0; i5_0 < 17; ++i5_0) {
          const float v2_1 = s2[i5_0];
          #pragma omp simd
          for (int64_t i5_1 = 0; i5_1 < 17; ++i5_1) {
            const float v0_1 = a0[((block * 289) + (i5_0 * 17)) + i5_1];
            const float v4 = v0_1 - v2_1;
            const float v5 = co_exp(v4);
            s5[(i5_0 * 17) + i5_1] = v5;
          }
        }
      }
      {
        for (int64_t i6_0 = 0; i6_0 < 17; ++i6_0) {
          float v6_lanes[32];
          #pragma omp simd
          for (int64_t lane = 0; lane < 32; ++lane) {
            v6_lanes[lane] = 0.0f;
          }
          #pragma omp simd
          for (int64_t lane = 0; lane < 17; ++lane) {
            const int64_t r6_0 = 0 + lane;
            const float v5_1 = s5[(i6_0 * 17) + r6_0];
            v6_lanes[lane] = v6_lanes[lane] + v5_1;
          }
          #pragma omp simd
          for (int64_t lane = 0; lane < 16; ++lane) {
            v6_lanes[lane] = v6_lanes[lane] + v6_lanes[lane + 16];
          }
          #pragma omp simd
          for (int64_t lane = 0; lane < 8; ++lane) {
            v6_lanes[lane] = v6_lanes[lane] + v6_lanes[lane + 8];
          }
          #pragma omp simd
          for (int64_t lane = 0; lane < 4; ++lane) {
            v6_lanes[lane] = v6_lanes[lane] + v6_lanes[lane + 4];
          }
          v6_lanes[0] = v6_lanes[0] + v6_lanes[2];
          v6_lanes[1] = v6_lanes[1] + v6_lanes[3];
          v6_lanes[0] = v6_lanes[0] + v6_lanes[1];
          const float v6 = v6_lanes[0];
          s6[i6_0] = v6;
        }
      }
      {
        for (int64_t i8_0 = 0; i8_0 < 17; ++i8_0) {
          const float v6_1 = s6[i8_0];
          #pragma omp simd
          for (int64_t i8_1 = 0; i8_1 < 17; ++i8_1) {
            const float v5_2 = s5[(i8_0 * 17) + i8_1];
            const float v8 = v5_2 / v6_1;
            s8[(i8_0 * 17) + i8_1] = v8;
          }
        }
      }
      {
        for (int64_t i10_1 = 0; i10_1 < 17; ++i10_1) {
          for (int64_t i10_2_first = 0; i10_2_first < 32; i10_2_first += 32) {
            float v10_lanes[32];
            #pragma omp simd
            for (int64_t lane = 0; lane < 32; ++lane) {
              v10_lanes[lane] = 0.0f;
            }
            for (int64_t r10_0 = 0; r10_0 < 17; ++r10_0) {
              const float v8_1 = s8[(i10_1 * 17) + r10_0];
              #pragma omp simd
              for (int64_t lane = 0; lane < 32; ++lane) {
                const int64_t i10_2 = i10_2_first + lane;
                const float v1 = a1[((block * 544) + (r10_0 * 32)) + i10_2];
                v10_lanes[lane] = v10_lanes[lane] + (v8_1 * v1);
              }
            }
            #pragma omp simd
            for (int64_t lane = 0; lane < 32; ++lane) {
              const int64_t i10_2 = i10_2_first + lane;
              const float v10 = v10_lanes[lane];
              o10[((block * 544) + (i10_1 * 32)) + i10_2] = v10;
            }
          }
        }
      }
    }
  }
}
