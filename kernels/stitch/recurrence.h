// The steps of one recurrent layer in one direction, for sequences of any lengths. A product with
// W_hh and the gates are one pass over tiles of hidden units; W_hh is read once per step and block
// of sequences. Included after CELL (0: RNN with relu, 1: with tanh, 3: GRU, 4: LSTM) and HIDDEN.
//
//   NAME       in:  from_x (tokens, gates, HIDDEN), with b_ih; panels; sequences (n, 3): first
//                   token, length, row, longest first; how (2): elements of a token of y, whether
//                   from the end. Units: sequences
//              out: y (tokens, ...), from the layer's place in a token on; h, and c of an LSTM
//                   (rows, HIDDEN)
//   NAME_pack  in:  W_hh (gates, HIDDEN, HIDDEN), b_hh (gates, HIDDEN). Units: one
//              out: panels (tiles, 1 + HIDDEN, gates, UNITS): b_hh and the columns of W_hh, zeros
//                   behind the last unit; never larger than gates * (HIDDEN + 64) * (1 + HIDDEN)
//
// A row's sums are in the order of HIDDEN whatever other rows there are, so it has the same bits.

constexpr int GATES = CELL < 2 ? 1 : CELL;
#ifdef __AVX512F__
constexpr int LANES = 16, REGISTERS = 32;
#elif defined(__AVX__)
constexpr int LANES = 8, REGISTERS = 16;
#else
constexpr int LANES = 4, REGISTERS = 16;
#endif
// Of sums per row: enough that do not wait for each other.
constexpr int VECTORS = GATES == 1 ? 4 : GATES, UNITS = VECTORS / GATES * LANES;
constexpr int TILES = (HIDDEN + UNITS - 1) / UNITS, PADDED = TILES * UNITS;
// Sequences whose sums are in registers, and those that advance together: while a tile of W_hh is
// in the first cache, all of them go over it.
constexpr int BLOCK = (REGISTERS - 4) / VECTORS;
constexpr int STACK_BYTES = 96 * 1024, FITTING = STACK_BYTES / (3 * 4 * PADDED);
constexpr int GROUP = FITTING > 12 ? 12 : FITTING;
static_assert(GROUP > 0, "the states do not fit the stack");

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef float state[PADDED];

struct Walk {
  const float *from_x, *panels;
  const int64_t *sequences;
  int64_t stride, reverse;
  float *y, *h, *c;
};

// `x`: a row's gates from x at a unit; `sums`: its gates from h.
CO_FN float advance(const float* x, const float* sums, int u, float before, float* c) {
#if CELL == 0
  const float sum = x[u] + sums[u];
  return sum < 0.0f ? 0.0f : sum;
#elif CELL == 1
  return co_tanh(x[u] + sums[u]);
#elif CELL == 3
  const float r = co_sigmoid(x[u] + sums[u]);
  const float z = co_sigmoid(x[UNITS + u] + sums[UNITS + u]);
  const float n = co_tanh(x[2 * UNITS + u] + r * sums[2 * UNITS + u]);
  return (1.0f - z) * n + z * before;
#else
  const float i = co_sigmoid(x[u] + sums[u]), f = co_sigmoid(x[UNITS + u] + sums[UNITS + u]);
  const float g = co_tanh(x[2 * UNITS + u] + sums[2 * UNITS + u]);
  const float o = co_sigmoid(x[3 * UNITS + u] + sums[3 * UNITS + u]);
  c[u] = f * c[u] + i * g;
  return o * co_tanh(c[u]);
#endif
}

template <int ROWS>
static void step(const Walk& walk, int tile, const int64_t* tokens, const state* h, state* next,
                 state* c) {
  vec sums[ROWS][VECTORS];
  const vec* weights = (const vec*)walk.panels + (int64_t)tile * (1 + HIDDEN) * VECTORS;
#pragma GCC unroll 8
  for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 16
    for (int i = 0; i < VECTORS; ++i) sums[row][i] = weights[i];
  for (int k = 0; k < HIDDEN; ++k) {
    weights += VECTORS;
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 16
      for (int i = 0; i < VECTORS; ++i) sums[row][i] += h[row][k] * weights[i];
  }
  float from_h[ROWS][GATES * UNITS];  // the sums stay in registers until here
#pragma GCC unroll 8
  for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 16
    for (int i = 0; i < VECTORS; ++i) ((vec*)from_h[row])[i] = sums[row][i];
  const int first = tile * UNITS, units = HIDDEN - first < UNITS ? HIDDEN - first : UNITS;
  for (int row = 0; row < ROWS; ++row) {
    float from_x[GATES * UNITS] = {};
    const float* x = walk.from_x + tokens[row] * (GATES * HIDDEN) + first;
    for (int gate = 0; gate < GATES; ++gate)
      memcpy(from_x + gate * UNITS, x + gate * HIDDEN, units * sizeof(float));
#pragma omp simd
    for (int u = 0; u < UNITS; ++u)
      next[row][first + u] = advance(from_x, from_h[row], u, h[row][first + u], c[row] + first);
    memcpy(walk.y + tokens[row] * walk.stride + first, next[row] + first, units * sizeof(float));
  }
}

template <int ROWS>
static void steps(int rows, const Walk& walk, int tile, const int64_t* tokens, const state* h,
                  state* next, state* c) {
  if constexpr (ROWS > 0) {
    if (rows == ROWS)
      step<ROWS>(walk, tile, tokens, h, next, c);
    else
      steps<ROWS - 1>(rows, walk, tile, tokens, h, next, c);
  }
}

extern "C" void NAME_pack(const void* const* in, void* const* out, int64_t, int64_t) {
  const float *const weights = (const float*)in[0], *const bias = (const float*)in[1];
  float* panel = (float*)out[0];
  for (int tile = 0; tile < TILES; ++tile)
    for (int k = -1; k < HIDDEN; ++k)
      for (int gate = 0; gate < GATES; ++gate)
        for (int u = 0; u < UNITS; ++u, ++panel) {
          const int unit = tile * UNITS + u, line = gate * HIDDEN + unit;
          *panel = unit >= HIDDEN ? 0.0f : k < 0 ? bias[line] : weights[line * HIDDEN + k];
        }
}

extern "C" void NAME(const void* const* in, void* const* out, int64_t first, int64_t last) {
  const int64_t* const how = (const int64_t*)in[3];
  const Walk walk = {(const float*)in[0], (const float*)in[1], (const int64_t*)in[2],
                     how[0], how[1], (float*)out[0], (float*)out[1],
                     GATES == 4 ? (float*)out[2] : nullptr};
  for (; first < last; first += GROUP) {
    alignas(64) state now[GROUP] = {}, next[GROUP], c[GROUP] = {};
    const int64_t(*sequences)[3] = (const int64_t(*)[3])walk.sequences + first;
    int rows = last - first < GROUP ? (int)(last - first) : GROUP;
    for (int64_t time = 0;; ++time) {
      for (; rows > 0 && sequences[rows - 1][1] == time; --rows) {
        const int64_t place = sequences[rows - 1][2] * HIDDEN;
        memcpy(walk.h + place, now[rows - 1], HIDDEN * sizeof(float));
        if (GATES == 4) memcpy(walk.c + place, c[rows - 1], HIDDEN * sizeof(float));
      }
      if (rows == 0) break;
      int64_t tokens[GROUP];
      for (int row = 0; row < rows; ++row) {
        const int64_t turn = walk.reverse ? sequences[row][1] - 1 - time : time;
        tokens[row] = sequences[row][0] + turn;
      }
      for (int tile = 0; tile < TILES; ++tile)
        for (int row = 0; row < rows; row += BLOCK)
          steps<BLOCK>(rows - row < BLOCK ? rows - row : BLOCK, walk, tile, tokens + row,
                       now + row, next + row, c + row);
      for (int row = 0; row < rows; ++row) memcpy(now[row], next[row], sizeof(state));
    }
  }
}
