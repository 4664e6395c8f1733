struct co_segment { int64_t first_block, kernel; void* arrays[2]; };
static __device__ void softmax_bf16_0_block(void* const* arrays, int64_t unit, int block, unsigned char* shared) {
  const co_bf16* const __restrict__ a0 = (const co_bf16*)arrays[0] + unit * 210;
  co_bf16* const __restrict__ o7 = (co_bf16*)arrays[1] + unit * 210;
  co_bf16* const s1 = (co_bf16*)(shared + 0);
  co_bf16* const s4 = (co_bf16*)(shared + 16);
  co_bf16* const s5 = (co_bf16*)(shared + 0);
  for (int i1_0 = threadIdx.x / 32; i1_0 < 3; i1_0 += 2) {
    float v1 = (float)(-CO_INF);
    for (int r1_0 = threadIdx.x % 32; r1_0 < 70; r1_0 += 32) {
      const float v0 = a0[(i1_0 * 70) + r1_0];
      v1 = co_maximum(v0, v1);
    }
    for (int step = 16; step; step /= 2) {
      v1 = co_maximum(__shfl_xor_sync(0xffffffffu, v1, step), v1);
    }
    if (threadIdx.x % 32 == 0) s1[i1_0] = v1;
  }
  __syncthreads();
  for (int turn = threadIdx.x; turn < 210; turn += 64) {
    const int i4_0 = turn / 70;
    const int i4_1 = turn % 70;
    const float v0_1 = a0[(i4_0 * 70) + i4_1];
    const float v1_1 = s1[i4_0];
    const float v3 = v0_1 - v1_1;
    const float v4 = co_exp(v3);
    s4[(i4_0 * 70) + i4_1] = v4;
  }
  __syncthreads();
  for (int i5_0 = threadIdx.x / 32; i5_0 < 3; i5_0 += 2) {
    float v5 = 0.0f;
    for (int r5_0 = threadIdx.x % 32; r5_0 < 70; r5_0 += 32) {
      const float v4_1 = s4[(i5_0 * 70) + r5_0];
      v5 = v5 + v4_1;
    }
    for (int step = 16; step; step /= 2) {
      v5 = v5 + __shfl_xor_sync(0xffffffffu, v5, step);
    }
    if (threadIdx.x % 32 == 0) s5[i5_0] = v5;
  }
  __syncthreads();
  for (int turn = threadIdx.x; turn < 210; turn += 64) {
    const int i7_0 = turn / 70;
    const int i7_1 = turn % 70;
    const float v4_2 = s4[(i7_0 * 70) + i7_1];
    const float v5_1 = s5[i7_0];
    const float v7 = v4_2 / v5_1;
    o7[(i7_0 * 70) + i7_1] = v7;
  }
}
extern "C" __global__ void __launch_bounds__(64) softmax_bf16(const co_segment* segments, int count) {
  alignas(16) __shared__ unsigned char shared[448];
  int low = 0, high = count;  // the last segment that begins at or before this block
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (segments[middle].first_block <= blockIdx.x) low = middle; else high = middle;
  }
  const co_segment* const segment = segments + low;
  const int64_t at = blockIdx.x - segment->first_block;
  softmax_bf16_0_block(segment->arrays, at, 0, shared);
}
