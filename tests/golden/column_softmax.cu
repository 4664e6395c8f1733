struct co_segment { int64_t first_block, kernel; void* arrays[2]; };
static __device__ void column_softmax_0_block(void* const* arrays, int64_t unit, int block, unsigned char* shared) {
  const float* const __restrict__ a0 = (const float*)arrays[0] + unit * 60;
  float* const __restrict__ o7 = (float*)arrays[1] + unit * 60;
  float* const s1 = (float*)(shared + 0);
  float* const s4 = (float*)(shared + 64);
  float* const s5 = (float*)(shared + 1024);
  for (int turn = threadIdx.x / 32; turn < 1; turn += 2) {
    float v1 = (float)(-CO_INF);
    for (int r1_0 = threadIdx.x % 32; r1_0 < 20; r1_0 += 32) {
      const float v0 = a0[(r1_0 * 3) + block];
      v1 = co_maximum(v0, v1);
    }
    for (int step = 16; step; step /= 2) {
      v1 = co_maximum(__shfl_xor_sync(0xffffffffu, v1, step), v1);
    }
    if (threadIdx.x % 32 == 0) s1[0] = v1;
  }
  __syncthreads();
  for (int i4_0 = threadIdx.x; i4_0 < 20; i4_0 += 64) {
    const float v0_1 = a0[(i4_0 * 3) + block];
    const float v1_1 = s1[0];
    const float v3 = v0_1 - v1_1;
    const float v4 = co_exp(v3);
    s4[i4_0] = v4;
  }
  for (int turn = threadIdx.x / 32; turn < 1; turn += 2) {
    float v5 = 0.0f;
    for (int r5_0 = threadIdx.x % 32; r5_0 < 20; r5_0 += 32) {
      const float v4_1 = s4[r5_0];
      v5 = v5 + v4_1;
    }
    for (int step = 16; step; step /= 2) {
      v5 = v5 + __shfl_xor_sync(0xffffffffu, v5, step);
    }
    if (threadIdx.x % 32 == 0) s5[0] = v5;
  }
  __syncthreads();
  for (int i7_0 = threadIdx.x; i7_0 < 20; i7_0 += 64) {
    const float v4_2 = s4[i7_0];
    const float v5_1 = s5[0];
    const float v7 = v4_2 / v5_1;
    o7[(i7_0 * 3) + block] = v7;
  }
}
extern "C" __global__ void __launch_bounds__(64) column_softmax(const co_segment* segments, int count) {
  alignas(16) __shared__ unsigned char shared[1088];
  int low = 0, high = count;  // the last segment that begins at or before this block
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (segments[middle].first_block <= blockIdx.x) low = middle; else high = middle;
  }
  const co_segment* const segment = segments + low;
  const int64_t at = blockIdx.x - segment->first_block;
  column_softmax_0_block(segment->arrays, at / 3, (int)(at % 3), shared);
}
