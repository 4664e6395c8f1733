struct co_segment { int64_t first_block, kernel; void* arrays[2]; };
static __device__ void softmax_f64_0_block(void* const* arrays, int64_t unit, int block, unsigned char* shared) {
  const double* const __restrict__ a0 = (const double*)arrays[0] + unit * 66;
  double* const __restrict__ o7 = (double*)arrays[1] + unit * 66;
  double* const s1 = (double*)(shared + 0);
  double* const s4 = (double*)(shared + 16);
  double* const s5 = (double*)(shared + 0);
  unsigned char* const partials = shared + 544;
  int side = 0;
  for (int i1_0 = 0; i1_0 < 2; i1_0 += 1) {
    double v1 = (double)(-CO_INF);
    for (int r1_0 = threadIdx.x; r1_0 < 33; r1_0 += 64) {
      const double v0 = a0[(i1_0 * 33) + r1_0];
      v1 = co_maximum(v0, v1);
    }
    for (int step = 16; step; step /= 2) {
      v1 = co_maximum(__shfl_xor_sync(0xffffffffu, v1, step), v1);
    }
    double* const v1_partial = (double*)partials + side * 2;
    side ^= 1;
    if (threadIdx.x % 32 == 0) v1_partial[threadIdx.x / 32] = v1;
    __syncthreads();
    v1 = v1_partial[0];
    for (int warp = 1; warp < 2; ++warp) {
      v1 = co_maximum((double)v1_partial[warp], v1);
    }
    if (threadIdx.x == 0) s1[i1_0] = v1;
  }
  __syncthreads();
  for (int turn = threadIdx.x; turn < 66; turn += 64) {
    const int i4_0 = turn / 33;
    const int i4_1 = turn % 33;
    const double v0_1 = a0[(i4_0 * 33) + i4_1];
    const double v1_1 = s1[i4_0];
    const double v3 = v0_1 - v1_1;
    const double v4 = co_exp(v3);
    s4[(i4_0 * 33) + i4_1] = v4;
  }
  for (int i5_0 = 0; i5_0 < 2; i5_0 += 1) {
    double v5 = 0.0;
    for (int r5_0 = threadIdx.x; r5_0 < 33; r5_0 += 64) {
      const double v4_1 = s4[(i5_0 * 33) + r5_0];
      v5 = v5 + v4_1;
    }
    for (int step = 16; step; step /= 2) {
      v5 = v5 + __shfl_xor_sync(0xffffffffu, v5, step);
    }
    double* const v5_partial = (double*)partials + side * 2;
    side ^= 1;
    if (threadIdx.x % 32 == 0) v5_partial[threadIdx.x / 32] = v5;
    __syncthreads();
    v5 = v5_partial[0];
    for (int warp = 1; warp < 2; ++warp) {
      v5 = v5 + (double)v5_partial[warp];
    }
    if (threadIdx.x == 0) s5[i5_0] = v5;
  }
  __syncthreads();
  for (int turn = threadIdx.x; turn < 66; turn += 64) {
    const int i7_0 = turn / 33;
    const int i7_1 = turn % 33;
    const double v4_2 = s4[(i7_0 * 33) + i7_1];
    const double v5_1 = s5[i7_0];
    const double v7 = v4_2 / v5_1;
    o7[(i7_0 * 33) + i7_1] = v7;
  }
}
extern "C" __global__ void __launch_bounds__(64) softmax_f64(const co_segment* segments, int count) {
  alignas(16) __shared__ unsigned char shared[576];
  int low = 0, high = count;  // the last segment that begins at or before this block
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (segments[middle].first_block <= blockIdx.x) low = middle; else high = middle;
  }
  const co_segment* const segment = segments + low;
  const int64_t at = blockIdx.x - segment->first_block;
  softmax_f64_0_block(segment->arrays, at, 0, shared);
}
