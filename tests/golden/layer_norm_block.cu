struct co_segment { int64_t first_block, kernel; void* arrays[4]; };
static __device__ void layer_norm_block_0_block(void* const* arrays, int64_t unit, int block, unsigned char* shared) {
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
extern "C" __global__ void __launch_bounds__(128) layer_norm_block(const co_segment* segments, int count) {
  alignas(16) __shared__ unsigned char shared[3152];
  int low = 0, high = count;  // the last segment that begins at or before this block
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (segments[middle].first_block <= blockIdx.x) low = middle; else high = middle;
  }
  const co_segment* const segment = segments + low;
  const int64_t at = blockIdx.x - segment->first_block;
  layer_norm_block_0_block(segment->arrays, at, 0, shared);
}
