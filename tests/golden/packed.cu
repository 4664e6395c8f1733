struct co_segment { int64_t first_block, kernel; void* arrays[4]; };
static __device__ void layer_norm_block_block(void* const* arrays, int64_t unit, int block, unsigned char* shared) {
  const float* const __restrict__ a0 = (const float*)arrays[0] + unit * 384;
  const float* const __restrict__ a1 = (const float*)arrays[1];
  const float* const __restrict__ a2 = (const float*)arrays[2];
  float* const __restrict__ o19 = (float*)arrays[3] + unit * 384;
  float* const s4 = (float*)(shared + 0);
  float* const s7 = (float*)(shared + 16);
  float* const s8 = (float*)(shared + 1552);
  float* const s9 = (float*)(shared + 0);
  unsigned char* const partials = shared + 3088;
  int side = 0;
  for (int turn = 0; turn < 1; turn += 1) {
    float v4 = 0.0f;
    for (int r4_0 = threadIdx.x; r4_0 < 384; r4_0 += 128) {
      const float v0 = a0[r4_0];
      v4 = v4 + v0;
    }
    for (int step = 16; step; step /= 2) {
      v4 = v4 + __shfl_xor_sync(0xffffffffu, v4, step);
    }
    float* const v4_partial = (float*)partials + side * 4;
    side ^= 1;
    if (threadIdx.x % 32 == 0) v4_partial[threadIdx.x / 32] = v4;
    __syncthreads();
    v4 = v4_partial[0];
    for (int warp = 1; warp < 4; ++warp) {
      v4 = v4 + (float)v4_partial[warp];
    }
    if (threadIdx.x == 0) s4[0] = v4;
  }
  __syncthreads();
  for (int i7_1 = threadIdx.x; i7_1 < 384; i7_1 += 128) {
    const float v0_1 = a0[i7_1];
    const float v4_1 = s4[0];
    const float v5 = v4_1 * 0.0026041667442768812f;
    const float v7 = v0_1 - v5;
    s7[i7_1] = v7;
  }
  for (int i8_1 = threadIdx.x; i8_1 < 384; i8_1 += 128) {
    const float v7_1 = s7[i8_1];
    const float v8 = v7_1 * v7_1;
    s8[i8_1] = v8;
  }
  for (int turn = 0; turn < 1; turn += 1) {
    float v9 = 0.0f;
    for (int r9_0 = threadIdx.x; r9_0 < 384; r9_0 += 128) {
      const float v8_1 = s8[r9_0];
      v9 = v9 + v8_1;
    }
    for (int step = 16; step; step /= 2) {
      v9 = v9 + __shfl_xor_sync(0xffffffffu, v9, step);
    }
    float* const v9_partial = (float*)partials + side * 4;
    side ^= 1;
    if (threadIdx.x % 32 == 0) v9_partial[threadIdx.x / 32] = v9;
    __syncthreads();
    v9 = v9_partial[0];
    for (int warp = 1; warp < 4; ++warp) {
      v9 = v9 + (float)v9_partial[warp];
    }
    if (threadIdx.x == 0) s9[0] = v9;
  }
  __syncthreads();
  for (int i19_1 = threadIdx.x; i19_1 < 384; i19_1 += 128) {
    const float v7_2 = s7[i19_1];
    const float v9_1 = s9[0];
    const float v10 = v9_1 * 0.0026041667442768812f;
    const float v12 = v10 + 9.999999747378752e-06f;
    const float v13 = co_rsqrt(v12);
    const float v15 = v7_2 * v13;
    const float v1 = a1[i19_1];
    const float v17 = v15 * v1;
    const float v2 = a2[i19_1];
    const float v19 = v17 + v2;
    o19[i19_1] = v19;
  }
}
static __device__ void gelu_block(void* const* arrays, int64_t unit, int block, unsigned char* shared) {
  const float* const __restrict__ a0 = (const float*)arrays[0] + unit * 1536;
  float* const __restrict__ o8 = (float*)arrays[1] + unit * 1536;
  for (int i8_0 = threadIdx.x; i8_0 < 1536; i8_0 += 256) {
    const float v0 = a0[i8_0];
    const float v2 = v0 * 0.5f;
    const float v4 = v0 * 0.7071067690849304f;
    const float v7 = co_one_plus_erf(v4);
    const float v8 = v2 * v7;
    o8[i8_0] = v8;
  }
}
static __device__ void paper_attention_block(void* const* arrays, int64_t unit, int block, unsigned char* shared) {
  const float* const __restrict__ a0 = (const float*)arrays[0] + unit * 867;
  const float* const __restrict__ a1 = (const float*)arrays[1] + unit * 1632;
  float* const __restrict__ o10 = (float*)arrays[2] + unit * 1632;
  float* const s2 = (float*)(shared + 1156);
  float* const s5 = (float*)(shared + 0);
  float* const s6 = (float*)(shared + 1156);
  float* const s8 = (float*)(shared + 0);
  for (int i2_0 = threadIdx.x; i2_0 < 17; i2_0 += 64) {
    float v2 = (float)(-CO_INF);
    for (int r2_0 = 0; r2_0 < 17; ++r2_0) {
      const float v0 = a0[((block * 289) + (i2_0 * 17)) + r2_0];
      v2 = co_maximum(v0, v2);
    }
    s2[i2_0] = v2;
  }
  __syncthreads();
  for (int turn = threadIdx.x; turn < 289; turn += 64) {
    const int i5_0 = turn / 17;
    const int i5_1 = turn % 17;
    const float v0_1 = a0[((block * 289) + (i5_0 * 17)) + i5_1];
    const float v2_1 = s2[i5_0];
    const float v4 = v0_1 - v2_1;
    const float v5 = co_exp(v4);
    s5[(i5_0 * 17) + i5_1] = v5;
  }
  __syncthreads();
  for (int i6_0 = threadIdx.x; i6_0 < 17; i6_0 += 64) {
    float v6 = 0.0f;
    for (int r6_0 = 0; r6_0 < 17; ++r6_0) {
      const float v5_1 = s5[(i6_0 * 17) + r6_0];
      v6 = v6 + v5_1;
    }
    s6[i6_0] = v6;
  }
  __syncthreads();
  for (int turn = threadIdx.x; turn < 289; turn += 64) {
    const int i8_0 = turn / 17;
    const int i8_1 = turn % 17;
    const float v5_2 = s5[(i8_0 * 17) + i8_1];
    const float v6_1 = s6[i8_0];
    const float v8 = v5_2 / v6_1;
    s8[(i8_0 * 17) + i8_1] = v8;
  }
  __syncthreads();
  for (int turn = threadIdx.x; turn < 544; turn += 64) {
    const int i10_1 = turn / 32;
    const int i10_2 = turn % 32;
    float v10 = 0.0f;
    for (int r10_0 = 0; r10_0 < 17; ++r10_0) {
      const float v8_1 = s8[(i10_1 * 17) + r10_0];
      const float v1 = a1[((block * 544) + (r10_0 * 32)) + i10_2];
      v10 = v10 + (v8_1 * v1);
    }
    o10[((block * 544) + (i10_1 * 32)) + i10_2] = v10;
  }
}
extern "C" __global__ void __launch_bounds__(256) packed(const co_segment* segments, int count) {
  alignas(16) __shared__ unsigned char shared[3152];
  int low = 0, high = count;  // the last segment that begins at or before this block
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (segments[middle].first_block <= blockIdx.x) low = middle; else high = middle;
  }
  const co_segment* const segment = segments + low;
  const int64_t at = blockIdx.x - segment->first_block;
  if (segment->kernel == 0 && threadIdx.x < 128) layer_norm_block_block(segment->arrays, at, 0, shared);
  if (segment->kernel == 1) gelu_block(segment->arrays, at, 0, shared);
  if (segment->kernel == 2 && threadIdx.x < 64) paper_attention_block(segment->arrays, at / 3, (int)(at % 3), shared);
}
