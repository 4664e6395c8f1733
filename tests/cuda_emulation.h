// Runs CUDA C++ on the host: threads of a block are fibres, in an order drawn from a seed.
//
// Between two points where threads wait (barriers, shuffles) each thread runs at one go; which
// one is next is drawn. Blocks come in a drawn order, and shared memory starts as noise. So code
// that lacks a barrier gives wrong numbers with some seed. `co_skip` is the number of a barrier,
// in the order of the source, that does nothing: how tests see that each one is needed.
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <ucontext.h>

#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(threads)
#define __shared__ __attribute__((section("co_shared"))) static
#define __syncthreads() co_barrier(__COUNTER__ - co_first_barrier - 1)

struct co_index { unsigned x, y, z; };
static co_index blockIdx, threadIdx;
__attribute__((section("co_shared"), used)) static unsigned char co_some_shared[1];
extern unsigned char __start_co_shared[], __stop_co_shared[];
static int co_skip = -1;

enum co_state { CO_READY, CO_AT_BARRIER, CO_AT_SHUFFLE, CO_DONE };
struct co_fibre {
  ucontext_t context;
  co_state state;
  uint64_t given, taken;  // by a shuffle
};
static std::vector<co_fibre> co_fibres;
static std::vector<char> co_stacks;
static ucontext_t co_scheduler;
static uint64_t co_random_state;
static void (*co_kernel)(const void*, int);
static const void* co_segments;
static int co_segment_count;

static unsigned co_random(unsigned limit) {
  co_random_state = co_random_state * 6364136223846793005ull + 1442695040888963407ull;
  return (unsigned)((co_random_state >> 33) % limit);
}

static __attribute__((noinline)) void co_wait(co_state state) {
  co_fibre& mine = co_fibres[threadIdx.x];
  mine.state = state;
  swapcontext(&mine.context, &co_scheduler);
}

static void co_barrier(int number) {
  if (number != co_skip) co_wait(CO_AT_BARRIER);
}

template <class T> static T __shfl_xor_sync(unsigned, T value, int step) {
  co_fibre& mine = co_fibres[threadIdx.x];
  const unsigned other = threadIdx.x ^ step;
  mine.given = 0;
  memcpy(&mine.given, &value, sizeof value);
  co_wait(CO_AT_SHUFFLE);
  T found;
  memcpy(&found, &co_fibres[other].taken, sizeof found);
  return found;
}

static void co_run_thread() {
  co_kernel(co_segments, co_segment_count);
  co_wait(CO_DONE);
}

// If all threads of the warp are at a shuffle, they exchange and are ready.
static void co_exchange(unsigned warp, std::vector<unsigned>& ready) {
  for (unsigned t = warp; t < warp + 32; ++t)
    if (co_fibres[t].state != CO_AT_SHUFFLE) return;
  for (unsigned t = warp; t < warp + 32; ++t) {
    co_fibres[t].taken = co_fibres[t].given;
    co_fibres[t].state = CO_READY;
    ready.push_back(t);
  }
}

// If all threads that are left are at a barrier, they are ready; false if none is left to run.
static bool co_pass_barrier(std::vector<unsigned>& ready) {
  for (co_fibre& fibre : co_fibres)
    if (fibre.state == CO_AT_SHUFFLE) return false;
  for (unsigned t = 0; t < co_fibres.size(); ++t) {
    if (co_fibres[t].state != CO_AT_BARRIER) continue;
    co_fibres[t].state = CO_READY;
    ready.push_back(t);
  }
  return !ready.empty();
}

// Whether the block came to its end.
static bool co_run_block(unsigned threads) {
  const size_t stack = 1 << 16;
  co_fibres.resize(threads);
  co_stacks.resize(stack * threads);
  std::vector<unsigned> ready;
  for (unsigned t = 0; t < threads; ++t) {
    co_fibre& fibre = co_fibres[t];
    fibre.state = CO_READY;
    getcontext(&fibre.context);
    fibre.context.uc_stack.ss_sp = co_stacks.data() + stack * t;
    fibre.context.uc_stack.ss_size = stack;
    makecontext(&fibre.context, co_run_thread, 0);
    ready.push_back(t);
  }
  // In every other block those that became ready last go first: a warp may run far ahead.
  const bool ahead = co_random(2);
  while (!ready.empty() || co_pass_barrier(ready)) {
    const unsigned size = (unsigned)ready.size();
    const unsigned pick = ahead && size > 32 ? size - 1 - co_random(32) : co_random(size);
    const unsigned t = ready[pick];
    ready.erase(ready.begin() + pick);
    threadIdx.x = t;
    swapcontext(&co_scheduler, &co_fibres[t].context);
    if (co_fibres[t].state == CO_AT_SHUFFLE) co_exchange(t / 32 * 32, ready);
  }
  for (co_fibre& fibre : co_fibres)
    if (fibre.state != CO_DONE) return false;
  return true;
}

// 0, or the number of the first block (from 1) whose threads wait for each other for ever.
static int co_run_grid(void (*kernel)(const void*, int), const void* segments, int count,
                       unsigned blocks, unsigned threads, uint64_t seed, int skip) {
  co_kernel = kernel, co_segments = segments, co_segment_count = count, co_skip = skip;
  co_random_state = seed;
  std::vector<unsigned> order(blocks);
  for (unsigned b = 0; b < blocks; ++b) order[b] = b;
  for (unsigned left = blocks; left; --left) {
    const unsigned pick = co_random(left);
    blockIdx.x = order[pick];
    order[pick] = order[left - 1];
    for (unsigned char* byte = __start_co_shared; byte < __stop_co_shared; ++byte)
      *byte = (unsigned char)co_random(256);
    if (!co_run_block(threads)) return (int)blockIdx.x + 1;
  }
  return 0;
}

enum { co_first_barrier = __COUNTER__ };
